"""From C sources to a shared library, with the machine's own compiler, once per version of the sources.

The library lies in a folder of this user under the system's folder for temporary files, named by a digest of what it is made of.
It is compiled under another name and then renamed, so that processes that build it at the same time do not meet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import HeadraceError

# Symbolic: what it calls of itself is its own, also where torch's libcudart was there first, with the same names.
_FLAGS = ("-std=gnu11", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-shared", "-Wl,-Bsymbolic", "-pthread", "-Wall", "-Wextra")
_COMPILERS = ("cc", "gcc", "clang")
_TIME_LIMIT_S = 120.0


class BuildError(HeadraceError, RuntimeError):
    """The simulated library could not be built: there is no C compiler, or it failed; the message has its output."""


def find_compiler() -> str | None:
    """Path of the machine's C compiler; None where there is none."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def build(name: str, sources: Sequence[Path], headers: Sequence[Path] = ()) -> Path:
    """Path of the shared library made of these files, compiled unless it lies there already.

    Raises:
        BuildError: no compiler, or the compiler failed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"building {name} needs a C compiler: none of {', '.join(_COMPILERS)} is on PATH (install gcc)")
    digest = hashlib.sha256(repr((compiler, _FLAGS)).encode())
    for file in (*sources, *headers):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    library = _folder() / f"{name}-{digest.hexdigest()[:20]}.so"
    if not library.exists():
        _compile(compiler, sources, library)
    return library


def _folder() -> Path:
    """This user's own folder: a library that somebody else could have put there is never loaded."""
    folder = Path(tempfile.gettempdir()) / f"headrace-simulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise BuildError(f"{folder} is not a folder that only this user can write to; remove it")
    return folder


def _compile(compiler: str, sources: Sequence[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *_FLAGS, *map(str, sources), "-o", str(made)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False
        )
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
        os.replace(made, library)
