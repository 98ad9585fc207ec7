"""Power attention and its delta rule in plain torch as PyTorch operators, for torch.compile.

A graph with the operators is right for all lengths. Compiled code calls the functions of other files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sympow.ops import delta_solve, eager
from sympow.ops.availability import without_autocast
from sympow.ops.delta_types import DeltaOptions
from sympow.ops.eager import Options
from sympow.ops.feature_map import spow_dim
from sympow.ops.packed import borders
from sympow.ops.runtime.launcher import ALL_DEVICES, operator
from sympow.ops.types import PowerState


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: PowerState | None,
    cu_seqlens: Tensor | None = None, *, p: int, scale: float, normalize: bool, eps: float, chunk_size: int | None,
    return_state: bool,
) -> tuple[Tensor, PowerState | None]:  # fmt: skip
    """Computes `eager.chunked` by one operator, also for packed documents with borders in cu_seqlens [N + 1].

    A trace of the loop over chunks, or over documents, would be of one length only.
    """
    s, z = (None, None) if state is None else (state.s, state.z)
    with without_autocast(q):
        numbers = (p, scale, normalize, eps, chunk_size or 0, return_state)
        out, _, s, z = power_eager(q, k, v, log_g, s, z, cu_seqlens, *numbers)
    return out, PowerState(s, z, p, k.shape[-1]) if return_state else None


def _options(q, k, v, s, p, scale, normalize, eps, chunk_size, return_state) -> Options:
    size = chunk_size or eager.default_chunk_size(q, k, v, p, s is not None or return_state)
    return Options(p, scale, normalize, eps, size, return_state, None)


def _or_empty(tensors: tuple[Tensor | None, ...], like: Tensor) -> tuple[Any, ...]:
    """Returns the tensors, contiguous, and empty ones in place of None, which an operator cannot return."""
    return tuple(like.new_empty(0) if x is None else x.contiguous() for x in tensors)


def _documents(cu_seqlens: Tensor, time: int) -> Iterator[tuple[slice, slice]]:
    """Yields the tokens, and the row of states [N, ...], of each document of cu_seqlens [N + 1] that has tokens."""
    for n, (start, stop) in enumerate(pairwise(borders(cu_seqlens, time))):
        if start < stop:
            yield slice(start, stop), slice(n, n + 1)


def _cut(tokens: slice, row: slice, of_tokens: tuple, of_rows: tuple) -> list[Tensor | None]:
    """Returns the parts of tensors [B, T, ...] and then of states [N, ...] that belong to one document."""
    parts = [None if x is None else x[:, tokens] for x in of_tokens]
    return parts + [None if x is None else x[row] for x in of_rows]


def _write(into: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    for x, value in zip(into, values, strict=True):
        if x is not None and value is not None:
            x.copy_(value)


def _gradients(dout, ds_out, dz_out, q, k, v, log_g, s, z, out, normalizer, s_out, z_out, *numbers):
    """Returns the gradients of the six inputs of rows that are not packed, None for those that the call has not."""
    options = _options(q, k, v, s, *numbers)
    ctx = SimpleNamespace(options=options, needs_input_grad=[True] * 7)
    saved = (q, k, v, log_g, s, z, out, normalizer, s_out, z_out)
    return eager.gradients(ctx, saved, dout, ds_out, dz_out)[:6]


def _like_backward(dout, ds, dz, q, k, v, log_g, s, z, *_):
    return _or_empty(tuple(None if x is None else x.new_empty(x.shape) for x in (q, k, v, log_g, s, z)), q)


@operator(_like_backward, devices=ALL_DEVICES)
def power_eager_backward(
    dout: Tensor | None,
    ds_out: Tensor | None,
    dz_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    normalizer: Tensor,
    s_out: Tensor,
    z_out: Tensor,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes dq, dk, dv, dlog_g, ds and dz, empty for inputs that the call has not."""
    norm, ends = normalizer if normalize else None, (s_out, z_out) if return_state else (None, None)
    numbers = (p, scale, normalize, eps, chunk_size, return_state)
    if cu_seqlens is None:
        grads = _gradients(dout, ds_out, dz_out, q, k, v, log_g, s, z, out, norm, *ends, *numbers)
        return _or_empty(grads, q)
    of_tokens = tuple(None if x is None else x.new_empty(x.shape) for x in (q, k, v, log_g))
    # A document without tokens returns its state, so the gradient of that is what comes in.
    of_rows = tuple(None if x is None else x.new_zeros(x.shape) for x in (s, z))
    for x, dx in zip(of_rows, (ds_out, dz_out), strict=True):
        if x is not None and dx is not None:
            x.copy_(dx)
    for part in _documents(cu_seqlens, q.shape[1]):
        inputs = _cut(*part, (dout,), (ds_out, dz_out)) + _cut(*part, (q, k, v, log_g), (s, z))
        grads = _gradients(*inputs, *_cut(*part, (out, norm), ends), *numbers)
        _write(_cut(*part, of_tokens, of_rows), grads)
    return _or_empty(of_tokens + of_rows, q)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.numbers = inputs[7:]
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, _, ds_out, dz_out):
    tensors, ends = ctx.saved_tensors, (ds_out, dz_out) if ctx.numbers[-1] else (None, None)
    grads = power_eager_backward(dout, *ends, *tensors, *ctx.numbers)
    return *(None if x is None else dx for x, dx in zip(tensors[:6], grads, strict=True)), *[None] * 7


def _like_forward(q, k, v, log_g, s, z, cu_seqlens, p, scale, normalize, eps, chunk_size, return_state):
    dtype = torch.promote_types(q.dtype, torch.float32)
    sequences = (q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, k.shape[2])
    normalizer = q.new_empty(q.shape[:3], dtype=dtype) if normalize else None
    s_out = z_out = None
    if return_state:
        z_out = q.new_empty(*sequences, spow_dim(k.shape[3], p), dtype=dtype)
        s_out = q.new_empty(*z_out.shape, v.shape[3], dtype=dtype)
    return v.new_empty(*q.shape[:3], v.shape[3]), *_or_empty((normalizer, s_out, z_out), q)


@operator(_like_forward, _keep, _backward, devices=ALL_DEVICES)
def power_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes out [B, T, H, V], the normalizer [B, T, H], and s and z after the last token.

    Shapes are those of `power_attention`. What the call has not is empty. chunk_size 0: by `default_chunk_size`.
    """
    numbers = (p, scale, normalize, eps, chunk_size, return_state)
    if cu_seqlens is None:
        return _forward(q, k, v, log_g, s, z, *numbers)
    results = _like_forward(q, k, v, log_g, s, z, cu_seqlens, *numbers)
    of_tokens, of_rows = (results[0], results[1] if normalize else None), results[2:] if return_state else (None, None)
    for x, before in zip(of_rows, (s, z), strict=True):  # of documents without tokens
        if x is not None:
            x.zero_() if before is None else x.copy_(before)
    for part in _documents(cu_seqlens, q.shape[1]):
        _write(_cut(*part, of_tokens, of_rows), _forward(*_cut(*part, (q, k, v, log_g), (s, z)), *numbers))
    return results


def _forward(q, k, v, log_g, s, z, *numbers):
    out, normalizer, _, _, s_out, z_out = eager.forward(q, k, v, log_g, s, z, _options(q, k, v, s, *numbers))
    return out, *_or_empty((normalizer, s_out, z_out), q)


def _like_delta_backward(dout, dlast, q, k, beta, log_g, state, errors, *_):
    return _or_empty(tuple(None if x is None else x.new_empty(x.shape) for x in (q, k, errors, beta, log_g, state)), q)


@operator(_like_delta_backward, devices=ALL_DEVICES)
def delta_eager_backward(
    dout: Tensor,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_g: Tensor | None,
    state: Tensor | None,
    errors: Tensor,
    u: Tensor,
    last: Tensor,
    p: int,
    chunk_size: int,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k, v, beta, log_g and the incoming state, empty for inputs that the call has not."""
    options = DeltaOptions(p, chunk_size or None, return_state)
    end = last if return_state else None
    grads = delta_solve.backward(delta_solve, q, k, beta, log_g, state, errors, u, end, dout, dlast, options)
    return _or_empty(grads, q)


def _keep_delta(ctx, inputs, output):
    q, k, _, beta, log_g, state, *ctx.numbers = inputs
    _, last, errors, u = output
    ctx.save_for_backward(q, k, beta, log_g, state, errors, u, last)
    ctx.set_materialize_grads(False)


def _delta_backward(ctx, dout, dlast, *_):
    q, k, beta, log_g, state, errors, u, last = ctx.saved_tensors
    dout = torch.zeros(*q.shape[:3], errors.shape[3], dtype=q.dtype, device=q.device) if dout is None else dout
    dlast = dlast if ctx.numbers[-1] else None
    grads = delta_eager_backward(dout, dlast, q, k, beta, log_g, state, errors, u, last, *ctx.numbers)
    present = (True, True, True, True, log_g is not None, state is not None)
    return *(dx if has else None for has, dx in zip(present, grads, strict=True)), *[None] * 3


def _like_delta(q, k, v, beta, log_g, state, p, chunk_size, return_state):
    last = q.new_empty(q.shape[0], k.shape[2], spow_dim(k.shape[3], p), v.shape[3]) if return_state else None
    return v.new_empty(*q.shape[:3], v.shape[3]), *_or_empty((last,), q), v.new_empty(v.shape), v.new_empty(v.shape)


@operator(_like_delta, _keep_delta, _delta_backward, devices=ALL_DEVICES)
def delta_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_g: Tensor | None,
    state: Tensor | None,
    p: int,
    chunk_size: int,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes out, the last state, and errors and updates [B, T, G, V] of `power_delta_rule`, for inputs of one dtype.

    The last state is empty unless `return_state`. chunk_size 0: the implementation chooses.
    """
    options = DeltaOptions(p, chunk_size or None, return_state)
    out, last, errors, u = delta_solve.forward(delta_solve, q, k, v, beta, log_g, state, options)
    delta_solve.check_range(out, (q, k, v, beta, log_g, state))
    return out.contiguous(), *_or_empty((last if return_state else None,), q), errors.contiguous(), u.contiguous()
