"""Rows split over the ranks of a process group: what a rank must know of the parts before it, and after it.

A linear mixer's past is its state, and states compose (M12): with S_r what rank r's own tokens leave and a_r the
product of their gates, the state before rank r is S_{r-1} + a_{r-1} (S_{r-2} + a_{r-2} (...)). Its gradient runs the
other way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def exclusive_scan(x: Tensor, log_decay: Tensor | None, group: dist.ProcessGroup, *, reverse: bool = False) -> Tensor:
    """The sum of all earlier ranks' x, each decayed by the ranks between: sum_{j<r} exp(sum_{j<m<r} log_decay_m) x_j.

    Every rank of the group calls it, with tensors of one shape. No gradients: `exclusive_sum` has them.

    Args:
        x: [N, ...], floating-point.
        log_decay: [N], the natural logarithm of what this rank leaves of what comes in; None: all of it.
        reverse: the sum over all later ranks instead.

    Returns:
        Like x; zero on the first rank (the last in reverse).
    """
    own = x.flatten() if log_decay is None else torch.cat([x.flatten(), log_decay.to(x.dtype)])  # one message, not two
    width = x.numel() // max(1, len(x))
    return exclusive_scan_of_message(own, len(x), [width], group, reverse=reverse).view(x.shape)


def exclusive_scan_of_message(
    message: Tensor, rows: int, widths: Sequence[int], group: dist.ProcessGroup, *, reverse: bool = False
) -> Tensor:
    """`exclusive_scan` of tensors [rows, width], one behind the other in a flat message, which is sent as it is.

    After them it may hold log_decay [rows]. Returns the sums [rows sum(widths)], as the tensors lie in the message.
    """
    if torch.compiler.is_compiling():
        return _scan_as_operator(message, rows, widths, group.group_name, reverse)
    return _scan(message, rows, widths, group, reverse)


def _scan(message: Tensor, rows: int, widths: Sequence[int], group: dist.ProcessGroup, reverse: bool) -> Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = list(message.new_empty(size, message.numel()).unbind(0))
    dist.all_gather(parts, message.contiguous(), group=group)
    lengths = [rows * width for width in widths]
    total = message.new_zeros(sum(lengths))
    decay = message.new_ones(rows, 1)
    for part in parts[rank + 1 :] if reverse else reversed(parts[:rank]):  # the nearest first
        *tensors, log_decay = part.split([*lengths, part.numel() - total.numel()])
        for width, tensor, sums in zip(widths, tensors, total.split(lengths), strict=True):
            sums.view(rows, width).addcmul_(decay, tensor.view(rows, width))
        if log_decay.numel():
            decay = decay * log_decay.exp()[:, None]
    return total


@torch.library.custom_op("sympow::exclusive_scan", mutates_args=())
def _scan_as_operator(message: Tensor, rows: int, widths: Sequence[int], group: str, reverse: bool) -> Tensor:
    """In a graph of torch.compile: whole, as a compiler that saw the message would drop it on the rank that reads
    nothing from it, and leave the others waiting."""
    resolve: Callable[..., dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
    return _scan(message, rows, widths, resolve(group), reverse)


@_scan_as_operator.register_fake
def _(message, rows, widths, group, reverse):
    return message.new_empty(rows * sum(widths))


def exclusive_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x [N, ...] over all earlier ranks, zero on the first. Every rank of the group calls it, also in the
    backward."""
    return _ExclusiveSum.apply(x, group)


class _ExclusiveSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return exclusive_scan(x, None, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return exclusive_scan(grad, None, ctx.group, reverse=True), None
