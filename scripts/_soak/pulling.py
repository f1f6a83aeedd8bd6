"""Pulls that are killed and go on: in processes of their own until one is let through, then every byte is compared."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

from ranks import prepare_ranks

import headrace
from _soak.cases import Case
from _soak.judging import WrongError, check_error
from _soak.loading import Place, Result, credentials_for, serving
from _soak.models import make_model

_STATE = ".headrace-pull"
_LIMIT_S = 60.0
_FLIPPED = bytes(byte ^ 0x55 for byte in range(256))  # what the server makes of an object that is replaced


def run_pull(case: Case, root: Path) -> Result:
    """Pull, with up to two kills on the way; then again without troubles, where they stopped it.

    Raises:
        WrongError: files are not as they should be.
    """
    result, draw = Result(), random.Random(case.seed + 1)
    model, dst = make_model(case, root), root / "pulled"
    with serving(case, model, result.injected) as place:
        right = {path.name: path.read_bytes() for path in model.folder.iterdir()}
        if case.place == "http":  # a web server has no listing: its files are those that the index names
            right = {name: data for name, data in right.items() if ".safetensors" in name}
        arguments = {"attempts": 4, "stall_timeout_s": 0.5, "deadline_s": 10.0}
        for _ in range(draw.choice([0, 1, 1, 2])):
            result.injected["killed"] += _pull_and_die(place, dst, arguments, draw)
            _check_files(dst, right, case, whole=False)
        try:
            report = headrace.pull(place.url(), dst, **arguments, **place.arguments)
            result.nbytes += report.copied_nbytes
        except Exception as exc:  # noqa: BLE001 - it is judged
            result.errors[check_error(exc, case)] += 1
            result.outcome = "error"
            _check_files(dst, right, case, whole=False)
    if result.errors:
        headrace.pull(model.folder, dst, include=list(right))
    _check_files(dst, right, case, whole=True)
    return result


def _pull_and_die(place: Place, dst: Path, arguments: dict[str, Any], draw: random.Random) -> bool:
    """Whether it was killed, and was not through or refused before."""
    prepare_ranks()
    process = multiprocessing.get_context("forkserver").Process(
        target=_pull,
        args=(place.url(), place.endpoint, str(dst), arguments, draw.uniform(0, 0.08), draw.choice([0, 1, 3, 99])),
        daemon=True,
    )
    process.start()
    process.join(_LIMIT_S)
    ended = process.exitcode
    process.kill()
    process.join()
    process.close()
    if ended is None:
        raise WrongError(f"a pull did not end within {_LIMIT_S:g} s")
    return ended == -signal.SIGKILL


def _pull(url: Any, endpoint: str | None, dst: str, arguments: dict[str, Any], seconds: float, calls: int) -> None:
    """In a process of its own: pull, and be killed after some time or some reports, whichever comes first."""
    left = [calls]

    def progress(_: headrace.PullProgress) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    try:
        credentials = None if endpoint is None else credentials_for(endpoint)
        headrace.pull(url, dst, credentials=credentials, progress=progress, **arguments)
    except headrace.HeadraceError:
        os._exit(1)
    os._exit(0)


def _check_files(dst: Path, right: dict[str, bytes], case: Case, *, whole: bool) -> None:
    """Files have their names only when they are whole; in the end all are there, and no part of one."""
    may_be_new = any(trouble.kind == "replaced" for trouble in case.troubles)  # a pull that began later brings the new version
    replaced = {name: data.translate(_FLIPPED) for name, data in right.items()} if may_be_new else {}
    found = {path.name: path.read_bytes() for path in dst.iterdir() if path.is_file()} if dst.is_dir() else {}
    wrong = [name for name, data in found.items() if data not in (right.get(name), replaced.get(name))]
    if wrong or (whole and found.keys() != right.keys()):
        raise WrongError(f"pulled files are wrong: {wrong}, missing: {sorted(right.keys() - found.keys())}")
    parts = sorted(path.name for path in (dst / _STATE).iterdir() if path.name not in ("lock", "pulled")) if whole else []
    if parts:
        raise WrongError(f"parts are left of a pull that is through: {parts}")
