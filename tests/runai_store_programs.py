"""Programs for models in object stores, as runai_programs.py has them for folders.

    python runai_store_programs.py s3://models FOLDER [KEY,SECRET,ENDPOINT] [--folders] [--headrace]

The bucket is filled by test_runai_stores.py; mirrors go to the folder.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from runai_programs import described, digest, outcome, run_all  # first: it decides whose runai_model_streamer is

from runai_model_streamer import (  # isort: skip
    DistributedStreamer,
    FileChunks,
    FileStreamer,
    ObjectStorageModel,
    SafetensorsStreamer,
    list_safetensors,
    pull_files,
)
from runai_model_streamer.s3_utils import s3_utils


class StorePrograms:
    """One method per program."""

    def __init__(self, bucket: str, folder: str) -> None:
        self.bucket, self.folder = bucket, folder

    def url(self, key: str) -> str:
        return f"{self.bucket}/{key}"

    def target(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def stream(self, *keys: str, **arguments: Any) -> list[Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([self.url(key) for key in keys], **arguments)
            return described(streamer.get_tensors())

    def files(self, name: str) -> list[Any]:
        """[path, bytes] below a folder that was pulled to, but for what marks it as complete."""
        found = []
        for place, _, names in os.walk(self.target(name)):
            for each in names:
                path = os.path.relpath(os.path.join(place, each), self.target(name))
                if not path.startswith((".headrace-pull", ".runai_complete")):
                    found.append([path, os.path.getsize(os.path.join(place, each))])
        return sorted(found)

    # ---- streaming

    def program_a_model(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(list_safetensors(self.url("minilm")))
            return described(streamer.get_tensors())

    def program_one_object(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.url("minilm/model-1.safetensors"))
            return described(streamer.get_tensors())

    def program_kinds_of_tensors(self) -> Any:
        return self.stream("odd/kinds.safetensors", "odd/odd.safetensors")

    def program_an_object_without_tensors(self) -> Any:
        return self.stream("odd/none.safetensors")

    def program_borrowed_tensors_used_at_once(self) -> Any:
        return self.stream("minilm/model-1.safetensors", "minilm/model-2.safetensors", owned=False)

    def program_some_names(self) -> Any:
        return self.stream("minilm/model-1.safetensors", "minilm/model-2.safetensors", tensor_names=["a.001", "b.000"])

    def program_unknown_name(self) -> Any:
        return self.stream("minilm/model-1.safetensors", tensor_names=["a.001", "nowhere"])

    def program_names_in_several_objects(self) -> Any:
        return self.stream("minilm/model-1.safetensors", "minilm/sub/model-3.safetensors")

    def program_distributed_without_a_group(self) -> Any:
        return self.stream("minilm/model-1.safetensors", is_distributed=True)

    def program_metadata(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([self.url("minilm/model-1.safetensors"), self.url("minilm/model-2.safetensors")])
            found = {
                file: [
                    [tensor.name, tensor.dtype, list(tensor.shape), tensor.offsets.start, tensor.offsets.end] for tensor in each
                ]
                for file, each in streamer.files_to_tensors_metadata.items()
            }
            list(streamer.get_tensors())
            return found, streamer.total_size

    def program_two_requests(self) -> Any:
        with SafetensorsStreamer() as streamer:
            found = []
            for key in ("minilm/model-1.safetensors", "minilm/model-2.safetensors"):
                streamer.stream_file(self.url(key))
                found.append(described(streamer.get_tensors()))
            return found

    def program_keys_with_other_letters(self) -> Any:
        return self.stream("odd/with space+plus%25/ä.safetensors")

    # ---- what is wrong

    def program_missing_object(self) -> Any:
        return self.stream("minilm/gone.safetensors")

    def program_missing_bucket(self) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(f"{self.bucket}-not-there/model.safetensors")
            return described(streamer.get_tensors())

    def program_a_missing_object_behind_a_good_one(self) -> Any:
        return self.stream("minilm/model-1.safetensors", "minilm/gone.safetensors")

    def program_broken_objects(self) -> Any:
        names = ("empty", "short", "length", "json", "gap", "overlap", "shape", "dtype")
        return {name: outcome(lambda name=name: self.stream(f"broken/{name}.safetensors")) for name in names}

    def program_a_truncated_object(self) -> Any:
        return self.stream("broken/truncated.safetensors")

    def program_several_kinds_of_storage(self) -> Any:
        local = self.target("nothing.safetensors")
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([self.url("minilm/model-1.safetensors"), local])

    def program_streamer_after_an_error(self) -> Any:
        with SafetensorsStreamer() as streamer:
            first = outcome(lambda: streamer.stream_file(self.url("minilm/gone.safetensors")))
            streamer.stream_file(self.url("minilm/model-1.safetensors"))
            return first, described(streamer.get_tensors())

    # ---- ranges

    def program_ranges(self) -> Any:
        requests = [
            FileChunks(7, self.url("minilm/old.bin"), [50, 0, 2, 2], [30, 20, 0, 60]),
            FileChunks.contiguous(9, self.url("minilm/tokenizer.model"), 1, [1, 2, 2]),
        ]
        with FileStreamer() as streamer:
            streamer.stream_files(requests)
            return sorted([file, index, list(data.shape), digest(data)] for file, index, data in streamer.get_chunks())

    def program_ranges_for_all_ranks(self) -> Any:
        with DistributedStreamer() as streamer:
            streamer.stream_files([FileChunks(0, self.url("minilm/old.bin"), [3], [40])], None, "cpu", False)
            return [[file, index, digest(data)] for file, index, data in streamer.get_chunks()]

    def program_range_past_the_end(self) -> Any:
        with FileStreamer() as streamer:
            streamer.stream_files([FileChunks(0, self.url("minilm/old.bin"), [90], [1 << 20])])
            return len(list(streamer.get_chunks()))

    def program_range_of_a_missing_object(self) -> Any:
        with FileStreamer() as streamer:
            streamer.stream_files([FileChunks(0, self.url("minilm/gone.bin"), [0], [10])])
            return len(list(streamer.get_chunks()))

    # ---- listing

    def program_listing_safetensors(self) -> Any:
        folders = ("minilm", "minilm/", "minilm/sub", "mini", "nowhere", "minilm/config.json")
        return {folder: outcome(lambda folder=folder: sorted(list_safetensors(self.url(folder)))) for folder in folders}

    def program_listing_a_missing_bucket(self) -> Any:
        return list_safetensors(f"{self.bucket}-not-there/minilm")

    def program_sizes(self) -> Any:
        streamer = FileStreamer()
        choices: list[dict[str, Any]] = [
            {},
            {"is_recursive": False},
            {"allow_patterns": ["*.json"]},
            {"ignore_patterns": ["*.bin", "*.safetensors"]},
            {"allow_patterns": ["config.json"]},
            {"allow_patterns": ["*/sub/*"]},
        ]
        listed = [
            outcome(lambda choice=choice: sorted(map(list, streamer.list_files(self.url("minilm/"), **choice))))
            for choice in choices
        ]
        return listed, outcome(lambda: streamer.list_files(self.url("nowhere/")))

    def program_sizes_by_prefix(self) -> Any:
        return sorted(map(list, FileStreamer().list_files(self.url("minilm"))))

    def program_globs(self) -> Any:
        glob = {"s3": s3_utils.s3_glob, "gs": s3_utils.gcs_glob, "az": s3_utils.azure_glob}[self.bucket.partition(":")[0]]
        return [sorted(glob(self.url("minilm"), patterns)) for patterns in (["*.json"], ["*.safetensors", "*.model"], None)]

    # ---- mirrors

    def program_pulling_all(self) -> Any:
        pull_files(self.url("minilm"), self.target("all"))
        return self.files("all")

    def program_pulling_by_patterns(self) -> Any:
        choices: list[Any] = [
            (["*.json"], None),
            (["*.json"], ["*/sub/*"]),
            (None, ["*.safetensors", "*.bin"]),
            (["minilm/*.model"], None),
            (["config.json"], None),
            ([], None),
            (None, []),
            (["*.JSON"], None),
        ]
        found = []
        for number, (allow, ignore) in enumerate(choices):
            pull_files(self.url("minilm/"), self.target(f"some-{number}"), allow, ignore)
            found.append([self.files(f"some-{number}"), os.path.exists(self.target(f"some-{number}"))])
        return found

    def program_pulling_by_store(self) -> Any:
        kinds = {"s3": s3_utils.s3_pull_files, "gs": s3_utils.gcs_pull_files, "az": s3_utils.azure_pull_files}
        kinds[self.bucket.partition(":")[0]](self.url("minilm"), self.target("by-store"), ["*.json"])
        return self.files("by-store")

    def program_pulling_what_is_there(self) -> Any:
        for _ in range(2):
            pull_files(self.url("minilm"), self.target("again"), ["*.json"])
        return self.files("again")

    def program_pulling_nothing(self) -> Any:
        pull_files(self.url("nowhere"), self.target("nothing"))
        return os.path.exists(self.target("nothing"))

    def program_pulling_from_a_missing_bucket(self) -> Any:
        return pull_files(f"{self.bucket}-not-there/minilm", self.target("never"))

    def program_a_mirror(self) -> Any:
        url, target = self.url("minilm"), self.target("mirror")
        seen = []
        for _ in range(2):
            with ObjectStorageModel(url, target) as model:
                seen.append([model._skip, os.path.relpath(model.dir, self.folder)])
                model.pull_files(allow_pattern=["*.model", "*.py", "*.json"])
                model.pull_files(ignore_pattern=["*.pt", "*.safetensors", "*.bin", "*.tensors", "*.pth"])
        return seen, self.files("mirror"), os.path.exists(os.path.join(target, ObjectStorageModel.SENTINEL_NAME))

    def program_a_mirror_of_nothing(self) -> Any:
        with ObjectStorageModel(self.url("nowhere"), self.target("empty")) as model:
            model.pull_files()

    def program_a_mirror_after_an_error(self) -> Any:
        target = self.target("failed")

        def fail() -> None:
            with ObjectStorageModel(self.url("minilm"), target) as model:
                model.pull_files(["*.json"])
                raise RuntimeError

        first = outcome(fail)
        marked = os.path.exists(os.path.join(target, ObjectStorageModel.SENTINEL_NAME))
        with ObjectStorageModel(self.url("minilm"), target) as model:
            model.pull_files(["*.json"])
        return first, marked, self.files("failed")


class S3Programs(StorePrograms):
    """Those with credentials as an argument, which only S3 takes."""

    def given(self, **changes: Any) -> s3_utils.S3Credentials:
        key, secret, endpoint = sys.argv[3].split(",")
        values: dict[str, Any] = {"access_key_id": key, "secret_access_key": secret, "endpoint": endpoint}
        return s3_utils.S3Credentials(**(values | {"region_name": "us-east-1"} | changes))

    def program_streaming_with_credentials(self) -> Any:
        return self.stream("minilm/model-1.safetensors", s3_credentials=self.given())

    def program_streaming_with_wrong_credentials(self) -> Any:
        return self.stream("minilm/model-1.safetensors", s3_credentials=self.given(secret_access_key="wrong"))

    def program_ranges_with_credentials(self) -> Any:
        with FileStreamer() as streamer:
            streamer.stream_files([FileChunks(0, self.url("minilm/old.bin"), [10], [5])], self.given())
            return [digest(data) for _, _, data in streamer.get_chunks()]


def main(bucket: str, folder: str, words: list[str]) -> None:
    """Run all, or with `--folders` those that list and copy and stream nothing."""
    programs = S3Programs(bucket, folder) if bucket.startswith("s3://") else StorePrograms(bucket, folder)
    run_all(
        programs, ("program_listing_", "program_globs", "program_pulling", "program_a_mirror") if "--folders" in words else ("",)
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
