"""What goes wrong, and at which requests: rules in plain data, from Python or JSON, and the book that counts their matches.

The first rule that matches a request has its action done. A rule looks at `method` (GET, HEAD, LIST, PUT, DELETE or *), at the
key (a listing's prefix) and at where the range begins; it lets `skip` matches pass, then hits each `every`-th one, `times` times.
Objects that do not exist and requests that are not allowed never match.

    [Rule(Status(503), key="*.safetensors", times=3), Rule(Short(after=4096), skip=2, times=1)]
    [{"do": "status", "code": 503, "key": "*.safetensors", "times": 3}, {"do": "short", "after": 4096, "skip": 2, "times": 1}]

In JSON, `do` is the action's name and its fields stand beside the rule's: `bytes`, `seconds` and `rate` for `nbytes`, `wait_s`
and `nbytes_per_s`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Status:
    """Answer with an S3 error: 503 SlowDown, 429 with Retry-After in `headers`, 400 RequestTimeout or ExpiredToken, and so on."""

    code: int = 503
    error: str = "SlowDown"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Redirect:
    """Send the client to another URL."""

    to: str
    code: int = 307


@dataclass(frozen=True, slots=True)
class IgnoreRange:
    """Answer a range with 200 and the whole object."""


@dataclass(frozen=True, slots=True)
class WrongRange:
    """Give a range that is shifted, and say so in Content-Range."""

    by: int


@dataclass(frozen=True, slots=True)
class LyingRange:
    """Give a range that is shifted under the Content-Range that was asked for: only a checksum can tell."""

    by: int


@dataclass(frozen=True, slots=True)
class Fewer:
    """Give fewer bytes than were asked for, told truthfully in Content-Length and Content-Range."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Extra:
    """Give more bytes than Content-Range says, counted in Content-Length: the next ones of the object, at its end zeros."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class LyingLength:
    """Give what was asked for under a Content-Length that says `by` bytes more, or fewer where it is negative, and close."""

    by: int


@dataclass(frozen=True, slots=True)
class Short:
    """Promise all, close after some bytes (absent: half)."""

    after: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """As `Short`, with a TCP reset."""

    after: int | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """Promise all, fall silent after some bytes (absent: half), close after a while."""

    after: int | None = None
    wait_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Trickle:
    """Give the body slowly."""

    nbytes_per_s: float


@dataclass(frozen=True, slots=True)
class SlowStart:
    """Say nothing for a while, then answer."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Hangup:
    """Close without an answer."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """From now on the object has other bytes (all xor 0x55) and another ETag; this request is the first to see it."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Change one bit of the body, of its byte `at` (counted on from its begin, round and round)."""

    at: int = 0


@dataclass(frozen=True, slots=True)
class Gzip:
    """Give the whole object compressed, with 200 and Content-Encoding, as GCS transcodes."""


Action: TypeAlias = (
    Status
    | Redirect
    | IgnoreRange
    | WrongRange
    | LyingRange
    | Fewer
    | Extra
    | LyingLength
    | Short
    | Reset
    | Stall
    | Trickle
    | SlowStart
    | Hangup
    | Replaced
    | Flip
    | Gzip
)

ACTIONS: dict[str, type[Action]] = {
    "status": Status,
    "redirect": Redirect,
    "ignore_range": IgnoreRange,
    "wrong_range": WrongRange,
    "lying_range": LyingRange,
    "fewer": Fewer,
    "extra": Extra,
    "lying_length": LyingLength,
    "short": Short,
    "reset": Reset,
    "stall": Stall,
    "trickle": Trickle,
    "slow_start": SlowStart,
    "hangup": Hangup,
    "replaced": Replaced,
    "flip": Flip,
    "gzip": Gzip,
}
_NAMES = {kind: name for name, kind in ACTIONS.items()}
_IN_JSON = {"bytes": "nbytes", "seconds": "wait_s", "rate": "nbytes_per_s"}


def name_of(action: Action | None) -> str | None:
    """Return an action's name in rules and logs."""
    return None if action is None else _NAMES[type(action)]


@dataclass(frozen=True, slots=True)
class Rule:
    """An action, and the requests it is for."""

    do: Action
    method: str = "GET"
    key: str = "*"
    min_start: int = 0
    skip: int = 0
    times: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        """Refuse what could never match."""
        if self.every < 1 or self.skip < 0 or (self.times is not None and self.times < 0):
            raise ValueError(f"every must be at least 1, skip and times at least 0: {self}")

    def matches(self, method: str, key: str, start: int) -> bool:
        """Whether it is for requests like this, counts aside."""
        return self.method in ("*", method) and start >= self.min_start and fnmatchcase(key, self.key)


def parse_rules(rules: Sequence[Mapping[str, Any]]) -> list[Rule]:
    """Read rules from decoded JSON.

    Raises:
        ValueError: no action has this name, or neither the rule nor its action has a field of this name.
    """
    return [_parse_rule(rule) for rule in rules]


def _parse_rule(rule: Mapping[str, Any]) -> Rule:
    kind = ACTIONS.get(rule.get("do", ""))
    if kind is None:
        raise ValueError(f"do must be one of {', '.join(ACTIONS)}: {dict(rule)}")
    given = {_IN_JSON.get(name, name): value for name, value in rule.items() if name != "do"}
    of_rule = {f.name for f in fields(Rule)} - {"do"}
    of_action = {f.name for f in fields(kind)}
    unknown = given.keys() - of_rule - of_action
    if unknown:
        raise ValueError(f"{rule['do']} knows no {', '.join(sorted(unknown))}: {dict(rule)}")
    try:
        action = kind(**{name: value for name, value in given.items() if name in of_action})
    except TypeError as error:
        raise ValueError(f"{error}: {dict(rule)}") from error
    return Rule(action, **{name: value for name, value in given.items() if name in of_rule})


class RuleBook:
    """Rules with the counts of their matches; may be asked from many threads."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._seen = [0] * len(self.rules)
        self._used = [0] * len(self.rules)
        self._lock = threading.Lock()

    def match(self, method: str, key: str, start: int) -> Action | None:
        """Return what is to be done to a request, and count it."""
        with self._lock:
            for index, rule in enumerate(self.rules):
                if rule.matches(method, key, start) and self._hits(index, rule):
                    return rule.do
        return None

    def _hits(self, index: int, rule: Rule) -> bool:
        if rule.times is not None and self._used[index] >= rule.times:
            return False
        self._seen[index] += 1
        past = self._seen[index] - rule.skip
        if past <= 0 or past % rule.every:
            return False
        self._used[index] += 1
        return True
