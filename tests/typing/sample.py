"""A program on the public API, for the type checker: `mypy --strict` has to find every type, and no more than what is meant.

It is not run. Each `assert_type` fails the check where headrace's own types say something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_type

import headrace
from headrace import (
    USUAL_RULES,
    Checkpoint,
    FileCheck,
    Held,
    LoadReport,
    Options,
    Parts,
    Plan,
    PullProgress,
    PullReport,
    Snapshot,
    Split,
    StateDict,
    TensorInfo,
    TensorStream,
    VerifyProgress,
    VerifyReport,
)
from headrace.devices.base import Device
from headrace.sources.azure import AzureCredentials
from headrace.sources.base import ByteSource, Folder
from headrace.sources.fsspec import FsspecFolder
from headrace.sources.gcs import GcsCredentials
from headrace.sources.s3 import S3Credentials
from headrace.testing import FaultySource, FolderTests, SourceTests
from headrace.testing.device_contract import DeviceTests
from headrace.testing.s3server import S3Server


class Archive:
    """A `ByteSource` of one's own."""

    def __init__(self, data: bytes, url: str = "archive:model") -> None:
        self.url, self.nbytes, self.version = url, len(data), object()
        self._data = data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


class Archives:
    """A `Folder` of one's own."""

    url = "archive:"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def names(self) -> list[str]:
        return sorted(self._files)

    def open(self, name: str) -> Archive:
        return Archive(self._files[name], f"{self.url}/{name}")


class TestArchive(SourceTests):
    def make(self, data: bytes) -> Archive:
        return Archive(data)


class TestArchives(FolderTests):
    def make(self, files: dict[str, bytes]) -> Archives:
        return Archives(files)


class TestMyDevice(DeviceTests):
    def __init__(self, device: Device) -> None:
        self._device = device

    def make(self) -> Device:
        return self._device


def sources() -> list[ByteSource]:
    folders: list[Folder] = [Archives({}), headrace.folder("s3://models/m"), FsspecFolder("memory://m", options={"token": ""})]
    return [*(folder.open(name) for folder in folders for name in folder.names()), FaultySource(Archive(b""))]


def look(path: Path) -> None:
    with headrace.open(path, verify="auto", concurrency=4) as checkpoint:
        assert_type(checkpoint, Checkpoint)
        for name, info in checkpoint.items():
            assert_type(name, str)
            assert_type(info, TensorInfo)
            assert_type(info.shape, tuple[int, ...])
            print(name, info.dtype, info.nbytes, info.offset, info.shard)
        assert_type(checkpoint["bias"], TensorInfo)
        assert_type(len(checkpoint), int)
        assert_type(headrace.read(checkpoint, "bias", slice(0, 2)), torch.Tensor)
    planned = headrace.plan(path, names="layers.*", dtype="bfloat16")
    assert_type(planned, Plan)
    assert_type(planned.read_nbytes, int)
    assert_type(headrace.save_metadata(path, "/var/lib/headers"), list[Path])


def report(snapshot: Snapshot) -> None:
    assert_type(snapshot.rate, float)
    assert_type(snapshot.as_dict(), dict[str, Any])
    assert_type(snapshot.degraded, tuple[str, ...])
    print(snapshot.read_nbytes, snapshot.slowest, snapshot.routes)


def load(url: str, given: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    options = Options(concurrency=8, memory_limit="256MiB")
    assert_type(options.memory_limit, int | None)
    assert_type(Options.from_environment(), Options)
    with headrace.stream(
        url,
        names=lambda info: info.nbytes > 1024,
        slices={"lm_head.weight": (slice(0, 128), ...)},
        into=given,
        rename={"a": "b"},
        progress=report,
        trace="trace.json",
        options=options,
        order="file",
    ) as stream:
        assert_type(stream, TensorStream)
        for name, tensor in stream:
            assert_type(name, str)
            yield tensor
        assert_type(stream.stats, Snapshot)
    weights = headrace.load(Archive(b""), progress=True, stall_timeout_s=5, memory_limit={"cpu": "1GiB", "*": -1})
    assert_type(weights, dict[str, torch.Tensor])
    assert_type(headrace.load(Archives({})), dict[str, torch.Tensor])
    assert_type(headrace.load(sources()), dict[str, torch.Tensor])
    assert_type(headrace.load_file("m.safetensors"), dict[str, torch.Tensor])


def load_to(device: Device, url: str) -> None:
    with headrace.hold(url, device=device, pin="require") as held:
        assert_type(held, Held)
        print(held.held_nbytes, held.how, held.pinned)
        headrace.load(held, device=device)
    places: dict[str, str | torch.device] = {"experts.*": "cpu", "*": torch.device("cuda", 0)}
    with headrace.stream(url, device=lambda name: "cpu" if name == "table" else None, ownership="copied") as stream:
        dict(stream)
    with headrace.stream(url, device=places, dtype={"*.norm": "float32"}, group="node") as stream:
        dict(stream)
    headrace.release_staging()


def of_a_rank(url: str, rank: int, state: Mapping[str, torch.Tensor]) -> None:
    with headrace.open(url) as checkpoint:
        slices = headrace.tensor_parallel(checkpoint, rank, 2, rules={**USUAL_RULES, "*.fused": Split(0, parts=(4, 4, 8))})
        halves = Parts([(0, 8), (16, 24)])
        headrace.load(checkpoint, slices={**slices, "experts": (halves, slice(None))}, group=True)
    assert_type(headrace.save_sharded(state, "out", rank=rank), list[Path])
    assert_type(headrace.open_sharded("out", rank=rank), Checkpoint)


def credentials(server: S3Server) -> None:
    s3 = S3Credentials(access_key_id="AK", secret_access_key="SK", endpoint=server.url)
    headrace.load("s3://models/m", credentials=s3)
    headrace.load("gs://models/m", credentials=GcsCredentials(token="t"))
    headrace.load("az://models/m", credentials=AzureCredentials(account_name="a", sas_token="sig=s"))
    headrace.load("sftp://host/m", credentials={"username": "me"})


def move(url: str) -> None:
    def copied(now: PullProgress) -> None:
        print(now.nbytes, now.total_nbytes, now.rate)

    def checking(now: VerifyProgress) -> None:
        print(now.failed_files)

    done = headrace.pull(url, "/dev/shm/model", progress=copied, include=["*.safetensors"])
    assert_type(done, PullReport)
    assert_type(done.copied_nbytes, int)
    checked = headrace.verify(done.destination, progress=checking)
    assert_type(checked, VerifyReport)
    assert_type(checked.ok, bool)
    assert_type(checked.failed, tuple[FileCheck, ...])


def drop_in(module: torch.nn.Module, url: str) -> None:
    loaded = headrace.load_into(module, url, strict=False, progress=True, network_chunk_nbytes="8MiB")
    assert_type(loaded, LoadReport)
    print(loaded.missing, loaded.unexpected, loaded.tied)
    with headrace.state_dict(url, verify=True, concurrency=4) as weights:
        assert_type(weights, StateDict)
        assert_type(weights["bias"], torch.Tensor)
        module.load_state_dict(weights)
    with headrace.safe_open("m.safetensors", framework="pt") as file:
        assert_type(file.keys(), list[str])
        print(file.get_tensor("bias"))  # Any: torch's or numpy's
    with headrace.patch() as patched:
        print(patched.report)
    assert_type(headrace.local_view(url), str)


def main(url: str, module: torch.nn.Module) -> None:
    try:
        drop_in(module, url)
    except headrace.TensorNotFoundError as error:
        assert_type(error.close_matches, tuple[str, ...])
    except headrace.ModuleMismatchError as error:
        print(error.missing)
    except (headrace.SourceNotFoundError, headrace.SourcePermissionError, headrace.SourceTimeoutError) as error:
        assert_type(error.status, int | None)
    except (headrace.SourceChangedError, headrace.TruncatedError) as error:
        print(error.url, error.offset, error.nbytes)
    except headrace.IntegrityError as error:
        assert_type(error.block, int | None)
    except headrace.SourceError as error:
        print(error.url, error.attempts)
    except headrace.FormatError as error:
        assert_type(error.tensor, str | None)
    except headrace.OptionError as error:
        assert_type(error.option, str)
    except headrace.NoSpaceError as error:
        assert_type(error.needed, int | None)
    except headrace.DestinationError as error:
        assert_type(error.url, str)
    except headrace.DeviceMemoryError as error:
        assert_type(error.requested, int | None)
    except (headrace.PinningError, headrace.DeviceError) as error:
        assert_type(error.device, str | None)
    except headrace.PeerError as error:
        assert_type(error.rank, int | None)
    except headrace.LoadError as error:
        assert_type(error.filled, tuple[str, ...])
    except headrace.StreamError as error:
        print(error)
    except headrace.HeadraceError as error:
        assert_type(error.others, tuple[BaseException, ...])
