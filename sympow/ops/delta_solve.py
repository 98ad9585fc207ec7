"""The delta rule by a backend, and the backend in plain torch: prediction errors and their gradients, by chunks.

A token adds u = beta e to the state, where e is the error of what the state predicts for its key. Given u, output and
last state are those of power attention with the values u (M22), (M23). So a backend only finds e, and in the backward
the gradient of e. Within a chunk both are solutions of a triangular system (M21). Between chunks they need phi only
against the state, which is in the basis of `monomials`, [N, V, rows] for N = B G heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.ops import eager
from sympow.ops.availability import has_values
from sympow.ops.delta_types import DeltaBackend, DeltaGradients, DeltaOptions
from sympow.ops.eager import Options
from sympow.ops.feature_map import spow_dim
from sympow.ops.gate_sums import gate_sums, joined
from sympow.ops.monomials import Basis, Features, basis
from sympow.ops.types import OutOfRangeError, PowerState, check_states

_LEAST_CHUNK = 64


class Chunk(NamedTuple):
    """Holds one chunk; N = B G heads, time last."""

    k: Tensor  # [N, K, C]
    beta: Tensor  # [N, C]
    weights: Tensor  # [N, C, C]: (k_i . k_j)**p times the decay from j to i, for j < i; otherwise 0
    past: Tensor  # [N, 1, C]: the decay from the start of the chunk to each token
    kept: Tensor  # [N, 1, C]: the decay from each token to the chunk's end


def forward(
    backend: DeltaBackend, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None,
    options: DeltaOptions,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Computes output, last state, errors and updates, by (M21) to (M23); shapes are those of `DeltaBackend`."""
    errors, u, states = backend.solve(k, v, beta, log_g, state, options)
    out, last = backend.attend(q, k, u, log_g, state, states, options)
    return out, last, errors, u


def check_range(out: Tensor, inputs: tuple[Tensor | None, ...]) -> None:
    """Raises OutOfRangeError on a CPU if the output of finite inputs is not finite; `eager` checks the last state."""
    if out.device.type != "cpu" or not has_values(out) or out.isfinite().all():
        return
    if all(x is None or x.isfinite().all() for x in inputs):
        raise OutOfRangeError(
            f"the state of the delta rule leaves the range of {out.dtype}: without qk_norm, beta |k|**(2 p) must be at "
            "most 2"
        )


def backward(
    backend: DeltaBackend, q: Tensor, k: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None,
    errors: Tensor, u: Tensor, last: Tensor | None, dout: Tensor, dlast: Tensor | None, options: DeltaOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes the gradients of q, k, v, beta, log_g and the incoming state, by (M24)."""
    dq, dk, du, dlog_g, dstate, kept = backend.attend_gradient(q, k, u, log_g, state, last, dout, dlast, options)
    dv, dbeta = backend.solve_gradient(k, errors, beta, log_g, du, options)
    del du  # its memory is needed
    # What is predicted for a key is taken off its value. A prediction is the output of power attention with the values
    # u, for keys as queries, and the gradient of this output is -dv. So what dv gives is subtracted. A prediction does
    # not contain the token's own update, so what its gradient takes from there is given back.
    predicted = backend.attend_gradient(k, k, u, log_g, state, None, dv, None, options, kept)
    dk = backend.key_gradient(k, u, dv, (dk, predicted.k, predicted.q), options.p)
    return dq, dk, dv, dbeta, _difference(dlog_g, predicted.log_g), _difference(dstate, predicted.state)


def _difference(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else -b if a is None else a - b


def solve(
    k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None, options: DeltaOptions
) -> tuple[Tensor, Tensor, None]:
    """Returns the errors e and the updates u = beta e, [B, T, G, V], in the dtype of k, which is float32 or float64.

    Args:
        k: [B, T, G, K].
        v: [B, T, G, V].
        beta: [B, T, G].
        log_g: [B, T, G], or None.
        state: the incoming state [B, G, D, V], or None.
        options: of the call.
    """
    p, errors = options.p, torch.empty_like(v)
    rows = None if state is None else _from_public(state, basis(k.shape[3], p))
    spans = _spans(k, v, options)
    if rows is None and len(spans) > 1:
        check_states(k.shape[0], k, v, p)
    for span in spans:
        chunk, error = _chunk(k, beta, log_g, span, p), _heads(v[:, span])
        features = Features(chunk.k, p) if rows is not None or span != spans[-1] else None
        if rows is not None and features is not None:
            error = error - chunk.past * features.read(rows * _weights(rows, k, p))
        system = chunk.weights * chunk.beta[:, None]
        error = torch.linalg.solve_triangular(system, error.mT, upper=False, unitriangular=True).mT
        errors[:, span] = _tokens(error, k)
        if span != spans[-1] and features is not None:
            rows = _zeros(k, v, p) if rows is None else rows * chunk.past[:, :, -1:]
            features.accumulate(rows, chunk.beta[:, None] * error * chunk.kept)
    return errors, beta[..., None] * errors, None


def solve_gradient(
    k: Tensor, errors: Tensor, beta: Tensor, log_g: Tensor | None, du: Tensor, options: DeltaOptions
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the values [B, T, G, V] and of beta [B, T, G].

    Args:
        k: [B, T, G, K].
        errors: of `solve`.
        beta: [B, T, G].
        log_g: [B, T, G], or None.
        du: the gradient of the updates through output and last state, [B, T, G, V].
        options: of the call.
    """
    p, drows = options.p, None
    dv, dbeta = torch.empty_like(errors), torch.empty_like(beta)
    spans = _spans(k, errors, options)
    for span in reversed(spans):
        chunk, error, d = _chunk(k, beta, log_g, span, p), _heads(errors[:, span]), _heads(du[:, span])
        features = Features(chunk.k, p) if len(spans) > 1 else None
        if drows is not None and features is not None:
            d = d + chunk.kept * features.read(drows * _weights(drows, k, p))
        # h = d - weights^T (beta h) is the gradient of what beta multiplies.
        system = (chunk.weights * chunk.beta[:, :, None]).mT
        h = torch.linalg.solve_triangular(system, d.mT, upper=True, unitriangular=True).mT
        dbeta[:, span] = _tokens((h * error).sum(1, keepdim=True), k)[..., 0]
        h = chunk.beta[:, None] * h
        dv[:, span] = _tokens(h, k)
        if span != spans[0] and features is not None:
            drows = _zeros(k, errors, p) if drows is None else drows * chunk.past[:, :, -1:]
            features.accumulate(drows, -h * chunk.past)
    return dv, dbeta


def attend(
    q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, states: None, options: DeltaOptions
) -> tuple[Tensor, Tensor | None]:
    """Computes power attention without a normalizer, see `sympow.ops.eager`; states are [B, G, D, V]."""
    before = None if state is None else PowerState(state, _no_keys(state), options.p, k.shape[3])
    out, after = eager.chunked(
        q, k, u, log_g, before, p=options.p, scale=1.0, normalize=False, eps=1.0, return_state=options.return_state,
        chunk_size=_attention_chunk(q, k, u, options, state is not None or options.return_state),
    )  # fmt: skip
    return out, None if after is None else after.s


def attend_gradient(
    q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, last: Tensor | None, dout: Tensor,
    dlast: Tensor | None, options: DeltaOptions, kept: None = None,
) -> DeltaGradients:  # fmt: skip
    """Returns the gradients of `attend`, whose last state is `last`, given those of its results."""
    chunk = _attention_chunk(q, k, u, options, state is not None or dlast is not None)
    context = SimpleNamespace(
        options=Options(options.p, 1.0, False, 1.0, chunk, dlast is not None, None), needs_input_grad=(True,) * 7
    )
    z = None if state is None else _no_keys(state)
    saved = (q, k, u, log_g, state, z, u, None, last if dlast is not None else None, None)
    dq, dk, du, dlog_g, dstate, *_ = eager.gradients(context, saved, dout, dlast, None)
    return DeltaGradients(dq, dk, du, dlog_g, dstate)


def key_gradient(k: Tensor, u: Tensor, dv: Tensor, parts: Sequence[Tensor], p: int) -> Tensor:
    """Returns the first of `parts` [B, T, G, K] less the other two, plus 2 p (k . k)**(p - 1) (dv . u) k."""
    own, (first, second, third) = (k * k).sum(-1) ** (p - 1) * (dv * u).sum(-1), parts
    return (2 * p * own)[..., None] * k + first - second - third


def _attention_chunk(q: Tensor, k: Tensor, u: Tensor, options: DeltaOptions, has_state: bool) -> int:
    return options.chunk_size or eager.default_chunk_size(q, k, u, options.p, has_state)


def _spans(k: Tensor, v: Tensor, options: DeltaOptions) -> list[slice]:
    """Cuts the time into chunks. Without states, one chunk is cheapest for rows of up to a few times D tokens."""
    time, (key_dim, value_dim) = k.shape[1], (k.shape[3], v.shape[3])
    size = options.chunk_size
    if size is None:
        dim = spow_dim(key_dim, options.p)
        alone = time * (2 * key_dim + value_dim) <= 8 * dim * value_dim
        size = time if alone else min(max(_LEAST_CHUNK, 1 << (dim // 4).bit_length()), 512)
    return [slice(i, min(i + size, time)) for i in range(0, time, size)]


def _chunk(k: Tensor, beta: Tensor, log_g: Tensor | None, span: slice, p: int) -> Chunk:
    keys, own = _heads(k[:, span]), _heads(beta[:, span, :, None])[:, 0]
    sums = _sums(log_g, span, k)
    weights = (keys.mT @ keys).pow_(p).tril_(-1)
    ones = keys.new_ones(len(keys), 1, keys.shape[2])
    if sums is None:
        return Chunk(keys, own, weights, ones, ones)
    weights *= _decays(sums, len(keys), keys.shape[2], keys)
    past, kept = joined(sums).exp(), joined(sums[:, :, -1:] - sums).exp()
    return Chunk(keys, own, weights, past[:, None].to(k.dtype), kept[:, None].to(k.dtype))


def _sums(log_g: Tensor | None, span: slice, k: Tensor) -> Tensor | None:
    """Returns the log decays from the start of a chunk to each token, [parts, N, C]."""
    if log_g is None:
        return None
    return gate_sums(_heads(log_g[:, span, :, None])[:, 0], 1, k.dtype)


def _decays(sums: Tensor | None, heads: int, time: int, like: Tensor) -> Tensor:
    """Returns the decay from token j to token i >= j, [N, C (i), C (j)]; above the diagonal the values mean nothing."""
    if sums is None:
        return like.new_ones(heads, time, time)
    if like.dtype == torch.float32:  # two numbers whose differences are exact enough, because float64 takes longer
        high = sums[0].to(like.dtype)
        sums = torch.stack([high, (sums[0] - high).to(like.dtype)])
    return joined(sums[:, :, :, None] - sums[:, :, None]).clamp_(max=0).exp_()


def _heads(x: Tensor) -> Tensor:
    """Maps [B, C, G, *] to [B G, *, C]."""
    return x.permute(0, 2, 3, 1).flatten(0, 1).contiguous()


def _tokens(x: Tensor, k: Tensor) -> Tensor:
    """Maps [B G, *, C] to [B, C, G, *]."""
    return x.unflatten(0, (k.shape[0], k.shape[2])).permute(0, 3, 1, 2)


def _weights(rows: Tensor, k: Tensor, p: int) -> Tensor:
    return basis(k.shape[3], p).weights.to(rows)


def _zeros(k: Tensor, v: Tensor, p: int) -> Tensor:
    shape: Sequence[int] = (k.shape[0] * k.shape[2], v.shape[3], len(basis(k.shape[3], p).index))
    return k.new_zeros(shape)


def _from_public(state: Tensor, rows: Basis) -> Tensor:
    """Maps a state [B, G, D, V] to the rows of `monomials`, [N, V, rows]."""
    monomials = state.flatten(0, 1).mT / rows.roots.to(state)
    return monomials[:, :, rows.index.to(state.device)].contiguous()


def _no_keys(state: Tensor) -> Tensor:
    """Returns zeros [B, G, D] for the sum of keys, which the delta rule does not keep."""
    return state.new_zeros(state.shape[:3])
