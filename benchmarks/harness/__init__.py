"""What the benchmarks share: sets of checkpoints, the page cache, measuring in fresh processes, tables and charts.

A *case* is a table row: which checkpoint, cached or not, loaded how. A *way* is one implementation of it: headrace, a floor in
plain Python, or a peer. Every measurement is a process of its own that prints one JSON line.
"""
