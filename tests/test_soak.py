"""The soak in short: a fixed run of cases ends as it may, the same number is the same case, and what is wrong is seen."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import prepare_ranks
from simulated_gpu import needs_compiler

import headrace
from headrace.testing.s3server.faults import ACTIONS

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # and stays: processes that a case starts import it too

from _soak.__main__ import Soak, main  # noqa: E402
from _soak.cases import Case, Shard, Tensor, Trouble, draw_case  # noqa: E402
from _soak.fuzzing import FILES, count_examples  # noqa: E402
from _soak.judging import SECRET, WrongError, check_error, explained  # noqa: E402
from _soak.keeping import Keeper  # noqa: E402
from _soak.troubles import SERVER  # noqa: E402
from _soak.watching import Watch  # noqa: E402

FIRST = 4200
SHARDS = (Shard("model.safetensors", (Tensor("a", "F32", (9,)), Tensor("b", "U8", (70_000,))), 3),)


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> None:
    prepare_ranks()


@pytest.fixture
def soak() -> Iterator[Soak]:
    with Soak(FIRST, talks=False) as running:
        yield running


def case(*troubles: Trouble, **more: Any) -> Case:
    given = {"place": "memory", "temper": "takes all", "step": 0, "device": "cpu", **more}
    return Case(1, "load", SHARDS, troubles=troubles, **given)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_cases_ends_as_it_may(soak: Soak) -> None:
    for number in range(FIRST, FIRST + 24):
        soak.run(number)
    found = soak.summary()
    assert found["failures"] == []
    assert found["left_in_shared_memory"] == {}
    assert found["loads"] == 24


def test_a_number_is_one_case_and_others_differ() -> None:
    assert [draw_case(number) for number in range(50)] == [draw_case(number) for number in range(50)]
    assert len({repr(draw_case(number)) for number in range(50)}) == 50


@pytest.mark.slow
def test_every_kind_of_place_device_temper_and_fault_is_drawn() -> None:
    cases = [draw_case(number) for number in range(3000)]
    assert {each.kind for each in cases} == {"load", "pull", "group"}
    assert {each.place for each in cases} == {"file", "shm", "memory", "s3", "http"}
    assert {each.device for each in cases} == {"cpu", "gpu", "shared-cpu"}
    assert SERVER.keys() <= {trouble.kind for each in cases for trouble in each.troubles}


def test_every_action_of_the_fault_server_is_in_the_table() -> None:
    made = {type(kind.make(random.Random(0))) for kind in SERVER.values()}
    assert set(ACTIONS.values()) <= made


def test_changed_bytes_are_drawn_for_loads_that_verify_alone() -> None:
    for each in map(draw_case, range(2000)):
        if {trouble.kind for trouble in each.troubles} & {"flip", "lying range", "read flipped"}:
            assert each.verifies


# ---- what is wrong is seen


def test_an_error_that_nothing_explains_is_wrong() -> None:
    with pytest.raises(WrongError):
        check_error(headrace.SourceError("x"), case())
    assert check_error(headrace.SourceError("x"), case(Trouble("read error", 0, 1, 0))) == "SourceError"


def test_a_fault_that_comes_once_explains_nothing() -> None:
    assert not explained(case(Trouble("503", 0, 1, 0), place="s3"))
    assert explained(case(Trouble("503", 0, 4, 0), place="s3"))


def test_an_error_that_tells_a_secret_is_wrong() -> None:
    with pytest.raises(WrongError):
        check_error(headrace.SourceError(f"signed with {SECRET}"), case(Trouble("read error", 0, 1, 0)))


def test_a_tensor_that_changes_later_is_wrong() -> None:
    keeper, tensor = Keeper(), torch.zeros(8)
    keeper.keep(1, "t", tensor)
    keeper.check()
    tensor[3] = 1
    with pytest.raises(WrongError):
        keeper.check()


def test_a_thread_a_descriptor_and_a_file_that_are_left_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = threading.Event()
    with Watch() as watch:
        with (tmp_path / "left").open("w"), pytest.raises(WrongError, match="descriptors"):
            watch.check(0)
        with pytest.raises(WrongError, match="temporary files"):
            watch.check(0)
        watch.begin()
        thread = threading.Thread(target=ended.wait, name="headrace-left")
        thread.start()
        monkeypatch.setattr("_soak.watching._JOIN_LIMIT_S", 0.0)
        with pytest.raises(WrongError, match="threads"):
            watch.check(0)
        ended.set()
        thread.join()
        watch.check(0)


@pytest.mark.parametrize(
    "counts",
    [
        (
            "7 passing examples, 1 failing examples, 9 invalid examples",
            "2 passing examples, 0 failing examples, 0 invalid examples",
        ),
        ("7 passing, 1 failing, and 9 invalid test cases", "2 passing, 0 failing, and 0 invalid test cases"),
    ],
)
def test_examples_are_counted_by_property(counts: tuple[str, str]) -> None:
    """In the words of Hypothesis 6.100 and of 6.170."""
    parts = [f"tests/test_a.py::test_x[{i}]:\n\n    - {count}\n" for i, count in enumerate(counts)]
    assert count_examples("\n".join([*parts, "1 passed in 2 s\n"])) == {"test_x": 10}


@pytest.mark.slow  # starts pytest
def test_examples_of_this_hypothesis_are_counted(tmp_path: Path) -> None:
    test = "from hypothesis import given, strategies\n\n@given(strategies.booleans())\ndef test_x(x):\n    pass\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "tests", "--rootdir=.", "--hypothesis-show-statistics", "-pno:cacheprovider"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert count_examples(ended.stdout) == {"test_x": 2}


def test_what_is_fuzzed_has_properties() -> None:
    """pytest ends with an error where it is left with no test."""
    tests = Path(__file__).parent
    assert [name for name in FILES if "@given" not in (tests / name).read_text(encoding="utf-8")] == []


@pytest.mark.slow
def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", str(FIRST), "--cases", "2", "--json", str(tmp_path / "report.json")]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["loads"], found["seed"], found["failures"]) == (2, FIRST, [])
    assert "right bytes" in capsys.readouterr().out
