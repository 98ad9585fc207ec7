"""Power attention in plain torch, fast on any device: the chunked form (M11), (M12) with a backward of its own.

A chunk attends to its own tokens by scores, and to all tokens before it by the state. phi is computed for one chunk
and one tile of the state's rows at a time. No state is kept for the backward. The backward walks over the chunks twice:
from first to last with the state (for dq), and from last to first with the gradient of the state (for dk, dv). It
recomputes both. One chunk that covers the sequence is the quadratic form. phi is then needed only if there is an
incoming state, or if a state is returned.

Inside this file, the state holds sums of monomials x_i1 ... x_ip without weights, time is the last axis of features,
and the normalizer is one additional value column. The multinomial weights of (M7) multiply the state, once a chunk.

The gradient of the gate needs no pass of its own. A log decay L_i enters only where phi(q_i) does, as exp(L_i), and
where phi(k_i) does, as exp(-L_i), and phi is homogeneous of degree p: hence dL_i = (q_i . dq_i - k_i . dk_i) / p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sympow.ops.availability import without_autocast
from sympow.ops.context_parallel import exclusive_scan
from sympow.ops.cost import power_flops
from sympow.ops.eager_chunks import SCORE_ROWS, Chunk, ChunkedSequence, Options, power, score_blocks
from sympow.ops.feature_map import spow, spow_dim
from sympow.ops.first_order import first_order
from sympow.ops.gate_sums import hardest
from sympow.ops.monomials import Features
from sympow.ops.types import PowerState

# Costs besides the matrix products, in floating-point operations of matrix products that take the same time on two CPU
# cores: the passes over a score, an element of phi, and a call into torch. The last two numbers are the calls for a
# chunk and for a block of its scores, without the calls that compute phi.
_SCORE_FLOPS, _FEATURE_FLOPS, _CALL_FLOPS = 16, 16, 2e6
_CHUNK_CALLS, _BLOCK_CALLS = 100, 12


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    *,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int | None,
    return_state: bool,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, PowerState | None]:
    """Computes in float32 (float64 for float64 inputs), also under autocast. Shapes are those of `reference`."""
    s, z = (None, None) if state is None else (state.s, state.z)
    with without_autocast(q):
        has_state = s is not None or return_state or context_group is not None
        chunk_size = chunk_size or default_chunk_size(q, k, v, p, has_state)
        options = Options(p, scale, normalize, eps, chunk_size, return_state, context_group)
        out, s, z = _Chunked.apply(q, k, v, log_g, s, z, options)
    return out, PowerState(s, z, p, k.shape[-1]) if return_state else None


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState,
    *,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    inplace: bool,
) -> tuple[Tensor, PowerState]:
    """Decodes one token after another on a state, (M9) and (M10), in few operations.

    There are no gradients.
    """
    s, z = (state.s, state.z) if inplace else (state.s.clone(), state.z.clone())
    time, groups, key_dim = k.shape[1:]
    phi_q = spow(q.to(s.dtype).unflatten(2, (groups, q.shape[2] // groups)) * scale, p)  # [B, T, G, R, D]
    phi_k = spow(k.to(s.dtype), p)  # [B, T, G, D]
    out = s.new_empty(*phi_q.shape[:4], v.shape[-1])
    gamma = None if log_g is None else log_g.to(s.dtype).exp()
    for i in range(time):
        if gamma is not None:
            s *= gamma[:, i, :, None, None]
            z *= gamma[:, i, :, None]
        s.addcmul_(phi_k[:, i, :, :, None], v[:, i, :, None].to(s.dtype))
        z += phi_k[:, i]
        out[:, i] = phi_q[:, i] @ s
        if normalize:
            out[:, i] /= phi_q[:, i] @ z[..., None] + eps
    return out.flatten(2, 3).to(v.dtype), PowerState(s, z, p, key_dim)


def default_chunk_size(q: Tensor, k: Tensor, v: Tensor, p: int, has_state: bool = False) -> int:
    """Returns the chunk size whose estimated forward time is the least: a power of two, or T for the quadratic form.

    has_state: there is an incoming state, or one to return, so that even a single chunk computes with a state.
    """
    (batch, time, groups, key_dim), value_dim = k.shape, v.shape[3]
    rows = q.shape[2] // groups
    dim = spow_dim(key_dim, p)

    def cost(chunk: int) -> float:
        chunks = -(-time // chunk)
        flops: float = power_flops(time, key_dim, value_dim, p, chunk, heads=rows)
        flops += _SCORE_FLOPS * rows * time * (chunk + SCORE_ROWS) / 2
        # Chunk 0 reads no state and the last makes none, unless there is an incoming state, or one to return.
        first, last = chunk, time - (chunks - 1) * chunk
        meetings = (rows + 1) * time - (0 if has_state else rows * first + last)
        flops += _FEATURE_FLOPS * dim * meetings
        flops += 2 * dim * (value_dim + 1) * (rows * first + last) if has_state else 0
        calls = _CHUNK_CALLS + _BLOCK_CALLS * chunk / SCORE_ROWS
        return flops * batch * groups + _CALL_FLOPS * calls * chunks

    best, least = time, cost(time)
    for chunk in (2**i for i in range(6, 14)):  # torch.compile traces neither min of a generator nor its key
        if chunk < time and cost(chunk) < least:
            best, least = chunk, cost(chunk)
    return best


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, s: Tensor | None, z: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns out, the normalizer [B, T, H], s and z before the first token, and s and z after the last.

    What the call has not is None.
    """
    sequence = ChunkedSequence(q, k, v, log_g, options)
    last = sequence.spans[-1]
    out = v.new_empty(*q.shape[:3], v.shape[3])
    normalizer = q.new_empty(*q.shape[:3], dtype=sequence.dtype) if options.normalize else None
    state = None if s is None else sequence.state(s, z)
    if options.context_group is not None:
        own = sequence.state(None, None)
        for span in sequence.spans:
            sequence.advance(own, sequence.chunk(span))
        state = exclusive_scan(own, sequence.log_decay(), options.context_group)
        s, z = sequence.public_state(state)
    keeps_state = options.return_state or options.context_group is not None
    for span in sequence.spans:
        chunk = sequence.chunk(span)
        total = sequence.attend(chunk, state)
        sequence.check_range(total, s, z)
        if normalizer is None:
            out[:, span] = sequence.from_queries(total[:, :-1], span)
        else:
            z_chunk = total[:, -1:] + options.eps
            normalizer[:, span] = sequence.from_queries(z_chunk, span)[..., 0]
            out[:, span] = sequence.from_queries(total[:, :-1] / z_chunk, span)
        if span != last or keeps_state:
            state = sequence.state(None, None) if state is None else state
            sequence.advance(state, chunk)
    s_out = z_out = None
    if keeps_state and state is not None:
        s_out, z_out = sequence.public_state(state)
    return out, normalizer, s, z, s_out, z_out


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_g, s, z, options: Options):
        out, normalizer, s, z, s_out, z_out = forward(q, k, v, log_g, s, z, options)
        ctx.save_for_backward(q, k, v, log_g, s, z, out, normalizer, s_out, z_out)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return (out, s_out, z_out) if options.return_state else (out, None, None)

    @staticmethod
    @first_order("power_attention")
    def backward(ctx, dout, ds_out, dz_out):
        saved = ctx.saved_tensors  # read only once, because checkpointing does not keep the tensors after a read
        with without_autocast(saved[0]):
            return gradients(ctx, saved, dout, ds_out, dz_out)


def gradients(ctx, saved: Sequence, dout: Tensor | None, ds_out: Tensor | None, dz_out: Tensor | None):
    """Returns the gradients of the inputs of `_Chunked`, in their order.

    Args:
        ctx: has the `options` of the call and `needs_input_grad`.
        saved: q, k, v, log_g, s, z, out, normalizer, s_out and z_out, None for what the call has not.
        dout: the gradient of the output, or None.
        ds_out: that of the last s, or None.
        dz_out: that of the last z, or None.
    """
    q, k, v, log_g, s, z, out, normalizer, s_out, z_out = saved
    p = ctx.options.p
    sequence = ChunkedSequence(q, k, v, log_g, ctx.options)
    first, last = sequence.spans[0], sequence.spans[-1]
    dq, dk, dv = (torch.empty_like(x, dtype=sequence.dtype) for x in (q, k, v))
    dout = torch.zeros_like(out) if dout is None else dout

    def dtotal(span: slice) -> Tensor:
        """Returns the gradient of numerator and normalizer, [N, V + 1, R, C]."""
        d = dout[:, span].to(sequence.dtype)
        if normalizer is None:
            return sequence.queries(torch.cat([d, torch.zeros_like(d[..., :1])], dim=3))
        d = d / normalizer[:, span, :, None]
        return sequence.queries(torch.cat([d, -(d * out[:, span]).sum(3, keepdim=True)], dim=3))

    # First token to last, with the state: the gradient of q.
    state = None if s is None else sequence.state(s, z)
    for span in sequence.spans:
        chunk = sequence.chunk(span)
        if state is None:
            dq[:, span] = 0
            state = sequence.state(None, None) if span != last else None
        else:
            d = (dtotal(span) * chunk.past).flatten(2)
            gradient = Features(chunk.q.flatten(2), p).read_gradient(state * sequence.weights, d)
            dq[:, span] = sequence.from_queries(gradient.view_as(chunk.q), span)
        if state is not None and span != last:
            sequence.advance(state, chunk)

    # Backwards, with the state's gradient: it runs over queries as the state runs over keys, in the same basis.
    group = ctx.options.context_group
    if group is not None:
        own = sequence.state(None, None)
        for span in reversed(sequence.spans):
            sequence.rewind(own, sequence.chunk(span), dtotal(span))
        own = exclusive_scan(own, sequence.log_decay(), group, reverse=True)
        ds_out, dz_out = sequence.public_state(own)
    has_initial = s is not None and group is None
    dstate = None if ds_out is None and dz_out is None else sequence.state(ds_out, dz_out)
    for span in reversed(sequence.spans):
        chunk, d = sequence.chunk(span), dtotal(span)
        dq_c, dk_c, dv_c = _own_gradients(chunk, d, p)
        if dstate is not None:
            features, weighted = Features(chunk.k, p), dstate * sequence.weights
            dk_c += features.read_gradient(weighted, chunk.v * chunk.kept)
            dv_c += features.read(weighted).mul_(chunk.kept)
        dq[:, span] += sequence.from_queries(dq_c, span)
        dk[:, span] = sequence.from_keys(dk_c, span)
        dv[:, span] = sequence.from_keys(dv_c[:, :-1], span)
        if span != first or has_initial:
            dstate = sequence.state(None, None) if dstate is None else dstate
            sequence.rewind(dstate, chunk, d)
    dq.mul_(sequence.options.scale)

    dlog_g = None
    if log_g is not None and ctx.needs_input_grad[3]:
        queries = (q * dq).unflatten(2, (sequence.groups, -1)).sum((3, 4), dtype=torch.float64)
        dlog = (queries - (k * dk).sum(3, dtype=torch.float64)) / p
        for x, dx in ((s_out, ds_out), (z_out, dz_out)):
            if dx is not None:
                dlog[:, -1] += (x * dx).flatten(2).sum(2, dtype=torch.float64)
        dlog = dlog.flip(1).cumsum(1).flip(1).masked_fill(log_g < hardest(sequence.dtype), 0)
        dlog_g = dlog.to(log_g.dtype)
    ds, dz = (None, None) if not has_initial or dstate is None else sequence.public_state(dstate)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dlog_g, ds, dz, None


def _own_gradients(chunk: Chunk, dtotal: Tensor, p: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of dq [N, K, R, C], dk [N, K, C] and dv [N, V + 1, C] that come from the chunk's own scores."""
    dq, dk, dv = torch.zeros_like(chunk.q), torch.zeros_like(chunk.k), torch.zeros_like(chunk.v)
    for block in score_blocks(chunk):
        d = block.decayed_rows(dtotal)
        s = block.scores()
        slope = block.decayed(power(s, p - 1))
        ds = (block.v.transpose(1, 2) @ d).mul_(slope).mul_(p)
        block.add_keys(dv, d @ slope.mul_(s).transpose(1, 2), block.key_decay)
        block.add_rows(dq, block.k @ ds)
        block.add_keys(dk, block.q @ ds.transpose(1, 2))
    return dq, dk, dv
