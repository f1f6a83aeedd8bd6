"""GPU acceptance: what this machine's driver does beside what the simulator says that it does, and the machine's figures.

    scripts/gpu, headrace doctor --gpu, python -m headrace.testing.acceptance

Every probe runs in a process of its own with a time limit, and one table at the end says what came of them. It needs torch (any
CUDA or ROCm build), numpy and this package; a C compiler for the simulator, without which the driver's answers stand alone; and
the source tree for the tests that are marked gpu and the benchmark of loads to a device, which are left out elsewhere. The
simulator is given the real device's attributes first. What differs then is to be corrected in headrace.testing.simulated, or in
headrace.

`_run` asks, compares and shows; `_probes` has the questions, `_runtime` the library that they are put to. Probes of whole loads
are `_bytes`, `_loads` and `_rates`, direct storage is `_cufile`.
"""

from headrace.testing.acceptance._run import accept, main

__all__ = ["accept", "main"]
