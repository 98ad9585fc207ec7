"""Causal depthwise convolution of a few taps: every channel by itself, documents apart.

On a GPU there is one kernel for the forward, one for the backward and one for a step
(`sympow.ops.fused.short_convolution_kernels`). Elsewhere, and for more taps than the kernels take, it is plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import autocast_dtype, has_kernels, without_autocast
from sympow.ops.convolution import causal_convolution
from sympow.ops.packed import borders, check_borders, document_starts

MOST_TAPS = 16  # of the kernels, and of compiled code, which write out the sum over the taps


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, *, past: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns y_t = bias + sum over s < k of weight[:, k - 1 - s] x_{t-s}, with zeros before the first token.

    Sums are formed in float32 at least. Under autocast x is first cast to the dtype of autocast.

    Args:
        x: [B, T, C].
        weight: [C, k]; the last tap belongs to the token itself.
        bias: [C].
        past: [B, k - 1, C], the tokens before x, oldest first; None: zeros.
        cu_seqlens: int [N + 1], borders of N documents packed into one row (B = 1), which do not see each other.

    Returns:
        [B, T, C], in the dtype of x, or of autocast.
    """
    if (dtype := autocast_dtype(x)) is not None:
        x = x.to(dtype)
    if past is not None:
        x = torch.cat([past.to(x.dtype), x], dim=1)
    first = None
    if cu_seqlens is not None:
        check_borders(cu_seqlens, x.shape[0])
        if cu_seqlens.device.type == "cpu":
            borders(cu_seqlens, x.shape[1])
        first = document_starts(cu_seqlens.to(x.device), x.shape[1])
    few = weight.shape[1] <= MOST_TAPS
    if few and has_kernels(x.device, x.dtype):
        from sympow.ops.fused.short_convolution_kernels import short_convolution as kernel

        y = kernel(x, weight, bias, first)
    elif not few and first is None and (x.is_cuda or torch.compiler.is_compiling()):
        with without_autocast(x):
            y = (causal_convolution(x.to(_at_least_float32(x, weight)), weight.flip(1).T) + bias).to(x.dtype)
    else:
        y = _in_torch(x, weight, bias, first)
    return y if past is None else y[:, past.shape[1] :]


@torch.no_grad()
def short_convolution_step(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns what `short_convolution` does for a few tokens after `past`, and replaces `past` by the last inputs.

    There is no gradient. On a GPU it is one kernel.

    Args:
        x: [B, T, C].
        past: [B, k - 1, C], the tokens before x, oldest first. Afterwards it holds the last k - 1 tokens of both.
        weight: [C, k]; the last tap belongs to the token itself.
        bias: [C].

    Returns:
        [B, T, C], in the dtype of x, or of autocast.
    """
    if (dtype := autocast_dtype(x)) is not None:
        x = x.to(dtype)
    if x.shape[1] == 0:
        return x
    if weight.shape[1] <= MOST_TAPS and has_kernels(x.device, x.dtype):
        from sympow.ops.fused.short_convolution_kernels import short_convolution_step as kernel

        return kernel(x, past, weight, bias)
    seen = torch.cat([past.to(x.dtype), x], dim=1)
    # Sums of k rows: calling a convolution takes longer than computing it.
    y = ((seen.unfold(1, weight.shape[1], 1) * weight).sum(-1) + bias).to(x.dtype)
    past.copy_(seen[:, x.shape[1] :])
    return y


def _in_torch(x: Tensor, weight: Tensor, bias: Tensor, first: Tensor | None) -> Tensor:
    dtype = _at_least_float32(x, weight)
    wide, width = x.to(dtype), weight.shape[1]
    with without_autocast(x):
        if first is None and x.shape[1] and not torch.compiler.is_compiling():
            padded = F.pad(wide.transpose(1, 2), (width - 1, 0))
            y = F.conv1d(padded, weight.to(dtype).unsqueeze(1), bias.to(dtype), groups=x.shape[2]).transpose(1, 2)
            return y.to(x.dtype)
        # Sums of shifted rows: a compiler fuses them with the operations around them.
        time = x.shape[1]
        padded = F.pad(wide, (0, 0, width - 1, 0))
        y = bias.to(dtype).expand_as(wide)
        token = torch.arange(time, device=x.device)
        for s in range(width):
            tap = padded[:, width - 1 - s : width - 1 - s + time] * weight[:, width - 1 - s].to(dtype)
            y = y + (tap if first is None else tap * (token - s >= first)[:, None])
    return y.to(x.dtype)


def _at_least_float32(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.promote_types(weight.dtype, torch.float32))
