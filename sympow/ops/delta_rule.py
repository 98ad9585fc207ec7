"""The delta rule on the state of power attention: the public functions. `delta_reference.py` is the specification.

docs/math.md has the mathematics, (M19) to (M24).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from sympow.ops import delta_reference, delta_solve
from sympow.ops.availability import NO_TRITON, has_kernels, has_values, without_autocast
from sympow.ops.delta_types import DeltaOptions, DeltaOutput
from sympow.ops.eager_operators import delta_eager
from sympow.ops.feature_map import LARGEST_POWER, plain, power_error, spow, spow_dim
from sympow.ops.first_order import first_order
from sympow.ops.fused.unit_heads import unit, unit_heads
from sympow.ops.packed import borders, check_borders, checked_on_cpu, document_starts, empty
from sympow.ops.power import check_inputs
from sympow.ops.types import (
    OutOfRangeError,
    check_dense,
    check_flags,
    check_states,
    check_writable,
    checked_chunk_size,
    narrowed,
)

_IMPLS = ("auto", "eager", "triton", "reference")
_RESET = -1e4  # a log gate whose decay is 0


def power_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_g: Tensor | None = None,
    *,
    p: int = 2,
    qk_norm: bool = True,
    chunk_size: int | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> DeltaOutput:
    """Computes the delta rule on the power feature map phi, with a gate.

    A token corrects what the state returns for its key, instead of adding its value to it: with g_i = exp(log_g_i),

        S_i = g_i S_{i-1} + beta_i phi(k_i) (v_i - g_i S_{i-1}^T phi(k_i))^T,  y_i = phi(q_i)^T S_i,  (M19), (M20).

    The state is as large as that of power attention without its normalizer. p = 1 is the gated delta rule. The output
    is a sum and not an average, so a norm of every head's output usually follows. Time is linear in T. Gradients are
    of first order: second derivatives raise an error, except with impl="reference".

    Args:
        q: [B, T, H, K], bfloat16, float16, float32 or float64. B and T may be 0.
        k: [B, T, G, K], G key/value heads; H is a multiple of G.
        v: [B, T, G, V].
        beta: [B, T, G], float32 (or float64), the strength of the correction. With keys of norm 1 the state does not
            grow for beta in [0, 2], or to 1.9 in bfloat16, which rounds the norm. 1 stores the value exactly.
        log_g: [B, T, G], float32 (or float64), natural logarithm of the gate, <= 0 and finite; None for no gate.
        p: the power, an integer >= 1, and at most 20 where states are made.
        qk_norm: divide queries and keys by their norms, or by 1e-6 if it is larger. Otherwise the caller keeps
            beta |k|**(2 p) at most 2, or the state grows without limit.
        chunk_size: tokens of a chunk; None: the implementation chooses.
        initial_state: the incoming state [B, G, D, V] ([N, G, D, V] with cu_seqlens), in the basis (M7), float32
            (float64 for float64 inputs). Gradients flow into it.
        return_state: return the state after the last token (of each document with cu_seqlens), with gradients.
        cu_seqlens: int32 or int64 [N + 1], the borders of N documents packed along T, as in `power_attention`.
        impl: "eager" (plain torch, any device), "triton" (GPU kernels), "reference" (the specification, computed in
            float64; slow), or "auto": "triton" where it can, else "eager".

    Returns:
        DeltaOutput(out, state): out [B, T, H, V] in the dtype of v; state [B, G, D, V], or None unless return_state.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: anything else that does not fit, in one line; on a CPU also gates out of range, and a state that
            leaves the range, as OutOfRangeError. On a GPU these come out as inf, NaN or 0.

    Source: Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers" (2021); Yang, Kautz,
    Hatamizadeh, "Gated Delta Networks" (2024), for p = 1.
    """
    p = plain(p)
    check_flags(qk_norm=qk_norm, return_state=return_state)
    _check(q, k, v, beta, log_g, p)
    chunk_size = checked_chunk_size(chunk_size)
    run = _implementation(impl, q, p, initial_state is not None or return_state)
    sequences, ends = q.shape[0], []
    if cu_seqlens is not None:
        check_borders(cu_seqlens, q.shape[0])
        sequences = len(cu_seqlens) - 1
        cu_seqlens = checked_on_cpu(cu_seqlens, q.shape[1])
    check_delta_state(initial_state, sequences, k, v, p)
    if initial_state is None and return_state:  # states between chunks are checked where they are made
        check_states(sequences, k, v, p)
    dtype = torch.promote_types(q.dtype, torch.float32)
    if 0 in q.shape[:2]:
        after = _zeros(sequences, k, v, p) if initial_state is None and return_state else initial_state
        zero = torch.zeros((), device=q.device, dtype=dtype)
        for x in (q, k, v, beta, log_g, after):
            zero = zero if x is None else zero + x[:0].sum().to(dtype)
        out = empty(q, v) + zero.to(v.dtype)
        return DeltaOutput(out, after + zero if after is not None and return_state else None)
    with without_autocast(q):
        if qk_norm:
            # Only the specification has second derivatives, for which the norm has them in plain torch.
            q, k = (unit(q), unit(k)) if run is _reference else unit_heads(q, k)
        options: dict[str, Any] = {"p": p, "chunk_size": chunk_size, "return_state": return_state}
        if cu_seqlens is None:
            return DeltaOutput(*run(q, k, v, beta, log_g, initial_state, **options))
        if initial_state is None and not return_state and (run is not _reference):
            # A gate of 0 at the first token of every document separates them.
            gates = torch.zeros_like(beta, dtype=dtype) if log_g is None else log_g
            starts = document_starts(cu_seqlens.to(q.device), q.shape[1])
            first = starts == torch.arange(q.shape[1], device=q.device)
            return DeltaOutput(*run(q, k, v, beta, gates.masked_fill(first[:, None], _RESET), None, **options))
        ends = borders(cu_seqlens, q.shape[1])
        return _by_document(run, q, k, v, beta, log_g, initial_state, ends, **options)


def power_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_g: Tensor | None = None,
    *,
    state: Tensor,
    p: int = 2,
    qk_norm: bool = True,
    inplace: bool = False,
) -> DeltaOutput:
    """Decodes one or a few new tokens on a state, (M19) and (M20), one after another.

    There are no gradients.

    Args:
        q: [B, T, H, K], T the number of new tokens.
        k: [B, T, G, K].
        v: [B, T, G, V].
        beta: [B, T, G].
        log_g: [B, T, G], or None for no gate.
        state: the incoming state [B, G, D, V], as `power_delta_rule` returns it.
        p: as for `power_delta_rule`.
        qk_norm: as for `power_delta_rule`.
        inplace: write the new state into `state`.

    Returns:
        DeltaOutput(out, state): out [B, T, H, V] in the dtype of v, and the state after the last new token.

    Raises:
        ValueError, TypeError: as `power_delta_rule`. Results that leave the range are not checked: they come out as inf
            or NaN.
    """
    p = plain(p)
    check_flags(qk_norm=qk_norm, inplace=inplace)
    _check(q, k, v, beta, log_g, p)
    if state is None:
        raise TypeError("a step needs a state: power_delta_rule with return_state=True returns one; got None")
    check_delta_state(state, q.shape[0], k, v, p)
    if inplace:
        check_writable(state)
    with torch.no_grad(), without_autocast(q):
        state = state if inplace else state.clone()
        if qk_norm:
            q, k = unit_heads(q, k)
        if has_kernels(q.device, q.dtype):
            from sympow.ops.triton.delta_step import power_delta_step

            return DeltaOutput(power_delta_step(q, k, v, beta, log_g, state, p), state)
        phi_q = spow(q.to(state.dtype).unflatten(2, (k.shape[2], -1)), p)  # [B, T, G, R, D]
        phi_k = spow(k.to(state.dtype), p)
        gamma = None if log_g is None else log_g.to(state.dtype).exp()
        values, beta = v.to(state.dtype), beta.to(state.dtype)
        out = state.new_empty(*phi_q.shape[:4], v.shape[-1])
        for i in range(q.shape[1]):
            if gamma is not None:
                state *= gamma[:, i, :, None, None]
            error = values[:, i] - (phi_k[:, i, :, None] @ state)[:, :, 0]
            state.addcmul_(phi_k[:, i, :, :, None], (beta[:, i, :, None] * error)[:, :, None])
            out[:, i] = phi_q[:, i] @ state
        return DeltaOutput(out.flatten(2, 3).to(v.dtype), state)


def check_delta_state(state: Tensor | None, batch: int, k: Tensor, v: Tensor, p: int) -> None:
    """Refuses, with a TypeError or a ValueError, a state that does not fit the call, which has `batch` sequences."""
    if state is None:
        return
    check_dense("the state of the delta rule", state)
    wanted = [batch, k.shape[2], spow_dim(k.shape[3], p), v.shape[3]]
    if list(state.shape) != wanted:
        raise ValueError(f"the state must be [B, G, D, V] = {wanted} for p = {p}; got {list(state.shape)}")
    if state.dtype != torch.promote_types(k.dtype, torch.float32):
        raise TypeError(
            f"a state for {k.dtype} inputs is {torch.promote_types(k.dtype, torch.float32)}; got {state.dtype}"
        )
    if state.device != k.device:
        raise ValueError(f"the state must be on the device of the inputs, {k.device}; it is on {state.device}")


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, p: int) -> None:
    check_inputs(q, k, v, log_g)
    if isinstance(p, bool) or not isinstance(p, int) or not 0 < p <= LARGEST_POWER:
        raise power_error(p)
    check_dense("beta", beta)
    if beta.shape != k.shape[:3]:
        raise ValueError(f"beta must be [B, T, G] = {list(k.shape[:3])}; got {list(beta.shape)}")
    if beta.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"beta must be float32 (or float64); got {beta.dtype}")
    if beta.device != k.device:
        raise ValueError(f"q, k, v and beta must be on one device; got q on {k.device}, beta on {beta.device}")
    if beta.device.type == "cpu" and has_values(beta) and not beta.isfinite().all():
        raise OutOfRangeError("beta must be finite; got NaN or inf")


def _zeros(sequences: int, k: Tensor, v: Tensor, p: int) -> Tensor:
    dtype = torch.promote_types(k.dtype, torch.float32)
    return torch.zeros(sequences, k.shape[2], spow_dim(k.shape[3], p), v.shape[3], device=k.device, dtype=dtype)


def _by_document(run, q, k, v, beta, log_g, state, ends: list[int], *, return_state: bool, **options) -> DeltaOutput:
    """Runs each document alone."""
    outs, states = [], []
    for n, (start, stop) in enumerate(pairwise(ends)):
        before = None if state is None else state[n : n + 1]
        if start == stop:
            if return_state:
                states.append(_zeros(1, k, v, options["p"]) if before is None else before)
            continue
        tokens = [None if x is None else x[:, start:stop] for x in (q, k, v, beta, log_g)]
        out, after = run(*tokens, before, return_state=return_state, **options)
        outs.append(out)
        states.append(after)
    return DeltaOutput(torch.cat(outs, dim=1), torch.cat(states) if return_state else None)


def _reference(q, k, v, beta, log_g, state, *, p, chunk_size, return_state):
    inputs = [None if x is None else x.double() for x in (q, k, v, beta, log_g, state)]
    span = q.shape[1] if chunk_size is None else chunk_size
    if state is None:
        check_states(k.shape[0], k, v, p, torch.float64)
    outs = []
    for start in range(0, q.shape[1], span):
        tokens = [None if x is None else x[:, start : start + span] for x in inputs[:5]]
        out, inputs[5] = delta_reference.quadratic(*tokens, inputs[5], p=p)
        outs.append(out)
    out = torch.cat(outs, dim=1)
    dtype = torch.promote_types(k.dtype, torch.float32)
    return out.to(v.dtype), narrowed(cast(Tensor, inputs[5]), dtype) if return_state else None


def _eager(q, k, v, beta, log_g, state, **options):
    dtype = torch.promote_types(v.dtype, torch.float32)
    gate = None if log_g is None else log_g.to(dtype)
    inputs = (q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype), gate, state)
    if torch.compiler.is_dynamo_compiling():
        out, after, *_ = delta_eager(*inputs, options["p"], options["chunk_size"] or 0, options["return_state"])
    else:
        out, after = _DeltaRule.apply(*inputs, delta_solve, DeltaOptions(**options))
        delta_solve.check_range(out, inputs)
    return out.to(v.dtype), after if options["return_state"] else None


def _triton(q, k, v, beta, log_g, state, **options):
    from sympow.ops.triton import delta

    return delta.delta_rule(q, k, v, beta, log_g, state, DeltaOptions(**options))


def _implementation(impl: str, q: Tensor, p: int, has_state: bool) -> Callable:
    if impl not in _IMPLS:
        raise ValueError(f"impl is one of {', '.join(_IMPLS)}; got {impl!r}")
    if impl in ("eager", "reference"):
        return _eager if impl == "eager" else _reference
    if impl == "auto" and q.device.type != "cuda":
        return _eager
    refusal = NO_TRITON
    if not refusal:
        from sympow.ops.triton.adapt import unsupported

        refusal = unsupported(q, p, has_state)
    if impl == "triton" and refusal:
        raise ValueError(f"impl='triton' {refusal}")
    return _eager if refusal else _triton


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, log_g, state, backend, options: DeltaOptions):
        out, last, errors, u = delta_solve.forward(backend, q, k, v, beta, log_g, state, options)
        ctx.save_for_backward(q, k, v, beta, log_g, state, errors, u, last)
        ctx.backend, ctx.options = backend, options
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    @first_order("power_delta_rule")
    def backward(ctx: Any, dout: Tensor | None, dlast: Tensor | None):
        q, k, _, beta, log_g, state, errors, u, last = ctx.saved_tensors
        if dout is None:
            dout = errors.new_zeros(*q.shape[:3], errors.shape[3])
        with without_autocast(q):
            gradients = delta_solve.backward(
                ctx.backend, q, k, beta, log_g, state, errors, u, last, dout, dlast, ctx.options
            )
        return *gradients, None, None
