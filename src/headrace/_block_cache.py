"""Blocks of files in memory: loaded once by whoever needs one first, kept while they are used, and a while longer.

What a block is, and how it is loaded, is the caller's business.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

CACHE_NBYTES: Final = 64 << 20  # blocks that nobody is reading are kept up to this: neighbours come soon or not at all


class _Entry:
    __slots__ = ("memory", "ready", "users")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.ready, self.users = memory, False, 1


class BlockCache:
    """Blocks of the sources of a checkpoint. What is in use is kept; of the rest, the last `keep_nbytes`.

    Args:
        keep_nbytes: bytes of blocks that nobody uses.
    """

    def __init__(self, keep_nbytes: int = CACHE_NBYTES) -> None:
        self._keep_nbytes = keep_nbytes
        self._changed = threading.Condition()
        self._entries: OrderedDict[tuple[object, int], _Entry] = OrderedDict()  # the one used longest ago first

    @contextmanager
    def block(self, owner: object, number: int, nbytes: int, load: Callable[[memoryview], None]) -> Iterator[memoryview]:
        """A block's memory, loaded by whoever comes first; the others wait. It begins at a page and is a whole number of them."""
        key = (owner, number)
        entry, is_new = self._enter(key, nbytes)
        try:
            if is_new:
                self._load(key, entry, load)
            yield memoryview(entry.memory)
        finally:
            with self._changed:
                entry.users -= 1

    def forget(self, owner: object) -> None:
        """Drop what nobody is using of an owner's blocks."""
        with self._changed:
            for key in [key for key, entry in self._entries.items() if key[0] is owner and not entry.users]:
                del self._entries[key]

    def _enter(self, key: tuple[object, int], nbytes: int) -> tuple[_Entry, bool]:
        with self._changed:
            while (entry := self._entries.get(key)) is not None:
                if entry.ready:
                    entry.users += 1
                    self._entries.move_to_end(key)
                    return entry, False
                self._changed.wait()
            entry = self._entries[key] = _Entry(self._room(max(1, nbytes)))
            return entry, True

    def _load(self, key: tuple[object, int], entry: _Entry, load: Callable[[memoryview], None]) -> None:
        try:
            load(memoryview(entry.memory))
            entry.ready = True
        finally:
            with self._changed:
                if not entry.ready:
                    del self._entries[key]
                self._changed.notify_all()

    def _room(self, nbytes: int) -> mmap.mmap:
        """Memory for a block: that of the oldest ones where there are too many, since touching fresh memory is dear."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        idle = [key for key, entry in self._entries.items() if entry.ready and not entry.users]
        over = sum(len(self._entries[key].memory) for key in idle) + nbytes - self._keep_nbytes
        found: mmap.mmap | None = None
        for key in idle:
            if over <= 0:
                break
            memory = self._entries.pop(key).memory
            over -= len(memory)
            found = memory if len(memory) == nbytes else found
        return found if found is not None else mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
