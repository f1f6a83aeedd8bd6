"""How much of a property's work `scripts/test --quick` does: a quarter of the examples. The whole suite tries them all."""

from __future__ import annotations

from hypothesis import settings

WHOLE, QUICK = 100, 25  # examples of a property that names no number of its own; 100 is hypothesis's default


def examples(count: int) -> int:
    """As many examples as the profile in force leaves of this many."""
    return max(1, count * min(settings().max_examples, WHOLE) // WHOLE)
