"""Pure long convolution: a filter as long as the sequence for every channel, and nothing that depends on the input."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.cache import InputCache
from sympow.layers.documents import per_document
from sympow.layers.zoology.filters import ExplicitFilter, FilterMixer


class LongConvolution(FilterMixer):
    """Computes GLU(W gelu(h * x)), h explicit (Fu et al., "Simple Hardware-Efficient Long Convolutions", 2023).

    The output layer is that of S4. The squashing and the dropout of the filter, which regularize, are left out. There
    is no recurrence: stepping keeps the inputs and costs O(max_length) a token.

    Args:
        d_model, n_heads: as in `Mixer`.
        max_length: taps of the filter; tokens further back are not seen.
    """

    filter: ExplicitFilter

    def __init__(self, d_model: int, n_heads: int, *, max_length: int):
        super().__init__(d_model, n_heads)
        self.filter = ExplicitFilter(d_model, max_length)
        self.out = nn.Linear(d_model, 2 * d_model)
        self.reset_parameters()

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, self.filter.weight)
        return self._output(per_document(self.filter.convolve, cu_seqlens, x))

    @override
    def step(self, x: Tensor, state: InputCache) -> tuple[Tensor, InputCache]:
        self.check_step(x, state, self.filter.weight)
        y, state = self.filter.step(x, state)
        return self._output(y), state

    @override
    def fused(self) -> dict[str, list[int]]:
        return {"out": [self.d_model] * 2}

    def _output(self, y: Tensor) -> Tensor:
        return F.glu(self.out(F.gelu(y)), dim=-1)
