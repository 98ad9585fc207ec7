"""Filters as long as the sequence, and convolution with them: of a whole sequence, and token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from math import log, pi, sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn

from sympow.layers.base import state_options
from sympow.layers.cache import InputCache, capacity
from sympow.layers.float32 import linear_float32
from sympow.layers.initial import draw_normal, draw_uniform
from sympow.ops.convolution import causal_convolution

_BANDS = 16  # frequencies of the positional features, besides time itself
_FAST, _SLOW, _TARGET = 0.3, 1.5, 1e-2  # a channel's taps fall to _TARGET within _FAST to _SLOW of the filter


class LongFilter(nn.Module, ABC):
    """A filter of `max_length` taps for every channel, and the causal convolution with it.

    There is no recurrence: stepping keeps the inputs and costs O(max_length) a token.
    """

    def __init__(self, channels: int, max_length: int):
        super().__init__()
        if not isinstance(max_length, int) or max_length < 1:
            raise ValueError(f"max_length must be an integer of at least 1; got {max_length!r}")
        self.channels, self.max_length = channels, max_length

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the filter's weights, on the CPU."""

    @abstractmethod
    def forward(self, length: int) -> Tensor:
        """The first min(length, max_length) taps, [taps, C]."""

    def convolve(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        return causal_convolution(x, self(x.shape[1]))

    def init_state(self, batch_size: int, device: torch.device | str | None, dtype: torch.dtype | None) -> InputCache:
        """No inputs yet."""
        options = state_options(next(self.parameters()), device, dtype)
        return InputCache.empty(batch_size, self.channels, self.max_length, options)

    def step(self, x: Tensor, cache: InputCache) -> tuple[Tensor, InputCache]:
        """Continues the convolution by x [B, T', C]: (y [B, T', C], the cache with x)."""
        seen = torch.cat([cache.ordered().to(x.dtype), x], dim=1)
        return last_outputs(seen, self(seen.shape[1]), x.shape[1]), cache.extend(x)

    def state_size(self, context: int) -> int:
        return self.channels * capacity(context, self.max_length)


class ExplicitFilter(LongFilter):
    """A weight for every tap and channel, [max_length, C], drawn as torch's convolutions are: within 1 / sqrt(taps).

    Published code draws it from N(0, 1), which multiplies the scale of a long sequence by sqrt(T).
    """

    def __init__(self, channels: int, max_length: int):
        super().__init__(channels, max_length)
        self.weight = nn.Parameter(torch.empty(max_length, channels))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        bound = 1 / sqrt(self.max_length)
        draw_uniform(self.weight, -bound, bound, generator)

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class ImplicitFilter(LongFilter):
    """A filter that a small network computes from the position of a tap (Poli et al., "Hyena Hierarchy", 2023, 3.3).

    h_t = MLP(features of t) exp(-decay_c t / max_length), with sines of trained frequency between the layers, the
    features t / max_length and sines and cosines of 16 frequencies, and decays from slow to fast over the channels;
    h_0 is added a weight per channel, so that the token itself passes. The layers are drawn as torch's are, that weight
    from N(0, 1), as in the published code.

    Args:
        channels: C.
        max_length: taps; what lies further back is not seen.
        order: width of the network.
    """

    def __init__(self, channels: int, max_length: int, order: int):
        super().__init__(channels, max_length)
        if not isinstance(order, int) or order < 1:
            raise ValueError(f"order must be an integer of at least 1; got {order!r}")
        widths = [2 * _BANDS + 1, order, order, order]
        layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.layers = cast(Sequence[nn.Linear], layers)
        self.last = nn.Linear(order, channels, bias=False)
        self.frequency = nn.Parameter(torch.empty(order))
        self.skip = nn.Parameter(torch.empty(channels))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for layer in (*self.layers, self.last):
            bound = 1 / sqrt(layer.in_features)
            for parameter in layer.parameters():
                draw_uniform(parameter, -bound, bound, generator)
        nn.init.ones_(self.frequency)
        draw_normal(self.skip, 1.0, generator)

    def forward(self, length: int) -> Tensor:
        """As `LongFilter.forward`, in float32 at least: positions need it."""
        dtype = torch.promote_types(self.skip.dtype, torch.float32)
        like: dict[str, Any] = {"device": self.skip.device, "dtype": dtype}
        position = torch.arange(min(length, self.max_length), **like)[:, None]
        angle = 2 * pi / self.max_length * position * torch.linspace(1e-4, _BANDS - 1, _BANDS, **like)
        h = torch.cat([position / self.max_length, angle.cos(), angle.sin()], dim=1)
        for layer in self.layers:
            h = torch.sin(self.frequency * linear_float32(layer, h))
        decay = torch.linspace(-log(_TARGET) / _SLOW, -log(_TARGET) / _FAST, self.channels, **like)
        h = linear_float32(self.last, h) * torch.exp(-decay * position / self.max_length)
        return torch.cat([h[:1] + self.skip, h[1:]])

    def extra_repr(self) -> str:
        return f"channels={self.channels}, max_length={self.max_length}"


FILTERS = ("implicit", "explicit")


def make_filter(kind: str, channels: int, max_length: int, order: int) -> LongFilter:
    """One of `FILTERS`; `order` is of the implicit one."""
    if kind not in FILTERS:
        raise ValueError(f"filter is one of {', '.join(FILTERS)}; got {kind!r}")
    return ExplicitFilter(channels, max_length) if kind == "explicit" else ImplicitFilter(channels, max_length, order)


def last_outputs(seen: Tensor, h: Tensor, new: int) -> Tensor:
    """The last `new` rows of `causal_convolution(seen, h)`: seen [B, T, ...], h [S, ...]; one row costs O(T)."""
    if new > 1:
        return causal_convolution(seen, h)[:, -new:]
    h = h[: seen.shape[1]].flip(0).to(seen.dtype)
    return (seen[:, seen.shape[1] - h.shape[0] :] * h).sum(1, keepdim=True)
