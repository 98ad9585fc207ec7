"""Filters as long as the sequence, and convolution with them: of a whole sequence, and token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from math import inf, log, pi, sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from sympow.fields import is_integer
from sympow.layers.base import Mixer, state_options
from sympow.layers.cache import InputCache, capacity
from sympow.layers.float32_linear import Float32Linear
from sympow.layers.initial import draw_normal, draw_uniform
from sympow.layers.state import Device, DType
from sympow.ops.availability import concatenated
from sympow.ops.convolution import causal_convolution
from sympow.ops.cost import convolution_flops

_TARGET = 1e-2  # the value to which the taps of a channel fall within the share of the filter that `decays` gives


class LongFilter(nn.Module, ABC):
    """Holds a filter of `max_length` taps for every channel, and convolves causally with it.

    There is no recurrence: stepping keeps the inputs and costs O(max_length) a token.

    Args:
        channels: C.
        max_length: taps of the filter.
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
        """Returns the first min(length, max_length) taps, [taps, C]."""

    def convolve(self, x: Tensor) -> Tensor:
        """Maps x [B, T, C] to [B, T, C]."""
        return causal_convolution(x, self(x.shape[1]))

    def init_state(self, batch_size: int, device: torch.device | str | None, dtype: torch.dtype | None) -> InputCache:
        """Returns a cache without inputs."""
        options = state_options(next(self.parameters()), device, dtype)
        return InputCache.empty(batch_size, self.channels, self.max_length, options)

    def step(self, x: Tensor, cache: InputCache) -> tuple[Tensor, InputCache]:
        """Continues the convolution by x [B, T', C]: (y [B, T', C], the cache with x)."""
        seen = concatenated([cache.ordered().to(x.dtype), x], dim=1)
        return last_outputs(seen, self(seen.shape[1]), x.shape[1]), cache.extend(x)

    def state_size(self, context: int) -> int:
        """Returns the number of elements that the cache has for a sequence of `context` tokens."""
        return self.channels * capacity(context, self.max_length)


class FilterMixer(Mixer):
    """Mixes by one convolution with a long filter. Its state is the inputs of that convolution."""

    filter: LongFilter

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        self.filter.reset_parameters(generator)

    @override
    def training_flops(self, time: int) -> int:
        return convolution_flops(time, self.filter.max_length, self.d_model)

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> InputCache:
        return self.filter.init_state(batch_size, device, dtype)

    @override
    def state_size(self, context: int) -> int:
        return self.filter.state_size(context)


class ExplicitFilter(LongFilter):
    """Holds a weight for every tap and channel, [max_length, C], drawn as in torch: within 1 / sqrt(taps).

    Published code draws it from N(0, 1), which multiplies the scale of a long sequence by sqrt(T).

    Args:
        channels, max_length: as in `LongFilter`.
    """

    def __init__(self, channels: int, max_length: int):
        super().__init__(channels, max_length)
        self.weight = nn.Parameter(torch.empty(max_length, channels))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the taps uniformly within 1 / sqrt(max_length)."""
        bound = 1 / sqrt(self.max_length)
        draw_uniform(self.weight, -bound, bound, generator)

    def forward(self, length: int) -> Tensor:
        """Returns the first taps [min(length, max_length), C]; see `LongFilter.forward`."""
        return self.weight[:length]


class PositionFilter(LongFilter):
    """Computes a filter from the positions of its taps by a small network.

    The features of tap i are i / (max_length - 1), and the cosines and sines of 2 pi f i / max_length for `bands`
    frequencies f from 1e-4 to bands - 1.

    Args:
        channels, max_length: as in `LongFilter`.
        order: width of the network.
        bands: frequencies of the features.
    """

    def __init__(self, channels: int, max_length: int, order: int, bands: int):
        super().__init__(channels, max_length)
        for name, value in (("order", order), ("bands", bands)):
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1; got {value!r}")
        self.order, self.bands = order, bands

    def features(self, length: int, like: Tensor) -> Tensor:
        """Returns the features of the first min(length, max_length) taps, [taps, 2 bands + 1], time first.

        They are in float32 at least.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        options: dict[str, Any] = {"device": like.device, "dtype": dtype}
        position = torch.arange(min(length, self.max_length), **options)[:, None]
        highest = self.bands - 1 if self.bands > 1 else 1e-4
        angle = 2 * pi / self.max_length * position * torch.linspace(1e-4, highest, self.bands, **options)
        return torch.cat([position / max(1, self.max_length - 1), angle.cos(), angle.sin()], dim=1)

    def extra_repr(self) -> str:
        """Returns the options that `repr` of the module shows."""
        return f"channels={self.channels}, max_length={self.max_length}"


class ImplicitFilter(PositionFilter):
    """Hyena's filter: a network with sines between its layers, and a decay (Poli et al., "Hyena Hierarchy", 2023, 3.3).

    h_i = MLP(features of tap i) exp(-decay_c i / (max_length - 1)), with sines of trained frequency between the layers
    and decays from slow to fast over the channels. A weight for each channel is added to h_0, so that the token itself
    passes. The layers are drawn as torch draws them, and that weight from N(0, 1), as in the published code.

    Args:
        channels: C.
        max_length: taps; tokens further back are not seen.
        order: width of the network.
        bands: frequencies of the positional features.
        frequency: w, the initial frequency of the sines.
        decays: two shares of the filter, within which the taps of the fastest and of the slowest channel fall to 0.01.
    """

    def __init__(
        self,
        channels: int,
        max_length: int,
        order: int,
        bands: int = 16,
        frequency: float = 1.0,
        decays: Sequence[float] = (0.3, 1.5),
    ):
        super().__init__(channels, max_length, order, bands)
        if not (isinstance(frequency, int | float) and 0 < frequency < inf):
            raise ValueError(f"frequency must be positive and finite; got {frequency!r}")
        if len(decays) != 2 or not all(0 < share < inf for share in decays):
            raise ValueError(f"decays are two positive shares of the filter, fast and slow; got {decays!r}")
        self.first_frequency, self.decays = float(frequency), tuple(decays)
        widths = [2 * bands + 1, order, order, order]
        layers = nn.ModuleList(Float32Linear(a, b) for a, b in pairwise(widths))
        self.layers = cast(Sequence[Float32Linear], layers)
        self.last = Float32Linear(order, channels, bias=False)
        self.frequency = nn.Parameter(torch.empty(order))
        self.skip = nn.Parameter(torch.empty(channels))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the network as torch's layers do and the skip connection from N(0, 1); sets the sines' frequency."""
        _draw_layers((*self.layers, self.last), generator)
        nn.init.constant_(self.frequency, self.first_frequency)
        draw_normal(self.skip, 1.0, generator)

    def forward(self, length: int) -> Tensor:
        """Computes taps as `LongFilter.forward` does, in float32 at least: positions need it."""
        h = self.features(length, self.skip)
        time = h[:, :1]
        for layer in self.layers:
            h = torch.sin(self.frequency * layer(h))
        fast, slow = self.decays
        rate = torch.linspace(-log(_TARGET) / slow, -log(_TARGET) / fast, self.channels, device=h.device, dtype=h.dtype)
        h = self.last(h) * torch.exp(-rate * time)
        return torch.cat([h[:1] + self.skip, h[1:]])


class ReluFilter(PositionFilter):
    """BaseConv's implicit filter W_2 relu(W_1 features + b_1) + b_2 (Arora et al., "Zoology", 2023, Listing 2).

    Args:
        channels, max_length: as for `ImplicitFilter`.
        order, bands: as for `ImplicitFilter`. Listing 2 has order 16 and 1 band.
    """

    def __init__(self, channels: int, max_length: int, order: int, bands: int = 16):
        super().__init__(channels, max_length, order, bands)
        self.first = Float32Linear(2 * bands + 1, order)
        self.last = Float32Linear(order, channels)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the network as torch's layers do."""
        _draw_layers((self.first, self.last), generator)

    def forward(self, length: int) -> Tensor:
        """Computes taps as `LongFilter.forward` does, in float32 at least: positions need it."""
        hidden = self.first(self.features(length, self.last.weight))
        return self.last(torch.relu(hidden))


def _draw_layers(layers: Sequence[Float32Linear], generator: torch.Generator | None) -> None:
    """Draws weights and biases as torch's layers do, within 1 / sqrt(inputs)."""
    for layer in layers:
        bound = 1 / sqrt(layer.weight.shape[1])
        for parameter in layer.parameters():
            draw_uniform(parameter, -bound, bound, generator)


FILTERS = ("implicit", "relu", "explicit")


def make_filter(
    kind: str,
    channels: int,
    max_length: int,
    order: int,
    bands: int,
    frequency: float = 1.0,
    decays: Sequence[float] = (0.3, 1.5),
) -> LongFilter:
    """Makes a filter of one of the kinds in `FILTERS`.

    The first two kinds use `order` and `bands`, "implicit" also `frequency` and `decays`.
    """
    if kind not in FILTERS:
        raise ValueError(f"filter is one of {', '.join(FILTERS)}; got {kind!r}")
    if kind == "explicit":
        return ExplicitFilter(channels, max_length)
    if kind == "implicit":
        return ImplicitFilter(channels, max_length, order, bands, frequency, decays)
    return ReluFilter(channels, max_length, order, bands)


def last_outputs(seen: Tensor, h: Tensor, new: int) -> Tensor:
    """Returns the last `new` rows of `causal_convolution(seen, h)`; one row costs O(T).

    `seen` is [B, T, ...], h [S, ...].
    """
    if new > 1:
        return causal_convolution(seen, h)[:, -new:]
    h = h[: seen.shape[1]].flip(0).to(seen.dtype)
    return (seen[:, seen.shape[1] - h.shape[0] :] * h).sum(1, keepdim=True)
