"""The corpus through the public API, as a user loads it: the checks of check_corpus.py, in forked children."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus.fixtures import CorpusFolder, corpus  # noqa: F401  # a fixture
from simulated_gpu import needs_compiler

import headrace
from headrace.errors import HeadraceError
from headrace.testing.devices import SimulatedDevice
from headrace.testing.simulated import SimulatedRuntime

LIMIT_S = 60  # where a case states none
BATCH = 16  # cases a child takes on before the next one is forked

Case = dict[str, Any]
Tensors = dict[str, dict[str, Any]]  # {name: {dtype, shape, nbytes, sha256}}
Loader = Callable[[Path], Iterator[tuple[str, torch.Tensor]]]


def by_streaming(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with headrace.stream(path) as tensors:
        yield from tensors


def by_loading(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from headrace.load(path).items()


def by_streaming_in_a_corner(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """With as little memory and as few readers as there can be, in file order."""
    with headrace.stream(path, memory_limit=0, concurrency=1, order="file", direct_io="on") as tensors:
        yield from tensors


def by_streaming_to_a_device(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """To a simulated GPU; what it finds forbidden is a failure."""
    with SimulatedRuntime() as runtime:
        with headrace.stream(path, device=SimulatedDevice(runtime)) as tensors:
            yield from tensors
        assert runtime.violations() == []
        assert runtime.live().registered == 0


LOADERS: list[Loader] = [by_streaming, by_loading, by_streaming_in_a_corner]


def describe(loader: Loader, path: Path) -> Tensors:
    """What a load hands out: dtype and shape as the checkpoint says, bytes as the tensor has them."""
    found: Tensors = {}
    with headrace.open(path) as checkpoint:
        for name, tensor in loader(path):
            assert name not in found, f"{name!r} was handed out twice"
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            info = checkpoint[name]
            assert data.nbytes == info.nbytes
            digest = hashlib.sha256(data).hexdigest()
            found[name] = {"dtype": info.dtype, "shape": list(info.shape), "nbytes": data.nbytes, "sha256": digest}
        assert set(found) == set(checkpoint)
    return found


def judge(loader: Loader, case: Case, path: Path, expected: Tensors) -> str:
    """'' where a load does what the case's record says; else what it did instead."""
    try:
        found = describe(loader, path)
    except HeadraceError as exc:
        return f"refused: {exc}" if case["expect"] == "ok" and not case["stricter"] else ""
    except Exception as exc:  # noqa: BLE001  # any other class is the failure that is looked for
        return f"foreign exception {type(exc).__name__}: {exc}"
    if case["expect"] == "error":
        return f"accepted; should say: {case['reason']}"
    wanted = {name: {key: record[key] for key in ("dtype", "shape", "nbytes", "sha256")} for name, record in expected.items()}
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    return f"{len(wrong)} tensors differ, the first is {wrong[0][:40]!r}" if wrong else ""


def verdict(loader: Loader, case: Case, path: Path, expected: Tensors) -> str:
    """As `judge`, and within the limits of time and memory that the case states."""
    limits = case.get("limits", {})
    before, began = peak_mb(), time.monotonic()
    signal.alarm(LIMIT_S)
    problem = judge(loader, case, path, expected)
    signal.alarm(0)
    seconds, extra_mb = time.monotonic() - began, peak_mb() - before
    if not problem and seconds > limits.get("max_seconds", LIMIT_S):
        problem = f"took {seconds:.1f} s"
    if not problem and extra_mb > limits.get("max_extra_mb", float("inf")):
        problem = f"took {extra_mb:.0f} MB"
    return problem


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_child(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What `work` returns in a forked child, or how the child died."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            with open(writing, "w", encoding="utf-8", errors="backslashreplace") as pipe:
                json.dump(work(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return {"child": f"killed by {signal.Signals(os.WTERMSIG(status)).name}"}
    return dict(json.loads(text)) if text else {"child": f"no answer, exit status {os.waitstatus_to_exitcode(status)}"}


def batches(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases with a limit of memory alone, since the peak of a process is that of all it did before."""
    numbered = enumerate(cases)
    for _, group in groupby(numbered, key=lambda pair: pair[0] if "limits" in pair[1] else -1 - pair[0] // BATCH):
        yield [case for _, case in group]


def problems(folder: CorpusFolder, loader: Loader, cases: list[Case]) -> dict[str, str]:
    """{case: what went wrong}"""

    def judge_all() -> dict[str, str]:
        return {
            case["id"]: verdict(loader, case, folder.path(case), folder.expected(case) if case["expect"] == "ok" else {})
            for case in cases
        }

    found = in_child(judge_all)
    if "child" in found and len(cases) > 1:  # one of them killed it: ask each alone
        return {name: problem for case in cases for name, problem in problems(folder, loader, [case]).items()}
    return {cases[0]["id"]: found["child"]} if "child" in found else {name: why for name, why in found.items() if why}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns where torch has threads; ours hold no lock
@pytest.mark.parametrize("loader", [*LOADERS, pytest.param(by_streaming_to_a_device, marks=needs_compiler)])
def test_every_case_gets_the_verdict_and_the_bytes_of_its_record(
    corpus: CorpusFolder,  # noqa: F811  # the fixture
    loader: Loader,
) -> None:
    found: dict[str, str] = {}
    for batch in batches(corpus.cases):
        found |= problems(corpus, loader, batch)
    assert found == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_case_that_kills_its_child_is_found(corpus: CorpusFolder) -> None:  # noqa: F811  # the fixture
    def kill_at_one(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        if path == corpus.path(corpus.cases[1]):
            faulthandler.disable()  # its report would look like a crash of the tests
            os.kill(os.getpid(), signal.SIGBUS)
        return by_streaming(path)

    assert problems(corpus, kill_at_one, corpus.cases[:3]) == {corpus.cases[1]["id"]: "killed by SIGBUS"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_wrong_bytes_missing_and_foreign_errors_are_found(corpus: CorpusFolder) -> None:  # noqa: F811  # the fixture
    def wrong(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in by_loading(path):
            yield name, torch.zeros_like(tensor)

    def fail(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        raise KeyError(path)

    case = next(case for case in corpus.cases if case["class"] == "dtype" and case["expect"] == "ok")
    bad = next(case for case in corpus.cases if case["class"] == "header_length")
    assert "tensors differ" in problems(corpus, wrong, [case])[case["id"]]
    assert "foreign" in problems(corpus, fail, [case])[case["id"]]
    assert problems(corpus, by_loading, [case, bad]) == {}
    assert "accepted" in problems(corpus, by_loading, [{**case, "expect": "error", "reason": "none"}])[case["id"]]
    assert "refused" in problems(corpus, by_loading, [{**bad, "expect": "ok", "stricter": None, "tensors": {}}])[bad["id"]]
