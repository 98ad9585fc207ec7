"""A short causal convolution, every channel by itself: a mixer alone, or in front of another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sympow.layers.base import Mixer, MixerState, draw_uniform, per_document, state_options
from sympow.ops.convolution import causal_convolution


class DepthwiseConvolution(nn.Module):
    """y_t = b + sum over s < k of w_s x_{t-s}, channel by channel.

    Args:
        channels: C.
        width: k, the tokens seen, the token itself included.

    `weight` is [C, k], the token's own weight last, and is drawn as torch's convolutions are: uniform within
    1 / sqrt(k), the bias [C] too.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"width must be an integer of at least 1; got {width!r}")
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        bound = 1 / sqrt(self.width)
        draw_uniform(self.weight, -bound, bound, generator)
        draw_uniform(self.bias, -bound, bound, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]; zeros stand before the first token."""
        if torch.compiler.is_compiling():  # sums of shifted rows are fused with what stands around them
            return (causal_convolution(x, self.weight.flip(1).T) + self.bias).to(x.dtype)
        return self._apply_to(F.pad(x.transpose(1, 2), (self.width - 1, 0)))

    def init_state(self, batch_size: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
        """The k - 1 inputs before the first token, zeros [B, k - 1, C]."""
        shape = (batch_size, self.width - 1, self.weight.shape[0])
        return torch.zeros(shape, **state_options(self.weight, device, dtype))

    def step(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T', C] after `past` [B, k - 1, C] -> (y [B, T', C], the last k - 1 inputs)."""
        seen = torch.cat([past, x.to(past.dtype)], dim=1)
        y = self._apply_to(seen.to(x.dtype).transpose(1, 2))
        return y, seen[:, seen.shape[1] - past.shape[1] :].clone()  # a view would hold all inputs

    def state_size(self) -> int:
        return self.weight.shape[0] * (self.width - 1)

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, width={self.width}"

    def _apply_to(self, seen: Tensor) -> Tensor:
        """[B, C, k - 1 + T] -> [B, T, C]."""
        return F.conv1d(seen, self.weight.unsqueeze(1), self.bias, groups=seen.shape[1]).transpose(1, 2)


@dataclass
class ShortConvolutionState(MixerState):
    """The last k - 1 inputs [B, k - 1, d], and the state of the mixer behind."""

    past: Tensor
    behind: MixerState | None


class ShortConvolution(Mixer):
    """A causal depthwise convolution of a few tokens, alone or followed by another mixer: mixer(convolution(x)).

    It lets a mixer compare a token with the one before another, which one layer of attention cannot (Arora et al.,
    "Zoology", 2023, section 4; Fu et al., "Hungry Hungry Hippos", 2022, use a shift for the same).

    In front of a mixer the convolution starts near the identity, 1 added to a token's own weight and no bias: with
    torch's initialisation alone the mixer behind sees tokens blurred into each other and learns to recall more slowly.

    Args:
        width: k, the tokens seen, the token itself included.
        mixer: the name of the mixer behind, one of `sympow.layers.MIXERS`; None for none.
        options: options of that mixer.
    """

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
        from sympow.layers.registry import make_mixer  # knows this class

        self.convolution = DepthwiseConvolution(d_model, width)
        self.mixer = None if mixer is None else make_mixer(mixer, d_model, n_heads, options or {})
        if self.mixer is not None:
            self.causal, self.reads_tokens = self.mixer.causal, self.mixer.reads_tokens
        self.reset_parameters()

    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        self.convolution.reset_parameters(generator)
        if self.mixer is not None:
            with torch.no_grad():
                self.convolution.weight[:, -1] += 1
                self.convolution.bias.zero_()
            self.mixer.reset_parameters(std=std, out_std=out_std, generator=generator)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """As `Mixer.forward`; `tokens` are for a mixer behind that reads them."""
        self.check_input(x, self.convolution.weight)
        y = per_document(self.convolution, cu_seqlens, x)
        return y if self.mixer is None else self.mixer(y.to(x.dtype), cu_seqlens=cu_seqlens, **self.extras(tokens))

    def init_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ShortConvolutionState:
        past = self.convolution.init_state(batch_size, device, dtype)
        behind = None if self.mixer is None else self.mixer.init_state(batch_size, device=device, dtype=dtype)
        return ShortConvolutionState(past, behind)

    def step(
        self, x: Tensor, state: ShortConvolutionState, *, tokens: Tensor | None = None
    ) -> tuple[Tensor, ShortConvolutionState]:
        self.check_input(x, self.convolution.weight)
        y, past = self.convolution.step(x, state.past)
        behind = state.behind
        if self.mixer is not None:
            y, behind = self.mixer.step(y.to(x.dtype), behind, **self.extras(tokens))
        return y, ShortConvolutionState(past, behind)

    def state_size(self, context: int) -> int:
        behind = 0 if self.mixer is None else self.mixer.state_size(context)
        return self.convolution.state_size() + behind
