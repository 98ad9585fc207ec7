"""Causal softmax attention, the baseline: a token sees all earlier tokens, and the state grows with their number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import AttentionMixer, HeadOptions, Projections
from sympow.layers.base import any_weight, state_options
from sympow.layers.cache import KVCache, capacity, reads_rows
from sympow.layers.documents import document_operator
from sympow.layers.float32_linear import Float32Linear
from sympow.layers.gate_channels import gated_key_dim, gated_keys, gated_queries, limited, with_gates
from sympow.layers.initial import gate_biases
from sympow.layers.state import After, Device, DType, MixerState
from sympow.ops.availability import check_float64, concatenated, without_autocast
from sympow.ops.cost import softmax_flops
from sympow.ops.fused.step_products import LOG_SIGMOID
from sympow.ops.running_sums import sums_so_far
from sympow.ops.types import check_flags

# Elements of a mask formed at once, where new tokens attend to cached and to new ones.
MASK_ELEMENTS = 1 << 23


@dataclass
class GatedCache(MixerState):
    """Holds keys, values and the sum L of log_g, float64 [B, G]. The last channels of a key hold L up to this key."""

    counters: ClassVar[tuple[str, ...] | None] = ()

    cache: KVCache
    log_sum: Tensor


class GatedScores(AttentionMixer):
    """Computes softmax attention, with a gate on the scores if it is asked for.

    Args:
        d_model, n_heads: as in `AttentionMixer`.
        gate: adds log sigmoid(W x + b) of every later token to a token's scores, for each key/value head (Lin et al.,
            "Forgetting Transformer", 2025): the gate of `PowerAttention`.
        gate_bias: as in `PowerAttention`.
        rotation: "fixed" or "none".
        **heads: options of `AttentionMixer`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate: bool = False,
        gate_bias: Sequence[float] = (1.0, 8.0),
        rotation: str = "fixed",
        **heads: Unpack[HeadOptions],
    ):
        super().__init__(d_model, n_heads, rotation=rotation, **heads)
        check_flags(gate=gate)
        gate_biases(gate_bias, self.n_kv_heads)  # refuses wrong values here, not at the first use
        self.gate_bias = tuple(gate_bias)
        self.gate = Float32Linear(d_model, self.n_kv_heads) if gate else None
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        if self.gate is not None and self.gate.bias is not None:
            with torch.no_grad():
                self.gate.bias.copy_(gate_biases(self.gate_bias, self.n_kv_heads))

    def heads_of_step(self, x: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor, Any, Tensor | None]:
        """Returns what a step attends with.

        Args:
            x: [B, T', d].
            state: a cache, or a `GatedCache` if there is a gate.

        Returns:
            q [B, H, T', K'], k [B, G, T', K'] and v [B, G, T', V], in which a gate has channels of its own; the cache;
            and the sum of log_g up to every token [B, T', G], None without a gate.

        Raises TypeError for a state with a gate if the layer has none, and the other way round.
        """
        heads = self.rotated_heads(x, self.position_of(state))
        return self.heads_in(state, heads, None if self.gate is None else F.logsigmoid(self.gate(x)))

    @override
    def narrow_maps(self) -> list[tuple[Float32Linear, int, float]]:
        return [] if self.gate is None else [(self.gate, LOG_SIGMOID, 1.0)]

    @override
    def position_of(self, state: Any) -> int | Tensor:
        """Returns the tokens in a cache. Raises TypeError for a state with a gate if the layer has none, and so on."""
        if isinstance(state, GatedCache) != (self.gate is not None):
            one, other = ("out", "one") if self.gate is not None else ("", "none")
            raise TypeError(f"the state was made by a layer with{one} a gate; this one has {other}")
        return state.length if self.gate is None else state.cache.length

    def heads_of_projections(
        self, projections: Projections, state: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any, Tensor | None]:
        """Returns `heads_of_step` of a token whose projections are given."""
        heads = self.turned_heads(projections.qkv, self.position_of(state), projections.turned)
        return self.heads_in(state, heads, next(iter(projections.numbers), None))

    def heads_in(
        self, state: Any, heads: tuple[Tensor, Tensor, Tensor], log_g: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Any, Tensor | None]:
        """Returns `heads_of_step` of rotated heads [B, T', H or G, K or V] and gates [B, T', G]."""
        q, k, v = heads
        if log_g is None:
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), state, None
        cache, sums = state.cache, sums_so_far(limited(log_g), state.log_sum)
        q, k = gated_queries(q.to(cache.k.dtype)), gated_keys(k.to(cache.k.dtype), sums)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), cache, sums

    def attend_in(self, cache: KVCache, q: Tensor) -> Tensor:
        """Returns the outputs [B, H, T', V] of q [B, H, T', K], the queries of the last T' tokens in a cache."""
        length = cache.length if isinstance(cache.length, Tensor) else None
        q, scale = q.to(cache.k.dtype), self.head_dim**-0.5
        one_each = q.shape[2] == 1 and not torch.compiler.is_compiling()  # which does not know the lengths
        if length is not None and cache.limit is None and one_each and reads_rows(q.device):
            rows = zip(q.split(1), cache.k.split(1), cache.v.split(1), length.tolist(), strict=True)
            return concatenated([attend(a, k[:, :, :n], v[:, :, :n], scale=scale) for a, k, v, n in rows])
        return attend_to_past(q, *cache.filled(), length=length, scale=scale)

    def zero_sums(self, cache: KVCache) -> Tensor:
        """Returns the sums of gates before the first token, float64 [B, G]."""
        check_float64(cache.k.device)
        return torch.zeros(len(cache.k), self.n_kv_heads, dtype=torch.float64, device=cache.k.device)

    def cache_size(self, tokens: int) -> int:
        """Returns the elements of a cache with room for so many tokens, and of the sums of gates."""
        if self.gate is None:
            return self.n_kv_heads * (self.head_dim + self.value_dim) * tokens
        return self.n_kv_heads * ((gated_key_dim(self.head_dim) + self.value_dim) * tokens + 1)


class SoftmaxAttention(GatedScores):
    """Computes attention by `torch.nn.functional.scaled_dot_product_attention`, rotary, with a key/value cache.

    Packed documents are computed one after another. Options as in `GatedScores`.
    """

    @override
    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = self.rotated_heads(x)
        if self.gate is None:
            return _causal(cu_seqlens, q, k, v)
        log_g = F.logsigmoid(self.gate(x))
        return _gated(cu_seqlens, q, k, v, log_g)

    @override
    def mix_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> KVCache | GatedCache:
        cache = empty_cache(self, batch_size, device, dtype)
        return cache if self.gate is None else GatedCache(cache, self.zero_sums(cache))

    @override
    def mix_step(self, x: Tensor, state: KVCache | GatedCache) -> tuple[Tensor, KVCache | GatedCache]:
        return self._held(self._stepped(self.heads_of_step(x, state), x.dtype))

    @override
    def mix_few(self, projections: Projections, state: Any) -> tuple[Tensor, KVCache | GatedCache]:
        heads = self.heads_of_projections(projections, state)
        return self._held(self._stepped(heads, projections.qkv.dtype))

    @staticmethod
    def _held(stepped: tuple[Tensor, KVCache, KVCache, Tensor | None]) -> tuple[Tensor, KVCache | GatedCache]:
        """Returns the heads' outputs and the state after what `_stepped` has read."""
        y, _, cache, sums = stepped
        return y, cache if sums is None else GatedCache(cache, sums[:, -1].clone())  # a view would hold all sums

    @override
    def try_mix_step(self, x: Tensor, state: Any, **extras: Tensor | None) -> tuple[Tensor, After]:
        y, before, cache, sums = self._stepped(self.heads_of_step(x, state), x.dtype)
        if sums is None:
            return y, partial(_cut, before, cache)
        sums = torch.cat([state.log_sum[:, None], sums], dim=1)
        return y, lambda n: GatedCache(_cut(before, cache, n), sums[:, n].clone())

    @override
    def mix_state_size(self, context: int) -> int:
        return self.cache_size(capacity(context))

    @override
    def training_flops(self, time: int) -> int:
        return both_ways(time, self)

    def _stepped(
        self, heads: tuple[Tensor, Tensor, Tensor, Any, Tensor | None], dtype: torch.dtype
    ) -> tuple[Tensor, KVCache, KVCache, Tensor | None]:
        """Returns the heads' outputs, the cache before and after the step, and the sums, of `heads_of_step`."""
        q, k, v, before, sums = heads
        cache = before.extend(k, v)
        with nullcontext() if sums is None else without_autocast(q):  # it would round the sums in the keys
            y = self.attend_in(cache, q)
        return y.transpose(1, 2).to(dtype), before, cache, sums


def both_ways(time: int, mixer: AttentionMixer, window: int | None = None) -> int:
    """Returns `softmax_flops` of one row, forward and backward."""
    key_dim, value_dim, heads = mixer.head_dim, mixer.value_dim, mixer.n_heads
    ways = (softmax_flops(time, key_dim, value_dim, window=window, heads=heads, backward=b) for b in (False, True))
    return sum(ways)


def gated_attention(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor) -> Tensor:
    """Computes causal softmax attention with scores q_i . k_j / sqrt(K) + L_i - L_j, L = cumsum(log_g).

    Args:
        q: [B, T, H, K].
        k: [B, T, G, K].
        v: [B, T, G, V].
        log_g: [B, T, G], natural logarithms of the gates, float32 or float64.

    Returns:
        [B, T, H, V].
    """
    scale, value_dim = q.shape[-1] ** -0.5, v.shape[-1]
    q, k = with_gates(q, k, log_g)
    if value_dim < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - value_dim))  # some kernels need values that are as wide as keys
    with without_autocast(q):  # it would round the sums in the keys
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, scale=scale)
    return y[..., :value_dim].transpose(1, 2)


_gated = document_operator(gated_attention)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Returns softmax(scale q k^T) v for q [B, H, T, K], k [B, G, S, K] and v [B, G, S, V].

    `scale` is 1 / sqrt(K) if None.
    """
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def attend_to_past(
    q: Tensor, k: Tensor, v: Tensor, *, length: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Computes causal attention of the last T of S tokens; see `attend`.

    Args:
        q: [B, H, T, K].
        k: [B, G, S, K].
        v: [B, G, S, V].
        length: int64 [B], the tokens of every row, of which the queries are the last; None: all rows have S tokens.
            If T is 1, it may be more than S: all S keys are then seen.
        scale: the factor of the scores; 1 / sqrt(K) if None.
    """
    new, total = q.shape[2], k.shape[2]
    if new == 1:
        seen = None if length is None else torch.arange(total, device=q.device) < length[:, None, None, None]
        return attend(q, k, v, mask=seen, scale=scale)
    if length is None and new == total:
        return attend(q, k, v, causal=True, scale=scale)
    position = torch.arange(total, device=q.device)
    ends = torch.arange(1 - new, 1, device=q.device) + (total if length is None else length[:, None, None])
    rows = 1 if length is None else len(length)  # of the mask
    blocks = q.split(max(1, MASK_ELEMENTS // (total * rows)), dim=2)
    outs = []
    for block, end in zip(blocks, ends.split(blocks[0].shape[2], dim=-1), strict=True):
        outs.append(attend(block, k, v, mask=position < end[..., None], scale=scale))
    return concatenated(outs, dim=2)


def empty_cache(
    mixer: AttentionMixer,
    batch_size: int,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    limit: int | None = None,
) -> KVCache:
    """Returns the cache of `mixer` before the first token; see `Mixer.init_state`. Keys have the channels of a gate."""
    options = state_options(any_weight(mixer, mixer.out), device, dtype)
    gated = isinstance(mixer, GatedScores) and mixer.gate is not None
    key_dim = gated_key_dim(mixer.head_dim) if gated else mixer.head_dim
    k = torch.empty(batch_size, mixer.n_kv_heads, 0, key_dim, **options)
    v = torch.empty(batch_size, mixer.n_kv_heads, 0, mixer.value_dim, **options)
    return KVCache(k, v, limit=limit)


def _cut(before: KVCache, after: Any, n: int) -> KVCache:
    """Returns the cache `before` with the first n of the tokens that `after` has in addition."""
    return before if n == 0 else replace(after, length=before.length + n)


@document_operator
def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Maps [B, T, H, K], [B, T, G, K], [B, T, G, V] to [B, T, H, V]."""
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True).transpose(1, 2)
