"""Causal convolution with long filters: by matrices for short sequences, otherwise by Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.availability import has_symbols, without_autocast
from sympow.ops.recomputed import recomputed

_FEW = 8  # taps that are summed one by one

# Up to these numbers of tokens, products with the matrices of the filters are faster than transforms. They are about
# half of the number at which both take the same time. The matrices may also have at most 4 times the elements of x,
# because the spectra of x and of the result have as many.
_LONGEST = {"cpu": 128, "cuda": 512}
_MATRIX_SHARE = 4


def causal_convolution(x: Tensor, h: Tensor) -> Tensor:
    """Returns y_t = sum over s <= t of h_s x_{t-s}, in float32 at least.

    There are three forms, which agree up to rounding. With few taps, shifted signals are added up. Short sequences in
    large batches are multiplied with the Toeplitz matrix of every filter, in O(T T). All others are convolved by fast
    Fourier transforms, in O(T log T) for any number of taps.

    Args:
        x: [B, T, ...].
        h: [S, ...], the filter's taps, h_0 of the token itself, or [B, S, ...], a filter for every row; the other axes
            broadcast with those of x. Taps past T are not seen, and missing ones are zero.

    Returns:
        [B, T, ...], the axes of x and h broadcast, in the dtype of x. Rounding may spread over the whole row: row t
        holds about one rounding error of the largest output, also of a later one.
    """
    if x.ndim < 2 or h.ndim not in (x.ndim - 1, x.ndim):
        shapes = f"{list(x.shape)} and {list(h.shape)}"
        raise ValueError(f"x must be [B, T, ...] and h [S, ...] of one axis less, or [B, S, ...]; got {shapes}")
    h = h if h.ndim == x.ndim else h[None]
    if has_symbols(x.shape[1]) or has_symbols(h.shape[1]):  # a trace would be of one length only
        return convolved(x, h)
    return _convolved(x, h)


def _convolved(x: Tensor, h: Tensor) -> Tensor:
    taps = min(h.shape[1], x.shape[1]) if x.numel() else 1  # the transforms refuse an empty batch
    dtype = torch.promote_types(torch.promote_types(x.dtype, h.dtype), torch.float32)
    x, h, given = x.to(dtype), h[:, :taps].to(dtype), x.dtype
    return fastest_form(x, h)(x, h).to(given)


def _like_convolved(x: Tensor, h: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], *torch.broadcast_shapes(x.shape[2:], h.shape[2:]))


@recomputed(_like_convolved)
def convolved(x: Tensor, h: Tensor) -> Tensor:
    """Computes `causal_convolution` of x [B, T, ...] and h [1 or B, S, ...]."""
    return _convolved(x, h)


def fastest_form(x: Tensor, h: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns which of the three functions below takes the least time for x [B, T, ...] and h [1 or B, S <= T, ...]."""
    if h.shape[1] <= _FEW:
        return convolve_by_taps
    return convolve_by_matrices if _suits_matrices(x, h) else convolve_by_transforms


def convolve_by_taps(x: Tensor, h: Tensor) -> Tensor:
    """Convolves x [B, T, ...] with h [1 or B, S <= T, ...] by a sum of shifted signals, one for each tap."""
    time, taps = x.shape[1], h.shape[1]
    padded = torch.cat([x.new_zeros(x.shape[0], taps - 1, *x.shape[2:]), x], dim=1)
    moved = (h[:, s : s + 1] * padded[:, taps - 1 - s : taps - 1 - s + time] for s in range(taps))
    return sum(moved, start=x.new_zeros(()))


def convolve_by_transforms(x: Tensor, h: Tensor) -> Tensor:
    """Convolves x [B, T, ...] with h [1 or B, S <= T, ...] by fast Fourier transforms."""
    time, taps = x.shape[1], h.shape[1]
    # Zeros after both: a circular convolution would otherwise add its end to its start.
    size = 1 << (time + taps - 2).bit_length()
    product = torch.fft.rfft(x, n=size, dim=1) * torch.fft.rfft(h, n=size, dim=1)
    return torch.fft.irfft(product, n=size, dim=1)[:, :time]


def _suits_matrices(x: Tensor, h: Tensor) -> bool:
    time, taps = x.shape[1], h.shape[1]
    signals = prod(_outer_shape(x, h)) // max(1, prod(_outer_shape(h)))  # that go through a filter
    return time <= _LONGEST.get(x.device.type, 0) and time + taps <= _MATRIX_SHARE * signals


def convolve_by_matrices(x: Tensor, h: Tensor) -> Tensor:
    """Convolves x [B, T, ...] with h [1 or B, S <= T, ...] by a product with the Toeplitz matrix of each filter."""
    shape, time = _outer_shape(x, h), x.shape[1]
    # Along the first axes filters differ. Along the remaining axes, signals share a filter.
    axes = sorted((0, *range(2, x.ndim)), key=lambda axis: h.shape[axis] == 1)
    order = [*axes, 1]
    filters = h.permute(order).reshape(-1, h.shape[1])
    signals = x.expand(shape[0], time, *shape[2:]).permute(order)
    with without_autocast(x):
        y = signals.reshape(len(filters), -1, time) @ _matrices(filters, time)
    y = y.view(signals.shape).permute([order.index(axis) for axis in range(x.ndim)])
    return y.contiguous()  # later operations read it together with tensors that have the layout of x


def _matrices(h: Tensor, time: int) -> Tensor:
    """Maps filters h [F, S] to matrices [F, T, T] with h_{t-s} in row s and column t.

    Rows of S taps and T zeros are read as rows of one element less. So each row begins one element earlier than the row
    above it. The gradient is a sum in a fixed order. The gradient of indexing would be atomic additions on a GPU.
    """
    period = h.shape[1] + time
    rows = pad(h, (0, time))[:, None].expand(-1, time, -1).flatten(1)
    return rows[:, : time * (period - 1)].unflatten(1, (time, period - 1))[..., :time]


def _outer_shape(*tensors: Tensor) -> torch.Size:
    """Returns the shape tensors are broadcast to, time left out: [B, 1, ...]."""
    return torch.broadcast_shapes(*(tensor[:, :1].shape for tensor in tensors))
