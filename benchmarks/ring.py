"""A model of the staging ring: what readers, slots, a bus and Python's lock make of each other. Nothing is measured.

Readers fill slots, each read taking as long as the readers' rate says, give or take; then Python works on the chunk, one thread
at a time; then the bus takes it, one at a time; then the slot is free. What comes out is the rate over that of the slower side.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from dataclasses import dataclass

_CHUNKS, _WARM_UP = 6000, 600


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates in bytes per second; `reads` of all readers together.

    Attributes:
        varies: standard deviation of a read's time over its mean.
        python_s: of a chunk, under the interpreter's lock.
    """

    readers: int
    reads: float
    bus: float
    chunk_nbytes: int
    python_s: float
    varies: float


class Ring:
    """The slots of one run, driven from event to event."""

    def __init__(self, machine: Machine, slots: int) -> None:
        self._machine, self._free = machine, slots
        self._random = random.Random(1)
        self._lock_free_at = self._bus_free_at = 0.0
        self._events: list[tuple[float, str]] = []
        self._waiting = 0  # readers without a slot
        for _ in range(machine.readers):
            self._take(0.0)

    def rate(self) -> float:
        """Bytes per second, once it runs evenly."""
        began, sent, now = 0.0, 0, 0.0
        while sent < _CHUNKS:
            now, what = heapq.heappop(self._events)
            getattr(self, f"_{what}")(now)
            sent += what == "sent"
            if sent == _WARM_UP and what == "sent":
                began = now
        return (_CHUNKS - _WARM_UP) * self._machine.chunk_nbytes / (now - began)

    def _take(self, now: float) -> None:
        if not self._free:
            self._waiting += 1
            return
        self._free -= 1
        mean = self._machine.chunk_nbytes * self._machine.readers / self._machine.reads
        heapq.heappush(self._events, (now + mean * max(0.0, self._random.gauss(1, self._machine.varies)), "read"))

    def _read(self, now: float) -> None:
        self._lock_free_at = max(now, self._lock_free_at) + self._machine.python_s
        heapq.heappush(self._events, (self._lock_free_at, "queued"))

    def _queued(self, now: float) -> None:
        self._bus_free_at = max(now, self._bus_free_at) + self._machine.chunk_nbytes / self._machine.bus
        heapq.heappush(self._events, (self._bus_free_at, "sent"))
        self._take(now)

    def _sent(self, now: float) -> None:
        self._free += 1
        if self._waiting:
            self._waiting -= 1
            self._take(now)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="scripts/bench ring", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--reads", type=float, default=66, metavar="GB/s", help="of all readers together (%(default)s)")
    parser.add_argument("--bus", type=float, default=55, metavar="GB/s", help="(%(default)s)")
    parser.add_argument("--chunk", type=float, default=8, metavar="MiB", help="(%(default)s)")
    parser.add_argument("--varies", type=float, default=0.3, metavar="SHARE", help="a read's time, over its mean (%(default)s)")
    wanted = parser.parse_args()
    costs, more = (20, 50, 100, 150), (1, 2, 3, 4, 6, 8, 12)
    print(
        f"{wanted.readers} readers, {wanted.reads:g} GB/s; bus {wanted.bus:g} GB/s; chunks of {wanted.chunk:g} MiB: of the slower"
    )
    print("µs of Python a chunk" + "".join(f"{cost:>8}" for cost in costs))
    for slots in more:
        machines = (
            Machine(wanted.readers, wanted.reads * 1e9, wanted.bus * 1e9, int(wanted.chunk * 2**20), cost / 1e6, wanted.varies)
            for cost in costs
        )
        shares = (Ring(machine, wanted.readers + slots).rate() / min(machine.reads, machine.bus) for machine in machines)
        print(f"{slots:>3} slots more        " + "".join(f"{share:8.2f}" for share in shares))
    return 0


if __name__ == "__main__":
    sys.exit(main())
