"""Power attention in plain torch, three ways: the specification. Read this file first.

Each form takes q [B, T, H, K], k [B, T, G, K], v [B, T, G, V], log_g [B, T, G] or None and the state before the first
token, and returns the output [B, T, H, V] and the state after the last one. They agree to rounding for every input;
gradients are autograd's. Everything is computed in the dtype of the inputs, float64 included, but the sums of log gates
are float64 for all dtypes, and their differences are exact (`gate_sums.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.ops.feature_map import spow
from sympow.ops.gate_sums import gate_sums, joined
from sympow.ops.types import PowerState


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None = None,
    *,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, PowerState]:
    """Computes (M1)-(M5) from every score, T x T.

    A state from before is read through phi(q), as in (M11) with one chunk.
    """
    q = _group(q, k)
    sums = _sums(k, log_g)  # L, [parts, B, T, G]
    score = scale * torch.einsum("btgrk,bsgk->bgrts", q, k)  # (M1)
    past = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).tril()
    pairs = joined(sums[:, :, :, None] - sums[:, :, None])
    b = pairs.masked_fill(~past[:, :, None], -torch.inf).exp().to(k.dtype)  # (M2), [B, T, T, G]
    weight = score**p * b.permute(0, 3, 1, 2)[:, :, None]
    numerator = torch.einsum("bgrts,bsgv->btgrv", weight, v)  # (M3)
    normalizer = weight.sum(-1).permute(0, 3, 1, 2)  # (M4), [B, T, G, R]

    keep = joined(sums[:, :, -1:] - sums).exp().to(k.dtype)  # exp(L_T - L_j): the decay from token j to the end
    phi_k = spow(k, p) * keep[..., None]
    s = torch.einsum("btgd,btgv->bgdv", phi_k, v)  # (M12)
    z = phi_k.sum(1)
    if state is not None:
        decay = joined(sums).exp().to(k.dtype)  # from before the first token
        phi_q = spow(q * scale, p) * decay[:, :, :, None, None]
        numerator = numerator + torch.einsum("btgrd,bgdv->btgrv", phi_q, state.s)
        normalizer = normalizer + torch.einsum("btgrd,bgd->btgr", phi_q, state.z)
        left = decay[:, -1]
        s = s + left[..., None, None] * state.s
        z = z + left[..., None] * state.z
    out = numerator / (normalizer[..., None] + eps) if normalize else numerator  # (M5)
    # The state has full precision, also if autocast has lowered the precision of the products.
    return out.flatten(2, 3), PowerState(s.to(k.dtype), z.to(k.dtype), p, k.shape[-1])


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None = None,
    *,
    chunk_size: int,
    **options,
) -> tuple[Tensor, PowerState]:
    """Computes (M11) and (M12): the quadratic form within a chunk, the state from chunk to chunk."""
    outs = []
    for start in range(0, q.shape[1], chunk_size):
        span = slice(start, start + chunk_size)
        gate = None if log_g is None else log_g[:, span]
        out, state = quadratic(q[:, span], k[:, span], v[:, span], gate, state, **options)
        outs.append(out)
    if state is None:
        raise ValueError(f"a sequence has at least one token; got q {list(q.shape)}")
    return torch.cat(outs, dim=1), state


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None = None,
    *,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, PowerState]:
    """Computes (M9) and (M10): one token at a time, reading nothing but the state."""
    b, t, g, key_dim = k.shape
    q = _group(q, k)
    gammas = None if log_g is None else log_g.to(k.dtype).exp()
    if state is None:
        state = PowerState.zeros(b, g, key_dim, v.shape[-1], p, device=k.device, dtype=k.dtype)
    s, z = state.s, state.z
    outs = []
    for i in range(t):
        gamma = torch.ones_like(k[:, i, :, 0]) if gammas is None else gammas[:, i]
        phi_k = spow(k[:, i], p)
        s = gamma[..., None, None] * s + phi_k[..., None] * v[:, i, :, None]
        z = gamma[..., None] * z + phi_k
        phi_q = spow(q[:, i] * scale, p)
        out = torch.einsum("bgrd,bgdv->bgrv", phi_q, s)
        if normalize:
            out = out / (torch.einsum("bgrd,bgd->bgr", phi_q, z)[..., None] + eps)
        outs.append(out.flatten(1, 2))
    return torch.stack(outs, dim=1), PowerState(s, z, p, key_dim)


def _group(q: Tensor, k: Tensor) -> Tensor:
    """Maps [B, T, H, K] to [B, T, G, R, K]: the R query heads that share a key/value head are adjacent."""
    return q.unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))


def _sums(k: Tensor, log_g: Tensor | None) -> Tensor:
    return gate_sums(torch.zeros_like(k[..., 0]) if log_g is None else log_g, 1)
