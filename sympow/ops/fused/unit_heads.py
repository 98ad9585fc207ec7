"""Queries and keys of norm 1, for the delta rule.

On a GPU one kernel divides both by their norms, and one kernel computes both gradients (`unit_heads_kernels.py`).
Elsewhere they are plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sympow.ops.availability import has_kernels

EPS = 1e-6  # the least norm by which a vector is divided


def unit_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns every query and every key divided by its norm, or by 1e-6 if that is larger.

    Norms are computed in float32 at least. Gradients of kernels are of first order; those of `unit` have derivatives.

    Args:
        q: [B, T, H, K].
        k: [B, T, G, K], in the dtype of q.

    Returns:
        q and k, [B, T, H, K] and [B, T, G, K], in their dtype.
    """
    if has_kernels(q.device, q.dtype):
        from sympow.ops.fused.unit_heads_kernels import unit_heads as kernel

        q, k, _ = kernel(q, k, EPS)
        return q, k
    return unit(q), unit(k)


def unit(x: Tensor) -> Tensor:
    """Returns x [..., K] divided by its norm, or by 1e-6 if that is larger, computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # Squares of the largest numbers of a dtype leave its range, so vectors with such numbers are made smaller first.
    size = wide.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    return normalize(wide / size, dim=-1, eps=EPS).to(x.dtype)
