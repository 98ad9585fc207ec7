"""Exchange between the ranks of a process group that share rows: states go to later ranks, gradients to earlier ones.

The state of a linear mixer summarizes all earlier tokens, and states can be combined (M12). Let S_r be the state of the
tokens of rank r alone, and a_r the product of their gates. Then the state before rank r is S_{r-1} + a_{r-1} (S_{r-2} +
a_{r-2} (...)). The gradient of this state goes in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def exclusive_scan(x: Tensor, log_decay: Tensor | None, group: dist.ProcessGroup, *, reverse: bool = False) -> Tensor:
    """Sums up x of all earlier ranks, each decayed by the ranks between.

    The sum on rank r is sum_{j<r} exp(sum_{j<m<r} log_decay_m) x_j.

    Every rank of the group calls it, with tensors of one shape. It has no gradients. `exclusive_sum` has gradients.

    Args:
        x: [N, ...], floating-point.
        log_decay: [N], the natural logarithm of the decay over all tokens of this rank; None: no decay.
        group: the ranks that share a row.
        reverse: the sum over all later ranks instead.

    Returns:
        Like x; zero on the first rank (the last in reverse).
    """
    log_decay = None if log_decay is None else log_decay.to(x.dtype)
    widths = [x.numel() // max(1, len(x))]
    return exclusive_scan_of_message(x.flatten(), log_decay, widths, group, reverse=reverse).view(x.shape)


def exclusive_scan_of_message(
    message: Tensor, log_decay: Tensor | None, widths: Sequence[int], group: dist.ProcessGroup, *, reverse: bool = False
) -> Tensor:
    """Scans tensors [N, width] of several widths, one after the other in a flat message.

    See `exclusive_scan`. The sums are returned in the same form. log_decay: [N] or None.
    """
    if torch.compiler.is_compiling():
        return _scan_as_operator(message, log_decay, widths, group.group_name, reverse)
    return _scan(message, log_decay, widths, group, reverse)


def _scan(
    message: Tensor, log_decay: Tensor | None, widths: Sequence[int], group: dist.ProcessGroup, reverse: bool
) -> Tensor:
    """Scans along a chain: a rank receives the sum of those before it, and sends it on with its own added.

    On a GPU only the receiver waits, and only for the first message. After that the sender is ahead by the time of one
    message, so its next messages arrive before they are needed.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    before, after = (rank + 1, rank - 1) if reverse else (rank - 1, rank + 1)
    first = not 0 <= before < size
    incoming = torch.zeros_like(message) if first else torch.empty_like(message)
    if not message.numel():
        return incoming
    if not first:
        _begin(dist.irecv, incoming, before, group).wait()
    if 0 <= after < size:
        # A separate tensor, because the memory of the message may be overwritten before the send is complete.
        leaving = message.clone() if first else _leaving(message, log_decay, incoming, widths)
        sent = _begin(dist.isend, leaving, after, group)
        if not message.is_cuda:  # gloo drops a message that nobody waits for; NCCL keeps it until it is sent
            sent.wait()
    return incoming


def _leaving(own: Tensor, log_decay: Tensor | None, incoming: Tensor, widths: Sequence[int]) -> Tensor:
    """Returns own + exp(log_decay) * incoming."""
    if log_decay is None:
        return own + incoming
    out, rows, decay = torch.empty_like(own), len(log_decay), log_decay.exp()[:, None]
    parts = zip(widths, *(x.split([rows * width for width in widths]) for x in (own, incoming, out)), strict=True)
    for width, ours, came, total in parts:
        torch.addcmul(ours.view(rows, width), came.view(rows, width), decay, out=total.view(rows, width))
    return out


def _begin(transfer: Callable[..., dist.Work | None], x: Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work:
    """Sends or receives: as a batch of one, which NCCL does within the group's own communicator."""
    return dist.batch_isend_irecv([dist.P2POp(transfer, x, group=group, group_peer=peer)])[0]


@torch.library.custom_op("sympow::exclusive_scan", mutates_args=())
def _scan_as_operator(
    message: Tensor, log_decay: Tensor | None, widths: Sequence[int], group: str, reverse: bool
) -> Tensor:
    """Scans as one operator in a graph of torch.compile.

    A compiler would remove the message on the rank that does not read it, and the other ranks would wait for ever.
    """
    resolve: Callable[..., dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
    return _scan(message, log_decay, widths, resolve(group), reverse)


@_scan_as_operator.register_fake
def _(message, log_decay, widths, group, reverse):
    return torch.empty_like(message)


def exclusive_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of x [N, ...] over all earlier ranks, zero on the first.

    Every rank of the group calls it, also in the backward.
    """
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


def previous_tokens(x: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Returns the last `count` tokens of the rank before, [B, count, ...] of x [B, T, ...]; zeros on the first.

    Every rank of the group calls it, with tensors of one shape, also in the backward.

    Raises ValueError where a rank has fewer than `count` tokens.
    """
    if x.shape[1] < count:
        raise ValueError(f"a part of {x.shape[1]} tokens has no last {count} of them to pass on")
    return _PreviousTokens.apply(x[:, x.shape[1] - count :], group)


class _PreviousTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tail, group):
        ctx.group = group
        return _neighbour(tail, group, reverse=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return _neighbour(grad, ctx.group, reverse=True), None


def _neighbour(x: Tensor, group: dist.ProcessGroup, reverse: bool) -> Tensor:
    """Returns x of the previous rank, in reverse that of the next rank; zeros where there is none."""
    if torch.compiler.is_compiling():
        return _neighbour_as_operator(x, group.group_name, reverse)
    return _exchanged(x, group, reverse)


def _exchanged(x: Tensor, group: dist.ProcessGroup, reverse: bool) -> Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    before, after = (rank + 1, rank - 1) if reverse else (rank - 1, rank + 1)
    sent, received = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
    transfers = []
    if x.numel() and 0 <= after < size:
        transfers.append(dist.P2POp(dist.isend, sent, group=group, group_peer=after))
    if x.numel() and 0 <= before < size:
        transfers.append(dist.P2POp(dist.irecv, received, group=group, group_peer=before))
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()
    return received


@torch.library.custom_op("sympow::neighbour", mutates_args=())
def _neighbour_as_operator(x: Tensor, group: str, reverse: bool) -> Tensor:
    """Runs `_neighbour` as one operator in a graph of torch.compile, as `_scan_as_operator` does."""
    resolve: Callable[..., dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group
    return _exchanged(x, resolve(group), reverse)


@_neighbour_as_operator.register_fake
def _(x, group, reverse):
    return torch.empty_like(x, memory_format=torch.contiguous_format)
