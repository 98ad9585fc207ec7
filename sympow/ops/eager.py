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

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.ops.cost import power_flops
from sympow.ops.feature_map import multinomials, spow, spow_dim, spow_offset
from sympow.ops.types import PowerState

# What else takes time, in floating-point operations of matrix products that take as long, measured on two CPU cores:
# a score's passes from decay to power, an element of phi, a call into torch; and how many calls a chunk and one block
# of its scores make, apart from those that form phi.
_SCORE_FLOPS, _FEATURE_FLOPS, _CALL_FLOPS = 40, 8, 8e5
_CHUNK_CALLS, _BLOCK_CALLS = 30, 12

# Rows of scores formed at once: the triangle above the diagonal is skipped in blocks of this size.
_SCORE_ROWS = 128
# Elements of phi formed at once, over all heads: small enough to stay in a cache.
_TILE_ELEMENTS = 1 << 19


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
) -> tuple[Tensor, PowerState | None]:
    """Shapes as in `reference`. Computes in float32 (float64 for float64 inputs), whatever autocast says."""
    options = _Options(p, scale, normalize, eps, chunk_size, return_state)
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
    """One token after another on a state, (M9) and (M10), in as few operations as it takes. No gradients."""
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
    """The chunk size whose estimated forward time is the least: a power of two, or T for the quadratic form.

    has_state: a state comes in or goes out, so that even a single chunk meets one.
    """
    (batch, time, groups, key_dim), value_dim = k.shape, v.shape[3]
    rows = q.shape[2] // groups
    dim = spow_dim(key_dim, p)
    feature = _FEATURE_FLOPS * dim + (2 * dim * (value_dim + 1))

    def cost(chunk: int) -> float:
        flops = power_flops(time, key_dim, value_dim, p, chunk, heads=rows)
        flops += _SCORE_FLOPS * rows * time * chunk / 2
        chunks = -(-time // chunk)
        first, last = chunk, time - (chunks - 1) * chunk
        flops += _FEATURE_FLOPS * dim * (rows * (time - first) + time - last)
        flops += feature * (rows * first + last) if has_state else 0
        calls = _CHUNK_CALLS + _BLOCK_CALLS * rows * chunk / _SCORE_ROWS
        calls += 2 * (p - 1) * key_dim if chunks > 1 or has_state else 0
        return flops * batch * groups + _CALL_FLOPS * calls * chunks

    sizes = [2**i for i in range(6, 14) if 2**i < time]
    return min([*sizes, time], key=cost)


class _Options(NamedTuple):
    p: int
    scale: float
    normalize: bool
    eps: float
    chunk_size: int
    return_state: bool


class _Tile(NamedTuple):
    """Rows [start, stop) of the state: the monomials whose first index lies in [first, last)."""

    first: int
    last: int
    start: int
    stop: int


@lru_cache(maxsize=64)
def _tiles(key_dim: int, p: int, max_rows: int) -> tuple[_Tile, ...]:
    """Cuts the D rows between first indices, into tiles of at most max_rows where one first index allows it."""
    tiles: list[_Tile] = []
    for a in range(key_dim):
        start, stop = spow_offset(key_dim, p, a), spow_offset(key_dim, p, a + 1)
        if tiles and stop - tiles[-1].start <= max_rows:
            tiles[-1] = tiles[-1]._replace(last=a + 1, stop=stop)
        else:
            tiles.append(_Tile(a, a + 1, start, stop))
    return tuple(tiles)


class _Features:
    """The monomials of x [N, K, C] (heads, channels, time), formed a tile of rows at a time.

    Three things are done with them, for a state [N, D, V'] and rows of values [N, C, V']: `read`, `accumulate`, and the
    gradient of `read` with respect to x.
    """

    def __init__(self, x: Tensor, p: int):
        self.x, self.p = x, p
        self.heads, self.key_dim, self.time = x.shape
        max_rows = max(1, _TILE_ELEMENTS // max(1, self.heads * self.time))
        self.tiles = _tiles(self.key_dim, p, max_rows) if p > 1 else (_Tile(0, self.key_dim, 0, self.key_dim),)
        # levels[m] holds the monomials of degree m + 1; those of degree p are only formed in tiles.
        self.levels = [x]
        for degree in range(2, p):
            level = x.new_empty(self.heads, spow_dim(self.key_dim, degree), self.time)
            self._fill(level, degree, 0, self.key_dim)
            self.levels.append(level)

    def read(self, state: Tensor) -> Tensor:
        """phi(x)^T state: [N, C, V']."""
        out = state.new_zeros(self.heads, self.time, state.shape[2])
        for tile, phi in self._formed():
            out.baddbmm_(phi.transpose(1, 2), state[:, tile.start : tile.stop])
        return out

    def accumulate(self, state: Tensor, values: Tensor) -> None:
        """state += phi(x) values."""
        for tile, phi in self._formed():
            state[:, tile.start : tile.stop].baddbmm_(phi, values)

    def read_gradient(self, state: Tensor, dout: Tensor) -> Tensor:
        """The gradient [N, K, C] of `read` with respect to x."""
        dout = dout.transpose(1, 2).contiguous()
        dlevels = [torch.zeros_like(level) for level in self.levels]
        for tile in self.tiles:
            dphi = state[:, tile.start : tile.stop] @ dout
            if self.p == 1:
                return dphi
            self._unfill(dphi, dlevels, self.p, tile.first, tile.last)
        for degree in range(self.p - 1, 1, -1):
            self._unfill(dlevels[degree - 1], dlevels, degree, 0, self.key_dim)
        return dlevels[0]

    def _formed(self) -> Iterator[tuple[_Tile, Tensor]]:
        """Every tile with its features [N, rows, C]; a tile's features are overwritten by the next one's."""
        if self.p == 1:
            yield self.tiles[0], self.x
            return
        buffer = self.x.new_empty(self.heads * max(t.stop - t.start for t in self.tiles) * self.time)
        for tile in self.tiles:
            rows = tile.stop - tile.start
            phi = buffer[: self.heads * rows * self.time].view(self.heads, rows, self.time)
            self._fill(phi, self.p, tile.first, tile.last)
            yield tile, phi

    def _blocks(self, degree: int, first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
        """Each first index a in [first, last), the rows it takes, and the rows of one degree less that x_a multiplies.

        Those are the monomials in the channels from a on: a suffix of the lexicographic list.
        """
        row, end = 0, spow_dim(self.key_dim, degree - 1)
        for a in range(first, last):
            start = spow_offset(self.key_dim, degree - 1, a)
            yield a, slice(row, row + end - start), slice(start, end)
            row += end - start

    def _fill(self, out: Tensor, degree: int, first: int, last: int) -> None:
        lower = self.levels[degree - 2]
        for a, rows, rest in self._blocks(degree, first, last):
            torch.mul(self.x[:, a : a + 1], lower[:, rest], out=out[:, rows])

    def _unfill(self, dout: Tensor, dlevels: list[Tensor], degree: int, first: int, last: int) -> None:
        lower, dlower = self.levels[degree - 2], dlevels[degree - 2]
        for a, rows, rest in self._blocks(degree, first, last):
            dlower[:, rest].addcmul_(self.x[:, a : a + 1], dout[:, rows])
            dlevels[0][:, a] += (lower[:, rest] * dout[:, rows]).sum(1)


class _Chunk(NamedTuple):
    """One chunk of the inputs, N = B G heads; the R query heads of a group lie one after the other along time."""

    q: Tensor  # [N, K, R C], times scale
    k: Tensor  # [N, K, C]
    v: Tensor  # [N, C, V + 1], the last column 1
    past: Tensor  # [N, R C, 1]: what is left, at each query, of the state from before
    kept: Tensor  # [N, C, 1]: what is left of each token at the chunk's end
    left: Tensor  # [N, 1, 1]: what is left, at the chunk's end, of the state from before
    decay: Tensor | None  # [N, C]: log decay from the chunk's start up to and with each token


class _Sequence:
    """The inputs of one call and the walk over their chunks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, options: _Options):
        self.q, self.k, self.v, self.log_g, self.options = q, k, v, log_g, options
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.batch, self.time, self.groups, self.key_dim = k.shape
        self.rows = q.shape[2] // self.groups  # R
        self.weights = multinomials(self.key_dim, options.p).to(q.device, self.dtype)[:, None]
        self.spans = [slice(i, min(i + options.chunk_size, self.time)) for i in range(0, self.time, options.chunk_size)]

    def chunk(self, span: slice) -> _Chunk:
        q = self.queries(self.q[:, span]).transpose(1, 2).mul(self.options.scale).contiguous()
        k = self.keys(self.k[:, span]).transpose(1, 2).contiguous()
        v = self.keys(self.v[:, span])
        v = torch.cat([v, v.new_ones(*v.shape[:2], 1)], dim=2)
        if self.log_g is None:
            one = v.new_ones(1, 1, 1)
            return _Chunk(q, k, v, one, one, one, None)
        decay = self.keys(self.log_g[:, span, :, None])[..., 0].cumsum(1)
        past = decay.exp().repeat(1, self.rows)[..., None]
        kept = (decay[:, -1:] - decay).exp()[..., None]
        return _Chunk(q, k, v, past, kept, past[:, -1:], decay)

    def queries(self, x: Tensor) -> Tensor:
        """[B, C, H, *] -> [N, R C, *]."""
        grouped = x.to(self.dtype).unflatten(2, (self.groups, self.rows))
        return grouped.permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)

    def from_queries(self, x: Tensor) -> Tensor:
        """[N, R C, *] -> [B, C, H, *]."""
        grouped = x.unflatten(1, (self.rows, x.shape[1] // self.rows)).unflatten(0, (self.batch, self.groups))
        return grouped.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def keys(self, x: Tensor) -> Tensor:
        """[B, C, G, *] -> [N, C, *]."""
        return x.to(self.dtype).transpose(1, 2).flatten(0, 1)

    def from_keys(self, x: Tensor) -> Tensor:
        """[N, C, *] -> [B, C, G, *]."""
        return x.unflatten(0, (self.batch, self.groups)).transpose(1, 2)

    def state(self, s: Tensor | None, z: Tensor | None) -> Tensor:
        """The state in the monomial basis, s and z side by side: [N, D, V + 1], to be written to."""
        rows, width = len(self.weights), self.v.shape[3] + 1
        if s is None and z is None:
            return self.q.new_zeros(self.batch * self.groups, rows, width, dtype=self.dtype)
        s = self.q.new_zeros(self.batch, self.groups, rows, width - 1) if s is None else s
        z = self.q.new_zeros(self.batch, self.groups, rows) if z is None else z
        return torch.cat([s, z[..., None]], dim=3).flatten(0, 1).to(self.dtype) / self.weights.sqrt()

    def public_state(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `state`: s [B, G, D, V] and z [B, G, D] in the basis (M7)."""
        state = (state * self.weights.sqrt()).unflatten(0, (self.batch, self.groups))
        return state[..., :-1].contiguous(), state[..., -1].contiguous()

    def advance(self, state: Tensor, chunk: _Chunk) -> None:
        """(M12), in place."""
        state *= chunk.left
        _Features(chunk.k, self.options.p).accumulate(state, chunk.v * chunk.kept)

    def attend(self, chunk: _Chunk, state: Tensor | None) -> Tensor:
        """Numerator and normalizer of a chunk's outputs (M11), side by side: [N, R C, V + 1]."""
        if state is None:
            total = chunk.v.new_zeros(chunk.q.shape[0], chunk.q.shape[2], chunk.v.shape[2])
        else:
            total = _Features(chunk.q, self.options.p).read(state * self.weights).mul_(chunk.past)
        for rows, keys, s, b in _scores(chunk):
            total[:, rows].baddbmm_(_power(s, self.options.p).mul_(b), chunk.v[:, keys])
        return total


def _scores(chunk: _Chunk) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """The chunk's own scores s and decays b (M1), (M2), zero in the future, in blocks: query rows, keys, s, b."""
    time = chunk.k.shape[2]
    block = min(_SCORE_ROWS, time)
    causal = torch.ones(block, block, dtype=torch.bool, device=chunk.k.device).tril()
    for start in range(0, time, block):
        stop = min(start + block, time)
        keys, here = slice(0, stop), causal[: stop - start, : stop - start]
        if chunk.decay is None:
            b = chunk.k.new_ones(1, stop - start, stop)
            b[..., start:] = here
        else:
            b = chunk.decay[:, start:stop, None] - chunk.decay[:, None, keys]
            b[..., start:].masked_fill_(~here, -torch.inf)
            b.exp_()
        for first in range(start, chunk.q.shape[2], time):  # the heads of the group share their decays
            rows = slice(first, first + stop - start)
            yield rows, keys, chunk.q[:, :, rows].transpose(1, 2) @ chunk.k[:, :, keys], b


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
        for span in sequence.spans:
            chunk = sequence.chunk(span)
            total = sequence.from_queries(sequence.attend(chunk, state))
            if normalizer is None:
                out[:, span] = total[..., :-1]
            else:
                normalizer[:, span] = total[..., -1] + options.eps
                out[:, span] = total[..., :-1] / normalizer[:, span, :, None]
            if span != last or options.return_state:
                state = sequence.state(None, None) if state is None else state
                sequence.advance(state, chunk)
        s_out = z_out = None
        if options.return_state and state is not None:
            s_out, z_out = sequence.public_state(state)
        ctx.save_for_backward(q, k, v, log_g, s, z, out, normalizer, s_out, z_out)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, s_out, z_out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, ds_out, dz_out):
        q, k, v, log_g, s, z, out, normalizer, s_out, z_out = ctx.saved_tensors
        p = ctx.options.p
        sequence = _Sequence(q, k, v, log_g, ctx.options)
        first, last = sequence.spans[0], sequence.spans[-1]
        dq, dk, dv = (torch.empty_like(x, dtype=sequence.dtype) for x in (q, k, v))
        dout = torch.zeros_like(out) if dout is None else dout

        def dtotal(span: slice) -> Tensor:
            """The gradient of numerator and normalizer, [N, R C, V + 1]."""
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
                gradient = _Features(chunk.q, p).read_gradient(state * sequence.weights, dtotal(span) * chunk.past)
                dq[:, span] = sequence.from_queries(gradient.transpose(1, 2))
            if span != last:
                sequence.advance(state, chunk)

        # Backwards, with the state's gradient: it runs over queries as the state runs over keys, in the same basis.
        dstate = None if ds_out is None and dz_out is None else sequence.state(ds_out, dz_out)
        for span in reversed(sequence.spans):
            chunk, d = sequence.chunk(span), dtotal(span)
            dq_c, dk_c, dv_c = _own_gradients(chunk, d, p)
            if dstate is not None:
                features, weighted = _Features(chunk.k, p), dstate * sequence.weights
                dk_c += features.read_gradient(weighted, chunk.v * chunk.kept)
                dv_c += features.read(weighted).mul_(chunk.kept)
            dq[:, span] += sequence.from_queries(dq_c.transpose(1, 2))
            dk[:, span] = sequence.from_keys(dk_c.transpose(1, 2))
            dv[:, span] = sequence.from_keys(dv_c[..., :-1])
            if span != first or s is not None:
                dstate = sequence.state(None, None) if dstate is None else dstate.mul_(chunk.left)
                _Features(chunk.q, p).accumulate(dstate, d * chunk.past)
        dq *= ctx.options.scale

        dlog_g = None
        if log_g is not None and ctx.needs_input_grad[3]:
            queries = (q * dq).unflatten(2, (sequence.groups, -1)).sum((3, 4), dtype=torch.float64)
            dlog = (queries - (k * dk).sum(3, dtype=torch.float64)) / p
            for x, dx in ((s_out, ds_out), (z_out, dz_out)):
                if dx is not None:
                    dlog[:, -1] += (x * dx).flatten(2).sum(2, dtype=torch.float64)
            dlog_g = dlog.flip(1).cumsum(1).flip(1).to(log_g.dtype)
        ds, dz = (None, None) if s is None else sequence.public_state(dstate)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dlog_g, ds, dz, None


def _own_gradients(chunk: _Chunk, dtotal: Tensor, p: int) -> tuple[Tensor, Tensor, Tensor]:
    """dq [N, K, R C], dk [N, K, C] and dv [N, C, V + 1] through the chunk's own scores."""
    dq, dk, dv = torch.zeros_like(chunk.q), torch.zeros_like(chunk.k), torch.zeros_like(chunk.v)
    for rows, keys, s, b in _scores(chunk):
        d = dtotal[:, rows]
        slope = _power(s, p - 1).mul_(b)
        dv[:, keys].baddbmm_((slope * s).transpose(1, 2), d)
        ds = (d @ chunk.v[:, keys].transpose(1, 2)).mul_(slope).mul_(p)
        dq[:, :, rows] += chunk.k[:, :, keys] @ ds.transpose(1, 2)
        dk[:, :, keys].baddbmm_(chunk.q[:, :, rows], ds)
    return dq, dk, dv
