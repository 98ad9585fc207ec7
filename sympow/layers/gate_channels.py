"""The gates of softmax attention as channels of queries and keys, with which any fused attention kernel computes them.

Scores are s_ij + L_i - L_j with L = cumsum(log_g) (Lin et al., "Forgetting Transformer", 2025). L_i is constant along a
row, so softmax needs -L_j alone, and a few more channels add it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import concatenated
from sympow.ops.running_sums import sums_so_far

# The value of queries in the channels in which keys hold sums. It is a power of two, which is exact in every dtype.
_ONE = 32
# The value of queries in the last of these channels. In float16 keys hold there what is too large for the others.
_MANY = 1024 * _ONE
_HARDEST = -256.0  # a log gate: what comes before it has no weight, unless scores differ by more than 150
_PARTS = 4  # of a sum: as many bits as float32 has, in three numbers of 8 bits (bfloat16); and one of `_MANY`
_LEAST_READINGS = 12  # channels of `_Gated` that add nothing to the scores
_FIT = 2.0**15  # a part's largest value in float16, and a multiple of _MANY / _ONE


def with_gates(q: Tensor, k: Tensor, log_g: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries and keys with channels that add -L_j to the scores, which keep their scale of 1 / sqrt(K).

    The error of a score is that of float32 (float64 for float64 q and k) for numbers as large as L. A gate adds at most
    256 to |L|, so behind n resets in a row, scores err by up to n 2**-16.

    Args:
        q: [B, T, H, K].
        k: [B, T, G, K].
        log_g: [B, T, G], natural logarithms of the gates, float32 or float64.

    Returns:
        [B, T, H, K'] and [B, T, G, K'], K' a multiple of 8.
    """
    queries, keys = _Gated.apply(q, k, limited(log_g))
    return queries, keys


def limited(log_g: Tensor) -> Tensor:
    """Returns log gates, those of resets no larger than it takes, because sums have a limited precision."""
    return log_g.clamp(min=_HARDEST)


def gated_key_dim(key_dim: int) -> int:
    """Returns the channels of a key with its sum, a multiple of 8."""
    return -(-(key_dim + _PARTS) // 8) * 8


def gated_keys(k: Tensor, sums: Tensor) -> Tensor:
    """Returns k [B, T, G, K] with the sums L of its tokens, float64 [B, T, G]: [B, T, G, gated_key_dim(K)]."""
    parts = _parts(sums, k.shape[-1] ** -0.5, k.dtype)
    return F.pad(concatenated([k, parts], dim=-1), (0, gated_key_dim(k.shape[-1]) - k.shape[-1] - _PARTS))


def gated_queries(q: Tensor) -> Tensor:
    """Returns q [B, T, H, K] for keys of `gated_keys`; the scale of the scores stays K**-0.5."""
    ones = _ones(q).expand(*q.shape[:-1], -1)
    return F.pad(concatenated([q, ones], dim=-1), (0, gated_key_dim(q.shape[-1]) - q.shape[-1] - _PARTS))


def _ones(q: Tensor) -> Tensor:
    """Returns what queries hold where keys hold the parts of a sum, [4], with the dtype and the device of q."""
    return concatenated([q.new_full((_PARTS - 1,), _ONE), q.new_full((1,), _MANY)])


def _parts(sums: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns [..., 4]: numbers of `dtype` whose product with `_ones` is -sums / scale.

    The first has the gradient of all. The last is 0 unless the first would be too large for float16.
    """
    rest = -sums / (scale * _ONE)
    many = torch.zeros_like(rest)
    if dtype == torch.float16:
        many = (rest.detach() / _FIT).round() * (_FIT * _ONE / _MANY)
        rest = rest - many * (_MANY / _ONE)
    parts = []
    for _ in range(_PARTS - 1):
        parts.append(_rounded(rest, dtype).to(dtype))
        rest = rest.detach() - parts[-1].detach()
    return concatenated([part[..., None] for part in (*parts, many.detach().to(dtype))], dim=-1)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x [...] float64 with only as many bits as `dtype` has, so that a conversion to `dtype` is exact.

    On a GPU torch.compile leaves out conversions that are followed by one back, so `x - x.to(dtype)` would be 0 there.
    It also fuses products with sums, without rounding the product. The product here is exact, because the factor is a
    power of two. So nothing changes if it is fused.
    """
    shifted = x * (torch.finfo(dtype).eps / torch.finfo(torch.float64).eps)
    return (x + shifted) - shifted


class _Gated(torch.autograd.Function):
    """Maps q, k and log_g to q and k whose scores contain -L_j.

    Its backward adds up the gradient of log_g.

    With D_ij the gradient of a score, the gradient of log_g_t is A(t) = sum_{i >= t > j} D_ij. In exact arithmetic
    every row of D adds up to 0, so A(t) is minus the sum of the columns from t on. But a kernel rounds the sums of
    columns to its dtype, and the rows of its D do not add up to exactly 0. Where gates forget within a few tokens, sums
    over thousands of tokens would therefore consist of rounding errors. Additional channels, which add 0 to every
    score, give more sums of D:

    - where a query is 0 and a key is a constant, the gradient of the query is the sum of a row of D. A(t) - A(t + 1)
      is the sum of row t less that of column t, whatever the rounding errors of D are;
    - where a key is 0 and a query is a constant from token e on, the gradient of the key is the sum of D_ij over
      i >= e. These gradients of all j < e add up to A(e), so the sum starts again at e.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, log_g: Tensor) -> tuple[Tensor, Tensor]:
        time, key_dim = q.shape[1:4:2]
        scale = key_dim**-0.5
        width = -(-(key_dim + _PARTS + _LEAST_READINGS) // 8) * 8
        restarts = width - key_dim - _PARTS - 1
        ctx.sizes = key_dim, scale, -(-time // (restarts + 1)), log_g.dtype
        from_there = _ONE * (_steps(ctx, time, q) >= torch.arange(1, restarts + 1, device=q.device))
        ones = _ones(q).expand(time, -1)
        constant = concatenated([ones, q.new_zeros(time, 1), from_there.to(q.dtype)], dim=1)
        parts = _parts(sums_so_far(log_g), scale, k.dtype)
        row = torch.full_like(parts[..., :1], _ONE)
        keys = F.pad(concatenated([k, parts, row], dim=-1), (0, restarts))
        return concatenated([q, constant[:, None].expand(*q.shape[:3], -1)], dim=-1), keys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk = grads
        key_dim, scale, length, dtype = ctx.sizes
        time, row = dk.shape[1], key_dim + _PARTS
        unit = 1 / (scale * _ONE)
        rows = dq[..., row].unflatten(2, (dk.shape[2], -1)).sum(-1, dtype=torch.float64)
        columns = dk[..., key_dim].double()
        step = _steps(ctx, time, dk)
        later = (step < torch.arange(1, dk.shape[-1] - row, device=dk.device))[:, None]  # tokens before each restart
        anew = torch.where(later, dk[..., row + 1 :], 0).sum(1, dtype=torch.float64)  # [B, G, restarts]
        # Sums from every token to the end, and to the next restart.
        net = F.pad(sums_so_far((rows - columns).flip(1)).flip(1), (0, 0, 0, 1))
        ends = (torch.arange(1, anew.shape[-1] + 2, device=dk.device) * length).clamp(max=time)
        after = F.pad(anew.transpose(1, 2), (0, 0, 0, 1)) - net[:, ends]
        dlog_g = (net[:, :-1] + after[:, step[:, 0]]) * unit
        return dq[..., :key_dim], dk[..., :key_dim], dlog_g.to(dtype)


def _steps(ctx: Any, time: int, like: Tensor) -> Tensor:
    """Returns for every token the number of restarts before it, [T, 1]."""
    return (torch.arange(time, device=like.device) // ctx.sizes[2])[:, None]
