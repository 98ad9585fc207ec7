"""The norm of every head's output, and the output gate.

On a GPU one kernel computes both in the forward, and one kernel in the backward (`gated_norm_kernels.py`).
Elsewhere they are plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import has_kernels


def gated_norm(y: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Returns RMSNorm(y) * weight over the channels of every head, times silu(gate).

    Each factor is left out where it is not given.

    y * (mean of y**2 over V + eps)**-0.5 is computed in float32 at least.

    Args:
        y: [B, T, H, V].
        weight: [V] of the norm; None: no norm.
        gate: [B, T, H V]; None: no gate.
        eps: added to the mean square.

    Returns:
        [B, T, H V], in the dtype of y.
    """
    if weight is None and gate is None:
        return y.flatten(2)
    if has_kernels(y.device, y.dtype):
        from sympow.ops.fused.gated_norm_kernels import gated_norm as kernel

        return kernel(y, weight, gate, eps)
    dtype = torch.promote_types(y.dtype, torch.float32)
    out = y.to(dtype)
    if weight is not None:
        out = F.rms_norm(out, (y.shape[3],), weight.to(dtype), eps)
    out = out.flatten(2)
    if gate is not None:
        out = out * F.silu(gate.to(dtype))
    return out.to(y.dtype)
