"""The gradients. With s~ = q . k, weights a_ij = b_ij s~_ij**p, a factor n_i of each query that contains the
normalizer, and delta_i = y_i . dy_i (0 without normalization):

    dv_j = sum_i n_i a_ij dy_i,   dq_i = p n_i sum_j b_ij s~_ij**(p-1) (dy_i . v_j - delta_i) k_j,   dk_j likewise.

The gradients that come through a state have the same form. With S = sum_j row(k_j) v_j^T they are p times the sum over
the prefixes of q_prefix (dy_i S[prefix]^T), where S[prefix] are the rows of every last index.
"""

import triton
import triton.language as tl

from sympow.ops.triton.gate import REACH_TILE
from sympow.ops.triton.primitives import (
    await_last,
    first_chunk,
    locate,
    lower_base,
    power,
    reach_tile,
    rounded,
    start_next,
    times_prefix,
)


@triton.jit
def row_factors(
    out, dout, norm, sums, factor, scales, near, delta, starts, blocks, T, tokens, H, out_scale,
    V: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    NORMALIZE: tl.constexpr, TILED: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes factor [H, tokens], which is n, 1 / the normalizer, and delta [H, tokens]. If TILED, two more [H,
    tokens]: near, n times the scale of the output and 2**(the low part of the gate's sum); and scales, log2 of near.
    Grid: blocks, heads."""
    start_next(OVERLAP)
    _, start, length, first = locate(tl.program_id(0), starts, blocks, T, BLOCK, PACKED)
    h = tl.cast(tl.program_id(1), tl.int64)
    t = first + tl.arange(0, BLOCK)
    valid = t < length
    row = h * tokens + start + t
    n = tl.full([BLOCK], 1.0, tl.float32)
    d = tl.zeros([BLOCK], tl.float32)
    if NORMALIZE:
        col = tl.arange(0, COLUMNS)
        tile = ((start + t) * H + h)[:, None] * V + col[None, :]
        mask = valid[:, None] & (col < V)[None, :]
        y = tl.load(out + tile, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dout + tile, mask=mask, other=0.0).to(tl.float32)
        d = tl.sum(y * dy, 1)
        n = 1.0 / tl.load(norm + row, mask=valid, other=1.0)
    tl.store(factor + row, n, mask=valid)
    tl.store(delta + row, d, mask=valid)
    await_last(OVERLAP)  # for `sums`, and for the next kernel, which reads what both kernels have written
    if TILED:
        n *= out_scale
        log = tl.log2(n)
        if GATED:
            low = sums + (h // R + 2 * (H // R)) * tokens + start
            decay = tl.load(low + t, mask=valid, other=0.0)
            log += decay
            n *= tl.exp2(decay)
        tl.store(scales + row, log, mask=valid)
        tl.store(near + row, n, mask=valid)


@triton.jit
def _state_rows(i, lower, mirror, width, K: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr):
    """Returns the rows (upper prefix i, every last index), [K]. Rows of a lower last index have another prefix."""
    UPPER: tl.constexpr = K - HALF
    own = lower * K + (i - lower) * UPPER + (width - HALF)
    if P == 2:
        other = width * K + i
    else:
        other = tl.load(mirror + (i - lower) * HALF + tl.minimum(width, HALF - 1))
    return tl.where(width >= HALF, own, other)


@triton.jit
def query_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, s, z, factor, delta, dq, dsums, prefixes, weights, mirror,
    reach, starts, chunk_starts, blocks, T, tokens, H, G, lower, upper, score_scale, grad_scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr, TILED: tl.constexpr, NORMALIZE: tl.constexpr, STATES: tl.constexpr, INIT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Computes dq [tokens, H, K], and dsums [H, tokens] = q . dq. Grid: blocks of queries, heads.

    With a normalizer q . dq equals p delta eps / (z + eps). But delta is computed from rounded outputs, whose errors
    are in the keys' part too. Only errors that are the same in both parts cancel, so q . dq is computed from dq.

    reach: begins of `gate.gate_sums`, or None.
    """
    n, start, length, first = locate(tl.program_id(0), starts, blocks, T, BLOCK, PACKED)
    if PACKED:
        if first >= length:  # after the last block
            return
    h = tl.cast(tl.program_id(1), tl.int64)
    g = h // R
    t = tl.arange(0, BLOCK)
    valid = first + t < length
    width = tl.arange(0, K)
    col = tl.arange(0, COLUMNS)
    q_rows = q + (start + first) * q_st + h * q_sh + t * q_st
    queries = tl.load(q_rows[:, None] + width[None, :], mask=valid[:, None], other=0.0)
    dy_tile = ((start + first) * H + h) * V + (t[:, None] * (H * V) + col[None, :])
    dy = tl.load(dout + dy_tile, mask=valid[:, None] & (col < V)[None, :], other=0.0)
    row = h * tokens + start + first + t
    d = tl.load(delta + row, mask=valid, other=0.0)
    begin = 0
    if CHUNK > 0:
        begin = (first // CHUNK) * CHUNK
    if reach is not None:
        begin = tl.load(reach + reach_tile(n, g, first, T, tokens, REACH_TILE))
    acc = tl.zeros([BLOCK, K], tl.float32)

    if STATES:
        entering = INIT or begin > 0
        if GATED:  # the decay from the state to this block; if it is 0, no row is read
            at = sums + g * tokens + start + first - 1
            plane = tl.cast(G, tl.int64) * tokens
            if TILED:
                at += plane
            kept = tl.load(at, mask=first > begin, other=0.0) + tl.load(at + plane, mask=first > begin, other=0.0)
            kept = tl.exp2(kept)
            entering &= kept > 0.0
        if entering:
            chunk = first_chunk(n, chunk_starts, T, CHUNK, PACKED) + begin // CHUNK
            rows = tl.cast(lower, tl.int64) * K + upper * (K - HALF)
            state = s + (chunk * G + g) * rows * V
            tile = state + width[None, :] * V + col[:, None]
            for i in range(lower):
                phi = times_prefix(dy, q_rows, valid, i, prefixes, weights, P)
                part = tl.load(tile, mask=(col < V)[:, None], other=0.0)
                acc = tl.dot(rounded(phi, PRECISION), part, acc, input_precision=PRECISION)
                tile += K * V
            for i in range(lower, lower + upper):
                phi = times_prefix(dy, q_rows, valid, i, prefixes, weights, P)
                where = _state_rows(i, lower, mirror, width, K, HALF, P)
                part = tl.load(state + where[None, :] * V + col[:, None], mask=(col < V)[:, None], other=0.0)
                acc = tl.dot(rounded(phi, PRECISION), part, acc, input_precision=PRECISION)
            if NORMALIZE:
                matrix = tl.load(z + (chunk * G + g) * K * K + width[:, None] * K + width[None, :])
                acc -= tl.dot(queries, matrix, input_precision=PRECISION) * d[:, None]

    here = sums + g * tokens + start
    if TILED:
        here += tl.cast(G, tl.int64) * tokens
    low = here + tl.cast(G, tl.int64) * tokens
    if GATED:
        own = tl.load(here + first + t, mask=valid, other=0.0)
        own_low = tl.load(low + first + t, mask=valid, other=0.0)
        ref = tl.load(here + first - 1, mask=first > begin, other=0.0)
        ref_low = tl.load(low + first - 1, mask=first > begin, other=0.0)
        if STATES:
            acc *= kept
    j = tl.arange(0, KEYS)
    k_tile = k + (start + begin) * k_st + g * k_sh + (j[:, None] * k_st + width[None, :])
    v_tile = v + (start + begin) * v_st + g * v_sh + (j[None, :] * v_st + col[:, None])
    for s0 in range(begin, first, KEYS):
        keys = tl.load(k_tile)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if P > 4:
            scores *= score_scale
        values = tl.load(v_tile, mask=(col < V)[:, None], other=0.0)
        grad = tl.dot(dy, values, input_precision=PRECISION) - d[:, None]
        grad *= power(scores, P - 1)
        if GATED:
            grad *= tl.exp2((ref - tl.load(here + s0 + j)) + (ref_low - tl.load(low + s0 + j)))[None, :]
        acc = tl.dot(rounded(grad.to(keys.dtype), PRECISION), keys, acc, input_precision=PRECISION)
        k_tile += KEYS * k_st
        v_tile += KEYS * v_st
    if GATED:
        acc *= tl.exp2((own - ref) + (own_low - ref_low))[:, None]
    for s0 in range(first, tl.minimum(first + BLOCK, length), KEYS):
        past = s0 + j < length
        keys = tl.load(k_tile, mask=past[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if P > 4:
            scores *= score_scale
        values = tl.load(v_tile, mask=past[None, :] & (col < V)[:, None], other=0.0)
        grad = tl.dot(dy, values, input_precision=PRECISION) - d[:, None]
        grad *= power(scores, P - 1)
        if GATED:
            there = tl.load(here + s0 + j, mask=past, other=0.0)
            there_low = tl.load(low + s0 + j, mask=past, other=0.0)
            grad *= tl.exp2((own[:, None] - there[None, :]) + (own_low[:, None] - there_low[None, :]))
        grad = tl.where((first + t)[:, None] >= (s0 + j)[None, :], grad, 0.0)
        acc = tl.dot(rounded(grad.to(keys.dtype), PRECISION), keys, acc, input_precision=PRECISION)
        k_tile += KEYS * k_st
        v_tile += KEYS * v_st

    acc *= (tl.load(factor + row, mask=valid, other=0.0) * grad_scale)[:, None]
    if GATED:
        tl.store(dsums + row, tl.sum(acc * queries.to(tl.float32), 1), mask=valid)
    dq_tile = dq + ((start + first) * H + h) * K + (t[:, None] * (H * K) + width[None, :])
    tl.store(dq_tile, acc.to(dq.dtype.element_ty), mask=valid[:, None])


@triton.jit
def key_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, ds, dz, factor, delta, dk, dv, dsums,
    prefixes, weights, grad_weights, mirror,
    reach, starts, chunk_starts, blocks, T, tokens, H, G, lower, upper, score_scale, out_scale, grad_scale,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr, TILED: tl.constexpr, STATES: tl.constexpr, FINAL: tl.constexpr, Z: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Computes dk [tokens, G, K], dv [tokens, G, V], dsums [G, tokens] = k . dk. Grid: blocks of keys, key/value heads.

    reach: ends of `gate.gate_sums`, or None.
    """
    n, start, length, first = locate(tl.program_id(0), starts, blocks, T, BLOCK, PACKED)
    if PACKED:
        if first >= length:
            return
    g = tl.cast(tl.program_id(1), tl.int64)
    j = tl.arange(0, BLOCK)
    valid = first + j < length
    width = tl.arange(0, K)
    col = tl.arange(0, COLUMNS)
    k_rows = k + (start + first) * k_st + g * k_sh + j * k_st
    keys = tl.load(k_rows[:, None] + width[None, :], mask=valid[:, None], other=0.0)
    v_tile = v + (start + first) * v_st + g * v_sh + (j[:, None] * v_st + col[None, :])
    values = tl.load(v_tile, mask=valid[:, None] & (col < V)[None, :], other=0.0)
    end = length
    chunk_index = 0
    if CHUNK > 0:
        chunk_index = first // CHUNK
        end = tl.minimum((chunk_index + 1) * CHUNK, length)
    if reach is not None:
        final = tl.minimum(first + BLOCK, length) - 1
        end = tl.load(reach + reach_tile(n, g, final, T, tokens, REACH_TILE))
    dkeys = tl.zeros([BLOCK, K], tl.float32)
    dvalues = tl.zeros([BLOCK, COLUMNS], tl.float32)

    if STATES:
        leaving = FINAL or end < length
        if GATED:  # the decay from this block to the end of the chunk
            plane = tl.cast(G, tl.int64) * tokens
            own_end = sums + g * tokens + start + tl.minimum(first + BLOCK, length) - 1
            chunk_end = sums + g * tokens + start + end - 1
            if TILED:
                own_end += plane
                chunk_end += plane
            kept = tl.load(chunk_end) - tl.load(own_end)
            kept = tl.exp2(kept + (tl.load(chunk_end + plane) - tl.load(own_end + plane)))
            leaving &= kept > 0.0
        if leaving:
            chunk = first_chunk(n, chunk_starts, T, CHUNK, PACKED) + chunk_index
            UPPER: tl.constexpr = K - HALF
            rows = tl.cast(lower, tl.int64) * K + upper * UPPER
            state = ds + (chunk * G + g) * rows * V
            tile = state + width[:, None] * V + col[None, :]
            base = lower_base(keys, width, HALF, P)
            for i in range(lower):
                part = tl.load(tile, mask=(col < V)[None, :], other=0.0)
                phi = times_prefix(base, k_rows, valid, i, prefixes, weights, P)
                dvalues = tl.dot(rounded(phi, PRECISION), part, dvalues, input_precision=PRECISION)
                phi = times_prefix(values, k_rows, valid, i, prefixes, grad_weights, P)
                dkeys = tl.dot(rounded(phi, PRECISION), tl.trans(part), dkeys, input_precision=PRECISION)
                tile += K * V
            if UPPER > 0:
                half = tl.arange(0, UPPER)
                tile = state + lower * K * V + half[:, None] * V + col[None, :]
                upper_base = tl.load(k_rows[:, None] + (HALF + half)[None, :], mask=valid[:, None], other=0.0)
                for i in range(lower, lower + upper):
                    part = tl.load(tile, mask=(col < V)[None, :], other=0.0)
                    phi = times_prefix(upper_base, k_rows, valid, i, prefixes, weights, P)
                    dvalues = tl.dot(rounded(phi, PRECISION), part, dvalues, input_precision=PRECISION)
                    tile += UPPER * V
                    where = _state_rows(i, lower, mirror, width, K, HALF, P)
                    part = tl.load(state + where[None, :] * V + col[:, None], mask=(col < V)[:, None], other=0.0)
                    phi = times_prefix(values, k_rows, valid, i, prefixes, grad_weights, P)
                    dkeys = tl.dot(rounded(phi, PRECISION), part, dkeys, input_precision=PRECISION)
            if Z:
                matrix = tl.load(dz + (chunk * G + g) * K * K + width[:, None] * K + width[None, :])
                dkeys = tl.dot(keys, matrix, dkeys, input_precision=PRECISION)

    # Decays are split at the last token of the block: 2**(L_i - L_ref) 2**(L_ref - L_j), where both are at most 1.
    here = sums + g * tokens + start
    if TILED:
        here += tl.cast(G, tl.int64) * tokens
    low = here + tl.cast(G, tl.int64) * tokens
    last = tl.minimum(first + BLOCK, length) - 1
    if GATED:
        own = tl.load(here + first + j, mask=valid, other=0.0)
        own_low = tl.load(low + first + j, mask=valid, other=0.0)
        ref = tl.load(here + last)
        ref_low = tl.load(low + last)
        if STATES:
            dkeys *= kept
            dvalues *= kept
    i = tl.arange(0, QUERIES)
    for head in range(R):
        h = g * R + head
        column = h * tokens + start
        q_tile = q + start * q_st + h * q_sh + (i[None, :] * q_st + width[:, None])
        dy_tile = dout + (start * H + h) * V + (i[:, None] * (H * V) + col[None, :])
        for s0 in range(first + BLOCK, end, QUERIES):
            there = s0 + i < end
            queries = tl.load(q_tile + tl.cast(s0, tl.int64) * q_st, mask=there[None, :], other=0.0)
            dy = tl.load(dy_tile + tl.cast(s0, tl.int64) * (H * V), mask=there[:, None] & (col < V)[None, :], other=0.0)
            f = tl.load(factor + column + s0 + i, mask=there, other=0.0) * out_scale
            d = tl.load(delta + column + s0 + i, mask=there, other=0.0)
            if GATED:
                rest = tl.load(low + s0 + i, mask=there, other=0.0) - ref_low
                f *= tl.exp2((tl.load(here + s0 + i, mask=there, other=float("-inf")) - ref) + rest)
            scores = tl.dot(keys, queries, input_precision=PRECISION)
            if P > 4:
                scores *= score_scale
            slope = power(scores, P - 1) * f[None, :]
            weight = rounded((slope * scores).to(dy.dtype), PRECISION)
            dvalues = tl.dot(weight, dy, dvalues, input_precision=PRECISION)
            grad = (tl.dot(values, tl.trans(dy), input_precision=PRECISION) - d[None, :]) * slope
            grad = rounded(grad.to(queries.dtype), PRECISION)
            dkeys = tl.dot(grad, tl.trans(queries), dkeys, input_precision=PRECISION)
    if GATED:
        decay = tl.exp2((ref - own) + (ref_low - own_low))[:, None]
        dkeys *= decay
        dvalues *= decay
    for head in range(R):
        h = g * R + head
        column = h * tokens + start
        q_tile = q + start * q_st + h * q_sh + (i[None, :] * q_st + width[:, None])
        dy_tile = dout + (start * H + h) * V + (i[:, None] * (H * V) + col[None, :])
        for s0 in range(first, last + 1, QUERIES):
            there = s0 + i < end
            queries = tl.load(q_tile + tl.cast(s0, tl.int64) * q_st, mask=there[None, :], other=0.0)
            dy = tl.load(dy_tile + tl.cast(s0, tl.int64) * (H * V), mask=there[:, None] & (col < V)[None, :], other=0.0)
            f = tl.load(factor + column + s0 + i, mask=there, other=0.0) * out_scale
            d = tl.load(delta + column + s0 + i, mask=there, other=0.0)
            scores = tl.dot(keys, queries, input_precision=PRECISION)
            if P > 4:
                scores *= score_scale
            slope = power(scores, P - 1) * f[None, :]
            if GATED:
                rest = tl.load(low + s0 + i, mask=there, other=0.0)[None, :] - own_low[:, None]
                later = tl.load(here + s0 + i, mask=there, other=float("-inf"))
                slope *= tl.exp2((later[None, :] - own[:, None]) + rest)
            slope = tl.where(((first + j)[:, None] <= (s0 + i)[None, :]) & valid[:, None], slope, 0.0)
            weight = rounded((slope * scores).to(dy.dtype), PRECISION)
            dvalues = tl.dot(weight, dy, dvalues, input_precision=PRECISION)
            grad = (tl.dot(values, tl.trans(dy), input_precision=PRECISION) - d[None, :]) * slope
            grad = rounded(grad.to(queries.dtype), PRECISION)
            dkeys = tl.dot(grad, tl.trans(queries), dkeys, input_precision=PRECISION)

    dkeys *= grad_scale
    if GATED:
        tl.store(dsums + g * tokens + start + first + j, tl.sum(dkeys * keys.to(tl.float32), 1), mask=valid)
    dk_tile = dk + ((start + first) * G + g) * K + (j[:, None] * (G * K) + width[None, :])
    tl.store(dk_tile, dkeys.to(dk.dtype.element_ty), mask=valid[:, None])
    dv_tile = dv + ((start + first) * G + g) * V + (j[:, None] * (G * V) + col[None, :])
    tl.store(dv_tile, dvalues.to(dv.dtype.element_ty), mask=valid[:, None] & (col < V)[None, :])
