"""Loads with random faults, for as long as one likes: each ends in right bytes, or in an error that its faults explain.

`cases` draws what is done from a number (pure), `models` makes the files, `troubles` is the table of what can go wrong and which
errors that explains, `loading`, `pulling` and `grouping` carry a case out, `watching` looks at what is left behind, `keeping`
looks again at tensors of earlier loads, `reporting` adds up; `fuzzing` runs properties instead. It stands on what `tests` use:
checkpoints, ranks, simulated GPUs.
"""
