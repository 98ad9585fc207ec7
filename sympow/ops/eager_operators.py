"""Power attention and its delta rule in plain torch as PyTorch operators, for torch.compile.

A graph with the operators is right for all lengths. Compiled code calls the functions of other files.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sympow.ops import delta_solve, eager
from sympow.ops.availability import without_autocast
from sympow.ops.delta_types import DeltaOptions
from sympow.ops.eager import Options
from sympow.ops.feature_map import spow_dim
from sympow.ops.runtime.launcher import ALL_DEVICES, operator
from sympow.ops.types import PowerState


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: PowerState | None, *,
    p: int, scale: float, normalize: bool, eps: float, chunk_size: int | None, return_state: bool,
) -> tuple[Tensor, PowerState | None]:  # fmt: skip
    """Computes `eager.chunked` by one operator. A trace of the loop over chunks would be of one length only."""
    s, z = (None, None) if state is None else (state.s, state.z)
    with without_autocast(q):
        numbers = (p, scale, normalize, eps, chunk_size or 0, return_state)
        out, _, s, z = power_eager(q, k, v, log_g, s, z, *numbers)
    return out, PowerState(s, z, p, k.shape[-1]) if return_state else None


def _options(q, k, v, s, p, scale, normalize, eps, chunk_size, return_state) -> Options:
    size = chunk_size or eager.default_chunk_size(q, k, v, p, s is not None or return_state)
    return Options(p, scale, normalize, eps, size, return_state, None)


def _or_empty(tensors: tuple[Tensor | None, ...], like: Tensor) -> tuple[Any, ...]:
    """Returns the tensors, contiguous, and empty ones in place of None, which an operator cannot return."""
    return tuple(like.new_empty(0) if x is None else x.contiguous() for x in tensors)


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
    options = _options(q, k, v, s, p, scale, normalize, eps, chunk_size, return_state)
    ctx = SimpleNamespace(options=options, needs_input_grad=[True] * 7)
    ends = (s_out, z_out) if return_state else (None, None)
    saved = (q, k, v, log_g, s, z, out, normalizer if normalize else None, *ends)
    dq, dk, dv, dlog_g, ds, dz, _ = eager.gradients(ctx, saved, dout, ds_out, dz_out)
    return _or_empty((dq, dk, dv, dlog_g, ds, dz), q)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.numbers = inputs[6:]
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, _, ds_out, dz_out):
    tensors, ends = ctx.saved_tensors, (ds_out, dz_out) if ctx.numbers[-1] else (None, None)
    grads = power_eager_backward(dout, *ends, *tensors, *ctx.numbers)
    return *(None if x is None else dx for x, dx in zip(tensors[:6], grads, strict=True)), *[None] * 6


def _like_forward(q, k, v, log_g, s, z, p, scale, normalize, eps, chunk_size, return_state):
    dtype, sequences = torch.promote_types(q.dtype, torch.float32), (q.shape[0], k.shape[2])
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
    options = _options(q, k, v, s, p, scale, normalize, eps, chunk_size, return_state)
    out, normalizer, _, _, s_out, z_out = eager.forward(q, k, v, log_g, s, z, options)
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
    return out.contiguous(), *_or_empty((last if return_state else None,), q), errors.contiguous(), u.contiguous()
