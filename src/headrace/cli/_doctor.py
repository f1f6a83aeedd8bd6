"""`headrace doctor`: what this machine has for loads, and what it lacks and why. Nothing is written, and nothing is changed.

The JSON is one object; names are stable, new ones may be added:

    findings   [{"name", "ok", "text"}]             ok: whether it is there; null where it is neither good nor bad
    packages   [{"name", "version", "extras"}]      version: null where it is not installed; extras: those that install it

`--gpu` tries the GPU out instead (`headrace.testing.acceptance`), with temporary files. Its JSON has {probe: {question: answer}}:

    date       of the run
    not tested why there was nothing to test; then there is no more
    real       what the driver answers; simulated: what the simulated one does, empty without a C compiler
    figures    what has no right or wrong
    benchmark  of `scripts/bench device`, where the source tree is there
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

import headrace
from headrace import DeviceError, HeadraceError, OptionError
from headrace._machine import available_cpus, available_memory
from headrace.cli._arguments import Device, Json
from headrace.cli._screen import Column, Screen, nbytes_text
from headrace.sources.file import FileSource, cached_share

if TYPE_CHECKING:
    from headrace.devices.base import Device as Gpu

_PINNED_NBYTES = (256 << 20, 64 << 20, 4 << 20, 64 << 10)  # a ring's largest segment, and what is tried where that fails
_NOT_FOR_USERS = ("dev", "emulators")
_ROOT = Path("/")


class Finding(NamedTuple):
    """One thing that was looked at. `ok`: whether it is there; None where it is neither good nor bad."""

    name: str
    ok: bool | None
    text: str


class Package(NamedTuple):
    """A package that headrace can use, and the extras that install it; none where it always comes along."""

    name: str
    version: str | None
    extras: tuple[str, ...]


def doctor(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file, or a folder with files, as models lie here.")] = ".",
    device: Device = "cuda",
    as_json: Json = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Try the first GPU out instead: driver, bytes of loads, rates. Takes minutes; exits with 1 if wrong."
        ),
    ] = False,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="With --gpu: what the simulated GPU answers, on any machine with a C compiler.")
    ] = False,
) -> None:
    """Show what this machine has for loads, and why what is missing is missing.

    GPU, page-locked memory, storage and packages are looked at.
    """
    if gpu or simulated:
        _check_gpu_options(device, gpu=gpu)
        _try_out(Path(path), as_json=as_json, simulated=simulated)
        return
    findings, packages = list(examine(Path(path), device)), installed_packages()
    if as_json:
        rows = {"findings": [each._asdict() for each in findings], "packages": [each._asdict() for each in packages]}
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    screen = Screen()
    marks = {True: "yes", False: "no", None: ""}
    screen.table((Column(""), Column(""), Column("here", folds=True)), ((f.name, marks[f.ok], f.text) for f in findings))
    screen.line()
    screen.table((Column("package"), Column("version"), Column("installed by", folds=True)), map(_package_row, packages))


def _check_gpu_options(device: str, *, gpu: bool) -> None:
    if not gpu:
        raise OptionError("--simulated goes with --gpu: headrace doctor --gpu --simulated", option="simulated")
    if device not in ("cuda", "cuda:0"):
        raise OptionError(
            f"--gpu tries the first GPU out, not {device}; choose the first one by CUDA_VISIBLE_DEVICES", option="device"
        )


def _try_out(path: Path, *, as_json: bool, simulated: bool) -> None:
    """The acceptance, whose temporary files lie where models do, if that can be written to.

    Raises:
        DeviceError: not all is as it should be.
    """
    from headrace.testing.acceptance import accept

    folder = path if path.is_dir() else path.parent
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    found, status = accept(folder, (lambda _: None) if as_json else _say, simulated=simulated)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if status:
        raise DeviceError("not every answer is what it should be; what was printed says which are not", device="cuda")


def _say(text: str) -> None:
    screen = Screen()
    for line in text.split("\n"):
        screen.line(line)
    sys.stdout.flush()  # the next lines take minutes


def _package_row(package: Package) -> tuple[str, str, str]:
    extras = " or ".join(f"pip install 'headrace[{extra}]'" for extra in package.extras)
    return package.name, package.version or "-", extras or "headrace itself"


# -- what is looked at -----------------------------------------------------------------------------------------------------------


def examine(path: Path, device: object = "cuda", *, root: Path = _ROOT) -> Iterator[Finding]:
    """Look at the machine.

    Args:
        path: a file or folder, for what depends on the filesystem.
        device: a GPU's name, or a `Device`.
        root: where the system's files are.
    """
    python = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"
    yield Finding("headrace", None, f"{headrace.__version__}; {python}")
    yield Finding("CPUs", None, f"{available_cpus(root)} may be used of {os.cpu_count()}")
    room = available_memory(root)
    yield Finding("memory", None, f"{nbytes_text(room)} can be had" if room is not None else "the system does not tell")
    yield _torch()
    gpu, why = _open(device)
    yield from _gpu(gpu, why, root)
    yield _pinned(gpu)
    yield _locked_limit()
    yield _huge_pages(root)
    yield _shared_memory(root)
    yield from _storage(path, gpu)


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", False, "not installed; pip install 'headrace[torch]'")
    import torch

    builds = [f"{name} {version}" for name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)) if version]
    return Finding("torch", True, f"{torch.__version__}, built for {builds[0] if builds else 'the CPU'}")


def _open(device: object) -> tuple[Gpu | None, str]:
    """(the device, why there is none)"""
    if hasattr(device, "copy_async"):
        return cast("Gpu", device), ""
    try:
        from headrace.devices.cuda import open_device

        name = str(device)
        return open_device(int(name[5:]) if name.startswith("cuda:") else None), ""
    except ModuleNotFoundError as exc:
        return None, f"{exc.name} is not installed"
    except (DeviceError, ValueError) as exc:
        return None, str(exc)


def _gpu(gpu: Gpu | None, why: str, root: Path) -> Iterator[Finding]:
    if gpu is None:
        yield Finding("GPU", False, why)
    else:
        from headrace.devices.cuda import visible_gpus

        others = "; ".join(f"{name}, {nbytes_text(nbytes)}" for name, nbytes in visible_gpus())
        yield Finding("GPU", True, f"{gpu.name}: {nbytes_text(gpu.free_nbytes())} free" + (f" ({others})" if others else ""))
    versions = [("nvidia", "proc/driver/nvidia/version"), ("amdgpu", "sys/module/amdgpu/version")]
    found = [f"{name}: {text.splitlines()[0]}" for name, file in versions if (text := _text(root / file))]
    yield Finding("driver", bool(found), "; ".join(found) or "no NVIDIA or AMD driver is loaded")


def _pinned(gpu: Gpu | None) -> Finding:
    """Whether memory can be page-locked, and how much at once."""
    if gpu is None:
        return Finding("pinned memory", False, "not tried: there is no GPU to page-lock it for")
    why = ""
    for nbytes in _PINNED_NBYTES:
        try:
            _pin(gpu, nbytes)
        except (HeadraceError, OSError) as exc:
            why = str(exc)
        else:
            return Finding("pinned memory", True, f"{nbytes_text(nbytes)} at once" + (f"; more is refused: {why}" if why else ""))
    return Finding("pinned memory", False, why)


def _pin(gpu: Gpu, nbytes: int) -> None:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    try:
        from headrace._addresses import address_of

        for at in range(0, nbytes, mmap.PAGESIZE):
            view[at] = 0
        gpu.pin(address_of(view), nbytes)
        gpu.unpin(address_of(view))
    finally:
        view.release()
        memory.close()


def _locked_limit() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if limit == resource.RLIM_INFINITY else nbytes_text(limit)
    return Finding("memlock limit", None, f"{text} (ulimit -l); it binds io_uring, and few drivers")


def _huge_pages(root: Path) -> Finding:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        return Finding("huge pages", False, "the kernel has no transparent huge pages; memory is made a page of 4 KiB at a time")
    return Finding("huge pages", chosen[1] != "never", f"transparent ones: {chosen[1]}")


def _shared_memory(root: Path) -> Finding:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as exc:
        return Finding("/dev/shm", False, exc.strerror or str(exc))
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    small = "; a container's is often 64 MiB: docker run --shm-size" if size <= 64 << 20 else ""
    return Finding("/dev/shm", not small, f"{nbytes_text(size)}, {nbytes_text(free)} free{small}")


def _storage(path: Path, gpu: Gpu | None) -> Iterator[Finding]:
    try:
        file = _file_to_try(path)
        source = FileSource(file, direct_io="on")
    except (HeadraceError, OSError) as exc:
        yield Finding("storage", False, str(exc))
        return
    try:
        yield Finding("storage", None, f"{source.filesystem}, by {file}")
        yield _past_the_cache(source)
        yield _residency(source)
        yield _direct_storage(source, gpu)
    finally:
        source.close()


def _file_to_try(path: Path) -> Path:
    """The path, or the longest file of the folder."""
    if not path.is_dir():
        return path
    files = [Path(entry.path) for entry in os.scandir(path) if entry.is_file()]
    longest = max(files, key=lambda file: file.stat().st_size, default=None)
    if longest is None:
        raise FileNotFoundError(f"{path} has no file to try; give one, or a folder that has some")
    return longest


def _past_the_cache(source: FileSource) -> Finding:
    block = source.block_nbytes
    if source.nbytes < block:
        return Finding("O_DIRECT", None, f"not tried: {source.url} is shorter than a block of {block:,} bytes")
    memory = mmap.mmap(-1, block)
    view = memoryview(memory)
    try:
        source.read_direct_into(0, view)
    except HeadraceError as exc:
        return Finding("O_DIRECT", False, str(exc))
    finally:
        view.release()
        memory.close()
    refused = source.direct_refused
    return Finding("O_DIRECT", refused is None, refused or f"works, in blocks of {block:,} bytes")


def _residency(source: FileSource) -> Finding:
    descriptor = source.reopen(os.O_RDONLY)
    try:
        share = cached_share(descriptor, source.nbytes)
    finally:
        os.close(descriptor)
    if share is None:
        return Finding("cachestat", False, "the kernel does not have it, or forbids it; what is cached is found out otherwise")
    return Finding("cachestat", True, f"works; {min(1.0, share):.0%} of the file is in the page cache")


def _direct_storage(source: FileSource, gpu: Gpu | None) -> Finding:
    from headrace._direct import verdict_for
    from headrace.sources.gds import find_libraries

    if gpu is None:
        there = [path for prefix in ("cuda", "hip") for path in find_libraries(prefix) if "/" in path]
        return Finding("direct storage", False, f"there is no GPU; library: {there[0] if there else 'none found'}")
    verdict = verdict_for(source, gpu)
    return Finding("direct storage", verdict.usable and verdict.mode != "compat", verdict.reason)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# -- packages --------------------------------------------------------------------------------------------------------------------


def installed_packages(requires: Callable[[str], list[str] | None] = importlib.metadata.requires) -> list[Package]:
    """What headrace's own metadata names, in their order."""
    try:
        lines = requires("headrace") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder of sources
        return []
    extras: dict[str, list[str]] = {}
    for line in lines:
        name, extra = re.split(r"[^\w.-]", line, maxsplit=1)[0], re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name.lower() == "headrace" or (extra is not None and extra[1] in _NOT_FOR_USERS):
            continue
        extras.setdefault(name, [])
        extras[name] += [extra[1]] if extra is not None else []
    return [Package(name, _version(name), tuple(each)) for name, each in extras.items()]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
