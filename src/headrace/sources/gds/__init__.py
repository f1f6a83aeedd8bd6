"""Direct storage: files read straight into device memory by cuFile (CUDA) or hipFile (ROCm).

Neither library can be trusted before it was tried. Opening it may never return, succeed with no GPU behind it, close descriptor
0, or end the process; reads may succeed with wrong bytes. So a child process tries it on a file of the same filesystem first,
with a time limit (`_probe`, `_verdict`), and only what it found right is opened here. From then on every call runs on a thread
that is given up when the call does not come back in time (`_calls`).

Whether bytes went from the disk to the device or by way of host memory, which both libraries do silently where they cannot do
better, is told by the library's own statistics and by nothing else.
"""

from headrace.sources.gds._library import find_libraries
from headrace.sources.gds._source import DirectFile, DirectLoad
from headrace.sources.gds._verdict import Gpu, Verdict, mode_of, verdict_of

__all__ = ["DirectFile", "DirectLoad", "Gpu", "Verdict", "find_libraries", "mode_of", "verdict_of"]
