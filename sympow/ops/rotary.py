"""Rotary positions, fixed or data-dependent (conformal): (M13)-(M15).

A position is a float64 number, the sum of the steps beta taken so far; fixed rotary takes steps of 1. Precision is the
whole point of this file: at 1,000,000 tokens an angle formed in float32 is off by a tenth of a radian. Positions are
accumulated in float64 and reduced to a fraction of a turn before sine and cosine.
"""

from __future__ import annotations

from math import pi, tau

import torch
from torch import Tensor

RULES = ("standard", "conformal")


def rotary_frequencies(
    key_dim: int,
    rule: str = "standard",
    max_length: float | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """(M13): theta_m = theta_1 / N**(2 (m - 1) / K), in radians per unit of position: float64 [K/2].

    Args:
        key_dim: K, even.
        rule: "standard": theta_1 = 1, N = 10,000 (Su et al., 2021). "conformal": theta_1 = 2 pi, N = max_length, the
            longest document (Kumar et al., 2025).
        max_length: N of the conformal rule; not taken by the standard one.
    """
    if key_dim < 2 or key_dim % 2:
        raise ValueError(f"rotary positions turn pairs of channels: key_dim must be even; got {key_dim}")
    if rule not in RULES:
        raise ValueError(f"the rotation's frequency rule is one of {', '.join(RULES)}; got {rule!r}")
    if (rule == "conformal") != (max_length is not None):
        raise ValueError(f"max_length belongs to the conformal rule and to it alone; got rule={rule!r}, {max_length=}")
    first, base = (1.0, 10_000.0) if max_length is None else (2 * pi, float(max_length))
    if base <= 1:
        raise ValueError(f"max_length must be greater than 1; got {max_length}")
    exponent = torch.arange(key_dim // 2, dtype=torch.float64, device=device) * (2 / key_dim)
    return first * base**-exponent


def rotary_positions(beta: Tensor, start: Tensor | None = None) -> Tensor:
    """(M14): c_i = start + beta_1 + ... + beta_i, accumulated in float64.

    Args:
        beta: [B, T, G], the steps.
        start: [B, G] float64, the position of the token before the first; zero if None.

    Returns:
        float64 [B, T, G]. Its last row, [:, -1], is the `start` of what follows.
    """
    positions = beta.to(torch.float64).cumsum(1)
    return positions if start is None else positions + start[:, None]


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """(M15): turns the channel pairs (2m - 1, 2m) of x by positions * theta_m. Differentiable in x and positions.

    Args:
        x: [B, T, H, K].
        positions: float64 [T], or [B, T], or [B, T, G] with G dividing H (heads of a group turn together).
        frequencies: float64 [K/2], radians per unit of position.

    Returns:
        Like x; computed in float32 (float64 for float64 x).
    """
    if x.ndim != 4 or x.shape[-1] != 2 * frequencies.shape[-1]:
        raise ValueError(f"x is [B, T, H, {2 * frequencies.shape[-1]}] for these frequencies; got {list(x.shape)}")
    shape = {1: (1, -1, 1), 2: (*positions.shape, 1)}.get(positions.ndim, positions.shape)
    grouped = positions.reshape(shape)
    batch, time, heads = grouped.shape if grouped.ndim == 3 else (-1, -1, -1)
    if batch not in (1, x.shape[0]) or time != x.shape[1] or heads < 1 or x.shape[2] % heads:
        raise ValueError(
            f"positions are [T], [B, T] or [B, T, G], G dividing H, for x {list(x.shape)}; got {list(positions.shape)}"
        )
    return _Rotate.apply(x, grouped, frequencies)


def _turns(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(i theta c) as complex numbers [B, T, G, 1, K/2]: the angle is reduced to one turn while still in float64."""
    turn = positions[..., None, None].to(torch.float64) * (frequencies / tau)
    angle = (turn - turn.round()).mul_(tau).to(dtype)
    return torch.complex(angle.cos(), angle.sin())


def _pairs(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[B, T, H, K] -> complex [B, T, G, R, K/2]."""
    return torch.view_as_complex(x.to(dtype).contiguous().unflatten(-1, (-1, 2))).unflatten(2, (groups, -1))


def _channels(pairs: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_real(pairs).reshape(like.shape).to(like.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, frequencies):
        dtype = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, positions, frequencies)
        rotated = _pairs(x, positions.shape[2], dtype) * _turns(positions, frequencies, dtype)
        return _channels(rotated, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, positions, frequencies = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, torch.float32)
        groups = positions.shape[2]
        back = _pairs(grad, groups, dtype) * _turns(positions, frequencies, dtype).conj()
        dx = dposition = None
        if ctx.needs_input_grad[0]:
            dx = _channels(back, x)
        if ctx.needs_input_grad[1]:
            # Turning by a small angle a moves x by i a x: the gradient is the imaginary part of conj(x) times back.
            dangle = (_pairs(x, groups, dtype).conj() * back).imag.sum(3)  # [B, T, G, K/2]
            dposition = (dangle.to(torch.float64) @ frequencies).sum_to_size(positions.shape)
        return dx, dposition, None
