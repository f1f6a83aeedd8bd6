"""Other loaders, each used as its documentation shows, in the peers' own environment.

A peer yields (name, tensor) pairs; `into` copies them into the destinations with `copy_`, on the caller's thread and with torch's
own threads; `load` keeps them. What a peer needs of its own format is converted before the clock starts, once, next to its
packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch  # before the clock starts

from harness import memory, pagecache
from harness.child import Job

Pairs = Iterable[tuple[str, torch.Tensor]]


def safetensors_load_file(job: Job) -> Callable[[], Any]:
    """`load_file` of every shard. It hands out views of a mapping; settings `clone` and `cast` make memory of its own."""
    from safetensors.torch import load_file

    def pairs() -> Pairs:
        for file in job.files:
            yield from load_file(file).items()

    return _consume(job, pairs)


def safetensors_safe_open(job: Job) -> Callable[[], Any]:
    """`safe_open` and `get_tensor` of every tensor. Setting `backend`: mmap or pread."""
    from safetensors import safe_open

    def pairs() -> Pairs:
        for file in job.files:
            with safe_open(file, framework="pt", device="cpu", backend=job.settings["backend"]) as opened:
                for name in opened.offset_keys():
                    yield name, opened.get_tensor(name)

    return _consume(job, pairs)


def runai(job: Job) -> Callable[[], Any]:
    """Run:ai's streamer. Setting `owned`: whether a tensor has memory of its own or is a view that is overwritten later."""
    from runai_model_streamer import SafetensorsStreamer

    def pairs() -> Pairs:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(job.locations, owned=job.settings["owned"])
            yield from streamer.get_tensors()

    return _consume(job, pairs)


def runai_distributed(job: Job) -> Callable[[], Any]:
    """Run:ai's streamer, its ranks reading shares and broadcasting them. Its variable RUNAI_STREAMER_DIST has to ask for Gloo."""
    from runai_model_streamer import SafetensorsStreamer

    def pairs() -> Pairs:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(job.locations, device="cpu", is_distributed=True, owned=job.settings["owned"])
            if not streamer.file_streamer.is_distributed:
                raise RuntimeError("each rank reads for itself: it is not distributed")
            yield from streamer.get_tensors()

    return _consume(job, pairs)


def fastsafetensors(job: Job) -> Callable[[], Any]:
    """Whole shards into host memory, 16 threads."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def pairs() -> Pairs:
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True, max_threads=16, bbuf_size_kb=16 * 1024, debug_log=False)
        loader.add_filenames({0: job.files})
        buffer = loader.copy_files_to_device()
        try:
            for name in list(buffer.key_to_rank_lidx):
                yield name, buffer.get_tensor(name)
        finally:
            buffer.close()
            loader.close()

    return _consume(job, pairs)


def instanttensor(job: Job) -> Callable[[], Any]:
    """Refuses host memory; asked all the same, so that a version that takes it shows."""
    import instanttensor as library

    with library.safe_open(job.files[:1], framework="pt", device="cpu"):
        pass

    def pairs() -> Pairs:
        with library.safe_open(job.files, framework="pt", device="cpu") as opened:
            yield from opened.tensors()

    return _consume(job, pairs)


def flashpack(job: Job) -> Callable[[], Any]:
    """Its own format, converted once."""
    from flashpack import pack_to_file
    from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file

    path = _converted(job, ".flashpack", lambda tensors, out: pack_to_file(tensors, out, None))

    def pairs() -> Pairs:
        storage, metadata = read_flashpack_file(path, device="cpu")
        for item in iterate_from_flash_tensor(storage, metadata):
            yield item[0], item[1]

    return _consume(job, pairs)


def tensorizer(job: Job) -> Callable[[], Any]:
    """Its own format, converted once. Setting `readers`."""
    from tensorizer import TensorDeserializer, TensorSerializer

    def write(tensors: dict[str, torch.Tensor], out: str) -> None:
        serializer = TensorSerializer(out)
        serializer.write_state_dict(tensors)
        serializer.close()

    path = _converted(job, ".tensors", write)

    def pairs() -> Pairs:
        with TensorDeserializer(path, device="cpu", lazy_load=False, num_readers=job.settings.get("readers", 4)) as opened:
            for name in opened:
                yield name, opened[name]

    return _consume(job, pairs)


def _consume(job: Job, pairs: Callable[[], Pairs]) -> Callable[[], Any]:
    """What the case does with the tensors of a peer."""
    if job.kind == "into":
        given = memory.destinations(job.files)

        def copy() -> Any:
            for name, tensor in pairs():
                given[name].copy_(tensor)
            return {}, job.keep(given)

        return copy
    if job.kind == "load":
        return lambda: ({}, job.keep(dict(_own(job, pairs()))))
    return lambda: job.take(_own(job, pairs()))


def _own(job: Job, pairs: Pairs) -> Pairs:
    """The pairs, cloned or cast where the settings ask for it."""
    if (cast := job.settings.get("cast")) is not None:
        return ((name, tensor.to(getattr(torch, cast))) for name, tensor in pairs)
    if job.settings.get("clone"):
        return ((name, tensor.clone()) for name, tensor in pairs)
    return pairs


def _converted(job: Job, suffix: str, write: Callable[[dict[str, torch.Tensor], str], None]) -> str:
    """The checkpoint in a peer's format, cached."""
    from safetensors.torch import load_file

    key = sha256("|".join(f"{file}:{Path(file).stat().st_mtime_ns}" for file in job.files).encode()).hexdigest()[:16]
    path = Path(sys.prefix) / "converted" / f"{key}{suffix}"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f"part-{path.name}")
        write(dict(_merged(load_file(file) for file in job.files)), str(part))
        part.rename(path)
        pagecache.evict([str(path)])
    pagecache.fill([str(path)])
    return str(path)


def _merged(shards: Iterable[dict[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in shards:
        yield from shard.items()
