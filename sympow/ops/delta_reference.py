"""The delta rule on the state of power attention in plain torch, two ways: the specification.

Each form takes q [B, T, H, K], k [B, T, G, K], v [B, T, G, V], beta [B, T, G], log_g [B, T, G] or None, and the state
before the first token [B, G, D, V] or None. It returns the output [B, T, H, V] and the state after the last token. The
forms agree to rounding for every input, and gradients are autograd's. Everything is computed in the dtype of the
inputs, float64 included. Queries and keys are used as they are given: `power_delta_rule` gives them norm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.ops.feature_map import spow


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None = None, *, p: int
) -> tuple[Tensor, Tensor]:
    """Computes (M19) and (M20): one token at a time, reading nothing but the state."""
    groups = k.shape[2]
    phi_k, phi_q = spow(k, p), spow(q.unflatten(2, (groups, -1)), p)
    gammas = torch.ones_like(beta) if log_g is None else log_g.to(k.dtype).exp()
    s = k.new_zeros(k.shape[0], groups, phi_k.shape[-1], v.shape[-1]) if state is None else state
    outs = []
    for i in range(k.shape[1]):
        s = gammas[:, i, :, None, None] * s
        error = v[:, i] - torch.einsum("bgd,bgdv->bgv", phi_k[:, i], s)
        s = s + phi_k[:, i, :, :, None] * (beta[:, i, :, None] * error)[:, :, None]
        outs.append(torch.einsum("bgrd,bgdv->bgrv", phi_q[:, i], s).flatten(1, 2))
    return torch.stack(outs, dim=1), s


def quadratic(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None = None, *, p: int
) -> tuple[Tensor, Tensor]:
    """Computes (M21)-(M23) with one chunk: all tokens at once, from every score, T x T."""
    groups, time = k.shape[2], k.shape[1]
    decay = _decays(k, log_g)  # [B, G, T, T]
    scores = torch.einsum("btgk,bsgk->bgts", k, k) ** p * decay
    system = torch.eye(time, dtype=k.dtype, device=k.device) + beta.transpose(1, 2)[..., None] * scores.tril(-1)
    targets, past, kept = v, None, decay[:, :, -1].transpose(1, 2)  # kept [B, T, G]: from each token to the end
    if state is not None:
        past = torch.ones_like(beta) if log_g is None else log_g.to(k.dtype).cumsum(1).exp()
        targets = v - past[..., None] * torch.einsum("btgd,bgdv->btgv", spow(k, p), state)
    right = (beta[..., None] * targets).transpose(1, 2)
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).transpose(1, 2)
    q = q.unflatten(2, (groups, -1))
    weights = torch.einsum("btgrk,bsgk->bgrts", q, k) ** p * decay[:, :, None]
    out = torch.einsum("bgrts,bsgv->btgrv", weights, u)
    s = torch.einsum("btgd,btgv->bgdv", spow(k, p) * kept[..., None], u)
    if state is not None and past is not None:
        out = out + past[..., None, None] * torch.einsum("btgrd,bgdv->btgrv", spow(q, p), state)
        s = s + past[:, -1, :, None, None] * state
    return out.flatten(2, 3), s


def _decays(k: Tensor, log_g: Tensor | None) -> Tensor:
    """Returns the decay from token j to token i, 0 where j > i: [B, G, T (i), T (j)].

    Sums of gates between two tokens are formed for every pair, so that a strong gate takes no digits of later ones.
    """
    batch, time, groups, _ = k.shape
    if log_g is None:
        return k.new_ones(batch, groups, time, time).tril()
    steps = log_g.to(k.dtype).transpose(1, 2)[..., None].expand(-1, -1, -1, time)  # of token i, for every j
    sums = steps.tril(-1).cumsum(2)  # from token j + 1 to token i
    return sums.exp().tril()
