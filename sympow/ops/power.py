"""Power attention: the public functions. `reference.py` is the specification, docs/math.md has the mathematics."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sympow.ops import all_chunks, eager, eager_operators, reference
from sympow.ops.availability import NO_TRITON, has_kernels, is_exporting, refusal_of_kernels, without_autocast
from sympow.ops.checks import check_context, check_inputs, check_options, check_rotation, check_state, plain
from sympow.ops.decoding import StepOptions, step_with_tail
from sympow.ops.decoding_state import DecodingState
from sympow.ops.fused.rotation import with_positions, with_positions_twice
from sympow.ops.packed import borders, check_borders, empty, of_no_tokens, packed
from sympow.ops.types import PowerOutput, PowerState, Rotation

State = TypeVar("State", bound=PowerState | DecodingState)


def power_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None = None,
    *,
    p: int = 2,
    scale: float | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    initial_state: PowerState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
    rotation: Rotation | None = None,
    impl: str = "auto",
) -> PowerOutput[PowerState | None]:
    """Computes causal attention with weights (scale q.k)**p, decayed by a gate.

    Time is linear in T, and the state has a constant size.

    out_i = sum_{j<=i} b_ij (scale q_i.k_j)**p v_j / (sum_{j<=i} b_ij (scale q_i.k_j)**p + eps), (M1)-(M5), with
    b_ij = exp(log_g_{j+1} + ... + log_g_i).

    Range: sums are float32 (float64 for float64 inputs), so |scale q.k| is safe up to (3.4e38 / T)**(1 / p): at T =
    65,536 that is 7e16 for p = 2, 3e8 for p = 4 and 4e5 for p = 6. eps is an absolute number. If the weights of a row
    add up to less than eps, as with |scale q.k| below eps**(1 / p), its output is smaller than the weighted average.
    See docs/math.md.

    Gradients are of first order. A derivative of a gradient (`create_graph=True`) raises a RuntimeError, and
    `torch.func` transforms are not supported. impl="reference" has both.

    Args:
        q: [B, T, H, K], bfloat16, float16, float32 or float64. B and T may be 0: the output is then empty, and the
            state is the initial one, or zeros.
        k: [B, T, G, K], G key/value heads; H is a multiple of G. Head h reads key/value head h // (H / G).
        v: [B, T, G, V], with any V.
        log_g: [B, T, G], float32 (or float64), natural logarithm of the gate, <= 0 and finite; None for no gate. A
            reset may be any large number, such as -1e9. Values are checked on the CPU only, because the host would have
            to wait for a GPU.
        p: the power, an integer >= 1.
        scale: multiplies q.k; K**-0.5 if None.
        normalize: divide by the sum of the weights. Needs an even p, whose weights are not negative.
        eps: added to the normalizer, so that a row of zero scores gives zero.
        chunk_size: tokens of a chunk; T or more is the quadratic form. None: the implementation chooses, by a cost
            model or by tables of measurements.
        initial_state: the incoming state, of batch B (of batch N with cu_seqlens). Gradients flow into it.
        return_state: return the state after the last token (of each document with cu_seqlens). It carries gradients.
        cu_seqlens: int32 or int64 [N + 1], 0 = first <= ... <= last = T, with B = 1: N documents packed along T, none
            of which sees another. Documents may be empty. Values on a GPU are not checked.
        context_group: the ranks among which every row is divided, in the order of the parts. The inputs are this rank's
            part of the rows, and the output is the same part of the whole output. Every rank calls this function, and
            its backward, with the same B, on GPUs of one kind. Not with cu_seqlens, initial_state or return_state, with
            T = 0, nor with impl="reference".
        rotation: the rotation of q and k. This call then computes the gradient of the positions, instead of the
            backward of the rotation. On long rows its rounding errors are smaller, because the kernels start the sum
            again at every chunk. Not with cu_seqlens or context_group.
        impl: "eager" (plain torch, any device), "triton" (GPU kernels), "reference" (the specification, computed in
            float64 whatever the inputs are; slow), or "auto": "triton" where it can, else "eager".

    Returns:
        PowerOutput(out, state): out [B, T, H, V] in the dtype of v; state a PowerState, or None unless return_state.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: anything else that does not fit, in one line; on a CPU also gates out of range, and outputs that
            leave the range, as OutOfRangeError. On a GPU these come out as inf, NaN or 0.

    Source: Buckman, Gelada, Zhang, "Symmetric Power Transformers" (2024); Kumar et al., "Conformal Transformations for
    Symmetric Power Transformers" (2025); Gelada et al., "Scaling Context Requires Rethinking Attention" (2025).
    """
    check_inputs(q, k, v, log_g)
    p, chunk_size = plain(p), plain(chunk_size)
    check_options(p, scale, normalize, eps)
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be an integer >= 1, or None; got {chunk_size!r}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    backend = _chosen(impl, q, p, initial_state is not None or return_state or context_group is not None)
    if context_group is not None:
        check_context(impl, q, initial_state, return_state, cu_seqlens)
    if initial_state is not None and not isinstance(initial_state, PowerState):
        raise TypeError(f"initial_state must be a PowerState; got {type(initial_state).__name__}")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        check_borders(cu_seqlens, q.shape[0])
        sequences = len(cu_seqlens) - 1
        if cu_seqlens.device.type == "cpu":
            borders(cu_seqlens, q.shape[1])
    check_state(initial_state, sequences, k, v, p)
    if 0 in q.shape[:2]:
        return of_no_tokens(q, k, v, log_g, initial_state, sequences, p, return_state)
    if rotation is not None:
        check_rotation(rotation, q, k, cu_seqlens is not None or context_group is not None)
    return PowerOutput(
        *backend.attention(
            q, k, v, log_g, initial_state, cu_seqlens=cu_seqlens, context_group=context_group, rotation=rotation, p=p,
            scale=scale, normalize=normalize, eps=eps, chunk_size=chunk_size, return_state=return_state,
        )
    )  # fmt: skip


def power_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None = None,
    *,
    state: State,
    p: int = 2,
    scale: float | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    inplace: bool = False,
    impl: str = "auto",
) -> PowerOutput[State]:
    """Decodes one or a few new tokens on a state, (M9) and (M10).

    There are no gradients.

    Args:
        q: [B, T, H, K], T the number of new tokens.
        k: [B, T, G, K].
        v: [B, T, G, V].
        log_g: [B, T, G], natural logarithms of the gate; None: no gate.
        p: as for `power_attention`.
        scale: as for `power_attention`.
        normalize: as for `power_attention`.
        eps: as for `power_attention`.
        state: the incoming state. It is a PowerState, such as `PowerState.zeros(...)` or a result of `power_attention`,
            or a DecodingState made from a PowerState. Every token changes all numbers of a PowerState. A DecodingState
            keeps new tokens in a tail. On a GPU a step on it launches one kernel and can be captured in a CUDA graph
            (`inplace=True`). `pool.at(slots)` gives the states of a batch in a pool without copying them; slots are
            int32 [B].
        inplace: write the new state into the tensors of `state`, whose old content is lost.
        impl: "auto", "eager" or "reference", which computes in float64; for a DecodingState also "triton", which "auto"
            takes where it can.

    Returns:
        PowerOutput(out, state): out [B, T, H, V] in the dtype of v, and the state after the last new token, of the kind
        that was given.

    Raises:
        ValueError: as `power_attention`, and if inputs of a step on a DecodingState require gradients. Sums that leave
            the range are not checked.
        TypeError: as `power_attention`.
    """
    check_inputs(q, k, v, log_g)
    p = plain(p)
    check_options(p, scale, normalize, eps)
    if not isinstance(state, (PowerState, DecodingState)):
        raise TypeError(f"state must be a PowerState or a DecodingState; got {type(state).__name__}")
    check_state(state, q.shape[0], k, v, p)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options: StepOptions = {"p": p, "scale": scale, "normalize": normalize, "eps": eps}
    if impl not in ("auto", "eager", "triton", "reference"):
        raise ValueError(f"impl of a step is one of auto, eager, triton, reference; got {impl!r}")
    if isinstance(state, DecodingState) and _is_followed_by_autograd(q, k, v, log_g, state.s, state.z):
        raise ValueError(
            "a step on a DecodingState has no gradients: call it under torch.no_grad(), or power_attention with "
            "initial_state=state.folded()"
        )
    backend = _chosen_for_step(impl, q, state)
    with torch.no_grad(), without_autocast(q):
        if 0 in q.shape[:2]:
            return PowerOutput(empty(q, v), cast(State, state if inplace else state.clone()))
        return PowerOutput(*backend.step(q, k, v, log_g, state, inplace=inplace, **options))


def prefers_tail(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether steps with inputs of this device and dtype are faster on a DecodingState."""
    return has_kernels(device, dtype)


def _is_followed_by_autograd(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class Backend(Protocol):
    """Computes power attention in one way. Arguments were checked; shapes and options are those of the functions above.

    The file docs/guides/kernel.md says how to add one.
    """

    def refusal(self, q: Tensor, p: int, chunked: bool) -> str | None:
        """Returns why the backend cannot do a call, as the end of a sentence; None if it can.

        Args:
            q: the queries; only their shape, dtype and device are read.
            p: the power.
            chunked: whether the call needs states.
        """

    def refusal_of_step(self, q: Tensor, state: PowerState | DecodingState) -> str | None:
        """Returns why the backend cannot do a step on a state, as `refusal` does."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: PowerState | None, *,
        cu_seqlens: Tensor | None, context_group: dist.ProcessGroup | None, rotation: Rotation | None, **options: Any,
    ) -> tuple[Tensor, PowerState | None]:  # fmt: skip
        """Computes `power_attention` from an incoming state, and the gradient of the positions of a rotation."""

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: State, *, inplace: bool,
        **options: Unpack[StepOptions],
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Computes `power_attention_step`, without gradients; writes into the state if `inplace`."""


class Eager:
    """Computes in plain torch, on any device."""

    def refusal(self, q: Tensor, p: int, chunked: bool) -> str | None:
        """Refuses nothing."""
        return None

    def refusal_of_step(self, q: Tensor, state: PowerState | DecodingState) -> str | None:
        """Refuses nothing."""
        return None

    def attention(self, q, k, v, log_g, state, *, cu_seqlens, rotation, **options):
        """Computes chunk by chunk; packed documents one after another."""
        if rotation is not None:
            q, k = with_positions(q, k, rotation)
        if cu_seqlens is None:
            return self._row(q, k, v, log_g, state, **options)
        return packed(self._row, q, k, v, log_g, state, borders(cu_seqlens, q.shape[1]), **options)

    def _row(self, q, k, v, log_g, state, *, context_group=None, **options):
        if torch.compiler.is_dynamo_compiling() and context_group is None:
            return eager_operators.chunked(q, k, v, log_g, state, **options)
        return eager.chunked(q, k, v, log_g, state, context_group=context_group, **options)

    def step(self, q, k, v, log_g, state, *, inplace, **options):
        """Steps on either kind of state."""
        if isinstance(state, PowerState):
            return eager.step(q, k, v, log_g, state, inplace=inplace, **options)
        state = state if inplace else state.clone()
        return step_with_tail(q, k, v, log_g, state, **options), state


class Exported(Eager):
    """Computes in operations of torch alone, for torch.export, where there is no loop over chunks."""

    def _row(self, q, k, v, log_g, state, *, chunk_size, return_state, context_group=None, **options):
        if context_group is not None:
            raise ValueError("torch.export has no form of a row that is split over ranks: export without context_group")
        inputs = (x if x is None else x.to(torch.promote_types(q.dtype, torch.float32)) for x in (q, k, v, log_g))
        with without_autocast(q):
            out, new = all_chunks.attention(*inputs, state, chunk_size=chunk_size or EXPORTED_CHUNK, **options)
        return out.to(v.dtype), new if return_state else None


class Reference:
    """Computes the specification in float64. Its gradients have derivatives."""

    def refusal(self, q: Tensor, p: int, chunked: bool) -> str | None:
        """Refuses nothing."""
        return None

    def refusal_of_step(self, q: Tensor, state: PowerState | DecodingState) -> str | None:
        """Refuses nothing."""
        return None

    def attention(self, q, k, v, log_g, state, *, cu_seqlens, context_group, rotation, **options):
        """Computes the quadratic form, or chunks if their size is given; packed documents one after another."""
        if rotation is not None:
            q, k = with_positions_twice(q, k, rotation)
        if cu_seqlens is None:
            return self._row(q, k, v, log_g, state, **options)
        return packed(self._row, q, k, v, log_g, state, borders(cu_seqlens, q.shape[1]), **options)

    def _row(self, q, k, v, log_g, state, *, chunk_size, return_state, **options):
        inputs = _in_float64(q, k, v, log_g)
        dtype = torch.promote_types(q.dtype, torch.float32)
        state = state and state.to(torch.float64)
        with without_autocast(q):
            if chunk_size is None:
                out, new = reference.quadratic(*inputs, state, **options)
            else:
                out, new = reference.chunked(*inputs, state, chunk_size=chunk_size, **options)
        return out.to(v.dtype), new.to(dtype) if return_state else None

    def step(self, q, k, v, log_g, state, *, inplace, **options):
        """Steps by the recurrence. The new state of a DecodingState is that of plain torch."""
        inputs = _in_float64(q, k, v, log_g)
        if isinstance(state, DecodingState):
            state = state if inplace else state.clone()
            out, _ = reference.recurrent(*inputs, state.folded(torch.float64), **options)
            step_with_tail(q, k, v, log_g, state, **options)
            return out.to(v.dtype), state
        out, new = reference.recurrent(*inputs, state.to(torch.float64), **options)
        if inplace:
            state.s.copy_(new.s)
            state.z.copy_(new.z)
        return out.to(v.dtype), state if inplace else new.to(state.s.dtype)


class Kernels:
    """Computes by Triton's kernels, on GPUs. Triton is imported at the first call."""

    def refusal(self, q: Tensor, p: int, chunked: bool) -> str | None:
        """Returns why the kernels cannot do a call, see `Backend.refusal`."""
        if NO_TRITON:
            return NO_TRITON
        from sympow.ops.triton import adapt

        return adapt.unsupported(q, p, chunked)

    def refusal_of_step(self, q: Tensor, state: PowerState | DecodingState) -> str | None:
        """Returns why the kernels cannot do a step, see `Backend.refusal`."""
        if isinstance(state, PowerState):
            return "of a step needs a DecodingState (DecodingState.from_state); got a PowerState"
        return refusal_of_kernels(q.device, q.dtype)

    def attention(self, q, k, v, log_g, state, *, cu_seqlens, **options):
        """Computes all documents, ranks and the rotation in the kernels."""
        from sympow.ops.triton import adapt

        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(q.device, torch.int32)
        return adapt.attention(q, k, v, log_g, state, cu_seqlens=cu_seqlens, **options)

    def step(self, q, k, v, log_g, state, *, inplace, **options):
        """Steps by one launch for each token."""
        from sympow.ops.triton import adapt

        state = state if inplace else state.clone()
        return adapt.step_with_tail(q, k, v, log_g, state, **options), state


EXPORTED_CHUNK = 128  # tokens, if the caller names no chunk size
BACKENDS: dict[str, Backend] = {"eager": Eager(), "triton": Kernels(), "reference": Reference()}


def _chosen(impl: str, q: Tensor, p: int, chunked: bool) -> Backend:
    """Returns the backend of a call. Raises ValueError for an unknown one, and for one that refuses the call."""
    if impl in ("auto", "eager") and is_exporting():
        return Exported()
    if impl == "auto":
        kernels = q.device.type == "cuda" and BACKENDS["triton"].refusal(q, p, chunked) is None
        return BACKENDS["triton" if kernels else "eager"]
    if impl not in BACKENDS:
        raise ValueError(f"impl is one of auto, {', '.join(BACKENDS)}; got {impl!r}")
    refusal = BACKENDS[impl].refusal(q, p, chunked)
    if refusal:
        raise ValueError(f"impl={impl!r} {refusal}")
    return BACKENDS[impl]


def _chosen_for_step(impl: str, q: Tensor, state: PowerState | DecodingState) -> Backend:
    """Returns the backend of a step, and raises as `_chosen` does."""
    if impl == "auto":
        tail = isinstance(state, DecodingState) and prefers_tail(q.device, q.dtype)
        return BACKENDS["triton" if tail else "eager"]
    refusal = BACKENDS[impl].refusal_of_step(q, state)
    if refusal:
        raise ValueError(f"impl={impl!r} {refusal}")
    return BACKENDS[impl]


def _in_float64(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the inputs in float64, so that the specification adds no rounding errors."""
    return q.double(), k.double(), v.double(), None if log_g is None else log_g.double()
