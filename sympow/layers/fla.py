"""Mamba-2, GLA, DeltaNet and Gated DeltaNet, from the package flash-linear-attention: thin adapters to the contract.

They need a GPU and the extra `fla`. Where both exist, the tests check them against the contract. Elsewhere the tests
check what they pass to a substitute of the package, and what they return. The kernels compute in half precision only,
so train under autocast, or with weights in bfloat16.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from sympow.layers.base import Mixer, own_weight
from sympow.layers.documents import per_document
from sympow.layers.state import Device, DType, MixerState
from sympow.packages import from_extra

_CONV = 4  # taps of the short convolutions, all of which the package keeps


@dataclass
class FlaState(MixerState):
    """Holds the state of the package's layer, in the form of its caches. It is empty before the first token."""

    recurrent: Any = None
    conv: Any = None

    def __len__(self) -> int:
        return int(self.recurrent is not None)

    def __getitem__(self, layer: int) -> dict[str, Any]:
        return {"recurrent_state": self.recurrent, "conv_state": self.conv, "attn_state": None, "ffn_state": None}

    def update(self, *, recurrent_state: Any = None, conv_state: Any = None, **_: Any) -> dict[str, Any]:
        """Sets the state, as the package's layers do with their caches, and returns it."""
        self.recurrent, self.conv = recurrent_state, conv_state
        return self[0]


class FlaMixer(Mixer):
    """Mixes by a layer of flash-linear-attention.

    A subclass names the layer, its arguments, and the number of elements of its state.

    Linear weights are drawn as `Mixer.reset_parameters` does. The constructor of the layer draws all other weights.
    Packed documents are computed one after another, and so are new tokens on a state.

    Args:
        d_model, n_heads: as in `Mixer`.
    """

    layer_name: ClassVar[str]

    def __init__(self, d_model: int, n_heads: int):
        super().__init__(d_model, n_heads)
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads; got {d_model=}, {n_heads=}")
        self.layer = self._made()
        self.reset_parameters()

    @property
    def out(self) -> nn.Linear:
        """Returns the output projection, under whichever name the layer gives it."""
        return self.layer.out_proj if hasattr(self.layer, "out_proj") else self.layer.o_proj

    def arguments(self) -> dict[str, Any]:
        """Returns the keywords of the layer besides its width and heads."""
        return {}

    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draws all weights anew; see `Mixer.reset_parameters`."""
        if not self.out.weight.is_meta:
            # The constructor draws from torch's default generator, which is seeded from ours and then restored.
            seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(seed)
                fresh = self._made().state_dict()
            self.layer.load_state_dict(fresh)
        super().reset_parameters(std=std, out_std=out_std, generator=generator)

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, own_weight(self.out))
        return per_document(lambda document: self.layer(document)[0], cu_seqlens, x)

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> FlaState:
        return FlaState()

    @override
    def step(self, x: Tensor, state: FlaState) -> tuple[Tensor, FlaState]:
        self.check_step(x, state, own_weight(self.out))
        state = FlaState(state.recurrent, state.conv)
        pieces = x.split(1, dim=1) if len(state) else (x,)
        outs = [self.layer(piece, past_key_values=state, use_cache=True)[0] for piece in pieces]
        return torch.cat(outs, dim=1), state

    @override
    def state_size(self, context: int) -> int:
        return self._elements() if context else 0

    def _elements(self) -> int:
        raise NotImplementedError

    def _made(self) -> Any:
        with from_extra("fla", f"{type(self).__name__} needs flash-linear-attention"):
            layers = importlib.import_module("fla.layers")
        sizes = {"hidden_size": self.d_model, "num_heads": self.n_heads, "layer_idx": 0}
        return getattr(layers, self.layer_name)(**sizes, **self.arguments())


class GLA(FlaMixer):
    """Computes gated linear attention (Yang et al., "Gated Linear Attention Transformers", 2023).

    All keys together are d / 2 wide, all values d.
    """

    layer_name = "GatedLinearAttention"

    def _elements(self) -> int:
        return self.d_model // 2 * self.d_model // self.n_heads


class DeltaNet(FlaMixer):
    """Applies the delta rule (Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024)."""

    layer_name = "DeltaNet"

    def _elements(self) -> int:
        return self.d_model**2 // self.n_heads + _CONV * 3 * self.d_model


class GatedDeltaNet(FlaMixer):
    """Applies the delta rule with decay (Yang et al., "Gated Delta Networks", 2024).

    The layer has (2 + 3 expand_v) d head_dim H weights and a few more. In the source this layer has fewer heads than
    other layers: heads of 256 channels, with head_dim H = 3 d / 4.

    Args:
        d_model, n_heads: as in `Mixer`.
        head_dim: width of a head's keys; d / H if None.
        expand_v: width of its values over that of keys.
    """

    layer_name = "GatedDeltaNet"

    def __init__(self, d_model: int, n_heads: int, *, head_dim: int | None = None, expand_v: float = 2.0):
        self.head_dim, self.expand_v = head_dim, expand_v  # before the layer is made
        super().__init__(d_model, n_heads)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the package's layer."""
        return {"head_dim": self._key_dim(), "expand_v": self.expand_v}

    def _key_dim(self) -> int:
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    def _elements(self) -> int:
        key_dim = self._key_dim()
        keys, values = self.n_heads * key_dim, self.n_heads * int(key_dim * self.expand_v)
        return key_dim * values + _CONV * (2 * keys + values)


class Mamba2(FlaMixer):
    """Mixes by Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024), whose inner width is 2 d.

    Without the package mamba-ssm the layer forms T / 256 tensors of 256 x 256 x H x N numbers. This is slow and needs
    much memory.

    Args:
        d_model, n_heads: as in `Mixer`.
        state_dim: N, states of every inner channel.
    """

    layer_name = "Mamba2"

    def __init__(self, d_model: int, n_heads: int, *, state_dim: int = 128):
        self.state_dim = state_dim  # before the layer is made
        super().__init__(d_model, n_heads)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the package's layer."""
        return {"head_dim": 2 * self.d_model // self.n_heads, "expand": 2, "state_size": self.state_dim}

    def fused(self) -> dict[str, list[int]]:
        """Names `in_proj`, which holds the projections to z, x, B, C and dt; see `Mixer.fused`."""
        return {"layer.in_proj": [2 * self.d_model] * 2 + [self.state_dim] * 2 + [self.n_heads]}

    def _elements(self) -> int:
        return 2 * self.d_model * self.state_dim + _CONV * (2 * self.d_model + 2 * self.state_dim)
