"""Delta rule on the power state (p = 2) with a decay for each key channel, in plain torch: an experiment."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 64
LEAST = -1.0  # log of the smallest decay of a channel at a token: 64 of them stay in the range of float32


def _phi(x: Tensor) -> Tensor:
    """Returns the products of all pairs of channels [..., D] of x [..., K]: inner products are squares of those of x."""
    a, b = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., a] * x[..., b] * torch.where(a == b, 1.0, 2**0.5).to(x.dtype)


def _step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: s [N, D, V]; q, k [N, C, K]; v [N, C, V]; beta [N, C]; sums [N, C, K], log decays from its start."""
    time = q.shape[1]
    near, far = sums.exp(), (-sums).exp()
    mask = torch.ones(time, time, dtype=torch.bool, device=q.device).tril(-1)
    keys = k * far
    m = torch.where(mask, (k * near) @ keys.mT, 0.0).square() * beta[:, :, None]
    rest = beta[:, :, None] * (v - _phi(k * near) @ s)
    eye = torch.eye(time, dtype=q.dtype, device=q.device)
    u = torch.linalg.solve_triangular(m + eye, rest, upper=False, unitriangular=True)
    scores = torch.where(mask | eye.bool(), (q * near) @ keys.mT, 0.0).square()
    out = scores @ u + _phi(q * near) @ s
    last = sums[:, -1:]
    s = _phi(last.exp()).mT / _phi(torch.ones_like(last)).mT * s + _phi(k * (last - sums).exp()).mT @ u
    return s, out


_compiled = torch.compile(_step, dynamic=False)


@torch.compiler.disable
def key_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_d: Tensor) -> Tensor:
    """Returns the output [B, T, H, V] of unit q, k [B, T, H, K], v, beta [B, T, H] and log_d [B, T, H, K]."""
    heads, given = q.shape[2], v.dtype
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        flat = [x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (q, k, v, beta[..., None], log_d.clamp(min=LEAST))]
        q, k, v, beta, log_d = flat
        s = q.new_zeros(q.shape[0], q.shape[2] * (q.shape[2] + 1) // 2, v.shape[2])
        outs = []
        for i in range(0, q.shape[1], CHUNK):
            here = slice(i, i + CHUNK)
            sums = log_d[:, here].cumsum(1)
            s, out = checkpoint(_compiled if s.is_cuda else _step, s, q[:, here], k[:, here], v[:, here], beta[:, here, 0], sums, use_reentrant=False)
            outs.append(out)
    return torch.cat(outs, 1).unflatten(0, (-1, heads)).transpose(1, 2).contiguous().to(given)
