"""PURE: which files of a folder are taken, by globs, and which names no filesystem can hold.

A key of an object store may be anything; what is no plain relative path is refused before anything is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from headrace.errors import FormatError, OptionError, SourceNotFoundError

Patterns: TypeAlias = "str | Sequence[str] | None"

_PATH_NBYTES: Final = 4095  # PATH_MAX without its NUL
_NAME_NBYTES: Final = 255  # NAME_MAX


def choose(names: Iterable[str], include: Patterns, exclude: Patterns, *, url: str) -> list[str]:
    """The names that fit.

    Args:
        names: paths relative to a folder.
        include, exclude: globs; `*` also matches `/`. None: all, and none.
        url: of the folder, for errors.

    Raises:
        OptionError: what is given is no glob.
        SourceNotFoundError: none fits.
        FormatError: one that fits is no name of a file.
    """
    present = list(dict.fromkeys(names))
    wanted, unwanted = _globs(include), _globs(exclude)
    chosen = [name for name in present if _fits(name, wanted, default=True) and not _fits(name, unwanted, default=False)]
    if not chosen:
        seen = f"none of its {len(present):,} files fits the patterns" if present else "it holds no files"
        raise SourceNotFoundError(f"there is nothing to pull from {url}: {seen}", url=url)
    folders = {name[:at] for name in chosen for at in range(len(name)) if name[at] == "/"}
    for name in chosen:
        _check_name(name, url, folders)
    return chosen


def _globs(patterns: Patterns) -> list[str] | None:
    if patterns is None:
        return None
    try:
        given = [patterns] if isinstance(patterns, str) else list(patterns)
        refused = not all(isinstance(each, str) for each in given)
    except TypeError:
        given, refused = [], True
    if refused:
        raise OptionError(f"include and exclude are globs, a str or a list of them, not {patterns!r}", option="include")
    return [f"{each}*" if each.endswith("/") else each for each in given] or None


def _fits(name: str, globs: Sequence[str] | None, *, default: bool) -> bool:
    return default if globs is None else any(fnmatchcase(name, glob) for glob in globs)


def _check_name(name: str, url: str, folders: set[str]) -> None:
    reason = ""
    if not name or "\\" in name or re.search("[\0\ud800-\udc7f\udd00-\udfff]", name):  # half characters are no bytes
        reason = "is no file name"
    elif name.startswith("/") or re.match(r"[A-Za-z]:", name):
        reason = "is an absolute path"
    elif any(part in ("", ".", "..") for part in name.split("/")):
        reason = "leads out of the destination or is no plain path"
    elif name in folders:
        reason = "is a file and a folder at once, which no filesystem can hold"
    elif _is_too_long(name):
        reason = "is longer than filesystems allow"
        name = f"{name[:60]}..."
    if reason:
        raise FormatError(f"{url}: the name {name!r} {reason}; leave it out with exclude", url=url)


def _is_too_long(name: str) -> bool:
    raw = os.fsencode(name)
    return len(raw) > _PATH_NBYTES or any(len(part) > _NAME_NBYTES for part in raw.split(b"/"))
