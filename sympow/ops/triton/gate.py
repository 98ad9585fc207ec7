"""The gate: sums of its logarithms, the range of keys that they leave, and the gradient of the gate.

A decay is 2**(L_i - L_j), and the sums L may be as large as HARDEST times the tokens of a chunk. So a sum is two
float32 numbers, and (high_i - high_j) + (low_i - low_j) has the precision of float32 for the difference itself,
whatever the gates before both are. The passes for Hopper read one number of each key in their loops. So for them the
high part is the same for all tokens of a tile, a multiple of TILE_GRID, and the low part may be as large as HARDEST *
REACH_TILE. The relative error of a decay is then up to 2**-10, a quarter of that of bfloat16, behind as many resets.

The gradient of L_i is (q_i . dq_i - k_i . dk_i) / p, because q_i . dq_i = p sum_j a_ij da_ij. A gate changes every L at
or after its token, so its gradient is the sum of these terms from its token on. The terms between two later tokens
cancel in this sum up to rounding, and over a long row the rounding errors exceed the gradient. At the end of a chunk
the sum equals S . dS, so it starts again there.
"""

import triton
import triton.language as tl

from sympow.ops.triton.primitives import await_last, locate, reach_tile, start_next

LOG2_E = tl.constexpr(1.4426950408889634)
HARDEST = tl.constexpr(-160.0)  # log2 of a gate below which it counts as this: float32 has no such decay but 0
TILE_GRID = tl.constexpr(16.0)
REACH_TILE = tl.constexpr(64)  # tokens; blocks and iterations of the quadratic form divide it or are multiples of it


@triton.jit
def gate_sums(
    log_g, sums, begins, ends, starts, chunks, T, tokens, G, CHUNK, most,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, TILED: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes sums [2 or 3, G, tokens], float32: log2 of the decay from before the first token of the chunk to after
    each token. The first is rounded to the nearest, and is also the high part; then comes the low part. If TILED, the
    parts of the passes for Hopper come after the rounded sum, which is then written only where it is read, at the last
    token of each tile and of the chunk. `begins` and `ends` are written by `_find_reach` for rows of one chunk, by
    programs of one head; otherwise they are None. Grid: chunks, G / HEADS."""
    start_next(OVERLAP)
    first_head = tl.program_id(1) * HEADS
    h = tl.arange(0, HEADS)[None, None, :]
    if PACKED:
        n = tl.load(chunks + 2 * tl.program_id(0))
        first = tl.load(chunks + 2 * tl.program_id(0) + 1) * CHUNK
        start = tl.load(starts + n).to(tl.int64)
        length = (tl.load(starts + n + 1) - start).to(tl.int32)
    else:
        count = tl.cdiv(T, CHUNK)
        n = tl.program_id(0) // count
        first = (tl.program_id(0) % count) * CHUNK
        start = tl.cast(n, tl.int64) * T
        length = T
    plane = tl.cast(G, tl.int64) * tokens
    row = sums + tl.cast(first_head, tl.int64) * tokens + start
    tile = tl.arange(0, BLOCK // REACH_TILE)[:, None, None]
    t = tile * REACH_TILE + tl.arange(0, REACH_TILE)[None, :, None]
    end = tl.minimum(first + CHUNK, length)
    carry = tl.zeros([HEADS], tl.float64)
    for s in range(first, end, BLOCK):
        valid = t < end - s
        gates = log_g + (start + s) * G + first_head
        x = tl.load(gates + (t * G + h), mask=valid, other=0.0).to(tl.float64) * LOG2_E
        x = tl.where(x < HARDEST, HARDEST, x)  # not `maximum`, which may replace NaN
        local = tl.cumsum(x, 1)
        of_tiles = tl.sum(x, 1)
        before = (tl.cumsum(of_tiles, 0) - of_tiles + carry[None, :])[:, None, :]
        total = local + before
        high = total.to(tl.float32)
        here = row + s + h.to(tl.int64) * tokens
        read = valid
        if TILED:
            read &= (t % REACH_TILE == REACH_TILE - 1) | (t == end - s - 1)
        tl.store(here + t, high, mask=read)
        parts = here + plane
        if TILED:
            of_tile = (tl.floor(before / TILE_GRID) * TILE_GRID).to(tl.float32)
            high = tl.broadcast_to(of_tile, [BLOCK // REACH_TILE, REACH_TILE, HEADS])
            tl.store(parts + t, high, mask=valid)
            parts += plane
        tl.store(parts + t, (total - high.to(tl.float64)).to(tl.float32), mask=valid)
        carry += tl.sum(of_tiles, 0)
    if begins is not None:
        tl.debug_barrier()  # the sums of other threads are read next
        tl.static_assert(HEADS == 1)
        at = reach_tile(n, first_head, 0, T, tokens, REACH_TILE)
        if TILED:
            row += plane
        _find_reach(row, row + plane, begins + at, ends + at, T, most)


@triton.jit
def _sums_at(sums, low, token, valid):
    """Returns both parts of the sums after tokens, 0 where not `valid`."""
    return tl.load(sums + token, mask=valid, other=0.0), tl.load(low + token, mask=valid, other=0.0)


@triton.jit
def _find_reach(sums, low, begins, ends, T, most):
    """Writes for each tile of REACH_TILE tokens the first token whose key one of its queries uses, and the end of the
    queries that use one of its keys, both at borders of tiles. The passes compute 0 for decays below 2**-most, so they
    can skip whole tiles of such pairs without changing a result."""
    tiles = tl.cdiv(T, REACH_TILE)
    t = tl.arange(0, REACH_TILE)
    for s in range(0, tiles, REACH_TILE):
        tile = s + t
        here = tile < tiles
        high_before, low_before = _sums_at(sums, low, tile * REACH_TILE - 1, here & (tile > 0))
        high_after, low_after = _sums_at(sums, low, tl.minimum((tile + 1) * REACH_TILE, T) - 1, here)
        # The sums never increase, so the tiles that are out of reach can be counted.
        gone = tile * 0
        reached = tile * 0
        for o in range(0, tiles, REACH_TILE):
            other = o + t
            there = other < tiles
            high, rest = _sums_at(sums, low, tl.minimum((other + 1) * REACH_TILE, T) - 1, there)
            passed = (high[None, :] - high_before[:, None]) + (rest[None, :] - low_before[:, None])
            gone += tl.sum(((passed > most) & (other[None, :] < tile[:, None])).to(tl.int32), 1)
            high, rest = _sums_at(sums, low, other * REACH_TILE, there)
            passed = (high_after[:, None] - high[None, :]) + (low_after[:, None] - rest[None, :])
            later = there[None, :] & (other[None, :] > tile[:, None])
            reached += tl.sum(((passed <= most) & later).to(tl.int32), 1)
        tl.store(begins + tile, gone * REACH_TILE, mask=here)
        tl.store(ends + tile, tl.minimum((tile + 1 + reached) * REACH_TILE, T), mask=here)


@triton.jit
def _gate_terms(dq_sums, dk_sums, tokens, g, token, valid, R: tl.constexpr, P: tl.constexpr):
    """Returns (q . dq - k . dk) / p, [BLOCK], summed over the heads of a group. In float64, because terms of both signs
    are summed over a whole sequence."""
    x = -tl.load(dk_sums + g * tokens + token, mask=valid, other=0.0)
    for r in range(R):
        x += tl.load(dq_sums + (g * R + r) * tokens + token, mask=valid, other=0.0)
    return x.to(tl.float64) / P


@triton.jit
def _store_gradient(dlog_g, log_g, at, later, valid):
    """Writes the gradients of gates; 0 for those that count as HARDEST."""
    gone = tl.load(log_g + at, mask=valid, other=0.0) * LOG2_E < HARDEST
    tl.store(dlog_g + at, tl.where(gone, 0.0, later.to(tl.float32)), mask=valid)


@triton.jit
def gate_totals(
    dq_sums, dk_sums, totals, starts, blocks, T, tokens,
    R: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes totals [G, blocks], float64: the sum of the terms of each block. Grid: blocks, G."""
    await_last(OVERLAP)
    start_next(OVERLAP)
    _, start, length, first = locate(tl.program_id(0), starts, blocks, T, BLOCK, PACKED)
    g = tl.cast(tl.program_id(1), tl.int64)
    t = first + tl.arange(0, BLOCK)
    x = _gate_terms(dq_sums, dk_sums, tokens, g, start + t, t < length, R, P)
    tl.store(totals + g * tl.num_programs(0) + tl.program_id(0), tl.sum(x, 0))


@triton.jit
def gate_gradient(
    dq_sums, dk_sums, totals, last, log_g, dlog_g, starts, blocks, T, tokens, G,
    R: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    FINAL: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes dlog_g [tokens, G]: the sum of the terms from each token to the end of its sequence, plus `last` [N, G],
    the gradient that comes from the last state. Grid: blocks, G."""
    await_last(OVERLAP)
    n, start, length, first = locate(tl.program_id(0), starts, blocks, T, BLOCK, PACKED)
    g = tl.cast(tl.program_id(1), tl.int64)
    t = tl.arange(0, BLOCK)
    valid = first + t < length
    token = start + first + t
    carry = tl.zeros([1], tl.float64)
    if FINAL:
        carry += tl.load(last + n * G + g)
    following = totals + g * tl.num_programs(0) + tl.program_id(0) + 1
    count = tl.cdiv(length - first, BLOCK) - 1  # later blocks of the sequence
    for i in range(0, count, BLOCK):
        carry += tl.sum(tl.load(following + i + t, mask=i + t < count, other=0.0), 0)
    x = _gate_terms(dq_sums, dk_sums, tokens, g, token, valid, R, P)
    later = tl.cumsum(x, 0, reverse=True) + carry
    _store_gradient(dlog_g, log_g, token * G + g, later, valid)


@triton.jit
def through_states(
    s, ds, z, dz, weights, through, starts, chunks, T, G, rows,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, Z: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes through [chunks, G, parts], float64: parts of the sum of S . dS at the end of every chunk but the last,
    with `weights` [rows] for the rows. V is a multiple of 16. Grid: chunks, G, parts."""
    chunk = tl.cast(tl.program_id(0), tl.int64)
    _, _, length, first = locate(tl.program_id(0), starts, chunks, T, CHUNK, PACKED)
    if first + CHUNK < length:
        g = tl.program_id(1)
        size = rows * V
        s += ((chunk + 1) * G + g) * size
        ds += (chunk * G + g) * size
        piece = 16 * tl.arange(0, BLOCK // 16)
        within = piece[:, None] + tl.arange(0, 16)[None, :]
        acc = tl.zeros([BLOCK // 16, 16], tl.float32)
        for i in range(tl.program_id(2) * BLOCK, size, tl.num_programs(2) * BLOCK):
            here = i + within < size
            weight = tl.load(weights + (i + piece) // V, mask=i + piece < size, other=0.0)[:, None]
            a = tl.load(s + i + within, mask=here, other=0.0).to(tl.float32) * weight
            acc += a * tl.load(ds + i + within, mask=here, other=0.0).to(tl.float32)
        if Z:
            z += ((chunk + 1) * G + g) * (K * K)
            dz += (chunk * G + g) * (K * K)
            for i in range(tl.program_id(2) * BLOCK, K * K, tl.num_programs(2) * BLOCK):
                here = i + within < K * K
                a = tl.load(z + i + within, mask=here, other=0.0).to(tl.float32)
                acc += a * tl.load(dz + i + within, mask=here, other=0.0).to(tl.float32)
        part = (chunk * G + g) * tl.num_programs(2) + tl.program_id(2)
        tl.store(through + part, tl.sum(tl.sum(acc.to(tl.float64), 1), 0))


@triton.jit
def gate_gradient_by_chunk(
    dq_sums, dk_sums, through, last, log_g, dlog_g, starts, chunks, T, tokens, G,
    R: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes the same as `gate_gradient`, from the sum of the terms between each token and the end of its chunk, and
    the sum over all later chunks, `through` [chunks, G, PARTS]. COUNT is a power of two, at least PARTS. Grid: chunks,
    G / HEADS."""
    n, start, length, first = locate(tl.program_id(0), starts, chunks, T, CHUNK, PACKED)
    heads = tl.cast(tl.program_id(1), tl.int64) * HEADS + tl.arange(0, HEADS)
    g = heads[None, :]
    t = tl.arange(0, BLOCK)[:, None]
    end = tl.minimum(first + CHUNK, length)
    carry = tl.zeros([HEADS], tl.float64)
    if end < length:
        part = tl.arange(0, COUNT)[:, None]
        parts = through + (tl.program_id(0) * G + g) * PARTS
        carry += tl.sum(tl.load(parts + part, mask=part < PARTS, other=0.0), 0)
    elif FINAL:
        carry += tl.load(last + n * G + heads)
    count = tl.cdiv(end - first, BLOCK)
    for i in range(count):
        token = first + (count - 1 - i) * BLOCK + t
        valid = token < end
        x = _gate_terms(dq_sums, dk_sums, tokens, g, start + token, valid, R, P)
        later = tl.cumsum(x, 0, reverse=True) + carry[None, :]
        _store_gradient(dlog_g, log_g, (start + token) * G + g, later, valid)
        carry += tl.sum(x, 0)
