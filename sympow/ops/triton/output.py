"""The output. A program has a block of queries of one head. It sums, in one float32 accumulator, the part of the state
before its chunk and the part of the keys of its chunk."""

import triton
import triton.language as tl

from sympow.ops.triton.gate import REACH_TILE
from sympow.ops.triton.primitives import first_state, locate, lower_base, power, reach_tile, rounded, times_prefix


@triton.jit
def output_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, sums, s, z, out, norm, prefixes, weights,
    reach, starts, chunk_starts, blocks, T, tokens, row_states, H, G, lower, upper, score_scale, out_scale, eps,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr, NORMALIZE: tl.constexpr, STATES: tl.constexpr, INIT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes out [tokens, H, V] and norm [H, tokens]. Grid: blocks of queries, heads. reach: begins of
    `gate.gate_sums`, or None. row_states: states from the first of a row to that of the next one, unless PACKED."""
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
    begin = 0
    if CHUNK > 0:
        begin = (first // CHUNK) * CHUNK
    if reach is not None:
        begin = tl.load(reach + reach_tile(n, g, first, T, tokens, REACH_TILE))
    acc = tl.zeros([BLOCK, COLUMNS], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)

    if STATES:
        entering = INIT or begin > 0
        if GATED:  # the decay from the state to this block; if it is 0, no row is read
            kept = tl.exp2(tl.load(sums + g * tokens + start + first - 1, mask=first > begin, other=0.0))
            entering &= kept > 0.0
        if entering:
            chunk = first_state(n, chunk_starts, row_states, PACKED) + begin // CHUNK
            UPPER: tl.constexpr = K - HALF
            rows = tl.cast(lower, tl.int64) * K + upper * UPPER
            tile = s + (chunk * G + g) * rows * V + width[:, None] * V + col[None, :]
            base = lower_base(queries, width, HALF, P)
            for i in range(lower):
                phi = times_prefix(base, q_rows, valid, i, prefixes, weights, P)
                part = tl.load(tile, mask=(col < V)[None, :], other=0.0)
                acc = tl.dot(rounded(phi, PRECISION), part, acc, input_precision=PRECISION)
                tile += K * V
            if UPPER > 0:
                half = tl.arange(0, UPPER)
                tile = s + (chunk * G + g) * rows * V + lower * K * V + half[:, None] * V + col[None, :]
                upper_base = tl.load(q_rows[:, None] + (HALF + half)[None, :], mask=valid[:, None], other=0.0)
                for i in range(lower, lower + upper):
                    phi = times_prefix(upper_base, q_rows, valid, i, prefixes, weights, P)
                    part = tl.load(tile, mask=(col < V)[None, :], other=0.0)
                    acc = tl.dot(rounded(phi, PRECISION), part, acc, input_precision=PRECISION)
                    tile += UPPER * V
            if NORMALIZE:
                matrix = tl.load(z + (chunk * G + g) * K * K + width[:, None] * K + width[None, :])
                total = tl.sum(tl.dot(queries, matrix, input_precision=PRECISION) * queries.to(tl.float32), 1)

    # Decays are split at the last token before the block: 2**(L_i - L_ref) 2**(L_ref - L_j), where both are at most 1.
    here = sums + g * tokens + start
    low = here + tl.cast(G, tl.int64) * tokens
    if GATED:
        own = tl.load(here + first + t, mask=valid, other=0.0)
        own_low = tl.load(low + first + t, mask=valid, other=0.0)
        ref = tl.load(here + first - 1, mask=first > begin, other=0.0)
        ref_low = tl.load(low + first - 1, mask=first > begin, other=0.0)
        since = tl.exp2((own - ref) + (own_low - ref_low))
        if STATES:
            acc *= kept
            total *= kept
    j = tl.arange(0, KEYS)
    k_tile = k + (start + begin) * k_st + g * k_sh + (j[None, :] * k_st + width[:, None])
    v_tile = v + (start + begin) * v_st + g * v_sh + (j[:, None] * v_st + col[None, :])
    for s0 in range(begin, first, KEYS):
        scores = tl.dot(queries, tl.load(k_tile), input_precision=PRECISION)
        if P > 4:
            scores *= score_scale
        weight = power(scores, P)
        if GATED:
            weight *= tl.exp2((ref - tl.load(here + s0 + j)) + (ref_low - tl.load(low + s0 + j)))[None, :]
        if NORMALIZE:
            total += tl.sum(weight, 1)
        values = tl.load(v_tile, mask=(col < V)[None, :], other=0.0)
        acc = tl.dot(rounded(weight.to(values.dtype), PRECISION), values, acc, input_precision=PRECISION)
        k_tile += KEYS * k_st
        v_tile += KEYS * v_st
    if GATED:
        acc *= since[:, None]
        total *= since
    for s0 in range(first, tl.minimum(first + BLOCK, length), KEYS):
        past = s0 + j < length
        scores = tl.dot(queries, tl.load(k_tile, mask=past[None, :], other=0.0), input_precision=PRECISION)
        if P > 4:
            scores *= score_scale
        weight = power(scores, P)
        if GATED:
            rest = own_low[:, None] - tl.load(low + s0 + j, mask=past, other=0.0)[None, :]
            weight *= tl.exp2((own[:, None] - tl.load(here + s0 + j, mask=past, other=0.0)[None, :]) + rest)
        weight = tl.where((first + t)[:, None] >= (s0 + j)[None, :], weight, 0.0)
        if NORMALIZE:
            total += tl.sum(weight, 1)
        values = tl.load(v_tile, mask=past[:, None] & (col < V)[None, :], other=0.0)
        acc = tl.dot(rounded(weight.to(values.dtype), PRECISION), values, acc, input_precision=PRECISION)
        k_tile += KEYS * k_st
        v_tile += KEYS * v_st

    acc *= out_scale
    if NORMALIZE:
        total = total * out_scale + eps
        acc /= total[:, None]
        tl.store(norm + h * tokens + start + first + t, total, mask=valid)
    o_tile = out + ((start + first) * H + h) * V + (t[:, None] * (H * V) + col[None, :])
    tl.store(o_tile, acc.to(out.dtype.element_ty), mask=valid[:, None] & (col < V)[None, :])
