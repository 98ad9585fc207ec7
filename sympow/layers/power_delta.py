"""Power attention with the delta rule as a layer: tokens correct what the state remembers, instead of adding to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import BLOCK, AttentionMixer, HeadOptions, Projections
from sympow.layers.base import any_weight, state_options
from sympow.layers.float32_linear import Float32Linear, linears_float32
from sympow.layers.initial import MOST_BIAS, gate_biases
from sympow.layers.power import check_form
from sympow.layers.state import Device, DType, MixerState
from sympow.ops import power_delta_rule, power_delta_rule_step
from sympow.ops.cost import least_power_flops
from sympow.ops.feature_map import spow_dim
from sympow.ops.fused.step_products import LOG_SIGMOID, SIGMOID
from sympow.ops.fused.unit_heads import unit_heads
from sympow.ops.power import check_options
from sympow.ops.types import check_flags

MOST_ROUNDED = 1.9  # beta for keys whose norm is rounded to 16 bits


@dataclass
class PowerDeltaState(MixerState):
    """Holds the state of the op, [B, G, D, V], and the number of tokens so far (int64 [B] where rows differ)."""

    counters: ClassVar[tuple[str, ...] | None] = ("position",)

    memory: Tensor
    position: int | Tensor


class PowerDeltaAttention(AttentionMixer):
    """Computes the delta rule on the state of power attention (M19), (M20), with a gate (M16) and a rotation (M15).

    A token writes v - S^T phi(k), the error of what the state returns for its key, times beta. So a key that comes
    again replaces its value, and the state holds more values than a sum does. p = 1 is the gated delta rule. The state
    does not grow, and is that of `PowerAttention` without the normalizer.

    Queries and keys have norm 1. There is no division by a sum of weights, so every head's output is normed. By default
    the layer has the short convolution and the output gate that `PowerAttention` has, too.

    Args:
        d_model, n_heads: as in `AttentionMixer`.
        p: the power; the state has spow_dim(K, p) rows of V values for each key/value head.
        gate: multiplies the past of every key/value head by sigmoid(W x + b) at every token.
        gate_bias: the initial biases b of the first and the last key/value head, as in `PowerAttention`.
        beta: None: learned, beta_max times sigmoid(W x + b), for every key/value head and token. A number: that number.
        beta_bias: the initial bias b of a learned beta.
        beta_max: the largest value of a learned beta, at most 2. Above 1 a token can write more than its error. For
            16-bit queries and keys every beta is at most 1.9: their rounded norms would let the state grow.
        offset: c >= 0 of scores ((q . k + c) / (1 + c))**p of queries and keys of norm 1. Their last channel holds it,
            so the state keeps its size, and that channel must not be rotated. With p > 1 and c = 0 a score has no
            gradient where query and key are orthogonal, as most are at the start of training.
        rotation: "fixed" or "none".
        chunk_size: as in `sympow.ops.power_delta_rule`.
        impl: as in `sympow.ops.power_delta_rule`.
        **heads: options of `AttentionMixer`, with other defaults: short_convolution 4, head_norm and output_gate
            True, rotary_fraction 1/4.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        p: int = 2,
        gate: bool = True,
        gate_bias: Sequence[float] = (1.0, 8.0),
        beta: float | None = None,
        beta_bias: float = 0.0,
        beta_max: float = 1.0,
        offset: float = 0.0,
        rotation: str = "fixed",
        chunk_size: int | None = None,
        impl: str = "auto",
        **heads: Unpack[HeadOptions],
    ):
        super().__init__(d_model, n_heads, rotation=rotation, **(BLOCK | heads))
        check_options(p, None, False, 1.0)
        check_form(chunk_size, impl)
        check_flags(gate=gate)
        gate_biases(gate_bias, self.n_kv_heads)  # refuses wrong values here, not at the first use
        for name, number in (("beta", beta), ("beta_max", beta_max)):
            if number is not None and not 0 < number <= 2:
                raise ValueError(f"{name} must be above 0 and at most 2, or the state can grow; got {number}")
        if not -MOST_BIAS <= beta_bias <= MOST_BIAS:
            raise ValueError(f"beta_bias must be finite, and at most {MOST_BIAS:g} in size; got {beta_bias}")
        if not (math.isfinite(offset) and offset >= 0):
            raise ValueError(f"offset must be finite and not negative; got {offset}")
        turned = 0 if rotation == "none" else self.rotary_dim or self.head_dim
        if offset and (self.head_dim < 2 or turned == self.head_dim):
            raise ValueError(
                "offset takes the last channel of queries and keys: it needs head_dim of at least 2, and a "
                "rotary_fraction that leaves this channel, or rotation='none'; got "
                f"head_dim={self.head_dim}, {rotation=}, {turned} rotated channels"
            )
        if beta is not None and (beta_bias, beta_max) != (0.0, 1.0):
            raise ValueError("beta_bias and beta_max are of a learned beta; leave beta None")
        self.p, self.chunk_size, self.impl = p, chunk_size, impl
        self.gate_bias = tuple(gate_bias)
        self.beta, self.beta_bias, self.beta_max, self.offset = beta, beta_bias, beta_max, offset
        self.gate = Float32Linear(d_model, self.n_kv_heads) if gate else None
        self.strength = Float32Linear(d_model, self.n_kv_heads) if beta is None else None
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        with torch.no_grad():
            if self.gate is not None and self.gate.bias is not None:
                self.gate.bias.copy_(gate_biases(self.gate_bias, self.n_kv_heads))
            if self.strength is not None and self.strength.bias is not None:
                self.strength.bias.fill_(self.beta_bias)

    @override
    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return power_delta_rule(*self._inputs(x, 0), cu_seqlens=cu_seqlens, **self._options()).out

    @override
    def mix_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> PowerDeltaState:
        shape = (batch_size, self.n_kv_heads, spow_dim(self.head_dim, self.p), self.value_dim)
        options = state_options(any_weight(self, self.out), device, dtype, sums=True)
        return PowerDeltaState(torch.zeros(shape, **options), 0)

    @override
    def mix_step(self, x: Tensor, state: PowerDeltaState) -> tuple[Tensor, PowerDeltaState]:
        return self._continued(self._inputs(x, state.position), state, state.position + x.shape[1])

    @override
    def narrow_maps(self) -> list[tuple[Float32Linear, int, float]]:
        maps = ((self.gate, LOG_SIGMOID, 1.0), (self.strength, SIGMOID, self.beta_max))
        return [(linear, function, factor) for linear, function, factor in maps if linear is not None]

    @override
    def position_of(self, state: PowerDeltaState) -> int | Tensor:
        return state.position

    @override
    def mix_few(self, projections: Projections, state: PowerDeltaState) -> tuple[Tensor, PowerDeltaState]:
        numbers, position = list(projections.numbers), projections.position
        log_g = None if self.gate is None else numbers.pop(0)
        heads = self.turned_heads(projections.qkv, state.position, projections.turned)
        inputs = self._inputs_of(heads, numbers.pop(0) if numbers else None, log_g)
        return self._continued(inputs, state, state.position + 1 if position is None else position)

    def _continued(
        self, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], state: PowerDeltaState, position: Any
    ) -> tuple[Tensor, PowerDeltaState]:
        """Continues a state by what `_inputs` returns; `position` is that of the next token."""
        if inputs[0].shape[1] == 1 and not torch.is_grad_enabled():
            options: dict[str, Any] = {"p": self.p, "qk_norm": not self.offset, "inplace": True}
            y, memory = power_delta_rule_step(*inputs, state=state.memory, **options)
        else:
            y, memory = power_delta_rule(*inputs, initial_state=state.memory, return_state=True, **self._options())
        if memory is None:
            raise RuntimeError("the op returned no state where one was asked for")
        return y, PowerDeltaState(memory, position)

    @override
    def mix_state_size(self, context: int) -> int:
        return self.n_kv_heads * spow_dim(self.head_dim, self.p) * self.value_dim

    def training_flops(self, time: int) -> int:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`.

        Products within a chunk and with the state are those of power attention with one more query head for every
        key/value head.
        """
        sizes = {"heads": self.n_heads + self.n_kv_heads, "kv_heads": self.n_kv_heads}
        return least_power_flops(time, self.head_dim, self.value_dim, self.p, self.gate is not None, **sizes)

    @override
    def magnified(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Multiplies q and k: keys are compared with keys, too, and the norm of both follows."""
        return self.stretched(q, self.magnitude), self.stretched(k, self.magnitude)

    def _options(self) -> dict[str, Any]:
        return {"p": self.p, "qk_norm": not self.offset, "chunk_size": self.chunk_size, "impl": self.impl}

    def _inputs(self, x: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Returns rotated q and k, v, beta and log_g of x [B, T, d], whose first token is at `position`."""
        linears = [linear for linear in (self.gate, self.strength) if linear is not None]
        numbers = list(linears_float32(linears, x)) if linears else []
        log_g = None if self.gate is None else F.logsigmoid(numbers.pop(0))
        beta = self.beta_max * torch.sigmoid(numbers.pop(0)) if numbers else None
        return self._inputs_of(self.rotated_heads(x, position), beta, log_g)

    def _inputs_of(
        self, heads: tuple[Tensor, Tensor, Tensor], beta: Tensor | None, log_g: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Returns `_inputs` of rotated heads and of the learned beta, None for one that is not learned."""
        q, k, v = heads
        if self.offset:
            q, k = map(self._with_offset, unit_heads(q[..., :-1], k[..., :-1]))
        if beta is None:
            beta = torch.full(
                k.shape[:3], self.beta or 0.0, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device
            )
        if max(self.beta or 0.0, self.beta_max) > MOST_ROUNDED and k.dtype.itemsize == 2:
            beta = beta.clamp(max=MOST_ROUNDED)
        return q, k, v, beta, log_g

    def _with_offset(self, unit: Tensor) -> Tensor:
        """Returns vectors of norm 1 [..., K] for vectors of norm 1 [..., K - 1], with the offset in the last channel.

        A product of two is (a . b + c) / (1 + c). Vectors that are shorter, because all of their channels are almost 0,
        stay as short. Both weights are at most 1, so no number leaves the range of its dtype.
        """
        wide = torch.promote_types(unit.dtype, torch.float32)
        norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True, dtype=wide)
        own, last = (math.sqrt(part / (1 + self.offset)) for part in (1, self.offset))
        return torch.cat([own * unit, (last * norm).to(unit.dtype)], dim=-1)
