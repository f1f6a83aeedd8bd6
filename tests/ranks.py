"""Several ranks of torch.distributed on this machine, over Gloo and loopback: a process each, started and stopped by a test."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from checkpoints import mixed_contents, write

_context = multiprocessing.get_context("forkserver")  # its server imports torch once, for all ranks of all tests


def prepare_ranks() -> None:
    """Start the server that ranks are forked from. It and its descriptors stay until the end of the tests."""
    _context.set_forkserver_preload(["torch.distributed", "numpy", "headrace._exchange", "headrace.devices.cpu"])
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()


class Outcome(NamedTuple):
    """What a rank's function returned, or the error that it ended with."""

    value: Any
    error: BaseException | None
    trace: str


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90, hanging: int | None = None
) -> list[Outcome | None]:
    """Call `function(rank, *arguments)` in `world` processes that form the default group. A rank that was killed has no outcome.

    `hanging` is a rank that is not waited for. The function has to be importable, arguments and results to be picklable.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [_context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            _context.Process(target=_run, args=(rank, world, store, pipes[rank][1], function, arguments), daemon=True)
            for rank in range(world)
        ]
        try:
            for process, (_, writer) in zip(processes, pipes, strict=True):
                process.start()
                writer.close()
            return [None if rank == hanging else _outcome(reader, timeout_s) for rank, (reader, _) in enumerate(pipes)]
        finally:
            for process, (reader, _) in zip(processes, pipes, strict=True):
                process.join(0 if hanging is not None else 10)
                process.kill()
                process.join()
                process.close()
                reader.close()


def _outcome(reader: Any, timeout_s: float) -> Outcome | None:
    if not reader.poll(timeout_s):
        raise TimeoutError(f"a rank did not end within {timeout_s:g} s")
    try:
        outcome: Outcome = reader.recv()
    except EOFError:
        return None
    return outcome


def _run(rank: int, world: int, store: str, writer: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("HEADRACE_PARTITION", "chunks")  # noqa: TID251 - else ranks take what is cached each for itself
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world)
    try:
        outcome = Outcome(function(rank, *arguments), None, "")
    except BaseException as exc:  # noqa: BLE001 - it goes to the test
        outcome = Outcome(None, exc, traceback.format_exc())
    writer.send(outcome)
    writer.close()
    os._exit(0)  # whoever is behind does not hold this rank up


def values(outcomes: list[Outcome | None]) -> list[Any]:
    """What the ranks returned; an error of any of them is the test's."""
    for outcome in outcomes:
        assert outcome is not None
        if outcome.error is not None:
            raise AssertionError(outcome.trace) from outcome.error
    return [outcome.value for outcome in outcomes if outcome is not None]


def error_of(outcome: Outcome | None) -> BaseException:
    """The error that a rank ended with."""
    assert outcome is not None
    assert outcome.error is not None, outcome.value
    return outcome.error


def alone() -> None:
    """Each rank is on a node of its own from here on: they know of it, and do not see each other's memory."""
    import headrace._node
    import headrace._peers

    headrace._node._NAME = f"headrace-{os.getpid()}"  # type: ignore[misc]
    headrace._peers._node = lambda: (f"machine {os.getpid()}", "")


# By full names: a blanket rule would leave scales alone.
CASTS = {
    f"{shard}.layer.{name}": dtype
    for shard in range(2)
    for name, dtype in {
        "3.weight": "float32",
        "4.weight": "float8_e4m3fn",
        "1.norm": "bfloat16",
        "2.norm": "float64",
        "5.scale": "float32",
        "6.bias": "float32",
        "6.table": "int64",
        "7.table": "int16",
    }.items()
}


def decide() -> None:
    """From here on ranks take what is in memory each for itself, as they do where nothing else is said."""
    os.environ.pop("HEADRACE_PARTITION")  # noqa: TID251 - a process of its own


def write_model(path: Path) -> Path:
    """Two shards of every kind of tensor, about 18 MiB, in a folder."""
    for shard in range(2):
        write(path / f"model-{shard}.safetensors", {f"{shard}.{name}": entry for name, entry in mixed_contents().items()})
    return path
