"""Reading ahead of a library that asks for tensors one at a time, where each answer would be a round trip to a store.

The tensors of a checkpoint are cut into batches in the order in which libraries ask: by name, with numbers as numbers. The first
that asks for a tensor of a batch reads all of it, and one thread goes on with the batches behind it, as long as what was read and
not yet asked for stays under a limit. Nobody ever waits for anything but a batch that is being read, so no order of asking can
end in a deadlock; one that jumps about only makes the held bytes more than the limit, by a batch for each thread that asks.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import headrace

if TYPE_CHECKING:
    import torch

BATCH_NBYTES: Final = 128 << 20  # 16 requests of 8 MiB at once, as many as a load has by default
LIMIT_NBYTES: Final = 512 << 20


class Ahead:
    """The tensors of an open checkpoint, each of them once.

    Args:
        checkpoint: what is read.
        limit_nbytes: what may be held that nobody has asked for.
    """

    def __init__(self, checkpoint: headrace.Checkpoint, *, limit_nbytes: int = LIMIT_NBYTES) -> None:
        self._checkpoint, self._limit_nbytes = checkpoint, limit_nbytes
        self._batches = _batches(checkpoint, max(1, min(BATCH_NBYTES, limit_nbytes // 4)))
        self._batch_of = {name: number for number, batch in enumerate(self._batches) for name in batch}
        self._reading: dict[int, Future[dict[str, torch.Tensor]]] = {}
        self._taken: set[str] = set()
        self._held_nbytes = 0
        self._front = 0  # the batch behind the last one that was asked for
        self._is_ahead = False  # whether the thread runs
        self._lock = threading.Lock()

    def take(self, name: str) -> torch.Tensor | None:
        """Hand out a tensor; None where it was handed out before, and has to be read again. Raises as `headrace.load`."""
        with self._lock:
            if name in self._taken:
                return None
            self._taken.add(name)
            number = self._batch_of[name]
            mine = self._begin(number)
            self._front = max(self._front, number + 1)
            start = not self._is_ahead and self._has_room()
            self._is_ahead = self._is_ahead or start
        if start:
            threading.Thread(target=self._go_on, name="headrace-ahead", daemon=True).start()
        if mine:
            self._read(number)
        tensor = self._reading[number].result().pop(name)
        with self._lock:
            self._held_nbytes -= self._checkpoint[name].nbytes
        return tensor

    def _begin(self, number: int) -> bool:
        """Whether the caller is the one to read this batch. With the lock held."""
        if number in self._reading:
            return False
        self._reading[number] = Future()
        self._held_nbytes += sum(self._checkpoint[name].nbytes for name in self._batches[number])
        return True

    def _has_room(self) -> bool:
        return self._held_nbytes < self._limit_nbytes and self._next() is not None

    def _next(self) -> int | None:
        return next((number for number in range(self._front, len(self._batches)) if number not in self._reading), None)

    def _read(self, number: int) -> None:
        try:
            self._reading[number].set_result(headrace.load(self._checkpoint, names=self._batches[number]))
        except BaseException as exc:  # noqa: BLE001 - raised by each that asks for a tensor of it
            self._reading[number].set_exception(exc)

    def _go_on(self) -> None:
        while True:
            with self._lock:
                number = self._next() if self._has_room() else None
                if number is None:
                    self._is_ahead = False
                    return
                self._begin(number)
            self._read(number)
            if self._reading[number].exception() is not None:  # whoever asks next finds out, and reads on
                with self._lock:
                    self._is_ahead = False
                return


def _batches(checkpoint: headrace.Checkpoint, batch_nbytes: int) -> list[list[str]]:
    batches: list[list[str]] = []
    room = 0
    for name in sorted(checkpoint, key=natural_key):
        nbytes = checkpoint[name].nbytes
        if nbytes > room or not batches:
            batches.append([])
            room = batch_nbytes
        batches[-1].append(name)
        room -= nbytes
    return batches


def natural_key(name: str) -> list[tuple[int, Any]]:
    """Sorts "layers.2" before "layers.10"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"[.]", name)]
