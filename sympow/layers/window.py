"""Sliding-window softmax attention: a token sees the last w tokens, itself included.

The state holds at most w tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from sympow.layers.attention import AttentionMixer, HeadOptions
from sympow.layers.cache import KVCache, WindowCache, capacity
from sympow.layers.documents import per_document
from sympow.layers.flex_window import flex_attend_in_window, suits_flex
from sympow.layers.softmax import attend, attend_to_past, both_ways, empty_cache
from sympow.layers.state import After
from sympow.ops.availability import concatenated, is_exporting
from sympow.ops.runtime.launcher import ALL_DEVICES, operator

# Queries in a block. One attention call computes a block with all keys that it sees.
LEAST_BLOCK, MOST_BLOCK = 128, 1024


class WindowMixer(AttentionMixer):
    """Attends by softmax to `window` tokens at most. A subclass chooses these tokens.

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
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be an integer of at least 1; got {window!r}")
        self.window = window
        self.reset_parameters()


class WindowAttention(WindowMixer):
    """Computes softmax attention over the last `window` tokens, rotary.

    In half precision on a GPU a compiled flex_attention computes it.

    The window includes the token itself. Options as in `WindowMixer`.
    """

    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Returns the heads' outputs [B, T, H, V]; see `AttentionMixer.mix`."""
        q, k, v = self.rotated_heads(x)
        if cu_seqlens is None and suits_flex(q, v) and x.shape[1] > self.window:  # documents have too many lengths
            y = flex_attend_in_window(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.window)
            return y.transpose(1, 2)
        return per_document(self._windowed, cu_seqlens, q, k, v)

    def mix_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> WindowCache:
        """Returns the state of `mix_step` before the first token; see `AttentionMixer.mix_state`."""
        empty = empty_cache(self, batch_size, device, dtype)
        return WindowCache(empty.k, empty.v, limit=self.window)

    def mix_step(self, x: Tensor, state: WindowCache) -> tuple[Tensor, WindowCache]:
        """Continues `mix` by x [B, T', d]; see `AttentionMixer.mix_step`."""
        q, k, v = self.rotated_heads(x, state.length)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(state.length, Tensor) and x.shape[1] == 1:
            held_k, held_v, seen = state.of_one_more(k, v, state.length)
            y = attend(q.to(held_k.dtype), held_k, held_v, mask=seen)
            state = replace(state, length=state.length + 1)
        elif isinstance(state.length, Tensor):
            y = self._behind_rows(state, state.length, q, k, v)
            state = state.of_more(k, v, state.length)
        elif x.shape[1] == 1:
            state = state.extend(k, v)
            y = attend(q.to(state.k.dtype), *state.filled())
        else:
            y = self._behind(state, q, k, v)
            state = state.extend(k, v)  # the past was read already, because the cache may overwrite it
        return y.transpose(1, 2).to(x.dtype), state

    def try_mix_step(self, x: Tensor, state: WindowCache, **extras: Tensor | None) -> tuple[Tensor, After]:
        """Continues `mix` by tokens that can still be taken back; see `AttentionMixer.try_mix_step`."""
        q, k, v = (part.transpose(1, 2) for part in self.rotated_heads(x, state.length))
        y = self._behind(state, q, k, v).transpose(1, 2).to(x.dtype)
        return y, lambda n: state.extend(k[:, :, :n], v[:, :, :n]) if n else state

    def mix_state_size(self, context: int) -> int:
        """Returns the number of elements of the state of `mix_step`; see `AttentionMixer.mix_state_size`."""
        return self.n_kv_heads * (self.head_dim + self.value_dim) * capacity(context, self.window)

    def training_flops(self, time: int) -> int:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`."""
        return both_ways(time, self, self.window)

    def _behind(self, past: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns the outputs [B, H, T', V] of q, k, v [B, H or G, T', K or V], which follow the tokens of `past`."""
        seen = min(past.length, self.window - 1)
        past_k, past_v = (held[:, :, held.shape[2] - seen :] for held in past.ordered())
        k_seen = concatenated([past_k, k.to(past_k.dtype)], dim=2)
        v_seen = concatenated([past_v, v.to(past_v.dtype)], dim=2)
        return attend_in_window(q.to(k_seen.dtype), k_seen, v_seen, self.window)

    def _behind_rows(self, past: WindowCache, length: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns what `_behind` does, for rows that have read different numbers of tokens, `length` [B]."""
        past_k, past_v, held = past.ordered_rows(length)
        k, v, q = k.to(past_k.dtype), v.to(past_v.dtype), q.to(past_k.dtype)
        first = min(q.shape[2], self.window - 1)  # tokens that may see the past
        place = torch.arange(first, device=q.device)[:, None]
        age = place + past_k.shape[2] - torch.arange(past_k.shape[2], device=q.device)
        seen_past = held[:, None] & (age < self.window)
        seen = torch.cat([seen_past, (place >= place.T).expand(len(q), -1, -1)], dim=2)[:, None]
        keys = concatenated([past_k, k[:, :, :first]], dim=2)
        values = concatenated([past_v, v[:, :, :first]], dim=2)
        outs = [attend(q[:, :, :first], keys, values, mask=seen)] if first else []
        if first < q.shape[2]:
            outs.append(attend_in_window(q[:, :, first:], k, v, self.window))
        return concatenated(outs, dim=2)

    def _windowed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Maps [B, T, H, K], [B, T, G, K], [B, T, G, V] to [B, T, H, V]."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attend_in_window(q, k, v, self.window).transpose(1, 2)


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Computes softmax attention of the last T of S tokens, each to the last `window` tokens up to itself.

    Queries are computed in blocks, so time is linear in T, and the scores of only one block are in memory at a time.

    Args:
        q: [B, H, T, K].
        k: [B, G, S, K], S >= T.
        v: [B, G, S, V].
        window: tokens that a token sees, itself included.
    """
    if is_exporting():  # one graph for all lengths, whose masks are as large as the scores
        return attend(q, k, v, mask=_band(q.shape[2], k.shape[2], window, q))
    if k.shape[2] <= window:
        return attend_to_past(q, k, v)
    if torch.compiler.is_dynamo_compiling():  # a trace of the loop over blocks would be of one length only
        return window_attention(q, k, v, window)
    return _in_blocks(q, k, v, window)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Computes `attend_in_window` block by block."""
    block = min(max(window, LEAST_BLOCK), MOST_BLOCK)
    reach = -(-(window - 1) // block)  # blocks before its own that a query can see
    queries = q.split(block, dim=2)
    past = k.shape[2] - q.shape[2]
    sizes = ([past] if past else []) + [piece.shape[2] for piece in queries]
    # split, not slices: the gradient of a slice is as long as the whole sequence
    keys, values = k.split(sizes, dim=2), v.split(sizes, dim=2)
    outs: list[Tensor] = []
    # Additive and shared: of a bool mask the backward would keep a float copy for every block.
    masks: dict[tuple[int, int], Tensor] = {}
    for own, piece in enumerate(queries, start=len(keys) - len(queries)):
        seen = slice(0 if past and own <= reach else max(0, own - reach), own + 1)
        key, value = concatenated(keys[seen], dim=2), concatenated(values[seen], dim=2)
        shape = piece.shape[2], key.shape[2]
        if shape not in masks:
            masks[shape] = _band(*shape, window, q)
        outs.append(attend(piece, key, value, mask=masks[shape]))
    return concatenated(outs, dim=2)


@operator(lambda dout, q, k, v, window: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
          devices=ALL_DEVICES)  # fmt: skip
def window_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dq, dk and dv, and the forward again."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        dq, dk, dv = torch.autograd.grad(_in_blocks(q, k, v, window), (q, k, v), dout)
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def _keep(ctx, inputs, output):
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors)


@operator(
    lambda q, k, v, window: q.new_empty(*q.shape[:3], v.shape[3]),
    _keep,
    lambda ctx, dout: (*window_attention_backward(dout, *ctx.saved_tensors, ctx.window), None),
    devices=ALL_DEVICES,
)
def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Computes `attend_in_window` block by block, as one operator for torch.compile."""
    return _in_blocks(q, k, v, window).contiguous()


def _band(new: int, total: int, window: int, like: Tensor) -> Tensor:
    """Returns [new, total]: 0 where one of the last `new` of `total` tokens sees another, -inf where not."""
    position = torch.arange(total, device=like.device)
    distance = position[total - new :, None] - position
    seen = (distance >= 0) & (distance < window)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -torch.inf)
