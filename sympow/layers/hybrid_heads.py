"""A layer whose heads are of two kinds: some attend to a window, and the others are heads of another mixer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from sympow.layers.attention import BLOCK
from sympow.layers.base import Mixer
from sympow.layers.registry import make_mixer, mixer_class
from sympow.layers.state import After, Device, DType, MixerState, of_tried


@dataclass
class HybridHeadsState(MixerState):
    """Holds the states of both kinds of heads."""

    counters: ClassVar[tuple[str, ...] | None] = ()

    near: MixerState
    far: MixerState


class HybridHeads(Mixer):
    """Adds the outputs of heads that attend to a window and of heads of another mixer, such as power attention.

    The window computes what is near exactly, and the state of the other heads holds what is far away. Dong et al.,
    "Hymba", 2024, put heads of two kinds into one layer in this way. Each kind has projections, a block and an output
    projection of its own.

    Args:
        d_model, n_heads: as in `Mixer`.
        window: the number of tokens that the window's heads attend to.
        window_heads: the number of the window's heads, from 1 to n_heads - 1; None: half of the heads.
        window_options: other options of the window's heads, those of `WindowAttention`. head_dim is d / n_heads by
            default, and the block is that of `PowerAttention`: short_convolution 4, head_norm and output_gate True,
            rotary_fraction 1/4.
        mixer: the name of the mixer of the other heads, one of `sympow.layers.MIXERS`. It does not read tokens.
        options: options of that mixer. Its head_dim, if it has this option, is that of the window's heads by default.

    Attributes:
        near: the heads with the window, `WindowAttention`.
        far: the other heads.
    """

    holds_mixer = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        window: int,
        window_heads: int | None = None,
        window_options: Mapping[str, Any] | None = None,
        mixer: str = "power_delta",
        options: Mapping[str, Any] | None = None,
    ):
        super().__init__(d_model, n_heads)
        window_heads = n_heads // 2 if window_heads is None else window_heads
        if n_heads < 2:
            raise ValueError(f"n_heads must be at least 2, for heads of two kinds; got {n_heads}")
        if not 1 <= window_heads < n_heads:
            raise ValueError(f"window_heads must be from 1 to {n_heads - 1}, of {n_heads} heads; got {window_heads}")
        name, near = self.parts({"window": window, "window_options": window_options})["window_options"]
        head_dim = near.get("head_dim")
        if head_dim is None:
            if d_model % n_heads:
                raise ValueError(
                    "d_model must be a multiple of n_heads, or head_dim given in window_options; "
                    f"got {d_model=}, {n_heads=}"
                )
            head_dim = d_model // n_heads
        self.near = make_mixer(name, d_model, window_heads, BLOCK | dict(near) | {"head_dim": head_dim})
        far = dict(options or {})
        if far.get("head_dim") is None and "head_dim" in mixer_class(mixer).option_names():
            far["head_dim"] = head_dim
        self.far = make_mixer(mixer, d_model, n_heads - window_heads, far)
        if self.far.reads_tokens:
            raise ValueError(f"the other heads must be of a mixer that does not read tokens; got {mixer!r}")
        self.causal = self.far.causal
        self.reset_parameters()

    @classmethod
    def parts(cls, options: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """Names the mixers of both kinds of heads; see `Mixer.parts`."""
        own = options.get("window_options") or {}
        if "window" in own:
            raise ValueError("window is an option of the hybrid_heads mixer itself, not one of its window_options")
        window = {"window": options["window"]} if "window" in options else {}
        return {"window_options": ("window", window | dict(own))} | super().parts(options)

    @override
    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        for part in (self.near, self.far):
            part.reset_parameters(std=std, out_std=out_std, generator=generator)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Adds the outputs of both kinds of heads; see `Mixer.forward`."""
        return self.near(x, cu_seqlens=cu_seqlens) + self.far(x, cu_seqlens=cu_seqlens)

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> HybridHeadsState:
        near, far = (part.init_state(batch_size, device=device, dtype=dtype) for part in (self.near, self.far))
        return HybridHeadsState(near, far)

    @override
    def step(self, x: Tensor, state: HybridHeadsState) -> tuple[Tensor, HybridHeadsState]:
        self.check_step(x, state, None)
        y, near = self.near.step(x, state.near)
        own, far = self.far.step(x, state.far)
        return y + own, HybridHeadsState(near, far)

    @override
    def try_step(self, x: Tensor, state: HybridHeadsState, **extras: Tensor | None) -> tuple[Tensor, After]:
        self.check_step(x, state, None)
        y, near = self.near.try_step(x, state.near)
        own, far = self.far.try_step(x, state.far)
        return y + own, of_tried(lambda n: HybridHeadsState(near(n), far(n)), x.shape[1])

    @override
    def state_size(self, context: int) -> int:
        return self.near.state_size(context) + self.far.state_size(context)

    @override
    def training_flops(self, time: int) -> int | None:
        far = self.far.training_flops(time)
        near = self.near.training_flops(time)
        return None if near is None or far is None else near + far
