"""Constraints of scripts/test --floors: the lowest version that pyproject.toml allows of each package, then those of the tools.

Taken from what the installed headrace asks for. Packages of which only the tests have need are of the versions that
scripts/constraints.txt has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

# For moto with botocore 1.36, where pip would try each version from the newest on; and for typer 0.16 without a warning.
_COMPANIONS = ["boto3==1.36", "click==8.2.1"]
_TOOLS = {"dev", "docs", "emulators"}  # extras for those who work on headrace
_ASKED = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,]+\])?>=(?P<version>[\d.]+)(?:; extra == ['\"](?P<extra>\w+)['\"])?")


def floors_of(asked: Iterable[str]) -> dict[str, str]:
    """{package: its lowest version}, out of lines such as "torch>=2.4; extra == 'torch'"."""
    found = [match for line in asked if (match := _ASKED.fullmatch(line)) is not None]
    return {match["name"]: match["version"] for match in found if match["extra"] not in _TOOLS}


def constraints(floors: dict[str, str], pinned: Iterable[str]) -> list[str]:
    """Lines for pip. Where a package has a floor, `pinned` has no say in it."""
    names = {_plain(name) for name in floors}
    others = [line for line in pinned if line and line[0] != "#" and _plain(line.partition("==")[0]) not in names]
    return [f"{name}=={version}" for name, version in floors.items()] + _COMPANIONS + others


def _plain(name: str) -> str:
    """A name as the index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    lines = (Path(__file__).resolve().parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    print("\n".join(constraints(floors_of(requires("headrace") or ()), lines)))
