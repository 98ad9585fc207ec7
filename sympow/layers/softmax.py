"""Causal softmax attention, the baseline: a token sees all before it, and the state grows with them."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.layers.base import AttentionMixer, HeadOptions, per_document, state_options
from sympow.layers.cache import KVCache, capacity
from sympow.ops.cost import softmax_flops

# Elements of a mask formed at once, where new tokens attend to cached and to new ones.
MASK_ELEMENTS = 1 << 23


class SoftmaxAttention(AttentionMixer):
    """Attention by `torch.nn.functional.scaled_dot_product_attention`, rotary, with a key/value cache.

    Packed documents are computed one after another.

    Args:
        rotation: "fixed" or "none".
        **heads: options of `AttentionMixer`.
    """

    def __init__(self, d_model: int, n_heads: int, *, rotation: str = "fixed", **heads: Unpack[HeadOptions]):
        super().__init__(d_model, n_heads, rotation=rotation, **heads)
        self.reset_parameters()

    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = self.rotated_heads(x)
        return per_document(_causal, cu_seqlens, q, k, v)

    def mix_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> KVCache:
        return empty_cache(self, batch_size, device, dtype)

    def mix_step(self, x: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        q, k, v = self.rotated_heads(x, state.length)
        state = state.extend(k.transpose(1, 2), v.transpose(1, 2))
        y = attend_to_past(q.transpose(1, 2).to(state.k.dtype), *state.filled())
        return y.transpose(1, 2).to(x.dtype), state

    def mix_state_size(self, context: int) -> int:
        return self.n_kv_heads * (self.head_dim + self.value_dim) * capacity(context)

    def training_flops(self, time: int) -> int:
        return both_ways(time, self)


def both_ways(time: int, mixer: AttentionMixer, window: int | None = None) -> int:
    """`softmax_flops` of one row, forward and backward."""
    key_dim, value_dim, heads = mixer.head_dim, mixer.value_dim, mixer.n_heads
    ways = (softmax_flops(time, key_dim, value_dim, window=window, heads=heads, backward=b) for b in (False, True))
    return sum(ways)


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(K)) v for q [B, H, T, K], k [B, G, S, K], v [B, G, S, V]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def attend_to_past(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T of S tokens: q [B, H, T, K], k [B, G, S, K], v [B, G, S, V]."""
    new, total = q.shape[2], k.shape[2]
    if new == 1 or new == total:
        return attend(q, k, v, causal=new > 1)
    position = torch.arange(total, device=q.device)
    blocks = q.split(max(1, MASK_ELEMENTS // total), dim=2)
    rows = position[total - new :].split(blocks[0].shape[2])
    outs = [attend(block, k, v, mask=row[:, None] >= position) for block, row in zip(blocks, rows, strict=True)]
    return torch.cat(outs, dim=2)


def empty_cache(
    mixer: AttentionMixer,
    batch_size: int,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    limit: int | None = None,
) -> KVCache:
    """The cache of `mixer` before the first token; see `Mixer.init_state`."""
    options = state_options(mixer.out.weight, device, dtype)
    k = torch.empty(batch_size, mixer.n_kv_heads, 0, mixer.head_dim, **options)
    v = torch.empty(batch_size, mixer.n_kv_heads, 0, mixer.value_dim, **options)
    return KVCache(k, v, limit=limit)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, T, H, K], [B, T, G, K], [B, T, G, V] -> [B, T, H, V]."""
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True).transpose(1, 2)
