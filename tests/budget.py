"""How much of a long row of work `scripts/test --quick` does; the whole suite does all of it.

A property gets a quarter of its examples. Of cases that go the same way through headrace, and take their time, it takes some.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

WHOLE, QUICK = 100, 25  # examples of a property that names no number of its own; 100 is hypothesis's default


def examples(count: int) -> int:
    """As many examples as the profile in force leaves of this many."""
    return max(1, count * min(settings().max_examples, WHOLE) // WHOLE)


def rest_slow(cases: Iterable[Any], *, quick: Collection[int] = (0,)) -> list[Any]:
    """Cases for parametrize, slow but for those with these numbers. A case is a tuple where there are several arguments."""
    given = [case if type(case) is tuple else (case,) for case in cases]
    return [pytest.param(*case, marks=() if number in quick else pytest.mark.slow) for number, case in enumerate(given)]
