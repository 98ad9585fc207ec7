"""Tensor parallelism: heads and hidden channels of the MLP are split over ranks, each with its part of the weights.

A rank computes blocks with fewer heads. The sum of mixer and MLP outputs over the ranks is the output of whole blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sympow.layers.attention import AttentionMixer
from sympow.layers.registry import mixer_class
from sympow.models import MixerConfig, ModelConfig
from sympow.models.bodies.base import PreNormBlock

# Biases that are added once, and not by every rank.
_ONCE = ("mixer.out.bias", "mlp_out.bias")


def rank_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Makes the configuration of the blocks of one of several ranks.

    Args:
        config: the model.
        ranks: how many share a layer.

    Raises ValueError for mixers that cannot be split, and for heads or an MLP that the ranks do not divide.
    """
    if ranks == 1:
        return config
    width = "mlp_hidden" if config.has("mlp_hidden") else "mlp_ratio"
    mlp = config.mlp_width if width == "mlp_hidden" else config.mlp_ratio
    parts = {"n_heads": _share("n_heads", config.n_heads, ranks), width: _share(width, mlp, ranks)}
    mixers = []
    for layer, mixer in enumerate(config.mixers):
        found = mixer_class(mixer.name)
        if not issubclass(found, AttentionMixer) or found.own_output:
            raise ValueError(f"tensor parallelism splits key/value heads; it cannot split the {mixer.name} mixer")
        options = config.mixer_options(layer)
        kv_heads = _share("n_kv_heads", options.get("n_kv_heads") or config.n_heads, ranks)
        head_dim = options.get("head_dim") or config.d_model // config.n_heads
        mixers.append(MixerConfig(mixer.name, options | {"n_kv_heads": kv_heads, "head_dim": head_dim}))
    fields: dict[str, Any] = {**parts, "mixers": tuple(mixers), "n_kv_heads": None}
    return replace(config, **fields)


def rank_part(name: str, whole: Tensor, own: Tensor, block: PreNormBlock, rank: int, ranks: int) -> Tensor:
    """Cuts the part of a rank out of a block's weight.

    Args:
        name: the name of the weight in the block.
        whole: the weight of the whole model.
        own: the rank's weight, whose shape shows which dimension is split.
        block: the rank's block.
        rank: the number of the rank, 0 to ranks - 1.
        ranks: the number of ranks that share a layer.
    """
    if name in _ONCE and rank > 0:
        return torch.zeros_like(whole)
    for axis, (size, part) in enumerate(zip(whole.shape, own.shape, strict=True)):
        if size != part:
            pieces = whole.split(_pieces(name, block, size, ranks), axis)
            return torch.cat([piece.chunk(ranks, axis)[rank] for piece in pieces], axis)
    return whole


def _pieces(name: str, block: PreNormBlock, size: int, ranks: int) -> list[int]:
    """Returns the lengths of those parts of a weight that are split separately."""
    mixer: Any = block.mixer
    if name.startswith("mixer.qkv"):
        keys, values = mixer.head_dim * mixer.n_kv_heads, mixer.value_dim * mixer.n_kv_heads
        return [ranks * width for width in (mixer.head_dim * mixer.n_heads, keys, values)]
    if name == "mlp_in.weight" and block.mlp_out.in_features < block.mlp_in.out_features:
        return [size // 2] * 2  # those of the gate, and those it multiplies
    return [size]


def _share(name: str, value: int, ranks: int) -> int:
    if value % ranks:
        raise ValueError(f"tensor parallelism over {ranks} ranks needs {name} to be a multiple of that; got {value}")
    return value // ranks
