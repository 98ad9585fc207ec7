"""Running sums of log gates whose differences are right to rounding, however hard other gates are.

A decay is the exponential of a difference of two sums. A gate of -1e9 in one sum of floating-point numbers would take
the digits of all gates that follow. Two things prevent this. A log gate below `hardest` counts as that number, because
the decay is 0 in both cases. And the sums have more digits than the decays. They are float64 for decays in float32. For
decays in float64, every log gate is split into a multiple of 2**-23 and a rest. Sums of the multiples are exact in
float64 up to a million tokens, and those of the rests are too small to round.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Multiples of it up to `hardest` times 128 tokens are exact in the dtype.
_GRID = {torch.float32: 2.0**-10, torch.float64: 2.0**-23}


def hardest(dtype: torch.dtype) -> float:
    """Returns a log gate whose decay is 0 in float32 or float64, a few below the greatest such number."""
    return -128.0 if dtype == torch.float32 else -800.0


def gate_sums(log_g: Tensor, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns the running sums, along `dim`, of log gates <= 0 in any float dtype, for decays in `dtype`.

    The gradient of a log gate below `hardest(dtype)` is 0.

    Returns:
        [parts, ...], float64: parts whose sum is L. For decays in float32 there is one part, whose differences have
        more digits than float32. For float64 there are the exact sum of multiples of 2**-23, and that of the rests.
    """
    log_g = log_g.double().clamp(min=hardest(dtype))
    if dtype == torch.float32:
        return log_g.cumsum(dim)[None]
    coarse = (log_g.detach() / _GRID[dtype]).round() * _GRID[dtype]
    return torch.stack([coarse.cumsum(dim), (log_g - coarse).cumsum(dim)])


def joined(parts: Tensor) -> Tensor:
    """Returns the sum over the parts [parts, ...] of L, or of a difference of two L."""
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def split(difference: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns differences of L [parts, ...] in two numbers of `dtype`.

    The first is a multiple of a power of two, and differences of such numbers are exact. The second is below 1.
    """
    if len(difference) == 1:
        rounded = (difference[0] / _GRID[dtype]).round_().mul_(_GRID[dtype])
        difference = torch.stack([rounded, difference[0] - rounded])
    parts = difference.to(dtype)
    return parts[0], parts[1]
