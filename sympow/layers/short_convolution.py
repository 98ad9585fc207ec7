"""A short causal convolution, every channel by itself: a mixer alone, or in front of another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sympow.layers.base import Mixer
from sympow.layers.depthwise import DepthwiseConvolution, ShortConvolutionState
from sympow.layers.registry import make_mixer
from sympow.layers.state import After
from sympow.ops.cost import convolution_flops


class ShortConvolution(Mixer):
    """Convolves a few tokens, causally and by channel, alone or followed by another mixer: mixer(convolution(x)).

    With the convolution, a mixer can compare a token with the token before another one. One layer of attention alone
    cannot (Arora et al., "Zoology", 2023, section 4). Fu et al., "Hungry Hungry Hippos", 2022, use a shift for this.

    In front of a mixer the convolution starts near the identity: 1 is added to the weight of the token itself, and
    there is no bias. With torch's initialisation alone, the mixer would get averages of tokens and learn to recall more
    slowly.

    Args:
        d_model, n_heads: as in `Mixer`.
        width: k, the tokens seen, the token itself included.
        mixer: the name of the mixer that follows, one of `sympow.layers.MIXERS`; None for none.
        options: options of that mixer.
    """

    holds_mixer = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        width: int = 4,
        mixer: str | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        super().__init__(d_model, n_heads)
        if mixer is None and options:
            raise ValueError(f"options are those of the mixer behind, and there is none; got {dict(options)!r}")
        self.convolution = DepthwiseConvolution(d_model, width, identity=mixer is not None)
        self.mixer = None if mixer is None else make_mixer(mixer, d_model, n_heads, options or {})
        if self.mixer is not None:
            self.causal, self.reads_tokens = self.mixer.causal, self.mixer.reads_tokens
        self.reset_parameters()

    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draws all weights again; see `Mixer.reset_parameters`."""
        self.convolution.reset_parameters(generator)
        if self.mixer is not None:
            self.mixer.reset_parameters(std=std, out_std=out_std, generator=generator)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Computes what `Mixer.forward` does; `tokens` are for a following mixer that reads them."""
        self.check_input(x, self.convolution.weight)
        y = self.convolution(x, cu_seqlens=cu_seqlens, context_group=self.context_group)
        return y if self.mixer is None else self.mixer(y, cu_seqlens=cu_seqlens, **self.extras(tokens))

    def training_flops(self, time: int) -> int | None:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`."""
        own = convolution_flops(time, self.convolution.weight.shape[1], self.d_model)
        behind = 0 if self.mixer is None else self.mixer.training_flops(time)
        return None if behind is None else own + behind

    def init_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ShortConvolutionState:
        """Returns the state before the first token; see `Mixer.init_state`."""
        past = self.convolution.init_state(batch_size, device, dtype)
        behind = None if self.mixer is None else self.mixer.init_state(batch_size, device=device, dtype=dtype)
        return ShortConvolutionState(past, behind)

    def step(
        self, x: Tensor, state: ShortConvolutionState, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, ShortConvolutionState]:
        """Continues sequences by x [B, T', d]; see `Mixer.step`."""
        self.check_step(x, state, self.convolution.weight)
        y, past = self.convolution.step(x, state.past)
        behind = state.behind
        if self.mixer is not None:
            y, behind = self.mixer.step(y, behind, **self.extras(tokens))
        return y, ShortConvolutionState(past, behind)

    def try_step(self, x: Tensor, state: ShortConvolutionState, **extras: Tensor | None) -> tuple[Tensor, After]:
        """Continues sequences by tokens that can still be taken back; see `Mixer.try_step`."""
        self.check_step(x, state, self.convolution.weight)
        y, past = self.convolution.try_step(x, state.past)
        if self.mixer is None or state.behind is None:
            return y, lambda n: ShortConvolutionState(past(n), None)
        y, behind = self.mixer.try_step(y, state.behind, **extras)
        return y, lambda n: ShortConvolutionState(past(n), behind(n))

    def state_size(self, context: int) -> int:
        """Returns the number of elements of the state of one sequence; see `Mixer.state_size`."""
        behind = 0 if self.mixer is None else self.mixer.state_size(context)
        return self.convolution.state_size() + behind

    def split_context(self, group: dist.ProcessGroup) -> None:
        """Makes `forward` take this rank's part of every row; see `Mixer.split_context`."""
        self.context_group = group
        if self.mixer is not None:
            self.mixer.split_context(group)
