"""What this machine and this source can do, what a load makes of it, and what stands in its way: `headrace bench`.

`_probes` measures the parts one by one, with loops that do nothing else: storage or network, memory, casts, copies to a GPU.
`_loads` then runs the real load, through the public API and with a trace, and `_rivals` other loaders in processes of their own.
`_report` holds the figures, `_verdict` says in words what they mean (PURE), `_chart` draws them. Every step is bounded in bytes
and in time, nothing is written but the files asked for, and page cache is dropped on demand only, of the model's own files.
"""

from headrace._bench._measure import Settings, measure
from headrace._bench._report import Figure, Report, Run, as_trace

__all__ = ["Figure", "Report", "Run", "Settings", "as_trace", "measure"]
