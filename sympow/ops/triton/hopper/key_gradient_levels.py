"""The gradients of keys and values for p = 3 and 4 on Hopper, in Gluon. They equal those of `gradients.key_pass`, with
the rows of `levels.Levels`. The gradient of keys through a state is computed like that of queries, the gradient of
values like the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.compat import barrier
from sympow.ops.triton.hopper.output import before_level, from_level, stage_pairs
from sympow.ops.triton.hopper.primitives import (
    buffer,
    buffers,
    copy_rows,
    exp2,
    locate,
    query_step,
    signed_power,
    stage_columns,
    sum_before,
)
from sympow.ops.triton.hopper.query_gradient_levels import through_state, tile_layout
from sympow.ops.triton.hopper.ring import first_in_one, ring_in_one


@gluon.jit
def _values_through_state(
    state,  # [ROWS, V]: the gradient of the state of the chunk and key/value head
    columns,  # shared [K, 1, BLOCK]: the keys by columns
    level_entries,  # int32 [groups]: `Levels.entries`
    weights,  # [prefixes, 2]: `Levels.weights`
    K: gl.constexpr,
    V: gl.constexpr,
    P: gl.constexpr,
    SKIP: gl.constexpr,
    ROWS: gl.constexpr,
    LEVELS: gl.constexpr,
    BLOCK: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    layout: gl.constexpr,  # stride of the result
    WARPS: gl.constexpr,
):
    """Returns the gradient of the values through the gradient of a state, [BLOCK, V], as the output pass does with
    queries and a state."""
    tiles = ring_in_one(STAGES, TILE, V)
    first_in_one(tiles, state, TILE, V, STAGES, WARPS)
    products = columns
    if P > 3:
        products = stage_pairs(columns, K, SKIP, BLOCK, WARPS)
    acc = gl.zeros([BLOCK, V], gl.float32, layout)
    for level in gl.static_range(len(LEVELS)):
        acc = from_level(
            acc, columns, products, tiles, state, level_entries, weights, before_level(LEVELS, level), ROWS // TILE,
            LEVELS[level][0], LEVELS[level][1], BLOCK, K, V, TILE, STAGES, WARPS, gl.DotOperandLayout(0, layout, 2),
        )  # fmt: skip
    async_copy.wait_group(0)
    tiles._keep_alive()
    return acc


@gluon.jit
def _copy_queries(
    queries_s, dy_s, q, q_st, q_sh, dout, H, it, first, after, within, end, g,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the queries and output gradients of step `it`; of none after the last step."""
    head, s0 = query_step(it, first, after, within, R, BLOCK, QUERIES)
    h = g * R + head
    left = gl.where(it < R * (after + within), end - s0, 0)
    copy_rows(queries_s.index(it % 3), q + s0.to(gl.int64) * q_st + h * q_sh, q_st, left, QUERIES, K, WARPS)
    copy_rows(dy_s.index(it % 3), dout + (s0.to(gl.int64) * H + h) * V, H * V, left, QUERIES, V, WARPS)
    async_copy.commit_group()


@gluon.jit
def key_pass(
    q,  # [tokens, H, K], bfloat16; its strides by token and head
    q_st,
    q_sh,
    k,  # [tokens, G, K]
    k_st,
    k_sh,
    v,  # [tokens, G, V]
    v_st,
    v_sh,
    dout,  # [tokens, H, V], contiguous
    sums,  # float32 [G, tokens]: log2 of the decay from the chunk's start on
    ds,  # [chunks, G, ROWS, V]: the gradients of the states after the chunks, rows of `Levels`
    rows,  # int32 [steps, GROUP K]: `Slopes.rows`
    entries,  # int32 [steps]: `Slopes.entries`
    level_entries,  # int32 [groups]: `Levels.entries`
    weights,  # bfloat16 [prefixes, 2]: `Levels.weights`
    dk,  # [tokens, G, K], contiguous: a result
    dv,  # [tokens, G, V], contiguous: a result
    dsums,  # float32 [G, tokens]: k . dk; written if GATED
    starts,  # int32 [N + 1]: cu_seqlens; read if PACKED, as the next two
    chunk_starts,  # int32 [N]: the first chunk of each sequence
    blocks,  # int32 [programs, 2]: the sequence of each block, and the index of the block in it
    T,  # tokens of a sequence, unless PACKED
    tokens,  # of all sequences
    H,  # query heads
    G,  # kv heads
    out_scale,  # of the outputs
    grad_scale,  # of dk
    K: gl.constexpr,
    V: gl.constexpr,
    P: gl.constexpr,
    SKIP: gl.constexpr,  # channels in front that are zero (`levels.Levels`)
    ROWS: gl.constexpr,  # of a state
    LEVELS: gl.constexpr,  # of each, groups and width
    TILE: gl.constexpr,  # rows of a step of the values' gradient
    GROUP: gl.constexpr,  # k of a step of the keys' gradient
    PER: gl.constexpr,  # such steps in an iteration of its loop
    R: gl.constexpr,  # H / G
    BLOCK: gl.constexpr,  # keys of a program
    QUERIES: gl.constexpr,  # of a step within the chunk
    CHUNK: gl.constexpr,  # a multiple of BLOCK
    STAGES: gl.constexpr,  # iterations whose tiles of the state are in shared memory
    GATED: gl.constexpr,
    STATES: gl.constexpr,  # whether gradients of states are read
    FINAL: gl.constexpr,  # whether the gradient of the state after the last chunk is not zero
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes dk, dv and dsums. Grid: blocks of keys, key/value heads."""
    n, start, length, first = locate(gl.program_id(0), starts, blocks, T, BLOCK, PACKED)
    if PACKED:
        if first >= length:
            return
    g = gl.program_id(1).to(gl.int64)
    chunk_index = first // CHUNK
    origin = chunk_index * CHUNK
    end = gl.minimum(origin + CHUNK, length)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    value_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, V, 16])
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, QUERIES, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    value_left: gl.constexpr = gl.DotOperandLayout(0, value_mma, 2)

    keys_s = buffer(BLOCK, K)
    values_s = buffer(BLOCK, V)
    copy_rows(keys_s, k + (start + first) * k_st + g * k_sh, k_st, length - first, BLOCK, K, num_warps)
    copy_rows(values_s, v + (start + first) * v_st + g * v_sh, v_st, length - first, BLOCK, V, num_warps)
    async_copy.commit_group()
    q += start * q_st
    dout += start * (H * V)

    dkeys = gl.zeros([BLOCK, K], gl.float32, mma)
    dvalues = gl.zeros([BLOCK, V], gl.float32, value_mma)
    leaving = FINAL or end < length
    if GATED:  # the decay from this block to the end of the chunk; if it is 0, no row is read
        here = sums + (g + G) * tokens + start
        last_high, last_rest = sum_before(here, here + G * tokens, end, origin)
        high, rest = sum_before(here, here + G * tokens, gl.minimum(first + BLOCK, length), origin)
        kept = exp2((last_high - high) + (last_rest - rest))
        leaving &= kept > 0.0
    if STATES:
        if leaving:
            if PACKED:
                chunk = gl.load(chunk_starts + n).to(gl.int64) + chunk_index
            else:
                chunk = n.to(gl.int64) * gl.cdiv(T, CHUNK) + chunk_index
            async_copy.wait_group(0)
            state = ds + (chunk * G + g) * (ROWS * V)
            columns = stage_columns(keys_s.load(left_layout), K, BLOCK)
            dkeys = through_state(
                state, rows, entries, columns, values_s, K, V, P, SKIP, BLOCK, GROUP, PER, STAGES, mma, num_warps
            )
            barrier()
            dvalues = _values_through_state(
                state, columns, level_entries, weights, K, V, P, SKIP, ROWS, LEVELS, BLOCK, TILE, STAGES, value_mma,
                num_warps,
            )  # fmt: skip
            barrier()

    # The part of the state needs much shared memory, which the queries reuse. First come all queries after the block,
    # of every head, and then those of the block itself.
    after = gl.cdiv(gl.maximum(end - (first + BLOCK), 0), QUERIES)
    within = gl.cdiv(gl.minimum(end - first, BLOCK), QUERIES)
    total = R * (after + within)
    queries_s = buffers(3, QUERIES, K)
    dy_s = buffers(3, QUERIES, V)
    for early in gl.static_range(2):
        _copy_queries(
            queries_s, dy_s, q, q_st, q_sh, dout, H, first * 0 + early, first, after, within, end, g, K, V, R, BLOCK,
            QUERIES, num_warps,
        )  # fmt: skip
    # Decays are split at the last token of the block: 2**(L_i - L_ref) 2**(L_ref - L_j), where both are at most 1.
    here = sums + (g + G) * tokens + start
    low = here + G * tokens
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    i_range = gl.arange(0, QUERIES, gl.SliceLayout(0, score_mma))
    if GATED:
        high, rest = sum_before(here, low, gl.minimum(first + BLOCK, length), origin)
        own = gl.load(here + row, mask=row < length, other=0.0) - high
        own += gl.load(low + row, mask=row < length, other=0.0) - rest
        dkeys *= kept
        dvalues *= kept
    for it in range(total):
        if GATED:
            if it == R * after:
                decay = exp2(-own)
                dkeys *= gl.convert_layout(decay, gl.SliceLayout(1, mma))[:, None]
                dvalues *= gl.convert_layout(decay, gl.SliceLayout(1, value_mma))[:, None]
        _, s0 = query_step(it, first, after, within, R, BLOCK, QUERIES)
        there = s0 + i_range < end
        if GATED:
            ref = (high - gl.load(here + s0)) + rest  # the high part is that of the tile
            later = gl.load(low + s0 + i_range, mask=there, other=float("-inf"))
        async_copy.wait_group(1)
        fence_async_shared()
        _copy_queries(
            queries_s, dy_s, q, q_st, q_sh, dout, H, it + 2, first, after, within, end, g, K, V, R, BLOCK, QUERIES,
            num_warps,
        )  # fmt: skip
        queries = queries_s.index(it % 3)
        dy = dy_s.index(it % 3)
        zeros = gl.zeros([BLOCK, QUERIES], gl.float32, score_mma)
        scores = warpgroup_mma(keys_s, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
        grad = warpgroup_mma(values_s, dy.permute([1, 0]), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        slope = signed_power(scores, P - 1)
        if it < R * after:
            f = gl.where(there, out_scale, 0.0)
            if GATED:
                f *= exp2(later - ref)
            slope *= f[None, :]
        else:
            slope *= out_scale
            if GATED:
                slope *= exp2(later[None, :] - (own + ref)[:, None])
            own_pairs = (row[:, None] <= (s0 + i_range)[None, :]) & (row < length)[:, None] & there[None, :]
            slope = gl.where(own_pairs, slope, 0.0)
        weight = gl.convert_layout((slope * scores).to(gl.bfloat16), value_left)
        dvalues = warpgroup_mma(weight, dy, dvalues, is_async=True)
        grad = warpgroup_mma_wait(1, deps=(grad,))
        grad = gl.convert_layout((grad * slope).to(gl.bfloat16), left_layout)
        dkeys = warpgroup_mma(grad, queries, dkeys, is_async=True)
        dvalues, dkeys, weight, grad = warpgroup_mma_wait(0, deps=(dvalues, dkeys, weight, grad))
    async_copy.wait_group(0)

    dkeys *= grad_scale
    if GATED:
        out_row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
        keys = keys_s.load(mma).to(gl.float32)
        gl.store(dsums + g * tokens + start + out_row, gl.sum(dkeys * keys, 1), mask=out_row < length)
    key_out: gl.constexpr = tile_layout(K, num_warps)
    t = gl.arange(0, BLOCK, gl.SliceLayout(1, key_out))
    c = gl.arange(0, K, gl.SliceLayout(0, key_out))
    tile = dk + ((start + first) * G + g) * K + (t[:, None] * (G * K) + c[None, :])
    gl.store(tile, gl.convert_layout(dkeys.to(gl.bfloat16), key_out), mask=(first + t < length)[:, None])
    value_out: gl.constexpr = tile_layout(V, num_warps)
    t = gl.arange(0, BLOCK, gl.SliceLayout(1, value_out))
    c = gl.arange(0, V, gl.SliceLayout(0, value_out))
    tile = dv + ((start + first) * G + g) * V + (t[:, None] * (G * V) + c[None, :])
    gl.store(tile, gl.convert_layout(dvalues.to(gl.bfloat16), value_out), mask=(first + t < length)[:, None])
