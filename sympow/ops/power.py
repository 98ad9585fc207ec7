"""Power attention: the public functions, and the checks of their arguments.

`reference.py` is the specification, and docs/math.md has the mathematics. Every check raises an error with a message
of one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, Unpack, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sympow.ops import all_chunks, eager, eager_operators, reference
from sympow.ops.availability import (
    NO_TRITON,
    check_float64,
    has_kernels,
    has_values,
    is_exporting,
    refusal_of_kernels,
    without_autocast,
)
from sympow.ops.decoding import StepOptions, step_with_tail
from sympow.ops.decoding_state import DecodingState
from sympow.ops.feature_map import LARGEST_POWER, plain, power_error, shown, spow_dim
from sympow.ops.fused.rotation import with_positions, with_positions_twice
from sympow.ops.packed import borders, check_borders, checked_on_cpu, empty, of_no_tokens, packed
from sympow.ops.types import (
    OutOfRangeError,
    PowerOutput,
    PowerState,
    Rotation,
    check_dense,
    check_flags,
    check_states,
    check_writable,
    checked_chunk_size,
    narrowed,
)

State = TypeVar("State", bound=PowerState | DecodingState)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
        p: the power, an integer >= 1, and at most 20 where states are made.
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
        ValueError: anything else that does not fit, in one line; on a CPU also gates out of range, and sums that leave
            the range, as OutOfRangeError. On a GPU these come out as inf, NaN or 0. An output beyond the range of the
            dtype of v, 65,504 for float16, is inf on any device.

    Source: Buckman, Gelada, Zhang, "Symmetric Power Transformers" (2024); Kumar et al., "Conformal Transformations for
    Symmetric Power Transformers" (2025); Gelada et al., "Scaling Context Requires Rethinking Attention" (2025).
    """
    signature = None
    if initial_state is cu_seqlens is context_group is rotation is None and not return_state:
        signature = signature_of(q, k, v, log_g, p, scale, normalize, eps, chunk_size, impl)
        if signature is not None:
            try:
                again = checked.get(signature)
            except TypeError:  # of an option without a hash, such as a list, which the checks below refuse
                again = signature = None
            if again is not None:
                check_gates(log_g)
                return PowerOutput(again(q, k, v, log_g), None)
    check_inputs(q, k, v, log_g)
    p, normalize = plain(p), plain(normalize)
    check_flags(return_state=return_state)
    check_options(p, scale, normalize, eps, q.dtype)
    chunk_size = checked_chunk_size(chunk_size)
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
        cu_seqlens = checked_on_cpu(cu_seqlens, q.shape[1])
    check_state(initial_state, sequences, k, v, p)
    if 0 in q.shape[:2]:
        return of_no_tokens(q, k, v, log_g, initial_state, sequences, p, return_state)
    compiling = torch.compiler.is_compiling()  # a comparison of lengths would make a graph for each outcome
    if not compiling and initial_state is None:
        if return_state:
            check_states(sequences, k, v, p)
        elif isinstance(backend, Kernels) and (chunk_size or q.shape[1]) < q.shape[1]:
            check_states(sequences, k, v, p, k.dtype)  # they hold those of all documents at once
    if rotation is not None:
        check_rotation(rotation, q, k, cu_seqlens is not None or context_group is not None)
    options: dict[str, Any] = {"p": p, "scale": scale, "normalize": normalize, "eps": eps, "chunk_size": chunk_size}
    out, state = backend.attention(
        q, k, v, log_g, initial_state, cu_seqlens=cu_seqlens, context_group=context_group, rotation=rotation,
        return_state=return_state, **options,
    )  # fmt: skip
    if signature is not None and isinstance(backend, Kernels):
        backend.keep(signature, q, k, v, log_g, **options)
    return PowerOutput(out, state)


# Calls of the kernels that were checked, and what computes calls with equal signatures.
checked: dict[tuple, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {}
_MOST_CHECKED = 256  # that are kept: a server sees many lengths


def signature_of(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, p: int, scale: float | None, normalize: bool, eps: float,
    chunk_size: int | None, impl: str,
) -> tuple | None:  # fmt: skip
    """Returns all that the checks of a call and the choice of its kernels depend on, but the values of tensors.

    None for calls that are checked every time: for a compiler, of tensors that are not plain, and of numbers that are
    not those of Python. The checks take longer than the launches.
    """
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor:
        return None
    if type(p) is not int or type(eps) is not float or not (scale is None or type(scale) is float):
        return None
    if not (q.is_cuda or impl == "triton") or not (chunk_size is None or type(chunk_size) is int):
        return None
    gate: tuple = ()
    gradient = q.requires_grad or k.requires_grad or v.requires_grad
    if log_g is not None:
        if type(log_g) is not Tensor:
            return None
        gate, gradient = (log_g.shape, log_g.dtype, log_g.device), gradient or log_g.requires_grad
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, *gate,
        p, scale, normalize, eps, chunk_size, impl, gradient and torch.is_grad_enabled(),
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
    p, normalize = plain(p), plain(normalize)
    check_flags(inplace=inplace)
    check_options(p, scale, normalize, eps, q.dtype)
    if not isinstance(state, (PowerState, DecodingState)):
        raise TypeError(f"state must be a PowerState or a DecodingState; got {type(state).__name__}")
    check_state(state, q.shape[0], k, v, p)
    if inplace:
        check_writable(*((state.s, state.z) if isinstance(state, PowerState) else state.tensors().values()))
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
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            options.pop("context_group")  # check_context refuses one with cu_seqlens
            return eager_operators.chunked(q, k, v, log_g, state, cu_seqlens, **options)
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
        if state is None:
            check_states(q.shape[0], k, v, options["p"], torch.float64)
        with without_autocast(q):
            if chunk_size is None:
                out, new = reference.quadratic(*inputs, state, **options)
            else:
                out, new = reference.chunked(*inputs, state, chunk_size=chunk_size, **options)
        if not return_state:
            return out.to(v.dtype), None
        return out.to(v.dtype), PowerState(narrowed(new.s, dtype), narrowed(new.z, dtype), new.p, new.key_dim)

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

    def keep(self, signature: tuple, q, k, v, log_g, **options) -> None:
        """Keeps how calls with this signature are computed, so that they need no checks; not for all calls."""
        from sympow.ops.triton import adapt

        again = adapt.again(q, k, v, log_g, **options)
        if again is not None:
            if len(checked) >= _MOST_CHECKED:
                checked.pop(next(iter(checked)))  # the oldest
            checked[signature] = again

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
    if not isinstance(impl, str) or impl not in BACKENDS:  # a list has no hash
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


def check_inputs(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
    """Refuses, with a TypeError or a ValueError, inputs whose shapes, dtypes, devices or gates do not fit."""
    device = q.device if isinstance(q, Tensor) else None
    for name, given, layout in (("q", q, "BTHK"), ("k", k, "BTGK"), ("v", v, "BTGV"), ("log_g", log_g, "BTG")):
        if given is None and name == "log_g":
            continue
        x = check_dense(name, given)
        if x.ndim != len(layout):
            raise ValueError(f"{name} must be [{', '.join(layout)}]; got {list(x.shape)}")
        if x.device != device:
            raise ValueError(f"q, k, v and log_g must be on one device; got q on {q.device}, {name} on {x.device}")
    check_float64(q.device)
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"q, k and v must share one dtype of {wanted}; got {q.dtype}, {k.dtype}, {v.dtype}")
    (b, t, h, key_dim), (_, _, g, value_dim) = q.shape, v.shape
    if 0 in (h, g, key_dim, value_dim):
        raise ValueError(f"heads and channels cannot be 0; got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    if k.shape != (b, t, g, key_dim) or v.shape != (b, t, g, value_dim):
        raise ValueError(
            "q [B, T, H, K], k [B, T, G, K] and v [B, T, G, V] must agree in B, T, G and K; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if h % g:
        raise ValueError(f"the query heads H must be a multiple of the key/value heads G; got H = {h}, G = {g}")
    if log_g is None:
        return
    if log_g.shape != (b, t, g):
        raise ValueError(f"log_g must be [B, T, G] = {[b, t, g]}, one gate a key/value head; got {list(log_g.shape)}")
    if log_g.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"log_g must be float32 (or float64), as decays multiply over the context; got {log_g.dtype}")
    check_gates(log_g)


def check_gates(log_g: Tensor | None) -> None:
    """Refuses gates that grow or are not finite, on the CPU; the host would have to wait for a GPU."""
    if log_g is not None and log_g.device.type == "cpu" and has_values(log_g) and log_g.numel():
        low, high = (x.item() for x in log_g.detach().aminmax())
        if not (math.isfinite(low) and high <= 0):
            raise OutOfRangeError(
                f"log_g must be finite and <= 0 (a gate decays, it does not grow); got values from {low} to {high}"
                + (": the weights or the input that it was computed from are not finite" if math.isnan(low) else "")
            )


LARGEST = float(np.finfo(np.float64).max)  # the largest float of Python
# Also what a compiler takes as a symbol.
NUMBERS = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)


def check_options(p: int, scale: float | None, normalize: bool, eps: float, dtype: torch.dtype = torch.float32) -> None:
    """Refuses, with a TypeError or a ValueError, options that `power_attention` does not take for inputs of a dtype."""
    if isinstance(p, bool) or not isinstance(p, int) or not 0 < p <= LARGEST_POWER:
        raise power_error(p)
    check_flags(normalize=normalize)
    if normalize and p % 2:
        raise ValueError(
            f"normalize=True needs an even p: with p = {p} weights can be negative and their sum near zero; pass "
            "normalize=False and normalize the output instead"
        )
    for name, number in (("scale", scale), ("eps", eps)):
        if isinstance(number, Tensor):  # whose gradient would be lost
            raise TypeError(f"{name} must be a number; got a torch.Tensor (multiply q by a scale that is learned)")
        if isinstance(number, bool) or (not isinstance(number, NUMBERS) and (number is not None or name == "eps")):
            raise TypeError(f"{name} must be a number; got {number!r}")
    scale, eps = _as_float(scale), _as_float(eps)
    # Comparisons, which a compiler traces for a number that it takes as a symbol, and it does not trace isfinite.
    if scale is not None and not -LARGEST <= scale <= LARGEST:
        raise ValueError(f"scale must be finite; got {shown(scale)}")
    wide = torch.promote_types(dtype, torch.float32)
    least = torch.finfo(wide).tiny
    if not least <= eps <= LARGEST:
        held = str(wide).removeprefix("torch.")
        raise ValueError(f"eps must be at least {least:.1e}, which {held} can hold, and finite; got {shown(eps)}")


def _as_float(number: Any) -> Any:
    """Returns a float of NumPy as one of Python. NumPy compares in the dtype of its number, where others overflow."""
    return float(number) if isinstance(number, np.floating) else number


def check_state(state: PowerState | DecodingState | None, batch: int, k: Tensor, v: Tensor, p: int) -> None:
    """Refuses, with a TypeError or a ValueError, a state that does not fit the call, which has `batch` sequences."""
    if state is None:
        return
    if (state.p, state.key_dim) != (p, k.shape[3]):
        raise ValueError(f"the state is of p={state.p}, K={state.key_dim}; this call is of p={p}, K={k.shape[3]}")
    wanted = (batch, k.shape[2], spow_dim(k.shape[3], p), v.shape[3])
    has = tuple(state.s.shape) if isinstance(state, PowerState) else (state.batch, *state.s.shape[1:])
    if has != wanted:
        raise ValueError(f"the state's s must be [B, G, D, V] = {list(wanted)}; got {list(has)}")
    if state.z.dtype != torch.promote_types(k.dtype, torch.float32):
        raise TypeError(
            f"a state for {k.dtype} inputs is {torch.promote_types(k.dtype, torch.float32)}; got {state.z.dtype}"
        )
    if state.s.device != k.device:
        raise ValueError(f"the state must be on the device of the inputs, {k.device}; it is on {state.s.device}")
    if isinstance(state, DecodingState) and torch.promote_types(state.dtype, k.dtype) != state.dtype:
        raise TypeError(f"the state's tail is {state.dtype} and cannot hold keys and values of {k.dtype}")


def check_rotation(rotation: Rotation, q: Tensor, k: Tensor, in_parts: bool) -> None:
    """Refuses, with a TypeError or a ValueError, a rotation that does not fit q and k.

    in_parts: whether the call has packed documents, or rows split over ranks.
    """
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation must be a sympow.ops.Rotation; got {type(rotation).__name__}")
    if in_parts:
        raise ValueError("rotation is of whole rows; with cu_seqlens or context_group rotate with a gradient instead")
    positions, frequencies = rotation
    if positions.dtype != torch.float64 or frequencies.dtype != torch.float64:
        raise TypeError(f"a rotation is float64; got {positions.dtype} positions and {frequencies.dtype} frequencies")
    if tuple(frequencies.shape) != (q.shape[3] // 2,) or q.shape[3] % 2:
        raise ValueError(f"frequencies must be [K/2] for K = {q.shape[3]}; got {list(frequencies.shape)}")
    batch, time, groups = (*positions.shape, 1)[:3] if positions.ndim in (2, 3) else (0, 0, 0)
    if (batch, time) != tuple(q.shape[:2]) or not groups or k.shape[2] % groups:
        raise ValueError(
            f"the positions of a rotation are [B, T] or [B, T, n], n dividing G, for k {list(k.shape)}; got "
            f"{list(positions.shape)}"
        )


def check_context(
    impl: str, q: Tensor, state: PowerState | None, return_state: bool, cu_seqlens: Tensor | None
) -> None:
    """Refuses calls on rows split over ranks that `power_attention` does not take."""
    if cu_seqlens is not None:
        raise ValueError("packed documents (cu_seqlens) cannot be split over ranks (context_group); give whole rows")
    if state is not None or return_state:
        raise ValueError("initial_state and return_state are of whole rows; rows split by context_group have neither")
    if impl == "reference":
        raise ValueError("impl='reference' computes whole rows; it takes no context_group")
    if q.shape[1] == 0:
        raise ValueError(f"a rank's part of rows split by context_group has at least one token; got q {list(q.shape)}")
