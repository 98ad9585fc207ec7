"""Sums over all tokens so far, of gates, positions and features: in blocks, for GPUs and for torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import check_float64, is_exporting
from sympow.ops.runtime.launcher import ALL_DEVICES, operator

SUM_BLOCK = 128


def sums_so_far(x: Tensor, start: Tensor | None = None) -> Tensor:
    """Returns start + x_1 + ... + x_t for every token t, in float64.

    Args:
        x: [B, T, G].
        start: [B, G] float64; zero if None.

    Returns:
        [B, T, G] float64.
    """
    check_float64(x.device)
    # Time is the last axis, because a GPU sums along another axis with only one thread for each row.
    sums = blocked_sums(x.to(torch.float64).transpose(1, 2)).transpose(1, 2)
    return sums if start is None else sums + start[:, None]


def blocked_sums(x: Tensor) -> Tensor:
    """Returns x.cumsum(-1) by sums of at most SUM_BLOCK elements: within blocks, and over the last sums of the blocks.

    For a plain cumsum a GPU would use one thread block for each row, and there are few rows. For torch.compile this is
    an operator, since a trace would be of few lengths, and compiled code fails at some sums over more than 128 tokens.
    """
    if torch.compiler.is_dynamo_compiling() and not is_exporting():
        return running_sums(x)
    length = x.shape[-1]
    if is_exporting() or length <= SUM_BLOCK:
        return x.cumsum(-1)
    within = F.pad(x, (0, -length % SUM_BLOCK)).unflatten(-1, (-1, SUM_BLOCK)).cumsum(-1)
    before = F.pad(blocked_sums(within[..., :-1, -1]), (1, 0))
    return (within + before[..., None]).flatten(-2)[..., :length]


def _backward_of_sums(ctx, dsums):
    return (running_sums(dsums.flip(-1)).flip(-1),)


@operator(lambda x: x.new_empty(x.shape), lambda ctx, inputs, output: None, _backward_of_sums, devices=ALL_DEVICES)
def running_sums(x: Tensor) -> Tensor:
    """Computes x.cumsum(-1) as `blocked_sums` does."""
    return blocked_sums(x).contiguous()
