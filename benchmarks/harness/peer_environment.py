"""A virtual environment with the peers, apart from the project's own: made once, kept, not needed for headrace and floors.

A peer that cannot be installed is left out; its ways then say that it is missing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

FIRST = ("torch==2.13.0", "numpy")  # before anything that asks for torch by an open range
PEERS = (
    "safetensors==0.8.0",
    "runai-model-streamer[s3]==0.17.1",
    "fastsafetensors==0.5.0",
    "instanttensor==0.2.2",
    "tensorizer==2.12.1",
    "flashpack==0.4.5",
    "obstore==0.12.1",
    "awscrt==0.38.1",
    "boto3==1.44.8",
)


def ensure(folder: Path, say: Callable[[str], None]) -> Path | str:
    """The interpreter of the peers' environment, made where it is missing; or why there is none."""
    python, stamp = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join((*FIRST, *PEERS))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    say("installing the peers (minutes the first time)")
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        _install(python, FIRST)
    except subprocess.CalledProcessError as exc:
        return f"no environment for the peers: {_last_line(exc)}"
    for peer in PEERS:
        try:
            _install(python, [peer])
        except subprocess.CalledProcessError as exc:
            say(f"{peer} left out: {_last_line(exc)}")
    stamp.write_text(wanted)
    return python


def _install(python: Path, packages: Sequence[str]) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _last_line(exc: subprocess.CalledProcessError) -> str:
    said = str(exc.stderr or "").strip().splitlines()
    return said[-1] if said else f"exit status {exc.returncode}"
