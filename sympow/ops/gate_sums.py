"""Running sums of log gates whose differences are right to rounding, however hard other gates are.

A decay is the exponential of a difference of two sums. A gate of -1e9 in one sum of floating-point numbers would take
the digits of all gates that follow. Two things prevent this. A log gate below `hardest` counts as that number, because
the decay is 0 in both cases. And the sums have more digits than the decays. They are float64 for decays in float32. For
decays in float64, every log gate is split into a multiple of 2**-23 and a rest. Sums of the multiples are exact in
float64 up to a million tokens, and those of the rests are too small to round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_GRID = 2.0**-23


class GateSums(NamedTuple):
    """Holds sums L of log gates from the first token to each, float64.

    Attributes:
        coarse: for decays in float64 the exact sum of multiples of 2**-23; for float32 L itself, whose differences have
            more digits than float32.
        fine: the rest of L; None for float32.
    """

    coarse: Tensor
    fine: Tensor | None

    def total(self) -> Tensor:
        """Returns L, the log of the decay from before the first token."""
        return self.coarse if self.fine is None else self.coarse + self.fine

    def since(self, earlier: GateSums) -> Tensor:
        """Returns L less an earlier L, by broadcasting."""
        difference = self.coarse - earlier.coarse
        return difference if self.fine is None or earlier.fine is None else difference + (self.fine - earlier.fine)

    def of(self, change: Callable[[Tensor], Tensor]) -> GateSums:
        """Returns both parts after a change of their shape."""
        return GateSums(change(self.coarse), None if self.fine is None else change(self.fine))


def hardest(dtype: torch.dtype) -> float:
    """Returns a log gate whose decay is 0 in float32 or float64, a few below the greatest such number."""
    return -128.0 if dtype == torch.float32 else -800.0


def gate_sums(log_g: Tensor, dim: int, dtype: torch.dtype = torch.float64) -> GateSums:
    """Returns the running sums, along `dim`, of log gates <= 0 in any float dtype, for decays in `dtype`.

    The gradient of a log gate below `hardest(dtype)` is 0.
    """
    log_g = log_g.double().clamp(min=hardest(dtype))
    if dtype == torch.float32:
        return GateSums(log_g.cumsum(dim), None)
    coarse = (log_g.detach() / _GRID).round() * _GRID
    return GateSums(coarse.cumsum(dim), (log_g - coarse).cumsum(dim))
