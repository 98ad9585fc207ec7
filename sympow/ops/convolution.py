"""Causal convolution with a filter as long as the sequence, by the fast Fourier transform where it pays."""

from __future__ import annotations

import torch
from torch import Tensor

_FEW = 8  # taps that are summed one by one


def causal_convolution(x: Tensor, h: Tensor) -> Tensor:
    """y_t = sum over s <= t of h_s x_{t-s}: O(T log T) for any number of taps, in float32 at least.

    Args:
        x: [B, T, ...].
        h: [S, ...], the filter's taps, h_0 of the token itself, or [B, S, ...], a filter for every row; the other axes
            broadcast with those of x. Taps past T are not seen, and missing ones are zero.

    Returns:
        [B, T, ...], the axes of x and h broadcast, in the dtype of x. Rounding spreads over the whole row: row t holds
        about one rounding error of the largest output, also of a later one.
    """
    if x.ndim < 2 or h.ndim not in (x.ndim - 1, x.ndim):
        shapes = f"{list(x.shape)} and {list(h.shape)}"
        raise ValueError(f"x must be [B, T, ...] and h [S, ...] of one axis less, or [B, S, ...]; got {shapes}")
    h = h if h.ndim == x.ndim else h[None]
    time = x.shape[1]
    taps = min(h.shape[1], time)
    dtype = torch.promote_types(torch.promote_types(x.dtype, h.dtype), torch.float32)
    x, h, given = x.to(dtype), h[:, :taps].to(dtype), x.dtype
    if taps <= _FEW:
        padded = torch.cat([x.new_zeros(x.shape[0], taps - 1, *x.shape[2:]), x], dim=1)
        moved = (h[:, s : s + 1] * padded[:, taps - 1 - s : taps - 1 - s + time] for s in range(taps))
        return sum(moved, start=x.new_zeros(())).to(given)
    # Zeros behind both keep what a circular convolution would bring round to the start out of sight.
    size = 1 << (time + taps - 2).bit_length()
    product = torch.fft.rfft(x, n=size, dim=1) * torch.fft.rfft(h, n=size, dim=1)
    return torch.fft.irfft(product, n=size, dim=1)[:, :time].to(given)
