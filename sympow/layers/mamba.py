"""Mamba: a memory of each channel whose decay, whose input and whose output depend on the token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.base import Mixer, own_weight, state_options
from sympow.layers.documents import per_document
from sympow.layers.float32_linear import Float32Linear
from sympow.layers.initial import draw_uniform
from sympow.layers.short_convolution import DepthwiseConvolution
from sympow.layers.state import Device, DType, MixerState
from sympow.ops.availability import without_autocast
from sympow.ops.cost import convolution_flops
from sympow.ops.recomputed import recomputed

_TAPS = 4
_DT_MIN, _DT_MAX = 1e-3, 1e-1


@dataclass
class MambaState(MixerState):
    """Holds the last inputs of the convolution [B, 3, 2 d], and the memory [B, 2 d, N] in float32 at least."""

    counters: ClassVar[tuple[str, ...] | None] = ()

    past: Tensor
    memory: Tensor


class Mamba(Mixer):
    """Mixes by a selective state-space model (Gu and Dao, "Mamba", 2023, Algorithm 2), in its recurrent form.

    h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = C_t h_t + D u_t for each of 2 d channels, where A is a negative
    number for each of N states, and dt, B and C are maps of u_t. u is a projection of x after a convolution of 4 taps
    and SiLU. The output is a projection of y silu(z), where z is another projection of x. Sizes are the published ones:
    dt comes from ceil(d / 16) numbers.

    Linear weights are drawn as those of all mixers here. A = -1 to -N, D = 1, and dt is at first about log-uniform in
    0.001 .. 0.1, as published. Tokens are computed one by one, so training on long rows is slow.

    Args:
        d_model, n_heads: as in `Mixer`. Heads are not used.
        state_dim: N, states of every channel.
    """

    def __init__(self, d_model: int, n_heads: int, *, state_dim: int = 16):
        super().__init__(d_model, n_heads)
        if state_dim < 1:
            raise ValueError(f"state_dim must be at least 1; got {state_dim}")
        self.state_dim, self.rank = state_dim, math.ceil(d_model / 16)
        self.uz = nn.Linear(d_model, 4 * d_model, bias=False)
        self.convolution = DepthwiseConvolution(2 * d_model, _TAPS)
        self.selection = nn.Linear(2 * d_model, self.rank + 2 * state_dim, bias=False)
        self.dt = Float32Linear(self.rank, 2 * d_model)
        # log(-A) [2 d, N], flat: AdamW's weight decay would pull a matrix towards A = -1.
        self.log_rate = nn.Parameter(torch.empty(2 * d_model * state_dim))
        self.skip = nn.Parameter(torch.empty(2 * d_model))
        self.out = nn.Linear(2 * d_model, d_model, bias=False)
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        self.convolution.reset_parameters(generator)
        draw_uniform(self.dt.weight, -(self.rank**-0.5), self.rank**-0.5, generator)
        if self.dt.bias is None or self.skip.is_meta:  # N may be larger than the memory
            return
        draw_uniform(self.dt.bias, math.log(_DT_MIN), math.log(_DT_MAX), generator)
        with torch.no_grad():
            self.dt.bias.copy_(self.dt.bias.exp().expm1().log())  # of which softplus is the drawn dt
            rates = torch.arange(1, self.state_dim + 1, device="cpu")
            self.log_rate.copy_(rates.log().repeat(2 * self.d_model))
            nn.init.ones_(self.skip)

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, own_weight(self.out))
        return per_document(lambda document: self._mixed(document, self._start(document))[0], cu_seqlens, x)

    @override
    def training_flops(self, time: int) -> int:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`.

        A token and a state of a channel are in an exponent, a decay, and two products (written and read), 6 FLOPs
        forward, and twice as many backward.
        """
        return convolution_flops(time, _TAPS, 2 * self.d_model) + 18 * time * 2 * self.d_model * self.state_dim

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MambaState:
        memory = (batch_size, 2 * self.d_model, self.state_dim)
        return MambaState(
            self.convolution.init_state(batch_size, device, dtype),
            torch.zeros(memory, **state_options(self.skip, device, dtype, sums=True)),
        )

    @override
    def step(self, x: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        self.check_step(x, state, own_weight(self.out))
        return self._mixed(x, state)

    @override
    def state_size(self, context: int) -> int:
        return self.convolution.state_size() + 2 * self.d_model * self.state_dim

    def fused(self) -> dict[str, list[int]]:
        """Names `uz`, which holds two projections, and `selection`, which holds those to dt, B and C."""
        return {"uz": [2 * self.d_model] * 2, "selection": [self.rank, self.state_dim, self.state_dim]}

    def _start(self, x: Tensor) -> MambaState:
        return self.init_state(x.shape[0], device=x.device)

    def _mixed(self, x: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        u, z = self.uz(x).chunk(2, dim=-1)
        u, past = self.convolution.step(u, state.past)
        u = F.silu(u)
        low, b, c = self.selection(u).split([self.rank, self.state_dim, self.state_dim], dim=-1)
        dt = F.softplus(self.dt(low))
        wide = state.memory.dtype
        with without_autocast(x):
            rate = self.log_rate.to(wide).exp().view(-1, self.state_dim)
            scan = selective_scan if x.shape[1] < 2 else graph_selective_scan
            y, memory = scan(dt.to(wide), u.to(wide), b.to(wide), c.to(wide), rate, state.memory)
            y = y + self.skip * u
        return self.out(y.to(z.dtype) * F.silu(z)), MambaState(past, memory)


def selective_scan(dt: Tensor, u: Tensor, b: Tensor, c: Tensor, rate: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Returns h_t = exp(-dt_t rate) h_{t-1} + dt_t u_t b_t, y_t = c_t h_t, token by token.

    Args:
        dt: [B, T, C].
        u: [B, T, C].
        b: [B, T, N].
        c: [B, T, N].
        rate: -A, [C, N].
        memory: h before the first token, [B, C, N].

    Returns:
        y [B, T, C], and h after the last token.
    """
    outs, written = [], dt * u
    for t in range(u.shape[1]):
        decay = torch.exp(-dt[:, t, :, None] * rate)
        memory = decay * memory + written[:, t, :, None] * b[:, t, None]
        outs.append((memory * c[:, t, None]).sum(-1))
    return torch.stack(outs, dim=1), memory


def _like_scan(dt: Tensor, u: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), rest[-1].new_empty(rest[-1].shape)


@recomputed(_like_scan, outputs=2)
def graph_selective_scan(
    dt: Tensor, u: Tensor, b: Tensor, c: Tensor, rate: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `selective_scan`. A graph of torch.compile would otherwise have the operations of every token."""
    return selective_scan(dt, u, b, c, rate, memory)
