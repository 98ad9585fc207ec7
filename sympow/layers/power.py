"""Power attention as a layer: gated, and rotated by fixed or data-dependent positions (conformal)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import BLOCK, AttentionMixer, HeadOptions, Projections
from sympow.layers.base import any_weight, is_plain, state_options
from sympow.layers.float32_linear import Float32Linear, linears_float32
from sympow.layers.initial import gate_biases
from sympow.layers.state import After, Device, DType, MixerState
from sympow.ops import (
    DecodingState,
    PowerState,
    Rotation,
    power_attention,
    power_attention_step,
    prefers_tail,
    rotary_positions,
)
from sympow.ops.availability import check_float64
from sympow.ops.context_parallel import exclusive_sum
from sympow.ops.cost import least_power_flops
from sympow.ops.decoding import try_on_state
from sympow.ops.decoding_state import tail_elements
from sympow.ops.feature_map import spow_dim
from sympow.ops.fused.step_products import LOG_SIGMOID, NOTHING
from sympow.ops.power import check_options, plain
from sympow.ops.types import check_flags, checked_chunk_size

IMPLS = ("auto", "eager", "triton", "reference")  # of the op
TINY_EPS = 1e-9  # an eps below it hides no rounding error of the state


@dataclass
class PowerAttentionState(MixerState):
    """Holds the state of the op, and the position of the next token for the rotation.

    The position is the number of tokens so far (int64 [B] where rows differ), or float64 [B, G] if data-dependent.
    """

    counters: ClassVar[tuple[str, ...] | None] = ("position",)

    memory: PowerState | DecodingState
    position: int | Tensor


class PowerAttention(AttentionMixer):
    """Computes power attention (M1)-(M5) with a gate (M16) and a rotation (M13)-(M15).

    Its state does not grow.

    By default the three optional parts of `AttentionMixer` are on: a short convolution of 4 taps before the attention,
    a norm of every head's output, and an output gate. A quarter of the channels of queries and keys is rotated. Without
    these parts the layer hardly learns to use its context: docs/decisions/0007-block.md.

    Args:
        d_model, n_heads: as in `AttentionMixer`.
        p: the power; the state has spow_dim(K, p) rows of V values for each key/value head.
        gate: multiplies the past of every key/value head by sigmoid(W x + b) at every token.
        gate_bias: the initial biases b of the first and the last key/value head. Those between lie on a line; a
            single head starts at the middle. A head with bias b remembers about exp(b) tokens, so (1, 8) spreads
            the heads over memories of a few to a few thousand tokens.
        rotation: "fixed": positions advance by 1 at every token. "data": positions advance by 1 + tanh(r W x) (M14). W
            starts at 0, so the initial rotation is that of "fixed". "none": no rotation.
        position_rate: r. A position is a sum over all earlier tokens, and Adam moves every weight by about the learning
            rate, so positions can change fast in training. With r below 1 they change more slowly by this factor.
        initial_score: the score (M1) that every pair of a query and a key starts with (before `qk_norm`); for even p
            and with `bias` only. Attention then starts as an average of the past, as softmax attention does. The buffer
            `qkv_start`, a constant that is added to queries and keys, produces this score. So a framework that sets the
            biases of linear layers to 0 does not remove the score. Why: docs/decisions/0006-start-of-training.md.
        normalize: divides by the sum of the weights and `eps` (M5), for even p only; None: True for even p. Without it,
            keep `head_norm`, because sums of weights grow with the context.
        eps: the number that is added to the sum of the weights; 1 is the weight of a token with score 1. It bounds the
            gradient if all visible tokens have small weights. The sources have 1e-6.
        chunk_size: as in `sympow.ops.power_attention`.
        impl: as in `sympow.ops.power_attention`.
        **heads: options of `AttentionMixer`, with other defaults: short_convolution 4, head_norm and output_gate
            True, rotary_fraction 1/4.
    """

    rotations: ClassVar[tuple[str, ...]] = ("data", "fixed", "none")

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        p: int = 2,
        gate: bool = True,
        gate_bias: Sequence[float] = (1.0, 8.0),
        rotation: str = "fixed",
        position_rate: float = 0.1,
        initial_score: float = 1.0,
        normalize: bool | None = None,
        eps: float = 1.0,
        chunk_size: int | None = None,
        impl: str = "auto",
        **heads: Unpack[HeadOptions],
    ):
        super().__init__(d_model, n_heads, rotation=rotation, **(BLOCK | heads))
        p, chunk_size = plain(p), plain(chunk_size)
        check_options(p, None, False if normalize is None else normalize, eps)
        check_form(chunk_size, impl)
        check_flags(gate=gate)
        gate_biases(gate_bias, self.n_kv_heads)  # refuses wrong values here, not at the first use
        if not (math.isfinite(initial_score) and initial_score >= 0):
            raise ValueError(f"initial_score must be finite and not negative; got {initial_score}")
        if not (math.isfinite(position_rate) and position_rate > 0):
            raise ValueError(f"position_rate must be positive and finite; got {position_rate}")
        self.p, self.chunk_size, self.impl = p, chunk_size, impl
        self.position_rate = position_rate
        self.normalize = p % 2 == 0 if normalize is None else normalize
        self.gate_bias, self.initial_score, self.eps = tuple(gate_bias), initial_score, eps
        self.gate = Float32Linear(d_model, self.n_kv_heads) if gate else None
        self.beta = Float32Linear(d_model, self.n_kv_heads, bias=False) if rotation == "data" else None
        starts = p % 2 == 0 and initial_score > 0 and self.qkv.bias is not None
        self.qkv_start: Tensor | None
        self.register_buffer("qkv_start", torch.empty(sum(self._split)) if starts else None)
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        with torch.no_grad():
            if self.qkv_start is not None and not self.qkv_start.is_meta:
                # The channels with the lowest frequencies are used, so that the score is nearly the same at long
                # distances. Several channels are used, because the rounding error of one large value would be the same
                # for all tokens.
                qk = self.qkv_start.zero_()[: (self.n_heads + self.n_kv_heads) * self.head_dim].view(-1, self.head_dim)
                channels = max(1, self.head_dim // 8)
                qk[:, -channels:] = (self.initial_score * self.head_dim**0.5 / channels) ** 0.5
            if self.gate is not None and self.gate.bias is not None:
                self.gate.bias.copy_(gate_biases(self.gate_bias, self.n_kv_heads))
            if self.beta is not None:
                # The gradient of W is that of beta times x, so zeros learn; tanh is steepest there.
                self.beta.weight.zero_()

    def projected(self, x: Tensor) -> Tensor:
        """Projects x [B, T, d] and adds `qkv_start`, the source of the initial score: [B, T, H K + G K + G V]."""
        if self.qkv_start is None:
            return self.qkv(x)
        if is_plain(self.qkv, nn.Linear):
            return F.linear(x, self.qkv.weight, self.qkv.bias + self.qkv_start)  # without another pass over all tokens
        y = self.qkv(x)
        return y + self.qkv_start.to(y.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        bias, start = state_dict.get(f"{prefix}qkv.bias"), f"{prefix}qkv_start"
        if self.qkv_start is not None and bias is not None and start not in state_dict:
            # Older weights, whose biases hold the start.
            state_dict[start] = torch.zeros(self.qkv_start.shape, dtype=bias.dtype, device=bias.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @override
    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        by_op = self.takes_rotation(cu_seqlens)
        q, k, v, log_g, positions = self._inputs(x, self.first_position(x), self.context_group, detached=by_op)
        rotation = None if positions is None or not by_op else Rotation(*self._turns(x, positions))
        split = {"cu_seqlens": cu_seqlens, "context_group": self.context_group}
        return power_attention(q, k, v, log_g, rotation=rotation, **self._options() | split).out

    def takes_rotation(self, cu_seqlens: Tensor | None) -> bool:
        """Returns whether the op computes the gradient of data-dependent positions: for whole rows, in training."""
        whole = cu_seqlens is None and self.context_group is None
        return self.rotation == "data" and whole and torch.is_grad_enabled()

    @override
    def mix_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> PowerAttentionState:
        device = any_weight(self, self.out).device if device is None else torch.device(device)
        position: int | Tensor = 0
        if self.rotation == "data":
            check_float64(device)
            position = torch.zeros(batch_size, self.n_kv_heads, dtype=torch.float64, device=device)
        memory = initial_memory(self, self.p, self.impl, batch_size, device, dtype, self.eps)
        return PowerAttentionState(memory, position)

    @override
    def mix_step(self, x: Tensor, state: PowerAttentionState) -> tuple[Tensor, PowerAttentionState]:
        q, k, v, log_g, positions = self._inputs(x, state.position)
        y, memory = continue_power(q, k, v, log_g, state.memory, **self._options())
        return y, PowerAttentionState(memory, _moved(state.position, positions, x.shape[1]))

    @override
    def narrow_maps(self) -> list[tuple[Float32Linear, int, float]]:
        maps = ((self.gate, LOG_SIGMOID, 1.0), (self.beta, NOTHING, 1.0))
        return [(linear, function, factor) for linear, function, factor in maps if linear is not None]

    @override
    def position_of(self, state: PowerAttentionState) -> int | Tensor:
        return state.position if self.beta is not None else _counted(state.position)

    @override
    def mix_few(self, projections: Projections, state: PowerAttentionState) -> tuple[Tensor, PowerAttentionState]:
        numbers, positions = projections.numbers, None
        log_g = None if self.gate is None else numbers[0]
        if self.beta is not None:
            positions = self._positions(numbers[-1], state.position)
            q, k, v = self.turned_heads(projections.qkv, positions)
        else:
            q, k, v = self.turned_heads(projections.qkv, state.position, projections.turned)
        y, memory = continue_power(q, k, v, log_g, state.memory, **self._options())
        if projections.position is not None:
            return y, PowerAttentionState(memory, projections.position)
        return y, PowerAttentionState(memory, _moved(state.position, positions, 1))

    @override
    def try_mix_step(self, x: Tensor, state: PowerAttentionState, **extras: Tensor | None) -> tuple[Tensor, After]:
        q, k, v, log_g, positions = self._inputs(x, state.position)
        y, memory = try_power(q, k, v, log_g, state.memory, **self._options())
        return y, lambda n: PowerAttentionState(memory(n), _moved(state.position, positions, n))

    @override
    def mix_state_size(self, context: int) -> int:
        position = self.n_kv_heads if self.rotation == "data" else 0
        return memory_size(self, self.p, self.impl, self.eps) + position

    @override
    def training_flops(self, time: int) -> int:
        sizes = {"heads": self.n_heads, "kv_heads": self.n_kv_heads}
        return least_power_flops(time, self.head_dim, self.value_dim, self.p, self.gate is not None, **sizes)

    @override
    def split_context(self, group: dist.ProcessGroup) -> None:
        self.context_group = group

    def _inputs(
        self, x: Tensor, position: int | Tensor, group: dist.ProcessGroup | None = None, detached: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns rotated q and k, v, log_g, and data-dependent positions after every token of x [B, T, G].

        It takes the position before x, or the ranks that hold it. If `detached`, no gradient flows from q and k to the
        positions.
        """
        gates = linears_float32([linear for linear in (self.gate, self.beta) if linear is not None], x)
        log_g = None if self.gate is None else F.logsigmoid(gates[0])
        if self.beta is not None:
            positions = self._positions(gates[-1], position, group)
            return *self.rotated_heads(x, positions.detach() if detached else positions), log_g, positions
        return *self.rotated_heads(x, _counted(position)), log_g, None

    def _positions(self, raw: Tensor, position: int | Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Returns the positions after every token for `raw` = W x [B, T, G], see `_inputs`."""
        start = position if isinstance(position, Tensor) else None
        steps = 1 + torch.tanh(self.position_rate * raw)
        if group is not None:
            start = exclusive_sum(steps.sum(1, dtype=torch.float64), group)
        return rotary_positions(steps, start)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("p", "normalize", "eps", "chunk_size", "impl")}


def _counted(position: int | Tensor) -> int | Tensor:
    """Returns a number of tokens. Raises TypeError for data-dependent positions."""
    if isinstance(position, Tensor) and position.is_floating_point():
        raise TypeError("the state was made by a layer with a data-dependent rotation; this one has none")
    return position


def _moved(position: int | Tensor, positions: Tensor | None, n: int) -> int | Tensor:
    """Returns the position n tokens later. Data-dependent positions [B, T, G] are those after every token."""
    if positions is None:
        return position + n
    return positions[:, n - 1].clone() if n else position  # a view would hold all positions


def check_form(chunk_size: int | None, impl: str) -> None:
    """Refuses, with a ValueError, values of `chunk_size` and `impl` that no call of the op takes."""
    checked_chunk_size(chunk_size)
    if impl not in IMPLS:
        raise ValueError(f"impl is one of {', '.join(IMPLS)}; got {impl!r}")


def initial_memory(
    mixer: AttentionMixer,
    p: int,
    impl: str,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype | None,
    eps: float = 1.0,
    key_dim: int | None = None,
) -> PowerState | DecodingState:
    """Returns the op's state before the first token, with a tail where decoding is faster or more exact on one.

    `key_dim` is that of the keys that the op gets; None: the mixer's head_dim.
    """
    weight = any_weight(mixer, mixer.out)
    dtype = weight.dtype if dtype is None else dtype
    shape = (batch_size, mixer.n_kv_heads, key_dim or mixer.head_dim, mixer.value_dim)
    state = PowerState.zeros(*shape, p, **state_options(weight, device, dtype, sums=True))
    if not keeps_tail(impl, device, dtype, eps):
        return state
    return DecodingState.from_state(state, dtype=torch.promote_types(dtype, weight.dtype))


def memory_size(mixer: AttentionMixer, p: int, impl: str, eps: float = 1.0, key_dim: int | None = None) -> int:
    """Returns the elements per sequence in the result of `initial_memory`, for the weights' device and dtype."""
    weight, key_dim = any_weight(mixer, mixer.out), key_dim or mixer.head_dim
    size = spow_dim(key_dim, p) * (mixer.value_dim + 1)
    if keeps_tail(impl, weight.device, weight.dtype, eps):
        size += tail_elements(key_dim, mixer.value_dim, p)
    return mixer.n_kv_heads * size


def keeps_tail(impl: str, device: torch.device, dtype: torch.dtype, eps: float) -> bool:
    """Returns whether decoding keeps the last tokens in a tail.

    A tail is faster on devices with kernels. With an `eps` below `TINY_EPS` it is also more exact: where all weights of
    a row are small, such as the only weight of the first token, products with the state lose them by cancellation.
    """
    return impl == "triton" or (impl == "auto" and (eps < TINY_EPS or prefers_tail(device, dtype)))


def continue_power(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | DecodingState,
    *,
    chunk_size: int | None,
    **options: Any,
) -> tuple[Tensor, PowerState | DecodingState]:
    """Continues `state`. Where gradients are off, a state with a tail and that of a single token change in place."""
    if q.shape[1] == 1 and not torch.is_grad_enabled():
        return power_attention_step(q, k, v, log_g, state=state, inplace=True, **options)
    before = state.folded() if isinstance(state, DecodingState) else state
    options |= {"initial_state": before, "return_state": True, "chunk_size": chunk_size}
    out, after = power_attention(q, k, v, log_g, **options)
    if after is None:
        raise RuntimeError("the op returned no state where one was asked for")
    if not isinstance(state, DecodingState):
        return out, after
    if torch.is_grad_enabled():
        return out, state.continued(after)
    state.put(after, later=True)  # in place, so that the states of all layers are in memory only once
    return out, state


def try_power(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | DecodingState,
    *,
    impl: str,
    chunk_size: int | None,
    **options: Any,
) -> tuple[Tensor, After]:
    """Continues `state` by tokens that stay in a tail until it is known which of them count, see `After`."""
    time = q.shape[1]
    if isinstance(state, DecodingState) and time <= state.capacity:
        out, tail = power_attention_step(q, k, v, log_g, state=state, inplace=True, impl=impl, **options)
        return out, partial(_rolled_back, tail, time)
    before = state.folded() if isinstance(state, DecodingState) else state
    out, folded = try_on_state(q, k, v, log_g, before, **options)
    if impl == "reference":
        out = power_attention_step(q, k, v, log_g, state=before, impl=impl, **options).out

    def after(n: int) -> PowerState | DecodingState:
        if n == 0:
            return state
        if isinstance(state, PowerState):
            return folded(n)
        return state.continued(folded(n))

    return out, after


def _rolled_back(tail: DecodingState, time: int, n: int) -> DecodingState:
    """Returns the tail with the first n of its last `time` tokens."""
    tail.rollback(time - n)
    return tail
