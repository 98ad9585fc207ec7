"""Linear attention: power p = 1, or a feature map with a normalizer: elu + 1, or a Taylor series of the exponential."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import AttentionMixer, HeadOptions
from sympow.layers.base import any_weight
from sympow.layers.documents import document_operator
from sympow.layers.power import check_form, continue_power, initial_memory, memory_size, try_power
from sympow.layers.state import After, Device, DType, MixerState
from sympow.ops import DecodingState, PowerState, power_attention
from sympow.ops.context_parallel import exclusive_sum
from sympow.ops.cost import least_power_flops
from sympow.ops.feature_map import spow, spow_dim
from sympow.ops.running_sums import sums_so_far

FEATURE_MAPS = ("identity", "elu+1", "taylor")


@dataclass
class LinearAttentionState(MixerState):
    """Holds the op's state and the number of tokens so far (int64 [B] if rows differ).

    With a feature map it also holds the sum of the keys' features [B, G, F].
    """

    counters: ClassVar[tuple[str, ...] | None] = ("position",)

    memory: PowerState | DecodingState
    position: int | Tensor
    feature_sum: Tensor | None


class LinearAttention(AttentionMixer):
    """Computes linear attention without a gate (Katharopoulos et al., 2020); with a gate it is `PowerAttention(p=1)`.

    Args:
        d_model, n_heads: as in `AttentionMixer`.
        feature_map: "identity": weights are q . k, and `head_norm` is on unless it is given. "elu+1": weights
            are phi(q) . phi(k) with phi(x) = elu(x) + 1 > 0, divided by their sum. "taylor": weights are
            1 + s + s^2 / 2 > 0 with s = q . k / sqrt(K), divided by their sum (Arora et al., "Based", 2024; K is 16
            there). There are (K + 1) (K + 2) / 2 features, those of p = 2 of keys with one more channel.
        rotation: "fixed" or "none". Features of elu + 1 are rotated in the numerator alone, so that the sum
            of the weights stays positive (Su et al., 2021, section 3.3).
        chunk_size: as in `sympow.ops.power_attention`.
        impl: as in `sympow.ops.power_attention`.
        **heads: options of `AttentionMixer`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        feature_map: str = "identity",
        rotation: str = "fixed",
        chunk_size: int | None = None,
        impl: str = "auto",
        **heads: Unpack[HeadOptions],
    ):
        heads.setdefault("head_norm", feature_map == "identity")
        super().__init__(d_model, n_heads, rotation=rotation, **heads)
        if feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map is one of {', '.join(FEATURE_MAPS)}; got {feature_map!r}")
        check_form(chunk_size, impl)
        self.feature_map, self.chunk_size, self.impl = feature_map, chunk_size, impl
        self.features = spow_dim(self.head_dim + 1, 2) if feature_map == "taylor" else self.head_dim
        self.reset_parameters()

    @override
    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if self.feature_map == "taylor":
            return self._mix_by_power(x, cu_seqlens)
        q, k, v, features = self._inputs(x, self.first_position(x))
        split = {"cu_seqlens": cu_seqlens, "context_group": self.context_group}
        y = power_attention(q, k, v, **self._options() | split).out
        return y if features is None else _normalized(y, features[0], self._sums(features[1], cu_seqlens))

    def _mix_by_power(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Computes `mix` of a Taylor series without its features, because 1 + s + s^2 / 2 = ((s + 1)^2 + 1) / 2.

        The squares are power attention of q and k with one more channel, and the ones add up all values.
        """
        q, k, v = self.rotated_heads(x, self.first_position(x))
        q, k, v = _with_one(q), _with_one(k), F.pad(v, (0, 1), value=1.0)  # the last value counts the weights
        split = {"cu_seqlens": cu_seqlens, "context_group": self.context_group}
        # A sixteenth of the squares, as float16 ends at 65,504.
        squares = power_attention(q, k, v, **self._options() | {"p": 2, "scale": 0.25} | split).out
        sums = self._sums(v, cu_seqlens)[:, :, :, None]
        total = 16 * squares.to(sums.dtype).unflatten(2, (self.n_kv_heads, -1)) + sums
        return (total[..., :-1] / (total[..., -1:] + 2e-6)).flatten(2, 3).to(squares.dtype)

    def _sums(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Returns the sum of x [B, T, G, C] up to every token of its document, in float32 at least."""
        sums = _sums_per_document(cu_seqlens, x.to(torch.promote_types(x.dtype, torch.float32)))
        if self.context_group is None:
            return sums
        return sums + exclusive_sum(sums[:, -1], self.context_group)[:, None]

    @override
    def mix_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> LinearAttentionState:
        device = any_weight(self, self.out).device if device is None else torch.device(device)
        memory = initial_memory(self, 1, self.impl, batch_size, device, dtype, key_dim=self.features)
        feature_sum = None if self.feature_map == "identity" else torch.zeros_like(memory.z)
        return LinearAttentionState(memory, 0, feature_sum)

    @override
    def mix_step(self, x: Tensor, state: LinearAttentionState) -> tuple[Tensor, LinearAttentionState]:
        q, k, v, features = self._inputs(x, state.position)
        y, memory = continue_power(q, k, v, None, state.memory, **self._options())
        y, sums = self._divided(y, features, state)
        feature_sum = None if sums is None else sums[:, -1].clone()  # a view would hold all sums
        return y, LinearAttentionState(memory, state.position + x.shape[1], feature_sum)

    @override
    def try_mix_step(self, x: Tensor, state: LinearAttentionState, **extras: Tensor | None) -> tuple[Tensor, After]:
        q, k, v, features = self._inputs(x, state.position)
        y, memory = try_power(q, k, v, None, state.memory, **self._options())
        y, sums = self._divided(y, features, state)

        def after(n: int) -> LinearAttentionState:
            feature_sum = state.feature_sum if sums is None or n == 0 else sums[:, n - 1].clone()
            return LinearAttentionState(memory(n), state.position + n, feature_sum)

        return y, after

    @override
    def mix_state_size(self, context: int) -> int:
        feature_sum = 0 if self.feature_map == "identity" else self.features
        return memory_size(self, 1, self.impl, key_dim=self.features) + self.n_kv_heads * feature_sum

    @override
    def training_flops(self, time: int) -> int:
        key_dim, value_dim, p = self.features, self.value_dim, 1
        if self.feature_map == "taylor":
            key_dim, value_dim, p = self.head_dim + 1, self.value_dim + 1, 2
        return least_power_flops(time, key_dim, value_dim, p, heads=self.n_heads, kv_heads=self.n_kv_heads)

    @override
    def split_context(self, group: dist.ProcessGroup) -> None:
        self.context_group = group

    def _inputs(self, x: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Returns q and k for the op, v, and with a feature map the features of q and k that sums are made of.

        Features of elu + 1 are rotated for the op alone. Those of "taylor" are made of rotated q and k.
        """
        if self.feature_map == "identity":
            return *self.rotated_heads(x, position), None
        if self.feature_map == "taylor":
            q, k, v = self.rotated_heads(x, position)
            q, k = _taylor_features(q), _taylor_features(k)
            return q, k, v, (q, k)
        q, k, v = self.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return *self.rotate(q, k, position), v, (q, k)

    @override
    def magnified(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Changes nothing with elu + 1: the sums of the weights, which divide, know of no rotation."""
        return (q, k) if self.feature_map == "elu+1" else super().magnified(q, k)

    def _divided(
        self, y: Tensor, features: tuple[Tensor, Tensor] | None, state: LinearAttentionState
    ) -> tuple[Tensor, Tensor | None]:
        """Returns y divided by the sums of the weights, and the sums of the keys' features [B, T, G, K], if any."""
        if features is None or state.feature_sum is None:
            return y, None
        q, k = features
        sums = state.feature_sum[:, None] + _running_sum(k)
        return _normalized(y, q, sums), sums

    def _options(self) -> dict[str, Any]:
        scale = None if self.feature_map == "identity" else 1.0
        options = {"chunk_size": self.chunk_size, "impl": self.impl}
        return {"p": 1, "normalize": False, "scale": scale, **options}


def _taylor_features(x: Tensor) -> Tensor:
    """Returns phi [..., F] of x [..., K] with phi(q) . phi(k) = 1 + s + s^2 / 2 for s = q . k / sqrt(K).

    The features of p = 2 of [x, 1] give (s + 1)^2 = s^2 + 2 s + 1. All but the last, 1, are divided by sqrt(2).
    """
    return F.pad(spow(_with_one(x), 2)[..., :-1] / sqrt(2), (0, 1), value=1.0)


def _with_one(x: Tensor) -> Tensor:
    """Returns x [..., K] times K^(-1/4), and a channel of ones: products of two are s + 1."""
    return F.pad(x * x.shape[-1] ** -0.25, (0, 1), value=1.0)


def _running_sum(k: Tensor) -> Tensor:
    """Returns the sum of k [B, T, G, K] up to every token, in float32 at least."""
    sums = sums_so_far(k.flatten(2)).unflatten(2, k.shape[2:])
    return sums.to(torch.promote_types(k.dtype, torch.float32))


_sums_per_document = document_operator(_running_sum)


def _normalized(y: Tensor, q: Tensor, sums: Tensor) -> Tensor:
    """Returns y [B, T, H, V] divided by q [B, T, H, K] . sums [B, T, G, K], the sum of the weights."""
    grouped = q.to(sums.dtype).unflatten(2, (sums.shape[2], -1))
    weight = (grouped * sums[:, :, :, None]).sum(-1).flatten(2)
    return (y / (weight[..., None] + 1e-6)).to(y.dtype)
