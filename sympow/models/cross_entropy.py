"""Cross-entropy behind a large vocabulary: the sum over all tokens, its gradient formed slice by slice of the tokens.

The gradient of a sum of losses is known as soon as the logits are, but for the factor that comes from above. So the
forward forms it, slice by slice, in three matrix products; the backward only multiplies by the factor. Recomputing the
logits in the backward would take a fourth product, and keeping them T x V elements (as Liger's fused linear
cross-entropy, Hsu et al., 2024, arXiv 2410.10989).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

IGNORE = -100
"""Targets of this value have no loss."""

# Rows of logits are padded to a multiple of so many elements: 128 bytes of bfloat16, a cache line. Without, matrix
# products of odd widths (a vocabulary of 50,257) run on slower kernels.
_ALIGN = 64

# Whether addmm on CUDA adds products of half precision to a sum in float32. Versions are compared, not strings.
_ADDS_IN_FLOAT32 = torch.__version__ >= "2.11"


class CrossEntropy(nn.Module):
    """Losses of rows of logits, and their gradients; a module so that it can be compiled (`nn.Module.compile`)."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [N, W] (-inf: no token), targets int64 [N] -> losses [N] in float32 (float64 for such logits), 0 where
        the target is -100. The logits are overwritten with the gradients of the losses by them."""
        real = targets != IGNORE
        dtype = torch.promote_types(logits.dtype, torch.float32)
        compiled = torch.compiler.is_compiling()
        index = targets.masked_fill(~real, 0)[:, None]
        if compiled:  # into one kernel, of which an indirect read or write cannot be part
            hit = torch.arange(logits.shape[1], device=logits.device) == index
            target = torch.where(hit, logits, 0.0).sum(-1, dtype=dtype)
        else:
            target = logits.gather(1, index)[:, 0].to(dtype)
        p = logits.to(dtype)
        largest = p.amax(-1, keepdim=True)
        p = p.sub_(largest).exp_()  # of the logits themselves where their dtype is that of the losses
        total = p.sum(-1, keepdim=True)
        losses = torch.where(real, (total.log() + largest)[:, 0] - target, 0.0)
        p.mul_(real[:, None] / total)
        if compiled:
            p.sub_((hit & real[:, None]).to(dtype))
        else:
            p.scatter_add_(1, index, -real[:, None].to(dtype))
        logits.copy_(p)
        return losses


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int, cross_entropy: CrossEntropy
) -> Tensor:
    """The sum of -log softmax(hidden weight^T)[target] over all targets that are not -100, in nats: a scalar, float32
    (float64 of such inputs). Differentiable once, in hidden and weight.

    Args:
        hidden: [N, d]. Under autocast the products are of its dtype.
        weight: [V, d].
        targets: int64 [N].
        rows: tokens of a slice.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        return _CrossEntropySum.apply(hidden, weight, targets, rows, dtype, torch.is_grad_enabled(), cross_entropy)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, of a total in float32 where a and b are of half precision."""
    if total.is_cuda and _ADDS_IN_FLOAT32:
        torch.addmm(total, a, b, total.dtype, out=total)
    else:
        total += a @ b


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype, grad: bool,
        cross_entropy: CrossEntropy,
    ) -> Tensor:  # fmt: skip
        vocabulary = len(weight)
        padded = pad(weight.to(dtype), (0, 0, 0, -vocabulary % _ALIGN))
        sums = torch.promote_types(dtype, torch.float32)
        losses = torch.empty(targets.shape, dtype=sums, device=hidden.device)
        dhidden = torch.empty_like(hidden, dtype=dtype) if grad else None
        dweight = torch.zeros_like(padded, dtype=sums) if grad else None
        for first in range(0, len(hidden), rows):
            here = slice(first, first + rows)
            part = hidden[here].to(dtype)
            logits = part @ padded.T
            logits[:, vocabulary:] = -torch.inf
            losses[here] = cross_entropy(logits, targets[here])
            if dhidden is not None and dweight is not None:
                dlogits = logits
                torch.mm(dlogits, padded, out=dhidden[here])
                _add_product(dweight, dlogits.T, part)
        if dhidden is not None and dweight is not None:
            ctx.save_for_backward(dhidden, dweight[:vocabulary])
            ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        grads = (g.to(dtype) * factor for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *grads, *[None] * 5
