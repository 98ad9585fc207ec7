"""Liquid S4: a state-space model whose transition depends on the input, to second order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.base import Mixer
from sympow.layers.documents import per_document
from sympow.layers.initial import draw_normal
from sympow.layers.state import Device, DType, MixerState
from sympow.layers.zoology.state_space import DiagonalSSM, kernel
from sympow.ops.convolution import causal_convolution
from sympow.ops.cost import convolution_flops


@dataclass
class LiquidS4State(MixerState):
    """Holds the parts of the state of first and of second order in the inputs, [B, d, 1, N / 2, 2] each."""

    first: Tensor
    second: Tensor


class LiquidS4(Mixer):
    """Computes y = GLU(W gelu(s + D x)), s = 2 Re(C z), z_t = (a + b x_t) z_{t-1} + b x_t.

    All products of up to two inputs are kept (Hasani et al., "Liquid Structural State-Space Models", 2022, the KB
    kernel of degree 2; the output layer of S4).

    With a diagonal transition the terms of second order are b**2 a**(t - i - 1) x_i x_j, i < j <= t. As a convolution,
    with S the running sum of x: sum over i < t of h_{t-1-i} x_i (S_t - S_i), h_m = 2 Re(C b**2 a**m). As a recurrence:
    first_t = a first_{t-1} + b x_t and second_t = a second_{t-1} + b x_t first_{t-1}. Both forms agree.

    Args:
        d_model, n_heads: as in `Mixer`.
        state_dim: N, even.
    """

    def __init__(self, d_model: int, n_heads: int, *, state_dim: int = 64):
        super().__init__(d_model, n_heads)
        self.ssm = DiagonalSSM(d_model, state_dim)
        self.skip = nn.Parameter(torch.empty(d_model))
        self.out = nn.Linear(d_model, 2 * d_model)
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        self.ssm.reset_parameters(generator)
        draw_normal(self.skip, 1.0, generator)

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, self.skip)
        return self._output(x, per_document(self._convolved, cu_seqlens, x))

    @override
    def training_flops(self, time: int) -> int:
        return 3 * convolution_flops(time, time, self.d_model)

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> LiquidS4State:
        first, second = (self.ssm.init_state(batch_size, 1, device, dtype) for _ in range(2))
        return LiquidS4State(first, second)

    @override
    def step(self, x: Tensor, state: LiquidS4State) -> tuple[Tensor, LiquidS4State]:
        self.check_step(x, state, self.skip)
        a, b, c = (part[:, None] for part in self.ssm.coefficients())
        first, second = torch.view_as_complex(state.first), torch.view_as_complex(state.second)
        outs = []
        for token in x.to(a.real.dtype).unbind(1):
            entered = b * token[..., None, None]
            first, second = a * first + entered, a * second + entered * first
            outs.append((c * (first + second)).sum((-1, -2)).real)
        y = torch.stack(outs, dim=1).to(x.dtype)
        return self._output(x, y), LiquidS4State(torch.view_as_real(first), torch.view_as_real(second))

    @override
    def state_size(self, context: int) -> int:
        return 2 * self.ssm.state_size(1)

    @override
    def fused(self) -> dict[str, list[int]]:
        return {"out": [self.d_model] * 2}

    def _convolved(self, x: Tensor) -> Tensor:
        a, b, c = self.ssm.coefficients()
        u = x.to(a.real.dtype)
        total = u.cumsum(1)
        # Pairs end at the token itself or before: their filter starts one token back.
        h = F.pad(kernel(a, c * b * b, u.shape[1]), (0, 0, 1, 0))
        pairs = total * causal_convolution(u, h) - causal_convolution(u * total, h)
        return (causal_convolution(u, kernel(a, c * b, u.shape[1])) + pairs).to(x.dtype)

    def _output(self, x: Tensor, y: Tensor) -> Tensor:
        return F.glu(self.out(F.gelu(y + self.skip * x)), dim=-1)
