"""Trouble that a load must survive: bad callers, failing sources, forks, signals and too little memory.

After each the source is closed, no reader is left and the memory is free although the exception is still at hand; the conftest
looks after threads, descriptors and the interpreter's settings.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import rest_slow
from checkpoints import (
    KIB,
    MIB,
    WatchedSource,
    any_data_read,
    bytes_of,
    mixed_contents,
    nth_data_read,
    random_contents,
    serialize,
    write,
    write_sparse,
    wrong,
)

import headrace
from headrace.errors import (
    DeviceMemoryError,
    SourceChangedError,
    SourceError,
    SourceTimeoutError,
    StreamError,
    TruncatedError,
)
from headrace.sources.file import FileFolder, FileSource
from headrace.testing import Block, Change, Fault, Raise

pytestmark = pytest.mark.timeout(60)

LARGE = random_contents(*[300 * KIB + i for i in range(40)])
LARGE_BYTES = serialize(LARGE)
MIXED = mixed_contents()
ONE_EACH = {"memory_limit": 0, "concurrency": 4}  # a span per tensor


def opened(**arguments: Any) -> tuple[WatchedSource, headrace.TensorStream]:
    source = WatchedSource(LARGE_BYTES)
    return source, headrace.stream(source, **(ONE_EACH | arguments))


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-")]


def assert_over(source: WatchedSource, *, collect: bool = False) -> None:
    """Closed, no readers, no memory."""
    if collect:
        gc.collect()
    assert source.closed
    assert readers() == []
    assert source.living == 0


def take(tensors: Iterator[tuple[str, torch.Tensor]], count: int) -> dict[str, torch.Tensor]:
    """The next tensors, without closing the stream as leaving a loop does."""
    return dict(next(tensors) for _ in range(count))


def drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Take all, drop each at once."""
    for item in tensors:
        del item


def keep_all(tensors: Iterator[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor]) -> None:
    """Take all, also where it fails half way."""
    kept.update(tensors)


def assert_loads_again() -> None:
    assert not wrong(headrace.load(WatchedSource(LARGE_BYTES), **ONE_EACH), LARGE)


# ---- callers


def test_a_caller_who_stops_after_three() -> None:
    source, tensors = opened()
    assert not wrong(take(tensors, 3), LARGE)
    tensors.close()
    assert_over(source)
    assert_loads_again()


@pytest.mark.parametrize("taken", [0, 1, 40])
def test_a_caller_who_closes_twice(taken: int) -> None:
    source, tensors = opened()
    for _ in range(taken):
        next(tensors)
    tensors.close()
    tensors.close()
    with tensors:
        pass
    assert_over(source)
    assert tensors.stats.tensors == taken


def test_a_break_out_of_the_loop_ends_the_load_within_the_block() -> None:
    source, tensors = opened()
    with tensors:
        for item in tensors:
            del item
            break
    assert_over(source)


def test_a_stream_that_is_abandoned_ends_with_its_last_reference() -> None:
    source, tensors = opened()
    running = iter(tensors)
    next(running)
    del tensors
    assert not source.closed
    next(running)
    del running
    assert_over(source)


def test_a_for_loop_over_a_stream_without_a_name_ends_when_left() -> None:
    source = WatchedSource(LARGE_BYTES)
    for item in headrace.stream(source, **ONE_EACH):
        del item
        break
    assert_over(source)


def test_a_stream_that_was_never_started_is_closed_when_dropped() -> None:
    source, tensors = opened()
    del tensors
    assert_over(source)


def test_an_abandoned_stream_in_a_cycle_is_ended_by_a_collector_in_another_thread() -> None:
    source, tensors = opened()
    cycle: list[Any] = [iter(tensors), tensors]
    next(cycle[0])
    cycle.append(cycle)
    del cycle, tensors
    assert not source.closed
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join(30)
    assert_over(source)


def test_an_abandoned_stream_that_is_collected_on_one_of_its_own_readers() -> None:
    class Collecting(WatchedSource):
        """Collects garbage on the reader's thread once the stream has been abandoned."""

        abandoned = threading.Event()
        done = threading.Event()

        def read_into(self, offset: int, buffer: memoryview) -> None:
            super().read_into(offset, buffer)
            if self.read_count > 2 and not self.done.is_set():
                assert self.abandoned.wait(30)
                gc.collect()
                self.done.set()

    gc.disable()
    try:
        source = Collecting(LARGE_BYTES)
        tensors = headrace.stream(source, memory_limit=0, concurrency=1)
        next(tensors)
        cycle: list[Any] = [tensors]
        cycle.append(cycle)
        del cycle, tensors
        source.abandoned.set()
        assert source.done.wait(30)
    finally:
        gc.enable()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("headrace-"):
            thread.join(10)
    assert_over(source)


def test_a_caller_who_raises_in_the_loop() -> None:
    source, tensors = opened()

    def fail_at_five() -> None:
        with tensors:
            for i, item in enumerate(tensors):
                del item
                if i == 5:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail_at_five()
    assert_over(source)
    assert caught.value.__traceback__ is not None
    assert_loads_again()


def test_a_caller_who_throws_away_the_result_of_load_frees_it() -> None:
    source = WatchedSource(LARGE_BYTES)
    headrace.load(source)
    assert_over(source)


def test_threads_may_take_turns_in_one_stream() -> None:
    source, tensors = opened()
    lock, found = threading.Lock(), dict[str, bytes]()

    def take() -> None:
        while True:
            with lock:
                item = next(tensors, None)
            if item is None:
                return
            found[item[0]] = bytes_of(item[1])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {name: entry.data for name, entry in LARGE.items()}
    del threads, thread, take
    assert_over(source, collect=True)


# ---- sources


ERRORS = [
    SourceError("broken", url="memory:"),
    SourceTimeoutError,
    TruncatedError,
    OSError(5, "Input/output error"),
    MemoryError(),
    KeyError("a bug in a source"),
    SystemExit(3),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: getattr(error, "__name__", type(error).__name__))
@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("use", rest_slow(["dropped", "kept", "copied", "cast"], quick=(1, 3)))
def test_a_read_that_fails_ends_the_load_with_its_error_and_frees_everything(error: Any, concurrency: int, use: str) -> None:
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(13), Raise(error))])
    arguments: dict[str, Any] = {"copied": {"ownership": "copied"}, "cast": {"dtype": dict.fromkeys(LARGE, "F32")}}.get(use, {})
    kept: dict[str, torch.Tensor] = {}
    tensors = headrace.stream(source, memory_limit=0, concurrency=concurrency, **arguments)
    with pytest.raises(error if isinstance(error, type) else type(error)) as caught:
        keep_all(tensors, kept) if use == "kept" else drain(tensors)
    assert isinstance(error, type) or caught.value is error
    assert caught.value.__traceback__ is not None
    assert not wrong(kept, LARGE)
    assert LARGE.keys() - kept.keys()
    kept.clear()
    assert_over(source)
    assert_loads_again()


def test_errors_of_other_readers_are_attached_to_the_first() -> None:
    both = threading.Barrier(2)

    class Failing(WatchedSource):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            super().read_into(offset, buffer)
            if self.read_count > 1:
                both.wait(30)
                raise SourceError(f"broken at {offset}", url=self.url, offset=offset)

    source = Failing(LARGE_BYTES)
    with pytest.raises(SourceError) as caught:
        headrace.load(source, memory_limit=MIB, concurrency=2, dtype=None)
    others = caught.value.others
    assert len(others) <= 1
    assert all(isinstance(other, SourceError) and other is not caught.value for other in others)
    assert_over(source)


def test_memory_of_an_interrupted_cast_is_free_while_the_error_lives() -> None:
    contents = random_contents(*[400 * KIB] * 30, dtype="F32")
    source = WatchedSource(serialize(contents), [Fault(nth_data_read(9), Raise(SourceError("broken", url="memory:")))])
    with pytest.raises(SourceError) as caught:
        headrace.load(source, dtype="BF16", memory_limit=0)
    assert caught.value.__traceback__ is not None
    assert_over(source)


@pytest.mark.parametrize("order", ["ready", "file"])
def test_nothing_of_a_source_that_changed_is_handed_out_afterwards(order: Any) -> None:
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(7), Change())])
    taken: dict[str, torch.Tensor] = {}
    with pytest.raises(SourceChangedError) as caught:
        keep_all(headrace.stream(source, memory_limit=0, concurrency=1, order=order), taken)
    assert caught.value.url == source.url
    assert list(taken) == list(LARGE)[:7]
    assert not wrong(taken, LARGE)


REPLACEMENTS: dict[str, Callable[[Path, Path], None]] = {
    "cp -p over it": lambda path, other: _copy_keeping_times(other, path),
    "rewritten": lambda path, other: _rewrite(other, path),
    "truncated": lambda path, _: os.truncate(path, 5 * MIB),
    "emptied": lambda path, _: os.truncate(path, 0),
}


def _copy_keeping_times(other: Path, path: Path) -> None:
    shutil.copy2(other, path)


def _rewrite(other: Path, path: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("how", REPLACEMENTS)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_shard_that_is_replaced_while_it_is_read_is_an_error_that_names_it(tmp_path: Path, how: str, concurrency: int) -> None:
    path = write(tmp_path / "shard.safetensors", LARGE)
    other = write(tmp_path / "other", random_contents(*[300 * KIB + i for i in range(40)][::-1]))
    assert other.stat().st_size == path.stat().st_size
    times = path.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    stuck = Block()
    source = WatchedSource(FileSource(path), [Fault(nth_data_read(20), stuck)])
    tensors = headrace.stream(source, memory_limit=0, concurrency=concurrency)
    taken = take(tensors, 10)
    replace = threading.Thread(target=_replace_once_stuck, args=(stuck, REPLACEMENTS[how], path, other))
    replace.start()
    with pytest.raises(SourceError) as caught:
        keep_all(tensors, taken)
    replace.join(30)
    assert isinstance(caught.value, SourceChangedError | TruncatedError)
    assert caught.value.url == str(path)
    assert not wrong(taken, LARGE)
    assert 10 <= len(taken) < len(LARGE)
    taken.clear()
    assert_over(source)


def _replace_once_stuck(stuck: Block, replace: Callable[[Path, Path], None], path: Path, other: Path) -> None:
    try:
        assert stuck.entered.wait(30)
        replace(path, other)
    finally:
        stuck.release.set()


@pytest.mark.parametrize("how", ["unlink", "rename over", "hard link"])
def test_a_shard_that_is_renamed_over_or_unlinked_is_fine(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "shard.safetensors", LARGE)
    other = write(tmp_path / "other", random_contents(5))
    tensors = headrace.stream(path, **ONE_EACH)
    taken = take(tensors, 2)
    if how == "unlink":
        path.unlink()
    elif how == "rename over":
        other.rename(path)
    else:
        os.link(path, tmp_path / "second")
    taken |= dict(tensors)
    assert not wrong(taken, LARGE)
    assert len(taken) == len(LARGE)


def test_the_failing_shard_of_several_is_named(tmp_path: Path) -> None:
    good = WatchedSource(serialize(random_contents(*[300 * KIB] * 5)))
    bad = WatchedSource(
        FileSource(write(tmp_path / "bad.safetensors", {f"b{name}": entry for name, entry in LARGE.items()})),
        [Fault(any_data_read, Change())],
    )
    taken: dict[str, torch.Tensor] = {}
    with pytest.raises(SourceChangedError) as caught:
        keep_all(headrace.stream([good, bad], **ONE_EACH), taken)
    assert caught.value.url == str(tmp_path / "bad.safetensors")
    assert not [name for name in taken if name.startswith("b")]
    taken.clear()
    assert_over(good)
    assert_over(bad)


# ---- forks


def in_child(work: Callable[[], None]) -> None:
    """Run in a forked child that has 30 s; fail with what it printed unless it succeeds."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(receive)
            os.dup2(send, 2)
            faulthandler.dump_traceback_later(30, exit=True, file=send)
            work()
            code = 0
        except BaseException:  # noqa: BLE001
            os.write(send, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(send)
    with open(receive, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert (os.waitstatus_to_exitcode(status), said) == (0, "")


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@forks
@pytest.mark.parametrize("way", ["next", "iter"])
def test_a_forked_child_cannot_use_the_parents_stream_but_drops_tensors_and_opens_its_own(way: str) -> None:
    source, tensors = opened()
    kept = take(tensors, 5)

    def child() -> None:
        with pytest.raises(StreamError):
            next(tensors if way == "next" else iter(tensors))
        assert not wrong(kept, LARGE)
        kept.clear()
        assert_loads_again()
        tensors.close()
        with headrace.stream(WatchedSource(LARGE_BYTES), dtype="F32", names="t00*") as others:
            assert len(list(others)) == 10
        assert abs(sys.getswitchinterval() - 0.005) < 1e-6

    in_child(child)
    kept |= dict(tensors)
    assert not wrong(kept, LARGE)
    assert len(kept) == len(LARGE)
    kept.clear()
    assert_over(source)


@forks
@pytest.mark.slow
def test_a_forked_child_that_keeps_or_drops_tensors_changes_nothing_in_the_parent() -> None:
    source, tensors = opened(memory_limit=2 * MIB)
    kept: dict[str, torch.Tensor] = {}
    for i, (name, tensor) in enumerate(tensors):
        if i % 3 == 0:
            kept[name] = tensor
        if i % 10 == 5:

            def child(tensor: torch.Tensor = tensor) -> None:
                for held in (tensor, *kept.values()):  # by numpy: torch's OpenMP threads did not come along
                    held.numpy()[:] = 0
                kept.clear()
                gc.collect()

            in_child(child)
            del child
        del tensor
    assert not wrong(kept, LARGE)
    kept.clear()
    gc.collect()
    assert_over(source)


@forks
@pytest.mark.slow
def test_a_fork_at_any_moment_leaves_a_child_that_can_close_the_stream_and_end() -> None:
    """A reader is held at one step after another, with whatever locks it has there, while the process forks."""
    data = serialize(random_contents(*[300 * KIB] * 4))
    for step in range(0, 400, 3):
        held, release, done = threading.Event(), threading.Event(), threading.Event()
        steps = itertools.count()
        threading.setprofile(_hold_reader_at(step, steps, held, release, done))
        try:
            tensors = headrace.stream(WatchedSource(data), memory_limit=-1, concurrency=1)
            with tensors:
                threading.setprofile(None)
                while not held.wait(0.05) and readers():
                    pass
                if not held.is_set():
                    return
                in_child(tensors.close)
                release.set()
        finally:
            threading.setprofile(None)
            release.set()
    raise AssertionError("the reader never came to its end")


def _hold_reader_at(
    step: int, steps: Iterator[int], held: threading.Event, release: threading.Event, done: threading.Event
) -> Callable[[Any, str, Any], None]:
    def profile(*_: Any) -> None:
        if done.is_set() or not threading.current_thread().name.startswith("headrace-"):
            return
        if next(steps) == step:
            done.set()
            held.set()
            release.wait(40)

    return profile


# ---- signals


def interrupted(program: str, *arguments: str) -> tuple[int, float, str]:
    """Run a program that prints when it sends itself SIGINT, and when that has ended its load: (return code, seconds, stderr)."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"it did not end: {err}") from None
    sent, ended = map(float, out.split())
    return process.returncode, ended - sent, err


INTERRUPT_WHEN_STUCK = """
    import os, signal, sys, threading, time
    import headrace
    from headrace.sources.file import FileSource
    from headrace.testing import Block, Fault, FaultySource

    stuck = Block()
    source = FaultySource(FileSource(sys.argv[1]), [Fault(lambda call: call.index >= int(sys.argv[2]), stuck)])

    def interrupt():
        stuck.entered.wait()
        print(time.monotonic(), flush=True)
        if sys.argv[3] == "release":
            stuck.release.set()
        os.kill(os.getpid(), signal.SIGINT)

    def report(*error):
        print(time.monotonic(), flush=True)
        sys.__excepthook__(*error)

    sys.excepthook = report
    threading.Thread(target=interrupt, daemon=True).start()
    with headrace.stream(source, memory_limit=0, concurrency=int(sys.argv[4])) as tensors:
        for name, tensor in tensors:
            del tensor
            if sys.argv[3] == "release" and stuck.entered.is_set():
                threading.Event().wait()
"""

INTERRUPT_LIMIT_S = 3.0  # KeyboardInterrupt within 2 s; on a busy machine the interpreter's end takes longer than that


@pytest.mark.slow
@pytest.mark.parametrize(("end", "concurrency"), [("release", 4), ("stay stuck", 1), ("stay stuck", 8)])
def test_ctrl_c_at_a_third_ends_the_process_at_once_and_quietly(tmp_path: Path, end: str, concurrency: int) -> None:
    path = write(tmp_path / "m.safetensors", LARGE)
    code, seconds, err = interrupted(INTERRUPT_WHEN_STUCK, str(path), "14", end, str(concurrency))
    assert code in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in err
    assert "Exception ignored" not in err
    assert "Fatal" not in err
    assert seconds < INTERRUPT_LIMIT_S


@pytest.mark.leaky_ok(reason="readers that a source never lets go of are left behind")
@pytest.mark.slow
def test_close_does_not_wait_for_each_of_many_stuck_readers_in_turn() -> None:
    stuck = Block()
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(*range(3, 40)), stuck)])
    tensors = headrace.stream(source, memory_limit=4 * MIB, concurrency=8)
    try:
        next(tensors)
        stuck.entered.wait(30)
        began = time.monotonic()
        tensors.close()
        assert time.monotonic() - began < 7.0  # 8 of them, a second each
    finally:
        stuck.release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("headrace-"):
            thread.join(10)
    assert_over(source)


def test_an_interrupt_while_waiting_is_raised_and_the_stream_closed() -> None:
    stuck = Block()
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(5), stuck)])

    def interrupt() -> None:
        stuck.entered.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        stuck.release.set()

    interrupter = threading.Thread(target=interrupt)
    handler = signal.signal(signal.SIGINT, _interrupt_once())
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            drain(headrace.stream(source, memory_limit=0, concurrency=1))
    finally:
        interrupter.join(30)
        signal.signal(signal.SIGINT, handler)
    assert_over(source)
    assert_loads_again()


def _interrupt_once() -> Callable[[int, Any], None]:
    raised: list[int] = []

    def handle(number: int, _: Any) -> None:
        if not raised:
            raised.append(number)
            raise KeyboardInterrupt

    return handle


# ---- too little memory


@forks
@pytest.mark.parametrize("what", ["a file larger than the limit", "a tensor larger than the limit"])
def test_a_limit_of_the_address_space(tmp_path: Path, what: str) -> None:
    part = 48 * MIB
    shapes = {f"t{i}": part for i in range(3 * 1024 * MIB // part)}
    if what.startswith("a tensor"):
        shapes = {"small": 1000, "huge": 3 * 1024 * MIB}
    path = write_sparse(tmp_path / "sparse.safetensors", shapes)

    def child() -> None:
        now = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
        room = int(now.split()[1]) * 1024 + 512 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        if what.startswith("a file"):
            count = 0
            with headrace.stream(path, memory_limit=96 * MIB, concurrency=2) as tensors:
                for _, tensor in tensors:
                    assert tensor.nbytes == part
                    assert not tensor[::MIB].any()
                    del tensor
                    count += 1
            assert count == len(shapes)
            return
        source = WatchedSource(FileSource(path))
        with pytest.raises(DeviceMemoryError) as caught:
            headrace.load(source)
        assert (caught.value.requested or 0) >= shapes["huge"]
        assert_over(source)
        with pytest.raises(DeviceMemoryError):
            headrace.load(path, ownership="copied")
        assert headrace.load(path, names="small")["small"].nbytes == 1000

    in_child(child)


# ---- folders


def test_a_folder_that_fails_half_way_closes_every_shard(tmp_path: Path) -> None:
    for shard in range(3):
        contents = {f"s{shard}.{name}": entry for name, entry in itertools.islice(LARGE.items(), 8)}
        write(tmp_path / f"model-{shard + 1:05}-of-00003.safetensors", contents)
    folder = FaultyFolder(FileFolder(tmp_path), "model-00002-of-00003.safetensors")
    with pytest.raises(SourceError) as caught:
        drain(headrace.stream(folder, **ONE_EACH))
    assert caught.value.url.endswith("model-00002-of-00003.safetensors")
    assert [source.closed for source in folder.opened] == [True] * 3
    for source in folder.opened:
        assert_over(source)


class FaultyFolder:
    """A folder one of whose files fails at its third read."""

    def __init__(self, folder: FileFolder, failing: str) -> None:
        self.folder, self.failing, self.opened = folder, failing, list[WatchedSource]()
        self.url = folder.url

    def names(self) -> list[str]:
        return self.folder.names()

    def open(self, name: str) -> WatchedSource:
        faults = [Fault(nth_data_read(2), Raise(SourceError))] if name == self.failing else []
        self.opened.append(WatchedSource(self.folder.open(name), faults))
        return self.opened[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_loads(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", MIXED)
    for owned in (path, tmp_path):
        os.chown(owned, 65534, 65534)
    for direct_io in ("auto", "on", "off"):
        assert not wrong(headrace.load(tmp_path, direct_io=direct_io), MIXED)


@pytest.fixture(autouse=True)
def no_exception_is_lost() -> Iterator[None]:
    """Fail on what a thread or a finalizer could not raise."""
    lost: list[Any] = []
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda args: lost.append((args.exc_value, args.object))
    threading.excepthook = lambda args: lost.append((args.exc_value, args.thread))
    yield
    sys.unraisablehook, threading.excepthook = hooks
    assert not lost
