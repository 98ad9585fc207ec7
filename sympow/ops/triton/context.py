"""The kernels on rows split over ranks: states are exchanged before the output pass, their gradients before the
backward.

Two more state passes are run: the exchange needs a rank's own last state before its outputs can be computed, and the
gradient of its initial state through its own outputs before the other gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sympow.ops.context import exclusive_scan
from sympow.ops.triton.op import power_backward, power_forward, power_own_gradient, power_own_state


class Options(NamedTuple):
    """Of `power_forward`."""

    p: int
    scale: float
    normalize: bool
    eps: float
    chunk: int
    tf32: bool
    wide: bool


class PowerInContext(torch.autograd.Function):
    """`power_forward`'s out [B, T, H, V] for this rank's part of every row."""

    @staticmethod
    def forward(ctx, q, k, v, log_g, options: Options, group: dist.ProcessGroup):
        p, scale, normalize, eps, chunk, tf32, wide = options
        s, z = power_own_state(k, v, log_g, p, scale, chunk, tf32)
        s, z = _exchange(s, z, log_g, group)
        gradient = any(ctx.needs_input_grad)
        out, *others = power_forward(
            q, k, v, log_g, s, z, None, p, scale, normalize, eps, chunk, True, tf32, wide, gradient
        )
        ctx.save_for_backward(q, k, v, log_g, s, z, out, *others)
        ctx.options, ctx.group = options, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, log_g, s, z, out, norm, *ends = ctx.saved_tensors
        p, scale, normalize, eps, chunk, tf32, _ = ctx.options
        options = (p, scale, normalize, eps, chunk, tf32)
        ds, dz = power_own_gradient(dout, q, k, v, log_g, out, norm, *options)
        ds, dz = _exchange(ds, dz, log_g, ctx.group, reverse=True)
        dq, dk, dv, dlog_g, *_ = power_backward(dout, ds, dz, q, k, v, log_g, s, z, None, out, norm, *ends, *options)
        return dq, dk, dv, None if log_g is None else dlog_g, None, None


def _exchange(
    s: Tensor, z: Tensor, log_g: Tensor | None, group: dist.ProcessGroup, reverse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """s [B, G, D, V] and z [B, G, D] (empty if there is none) of the ranks before this one; after it, in reverse."""
    both = torch.cat([s, z[..., None]], -1) if z.numel() else s
    log_decay = None if log_g is None else log_g.sum(1, dtype=torch.float64).flatten()
    both = exclusive_scan(both.flatten(0, 1), log_decay, group, reverse=reverse).view_as(both)
    if not z.numel():
        return both, None
    return both[..., :-1].contiguous(), both[..., -1].contiguous()
