"""What `stream` returns: one load, as an iterator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from headrace._phases import Load
from headrace._progress import Snapshot
from headrace.errors import StreamError

if TYPE_CHECKING:
    from headrace._tables import SharedTensor


class TensorStream(Iterator[tuple[str, Any]]):
    """(name, tensor) pairs of one load. A context manager, and an iterator that runs once.

    Reading starts with the `with` block or the first tensor that is asked for. The stream closes at its end, at the end
    of the block, on an error, when `close` is called and when it is abandoned.

    Attributes:
        plan: what is being done.
        shared: {name: `SharedTensor`} of the tensors that go to "shared-cpu", known before they are there.
    """

    def __init__(self, engine: Load, shared: Mapping[str, SharedTensor]) -> None:
        self._engine = engine
        self._tensors = engine.run()
        self._iterated = False
        self.plan, self.shared = engine.plan, shared

    @property
    def stats(self) -> Snapshot:
        """What the load has done so far and where its time went; final once the stream is closed."""
        return self._engine.progress.snapshot()

    def __repr__(self) -> str:
        stats = self.stats
        return f"<TensorStream: {stats.tensors:,} of {stats.total_tensors:,} tensors handed out>"

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        if self._iterated:
            raise StreamError("a stream runs once; open another one to iterate again")
        self._iterated = True
        return self._pairs()

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        # A generator is quicker than __next__, and this one keeps the stream alive in `for ... in headrace.stream(...)`.
        # With `yield from`, leaving a loop would close what `next` may go on with; a variable would keep a tensor alive.
        while True:
            try:
                yield next(self._tensors)
            except StopIteration:
                break
        self._engine.check_finished()

    def __next__(self) -> tuple[str, Any]:
        try:
            return next(self._tensors)
        except StopIteration:
            self._engine.check_finished()
            raise

    def close(self) -> None:
        """Stop reading and give memory and files back. Tensors that were handed out stay.

        May be called twice, and from any thread: a thread that waits for the next tensor then gets a `StreamError`.
        """
        self._iterated = True
        self._engine.stop()
        with suppress(ValueError):  # it runs at this moment, on another thread or around this call, and will see that it is over
            self._tensors.close()

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if "_engine" in self.__dict__:  # not where __init__ failed
            self.close()
