"""When to try again, how long to wait before it, and how many requests to have under way: decisions, and the counts they need.

A range is tried again while that can help: with full-jitter exponential backoff (each wait is drawn from 0 to a bound that
doubles; AWS Architecture Blog, "Exponential Backoff And Jitter", 2015), or after the time that the server asks for. A try that
brought a good part of the range is no failed one. Throttling lowers the number of requests in flight for everybody who talks to
the endpoint, and every success raises it a little (additive increase, multiplicative decrease). Nothing here knows sockets.
"""

from __future__ import annotations

import email.utils
import math
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from headrace.sources.http._failures import Failure, Headers, Kind

_PROGRESS_NBYTES: Final = 64 << 10
_DOUBTS: Final = 1  # how often an answer that is wrong is given another chance
_REFRESHES: Final = 1  # how often a range is asked for anew, for one kind of reason and without a success between


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How patient to be, for each range.

    Attributes:
        attempts: tries in a row that bring nothing before the last error is raised.
        deadline_s: seconds from a range's first try after which it is given up; None: never.
        stall_timeout_s: seconds without a byte after which a try has failed. There is no limit on how long a body takes.
        connect_timeout_s: seconds to connect, and again for TLS.
        backoff_s, longest_backoff_s: the bound of the first wait, and of any.
        longest_wait_s: a server that asks for a longer pause than this is not waited for.
        hedge_after_s: seconds from which on a slow range may be asked for a second time; None: never.
        hedge_below: a range is slow below this share of the median speed of recent ones.
        hedge_share: bytes asked for twice are at most this share of all received, and one range.
    """

    attempts: int = 8
    deadline_s: float | None = None
    stall_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    backoff_s: float = 0.1
    longest_backoff_s: float = 10.0
    longest_wait_s: float = 300.0
    hedge_after_s: float | None = 2.0
    hedge_below: float = 0.2
    hedge_share: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where time and chance come from; tests bring their own.

    Attributes:
        clock: seconds that never run backwards.
        now: seconds since 1970, to understand dates.
        wait: wait for the event, so many seconds at most.
        draw: a random number from 0 to 1.
    """

    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    wait: Callable[[threading.Event, float], object] = threading.Event.wait
    draw: Callable[[], float] = random.random


def parse_retry_after(text: str, now: float) -> float | None:
    """Seconds to wait, from the seconds or the date of a Retry-After (RFC 9110, 10.2.3); None for anything else."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):  # the decimals are some servers' own idea
        return float(text)
    if not re.search(r"[A-Za-z]{3}", text):
        return None
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


_RATE_LIMIT: Final = re.compile(r";\s*([rt])=([0-9]{1,9})\b")


def parse_rate_limit(headers: Headers, now: float) -> float | None:
    """Seconds until the store takes requests again, where a RateLimit header says that none are left; else None.

    Both forms: `RateLimit: "resolvers";r=0;t=12` (draft-ietf-httpapi-ratelimit-headers-10, which the hub sends) and the older
    `[X-]RateLimit-Remaining` with `-Reset` in seconds, or seconds since 1970.
    """
    limits = headers.get("ratelimit")
    fields = [dict(_RATE_LIMIT.findall(item)) for item in limits.split(",")] if limits else []
    waits = [float(found["t"]) for found in fields if found.get("r") == "0" and "t" in found]
    for prefix in ("ratelimit", "x-ratelimit"):
        reset = headers.get(f"{prefix}-reset") or ""
        if headers.get(f"{prefix}-remaining") == "0" and re.fullmatch(r"[0-9]{1,12}", reset):
            waits.append(float(reset) if int(reset) < 10**9 else max(0.0, int(reset) - now))
    return max(waits, default=None)


def wait_asked_for(headers: Headers, now: float) -> float | None:
    """The longest pause that an answer asks for, in seconds; None where it asks for none."""
    waits = [parse_retry_after(headers.get("retry-after") or "", now), parse_rate_limit(headers, now)]
    return max((wait for wait in waits if wait is not None), default=None)


def backoff(failed: int, policy: Policy, drawn: float) -> float:
    """Seconds to wait after so many tries in a row have failed; `drawn` is from 0 to 1."""
    return drawn * min(policy.longest_backoff_s, policy.backoff_s * 2.0 ** min(failed - 1, 60))


class Tries:
    """The tries of one range: counts them, and decides about the next.

    Attributes:
        made: tries begun so far.
        limit: which limit ended it, in words; '' while none has.
    """

    def __init__(self, policy: Policy, timing: Timing) -> None:
        self.made = 0
        self.limit = ""
        self.refused = False  # the last try was refused because of its credentials
        self._policy, self._timing = policy, timing
        self._began = timing.clock()
        self._failed = self._doubts = 0
        self._refreshes: Counter[Kind] = Counter()  # a bucket may be elsewhere, and its keys expire on the way there

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        deadline_s = self._policy.deadline_s
        return math.inf if deadline_s is None else self._began + deadline_s - self._timing.clock()

    def begin(self) -> None:
        """Count a try."""
        self.made += 1

    def after(self, failure: Failure, received_nbytes: int) -> float | None:
        """Seconds to wait before the next try; None if there should be none."""
        self.refused = failure.action == "refresh"
        if received_nbytes >= _PROGRESS_NBYTES:
            self._failed = self._doubts = 0
            self._refreshes.clear()
        self._failed += 1
        self._doubts += failure.action == "doubt"
        self._refreshes[failure.kind] += failure.action == "refresh"
        if failure.action == "fail" or self._doubts > _DOUBTS or self._refreshes[failure.kind] > _REFRESHES:
            if failure.kind == "deadline":
                self.limit = f" in deadline_s={self._policy.deadline_s:g}"
            return None
        if self._failed >= self._policy.attempts:
            in_a_row = f"the last {self._failed} with little progress, " if self.made > self._failed else ""
            self.limit = f", {in_a_row}the limit of attempts={self._policy.attempts}"
            return None
        if failure.wait_s is not None and failure.wait_s > self._policy.longest_wait_s:
            self.limit = f", and the server asks for a pause of {failure.wait_s:.0f} s"
            return None
        return self._before_deadline(self._delay(failure))

    def _delay(self, failure: Failure) -> float:
        if self.refused:
            return 0.0
        drawn = self._timing.draw()
        wait_s = backoff(self._failed, self._policy, drawn)
        if failure.wait_s is None:
            return wait_s
        return failure.wait_s + min(wait_s, self._policy.backoff_s)  # not all at the same moment

    def _before_deadline(self, delay_s: float) -> float | None:
        if delay_s >= self.left_s:
            self.limit = f" in deadline_s={self._policy.deadline_s:g}"
            return None
        return delay_s


class Gate:
    """How many requests an endpoint may have under way: no limit, until it throttles.

    A throttled request halves the limit, unless it had been sent before the last halving. Each success adds 1/limit, so that a
    round of successes adds one. Back at the number in flight before the first halving, the limit is lifted.

    Attributes:
        limit: requests in flight; None: as many as there are readers.
    """

    def __init__(self) -> None:
        self.limit: float | None = None
        self._changed = threading.Condition()
        self._in_flight = 0
        self._before = 0
        self._cuts = 0
        self._quiet_until = -math.inf

    def enter(self, timeout_s: float) -> int | None:
        """Begin a request. Returns a ticket to leave with, or None if it may not begin within the time."""
        with self._changed:
            if not self._has_room() and not (self._changed.wait(timeout_s) and self._has_room()):
                return None
            self._in_flight += 1
            return self._cuts

    def _has_room(self) -> bool:
        return self.limit is None or self._in_flight < max(1, int(self.limit))

    def leave(self, ticket: int, *, throttled: bool = False, succeeded: bool = False) -> None:
        """End a request, and say how it went."""
        with self._changed:
            if throttled and ticket == self._cuts:
                self._cut()
            elif succeeded and self.limit is not None:
                self.limit += 1 / self.limit
                if self.limit >= self._before:
                    self.limit = None
            self._in_flight -= 1
            self._changed.notify_all()

    def _cut(self) -> None:
        self._cuts += 1
        if self.limit is None:
            self._before = self._in_flight
        self.limit = max(1.0, min(self.limit or self._in_flight, self._in_flight) / 2)

    def wake(self) -> None:
        """Have all who wait look up: one of them may have been closed."""
        with self._changed:
            self._changed.notify_all()

    def keep_quiet(self, until: float) -> None:
        """Ask everybody to begin nothing before this moment of their clock."""
        self._quiet_until = max(self._quiet_until, until)

    def quiet_s(self, now: float) -> float:
        """Seconds for which nothing should begin."""
        return max(0.0, self._quiet_until - now)


class Pace:
    """How fast ranges of an endpoint came lately, and how much was asked for twice.

    Attributes:
        recent: bytes per second of the last ranges.
        received_nbytes, hedged_nbytes: of all ranges, and of those asked for a second time.
    """

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=32)
        self.received_nbytes = self.hedged_nbytes = 0
        self._lock = threading.Lock()

    def note(self, nbytes: int, seconds: float) -> None:
        """Remember a range that is complete. Small ones say more about latency than about speed."""
        with self._lock:
            self.received_nbytes += nbytes
            if nbytes >= _PROGRESS_NBYTES:
                self.recent.append(nbytes / max(seconds, 1e-6))

    def take_for_hedge(self, nbytes: int, share: float) -> bool:
        """Whether so many bytes may be asked for twice, which is then counted.

        The bound: all hedges together are at most `share` of what was received, or one range where that is more.
        """
        with self._lock:
            if self.hedged_nbytes and self.hedged_nbytes + nbytes > share * self.received_nbytes:
                return False
            self.hedged_nbytes += nbytes
            return True


def should_hedge(*, elapsed_s: float, received: int, nbytes: int, recent: Sequence[float], policy: Policy) -> bool:
    """Whether a range under way is slow enough to be asked for a second time.

    Args:
        elapsed_s: seconds since it was asked for.
        received, nbytes: bytes of it that are in, and that it has.
        recent: speeds of ranges that came lately; at least four are needed to judge.
        policy: from when on, and what is slow.
    """
    if policy.hedge_after_s is None or elapsed_s < policy.hedge_after_s or len(recent) < 4:
        return False
    return received < nbytes and received < policy.hedge_below * median(recent) * elapsed_s
