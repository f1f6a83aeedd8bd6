"""Programs written for Run:ai Model Streamer 0.17, and what they see, as JSON: of that package, or of headrace's in its place.

    python runai_programs.py FOLDER [--headrace]

The folder is made by test_runai_api.py. Nothing here knows headrace, but for the switch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

if "--headrace" in sys.argv:
    from headrace.integrations.runai import install

    install()

import torch
from runai_model_streamer import (
    DistributedStreamer,
    FileChunks,
    FileStreamer,
    ObjectStorageModel,
    SafetensorsStreamer,
    list_safetensors,
    pull_files,
)
from runai_model_streamer.distributed_streamer import distributed_streamer
from runai_model_streamer.file_streamer import file_streamer, requests_iterator
from runai_model_streamer.s3_utils import s3_utils
from runai_model_streamer.safetensors_streamer import safetensors_pytorch, streamer_mock

KNOWN_ERRORS = ("RunaiStreamerInvalidInputException", "NotImplementedError", "ValueError", "RuntimeError")


def outcome(program: Callable[[], Any]) -> Any:
    """What a program returns, or the first of the errors that programs tell apart."""
    try:
        return program()
    except Exception as exc:  # noqa: BLE001  # the kind of error is what is compared
        names = [kind.__name__ for kind in type(exc).__mro__]
        return ["raises", next((name for name in KNOWN_ERRORS if name in names), names[0])]


def described(pairs: Iterator[tuple[str, torch.Tensor]]) -> list[Any]:
    """(name, dtype, shape, digest) of tensors, sorted: both packages hand them out as they come in."""
    return sorted([name, str(tensor.dtype), list(tensor.shape), digest(tensor)] for name, tensor in pairs)


def digest(tensor: torch.Tensor) -> str:
    if not tensor.numel():
        return ""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


class Programs:
    """One method per program."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def stream(self, *names: str, **arguments: Any) -> list[Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([self.path(name) for name in names], **arguments)
            return described(streamer.get_tensors())

    # ---- streaming

    def program_one_file(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.path("kinds.safetensors"))
            return described(streamer.get_tensors())

    def program_misaligned_file(self) -> Any:
        return self.stream("odd.safetensors")

    def program_file_without_tensors(self) -> Any:
        return self.stream("none.safetensors")

    def program_several_files(self) -> Any:
        return self.stream("a.safetensors", "b.safetensors", "kinds.safetensors")

    def program_no_files(self) -> Any:
        return self.stream()

    def program_names_in_several_files(self) -> Any:
        return self.stream("a.safetensors", "copy.safetensors", "a.safetensors")

    def program_borrowed_tensors_used_at_once(self) -> Any:
        return self.stream("a.safetensors", "b.safetensors", owned=False)

    def program_some_names(self) -> Any:
        return self.stream("a.safetensors", "b.safetensors", tensor_names=["a.001", "b.000"])

    def program_a_name_of_a_file_beside_names_in_several(self) -> Any:
        return self.stream("a.safetensors", "copy.safetensors", tensor_names={"only"})

    def program_unknown_name(self) -> Any:
        return self.stream("a.safetensors", tensor_names=["a.001", "nowhere"])

    def program_wanted_name_in_several_files(self) -> Any:
        return self.stream("a.safetensors", "copy.safetensors", tensor_names=["a.001"])

    def program_one_name_as_text(self) -> Any:
        return self.stream("a.safetensors", tensor_names="a.001")

    def program_empty_names(self) -> Any:
        return self.stream("a.safetensors", tensor_names=[])

    def program_devices(self) -> Any:
        devices = (None, "cpu", torch.device("cpu"), "bogus", 3.5)
        return [outcome(lambda device=device: self.stream("a.safetensors", device=device)) for device in devices]

    def program_distributed_without_a_group(self) -> Any:
        return self.stream("a.safetensors", is_distributed=True)

    # ---- what is asked of a streamer

    def program_metadata(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([self.path("kinds.safetensors"), self.path("a.safetensors")])
            found = {
                file: [
                    [
                        tensor.name,
                        tensor.dtype,
                        list(tensor.shape),
                        [tensor.offsets.start, tensor.offsets.end, tensor.offsets.get_diff()],
                        tensor.get_bytesize(),
                        tensor.get_item_count(),
                        tensor.get_element_size(),
                        str(tensor.get_torch_dtype()),
                        list(tensor.get_storage_shape()),
                    ]
                    for tensor in tensors
                ]
                for file, tensors in streamer.files_to_tensors_metadata.items()
            }
            counts = [len(tensors) for tensors in streamer.files_to_tensors_metadata.values()]
            list(streamer.get_tensors())
            distributed = streamer.file_streamer.is_distributed
            return found, counts, streamer.total_size, streamer.device_str, streamer.unaligned_copies, distributed

    def program_metadata_of_some_names(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([self.path("a.safetensors"), self.path("b.safetensors")], tensor_names=["a.001"])
            list(streamer.get_tensors())
            return [[tensor.name for tensor in tensors] for tensors in streamer.files_to_tensors_metadata.values()]

    # ---- more than once

    def program_two_requests(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.path("a.safetensors"))
            first = described(streamer.get_tensors())
            streamer.stream_file(self.path("b.safetensors"))
            return first, described(streamer.get_tensors())

    def program_iterating_twice(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.path("a.safetensors"))
            return described(streamer.get_tensors()), described(streamer.get_tensors())

    def program_streamer_used_again(self) -> Any:
        streamer = SafetensorsStreamer()
        found = []
        for name in ("a.safetensors", "b.safetensors"):
            with streamer:
                streamer.stream_file(self.path(name))
                found.append(described(streamer.get_tensors()))
        return found

    def program_second_request_too_early(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.path("a.safetensors"))
            streamer.stream_file(self.path("b.safetensors"))

    def program_second_request_after_some_tensors(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.path("a.safetensors"))
            tensors = streamer.get_tensors()
            next(tensors)
            early = outcome(lambda: streamer.stream_file(self.path("b.safetensors")))
            tensors.close()
            streamer.stream_file(self.path("b.safetensors"))
            return early, described(streamer.get_tensors())

    def program_after_the_block(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.path("a.safetensors"))
        return described(streamer.get_tensors())

    # ---- what is wrong with files

    def program_broken_files(self) -> Any:
        names = sorted(name for name in os.listdir(self.folder) if name.startswith("broken"))
        return {name: outcome(lambda name=name: self.stream(name)) for name in [*names, "missing.safetensors"]}

    def program_several_kinds_of_storage(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([self.path("missing.safetensors"), "s3://bucket/a.safetensors"])

    def program_streamer_after_an_error(self) -> Any:
        with SafetensorsStreamer() as streamer:
            first = outcome(lambda: streamer.stream_file(self.path("missing.safetensors")))
            streamer.stream_file(self.path("a.safetensors"))
            return first, described(streamer.get_tensors())

    # ---- ranges

    def program_ranges(self) -> Any:
        requests = [
            FileChunks(7, self.path("data.bin"), [500, 0, 2, 2], [300, 200, 0, 600]),
            FileChunks.contiguous(9, self.path("sub/more.bin"), 1, [1, 2, 3]),
        ]
        with FileStreamer() as streamer:
            streamer.stream_files(requests)
            before = streamer.outstanding
            found = sorted(
                [file, index, str(data.dtype), list(data.shape), digest(data)] for file, index, data in streamer.get_chunks()
            )
            return before, found, streamer.outstanding, streamer.live_requests

    def program_ranges_for_all_ranks(self) -> Any:
        with DistributedStreamer() as streamer:
            streamer.stream_files([FileChunks(0, self.path("data.bin"), [3], [40])], None, "cpu", False)
            return [[file, index, digest(data)] for file, index, data in streamer.get_chunks()], streamer.is_distributed

    def program_range_past_the_end(self) -> Any:
        with FileStreamer() as streamer:
            streamer.stream_files([FileChunks(0, self.path("data.bin"), [900], [1 << 20])])
            return len(list(streamer.get_chunks()))

    def program_ranges_twice(self) -> Any:
        with FileStreamer() as streamer:
            streamer.stream_files([FileChunks(0, self.path("data.bin"), [0], [10])])
            early = outcome(lambda: streamer.stream_files([FileChunks(0, self.path("data.bin"), [0], [10])]))
            streamer.drain_live_submissions()
            streamer.stream_files([FileChunks(0, self.path("data.bin"), [0], [10])], memory_limit=0)
            return early, len(list(streamer.get_chunks()))

    def program_chunks(self) -> Any:
        chunks = FileChunks.contiguous(1, "p", 5, [2, 3])
        uneven = outcome(lambda: FileChunks(0, "p", [1], []))
        return chunks.offsets, chunks.sizes, chunks.total_size(), chunks.max_chunk_size(), chunks.id, chunks.path, uneven

    # ---- listing and pulling

    def program_listing(self) -> Any:
        streamer = FileStreamer()
        choices: list[dict[str, Any]] = [
            {},
            {"is_recursive": False},
            {"allow_patterns": ["*.bin"]},
            {"ignore_patterns": ["*.bin", "*.safetensors"]},
            {"allow_patterns": ["data.bin"]},
            {"allow_patterns": ["*/sub/*"]},
        ]
        listed = [
            sorted([os.path.relpath(path, self.folder), size] for path, size in streamer.list_files(self.folder, **choice))
            for choice in choices
        ]
        wrong = [outcome(lambda name=name: streamer.list_files(self.path(name))) for name in ("nowhere", "data.bin")]
        files = [os.path.relpath(path, self.folder) for path in sorted(list_safetensors(self.folder))]
        return listed, wrong, files, list_safetensors(self.path("nowhere"))

    def program_local_paths_are_not_pulled(self) -> Any:
        target = self.path("never")
        return outcome(lambda: pull_files(self.folder, target)), outcome(lambda: ObjectStorageModel(self.folder, target))

    def program_urls(self) -> Any:
        urls = ("s3://b/k", "gs://b/k", "az://b/k", "/s3://b", "S3://b", "file:///b")
        return [[s3_utils.is_s3_path(url), s3_utils.is_gs_path(url), s3_utils.is_azure_path(url)] for url in urls]

    def program_patterns(self) -> Any:
        keys = ["m/a.json", "m/sub/b.json", "m/a.bin", "a.json"]
        patterns = ["*.json"], ["a.*"], ["m/*"], ["[am].json", "*.bin"]
        return [[s3_utils.filter_allow(keys, each), s3_utils.filter_ignore(keys, each)] for each in patterns]

    # ---- names

    def program_constants(self) -> Any:
        modules = (distributed_streamer, file_streamer, requests_iterator, s3_utils, safetensors_pytorch)
        wanted = ("ENV", "PREFIX", "KEY", "ENDPOINT", "SAFETENSORS", "PACKED")
        found = {}
        for module in modules:
            for name in dir(module):
                if name.isupper() and not name.startswith("DEFAULT") and any(part in name for part in wanted):
                    found[f"{module.__name__.rpartition('.')[2]}.{name}"] = getattr(module, name)
        return found

    def program_dtypes(self) -> Any:
        return {name: str(kind) for name, kind in safetensors_pytorch.safetensors_to_torch_dtype.items()}

    def program_signatures(self) -> Any:
        functions = [list_safetensors, pull_files]
        for kind in (
            SafetensorsStreamer,
            ObjectStorageModel,
            FileStreamer,
            FileChunks,
            DistributedStreamer,
            s3_utils.S3Credentials,
            streamer_mock.StreamerPatcher,
            safetensors_pytorch.SafetensorMetadata,
            safetensors_pytorch.Offsets,
        ):
            functions += [kind.__init__] + [
                function
                for name, function in inspect.getmembers(kind, inspect.isfunction)
                if not name.startswith("_") and function.__module__.startswith(("runai", "headrace"))
            ]
        functions += [
            function
            for name, function in inspect.getmembers(s3_utils, inspect.isfunction)
            if not name.startswith("_") and function.__module__ == s3_utils.__name__
        ]
        return {
            function.__qualname__: [
                [each.name, str(each.kind), repr(each.default)] for each in inspect.signature(function).parameters.values()
            ]
            for function in functions
        }


def run_all(programs: Any, begin: tuple[str, ...] = ("",)) -> None:
    names = [name for name in dir(programs) if name.startswith("program_") and name.startswith(begin)]
    json.dump({name: outcome(getattr(programs, name)) for name in names}, sys.stdout)


def main(folder: str) -> None:
    run_all(Programs(folder))


if __name__ == "__main__":
    main(sys.argv[1])
