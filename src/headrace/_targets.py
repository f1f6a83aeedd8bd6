"""PURE: which tensors go where, if not all of them go to one place.

A mapping's keys are names, globs of names, or "file:" and the name of a shard; its values are targets. A full name counts before
everything else, then the first key that fits. What no key fits goes to the CPU's memory. A function of the name says it for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final, TypeVar

from headrace._header import Header
from headrace._selection import unknown_tensor
from headrace.errors import OptionError

DEFAULT: Final = "cpu"
_FILE: Final = "file:"

_Target = TypeVar("_Target")


def divide(
    targets: Mapping[str, _Target],
    default: _Target,
    headers: Sequence[Header],
    chosen: Sequence[Sequence[int] | None],
    where: Mapping[str, tuple[int, int]],
    shards: Sequence[str],
) -> dict[_Target, list[str]]:
    """Divide tensors among targets.

    Args:
        targets: {name, glob or "file:NAME": target}.
        default: where the others go.
        headers: the shards' headers. `chosen`: the wanted rows of each; None for all.
        where: every tensor of the checkpoint. `shards`: the names of its files.

    Returns:
        {target: names, in file order}, every target with an entry, in the order in which they come first.

    Raises:
        OptionError: a key that no tensor, or no file of the checkpoint, is called like.
    """
    found: dict[_Target, list[str]] = {target: [] for target in (*targets.values(), default)}
    rules = [(key, target) for key, target in targets.items() if key not in where]
    for key, _ in rules:
        _check_fits(key, where, shards)
    for shard, (header, rows) in enumerate(zip(headers, chosen, strict=True)):
        of_file = [(key, target) for key, target in rules if not key.startswith(_FILE) or key == _FILE + shards[shard]]
        for row in range(len(header.names)) if rows is None else rows:
            name = header.names[row]
            found[targets[name] if name in targets else _first_fit(name, of_file, default)].append(name)
    return found


def divide_by(
    target_of: Callable[[str], _Target], headers: Sequence[Header], chosen: Sequence[Sequence[int] | None]
) -> dict[_Target, list[str]]:
    """Divide tensors as a function says, asked once for each. Otherwise as `divide`; only targets that something goes to."""
    found: dict[_Target, list[str]] = {}
    for header, rows in zip(headers, chosen, strict=True):
        for name in header.names if rows is None else [header.names[row] for row in rows]:
            found.setdefault(target_of(name), []).append(name)
    return found


def _first_fit(name: str, rules: Sequence[tuple[str, _Target]], default: _Target) -> _Target:
    return next((target for key, target in rules if key.startswith(_FILE) or fnmatchcase(name, key)), default)


def _check_fits(key: str, where: Mapping[str, tuple[int, int]], shards: Sequence[str]) -> None:
    """A key that is meant for nothing is a slip of the pen, and tensors would go to the wrong place."""
    if key.startswith(_FILE):
        name = key.removeprefix(_FILE)
        if name not in shards:
            near = get_close_matches(name, shards, n=2)
            hint = (
                f"; did you mean {' or '.join(near)}?"
                if near
                else f"; there are {len(shards)}, {shards[0] if shards else ''} first"
            )
            raise OptionError(f"device: no file of the checkpoint is called {name!r}{hint}", option="device")
    elif key != "*" and not any(fnmatchcase(name, key) for name in where):
        error = unknown_tensor(key, where)
        raise OptionError(f"device: {error}", option="device") from error
