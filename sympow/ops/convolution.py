"""Causal convolution with a filter as long as the sequence, by the fast Fourier transform."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_convolution(x: Tensor, h: Tensor) -> Tensor:
    """y_t = sum over s <= t of h_s x_{t-s}: O(T log T), in float32 at least.

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
    # Zeros behind both keep what a circular convolution would bring round to the start out of sight.
    size = 1 << (time + taps - 2).bit_length()
    x_f = torch.fft.rfft(x.to(dtype), n=size, dim=1)
    h_f = torch.fft.rfft(h[:, :taps].to(dtype), n=size, dim=1)
    return torch.fft.irfft(x_f * h_f, n=size, dim=1)[:, :time].to(x.dtype)
