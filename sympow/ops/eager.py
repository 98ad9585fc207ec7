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

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.availability import constant_result, has_values, kept, without_autocast
from sympow.ops.context_parallel import exclusive_scan
from sympow.ops.cost import power_flops
from sympow.ops.feature_map import MOST_OF_STATES, spow, spow_dim
from sympow.ops.first_order import first_order
from sympow.ops.gate_sums import gate_sums, hardest, joined, split
from sympow.ops.monomials import Basis, Features, basis
from sympow.ops.types import OutOfRangeError, PowerState, check_states

# Costs besides the matrix products, in floating-point operations of matrix products that take the same time on two CPU
# cores: the passes over a score, an element of phi, and a call into torch. The last two numbers are the calls for a
# chunk and for a block of its scores, without the calls that compute phi.
_SCORE_FLOPS, _FEATURE_FLOPS, _CALL_FLOPS = 16, 16, 2e6
_CHUNK_CALLS, _BLOCK_CALLS = 100, 12

# Rows of scores formed at once: the triangle above the diagonal is skipped in blocks of this size.
SCORE_ROWS = 128


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

    The quadratic form is the only one for p > MOST_OF_STATES.
    """
    (batch, time, groups, key_dim), value_dim = k.shape, v.shape[3]
    if p > MOST_OF_STATES:
        return time
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
        if options.return_state:
            sequence.check_end(s_out, z_out, s, z)
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


class Options(NamedTuple):
    """Holds the options of a call."""

    p: int
    scale: float
    normalize: bool
    eps: float
    chunk_size: int
    return_state: bool
    context_group: dist.ProcessGroup | None


class Chunk(NamedTuple):
    """Holds one chunk of the inputs, padded with zeros to whole blocks of scores; N = B G heads, time last."""

    q: Tensor  # [N, K, R, C], times scale
    k: Tensor  # [N, K, C]
    v: Tensor  # [N, V + 1, C], the last channel 1
    past: Tensor  # [N, 1, 1, C]: the decay from the start of the chunk to each query
    kept: Tensor  # [N, 1, C]: the decay from each token to the chunk's end
    sums: Tensor | None  # [parts, N, C]: `gate_sums` from the chunk's start to each token, its own gate included


class Decays(NamedTuple):
    """Holds decays of n chunks, as those of a chunk. Behind the last token are gates of 1."""

    sums: Tensor  # [parts, N, n, C]
    past: Tensor  # [N, n, C]
    kept: Tensor  # [N, n, C]


class ChunkedSequence:
    """Holds the inputs of one call, and cuts them into chunks.

    Args:
        q: [B, T, H, K]. k: [B, T, G, K]. v: [B, T, G, V]. log_g: [B, T, G], or None.
        options: of the call.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, options: Options):
        self.q, self.k, self.v, self.log_g, self.options = q, k, v, log_g, options
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.batch, self.time, self.groups, self.key_dim = k.shape
        self.rows = q.shape[2] // self.groups  # R
        self._weights: Tensor | None = None  # not a cached_property, which torch.compile does not trace
        size = options.chunk_size
        self.spans = [slice(i, min(i + size, self.time)) for i in range(0, self.time, size)]
        self.gates = None if log_g is None else self._decays(log_g)

    def _decays(self, log_g: Tensor) -> Decays:
        """Returns the decays of all chunks at once, because each operation on so few numbers costs about its call."""
        size = min(self.options.chunk_size, self.time)
        gates = log_g.transpose(1, 2).flatten(0, 1)
        gates = pad(gates, (0, len(self.spans) * size - self.time)).unflatten(1, (-1, size))
        sums = gate_sums(pad(gates, (0, whole_blocks(size) - size)), 2, self.dtype)
        past, kept = joined(sums).to(self.dtype), joined(sums[..., -1:] - sums).to(self.dtype)
        return Decays(sums, decay_factors(past, past[..., :1]), decay_factors(kept))

    @property
    def basis(self) -> Basis:
        """Returns the rows of the state. The quadratic form has no state, and for a large p these rows are too many."""
        return basis(self.key_dim, self.options.p)

    @property
    def weights(self) -> Tensor:
        """Returns the weights of the rows of the state, [D]."""
        if self._weights is None:
            self._weights = _weights(self.key_dim, self.options.p, self.q.device, self.dtype)
        return self._weights

    def chunk(self, span: slice) -> Chunk:
        """Returns the tensors of the chunk at `span`."""
        q = self.queries(self.q[:, span]).mul_(self.options.scale)
        k, v = self.keys(self.k[:, span]), self.keys(self.v[:, span], ones=True)
        if self.gates is None:
            one = v.new_ones(1, 1, 1)
            return Chunk(q, k, v, one[None], one, None)
        index, time = span.start // self.options.chunk_size, k.shape[2]
        past, kept = (x[:, index, None, :time] for x in (self.gates.past, self.gates.kept))
        return Chunk(q, k, v, past[:, None], kept, self.gates.sums[:, :, index, :time])

    def queries(self, x: Tensor) -> Tensor:
        """Returns [B, C, H, *] as a new [N, *, R, C], C filled up."""
        grouped = x.unflatten(2, (self.groups, self.rows)).permute(0, 2, 4, 3, 1)
        out = self._filled(grouped.shape)
        out[..., : x.shape[1]] = grouped
        return out.flatten(0, 1)

    def keys(self, x: Tensor, ones: bool = False) -> Tensor:
        """Returns [B, C, G, *] as a new [N, *, C], C filled up, with one more channel of ones if asked."""
        grouped = x.permute(0, 2, 3, 1)
        out = self._filled((*grouped.shape[:2], grouped.shape[2] + ones, grouped.shape[3]))
        out[:, :, : grouped.shape[2], : x.shape[1]] = grouped
        out[:, :, grouped.shape[2] :] = 1
        return out.flatten(0, 1)

    def _filled(self, shape: Sequence[int]) -> Tensor:
        """Returns an uninitialised tensor for `shape`, with time rounded up to whole blocks of scores by zeros."""
        *channels, time = shape
        out = self.q.new_empty(*channels, whole_blocks(time), dtype=self.dtype)
        out[..., time:] = 0
        return out

    def from_queries(self, x: Tensor, span: slice) -> Tensor:
        """Returns [N, *, R, C] as [B, span, H, *]."""
        grouped = x.unflatten(0, (self.batch, self.groups))[..., : span.stop - span.start]
        return grouped.permute(0, 4, 1, 3, 2).flatten(2, 3)

    def from_keys(self, x: Tensor, span: slice) -> Tensor:
        """Returns [N, *, C] as [B, span, G, *]."""
        return x.unflatten(0, (self.batch, self.groups))[..., : span.stop - span.start].permute(0, 3, 1, 2)

    def state(self, s: Tensor | None, z: Tensor | None) -> Tensor:
        """Returns the state in the basis of `monomials`, s and z side by side: [N, V + 1, D], to be written to."""
        if s is None and z is None:
            check_states(self.batch, self.k, self.v, self.options.p)
            shape = (self.batch * self.groups, self.v.shape[3] + 1, len(self.weights))
            return self.q.new_zeros(shape, dtype=self.dtype)
        public = (self.batch, self.groups, len(self.basis.roots))
        s = self.q.new_zeros(*public, self.v.shape[3]) if s is None else s
        z = self.q.new_zeros(public) if z is None else z
        both = torch.cat([s, z[..., None]], dim=3).to(self.dtype).flatten(0, 1).transpose(1, 2)
        return (both / self.basis.roots.to(both))[:, :, self.basis.index.to(both.device)].contiguous()

    def public_state(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inverse of `state`: s [B, G, D, V] and z [B, G, D] in the basis (M7)."""
        state = state[:, :, self.basis.representative.to(state.device)] * self.basis.roots.to(state)
        state = state.transpose(1, 2).unflatten(0, (self.batch, self.groups))
        return state[..., :-1].contiguous(), state[..., -1].contiguous()

    def advance(self, state: Tensor, chunk: Chunk) -> None:
        """Steps the state over a chunk by (M12), in place."""
        state *= chunk.past[..., -1]
        Features(chunk.k, self.options.p).accumulate(state, chunk.v * chunk.kept)

    def rewind(self, dstate: Tensor, chunk: Chunk, dtotal: Tensor) -> None:
        """Computes, in place, the gradient of the state before a chunk from that of the state after it."""
        dstate *= chunk.past[..., -1]
        Features(chunk.q.flatten(2), self.options.p).accumulate(dstate, (dtotal * chunk.past).flatten(2))

    def log_decay(self) -> Tensor:
        """Sums the log decays of all tokens: [N]."""
        if self.log_g is None:
            return self.q.new_zeros(self.batch * self.groups, dtype=self.dtype)
        return self.log_g.sum(1, dtype=torch.float64).flatten()

    def check_range(self, total: Tensor, s: Tensor | None, z: Tensor | None) -> None:
        """Raises OutOfRangeError if sums, of finite inputs and of the state s, z, have left the range of their dtype.

        Values are checked on a CPU only, because the host would have to wait for a GPU.

        Args:
            total: the sums.
            s: of the state, or None.
            z: of the state, or None.
        """
        if self._leaves_range((total,), s, z):
            p, dtype = self.options.p, self.dtype
            norms = (x.detach().double().norm(dim=-1).max() for x in (self.q, self.k))
            largest = abs(self.options.scale) * math.prod(norms)
            limit = (torch.finfo(dtype).max / self.time) ** (1 / p)
            raise OutOfRangeError(
                f"the sums of (scale q.k)**p leave the range of {dtype}: norms of q and k allow |scale q.k| up to "
                f"{largest:.1e}, and p = {p} over T = {self.time} tokens is safe up to {limit:.1e}; use smaller q and k"
            )

    def check_end(self, s_out: Tensor, z_out: Tensor, s: Tensor | None, z: Tensor | None) -> None:
        """Raises OutOfRangeError as `check_range`, for the state s_out, z_out after the last token.

        The output may be in range where the state is not, as that of queries orthogonal to large keys.
        """
        if self._leaves_range((s_out, z_out), s, z):
            raise OutOfRangeError(
                f"the state leaves the range of {self.dtype}: it sums products of p = {self.options.p} channels of k, "
                "alone and times v; use smaller k and v"
            )

    def _leaves_range(self, sums: Sequence[Tensor], s: Tensor | None, z: Tensor | None) -> bool:
        if sums[0].device.type != "cpu" or not has_values(sums[0]) or all(x.isfinite().all() for x in sums):
            return False
        return all(x is None or x.isfinite().all() for x in (self.q, self.k, self.v, self.log_g, s, z))

    def attend(self, chunk: Chunk, state: Tensor | None) -> Tensor:
        """Computes numerator and normalizer of a chunk's outputs (M11), side by side: [N, V + 1, R, C]."""
        if state is None:
            total = chunk.q.new_zeros(chunk.q.shape[0], chunk.v.shape[1], *chunk.q.shape[2:])
        else:
            total = Features(chunk.q.flatten(2), self.options.p).read(state * self.weights)
            total = total.unflatten(2, chunk.q.shape[2:]).mul_(chunk.past)
        for block in score_blocks(chunk):
            weight = block.decayed(power(block.scores(), self.options.p))
            block.add_rows(total, (block.v @ weight), block.row_decay)
        return total


class Block:
    """Scores of some query rows with some keys: s [M, n, R c], keys along dim 1, rows of the group's heads along dim 2.

    There are two kinds. One holds all blocks on the diagonal as one batch, M = N blocks of c rows and n = c keys, with
    a decay (or only a mask) for each score. These decays are of sums rounded to a grid, whose differences are exact,
    and a factor near 1 of each row and key has the rest. The other is one block of rows, M = N, with all n keys before
    it. The decay from a key to a row is then the product of two decays, each at most 1: from the key to the start of
    the block, and from there to the row. So no score needs an exponential.

    Args:
        chunk: the chunk that the block is part of.
        index: the number of the block of rows, from 1; None: all blocks on the diagonal.
        row_decay: [M, 1, 1, c], or None.
        key_decay: [M, 1, n], or None.
        pair_decay: [M, n, 1, c], or None.
    """

    def __init__(
        self,
        chunk: Chunk,
        index: int | None,
        row_decay: Tensor | None = None,
        key_decay: Tensor | None = None,
        pair_decay: Tensor | None = None,
    ):
        self.index, self.size, self.heads = index, min(SCORE_ROWS, chunk.k.shape[2]), len(chunk.k)
        self.q, self.k, self.v = self.rows(chunk.q), self.keys(chunk.k), self.keys(chunk.v)
        self.row_decay, self.key_decay, self.pair_decay = row_decay, key_decay, pair_decay
        if key_decay is not None:
            self.v = self._times(self.v, key_decay)

    def _times(self, x: Tensor, decay: Tensor) -> Tensor:
        """Returns x [M, ...], what `keys` or `rows` has selected of several channels, times a decay.

        Blocks of several heads are copies, which may be overwritten.
        """
        copied = self.index is None and len(self.k) > self.heads > 1
        return x.mul_(decay) if copied else x * decay

    def scores(self) -> Tensor:
        """Returns the products of all keys with all queries of the block."""
        return self.k.transpose(1, 2) @ self.q

    def decayed(self, scores: Tensor) -> Tensor:
        """Multiplies scores by their own decays, in place."""
        if self.pair_decay is not None:
            scores.unflatten(2, (-1, self.size)).mul_(self.pair_decay)
        return scores

    def rows(self, x: Tensor) -> Tensor:
        """Selects rows: [N, *, R, C] -> [M, *, R c]."""
        if self.index is None:
            return x.unflatten(3, (-1, self.size)).permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
        return x[..., self.index * self.size : (self.index + 1) * self.size].flatten(2)

    def keys(self, x: Tensor) -> Tensor:
        """Selects keys: [N, *, C] -> [M, *, n]."""
        if self.index is None:
            return x.unflatten(2, (-1, self.size)).transpose(1, 2).flatten(0, 1)
        return x[..., : self.index * self.size]

    def decayed_rows(self, x: Tensor) -> Tensor:
        """Multiplies `rows` of x by their decay."""
        rows = self.rows(x)
        if self.row_decay is None:
            return rows
        return self._times(rows.unflatten(2, (-1, self.size)), self.row_decay).flatten(2)

    def add_rows(self, out: Tensor, rows: Tensor, decay: Tensor | None = None) -> None:
        """Adds to the rows of out: out [N, *, R, C] += rows [M, *, R c], times their decay."""
        rows = rows.unflatten(2, (out.shape[2], self.size))
        if self.index is None:
            own = out.unflatten(3, (-1, self.size))
            rows = rows.unflatten(0, (self.heads, -1)).permute(0, 2, 3, 1, 4)
            if decay is not None:
                decay = decay.unflatten(0, (self.heads, -1)).permute(0, 2, 3, 1, 4)
            own.add_(rows) if decay is None else own.addcmul_(rows, decay)
            return
        own = out[..., self.index * self.size : (self.index + 1) * self.size]
        own.add_(rows) if decay is None else own.addcmul_(rows, decay)

    def add_keys(self, out: Tensor, keys: Tensor, decay: Tensor | None = None) -> None:
        """Adds to the keys of out: out [N, *, C] += keys [M, *, n], times their decay."""
        if self.index is None:
            own = out.unflatten(2, (-1, self.size))
            keys = keys.unflatten(0, (self.heads, -1)).transpose(1, 2)
            if decay is not None:
                decay = decay.unflatten(0, (self.heads, -1)).transpose(1, 2)
            own.add_(keys) if decay is None else own.addcmul_(keys, decay)
            return
        own = out[..., : self.index * self.size]
        own.add_(keys) if decay is None else own.addcmul_(keys, decay)


def score_blocks(chunk: Chunk) -> Iterator[Block]:
    """Yields all scores of a chunk with itself; those in the future are left out or masked."""
    yield _diagonal(chunk)
    size = SCORE_ROWS
    starts = range(size, chunk.k.shape[2], size)
    if chunk.sums is None or not starts:
        yield from (Block(chunk, index) for index in range(1, len(starts) + 1))
        return
    blocks = chunk.sums.unflatten(2, (-1, size))
    before = blocks[:, :, :-1, -1:]  # [parts, N, blocks, 1]
    rows = decay_factors(joined(blocks[:, :, 1:] - before).to(chunk.k.dtype))[:, :, None, None]
    sums = chunk.sums[:, :, None]
    for index, (first, row_decay) in enumerate(zip(before[..., None].unbind(2), rows.unbind(1), strict=True), 1):
        keys = joined(first - sums[..., : index * size]).to(chunk.k.dtype)
        yield Block(chunk, index, row_decay, decay_factors(keys))


def _diagonal(chunk: Chunk) -> Block:
    size = min(SCORE_ROWS, chunk.k.shape[2])
    future = chunk.k.new_full((size, size), -torch.inf).tril(-1)  # keys along dim 0, rows along dim 1
    if chunk.sums is None:
        return Block(chunk, None, pair_decay=decay_factors(future[None, :, None]))
    own = chunk.sums.unflatten(2, (-1, size)).flatten(1, 2)  # [parts, M, c]
    log_decay, rest = split(own - own[..., :1], chunk.k.dtype)
    pair = (log_decay[:, None] - log_decay[:, :, None]).add_(future)
    row_decay = rest.exp()[:, None]
    return Block(chunk, None, row_decay[:, None], row_decay.reciprocal(), decay_factors(pair)[:, :, None])


@constant_result
def _weights(key_dim: int, p: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the weights of the rows of the state on a device, where a CUDA graph can read them."""
    return _kept_weights(key_dim, p, device, dtype)


@kept(32)
def _kept_weights(key_dim: int, p: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in that mode could not be used with gradients later
        return basis(key_dim, p).weights.to(device, dtype, copy=True)


def whole_blocks(time: int) -> int:
    """Rounds a number of tokens up to whole blocks of scores, unless one block holds them."""
    return time if time <= SCORE_ROWS else -(-time // SCORE_ROWS) * SCORE_ROWS


def decay_factors(log_decay: Tensor, largest: Tensor | None = None) -> Tensor:
    """Returns exp(log_decay), and 0 in place of factors below the square root of the smallest normal number.

    So a product of two factors is 0 or a normal number. Many processors compute slowly with subnormal numbers,
    which are smaller than normal ones. The factors that become 0 are at most 1.1e-19 in float32, or so much of
    exp(largest), if `largest`, which is <= 0 and broadcasts to log_decay, is given.
    """
    least = math.log(torch.finfo(log_decay.dtype).tiny)
    if largest is None:  # many processors also compute exp(-inf) slowly
        smallest = math.exp(least / 2) * (1 + 4 * torch.finfo(log_decay.dtype).eps)
        return torch.threshold_(log_decay.clamp(min=least / 2).exp_(), smallest, 0)
    return log_decay.masked_fill(log_decay < (largest + least / 2).clamp(min=least), -math.inf).exp_()


def power(s: Tensor, p: int) -> Tensor:
    """Computes s**p as a new tensor."""
    return s * s if p == 2 else s.pow(p)
