"""BaseConv: one convolution and one gate, the simplest gated convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from sympow.layers.base import own_weight
from sympow.layers.cache import InputCache
from sympow.layers.documents import per_document
from sympow.layers.zoology.filters import FilterMixer, make_filter
from sympow.ops.types import check_flags


class BaseConv(FilterMixer):
    """Computes (x W + b_1) * (h (*) x + b_2) (Arora et al., "Zoology", 2023, (1)).

    Here * is the product by channel and (*) the causal convolution. There is no recurrence: a step keeps the inputs and
    costs O(max_length) for each token.

    Args:
        d_model, n_heads: as in `Mixer`.
        max_length: taps of the filter; tokens further back are not seen.
        filter: "implicit": Hyena's network computes each tap from its position. "relu": the network of the paper's
            Listing 2 does. "explicit": each tap is a weight. The paper's models alternate a long implicit filter and
            an explicit one of 3 taps.
        order: width of the network of an implicit filter.
        bands: number of frequencies in the positional features of this network.
        frequency, decays: of Hyena's network, see `ImplicitFilter`. The paper's language models have 14, (0.3, 1.2).
        residual: add x to y within the mixer, as the paper's Listings 1 and 2 do.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        max_length: int,
        filter: str = "implicit",
        order: int = 64,
        bands: int = 16,
        frequency: float = 1.0,
        decays: Sequence[float] = (0.3, 1.5),
        residual: bool = False,
    ):
        super().__init__(d_model, n_heads)
        self.filter = make_filter(filter, d_model, max_length, order, bands, frequency, decays)
        check_flags(residual=residual)
        self.residual = residual
        self.projection = nn.Linear(d_model, d_model)
        self.bias = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        super().reset_own_parameters(generator)
        nn.init.zeros_(self.bias)

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, own_weight(self.projection))
        return self._gated(x, per_document(self.filter.convolve, cu_seqlens, x))

    @override
    def step(self, x: Tensor, state: InputCache) -> tuple[Tensor, InputCache]:
        self.check_step(x, state, own_weight(self.projection))
        y, state = self.filter.step(x, state)
        return self._gated(x, y), state

    def _gated(self, x: Tensor, convolved: Tensor) -> Tensor:
        y = self.projection(x) * (convolved + self.bias)
        return y + x if self.residual else y
