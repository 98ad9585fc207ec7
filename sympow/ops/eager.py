"""Power attention in plain torch, fast on any device: the chunked form (M11), (M12) with a backward of its own.

A chunk attends to itself through its scores and to everything before through the state. phi is never formed for more
than a chunk and a tile of the state's rows, and no state is kept for the backward: it walks the chunks twice, forwards
with the state (for dq) and backwards with the state's gradient (for dk, dv), and recomputes both. One chunk that covers
the sequence is the quadratic form; phi is then formed only if a state comes in or goes out.

Inside, the state is kept as sums of plain monomials x_i1 ... x_ip, time runs along the last axis of features, and the
normalizer is one more value column. The multinomial weights of (M7) multiply the state, once a chunk.

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

from sympow.ops.context import exclusive_scan
from sympow.ops.cost import power_flops
from sympow.ops.feature_map import spow, spow_dim
from sympow.ops.monomials import Features, basis
from sympow.ops.types import PowerState

# What else takes time, in floating-point operations of matrix products that take as long, measured on two CPU cores:
# a score's passes from decay to power, an element of phi, a call into torch; and how many calls a chunk and one block
# of its scores make, apart from those that form phi.
_SCORE_FLOPS, _FEATURE_FLOPS, _CALL_FLOPS = 16, 16, 2e6
_CHUNK_CALLS, _BLOCK_CALLS = 100, 12

# Rows of scores formed at once: the triangle above the diagonal is skipped in blocks of this size.
_SCORE_ROWS = 128


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
    chunk_size: int,
    return_state: bool,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, PowerState | None]:
    """Computes in float32 (float64 for float64 inputs), whatever autocast says. Shapes are those of `reference`."""
    options = _Options(p, scale, normalize, eps, chunk_size, return_state, context_group)
    s, z = (None, None) if state is None else (state.s, state.z)
    with torch.autocast(q.device.type, enabled=False):
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
    """Decodes one token after another on a state, (M9) and (M10), in as few operations as it takes.

    No gradients.
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

    has_state: a state comes in or goes out, so that even a single chunk meets one.
    """
    (batch, time, groups, key_dim), value_dim = k.shape, v.shape[3]
    rows = q.shape[2] // groups
    dim = spow_dim(key_dim, p)

    def cost(chunk: int) -> float:
        chunks = -(-time // chunk)
        flops: float = power_flops(time, key_dim, value_dim, p, chunk, heads=rows)
        flops += _SCORE_FLOPS * rows * time * (chunk + _SCORE_ROWS) / 2
        # Chunk 0 reads no state and the last makes none, unless one comes in or goes out.
        first, last = chunk, time - (chunks - 1) * chunk
        meetings = (rows + 1) * time - (0 if has_state else rows * first + last)
        flops += _FEATURE_FLOPS * dim * meetings
        flops += 2 * dim * (value_dim + 1) * (rows * first + last) if has_state else 0
        calls = _CHUNK_CALLS + _BLOCK_CALLS * chunk / _SCORE_ROWS
        return flops * batch * groups + _CALL_FLOPS * calls * chunks

    sizes = [2**i for i in range(6, 14) if 2**i < time]
    return min((cost(chunk), chunk) for chunk in [*sizes, time])[1]  # min's key is unknown to torch.compile of 2.10


class _Options(NamedTuple):
    p: int
    scale: float
    normalize: bool
    eps: float
    chunk_size: int
    return_state: bool
    context_group: dist.ProcessGroup | None


class _Chunk(NamedTuple):
    """One chunk of the inputs, filled up with zeros to whole blocks of scores; N = B G heads, time last."""

    q: Tensor  # [N, K, R, C], times scale
    k: Tensor  # [N, K, C]
    v: Tensor  # [N, V + 1, C], the last channel 1
    past: Tensor  # [N, 1, 1, C]: what is left, at each query, of the state from before
    kept: Tensor  # [N, 1, C]: what is left of each token at the chunk's end
    decay: Tensor | None  # [N, C]: log decay from the chunk's start up to and with each token

    @property
    def left(self) -> Tensor:
        """What is left, at the chunk's end, of the state from before: [N, 1, 1]."""
        return self.past[..., -1]


class _Sequence:
    """The inputs of one call and the walk over their chunks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, options: _Options):
        self.q, self.k, self.v, self.log_g, self.options = q, k, v, log_g, options
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.batch, self.time, self.groups, self.key_dim = k.shape
        self.rows = q.shape[2] // self.groups  # R
        self.basis = basis(self.key_dim, options.p)
        self.weights = self.basis.weights.to(q.device, self.dtype)
        size = options.chunk_size
        self.spans = [slice(i, min(i + size, self.time)) for i in range(0, self.time, size)]

    def chunk(self, span: slice) -> _Chunk:
        q = self.queries(self.q[:, span]).mul_(self.options.scale)
        k, v = self.keys(self.k[:, span]), self.keys(self.v[:, span], ones=True)
        if self.log_g is None:
            one = v.new_ones(1, 1, 1)
            return _Chunk(q, k, v, one[None], one, None)
        decay = self.keys(self.log_g[:, span, :, None])[:, 0].cumsum(1)
        return _Chunk(q, k, v, decay.exp()[:, None, None], (decay[:, -1:] - decay).exp()[:, None], decay)

    def queries(self, x: Tensor) -> Tensor:
        """[B, C, H, *] -> a new [N, *, R, C], C filled up."""
        grouped = x.unflatten(2, (self.groups, self.rows)).permute(0, 2, 4, 3, 1)
        out = self._filled(grouped.shape)
        out[..., : x.shape[1]] = grouped
        return out.flatten(0, 1)

    def keys(self, x: Tensor, ones: bool = False) -> Tensor:
        """[B, C, G, *] -> a new [N, *, C], C filled up, with one more channel of ones if asked."""
        grouped = x.permute(0, 2, 3, 1)
        out = self._filled((*grouped.shape[:2], grouped.shape[2] + ones, grouped.shape[3]))
        out[:, :, : grouped.shape[2], : x.shape[1]] = grouped
        out[:, :, grouped.shape[2] :] = 1
        return out.flatten(0, 1)

    def _filled(self, shape: Sequence[int]) -> Tensor:
        """An uninitialised tensor for `shape` with whole blocks of scores along time, zero where that is longer."""
        *channels, time = shape
        out = self.q.new_empty(*channels, _whole_blocks(time), dtype=self.dtype)
        out[..., time:] = 0
        return out

    def from_queries(self, x: Tensor, span: slice) -> Tensor:
        """[N, *, R, C] -> [B, span, H, *]."""
        grouped = x.unflatten(0, (self.batch, self.groups))[..., : span.stop - span.start]
        return grouped.permute(0, 4, 1, 3, 2).flatten(2, 3)

    def from_keys(self, x: Tensor, span: slice) -> Tensor:
        """[N, *, C] -> [B, span, G, *]."""
        return x.unflatten(0, (self.batch, self.groups))[..., : span.stop - span.start].permute(0, 3, 1, 2)

    def state(self, s: Tensor | None, z: Tensor | None) -> Tensor:
        """The state in the basis of `monomials`, s and z side by side: [N, V + 1, D], to be written to."""
        if s is None and z is None:
            shape = (self.batch * self.groups, self.v.shape[3] + 1, len(self.weights))
            return self.q.new_zeros(shape, dtype=self.dtype)
        public = (self.batch, self.groups, len(self.basis.roots))
        s = self.q.new_zeros(*public, self.v.shape[3]) if s is None else s
        z = self.q.new_zeros(public) if z is None else z
        both = torch.cat([s, z[..., None]], dim=3).to(self.dtype).flatten(0, 1).transpose(1, 2)
        return (both / self.basis.roots.to(both))[:, :, self.basis.index.to(both.device)].contiguous()

    def public_state(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `state`: s [B, G, D, V] and z [B, G, D] in the basis (M7)."""
        state = state[:, :, self.basis.representative.to(state.device)] * self.basis.roots.to(state)
        state = state.transpose(1, 2).unflatten(0, (self.batch, self.groups))
        return state[..., :-1].contiguous(), state[..., -1].contiguous()

    def advance(self, state: Tensor, chunk: _Chunk) -> None:
        """(M12), in place."""
        state *= chunk.left
        Features(chunk.k, self.options.p).accumulate(state, chunk.v * chunk.kept)

    def rewind(self, dstate: Tensor, chunk: _Chunk, dtotal: Tensor) -> None:
        """From the gradient of the state after a chunk to that of the state before it, in place."""
        dstate *= chunk.left
        Features(chunk.q.flatten(2), self.options.p).accumulate(dstate, (dtotal * chunk.past).flatten(2))

    def log_decay(self) -> Tensor:
        """[N]: of all tokens together."""
        if self.log_g is None:
            return self.q.new_zeros(self.batch * self.groups, dtype=self.dtype)
        return self.log_g.sum(1, dtype=torch.float64).flatten()

    def check_range(self, total: Tensor, s: Tensor | None, z: Tensor | None) -> None:
        """Raises a ValueError if sums, of finite inputs and of the state s, z, have left the range of their dtype.

        It looks at values on a CPU only: to look at those of a GPU would be to wait for it.

        Args:
            total: the sums.
            s, z: the state, or None.
        """
        if total.device.type != "cpu" or torch.compiler.is_compiling() or total.isfinite().all():
            return
        inputs = (self.q, self.k, self.v, self.log_g, s, z)
        if all(x is None or x.isfinite().all() for x in inputs):
            p, dtype = self.options.p, self.dtype
            norms = (x.detach().double().norm(dim=-1).max() for x in (self.q, self.k))
            largest = abs(self.options.scale) * math.prod(norms)
            limit = (torch.finfo(dtype).max / self.time) ** (1 / p)
            raise ValueError(
                f"the sums of (scale q.k)**p leave the range of {dtype}: norms of q and k allow |scale q.k| up to "
                f"{largest:.1e}, and p = {p} over T = {self.time} tokens is safe up to {limit:.1e}; use smaller q and k"
            )

    def attend(self, chunk: _Chunk, state: Tensor | None) -> Tensor:
        """Numerator and normalizer of a chunk's outputs (M11), side by side: [N, V + 1, R, C]."""
        if state is None:
            total = chunk.q.new_zeros(chunk.q.shape[0], chunk.v.shape[1], *chunk.q.shape[2:])
        else:
            total = Features(chunk.q.flatten(2), self.options.p).read(state * self.weights)
            total = total.unflatten(2, chunk.q.shape[2:]).mul_(chunk.past)
        for block in _score_blocks(chunk):
            weight = block.decayed(_power(block.scores(), self.options.p))
            block.add_rows(total, (block.v @ weight), block.row_decay)
        return total


class _Block:
    """Scores of some query rows with some keys: s [M, n, R c], keys along dim 1, rows of the group's heads along dim 2.

    Either all blocks on the diagonal as one batch, M = N blocks of c rows and n = c keys, with a decay (or just a mask)
    for each score; or one block of rows, M = N, with all n keys before it. Then the decay from key to row is that from
    the key to the block's start times that from there to the row, both at most 1, and no score needs an exponential.
    """

    def __init__(self, chunk: _Chunk, index: int | None):
        self.index, self.size = index, min(_SCORE_ROWS, chunk.k.shape[2])
        self.q, self.k, self.v = self.rows(chunk.q), self.keys(chunk.k), self.keys(chunk.v)
        self.row_decay: Tensor | None = None
        self.key_decay: Tensor | None = None
        self.pair_decay: Tensor | None = None
        if index is None:
            future = chunk.k.new_full((self.size, self.size), -torch.inf).tril(-1)  # keys along dim 0, rows along dim 1
            pair = future[None]
            if chunk.decay is not None:
                decay = self.keys(chunk.decay[:, None])
                pair = (decay - decay.transpose(1, 2)).add_(future)
            self.pair_decay = pair.exp()[:, :, None]  # [M, n, 1, c]
        elif chunk.decay is not None:
            start = index * self.size
            before = chunk.decay[:, None, start - 1 : start]
            self.key_decay = (before - chunk.decay[:, None, :start]).exp_()
            self.row_decay = (chunk.decay[:, None, None, start : start + self.size] - before[..., None]).exp_()
            self.v = self.v * self.key_decay

    def scores(self) -> Tensor:
        return self.k.transpose(1, 2) @ self.q

    def decayed(self, scores: Tensor) -> Tensor:
        """Scores times their own decays, in place."""
        if self.pair_decay is not None:
            scores.unflatten(2, (-1, self.size)).mul_(self.pair_decay)
        return scores

    def rows(self, x: Tensor) -> Tensor:
        """[N, *, R, C] -> [M, *, R c]."""
        if self.index is None:
            return x.unflatten(3, (-1, self.size)).permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
        return x[..., self.index * self.size : (self.index + 1) * self.size].flatten(2)

    def keys(self, x: Tensor) -> Tensor:
        """[N, *, C] -> [M, *, n]."""
        if self.index is None:
            return x.unflatten(2, (-1, self.size)).transpose(1, 2).flatten(0, 1)
        return x[..., : self.index * self.size]

    def decayed_rows(self, x: Tensor) -> Tensor:
        """`rows` of x times their decay."""
        rows = self.rows(x)
        if self.row_decay is None:
            return rows
        return (rows.unflatten(2, (-1, self.size)) * self.row_decay).flatten(2)

    def add_rows(self, out: Tensor, rows: Tensor, decay: Tensor | None = None) -> None:
        """out [N, *, R, C] += rows [M, *, R c], times their decay."""
        rows = rows.unflatten(2, (out.shape[2], self.size))
        if self.index is None:
            rows = rows.unflatten(0, (out.shape[0], -1)).permute(0, 2, 3, 1, 4)
            out.unflatten(3, (-1, self.size)).add_(rows)
            return
        own = out[..., self.index * self.size : (self.index + 1) * self.size]
        own.add_(rows) if decay is None else own.addcmul_(rows, decay)

    def add_keys(self, out: Tensor, keys: Tensor, decay: Tensor | None = None) -> None:
        """out [N, *, C] += keys [M, *, n], times their decay."""
        if self.index is None:
            out.unflatten(2, (-1, self.size)).add_(keys.unflatten(0, (out.shape[0], -1)).transpose(1, 2))
            return
        own = out[..., : self.index * self.size]
        own.add_(keys) if decay is None else own.addcmul_(keys, decay)


def _score_blocks(chunk: _Chunk) -> Iterator[_Block]:
    """All scores of a chunk with itself; those in the future are left out or masked."""
    yield _Block(chunk, None)
    for index in range(1, -(-chunk.k.shape[2] // _SCORE_ROWS)):
        yield _Block(chunk, index)


def _whole_blocks(time: int) -> int:
    return time if time <= _SCORE_ROWS else -(-time // _SCORE_ROWS) * _SCORE_ROWS


def _power(s: Tensor, p: int) -> Tensor:
    """s**p as a new tensor."""
    return s * s if p == 2 else s.pow(p)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_g, s, z, options: _Options):
        sequence = _Sequence(q, k, v, log_g, options)
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
        ctx.save_for_backward(q, k, v, log_g, s, z, out, normalizer, s_out, z_out)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return (out, s_out, z_out) if options.return_state else (out, None, None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, ds_out, dz_out):
        saved = ctx.saved_tensors  # to be read only once: checkpointing forgets what it has given
        with torch.autocast(saved[0].device.type, enabled=False):
            return _backward(ctx, saved, dout, ds_out, dz_out)


def _backward(ctx, saved: Sequence, dout: Tensor | None, ds_out: Tensor | None, dz_out: Tensor | None):
    q, k, v, log_g, s, z, out, normalizer, s_out, z_out = saved
    p = ctx.options.p
    sequence = _Sequence(q, k, v, log_g, ctx.options)
    first, last = sequence.spans[0], sequence.spans[-1]
    dq, dk, dv = (torch.empty_like(x, dtype=sequence.dtype) for x in (q, k, v))
    dout = torch.zeros_like(out) if dout is None else dout

    def dtotal(span: slice) -> Tensor:
        """The gradient of numerator and normalizer, [N, V + 1, R, C]."""
        d = dout[:, span].to(sequence.dtype)
        if normalizer is None:
            return sequence.queries(torch.cat([d, torch.zeros_like(d[..., :1])], dim=3))
        d = d / normalizer[:, span, :, None]
        return sequence.queries(torch.cat([d, -(d * out[:, span]).sum(3, keepdim=True)], dim=3))

    # Forwards, with the state: what reaches q through it.
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
    dq *= ctx.options.scale

    dlog_g = None
    if log_g is not None and ctx.needs_input_grad[3]:
        queries = (q * dq).unflatten(2, (sequence.groups, -1)).sum((3, 4), dtype=torch.float64)
        dlog = (queries - (k * dk).sum(3, dtype=torch.float64)) / p
        for x, dx in ((s_out, ds_out), (z_out, dz_out)):
            if dx is not None:
                dlog[:, -1] += (x * dx).flatten(2).sum(2, dtype=torch.float64)
        dlog_g = dlog.flip(1).cumsum(1).flip(1).to(log_g.dtype)
    ds, dz = (None, None) if not has_initial or dstate is None else sequence.public_state(dstate)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dlog_g, ds, dz, None


def _own_gradients(chunk: _Chunk, dtotal: Tensor, p: int) -> tuple[Tensor, Tensor, Tensor]:
    """dq [N, K, R, C], dk [N, K, C] and dv [N, V + 1, C] through the chunk's own scores."""
    dq, dk, dv = torch.zeros_like(chunk.q), torch.zeros_like(chunk.k), torch.zeros_like(chunk.v)
    for block in _score_blocks(chunk):
        d = block.decayed_rows(dtotal)
        s = block.scores()
        slope = block.decayed(_power(s, p - 1))
        ds = (block.v.transpose(1, 2) @ d).mul_(slope).mul_(p)
        block.add_keys(dv, d @ slope.mul_(s).transpose(1, 2), block.key_decay)
        block.add_rows(dq, block.k @ ds)
        block.add_keys(dk, block.q @ ds.transpose(1, 2))
    return dq, dk, dv
