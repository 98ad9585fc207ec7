"""The base class of mixers with queries, keys and values in heads: `AttentionMixer`.

Axes: B batch, T time, H query heads, G key/value heads (H is a multiple of G), K key dim, V value dim,
d model width.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from sympow.fields import is_integer
from sympow.layers.base import (
    Mixer,
    any_weight,
    is_as_made,
    multiplies,
    own_weight,
    takes_kernels_of_step,
)
from sympow.layers.float32_linear import Float32Linear
from sympow.layers.parallel_branch import parallel_branch
from sympow.layers.short_convolution import DepthwiseConvolution, ShortConvolutionState
from sympow.layers.state import After, Device, DType, MixerState, check_room, of_tried, try_by_copies
from sympow.ops import rotary_frequencies, rotate_alike, rotate_heads
from sympow.ops.availability import check_float64, kept
from sympow.ops.fused.gated_norm import gated_norm
from sympow.ops.fused.short_convolution import MOST_TAPS
from sympow.ops.fused.step_products import (
    Norm,
    Product,
    Shift,
    Taps,
    Turn,
    step_products,
    takes_parts,
)
from sympow.ops.memory import check_memory
from sympow.ops.rope_scaling import magnitude
from sympow.ops.types import OutOfRangeError, check_flags, check_writable


class HeadOptions(TypedDict, total=False):
    """Lists the options of every mixer with heads. `AttentionMixer` documents them."""

    n_kv_heads: int | None
    head_dim: int | None
    value_dim: int | None
    frequencies: str
    max_length: float | None
    rotary_fraction: float
    rope_base: float | None
    rope_scaling: Mapping[str, Any] | None
    qk_norm: bool
    qk_norm_eps: float
    bias: bool
    out_bias: bool | None
    short_convolution: int
    head_norm: bool
    output_gate: bool
    output_gate_bias: bool


_WIDEST = 1 << 16  # channels of a head whose frequencies are made to check them
_SMALL = 1 << 24  # elements of a state; to ask for the free memory takes longer than to make such a state

BLOCK: HeadOptions = {"short_convolution": 4, "head_norm": True, "output_gate": True, "rotary_fraction": 0.25}
"""The options of the parts that power attention has around its heads by default."""


class Projections(NamedTuple):
    """Holds what one kernel computes of an input for `AttentionMixer.mix_few`.

    qkv: [B, 1, H K + G K + G V], with queries and keys rotated if `turned`. numbers: float32 [B, 1, n] for each of
    `AttentionMixer.narrow_maps`. position: that of the next token, None if it was not computed.
    """

    qkv: Tensor
    turned: bool
    numbers: list[Tensor]
    position: Tensor | None


class AttentionMixer(Mixer):
    """Mixes by queries, keys and values in heads, with a rotation.

    A subclass computes `mix`. Three optional parts, which are off by default, can surround it: a short convolution of x
    before `mix`, a norm of every head's output, and an output gate. With all three,

        c = convolution(x),  y = mix(c) in heads,  out = W_o (RMSNorm(y) * silu(W_g c)).

    Args:
        d_model: d.
        n_heads: H.
        n_kv_heads: G, which divides H; H if None. Query heads h G // H share a key/value head.
        head_dim: K; d / H if None.
        value_dim: V; K if None.
        rotation: "fixed" rotates queries and keys by their position (rotary), "none" does not; `rotations` lists the
            rotations of the mixer.
        frequencies: rule of the rotation's frequencies (M13), "standard" or "conformal".
        max_length: N of the conformal rule, the number of tokens of the longest document; for this rule only.
        rotary_fraction: share of the channels of every query and key that are rotated. They are the first channels;
            their number is rounded down to an even number, and is at least 2.
        rope_base: N of the standard rule, 10,000 if None; for this rule only.
        rope_scaling: changes the frequencies of the standard rule for a longer context, as `rope_parameters` of
            Hugging Face transformers does: {"rope_type": "linear", "factor": 4}. The other types are "llama3", "yarn"
            and "factors"; see `sympow.ops.rope_scaling.check_scaling`. None: no change.
        qk_norm: RMSNorm over the channels of every query and key, before the rotation.
        qk_norm_eps: the number that the norm of queries and keys adds to the mean square.
        bias: biases in the input and output projections.
        out_bias: a bias in the output projection; None: the same as `bias`.
        short_convolution: taps of a causal depthwise convolution of x, before all other parts; 0: no convolution.
        head_norm: RMSNorm over the channels of every head's output.
        output_gate: multiply every head's output by silu(W_g c).
        output_gate_bias: multiply by silu(W_g c + b) instead; b starts at 0.

    Raises ValueError for a width that the heads do not divide, for options it does not know, and for weights that are
    larger than the free memory.
    """

    rotations: ClassVar[tuple[str, ...]] = ("fixed", "none")
    # Whether the mixer itself defines the parts after `mix`; then `head_norm` and `output_gate` are refused.
    own_output: ClassVar[bool] = False

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rotation: str = "fixed",
        frequencies: str = "standard",
        max_length: float | None = None,
        rotary_fraction: float = 1.0,
        rope_base: float | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        bias: bool = True,
        out_bias: bool | None = None,
        short_convolution: int = 0,
        head_norm: bool = False,
        output_gate: bool = False,
        output_gate_bias: bool = False,
    ):
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if min(d_model, n_heads, n_kv_heads) < 1 or n_heads % n_kv_heads:
            raise ValueError(
                f"n_heads must be a positive multiple of n_kv_heads, d_model positive; "
                f"got {d_model=}, {n_heads=}, {n_kv_heads=}"
            )
        super().__init__(d_model, n_heads)
        if head_dim is None:
            if d_model % n_heads:
                raise ValueError(
                    f"d_model must be a multiple of n_heads, or head_dim given; got {d_model=}, {n_heads=}"
                )
            head_dim = d_model // n_heads
        value_dim = head_dim if value_dim is None else value_dim
        if min(head_dim, value_dim) < 1:
            raise ValueError(f"head_dim and value_dim must be positive; got {head_dim=}, {value_dim=}")
        self._split = [n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * value_dim]
        weights = torch.get_default_dtype().itemsize * d_model * (sum(self._split) + n_heads * value_dim)
        what = f"a layer with {d_model=:,}, {n_heads=:,}, {head_dim=:,} and {value_dim=:,}"
        check_memory(what, weights, torch.get_default_device())
        if rotation not in self.rotations:
            raise ValueError(f"rotation is one of {', '.join(self.rotations)}; got {rotation!r}")
        if not is_integer(short_convolution) or short_convolution < 0:
            raise ValueError(f"short_convolution is a number of taps, 0 for none; got {short_convolution!r}")
        check_flags(qk_norm=qk_norm, bias=bias, out_bias=bias if out_bias is None else out_bias)
        check_flags(head_norm=head_norm, output_gate=output_gate, output_gate_bias=output_gate_bias)
        if self.own_output and (head_norm or output_gate):
            raise ValueError(f"{type(self).__name__} has an output of its own: no head_norm and no output_gate")
        if output_gate_bias and not output_gate:
            raise ValueError("output_gate_bias is of the output gate: it needs output_gate")
        self.n_kv_heads = n_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.rotation, self.frequencies, self.max_length = rotation, frequencies, max_length
        if not 0 < rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must be above 0 and at most 1; got {rotary_fraction}")
        if not (math.isfinite(qk_norm_eps) and qk_norm_eps > 0):
            raise ValueError(f"qk_norm_eps must be positive and finite; got {qk_norm_eps}")
        self.rope_base = rope_base
        self.rotary_dim = None if rotary_fraction == 1 else max(2, int(rotary_fraction * head_dim) // 2 * 2)
        # Refuses wrong options here and not at the first use. The check runs on the CPU even if modules are made on the
        # meta device, because arithmetic on that device imports torch._dynamo.
        turned = (2, None) if rotation == "none" else (head_dim, self.rotary_dim)
        if head_dim > _WIDEST and head_dim % 2 == 0 and rope_scaling is None:
            turned = (_WIDEST, None)  # the same check without memory: a model is refused by its size, but later
        if rotation == "none" and rope_scaling is not None:
            raise ValueError("rope_scaling is of the rotation; got rotation='none'")
        rotary_frequencies(turned[0], frequencies, max_length, rope_base, turned[1], rope_scaling, device="cpu")
        self.rope_scaling = None if rope_scaling is None else dict(rope_scaling)
        self._scaling_key = None if rope_scaling is None else json.dumps(self.rope_scaling)
        self.magnitude = magnitude(rope_scaling)
        self.convolution = (
            DepthwiseConvolution(d_model, short_convolution, identity=True) if short_convolution else None
        )
        self.qkv = nn.Linear(d_model, sum(self._split), bias=bias)
        self.out = nn.Linear(n_heads * value_dim, d_model, bias=bias if out_bias is None else out_bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm else None
        self.head_norm = nn.RMSNorm(value_dim, eps=1e-6) if head_norm else None
        gate = nn.Linear(d_model, n_heads * value_dim, bias=output_gate_bias) if output_gate else None
        self.output_gate = gate

    @override
    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().reset_parameters(std=std, out_std=out_std, generator=generator)
        if self.convolution is not None:
            self.convolution.reset_parameters(generator)

    @abstractmethod
    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Returns the heads' outputs [B, T, H, V] for x [B, T, d], the output of the convolution."""

    @abstractmethod
    def mix_step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Continues `mix` by x [B, T', d]: the heads' outputs [B, T', H, V], and the state after them."""

    def try_mix_step(self, x: Tensor, state: Any, **extras: Tensor | None) -> tuple[Tensor, After]:
        """Continues `mix` by tokens that can still be taken back, as `try_step` does: y [B, T', H, V]."""
        return try_by_copies(self.mix_step, x, state, extras)

    def position_of(self, state: Any) -> int | Tensor:
        """Returns the position of the next token in a state of `mix_step`. Mixers with `mix_few` override it."""
        raise NotImplementedError(f"{type(self).__name__} has no step by few kernels")

    @abstractmethod
    def mix_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MixerState:
        """Returns the state of `mix_step` before the first token, see `Mixer.init_state`."""

    @abstractmethod
    def mix_state_size(self, context: int) -> int:
        """Counts the elements that the state of `mix_step` holds per sequence after `context` tokens."""

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, **extras: Tensor | None) -> Tensor:
        self.check_input(x, own_weight(self.qkv))
        if self.convolution is not None:
            x = self.convolution(x, cu_seqlens=cu_seqlens, context_group=self.context_group)
        try:
            y = self.mix(x, cu_seqlens, **extras)
        except OutOfRangeError as error:
            raise self.naming_weights(x, error) from error
        return self.output(x, y)

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MixerState:
        size = self.state_size(0)
        if batch_size * size > _SMALL:
            check_room(type(self).__name__, batch_size, size, any_weight(self, self.qkv), device)
        behind = self.mix_state(batch_size, device=device, dtype=dtype)
        if self.convolution is None:
            return behind
        return ShortConvolutionState(self.convolution.init_state(batch_size, device, dtype), behind)

    @override
    def step(self, x: Tensor, state: Any, **extras: Tensor | None) -> tuple[Tensor, Any]:
        self.check_step(x, state, own_weight(self.qkv))
        if self.convolution is None:
            return self._step(x, state, extras)
        x, past = self.convolution.step(x, state.past)
        y, behind = self._step(x, state.behind, extras)
        return y, ShortConvolutionState(past, behind)

    def _step(self, x: Tensor, state: Any, extras: dict[str, Tensor | None]) -> tuple[Tensor, Any]:
        """Continues sequences by the output of the convolution."""
        with parallel_branch(partial(self.output_gates, x), x.device) as gates:
            try:
                y, state = self.mix_step(x, state, **extras)
            except OutOfRangeError as error:
                raise self.naming_weights(x, error) from error
        return self.gated_output(y, gates()), state

    def narrow_maps(self) -> Sequence[tuple[Float32Linear, int, float]] | None:
        """Lists the maps of the input to numbers of heads, each with the function that is applied to its result.

        The functions are those of `step_products`; the last number is the factor of SIGMOID. None: the mixer has no
        `mix_few`.
        """
        return None

    def mix_few(self, projections: Projections, state: Any) -> tuple[Tensor, Any]:
        """Continues `mix` by a token whose projections are given, see `mix_step`."""
        raise NotImplementedError(f"{type(self).__name__} has no step by few kernels")

    @override
    def steps_in_block(self, x: Tensor) -> bool:
        # A subclass may override any part of a step, so it is stepped like this only if it defines `mix_few` itself.
        if not takes_kernels_of_step(x) or "mix_few" not in vars(type(self)):
            return False
        maps = self.narrow_maps()
        if maps is None or not self._is_as_made(maps):
            return False
        parts = [self.qkv, self.out, self.output_gate, self.convolution, self.head_norm, *(each for each, *_ in maps)]
        tensors = [
            tensor for part in parts if part is not None for tensor in (part.weight, getattr(part, "bias", None))
        ]
        return takes_kernels_of_step(x, [*tensors, self._qkv_start()])

    def _is_as_made(self, maps: Sequence[tuple[Float32Linear, int, float]]) -> bool:
        """Tells whether the parts of a step are layers as they were made, of shapes that the kernels take."""
        values, taps, norm = self.n_heads * self.value_dim, self.convolution, self.head_norm
        linears: list[tuple[nn.Module, int, int]]
        linears = [(self.qkv, sum(self._split), self.d_model), (self.out, self.d_model, values)]
        linears += [(each, self.n_kv_heads, self.d_model) for each, *_ in maps]
        linears += [] if self.output_gate is None else [(self.output_gate, values, self.d_model)]
        if not all(multiplies(*linear) for linear in linears):
            return False
        if taps is not None and not (is_as_made(taps, DepthwiseConvolution) and taps.width <= MOST_TAPS):
            return False
        if norm is None:
            return True
        return is_as_made(norm, nn.RMSNorm) and takes_parts(self.value_dim, self.out.weight)

    def _qkv_start(self) -> Tensor | None:
        return getattr(self, "qkv_start", None)

    @override
    def step_in_block(self, x: Tensor, norm: Norm, state: Any) -> tuple[Tensor, Any]:
        self.check_step(x, state, own_weight(self.qkv))
        behind, convolution, gate = state, self.convolution, self.output_gate
        qkv = Product(self.qkv.weight, self.qkv.bias, self._qkv_start())
        gates = None if gate is None else Product(gate.weight, gate.bias)
        maps = self.narrow_maps() or ()
        narrow = [Product(each.weight, each.bias, None, function, factor) for each, function, factor in maps]
        taps = None
        if convolution is not None:
            behind = state.behind
            check_writable(state.past)
            past = state.past if state.past.stride(2) == 1 else state.past.contiguous()
            taps = Taps(convolution.weight, convolution.offset(), past)
        position = self.position_of(behind)
        turn = None
        if self.q_norm is None and self.rotation == "fixed" and (isinstance(position, int) or position.ndim == 1):
            if isinstance(position, int):
                position = torch.full((1,), position, dtype=torch.float64, device=x.device)
            turn = Turn(position, self._frequencies(x.device), sum(self._split[:2]))
        found = step_products(x, qkv, gates, narrow, norm=norm, taps=taps, turn=turn)
        projections = Projections(found.first, turn is not None, found.narrow, found.positions)
        try:
            y, behind = self.mix_few(projections, behind)
        except OutOfRangeError as error:
            raise self.naming_weights(x, error) from error
        heads = None if self.head_norm is None else Norm(self.head_norm.weight, None, 1e-6, False)
        shift = None if taps is None or found.inputs is None else Shift(taps.past, found.inputs)
        out = Product(self.out.weight, self.out.bias)
        y = step_products(y.flatten(2), out, norm=heads, gate=found.second, residual=x.contiguous(), shift=shift).first
        return y, behind if taps is None else ShortConvolutionState(taps.past, behind)

    @override
    def try_step(self, x: Tensor, state: Any, **extras: Tensor | None) -> tuple[Tensor, After]:
        self.check_step(x, state, own_weight(self.qkv))
        if self.convolution is None:
            y, after = self._try_mix_step(x, state, extras)
            return self.output(x, y), of_tried(after, x.shape[1])
        x, past = self.convolution.try_step(x, state.past)
        y, behind = self._try_mix_step(x, state.behind, extras)
        return self.output(x, y), of_tried(lambda n: ShortConvolutionState(past(n), behind(n)), x.shape[1])

    def _try_mix_step(self, x: Tensor, state: Any, extras: dict[str, Tensor | None]) -> tuple[Tensor, After]:
        try:
            return self.try_mix_step(x, state, **extras)
        except OutOfRangeError as error:
            raise self.naming_weights(x, error) from error

    @override
    def state_size(self, context: int) -> int:
        convolution = 0 if self.convolution is None else self.convolution.state_size()
        return self.mix_state_size(context) + convolution

    def fused(self) -> dict[str, list[int]]:
        """Names `qkv`, which holds the projections to queries, keys and values; see `Mixer.fused`."""
        return {"qkv": list(self._split)}

    def output(self, x: Tensor, y: Tensor) -> Tensor:
        """Norms, gates and projects the heads' outputs y [B, T, H, V] of x [B, T, d]: [B, T, d]."""
        return self.gated_output(y, self.output_gates(x))

    def output_gates(self, x: Tensor) -> Tensor | None:
        """Returns the values of the output gate for x [B, T, d], before their activation: [B, T, H V]. None: no gate.

        A CUDA graph of a step computes them in parallel with `mix_step`.
        """
        return None if self.output_gate is None else self.output_gate(x)

    def gated_output(self, y: Tensor, gates: Tensor | None) -> Tensor:
        """Norms, gates and projects the heads' outputs y [B, T, H, V]: [B, T, d]. `gates` is from `output_gates`."""
        weight = None if self.head_norm is None else self.head_norm.weight
        return self.out(gated_norm(y, weight, gates, eps=1e-6))

    def projected(self, x: Tensor) -> Tensor:
        """Projects x [B, T, d] to queries, keys and values of all heads: [B, T, H K + G K + G V]."""
        return self.qkv(x)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects x [B, T, d] to q [B, T, H, K], k [B, T, G, K] and v [B, T, G, V], not yet rotated."""
        return self._heads_of(self.projected(x))

    def _heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `heads` of what `projected` returns."""
        q, k, v = qkv.split(self._split, dim=-1)
        q, k = q.unflatten(-1, (-1, self.head_dim)), k.unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        if self.rotation != "none" and torch.is_grad_enabled():
            v = v.contiguous()  # a view would keep q and k for the backward, which only needs them rotated
        return q, k, v.unflatten(-1, (-1, self.value_dim))

    def rotated_heads(self, x: Tensor, position: int | Tensor = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `heads`, with q and k rotated as `rotate` does."""
        return self.turned_heads(self.projected(x), position)

    def turned_heads(
        self, qkv: Tensor, position: int | Tensor = 0, turned: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `rotated_heads` of what `projected` returns, of which q and k may be rotated already."""
        if self.rotation == "none":
            return self._heads_of(qkv)
        if turned:
            q, k, v = self._heads_of(qkv)
            return *self.magnified(q, k), v
        given = (qkv, *self._turns(qkv, position), self.n_heads, self.n_kv_heads)
        if self.q_norm is None or self.k_norm is None:
            q, k, v = rotate_heads(*given)
        else:
            q, k, v = rotate_heads(*given, (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps or 0.0)
        return *self.magnified(q, k), v

    def first_position(self, x: Tensor) -> int:
        """Returns the position of the first token of x [B, T, ...] in its row: 0 unless the row is split."""
        return 0 if self.context_group is None else dist.get_rank(self.context_group) * x.shape[1]

    def rotate(self, q: Tensor, k: Tensor, position: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Rotates q [B, T, H, K] and k [B, T, G, K] by their positions (M15).

        `position` is the position of the first token: a number, or int64 [B] with one number for each row. It can also
        be a float64 tensor [B, T, G] with the positions of all tokens. Positions need not start again in each packed
        document, because only differences of positions matter within a document.
        """
        if self.rotation == "none":
            return q, k
        q, k = rotate_alike((q, k), *self._turns(q, position))
        return self.magnified(q, k)

    def magnified(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Multiplies the scores of rotated channels by the square of the rotation's magnitude, in q alone."""
        return self.stretched(q, self.magnitude**2), k

    def stretched(self, x: Tensor, factor: float) -> Tensor:
        """Multiplies the rotated channels of x [..., K] by a factor."""
        if factor == 1:
            return x
        if self.rotary_dim is None:
            return x * factor
        return torch.cat([x[..., : self.rotary_dim] * factor, x[..., self.rotary_dim :]], dim=-1)

    def _turns(self, x: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor]:
        """Returns positions and frequencies of the tokens of x [B, T, ...], see `rotate`."""
        check_float64(x.device)
        if isinstance(position, int):
            end = position + x.shape[1]
            position = torch.arange(position, end, dtype=torch.float64, device=x.device)
        elif position.ndim == 1:
            position = position[:, None].double()
            if x.shape[1] > 1:
                position = position + torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
        return position, self._frequencies(x.device)

    def _frequencies(self, device: torch.device) -> Tensor:
        """Returns the frequencies of the rotation, float64 [K / 2]."""
        key = (self.head_dim, self.frequencies, self.max_length, self.rope_base, self.rotary_dim)
        # A graph of torch.compile keeps its own constants, and torch.compile warns of caches.
        if torch.compiler.is_compiling():
            return rotary_frequencies(*key, self.rope_scaling, device=device)
        return _frequencies(*key, self._scaling_key, device=device)

    def extra_repr(self) -> str:
        """Returns the options that `repr` of the module shows."""
        return (
            f"heads={self.n_heads}, kv_heads={self.n_kv_heads}, key_dim={self.head_dim}, "
            f"value_dim={self.value_dim}, rotation={self.rotation!r}"
        )


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Returns `norm` of x, computed in the dtype of its weight and returned in that of x."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def head_normed(norm: nn.GroupNorm, y: Tensor) -> Tensor:
    """Returns `norm` of every head of every token: y [B, T, H, V] -> [B, T, H V], see `normed`."""
    flat = norm(y.flatten(0, 1).flatten(1).to(norm.weight.dtype)).to(y.dtype)
    return flat.unflatten(0, y.shape[:2])


@kept(64)
def _frequencies(
    key_dim: int,
    rule: str,
    max_length: float | None,
    base: float | None,
    rotary_dim: int | None,
    scaling: str | None,
    *,
    device: torch.device,
) -> Tensor:
    # Kept outside the module, whose .to(dtype) would take a buffer's float64; made outside inference mode, so
    # that training can use it afterwards.
    with torch.inference_mode(False):
        read = None if scaling is None else json.loads(scaling)
        return rotary_frequencies(key_dim, rule, max_length, base, rotary_dim, read, device=device)
