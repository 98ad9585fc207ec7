"""The body of RWKV-7 (Peng et al., 2025) around any mixer: token shift, an output gate, and channel mixing.

"Scaling Context Requires Rethinking Attention" (Gelada et al., 2025, appendix D) measures attention within this
architecture: it exchanges the attention of RWKV-7 and leaves the rest as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers import MixerState
from sympow.layers.base import state_options
from sympow.layers.initial import draw_uniform
from sympow.layers.rwkv7 import LowRank, low_rank
from sympow.layers.state import After, Device, DType
from sympow.layers.zoology.rwkv4 import shifted
from sympow.models.bodies.base import Block, block_mixer, reset_norm, step_mixer
from sympow.models.config import ModelConfig
from sympow.models.norms import LayerNorm
from sympow.ops.context_parallel import previous_tokens

_GATE_RANK = 5.0  # rank of the gate over sqrt(d)


@dataclass
class RWKV7BlockState(MixerState):
    """Holds the mixer's state, and the last inputs [B, d] of mixer and channel mixing, None without a shift."""

    counters: ClassVar[tuple[str, ...] | None] = ()

    mixer: MixerState
    mixer_last: Tensor | None
    mlp_last: Tensor | None


class RWKV7Block(Block):
    """Computes x + gate * mixer(shift(y)) with y = LayerNorm(x), then x + channel_mixing(LayerNorm(x)).

    - shift(y)_t = y_t + mu * (y_{t-1} - y_t), with a mu for every channel; y_{-1} = 0. The mixer, the gate and the
      channel mixing each have a shift of their own.
    - gate = sigmoid(shift(y) A) B + c, low-rank as in RWKV-7. There the gate comes before the output
      projection, which starts at 0. Here the gate comes after the mixer's projection, and c starts at 1.
    - channel_mixing(y) = W_out relu(W_in shift(y))**2, no biases. With `mlp_ratio` 0 there is none.

    A mixer that shifts tokens itself (`Mixer.shifts_tokens`: rwkv4, rwkv7) gets neither shift nor gate. With "rwkv7"
    the body is RWKV-7 without its value residual. The option `depth` of a mixer is set by the number of the block.

    The weights start as published: W_in from the uniform distribution within 0.5 / sqrt(d), W_out and the mixer's
    output projection at 0, so that blocks start as the identity; mu at 1 - (i / d)**(0.7 r) for channel i of the
    mixer's input, 0.2 for 0.7 of the gate's, and 1 - (i / d)**(r**4) of the channel mixing's, with r = 1 - layer /
    n_layers; A at 0, B orthogonal times 0.1; norms at 1. Other weights of the mixer are drawn from N(0, 0.02), or
    as the mixer says.

    Args:
        config: that of the model.
        layer: the number of the block, from 0.
    """

    norms_embedding = True

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        d = config.d_model
        self.early = 1 - layer / config.n_layers
        self.context_group: dist.ProcessGroup | None = None
        self.mixer_norm = self.norm(config)
        self.mixer = block_mixer(config, layer)
        self.shifts = not self.mixer.shifts_tokens
        if self.shifts:
            self.mixer_shift, self.gate_shift = (nn.Parameter(torch.empty(d)) for _ in range(2))
            self.gate = LowRank(d, _GATE_RANK, nn.Sigmoid())
        self.has_mlp = config.mlp_width > 0
        if self.has_mlp:
            self.mlp_norm = self.norm(config)
            self.mlp_shift = nn.Parameter(torch.empty(d))
            self.mlp_in = nn.Linear(d, config.mlp_width, bias=False)
            self.mlp_out = nn.Linear(config.mlp_width, d, bias=False)

    @staticmethod
    def norm(config: ModelConfig) -> nn.Module:
        """Makes a LayerNorm."""
        return LayerNorm(config.d_model)

    @staticmethod
    def other_weights(config: ModelConfig) -> int:
        """Counts the elements of the matrices of the MLP and of the gate."""
        return 2 * config.d_model * (config.mlp_width + low_rank(config.d_model, _GATE_RANK))

    def reset_parameters(self, *, std: float, residual_std: float, generator: torch.Generator) -> None:
        """Draws all weights as published; projections into the residual stream are 0. See `Block.reset_parameters`."""
        reset_norm(self.mixer_norm)
        self.mixer.reset_parameters(std=std, out_std=0.0, generator=generator)
        d = self.mixer.d_model
        channel = torch.arange(d, device="cpu") / d
        with torch.no_grad():
            if self.shifts:
                self.mixer_shift.copy_(1 - channel ** (0.7 * self.early))
                self.gate_shift.copy_(1 - channel ** (0.2 * self.early))
                self.gate.reset_parameters(torch.ones(d, device="cpu"), generator)
            if self.has_mlp:
                self.mlp_shift.copy_(1 - channel**self.early**4)
                nn.init.zeros_(self.mlp_out.weight)
                reset_norm(self.mlp_norm)
        if self.has_mlp:
            draw_uniform(self.mlp_in.weight, -0.5 / d**0.5, 0.5 / d**0.5, generator)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> RWKV7BlockState:
        """Returns the state before the first token: that of the mixer, and zeros as the last inputs."""
        d, weight = self.mixer.d_model, next(self.mixer_norm.parameters())
        lasts = (
            torch.zeros(batch_size, d, **state_options(weight, device, dtype)) if exists else None
            for exists in (self.shifts, self.has_mlp)
        )
        return RWKV7BlockState(self.mixer.init_state(batch_size, device=device, dtype=dtype), *lasts)

    def state_size(self, context: int) -> int:
        """Returns the number of elements of the state of one sequence, the last inputs included."""
        return self.mixer.state_size(context) + self.mixer.d_model * (self.shifts + self.has_mlp)

    @override
    def split_context(self, group: dist.ProcessGroup) -> None:
        super().split_context(group)
        self.context_group = group

    @override
    def step(self, x: Tensor, state: RWKV7BlockState, tokens: Tensor | None = None) -> tuple[Tensor, RWKV7BlockState]:
        x, mixer, y, z = self._continued(lambda y, held: step_mixer(self.mixer, y, held, tokens), x, state)
        last = x.shape[1] - 1
        return x, RWKV7BlockState(mixer, _input(y, state.mixer_last, last), _input(z, state.mlp_last, last))

    @override
    def try_step(self, x: Tensor, state: RWKV7BlockState, tokens: Tensor | None = None) -> tuple[Tensor, After]:
        extras = self.mixer.extras(tokens)
        x, mixer, y, z = self._continued(lambda y, held: self.mixer.try_step(y, held, **extras), x, state)

        def after(n: int) -> RWKV7BlockState:
            if n == 0:
                return RWKV7BlockState(mixer(0), state.mixer_last, state.mlp_last)
            return RWKV7BlockState(mixer(n), _input(y, state.mixer_last, n - 1), _input(z, state.mlp_last, n - 1))

        return x, after

    def _continued(
        self, step: Callable[..., tuple[Tensor, Any]], x: Tensor, state: RWKV7BlockState
    ) -> tuple[Tensor, Any, Tensor, Tensor | None]:
        """Returns the block's output, the second result of the mixer's `step`, and the inputs of mixer and MLP."""
        if not isinstance(state, RWKV7BlockState):
            raise TypeError(f"state must be that of a block of rwkv7, RWKV7BlockState; got {type(state).__name__}")
        y = self.mixer_norm(x)
        if state.mixer_last is None:
            out, mixer = step(y, state.mixer)
        else:
            mixed, gate = self._gated(y, shifted(y, state.mixer_last))
            out, mixer = step(mixed, state.mixer)
            out = gate * out
        x, z = x + out, None
        if state.mlp_last is not None:
            z = self.mlp_norm(x)
            x = x + self._channels_mixed(z, shifted(z, state.mlp_last))
        return x, mixer, y, z

    def _whole(self, x: Tensor, cu_seqlens: Tensor | None, tokens: Tensor | None) -> Tensor:
        y = self.mixer_norm(x)
        extras = self.mixer.extras(tokens)
        if self.shifts:
            mixed, gate = self._gated(y, self._before(y, cu_seqlens))
            x = x + gate * self.mixer(mixed, cu_seqlens=cu_seqlens, **extras)
        else:
            x = x + self.mixer(y, cu_seqlens=cu_seqlens, **extras)
        if not self.has_mlp:
            return x
        z = self.mlp_norm(x)
        return x + self._channels_mixed(z, self._before(z, cu_seqlens))

    def _before(self, y: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Returns y [B, T, d] one token later, 0 before the first token of a row or document."""
        if self.context_group is None:
            return tokens_before(y, y.new_zeros(y.shape[0], y.shape[2]), cu_seqlens)
        return tokens_before(y, previous_tokens(y, 1, self.context_group)[:, 0], cu_seqlens)

    def _gated(self, y: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mixer's input for y [B, T, d], and the gate of the mixer's output."""
        step = before - y
        return y + self.mixer_shift * step, self.gate(y + self.gate_shift * step)

    def _channels_mixed(self, y: Tensor, before: Tensor) -> Tensor:
        return self._recomputed(self._narrowed, self.mlp_in(y + self.mlp_shift * (before - y)))

    def _narrowed(self, hidden: Tensor) -> Tensor:
        return self.mlp_out(F.relu(hidden).square())


def tokens_before(x: Tensor, last: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Gives x [B, T, d] one token later, with `last` [B, d] in front, and 0 where a document of cu_seqlens begins."""
    before = shifted(x, last)
    if cu_seqlens is None:
        return before
    # Uses a mask instead of a loop over documents, because the host would have to wait for a GPU to read the bounds.
    time = x.shape[1]
    bounds = cu_seqlens.to(device=x.device, dtype=torch.int64).clamp(0, time)  # the mixer refuses those beyond
    begins = torch.zeros(time + 1, dtype=torch.bool, device=x.device).index_fill(0, bounds, True)
    return before.masked_fill(begins[:time, None], 0)


def _input(y: Tensor | None, before: Tensor | None, token: int) -> Tensor | None:
    """Returns token `token` of y [B, T', d] in the dtype of the token before; None if there is no state."""
    return None if y is None or before is None else y[:, token].to(before.dtype, copy=True)
