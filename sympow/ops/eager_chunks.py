"""Sequences cut into chunks, and the scores of a chunk in blocks, for the eager path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.availability import has_values
from sympow.ops.gate_sums import gate_sums, joined, split
from sympow.ops.monomials import Basis, Features, basis
from sympow.ops.types import OutOfRangeError

# Rows of scores formed at once: the triangle above the diagonal is skipped in blocks of this size.
SCORE_ROWS = 128


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
            self._weights = self.basis.weights.to(self.q.device, self.dtype)
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
        if total.device.type != "cpu" or not has_values(total) or total.isfinite().all():
            return
        inputs = (self.q, self.k, self.v, self.log_g, s, z)
        if all(x is None or x.isfinite().all() for x in inputs):
            p, dtype = self.options.p, self.dtype
            norms = (x.detach().double().norm(dim=-1).max() for x in (self.q, self.k))
            largest = abs(self.options.scale) * math.prod(norms)
            limit = (torch.finfo(dtype).max / self.time) ** (1 / p)
            raise OutOfRangeError(
                f"the sums of (scale q.k)**p leave the range of {dtype}: norms of q and k allow |scale q.k| up to "
                f"{largest:.1e}, and p = {p} over T = {self.time} tokens is safe up to {limit:.1e}; use smaller q and k"
            )

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
