"""The gradient of queries for p = 2 on Hopper, in Gluon. It equals that of `gradients.query_pass`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.compat import barrier
from sympow.ops.triton.hopper.primitives import (
    assign,
    await_last,
    buffer,
    copy_rows,
    exp2,
    first_keys,
    reach_tile,
    signed_power,
    stage_columns,
    start_next,
    store_rows,
    sum_before,
)
from sympow.ops.triton.hopper.ring import add_products, first_tiles, ring
from sympow.ops.triton.hopper.state_parts import query_states


@gluon.jit
def _query_halves(
    state, z, queries_s, dy_s, d,
    K: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr, BLOCK: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, NORMALIZE: gl.constexpr, mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Returns the gradient of queries through a state in halves and its normalizer's z, [BLOCK, K]; d is their part in
    that of the normalizer."""
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    STEPS: gl.constexpr = K * K // TILE
    tiles = ring(STAGES, TILE, V)
    if NORMALIZE:  # Z reuses the memory of the tile that is copied last
        copy_rows(tiles[STAGES - 1], z, K, K, TILE, K, num_warps)
    first_tiles(tiles, state, STEPS, K, TILE, V, HALF, num_warps)
    columns = stage_columns(queries_s.load(left_layout), K, BLOCK)
    acc = gl.zeros([BLOCK, K], gl.float32, mma)
    if NORMALIZE:
        inner = warpgroup_mma(queries_s, tiles[STAGES - 1].slice(0, K, 0), gl.zeros([BLOCK, K], gl.float32, mma))
        acc -= inner * d[:, None]
    dy = dy_s.load(left_layout)
    acc = add_products(tiles, state, dy, columns, acc, 0, STEPS, STEPS, 0, K, TILE, V, HALF, left_layout, num_warps)
    for n in gl.static_range(STAGES):
        tiles[n]._keep_alive()
    return acc


@gluon.jit
def within_chunk(
    acc, queries_s, dy_s, keys_s, values_s, delta, k, k_st, v, v_st, sums, g, G, tokens, start, length, first, origin,
    begin,
    P: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr, GATED: gl.constexpr,
    mma: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns acc [BLOCK, K] plus the gradient of queries through the keys of their chunk, from `begin` on, decayed to
    each query. The copies of the first keys have been started; delta [BLOCK] is the part of the normalizer, or None."""
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    # Decays are split at the last token before the block: 2**(L_i - L_ref) 2**(L_ref - L_j), where both are at most 1.
    here = sums + (g + G) * tokens + start
    low = here + G * tokens
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    if delta is not None:
        own_delta = gl.convert_layout(delta, gl.SliceLayout(1, score_mma))
    j = gl.arange(0, KEYS, gl.SliceLayout(0, score_mma))
    if GATED:
        high, rest = sum_before(here, low, first, origin)
        own = gl.load(here + row, mask=row < length, other=0.0) - high
        own += gl.load(low + row, mask=row < length, other=0.0) - rest
    end = gl.minimum(first + BLOCK, length)
    steps = gl.cdiv(end - begin, KEYS)
    before = (first - begin) // KEYS
    for i in range(steps):
        s0 = begin + i * KEYS
        if GATED:
            if i == before:
                acc *= gl.convert_layout(exp2(own), gl.SliceLayout(1, mma))[:, None]
            ref = (high - gl.load(here + s0)) + rest  # the high part is that of the tile
            there = gl.load(low + s0 + j, mask=s0 + j < length, other=0.0)
        async_copy.wait_group(1)
        fence_async_shared()
        s1 = s0 + 2 * KEYS
        stage = (i + 2) % 3
        copy_rows(keys_s.index(stage), k + s1.to(gl.int64) * k_st, k_st, end - s1, KEYS, K, WARPS)
        copy_rows(values_s.index(stage), v + s1.to(gl.int64) * v_st, v_st, end - s1, KEYS, V, WARPS)
        async_copy.commit_group()
        zeros = gl.zeros([BLOCK, KEYS], gl.float32, score_mma)
        keys = keys_s.index(i % 3)
        grad = warpgroup_mma(dy_s, values_s.index(i % 3).permute([1, 0]), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma(queries_s, keys.permute([1, 0]), zeros, use_acc=False, is_async=True)
        grad, scores = warpgroup_mma_wait(0, deps=(grad, scores))
        if delta is not None:
            grad -= own_delta[:, None]
        grad *= signed_power(scores, P - 1)
        if i < before:
            if GATED:
                grad *= exp2(ref - there)[None, :]
        else:
            if GATED:
                grad *= exp2((own + ref)[:, None] - there[None, :])
            grad = gl.where(row[:, None] >= (s0 + j)[None, :], grad, 0.0)
        grad = gl.convert_layout(grad.to(gl.bfloat16), left_layout)
        acc = warpgroup_mma(grad, keys, acc, is_async=True)
        acc, _ = warpgroup_mma_wait(0, deps=(acc, grad))
    async_copy.wait_group(0)
    return acc


@gluon.jit
def query_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, s, z, factor, delta, dq, dsums,
    reach, starts, chunk_starts, blocks, T, tokens, spread, H, G, grad_scale,
    K: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, R: gl.constexpr,
    BLOCK: gl.constexpr, KEYS: gl.constexpr, CHUNK: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, NORMALIZE: gl.constexpr, STATES: gl.constexpr, INIT: gl.constexpr, PACKED: gl.constexpr,
    OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    n, start, length, first, h = assign(starts, blocks, T, H, spread, BLOCK, CHUNK, PACKED, False)
    if PACKED:
        if first >= length:
            return
    g = h // R
    origin = first * 0
    if CHUNK > 0:
        origin = (first // CHUNK) * CHUNK
    begin = origin
    if reach is not None:
        await_last(OVERLAP)
        begin = gl.load(reach + reach_tile(n, g, first, T, tokens))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])

    dy_s = buffer(BLOCK, V)
    q += (start + first) * q_st + h * q_sh
    k += start * k_st + g * k_sh
    v += start * v_st + g * v_sh
    dout += ((start + first) * H + h) * V
    copy_rows(dy_s, dout, H * V, length - first, BLOCK, V, num_warps)
    # If the part of the state needs all shared memory, queries, keys and values reuse it at the end.
    LATE: gl.constexpr = STATES and PARTS == 4
    if not LATE:
        queries_s = buffer(BLOCK, K)
        copy_rows(queries_s, q, q_st, length - first, BLOCK, K, num_warps)
        keys_s, values_s = first_keys(k, k_st, v, v_st, begin, length, KEYS, K, V, num_warps)

    await_last(OVERLAP)
    start_next(OVERLAP)  # the next kernel reads what this one has waited for
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    d = gl.load(delta + h * tokens + start + row, mask=row < length, other=0.0)
    acc = gl.zeros([BLOCK, K], gl.float32, mma)
    if STATES:
        entering = INIT or begin > 0
        if GATED:  # the decay from the state to this block; if it is 0, no row is read
            kept = exp2(gl.load(sums + g * tokens + start + first - 1, mask=first > begin, other=0.0))
            entering &= kept > 0.0
        if entering:
            if PACKED:
                chunk = gl.load(chunk_starts + n).to(gl.int64) + begin // CHUNK
            else:
                chunk = n.to(gl.int64) * gl.cdiv(T, CHUNK) + begin // CHUNK
            rows: gl.constexpr = HALF * K + (K - HALF) * (K - HALF) if PARTS == 2 else 5 * K * K // 8
            state = s + (chunk * G + g) * (rows * V)
            matrix = z + (chunk * G + g) * (K * K)
            if PARTS == 4:
                gl.static_assert(TILE == K)
                acc = query_states(
                    q, q_st, length - first, state, matrix, dy_s, d, K, V, BLOCK, STAGES, NORMALIZE, mma, num_warps
                )
            else:
                acc = _query_halves(
                    state, matrix, queries_s, dy_s, d, K, V, HALF, BLOCK, TILE, STAGES, NORMALIZE, mma, num_warps
                )
    if LATE:
        barrier()
        queries_s = buffer(BLOCK, K)
        copy_rows(queries_s, q, q_st, length - first, BLOCK, K, num_warps)
        keys_s, values_s = first_keys(k, k_st, v, v_st, begin, length, KEYS, K, V, num_warps)

    if GATED and STATES:
        acc *= kept
    acc = within_chunk(
        acc, queries_s, dy_s, keys_s, values_s, d, k, k_st, v, v_st, sums, g, G, tokens, start, length, first, origin,
        begin, 2, K, V, BLOCK, KEYS, GATED, mma, num_warps,
    )  # fmt: skip

    acc *= (gl.load(factor + h * tokens + start + row, mask=row < length, other=0.0) * grad_scale)[:, None]
    if GATED:
        queries = queries_s.load(mma).to(gl.float32)
        gl.store(dsums + h * tokens + start + row, gl.sum(acc * queries, 1), mask=row < length)
    store_rows(dq, H, h, acc, start, first, length, BLOCK, K, num_warps)
