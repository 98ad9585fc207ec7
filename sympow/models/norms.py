"""The norms of the bodies."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sympow.layers.base import is_as_made
from sympow.ops.fused.step_products import Norm


class LayerNorm(nn.LayerNorm):
    """Computes a LayerNorm that can be compiled alone. torch.compile skips a forward whose code is in torch.nn."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the norm of `input`, as torch.nn.LayerNorm does."""
        return super().forward(input)


class RMSNorm(nn.Module):
    """Divides x [..., d] by its root mean square and multiplies with the weight (Zhang and Sennrich, 2019).

    The division is in float32 at least. The result is rounded to the dtype of x before the product with the weight,
    which is the order of the Llama models of Hugging Face.

    Args:
        d_model: d.
        eps: what is added to the mean square.
    """

    def __init__(self, d_model: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model))

    def reset_parameters(self) -> None:
        """Fills the weight with 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the norm of x [..., d], of the same shape and dtype."""
        if x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):
            # No intermediate result is rounded, so this is one kernel.
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(x, self.weight.shape, None, self.eps)

    def extra_repr(self) -> str:
        """Returns the options that `repr` of the module shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def kernel_norm(norm: nn.Module) -> Norm | None:
    """Returns what a kernel computes for a norm; None for one that is not of this file, or that has hooks."""
    if not is_as_made(norm, LayerNorm, RMSNorm) or not isinstance(norm, LayerNorm | RMSNorm) or norm.weight is None:
        return None
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    return Norm(norm.weight, bias, norm.eps, isinstance(norm, LayerNorm))
