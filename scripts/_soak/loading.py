"""One load in this process: its sources with their troubles, its caller with his temper, and a look at every tensor."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import bytes_of, value_of
from simulated_gpu import Gpu, simulated_gpu

import headrace
from _soak.cases import MIB, Case, Trouble
from _soak.judging import SECRET, CallersError, WrongError, check_error
from _soak.keeping import Keeper
from _soak.models import PREFIX, Model, draw_slices, is_same, make_model, targets, value_at
from _soak.troubles import CALLS, FILES, READS, SERVER
from headrace.errors import LoadError
from headrace.sources.memory import MemorySource
from headrace.sources.s3 import S3Credentials
from headrace.testing import Block, Change, Fault, FaultyAlignedSource, FaultySource, Flip, Raise, ReadCall
from headrace.testing.s3server import Bucket, Rule, S3Server

_RAISED = {
    "read error": headrace.SourceError,
    "read timeout": headrace.SourceTimeoutError,
    "read memory error": MemoryError,
    "read strange error": ZeroDivisionError,
}


@dataclass(slots=True)
class Result:
    """How a case ended.

    Attributes:
        outcome: "right bytes", "stopped by the caller" or "error".
        errors: kinds of the errors, which are all explained.
        injected: how often each trouble came about.
    """

    outcome: str = "right bytes"
    errors: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    tensors: int = 0
    nbytes: int = 0


def run_load(case: Case, root: Path, keeper: Keeper) -> Result:
    """Carry a case out.

    Raises:
        WrongError: it did not end as it may.
    """
    result, threshold = Result(), gc.get_threshold()
    model = make_model(case, root)
    with serving(case, model, result.injected) as place, _on_device(case, result.injected) as gpu:
        load = _Load(case, model, place, gpu, keeper, result)
        if case.collects:
            gc.set_threshold(1)
        try:
            load.run()
        except BaseException as exc:  # noqa: BLE001 - it is judged
            result.errors[check_error(exc, case)] += 1
            result.outcome = "stopped by the caller" if isinstance(exc, (CallersError, KeyboardInterrupt)) else "error"
            _check_filled(exc, load.given, model)
        finally:
            gc.set_threshold(*threshold)
            load.let_go()
    return result


# ---- where it lies


@dataclass(frozen=True, slots=True)
class Place:
    """A url, or sources made anew for each load; what opens them; and the endpoint of a store."""

    url: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    endpoint: str | None = None


@contextlib.contextmanager
def serving(case: Case, model: Model, injected: Counter[str]) -> Iterator[Place]:
    """The checkpoint where the case has it, with the troubles of that place."""
    if case.place not in ("s3", "http"):
        yield _local(case, model, injected)
        return
    buckets = {"models": Bucket(public=True)} if case.place == "http" else {}
    with S3Server(model.root, secret_key=SECRET, buckets=buckets, faults=_rules(case)) as server:
        if case.place == "http":
            single = len(case.shards) == 1 and case.kind == "load"
            yield Place(lambda: f"{server.url}/{PREFIX}/" + (case.shards[0].name if single else ""))
        else:
            yield Place(lambda: f"s3://{PREFIX}", {"credentials": credentials_for(server.url)}, server.url)
        if not server.wait_until(lambda: server.open_connections == 0, 1.0):
            gc.collect()  # what is abandoned is closed by the collector
        if not server.wait_until(lambda: server.open_connections == 0, 60.0):  # it may still compress what nobody waits for
            under_way = [request for request in server.requests if request.took_s is None]
            raise WrongError(f"{server.open_connections} connections are still open; under way: {under_way}")
        for request in server.requests:
            if request.action is not None:
                injected[f"{request.error}" if request.action == "status" else request.action.replace("_", " ")] += 1


def credentials_for(endpoint: str) -> S3Credentials:
    """What the server takes."""
    return S3Credentials(access_key_id="AKTEST", secret_access_key=SECRET, endpoint=endpoint)


def _rules(case: Case) -> list[Rule]:
    rules = []
    for trouble in case.troubles:
        if trouble.kind in SERVER:
            draw = random.Random(trouble.seed)
            every, times = (1, trouble.times) if trouble.times > 0 else (draw.choice([1, 2, 7]), None)
            method = draw.choice(["GET", "GET", "*"]) if trouble.kind in ("503", "500", "hangup", "slow start") else "GET"
            rules.append(
                Rule(SERVER[trouble.kind].make(draw), method, "*.safetensors" if method == "GET" else "*",
                     skip=trouble.after, times=times, every=every)
            )  # fmt: skip
    return rules


def _local(case: Case, model: Model, injected: Counter[str]) -> Place:
    troubles = [trouble for trouble in case.troubles if trouble.kind in READS]
    if case.place == "memory" or troubles:
        given = {"verify": str(model.folder / "headrace.manifest.json")} if case.verifies else {}
        return Place(lambda: _sources(case, model, troubles, injected), given)
    return Place(lambda: str(model.folder))


def _sources(case: Case, model: Model, troubles: list[Trouble], injected: Counter[str]) -> list[FaultySource]:
    found: list[FaultySource] = []
    for path in model.shards:
        faults = [_fault(trouble, injected) for trouble in troubles]
        if case.place == "memory":
            found.append(FaultySource(MemorySource(path.read_bytes(), url=f"memory:/{path.name}"), faults))
        else:
            found.append(FaultyAlignedSource(headrace.folder(model.folder).open(path.name), faults))  # type: ignore[arg-type]
    return found


def _fault(trouble: Trouble, injected: Counter[str]) -> Fault:
    def when(call: ReadCall) -> bool:
        hit = call.index >= trouble.after and (trouble.times < 0 or call.index < trouble.after + trouble.times)
        injected[trouble.kind] += hit
        if hit and isinstance(then, Block):
            threading.Timer(0.05, then.release.set).start()
        return hit

    then: Raise | Block | Flip | Change
    if trouble.kind in _RAISED:
        then = Raise(_RAISED[trouble.kind])
    else:
        then = {"read blocked": Block, "read changed": Change, "read flipped": Flip}[trouble.kind]()
    return Fault(when, then)


# ---- where it goes


@contextlib.contextmanager
def _on_device(case: Case, injected: Counter[str]) -> Iterator[Gpu | None]:
    if case.device != "gpu":
        yield None
        return
    with simulated_gpu(random.Random(case.seed).choice(["random", "manual"]), seed=case.seed & 0xFFFF) as gpu:
        before = {}
        for trouble in case.troubles:
            if trouble.kind == "little device memory":
                gpu.runtime.device_memory(random.Random(trouble.seed).choice([64 << 10, MIB, 8 * MIB]))
            elif trouble.kind == "little pinned memory":
                gpu.runtime.limits(pinned_nbytes=random.Random(trouble.seed).choice([0, MIB]))
            elif trouble.kind in CALLS:
                before[trouble.kind] = trouble
                gpu.runtime.fail(
                    trouble.kind, after=trouble.after, code=2 if "Host" in trouble.kind else 719, times=trouble.times
                )
        yield gpu
        for name, trouble in before.items():
            times = gpu.runtime.calls(name) - trouble.after
            injected[name] += max(0, times if trouble.times < 0 else min(times, trouble.times))
            gpu.runtime.fail(name, times=0)
        injected.update(trouble.kind for trouble in case.troubles if trouble.kind.startswith("little"))


# ---- the load


class _Load:
    """A load and its caller."""

    def __init__(self, case: Case, model: Model, place: Place, gpu: Gpu | None, keeper: Keeper, result: Result) -> None:
        self._case, self._model, self._place, self._keeper, self._result = case, model, place, keeper, result
        self._draw = random.Random(case.seed + 1)
        self._device = gpu.device if gpu is not None else None
        self._held_here: list[tuple[str, torch.Tensor]] = []
        self._lock = threading.Lock()
        self._meddled = False
        asked = case.arguments
        self.names = list(asked.get("names", model.contents))
        slices = draw_slices(model, asked["slices"]) if "slices" in asked else {}
        self.slices = {name: index for name, index in slices.items() if name in self.names}
        self.given = targets(model, asked["into"], self.names) if "into" in asked else {}
        self._opening = {name: asked[name] for name in ("verify",) if name in asked} | place.arguments
        self._arguments = {name: asked[name] for name in ("dtype", "names", "ownership", "order") if name in asked}
        self._arguments |= {"slices": self.slices} if self.slices else {}
        self._arguments |= {"into": self.given} if self.given else {}
        self._arguments |= {"device": self._device} if self._device is not None else {}

    def run(self) -> None:
        """Load as the case's caller does."""
        getattr(self, "_" + self._case.temper.replace(" ", "_"))()

    def let_go(self) -> None:
        """Look once more at what was kept for the time of the load."""
        for name, tensor in self._held_here:
            self._check(name, tensor)
        self._held_here.clear()
        self._arguments.clear()

    # -- tempers

    def _takes_all(self) -> None:
        with self._stream() as tensors:
            self._finish(self._look(tensors))

    def _loads(self) -> None:
        arguments = {name: value for name, value in self._arguments.items() if name != "ownership"}
        tensors = headrace.load(self._place.url(), **self._opening, **arguments, **self._case.options)
        self._finish(self._look(tensors.items()))

    def _keeps_all(self) -> None:
        with self._stream() as tensors:
            kept = dict(tensors)
        self._finish(self._look(kept.items()))

    def _leaves(self) -> None:
        with self._stream() as tensors:
            for _ in self._look(tensors, until=self._case.step):
                pass

    def _raises(self) -> None:
        with self._stream() as tensors:
            for number, _ in enumerate(self._look(tensors)):
                if number == self._case.step:
                    raise CallersError

    def _abandons(self) -> None:
        tensors = self._stream()
        for _ in self._look(tensors, until=self._case.step):
            pass
        del tensors

    def _abandons_a_cycle(self) -> None:
        cycle: list[Any] = [self._stream()]
        for _ in self._look(cycle[0], until=self._case.step):
            pass
        cycle.append(cycle)
        del cycle
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join()

    def _closes_elsewhere(self) -> None:
        with self._stream() as tensors:
            closer = threading.Timer(self._draw.uniform(0, 0.05), tensors.close)
            closer.start()
            try:
                for _ in self._look(tensors):
                    pass
            finally:
                closer.join()

    def _never_starts(self) -> None:
        self._stream()

    def _interrupts(self) -> None:
        before = signal.signal(signal.SIGALRM, _interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, self._draw.uniform(0.0005, 0.1))
            self._takes_all()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _holds(self) -> None:
        arguments = {name: value for name, value in self._arguments.items() if name not in ("names", "device")}
        options = {name: value for name, value in self._case.options.items() if name not in ("pin", "in_place")}
        demands = {name: value for name, value in self._case.options.items() if name in ("pin", "in_place")}
        target = {"device": self._device} if self._device is not None else {}
        names = self._arguments.get("names")
        with headrace.hold(self._place.url(), names=names, **target, **self._opening, **demands, **options) as held:
            for _ in range(2):
                with headrace.stream(held, **target, **arguments) as tensors:
                    self._finish(self._look(tensors))

    def _reads_one_by_one(self) -> None:
        with headrace.open(self._place.url(), **self._opening, **self._case.options) as checkpoint:
            self._finish(self._look((name, headrace.read(checkpoint, name, self.slices.get(name))) for name in self.names))

    def _two_at_once(self) -> None:
        arguments = {name: value for name, value in self._arguments.items() if name != "into"}
        with headrace.open(self._place.url(), **self._opening, **self._case.options) as checkpoint:

            def work() -> None:
                with headrace.stream(checkpoint, **arguments, **self._case.options) as tensors:
                    self._finish(self._look(tensors))

            with ThreadPoolExecutor(2) as threads:
                futures = [threads.submit(work) for _ in range(2)]
            errors = [future.exception() for future in futures]
            futures.clear()
            for error in errors:
                if error is not None:
                    raise error

    # -- what they have in common

    def _stream(self) -> headrace.TensorStream:
        return headrace.stream(self._place.url(), **self._opening, **self._arguments, **self._case.options)

    def _look(self, pairs: Any, until: int | None = None) -> Iterator[str]:
        """Check every tensor as it comes, keep some, and meddle with the files when it is time."""
        number = -1  # enumerate() would keep the tensor for one more step
        for name, tensor in pairs:
            number += 1
            if number >= self._case.step:
                self._meddle()
            self._check(name, tensor)
            with self._lock:
                self._result.tensors += 1
                self._result.nbytes += tensor.nbytes
                self._keep(name, tensor)
            del tensor
            yield name
            if number == until:
                return

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        kinds = [value_of(self._model.contents[name]).dtype]
        if "dtype" in self._case.arguments or self.given:
            kinds += [torch.bfloat16, torch.float16, torch.float32]
        if tensor.dtype not in kinds:
            raise WrongError(f"{name} is {tensor.dtype}")
        if not is_same(tensor, value_at(self._model, name, self.slices, tensor.dtype), exact=tensor.dtype == kinds[0]):
            raise WrongError(f"{name} {tuple(tensor.shape)} {tensor.dtype} has wrong bytes")

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        if self._case.arguments.get("ownership") == "borrowed" or self._draw.random() >= self._case.keeps:
            return
        if self._device is not None or name in self.given:
            self._held_here.append((name, tensor))
        elif "mmap" not in self._case.options:  # outside of the promise
            self._keeper.keep(self._case.seed, name, tensor)

    def _finish(self, names: Iterator[str]) -> None:
        found = list(names)
        if sorted(found) != sorted(self.names):
            raise WrongError(f"{len(found)} tensors came of {len(self.names)}")

    def _meddle(self) -> None:
        kinds = [trouble for trouble in self._case.troubles if trouble.kind in FILES]
        if kinds and not self._meddled:
            self._meddled = True
            meddle(kinds[0], self._model)
            self._result.injected[kinds[0].kind] += 1


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def meddle(trouble: Trouble, model: Model) -> None:
    """Do to a file what others may do while it is read."""
    draw = random.Random(trouble.seed)
    path = draw.choice(model.shards)
    nbytes = path.stat().st_size
    if trouble.kind == "truncated":
        os.truncate(path, draw.randrange(nbytes))
    elif trouble.kind == "grown":
        with path.open("ab") as file:
            file.write(b"more")
    elif trouble.kind == "rewritten":
        with path.open("r+b") as file:
            file.write(bytes(nbytes))
    elif trouble.kind == "renamed over":
        other = path.with_suffix(".new")
        other.write_bytes(bytes(nbytes))
        other.replace(path)
    else:
        path.unlink()


def _check_filled(error: BaseException, given: dict[str, torch.Tensor], model: Model) -> None:
    """What a failed load says that it has filled is filled."""
    if isinstance(error, LoadError):
        for name in error.filled:
            if name in given and bytes_of(given[name]) != bytes_of(value_at(model, name, {}, given[name].dtype)):
                raise WrongError(f"{name} is said to be filled and is not") from error
