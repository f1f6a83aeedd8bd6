"""cuFile and hipFile without a GPU: a library that reads files into simulated device memory, and goes wrong on order.

    with SimulatedRuntime() as runtime:
        direct = SimulatedCuFile(tmp_path, runtime)
        direct.faults(read_error=5030, read_after=2)
        ...  # load direct.path as one would load libcufile.so.0; hipFile's names are there as well

Each object has a copy of the library of its own, and its faults lie in a file beside it: a child process that loads `path` meets
the same faults. Counts and violations are those of this process. The interface is that of cuFile 1.20 as documented; how the
real libraries fail was measured without a driver (open hangs, open succeeds without a GPU, descriptor 0 closed, 5019 and 5033)
or read in reports, and nothing was seen on a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass, fields
from pathlib import Path

from headrace.testing.simulated import SimulatedRuntime
from headrace.testing.simulated.building import build

__all__ = ["Counts", "SimulatedCuFile"]

_SOURCE = Path(__file__).parent / "cufile.c"


@dataclass(frozen=True, slots=True)
class Counts:
    """What this process did with the library.

    Attributes:
        opens: calls of cuFileDriverOpen, failed ones included.
        handles, buffers: registered and not deregistered yet.
        reads, failed_reads: all calls, and those that gave an error.
        p2p_reads, nvfs_reads, posix_reads: the way that reads took; unaligned ones take the last.
        violations: lines of `violations()`.
    """

    opens: int
    handles: int
    buffers: int
    reads: int
    read_nbytes: int
    p2p_reads: int
    nvfs_reads: int
    posix_reads: int
    unaligned_reads: int
    failed_reads: int
    violations: int


class SimulatedCuFile:
    """A simulated libcufile, or libhipfile.

    Args:
        folder: where its copy of the library is put.
        runtime: the simulated CUDA runtime whose device memory it reads into; None where only host memory is read into.
        name: of the library's file.

    Attributes:
        path: the library.

    Raises:
        BuildError: no C compiler, or it failed.
    """

    def __init__(self, folder: Path, runtime: SimulatedRuntime | None = None, *, name: str = "libcufile.so.0") -> None:
        self.path = folder / name
        self._runtime = runtime
        new = folder / f"{name}.new"
        shutil.copy(build("libcufile-simulated", [_SOURCE]), new)
        new.replace(self.path)  # in one step: writing into a library that is loaded would change the code that runs
        self.faults()

    def faults(
        self,
        *,
        open_error: int = 0,
        open_hangs: bool = False,
        open_closes_stdin: bool = False,
        register_error: int = 0,
        buffer_error: int = 0,
        read_error: int = 0,
        read_errno: int = 0,
        read_hangs: bool = False,
        read_at_most: int = 0,
        read_after: int = 0,
        wrong_bytes: bool = False,
        only_under: Path | None = None,
        stats_error: int = 0,
        route: str = "p2p",
    ) -> None:
        """Set what goes wrong from the next call on; what is not named is right again.

        Args:
            open_error, register_error, buffer_error, stats_error: codes of CUfileOpError that these calls give.
            open_closes_stdin: opening closes descriptor 0, as a half-configured nvidia-fs does.
            read_error, read_errno: reads give minus this code, or -1 with this errno.
            read_at_most: bytes of one read; it gives fewer than it was asked for.
            read_after: reads that pass before the faults of reads begin.
            wrong_bytes: reads succeed, with one wrong byte.
            only_under: the faults of registering and reading are for files whose path begins with this.
            route: the way of aligned reads in the statistics: "p2p", "nvfs" or "posix".
        """
        values: dict[str, object] = {name: value for name, value in locals().items() if name != "self" and value}
        if self._runtime is not None:
            values["runtime"] = self._runtime.path
        lines = [f"{name} {int(value) if isinstance(value, bool) else value}\n" for name, value in values.items()]
        # In one step, since another thread may be reading it.
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text("".join(lines))
        new.replace(self.path.with_name(f"{self.path.name}.faults"))

    def counts(self) -> Counts:
        """What this process did so far."""
        found = (ctypes.c_uint64 * len(fields(Counts)))()
        self._library().simfile_counts(found)
        return Counts(*found)

    def violations(self) -> list[str]:
        """What this process did that cuFile does not allow, a line each."""
        function = self._library().simfile_violations
        function.restype = ctypes.c_char_p
        text: bytes = function()
        return text.decode().splitlines()

    def _library(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.path))
