"""What scripts/soak and the fuzzing beside it have found, and was mended: the smallest case of each kind."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import KIB, Contents, bytes_of, random_entry, serialize, write
from ranks import prepare_ranks, run_ranks, values
from simulated_gpu import needs_compiler, simulated_gpu

import headrace
from headrace.errors import DeviceError, SourceError
from headrace.sources.http import Access, Policy, open_http
from headrace.sources.memory import MemorySource

EMPTY = ("F32", (3, 0))


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> None:
    prepare_ranks()


def with_empty_spans() -> Contents:
    """Tensors without bytes first, last and in between; with no memory to read ahead, some have spans of their own."""
    shapes = [EMPTY, ("U8", (300 * KIB,)), EMPTY, EMPTY, ("U8", (9,)), ("U8", (300 * KIB,)), EMPTY]
    return {f"t{i}": random_entry(dtype, shape, seed=i) for i, (dtype, shape) in enumerate(shapes)}


@pytest.mark.parametrize("contents", [with_empty_spans(), {"t": random_entry(*EMPTY)}], ids=["some", "all"])
def test_shared_tensors_without_bytes_are_ready(contents: Contents) -> None:
    with headrace.stream(MemorySource(serialize(contents)), device="shared-cpu", memory_limit=0) as tensors:
        found = {name: bytes_of(tensor) for name, tensor in tensors}
        assert found == {name: entry.data for name, entry in contents.items()}
        assert all(tensors.shared[name].ready for name in contents)


def load_shared(_rank: int, path: Path) -> dict[str, bytes]:
    """Load to shared memory with all ranks."""
    return {
        name: bytes_of(tensor) for name, tensor in headrace.load(path, device="shared-cpu", group=True, memory_limit=0).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("contents", [with_empty_spans(), {"t": random_entry(*EMPTY)}], ids=["some", "all"])
def test_shared_tensors_without_bytes_come_to_every_rank(contents: Contents, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", contents)
    assert values(run_ranks(3, load_shared, path)) == [{name: entry.data for name, entry in contents.items()}] * 3


@needs_compiler
@pytest.mark.parametrize("after", range(4))
def test_a_device_that_cannot_make_another_event_keeps_none(after: int) -> None:
    contents = {f"t{i}": random_entry("U8", (300 * KIB,), seed=i) for i in range(4)}
    with simulated_gpu() as gpu:
        gpu.runtime.fail("cudaEventCreateWithFlags", after=after, code=719)
        with pytest.raises(DeviceError):
            headrace.load(MemorySource(serialize(contents)), device=gpu.device, memory_limit=0, concurrency=3)
        assert gpu.runtime.live().events == 0


@pytest.mark.parametrize("line", [b"no field", b"Server\xff", b"X Y", b"\x01"])
@pytest.mark.parametrize("last", [b"Transfer-Encoding: chunked", b"Content-Length: 4"])
def test_an_answer_with_a_line_that_is_no_field_is_refused(line: bytes, last: bytes) -> None:
    """What follows it may be what says how long the body is."""
    body = b"4\r\nDATA\r\n0\r\n\r\n" if last.startswith(b"Transfer") else b"DATA"
    head = [b"HTTP/1.1 206 Partial Content", b"Content-Range: bytes 0-3/4", line, last]
    with scripted(b"\r\n".join([*head, b"", body])) as url, pytest.raises(SourceError) as caught:
        open_http(url, access=Access(policy=Policy(attempts=1)))
    assert caught.value.attempts == 1


@contextmanager
def scripted(answer: bytes) -> Iterator[str]:
    """A server that gives one connection this answer, whatever it asks for."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(answer)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(65536)

        thread = threading.Thread(target=serve, name="test-scripted")
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/model.safetensors"
        thread.join()


@needs_compiler
@pytest.mark.parametrize("room", [0, 4 * KIB, 100 * KIB])
def test_a_file_that_cannot_be_held_in_place_is_read(room: int) -> None:
    """Although page-locking moved its times before it was refused."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, simulated_gpu() as gpu:
        contents = {"t": random_entry("U8", (300 * KIB,))}
        path = write(Path(folder) / "model.safetensors", contents)
        os.utime(path, (1, 1))
        gpu.runtime.limits(pinned_nbytes=room)
        with headrace.hold(path, device=gpu.device, in_place="auto") as held:
            found = headrace.load(held, device=gpu.device)
        assert bytes_of(found["t"]) == contents["t"].data
        assert path.read_bytes() == serialize(contents)
        del found
