"""Causal convolution with a filter as long as the sequence, by the fast Fourier transform."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_convolution(x: Tensor, h: Tensor) -> Tensor:
    """y_t = sum over s <= t of h_s x_{t-s}: O(T log T), in float32 at least.

    Args:
        x: [B, T, ...].
        h: [S, ...], the filter's taps, h_0 of the token itself; its other axes broadcast with those of x. Taps past T
            are not seen, and missing ones are zero.

    Returns:
        [B, T, ...], the axes of x and h broadcast, in the dtype of x. Rounding spreads over the whole row: row t holds
        about one rounding error of the largest output, also of a later one.
    """
    if x.ndim < 2 or h.ndim != x.ndim - 1:
        raise ValueError(f"x must be [B, T, ...] and h [S, ...] of one axis less; got {list(x.shape)}, {list(h.shape)}")
    time = x.shape[1]
    taps = min(h.shape[0], time)
    dtype = torch.promote_types(torch.promote_types(x.dtype, h.dtype), torch.float32)
    # Zeros behind both keep what a circular convolution would bring round to the start out of sight.
    size = 1 << (time + taps - 2).bit_length()
    x_f = torch.fft.rfft(x.to(dtype), n=size, dim=1)
    h_f = torch.fft.rfft(h[:taps].to(dtype), n=size, dim=0)
    return torch.fft.irfft(x_f * h_f, n=size, dim=1)[:, :time].to(x.dtype)
