"""How a load is tuned: one frozen value, complete before anything is opened.

Every field of `Options` may be given as an argument of that name, in an `Options`, or in the environment as HEADRACE_<NAME>. An
argument wins over HEADRACE_*, that over RUNAI_STREAMER_* (the names its users already set), that over what is automatic.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from typing_extensions import Unpack

from headrace._environment import first_set, set_variables
from headrace.errors import OptionError

log = logging.getLogger("headrace.options")

Switch = Literal["auto", "on", "off"]
OnOff = Literal["off", "on"]
Demand = Literal["off", "auto", "require"]
CastPlace = Literal["auto", "host", "device"]
PartitionPolicy = Literal["spans", "chunks", "files"]

_CHOICES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pin", "mmap", "in_place", "gds"), get_args(Demand)),
    "direct_io": get_args(Switch),
    "cast_at": get_args(CastPlace),
    "keep_staging": get_args(OnOff),
    "partition": get_args(PartitionPolicy),
}
_RUNAI_NAMES = {
    "concurrency": "RUNAI_STREAMER_CONCURRENCY",
    "memory_limit": "RUNAI_STREAMER_MEMORY_LIMIT",
    "pin": "RUNAI_STREAMER_PIN_MEMORY",
    "partition": "RUNAI_STREAMER_PARTITION_POLICY",
    "stall_timeout_s": "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS",
    "attempts": "RUNAI_STREAMER_S3_MAX_RETRIES",
    "network_chunk_nbytes": "RUNAI_STREAMER_CHUNK_BYTESIZE",
    "local_ranks": "RUNAI_STREAMER_PROCESS_GROUP_SIZE",
}
_LAUNCHER_NAMES = {"local_ranks": "LOCAL_WORLD_SIZE"}  # torchrun's; each of its processes loads
_LEAST_RUNAI_CHUNK_NBYTES = 5 << 20  # Run:ai takes smaller ones for this much: the least part of an upload to S3
_SECONDS = ("stall_timeout_s", "deadline_s", "peer_timeout_s")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class UsualOptionArguments(TypedDict, total=False):
    """`OptionArguments` but for those that `hold` has a meaning of its own for."""

    concurrency: int | None
    memory_limit: int | str | Mapping[str, int | str] | None
    direct_io: Switch | None
    mmap: Demand | None
    gds: Demand | None
    cast_at: CastPlace | None
    keep_staging: OnOff | None
    partition: PartitionPolicy | None
    stall_timeout_s: float | None
    attempts: int | None
    deadline_s: float | None
    local_ranks: int | None
    network_chunk_nbytes: int | str | None
    peer_timeout_s: float | None
    memory_limits: Mapping[str, int | str] | None


class OptionArguments(UsualOptionArguments, total=False):
    """The fields of `Options` as arguments of those names: what may be given, where the fields say what it becomes."""

    pin: Demand | None
    in_place: Demand | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Tuning of a load. None means: not said here, so the environment decides, then what is automatic.

    Attributes:
        concurrency: reads in flight at once, over all shards. Automatic: from the CPUs the cgroup grants and the kind of source.
        memory_limit: host bytes that may be read ahead of the caller, in bytes or as text ("256MiB"). -1: as much as is useful;
            0: the least that works, one span of tensors at a time. Tensors the caller keeps come on top, and a tensor larger than
            the limit still loads. Automatic: room for the two largest tensors, and what keeps the source busy (16 MiB from the
            page cache, 64 MiB from a disk, 128 MiB from a network), up to 512 MiB or an eighth of the memory available. A mapping
            where a load has several targets: see `memory_limits`, which it becomes.
        pin: page-lock staging memory: "off", "auto" (one warning where it fails) or "require" (raise where it fails).
            Automatic: on for GPU targets, off for host targets.
        direct_io: read local files past the page cache: "auto" (ranges that are not cached already), "on", "off".
        mmap: hand out views of the mapped file instead of memory of one's own, which is outside the promise that a tensor never
            changes: "off", "auto" or "require".
        in_place: register a checkpoint on tmpfs where it lies, for GPU targets: "off", "auto" or "require".
        gds: direct storage through cuFile or hipFile, for GPU targets: "off", "auto" or "require".
        cast_at: where a dtype conversion runs: "auto", "host" or "device".
        keep_staging: whether page-locked staging memory stays for the next load to the same device: "off" or "on". One ring for a
            device, up to 512 MiB, until `headrace.release_staging()` or the program's end.
        partition: how ranks of a group divide a checkpoint: "spans", "chunks" or "files". None: by chunks, except that to host
            memory each rank reads for itself what all of them have in memory already.
        stall_timeout_s: seconds without a byte after which a network read is tried again.
        attempts: tries of one network range before its error is raised.
        peer_timeout_s: seconds without a sign of life after which a rank of a group is given up.
        deadline_s: seconds after which one network range is given up, all its tries together; None: never.
        local_ranks: processes of this node that load at the same time. `concurrency` and `memory_limit`, given or automatic, are
            totals of the node, and each process takes its part. Automatic: 1.
        network_chunk_nbytes: the length of one request to a store, in bytes or as text. Automatic: 8 MiB.
        memory_limits: a `memory_limit` for each target of a load that has several: {"cpu": ..., "shared-cpu": ..., "cuda:1": ...,
            "cuda": ... for all of them, "*": ... for all others}. Targets that it leaves out have the common one.

    Raises:
        OptionError: a value that cannot be used.
    """

    concurrency: int | None = None
    memory_limit: int | None = None
    pin: Demand | None = None
    direct_io: Switch | None = None
    mmap: Demand | None = None
    in_place: Demand | None = None
    gds: Demand | None = None
    cast_at: CastPlace | None = None
    keep_staging: OnOff | None = None
    partition: PartitionPolicy | None = None
    stall_timeout_s: float | None = None
    attempts: int | None = None
    deadline_s: float | None = None
    local_ranks: int | None = None
    network_chunk_nbytes: int | None = None
    peer_timeout_s: float | None = None
    memory_limits: Mapping[str, int] | None = dataclasses.field(default=None, hash=False)

    if TYPE_CHECKING:  # what may be given is more than what is kept

        def __init__(self, **fields: Unpack[OptionArguments]) -> None: ...

    def __post_init__(self) -> None:
        limit: object = self.memory_limit
        if isinstance(limit, Mapping):
            object.__setattr__(self, "memory_limits", limit)
            object.__setattr__(self, "memory_limit", None)
        for field in fields(self):
            given = getattr(self, field.name)
            if given is not None:
                object.__setattr__(self, field.name, _checked(field.name, given))

    @classmethod
    def from_environment(cls, names: Iterable[str] | None = None) -> Options:
        """The options that the environment sets, from HEADRACE_<NAME> and Run:ai's names.

        Args:
            names: the fields to look up; all where it is None.

        Raises:
            OptionError: a name that is no option, or a value that cannot be used; the message names the variable.
        """
        wanted = list(_NAMES if names is None else names)
        for name in wanted:
            _require_known(name)
        found: dict[str, Any] = {}
        for name in wanted:
            variable, text = _lookup(name)
            if text is not None:
                try:
                    found[name] = _checked(name, _from_text(name, _in_our_units(variable, text)))
                except OptionError as exc:
                    raise OptionError(f"environment variable {variable}={text!r}: {exc}", option=name) from None
        return cls(**found)

    def merged(self, overrides: Mapping[str, Any]) -> Options:
        """These options with `overrides` on top; an override of None leaves the field as it is.

        Raises:
            OptionError: an override that is no option, naming it and the nearest one.
        """
        for name in overrides:
            _require_known(name)
        given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        if not given:
            return self
        if "memory_limit" in given:  # one limit takes the place of several
            given.setdefault("memory_limits", None)
        return replace(self, **given)

    def for_target(self, target: str) -> Options:
        """These options for one target of a load: with its own memory limit, where there is one for each."""
        if self.memory_limits is None:
            return self
        keys = (target, target.partition(":")[0], "*")
        limit = next((self.memory_limits[key] for key in keys if key in self.memory_limits), self.memory_limit)
        return replace(self, memory_limit=limit, memory_limits=None)

    def check_targets(self, targets: Iterable[str]) -> None:
        """Raise OptionError if there is a limit for a target that nothing goes to."""
        known = list(targets)
        kinds = ["*", *known, *(target.partition(":")[0] for target in known)]
        unknown = next((key for key in self.memory_limits or () if key not in kinds), None)
        if unknown is not None:
            reason = f"nothing goes to {unknown!r}; this load's targets are {', '.join(known)}"
            raise OptionError(f"memory_limit: {reason}", option="memory_limit")


_NAMES = tuple(field.name for field in fields(Options))
_VARIABLES = frozenset(f"HEADRACE_{name.upper()}" for name in _NAMES)


def resolve(options: Options | None, overrides: Mapping[str, Any]) -> Options:
    """Arguments over `options` over the environment. Fields that nobody set stay None."""
    given = (options if options is not None else Options()).merged(overrides)
    unset = [name for name in _NAMES if getattr(given, name) is None]
    for variable in set_variables("HEADRACE_"):
        if variable not in _VARIABLES:
            _tell_of_misspelt(variable)
    surroundings = Options.from_environment(unset)
    return replace(given, **{name: getattr(surroundings, name) for name in unset})


def parse_nbytes(text: str) -> int:
    """Bytes from '1048576', '256MiB', '256M' or '2G' (all units are powers of 1024). Raises ValueError."""
    lowered = text.strip().lower().removesuffix("b").removesuffix("i")
    digits, unit = (lowered[:-1], lowered[-1]) if lowered[-1:] in ("k", "m", "g", "t") else (lowered, "")
    return int(float(digits) * _UNITS[unit]) if "." in digits else int(digits) * _UNITS[unit]


def _require_known(name: str) -> None:
    if name not in _NAMES:
        near = get_close_matches(name, _NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; options are {', '.join(_NAMES)}"
        raise OptionError(f"there is no option {name!r}{hint}", option=name)


@functools.cache  # once for each
def _tell_of_misspelt(variable: str) -> None:
    """Warn of a variable that is nearly an option's; others may be somebody else's, or about other things than loads."""
    near = get_close_matches(variable, _VARIABLES, n=1, cutoff=0.85)
    if near:
        log.warning("environment variable %s is no option, and has no effect; did you mean %s?", variable, near[0])


def _lookup(name: str) -> tuple[str, str | None]:
    for variable in filter(None, (f"HEADRACE_{name.upper()}", _RUNAI_NAMES.get(name), _LAUNCHER_NAMES.get(name))):
        text = first_set(variable)
        if text and (variable, text) != ("RUNAI_STREAMER_S3_MAX_RETRIES", "0"):  # as many as usual
            return variable, text
    return "", None


def _in_our_units(variable: str, text: str) -> str:
    """Milliseconds in seconds, retries as tries; what is no number stays as it is, and is refused as any other."""
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        return text
    if variable == "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS":
        return str(int(text) / 1000)
    if variable == "RUNAI_STREAMER_S3_MAX_RETRIES":
        return str(int(text) + 1)
    if variable == "RUNAI_STREAMER_CHUNK_BYTESIZE":
        return str(max(int(text), _LEAST_RUNAI_CHUNK_NBYTES))
    return text


def _from_text(name: str, text: str) -> object:
    if name in _SECONDS:
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"{name} is a number of seconds", option=name) from None
    if name == "pin":
        return {"0": "off", "1": "auto", "false": "off", "true": "auto"}.get(text.lower(), text.lower())
    if name == "memory_limits":  # cpu=1GiB,shared-cpu=64GiB
        return dict(pair.strip().partition("=")[::2] for pair in text.split(","))
    return text if name not in _CHOICES else text.lower()


def _checked(name: str, value: object) -> object:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise OptionError(f"{name} is one of {', '.join(map(repr, _CHOICES[name]))}, not {value!r}", option=name)
        return value
    if name in _SECONDS:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise OptionError(f"{name} is a number of seconds above 0, not {value!r}", option=name)
        return float(value)
    if name == "memory_limits":
        if not isinstance(value, Mapping):
            raise OptionError(f"memory_limits is a mapping from targets to limits, not {value!r}", option=name)
        return {str(target): _checked_integer("memory_limit", limit) for target, limit in value.items()}
    return _checked_integer(name, value)


_INTEGERS = {  # least value, and what it is
    "memory_limit": (-1, "-1, 0 or a number of bytes, such as 268435456 or '256MiB'"),
    "network_chunk_nbytes": (64 << 10, "a number of bytes from 64 KiB on, such as 8388608 or '8MiB'"),
}


def _checked_integer(name: str, value: object) -> int:
    least, meaning = _INTEGERS.get(name, (1, "a whole number from 1 on"))
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str):
        try:
            number = parse_nbytes(value) if name in _INTEGERS else int(value)
        except (ValueError, OverflowError):  # "1e400" is infinite
            number = None
    if number is None or number < least:
        raise OptionError(f"{name} is {meaning}, not {value!r}", option=name)
    return number
