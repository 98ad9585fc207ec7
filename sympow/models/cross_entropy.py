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

# Rows of logits are padded to a multiple of so many elements: 16 bytes of bfloat16, without which matrix products of
# odd widths (a vocabulary of 50,257) run on slower kernels.
_ALIGN = 8


class CrossEntropy(nn.Module):
    """Losses of rows of logits, and their gradients; a module so that it can be compiled (`nn.Module.compile`)."""

    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """logits [N, W] (-inf: no token), targets int64 [N] -> losses [N] in float32 (float64 for such logits), 0 where
        the target is -100; and their gradients by the logits, [N, W] in the dtype of those."""
        log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        real = targets != IGNORE
        index = targets.masked_fill(~real, 0)[:, None]
        losses = torch.where(real, -log_p.gather(1, index)[:, 0], 0.0)
        token = torch.arange(logits.shape[1], device=logits.device)
        grad = log_p.exp_().add_(token == index, alpha=-1).mul_(real[:, None])
        return losses, grad.to(logits.dtype)


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
            losses[here], dlogits = cross_entropy(logits, targets[here])
            if dhidden is not None and dweight is not None:
                torch.mm(dlogits, padded, out=dhidden[here])
                dweight += dlogits.T @ part
        if dhidden is not None and dweight is not None:
            ctx.save_for_backward(dhidden, dweight[:vocabulary])
            ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        grads = (g.to(dtype) * factor for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *grads, *[None] * 5
