"""Other loaders that are installed here, each in a process of its own and used as its documentation shows; headrace as well.

Every way reads whole files, hands out every tensor in memory of the caller's own, and drops it. The first of `ROUNDS` warms up
whatever there is; the best counts. `python -m headrace._bench._rivals NAME FILE ...` is one measurement, and prints seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace._bench._loads import evict
from headrace._bench._report import Run
from headrace.errors import OptionError

ROUNDS = 2
_PACKAGES = {  # what to import, and what to install
    "safetensors": ("safetensors", "safetensors"),
    "runai": ("runai_model_streamer", "runai-model-streamer"),
    "fastsafetensors": ("fastsafetensors", "fastsafetensors"),
}
_IMPORTS = {
    **{name: [module] for name, (module, _) in _PACKAGES.items()},
    "safetensors": ["safetensors.torch"],
    "headrace": ["headrace", "headrace._engine", "headrace.devices.cpu"],
}
NAMES = tuple(_PACKAGES)


def parse_names(text: str) -> list[str]:
    """The names in 'safetensors,runai'. Raises OptionError for one that is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in _PACKAGES:
            raise OptionError(f"there is no way to use {name!r}; --against takes {', '.join(NAMES)}", option="against")
    return names


def compare(names: Sequence[str], files: Sequence[str], *, cold: bool, seconds: float, say: Callable[[str], None]) -> list[Run]:
    """Measure headrace and the others on local files, in turns.

    Args:
        names: of `NAMES`.
        files: that are read, whole.
        cold: drop the files from the page cache before each; else they are in it.
        seconds: that one measurement may take, start of its process included.
        say: told of each measurement.
    """
    nbytes = sum(os.path.getsize(file) for file in files)
    runs: dict[str, Run] = {}
    for turn in range(ROUNDS):
        for name in ("headrace", *names):
            if name in runs and (runs[name].skipped or not turn):
                continue
            say(name)
            run = _measure(name, files, nbytes, cold, seconds)
            if name not in runs or run.skipped or run.seconds < runs[name].seconds:
                runs[name] = run
    return list(runs.values())


def _measure(name: str, files: Sequence[str], nbytes: int, cold: bool, seconds: float) -> Run:
    module, package = _PACKAGES.get(name, ("headrace", "headrace"))
    if importlib.util.find_spec(module) is None:
        return Run(name, skipped=f"not installed here; pip install {package}")
    if cold:
        evict(files)
    command = [sys.executable, "-m", "headrace._bench._rivals", name, *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Run(name, skipped=f"stopped after {seconds:.0f} s")
    if done.returncode:
        return Run(name, skipped=f"failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return Run(name, nbytes, float(done.stdout.split()[-1]))


# -- one measurement, in its own process -----------------------------------------------------------------------------------------


def _headrace(files: Sequence[str]) -> Iterator[Any]:
    import headrace

    yield from headrace.stream(list(files))


def _safetensors(files: Sequence[str]) -> Iterator[Any]:
    """`get_tensor` hands out views of a mapped file; only a copy of them has been read."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name).clone()


def _runai(files: Sequence[str]) -> Iterator[Any]:
    """With `owned`, where this version has it, tensors have memory of their own; else they are valid until the next."""
    import inspect

    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found, unused-ignore]

    with SafetensorsStreamer() as streamer:
        owned = {"owned": True} if "owned" in inspect.signature(streamer.stream_files).parameters else {}
        streamer.stream_files(list(files), **owned)
        for name, tensor in streamer.get_tensors():
            yield name, tensor if owned else tensor.clone()


def _fastsafetensors(files: Sequence[str]) -> Iterator[Any]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found, unused-ignore]

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: list(files)})
    buffer = loader.copy_files_to_device()
    try:
        for name in list(buffer.key_to_rank_lidx):
            yield name, buffer.get_tensor(name)
    finally:
        buffer.close()
        loader.close()


_WAYS: dict[str, Callable[[Sequence[str]], Iterator[Any]]] = {
    "headrace": _headrace,
    "safetensors": _safetensors,
    "runai": _runai,
    "fastsafetensors": _fastsafetensors,
}


def _main(name: str, *files: str) -> None:
    for module in ("torch", *_IMPORTS[name]):
        importlib.import_module(module)  # before the clock starts: a server has imported what it loads with
    began = time.perf_counter()
    for _ in _WAYS[name](files):
        pass
    sys.stdout.write(f"{time.perf_counter() - began}\n")
    sys.stdout.flush()
    os._exit(0)  # native clients hang or crash now and then when the interpreter shuts down


if __name__ == "__main__":
    _main(*sys.argv[1:])
