"""Sums of losses over a large vocabulary, whose gradients are computed for one slice of the tokens after another.

The losses are the cross-entropy of tokens, and the divergence from the prediction of another model. The gradient of a
sum of losses is known as soon as the logits are, up to the incoming gradient, which is a factor. So the forward
computes it, slice by slice, in three matrix products, and the backward only multiplies by the factor. Recomputing the
logits in the backward would take a fourth product, and keeping them would take T x V elements (as in Liger's fused
linear cross-entropy, Hsu et al., 2024, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sympow.ops.availability import dtype_in_products, has_kernels, without_autocast
from sympow.ops.first_order import first_order
from sympow.ops.fused.cross_entropy import cross_entropy_of_rows

IGNORE = -100
"""Targets of this value have no loss."""

# Rows of logits are padded to a multiple of so many elements: 128 bytes of bfloat16, a cache line. Without padding,
# matrix products of odd widths (a vocabulary of 50,257) run on slower kernels.
_ALIGN = 64

# logits [N, W] of the tokens of a slice, and the slice -> losses [N]; the logits become the gradients.
Losses = Callable[[Tensor, slice], Tensor]

# Whether addmm on CUDA adds products of half precision to a sum in float32. Versions are compared, not strings.
_ADDS_IN_FLOAT32 = torch.__version__ >= "2.11"


class CrossEntropy(nn.Module):
    """Computes losses of rows of logits, and their gradients.

    It is a module so that it can be compiled (`nn.Module.compile`).
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the losses [N] of logits [N, W], and overwrites the logits with the gradients of the losses.

        A logit of -inf stands for no token. Targets are int64 [N]; the loss is 0 where the target is -100. Losses are
        float32, or float64 for float64 logits.
        """
        real = targets != IGNORE
        dtype = torch.promote_types(logits.dtype, torch.float32)
        compiled = torch.compiler.is_compiling()
        index = targets.masked_fill(~real, 0)[:, None]
        if compiled:  # into one kernel, which cannot contain an indirect read or write
            hit = torch.arange(logits.shape[1], device=logits.device) == index
            target = torch.where(hit, logits, 0.0).sum(-1, dtype=dtype)
        else:
            target = logits.gather(1, index)[:, 0].to(dtype)
        p = logits.to(dtype)
        largest = p.amax(-1, keepdim=True)
        p = p.sub_(largest).exp_()  # a view of the logits, if they have the dtype of the losses
        total = p.sum(-1, keepdim=True)
        losses = torch.where(real, (total.log() + largest)[:, 0] - target, 0.0)
        p.mul_(real[:, None] / total)
        if compiled:
            p.sub_((hit & real[:, None]).to(dtype))
        else:
            p.scatter_add_(1, index, -real[:, None].to(dtype))
        logits.copy_(p)
        return losses


class Divergence(nn.Module):
    """Computes divergences of rows of logits from a teacher's, and their gradients; see `CrossEntropy`."""

    def forward(self, logits: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
        """Returns the divergences [N] of rows of logits, and overwrites the logits with their gradients.

        A divergence is the sum over tokens of p (log p - log q), with p the teacher's prediction and q the student's.
        It is float32 (float64 for float64 logits), and 0 where `real`, bool [N], is False. `logits` and `teacher` are
        [N, W]; -inf stands for no token.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        own, other = logits.to(dtype).log_softmax(-1), teacher.to(dtype).log_softmax(-1)
        p = other.exp()
        divergences = torch.where(p > 0, p * (other - own), 0.0).sum(-1)
        logits.copy_((own.exp() - p) * real[:, None])
        return torch.where(real, divergences, 0.0)


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int, cross_entropy: CrossEntropy
) -> Tensor:
    """Sums up -log softmax(hidden weight^T)[target] over all targets that are not -100, in nats.

    Returns a scalar, float32 (float64 for float64 inputs), differentiable once with respect to hidden and weight.

    Args:
        hidden: [N, d]. Under autocast the products have the dtype of autocast.
        weight: [V, d].
        targets: int64 [N].
        rows: tokens of a slice.
        cross_entropy: the module that computes the losses of a slice where there is no kernel for that.
    """
    if has_kernels(hidden.device, dtype_in_products(hidden)):
        return _sliced_sum(
            hidden, weight, rows, lambda logits, here: cross_entropy_of_rows(logits, targets[here], IGNORE)
        )
    return _sliced_sum(hidden, weight, rows, lambda logits, here: cross_entropy(logits, targets[here]))


def divergence_sum(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    real: Tensor,
    *,
    rows: int,
    divergence: Divergence,
) -> Tensor:
    """Sums up KL(softmax(teacher_hidden teacher_weight^T) || softmax(hidden weight^T)) over tokens, in nats.

    Returns a scalar as `cross_entropy_sum` does, differentiable with respect to hidden and weight.

    Args:
        hidden: as for `cross_entropy_sum`.
        weight: as for `cross_entropy_sum`.
        teacher_hidden: [N, d'].
        teacher_weight: [V, d'].
        real: bool [N], which tokens count.
        rows: as for `cross_entropy_sum`.
        divergence: the module that computes the divergences of a slice.
    """
    dtype = dtype_in_products(hidden)
    padded = _padded(teacher_weight, dtype)

    def losses(logits: Tensor, here: slice) -> Tensor:
        teacher = _logits(teacher_hidden[here].to(dtype), padded, len(teacher_weight))
        return divergence(logits, teacher, real[here])

    return _sliced_sum(hidden, weight, rows, losses)


def _sliced_sum(hidden: Tensor, weight: Tensor, rows: int, losses: Losses) -> Tensor:
    dtype = dtype_in_products(hidden)
    with without_autocast(hidden):
        # Empty tensors with the graphs of both: the gradients depend on them, and keeping them would take memory.
        ties = hidden[:0].clone(), weight[:0].clone()
        return _SlicedSum.apply(hidden, weight, rows, dtype, torch.is_grad_enabled(), losses, *ties)


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return pad(weight.to(dtype), (0, 0, 0, -len(weight) % _ALIGN))


def _logits(hidden: Tensor, padded: Tensor, vocabulary: int) -> Tensor:
    logits = hidden @ padded.T
    logits[:, vocabulary:] = -torch.inf
    return logits


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, of a total in float32 where a and b are of half precision."""
    if total.is_cuda and _ADDS_IN_FLOAT32:
        torch.addmm(total, a, b, total.dtype, out=total)
    else:
        total += a @ b


class _SlicedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: int, dtype: torch.dtype, grad: bool, losses: Losses,
        *ties: Tensor,
    ) -> Tensor:  # fmt: skip
        vocabulary = len(weight)
        padded = _padded(weight, dtype)
        sums = torch.promote_types(dtype, torch.float32)
        found = torch.empty(len(hidden), dtype=sums, device=hidden.device)
        dhidden = torch.empty_like(hidden, dtype=dtype) if grad else None
        dweight = torch.zeros_like(padded, dtype=sums) if grad else None
        for first in range(0, len(hidden), rows):
            here = slice(first, first + rows)
            part = hidden[here].to(dtype)
            logits = _logits(part, padded, vocabulary)
            found[here] = losses(logits, here)
            if dhidden is not None and dweight is not None:
                dlogits = logits
                torch.mm(dlogits, padded, out=dhidden[here])
                _add_product(dweight, dlogits.T, part)
        if dhidden is not None and dweight is not None:
            ctx.save_for_backward(dhidden, dweight[:vocabulary], *ties)
            ctx.dtypes = hidden.dtype, weight.dtype
        return found.sum()

    @staticmethod
    @first_order("the cross-entropy in slices")
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        grads = (g.to(dtype) * factor for g, dtype in zip(ctx.saved_tensors[:2], ctx.dtypes, strict=True))
        return *grads, *[None] * 6
