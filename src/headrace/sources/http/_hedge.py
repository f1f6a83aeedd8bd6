"""A range under way: where it lands, how long it may be waited for, and its second request where it is slow.

Two writers never share memory: a hedge receives into a scratch buffer of its own, and the thread that owns the destination
copies from there once its own connection has been shut. Whether a range is slow is decided by `should_hedge`; how much may be
asked for twice is bounded by `Pace.take_for_hedge`.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from headrace._interpreter import join
from headrace.errors import SourceError
from headrace.sources.http._answers import Accepted, Asked
from headrace.sources.http._client import TICK_S, Client
from headrace.sources.http._connection import Answer, Connection
from headrace.sources.http._failures import Failure
from headrace.sources.http._retry import Pace, Tries, should_hedge

log = logging.getLogger("headrace")


class Landing:
    """Where a range lands, and how much of it is in: `done` bytes of the views, one after another, whatever goes wrong."""

    __slots__ = ("_starts", "_views", "done", "nbytes", "offset")

    def __init__(self, offset: int, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        *self._starts, self.nbytes = accumulate(map(len, self._views), initial=0)
        self.offset, self.done = offset, 0

    @property
    def position(self) -> int:
        """The first byte of the object that is missing."""
        return self.offset + self.done

    @property
    def end(self) -> int:
        """The end of the range in the object."""
        return self.offset + self.nbytes

    def missing(self, end: int) -> memoryview:
        """Memory for the next bytes, up to the `end`-th one at most; not all of them, where they land in several views."""
        i = bisect_right(self._starts, self.done) - 1
        return self._views[i][self.done - self._starts[i] : end - self._starts[i]]

    def put(self, data: memoryview) -> None:
        """Copy bytes that are here already to where they land."""
        while len(data):
            with self.missing(self.done + len(data)) as room:
                nbytes = len(room)
                room[:] = data[:nbytes]
            self.done += nbytes
            data = data[nbytes:]

    def receive(self, answer: Answer, accepted: Accepted) -> None:
        """Receive what was accepted, counting each piece as it comes."""
        if accepted.skip and len(answer.read(accepted.skip)) < accepted.skip:
            raise Failure("truncated", "the body ended before the range began", status=answer.status)
        end = self.done + accepted.nbytes
        while self.done < end:
            with self.missing(end) as rest:
                got = answer.receive_into(rest)
            if not got:
                raise Failure("truncated", f"the body ended {end - self.done} bytes early", status=answer.status)
            self.done += got
        answer.finish()


class Patience:
    """A `Watch` that ends waiting when the source is closed, nothing came for the stall timeout, or the deadline has passed."""

    def __init__(self, client: Client, tries: Tries) -> None:
        self.client, self._tries = client, tries
        self.clock = client.access.timing.clock
        self._stall_s = client.access.policy.stall_timeout_s
        self._last = self.clock()
        self.connection: Connection | None = None

    def on_connection(self, connection: Connection) -> None:
        """Remember it, and begin to wait anew."""
        self.connection, self._last = connection, self.clock()

    def on_waiting(self) -> None:
        """The gate is shut: that is no stall."""
        self._last = self.clock()
        self._check(self._last, 0)

    def on_quiet(self) -> None:
        """Nothing came for a tick."""
        now = self.clock()
        if now - self._last >= self._stall_s:
            raise Failure("stalled", f"no byte came for {self._stall_s:g} s")
        self._check(now, 0)

    def on_bytes(self, nbytes: int) -> None:
        """Bytes have come: the stall timeout begins anew."""
        now = self.clock()
        if nbytes:
            self._last = now
        self._check(now, nbytes)

    def _check(self, _now: float, _fresh: int) -> None:
        self.client.check_open()
        if self._tries.left_s <= 0:
            raise Failure("deadline", "it was not complete")


class RangeWatch(Patience):
    """The patience for a range that may be asked for a second time when it turns out slow."""

    def __init__(self, client: Client, tries: Tries, landing: Landing, pace: Pace) -> None:
        super().__init__(client, tries)
        self._landing, self._pace = landing, pace
        self._first = landing.done
        self._began = self._last
        self._hedge: Hedge | None = None

    def on_connection(self, connection: Connection) -> None:
        """From here on the range may turn out slow: a server that is slow to begin counts as well."""
        if self._hedge is not None and self._hedge.settled:
            raise Failure("closed", "the second request was quicker")
        if self.connection is None:
            self._began = self.clock()
        super().on_connection(connection)

    def _check(self, now: float, fresh: int) -> None:
        super()._check(now, fresh)
        if self._hedge is not None or self.connection is None:
            return
        landing, policy = self._landing, self.client.access.policy
        received, nbytes = landing.done - self._first + fresh, landing.nbytes - self._first
        slow = should_hedge(
            elapsed_s=now - self._began, received=received, nbytes=nbytes, recent=tuple(self._pace.recent), policy=policy
        )
        if slow and self._pace.take_for_hedge(nbytes - received, policy.hedge_share):
            self._hedge = Hedge(self.client, landing, self)

    def settle(self) -> None:
        """All bytes came this way, or none more will."""
        if self._hedge is not None:
            self._hedge.settle()

    def won(self) -> bool:
        """Whether the hedge was first; its bytes are in place then."""
        return self._hedge is not None and self._hedge.won_into(self._landing)

    def finish(self) -> None:
        """End the hedge if there is one, and remember how fast the range came if there is none."""
        if self._hedge is not None:
            self._hedge.cancel()
        elif self._landing.position == self._landing.end:
            self._pace.note(self._landing.done - self._first, self.clock() - self._began)


class Hedge:
    """The rest of a slow range, asked for a second time by a thread of its own into memory of its own.

    Whoever is complete first settles it. If that is the hedge, it shuts the slow connection, and that one's reader copies.
    """

    def __init__(self, client: Client, landing: Landing, slow: Patience) -> None:
        self._client, self._slow = client, slow
        self._scratch = bytearray(landing.end - landing.position)
        self._landing = Landing(landing.position, [memoryview(self._scratch)])
        self._lock = threading.Lock()
        self._settled = self._won = False
        client.count(hedges=1, hedged_nbytes=len(self._scratch))
        tries = Tries(client.access.policy, client.access.timing)
        self._watch = _HedgeWatch(client, tries, self)
        self._thread = threading.Thread(target=self._run, args=(tries,), name="headrace-hedge", daemon=True)
        self._thread.start()

    @property
    def settled(self) -> bool:
        """Whether either was complete."""
        return self._settled

    def _run(self, tries: Tries) -> None:
        client, landing = self._client, self._landing
        tries.begin()
        try:
            with client.ranged(Asked(landing.offset, landing.end, client.version), self._watch, tries) as (answer, accepted):
                landing.receive(answer, accepted)
        except (Failure, SourceError) as failure:
            log.debug("the second request for a slow range of %s failed: %s", client.url, failure)
        if landing.position == landing.end:
            with self._lock:
                self._won = not self._settled
                self._settled = True
                if self._won and self._slow.connection is not None:
                    self._slow.connection.shut()

    def settle(self) -> None:
        """The slow one ended, so or so."""
        with self._lock:
            self._settled = True

    def won_into(self, landing: Landing) -> bool:
        """Copy what is missing, if the hedge was first."""
        self.settle()
        if not self._won:
            return False
        with memoryview(self._scratch) as scratch:
            landing.put(scratch[landing.position - self._landing.offset :])
        return True

    def cancel(self) -> None:
        """Stop it. It holds only memory of its own, so it is not waited for beyond a tick."""
        self.settle()
        if self._watch.connection is not None and not self._won:
            self._watch.connection.shut()
        join(self._thread, 2 * TICK_S)


class _HedgeWatch(Patience):
    """The patience of a hedge, which ends when the first request turns out to be quicker."""

    def __init__(self, client: Client, tries: Tries, hedge: Hedge) -> None:
        super().__init__(client, tries)
        self._hedge = hedge

    def _check(self, now: float, fresh: int) -> None:
        super()._check(now, fresh)
        if self._hedge.settled:
            raise Failure("closed", "the first request was quicker")
