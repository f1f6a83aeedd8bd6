"""PURE: which stage holds the load up, and which option would help, from the figures of a bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace._bench._report import Figure, Report, Run, best
from headrace._plan import MIB, format_nbytes

_LEAST_NBYTES, _LEAST_S = 32 * MIB, 0.02  # what is less is over before it has a speed
_NEAR = 0.8  # of the ceiling
_QUIET = 0.6  # of the CPUs that a load out of the page cache uses where nothing else runs
_WORTHWHILE = 1.2  # how much quicker twice the threads have to be
_SOURCES = {"disk": "the disk", "cache": "the page cache", "network": "the network"}
_DOING = {
    "read": "reading",
    "memory": "getting memory to read into",
    "cast": "converting",
    "copy": "copying",
    "wait": "waiting for the memory limit",
    "exchange": "exchanging with other ranks",
}


def judge(report: Report) -> tuple[str, str]:
    """(the bottleneck in one word, a paragraph on it). The first run decides; the others are mentioned where they differ."""
    run = next((run for run in report.runs if run.stats is not None), None)
    if run is None or run.stats is None:
        return "unknown", "No load was measured, so there is nothing to say about it."
    bottleneck = _bottleneck(run, report)
    sentences = [_what_was_measured(run, report), *_where_time_went(run), _ADVICE[bottleneck].format(**_words(run, report))]
    if bottleneck in ("disk", "network") and (more := _more_threads(report.figures, bottleneck)):
        sentences.append(more)
    sentences += _other_runs(report)
    return bottleneck, " ".join(sentences)


def _bottleneck(run: Run, report: Report) -> str:
    stats = run.stats
    assert stats is not None, "judged is what ran"
    if run.nbytes < _LEAST_NBYTES or run.seconds < _LEAST_S:
        return "start"
    if stats.slowest in ("caller", "memory"):
        return stats.slowest
    if stats.retried > stats.requests // 10:
        return "retries"
    bus = best(report.figures, "pinned")
    if stats.device != "cpu" and stats.pinned is False and bus is not None:
        return "pageable"
    if stats.device != "cpu" and bus is not None and run.rate >= _NEAR * bus.rate:
        return "bus"
    source = _source_of(run, report)
    if source in ("disk", "network"):
        if run.share >= _NEAR or run.ceiling == 0:
            return source
        return _busiest(run.stages) or source
    return _busiest(run.stages) or ("busy machine" if run.cpus < _QUIET * report.cpus else "cache")


def _source_of(run: Run, report: Report) -> str:
    """Where the bytes of a run came from."""
    if report.is_remote:
        return "network"
    assert run.stats is not None
    return "disk" if run.stats.direct_nbytes * 2 > run.nbytes else "cache"


def _busiest(stages: Mapping[str, float]) -> str:
    """What readers did most, where that is not reading."""
    stage = max(("read", "memory", "cast", "copy"), key=lambda name: stages.get(name, 0.0))
    return {"read": "", "memory": "fresh memory"}.get(stage, stage)


_ADVICE = {
    "start": (
        "That is too little to have a speed: opening files and starting threads takes most of it, and no option would help."
    ),
    "caller": (
        "The bottleneck is the caller: readers were ahead of it, and what takes time is making and handing out {tensors:,} "
        "tensors. Fewer and larger tensors would help; faster storage would not."
    ),
    "memory": (
        "The bottleneck is the memory limit: readers waited {memory_wait:.2f} s for memory while the caller waited for them. "
        "A higher --memory-limit than {memory_limit} would help."
    ),
    "retries": (
        "The bottleneck is the store's patience: {retried:,} of {requests:,} requests had to be made again, {throttled:,} of "
        "them because it asked for less. A lower --concurrency than {concurrency} would help."
    ),
    "disk": (
        "The bottleneck is the disk, and no option makes it quicker: a copy in /dev/shm (headrace pull), or a faster disk, would."
    ),
    "network": "The bottleneck is the network or the store behind it: a copy on this machine (headrace pull) would help.",
    "bus": "The bottleneck is the bus to the GPU, which is used as well as copies alone use it: no option makes it quicker.",
    "pageable": (
        "The bottleneck is host memory that is not page-locked ({pinned_how}): raise the limit (ulimit -l). "
        "HEADRACE_PIN=require, or pin='require' in Python, makes it an error."
    ),
    "cache": (
        "The bottleneck is copying out of the page cache, which only more CPUs than {cpus} would make quicker; faster storage "
        "would not."
    ),
    "busy machine": (
        "The bottleneck is this machine: the load used {used:.1f} of {cpus} CPUs for what needs all of them, so other work "
        "had the rest, here or on the host of a virtual machine. Measure again when it is quiet."
    ),
    "fresh memory": (
        "The bottleneck is fresh memory, which the system has to clear before anything is read into it. Filling tensors that "
        "exist (into= in Python), or dropping tensors sooner so that their memory is used again, would help; faster storage "
        "would not."
    ),
    "cast": (
        "The bottleneck is converting dtypes on {cpus} CPUs: more CPUs, a checkpoint that is in the dtype already, or converting "
        "on a GPU (HEADRACE_CAST_AT=device, or cast_at='device' in Python) would help; faster storage would not."
    ),
    "copy": (
        "The bottleneck is a second copy in memory, which slices across rows and unaligned direct reads need: leave out what is "
        "not needed, or use --direct-io off for files that are cached."
    ),
}


def _words(run: Run, report: Report) -> dict[str, object]:
    stats = run.stats
    assert stats is not None
    return {
        "tensors": stats.tensors,
        "memory_wait": stats.memory_wait_s,
        "memory_limit": format_nbytes(stats.memory_limit),
        "retried": stats.retried,
        "throttled": stats.throttled,
        "requests": stats.requests,
        "concurrency": stats.concurrency,
        "pinned_how": stats.pinned_how,
        "used": run.cpus,
        "cpus": report.cpus,
    }


def _what_was_measured(run: Run, report: Report) -> str:
    part = ", when its time was up" if run.cut_short else ""
    text = f"The load ({run.name}) read {format_nbytes(run.nbytes)} in {run.seconds:.2f} s{part}, {_rate(run.rate)}"
    if not run.ceiling:
        return f"{text}."
    source = _SOURCES[_source_of(run, report)]
    return f"{text}: {run.share_text} of what {source} gave to a loop that only reads ({_rate(run.ceiling)})."


def _where_time_went(run: Run) -> list[str]:
    total = sum(run.stages.values())
    if not total:
        return []
    shares = {stage: seconds / total for stage, seconds in run.stages.items() if seconds / total >= 0.05}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    parts = [f"{share:.0%} {_DOING.get(stage, stage)}" for stage, share in ordered]
    return [f"Its readers spent {_listed(parts)}; the process used {run.cpus:.1f} CPUs."]


def _more_threads(figures: Sequence[Figure], kind: str) -> str:
    found = sorted((figure for figure in figures if figure.kind == kind and figure.rate), key=lambda figure: figure.threads)
    if len(found) < 2 or found[-1].rate < _WORTHWHILE * found[-2].rate:
        return ""
    slow, quick = (f"{_rate(figure.rate)} to {figure.threads} reads at a time" for figure in found[-2:])
    return f"It gave {slow} and {quick}, so try --concurrency {found[-1].threads}."


def _other_runs(report: Report) -> list[str]:
    first, *others = [run for run in report.runs if run.stats is not None]
    slower = [run for run in others if run.rate < first.rate / _WORTHWHILE]
    touch, disk = best(report.figures, "touch"), best(report.figures, "disk")
    note = f", and {touch.note}" if touch is not None and touch.note else ""
    alone = f"; touching that alone ran at {_rate(touch.rate)}{note}" if touch is not None else ""
    kept = [run for run in slower if run.name == "kept"]
    sentences = [f"Keeping every tensor, {_rate(run.rate)}, takes fresh memory for all of them{alone}." for run in kept]
    if disk is not None and first.rate > disk.rate * _WORTHWHILE and not report.is_remote:
        sentences.append(f"A first load, before the files are cached, cannot be quicker than the disk: {_rate(disk.rate)}.")
    return sentences


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
