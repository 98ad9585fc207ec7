"""Means over runs, or over pairs of runs, with 95% intervals."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev
from typing import NamedTuple

# Student's t at 97.5%, by the degrees of freedom 1, 2, ...
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Interval(NamedTuple):
    """Holds a mean over `count` values, with `half` the width of its 95% interval; None where there is one value."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)

    def text(self, digits: int = 3, sign: bool = False) -> str:
        """Returns "1.034 ± 0.012"; the mean alone where there is one value."""
        shown = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return shown if self.half is None else f"{shown} ± {self.half:.{digits}f}"


def interval(values: Sequence[float]) -> Interval | None:
    """Returns the mean of some values, one from each run or pair; None where there is none."""
    if not values:
        return None
    if len(values) == 1:
        return Interval(values[0], None, 1)
    quantile = QUANTILES[min(len(values) - 1, len(QUANTILES)) - 1]
    return Interval(mean(values), quantile * stdev(values) / sqrt(len(values)), len(values))
