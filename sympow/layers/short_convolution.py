"""A short causal convolution, every channel by itself: the module, and a mixer alone or in front of another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from sympow.fields import is_integer
from sympow.layers.base import Mixer, state_options
from sympow.layers.initial import draw_uniform
from sympow.layers.registry import make_mixer
from sympow.layers.state import After, Device, DType, MixerState, of_tried
from sympow.ops.availability import concatenated
from sympow.ops.context_parallel import previous_tokens
from sympow.ops.cost import convolution_flops
from sympow.ops.fused.short_convolution import short_convolution, short_convolution_step
from sympow.ops.types import check_writable

_FEW = 16  # tokens


class DepthwiseConvolution(nn.Module):
    """Computes y_t = b + sum over s < k of w_s x_{t-s}, channel by channel.

    Args:
        channels: C.
        width: k, the tokens seen, the token itself included.
        identity: start near the identity: 1 is added to the token's own weight, and the bias is 0.
        bias: whether there is a b; without it b is 0.

    `weight` is [C, k], and its last tap belongs to the token itself. The weight and the bias [C] are drawn as in
    torch's convolutions, uniformly within 1 / sqrt(k).
    """

    def __init__(self, channels: int, width: int, *, identity: bool = False, bias: bool = True):
        super().__init__()
        if not is_integer(width) or width < 1:
            raise ValueError(f"width must be an integer of at least 1; got {width!r}")
        self.width, self.identity = width, identity
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws taps and biases within 1 / sqrt(width); with `identity` the last tap is 1 more."""
        bound = 1 / sqrt(self.width)
        draw_uniform(self.weight, -bound, bound, generator)
        if self.identity:
            self.weight[:, -1] += 1
        if self.bias is None:
            return
        if self.identity:
            self.bias.zero_()
        else:
            draw_uniform(self.bias, -bound, bound, generator)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, context_group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Convolves x [B, T, C], as if zeros preceded the first token of each document of `cu_seqlens`.

        With `context_group` x is this rank's part of a row, and the tokens before it come from the rank before.
        """
        past = None if context_group is None else previous_tokens(x, self.width - 1, context_group)
        return short_convolution(x, self.weight, self.offset(), past=past, cu_seqlens=cu_seqlens)

    def init_state(self, batch_size: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
        """Returns the k - 1 inputs before the first token, zeros [B, k - 1, C]."""
        shape = (batch_size, self.width - 1, self.weight.shape[0])
        return torch.zeros(shape, **state_options(self.weight, device, dtype))

    def step(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Maps x [B, T', C] after `past` [B, k - 1, C] to y [B, T', C] and the last k - 1 inputs.

        If gradients are off, the method may write these inputs into `past`. Raises ValueError for a `past` that it
        cannot write into, which is expanded or was made in inference mode.
        """
        if x.shape[1] <= _FEW and not torch.is_grad_enabled():
            check_writable(past)
            return short_convolution_step(x, past, self.weight, self.offset()), past
        y = short_convolution(x, self.weight, self.offset(), past=past)
        return y, _last(x, past, x.shape[1])

    def try_step(self, x: Tensor, past: Tensor) -> tuple[Tensor, After]:
        """Maps as `step` does; after(n) of the second result is the state after n tokens, see `Mixer.try_step`."""
        return self.step(x, past.clone())[0], lambda n: _last(x, past, n)

    def offset(self) -> Tensor:
        """Returns the bias [C], zeros if there is none."""
        return self.weight.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias

    def state_size(self) -> int:
        """Returns the number of elements of the state of one sequence: the last width - 1 inputs."""
        return self.weight.shape[0] * (self.width - 1)

    def extra_repr(self) -> str:
        """Returns the options that `repr` of the module shows."""
        return f"channels={self.weight.shape[0]}, width={self.width}"


def _last(x: Tensor, past: Tensor, count: int) -> Tensor:
    """Copies the last k - 1 inputs [B, k - 1, C] of `past` [B, k - 1, C] and the first `count` tokens of x."""
    kept = past.shape[1]
    first = x[:, max(count - kept, 0) : count].to(past.dtype)
    return concatenated([past[:, min(count, kept) :], first], dim=1)


@dataclass
class ShortConvolutionState(MixerState):
    """Holds the last k - 1 inputs [B, k - 1, d], and the state of the mixer after the convolution."""

    counters: ClassVar[tuple[str, ...] | None] = ()

    past: Tensor
    behind: MixerState | None


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

    @override
    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        self.convolution.reset_parameters(generator)
        if self.mixer is not None:
            self.mixer.reset_parameters(std=std, out_std=out_std, generator=generator)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Computes what `Mixer.forward` does; `tokens` are for a following mixer that reads them."""
        self.check_input(x, self.convolution.weight)
        y = self.convolution(x, cu_seqlens=cu_seqlens, context_group=self.context_group)
        return y if self.mixer is None else self.mixer(y, cu_seqlens=cu_seqlens, **self.extras(tokens))

    @override
    def training_flops(self, time: int) -> int | None:
        own = convolution_flops(time, self.convolution.weight.shape[1], self.d_model)
        behind = 0 if self.mixer is None else self.mixer.training_flops(time)
        return None if behind is None else own + behind

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> ShortConvolutionState:
        past = self.convolution.init_state(batch_size, device, dtype)
        behind = None if self.mixer is None else self.mixer.init_state(batch_size, device=device, dtype=dtype)
        return ShortConvolutionState(past, behind)

    @override
    def step(
        self, x: Tensor, state: ShortConvolutionState, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, ShortConvolutionState]:
        self.check_step(x, state, self.convolution.weight)
        y, past = self.convolution.step(x, state.past)
        behind = state.behind
        if self.mixer is not None:
            y, behind = self.mixer.step(y, behind, **self.extras(tokens))
        return y, ShortConvolutionState(past, behind)

    @override
    def try_step(self, x: Tensor, state: ShortConvolutionState, **extras: Tensor | None) -> tuple[Tensor, After]:
        self.check_step(x, state, self.convolution.weight)
        y, past = self.convolution.try_step(x, state.past)
        if self.mixer is None or state.behind is None:
            return y, of_tried(lambda n: ShortConvolutionState(past(n), None), x.shape[1])
        y, behind = self.mixer.try_step(y, state.behind, **extras)
        return y, of_tried(lambda n: ShortConvolutionState(past(n), behind(n)), x.shape[1])

    @override
    def state_size(self, context: int) -> int:
        behind = 0 if self.mixer is None else self.mixer.state_size(context)
        return self.convolution.state_size() + behind

    @override
    def split_context(self, group: dist.ProcessGroup) -> None:
        self.context_group = group
        if self.mixer is not None:
            self.mixer.split_context(group)
