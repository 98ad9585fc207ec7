"""Blocked-window softmax attention: the sequence is cut into blocks, and a token sees its own block up to itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import AttentionMixer, HeadOptions
from sympow.layers.cache import KVCache, capacity
from sympow.layers.documents import document_operator
from sympow.layers.softmax import attend, attend_to_past, both_ways, empty_cache
from sympow.layers.state import Device, DType, MixerState
from sympow.layers.window import checked_window
from sympow.ops.availability import concatenated


@dataclass
class BlockedWindowState(MixerState):
    """Holds keys and values of the block of the last token, and the tokens so far."""

    counted: ClassVar[tuple[str, ...]] = ("position",)

    block: KVCache
    position: int


class BlockedWindowAttention(AttentionMixer):
    """Attends by softmax within blocks of `window` tokens, rotary (Child et al., "Sparse Transformers", 2019, 4).

    The first block starts with the sequence, or with its document.

    Args:
        d_model, n_heads: as in `AttentionMixer`.
        window: the number of tokens, at least 1.
        rotation: "fixed" or "none".
        **heads: options of `AttentionMixer`.
    """

    def __init__(
        self, d_model: int, n_heads: int, *, window: int, rotation: str = "fixed", **heads: Unpack[HeadOptions]
    ):
        super().__init__(d_model, n_heads, rotation=rotation, **heads)
        self.window = checked_window(window)
        self.reset_parameters()

    @override
    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = self.rotated_heads(x)
        return _blocked(cu_seqlens, q, k, v, window=self.window)

    @override
    def mix_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> BlockedWindowState:
        return BlockedWindowState(empty_cache(self, batch_size, device, dtype, limit=self.window), 0)

    @override
    def mix_step(self, x: Tensor, state: BlockedWindowState) -> tuple[Tensor, BlockedWindowState]:
        q, k, v = self.rotated_heads(x, state.position)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        block, position, outs = state.block, state.position, []
        while k.shape[2]:
            inside = position % self.window
            if inside == 0:
                block = KVCache(block.k[:, :, :0].clone(), block.v[:, :, :0].clone(), limit=self.window)
            taken = min(self.window - inside, k.shape[2])
            block = block.extend(k[:, :, :taken], v[:, :, :taken])
            outs.append(attend_to_past(q[:, :, :taken].to(block.k.dtype), *block.filled()))
            q, k, v = q[:, :, taken:], k[:, :, taken:], v[:, :, taken:]
            position += taken
        y = concatenated(outs, dim=2).transpose(1, 2).to(x.dtype)
        return y, BlockedWindowState(block, position)

    @override
    def mix_state_size(self, context: int) -> int:
        held = (context - 1) % self.window + 1 if context else 0
        return self.n_kv_heads * (self.head_dim + self.value_dim) * capacity(held, self.window)

    @override
    def training_flops(self, time: int) -> int:
        whole, rest = time // self.window, time % self.window
        return whole * both_ways(self.window, self) + (both_ways(rest, self) if rest else 0)


@document_operator
def _blocked(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Maps [B, T, H, K], [B, T, G, K], [B, T, G, V] to [B, T, H, V]."""
    batch, time = q.shape[:2]
    width = min(window, time)
    missing = -time % width  # filled up at the end, where no token of the sequence looks
    shape = ((time + missing) // width, width)
    blocks = (F.pad(part, (0, 0, 0, 0, 0, missing)).unflatten(1, shape).flatten(0, 1) for part in (q, k, v))
    y = attend(*(block.transpose(1, 2) for block in blocks), causal=True)
    return y.transpose(1, 2).unflatten(0, (batch, shape[0])).flatten(1, 2)[:, :time]
