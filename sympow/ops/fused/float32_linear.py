"""Linear maps to a few channels, computed in float32 for numbers that are summed over the context."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import autocast_dtype, has_kernels, without_autocast

WIDEST = 32  # channels of the result with a kernel


def product_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x weight^T + bias, computed in float32 at least, also under autocast.

    On a GPU, for x in bfloat16 and up to 32 channels, one kernel computes the forward and one kernel the backward. They
    do not copy x to float32.

    Args:
        x: [..., d].
        weight: [n, d].
        bias: [n]; None: 0.

    Returns:
        [..., n], float32, or float64 of such weights.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    halves = x.dtype == torch.bfloat16 and dtype == torch.float32
    if halves and len(weight) <= WIDEST and has_kernels(x.device, x.dtype):
        from sympow.ops.fused.float32_linear_kernels import narrow_linear

        y = narrow_linear(x.reshape(-1, x.shape[-1]), weight)
        return (y if bias is None else y + bias.to(dtype)).view(*x.shape[:-1], len(weight))
    if x.dtype == weight.dtype == dtype and autocast_dtype(x) is None:
        return F.linear(x, weight, bias)  # casts would cost a decoded token time, and change nothing
    with without_autocast(x):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
