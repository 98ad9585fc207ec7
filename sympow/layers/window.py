"""Sliding-window softmax attention: a token sees the last w tokens, itself included.

The state holds at most w tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import HeadOptions, Projections
from sympow.layers.cache import WindowCache, capacity
from sympow.layers.documents import document_operator
from sympow.layers.flex_window import flex_attend_in_window, suits_flex
from sympow.layers.gate_channels import with_gates
from sympow.layers.softmax import GatedCache, GatedScores, attend, attend_to_past, both_ways, empty_cache
from sympow.layers.state import After, Device, DType
from sympow.ops.availability import concatenated, is_exporting, without_autocast
from sympow.ops.runtime.launcher import ALL_DEVICES, operator

# Queries in a block. One attention call computes a block with all keys that it sees.
LEAST_BLOCK, MOST_BLOCK = 128, 1024


@dataclass
class GatedWindowCache(GatedCache):
    """Holds the last tokens of a window with a gate."""

    cache: WindowCache


class WindowAttention(GatedScores):
    """Computes softmax attention over the last `window` tokens, rotary.

    In half precision on a GPU a compiled flex_attention computes it. The window includes the token itself.

    Args:
        d_model, n_heads: as in `AttentionMixer`.
        window: the number of tokens, at least 1.
        gate, gate_bias, rotation: as in `GatedScores`.
        **heads: options of `AttentionMixer`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        window: int,
        gate: bool = False,
        gate_bias: Sequence[float] = (1.0, 8.0),
        rotation: str = "fixed",
        **heads: Unpack[HeadOptions],
    ):
        self.window = checked_window(window)
        super().__init__(d_model, n_heads, gate=gate, gate_bias=gate_bias, rotation=rotation, **heads)

    @override
    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = self.rotated_heads(x)
        gates = [] if self.gate is None else [F.logsigmoid(self.gate(x))]
        if cu_seqlens is None and suits_flex(q, v) and x.shape[1] > self.window:
            return _windowed(flex_attend_in_window, q, k, v, *gates, self.window)
        return _near(cu_seqlens, q, k, v, *gates, window=self.window)

    @override
    def mix_state(
        self, batch_size: int, *, device: Device = None, dtype: DType = None
    ) -> WindowCache | GatedWindowCache:
        empty = empty_cache(self, batch_size, device, dtype)
        cache = WindowCache(empty.k, empty.v, limit=self.window)
        return cache if self.gate is None else GatedWindowCache(cache, self.zero_sums(cache))

    @override
    def mix_step(
        self, x: Tensor, state: WindowCache | GatedWindowCache
    ) -> tuple[Tensor, WindowCache | GatedWindowCache]:
        return self._mixed(self.heads_of_step(x, state), x.dtype)

    @override
    def mix_few(self, projections: Projections, state: Any) -> tuple[Tensor, WindowCache | GatedWindowCache]:
        return self._mixed(self.heads_of_projections(projections, state), projections.qkv.dtype)

    def _mixed(
        self, heads: tuple[Tensor, Tensor, Tensor, Any, Tensor | None], dtype: torch.dtype
    ) -> tuple[Tensor, WindowCache | GatedWindowCache]:
        """Returns `mix_step` of what `heads_of_step` returns."""
        q, k, v, cache, sums = heads
        with nullcontext() if sums is None else without_autocast(q):  # it would round the sums in the keys
            y, cache = self._continued(cache, q, k, v)
        return y.transpose(1, 2).to(dtype), cache if sums is None else GatedWindowCache(cache, sums[:, -1].clone())

    @override
    def try_mix_step(self, x: Tensor, state: Any, **extras: Tensor | None) -> tuple[Tensor, After]:
        q, k, v, cache, sums = self.heads_of_step(x, state)
        with nullcontext() if sums is None else without_autocast(x):
            y = self._behind(cache, q, k, v).transpose(1, 2).to(x.dtype)

        def after(n: int) -> WindowCache | GatedWindowCache:
            held = cache.extend(k[:, :, :n], v[:, :, :n]) if n else cache
            if sums is None:
                return held
            return GatedWindowCache(held, sums[:, n - 1].clone() if n else state.log_sum)

        return y, after

    @override
    def mix_state_size(self, context: int) -> int:
        return self.cache_size(capacity(context, self.window))

    @override
    def training_flops(self, time: int) -> int:
        return both_ways(time, self, self.window)

    def _continued(self, cache: WindowCache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, WindowCache]:
        """Returns the outputs [B, H, T', V] of q, k, v [B, H or G, T', K or V] behind a cache, and the cache after."""
        if q.shape[2] == 1:
            cache = cache.extend(k, v)
            return self.attend_in(cache, q), cache
        y = self._behind(cache, q, k, v)
        return y, cache.extend(k, v)  # the past was read already, because the cache may overwrite it

    def _behind(self, past: WindowCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns the outputs [B, H, T', V] of q, k, v [B, H or G, T', K or V], which follow the tokens of `past`."""
        if isinstance(past.length, Tensor):
            return self._behind_rows(past, past.length, q, k, v)
        seen = min(past.length, self.window - 1)
        past_k, past_v = (held[:, :, held.shape[2] - seen :] for held in past.ordered())
        k_seen = concatenated([past_k, k.to(past_k.dtype)], dim=2)
        v_seen = concatenated([past_v, v.to(past_v.dtype)], dim=2)
        return attend_in_window(q.to(k_seen.dtype), k_seen, v_seen, self.window, self.head_dim**-0.5)

    def _behind_rows(self, past: WindowCache, length: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns what `_behind` does, for rows that have read different numbers of tokens, `length` [B]."""
        scale = self.head_dim**-0.5
        past_k, past_v, held = past.ordered_rows(length)
        k, v, q = k.to(past_k.dtype), v.to(past_v.dtype), q.to(past_k.dtype)
        first = min(q.shape[2], self.window - 1)  # tokens that may see the past
        place = torch.arange(first, device=q.device)[:, None]
        age = place + past_k.shape[2] - torch.arange(past_k.shape[2], device=q.device)
        seen_past = held[:, None] & (age < self.window)
        seen = torch.cat([seen_past, (place >= place.T).expand(len(q), -1, -1)], dim=2)[:, None]
        keys = concatenated([past_k, k[:, :, :first]], dim=2)
        values = concatenated([past_v, v[:, :, :first]], dim=2)
        outs = [attend(q[:, :, :first], keys, values, mask=seen, scale=scale)] if first else []
        if first < q.shape[2]:
            outs.append(attend_in_window(q[:, :, first:], k, v, self.window, scale))
        return concatenated(outs, dim=2)


def _windowed(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Maps [B, T, H, K], [B, T, G, K], [B, T, G, V], log_g [B, T, G] of a gate, and the window to [B, T, H, V]."""
    *gates, window = rest
    scale = q.shape[-1] ** -0.5
    if gates:
        q, k = with_gates(q, k, *gates)
    with without_autocast(q) if gates else nullcontext():  # it would round the sums in the keys
        y = attend(*(part.transpose(1, 2) for part in (q, k, v)), window, scale)
    return y.transpose(1, 2)


@document_operator
def _near(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Computes `_windowed` in plain torch. Documents have too many lengths for flex_attention."""
    return _windowed(attend_in_window, q, k, v, *rest)


def checked_window(window: int) -> int:
    """Returns the number of tokens of a window; ValueError for anything but an integer of at least 1."""
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be an integer of at least 1; got {window!r}")
    return window


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None) -> Tensor:
    """Computes softmax attention of the last T of S tokens, each to the last `window` tokens up to itself.

    Queries are computed in blocks, so time is linear in T, and the scores of only one block are in memory at a time.

    Args:
        q: [B, H, T, K].
        k: [B, G, S, K], S >= T.
        v: [B, G, S, V].
        window: tokens that a token sees, itself included.
        scale: the factor of the scores; 1 / sqrt(K) if None.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if is_exporting():  # one graph for all lengths, whose masks are as large as the scores
        return attend(q, k, v, mask=_band(q.shape[2], k.shape[2], window, q), scale=scale)
    if k.shape[2] <= window:
        return attend_to_past(q, k, v, scale=scale)
    if torch.compiler.is_dynamo_compiling():  # a trace of the loop over blocks would be of one length only
        return window_attention(q, k, v, window, scale)
    return _in_blocks(q, k, v, window, scale)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
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
        outs.append(attend(piece, key, value, mask=masks[shape], scale=scale))
    return concatenated(outs, dim=2)


@operator(lambda dout, q, k, v, window, scale: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
          devices=ALL_DEVICES)  # fmt: skip
def window_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dq, dk and dv, and the forward again."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        dq, dk, dv = torch.autograd.grad(_in_blocks(q, k, v, window, scale), (q, k, v), dout)
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def _keep(ctx, inputs, output):
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


@operator(
    lambda q, k, v, window, scale: q.new_empty(*q.shape[:3], v.shape[3]),
    _keep,
    lambda ctx, dout: (*window_attention_backward(dout, *ctx.saved_tensors, ctx.window, ctx.scale), None, None),
    devices=ALL_DEVICES,
)
def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Computes `attend_in_window` block by block, as one operator for torch.compile."""
    return _in_blocks(q, k, v, window, scale).contiguous()


def _band(new: int, total: int, window: int, like: Tensor) -> Tensor:
    """Returns [new, total]: 0 where one of the last `new` of `total` tokens sees another, -inf where not."""
    position = torch.arange(total, device=like.device)
    distance = position[total - new :, None] - position
    seen = (distance >= 0) & (distance < window)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -torch.inf)
