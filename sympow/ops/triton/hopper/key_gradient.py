"""The gradients of keys and values for p = 2 on Hopper, in Gluon. They equal those of `gradients.key_pass`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.compat import barrier
from sympow.ops.triton.hopper.primitives import (
    assign,
    await_last,
    buffer,
    buffers,
    column,
    copy_rows,
    exp2,
    query_step,
    reach_tile,
    stage_columns,
    start_next,
    sum_before,
)
from sympow.ops.triton.hopper.ring import await_tile, copies_ahead, copy_tile, first_tiles, ring, running
from sympow.ops.triton.hopper.state_parts import key_states


@gluon.jit
def _both(
    tiles, state, columns, values, base, dkeys, dvalues,
    START: gl.constexpr, STOP: gl.constexpr, STEPS: gl.constexpr, FROM: gl.constexpr,
    TILE: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr,
    layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Adds the parts of the tiles START to STOP - 1 of the state to the gradients of keys, and of their rows from FROM
    on to the gradients of values. Lower and upper tiles have loops of their own. In one loop with a branch, ptxas
    computed the index of a tile in the other branch."""
    STAGES: gl.constexpr = len(tiles)
    LAST: gl.constexpr = STOP - (STOP - START) % STAGES
    for i in range(START, LAST, STAGES):
        dkeys, dvalues = _some_of_both(
            tiles, state, columns, values, base, dkeys, dvalues, i, START % STAGES, STAGES, STEPS, FROM, TILE, K, V,
            HALF, layout, num_warps,
        )  # fmt: skip
    if LAST < STOP:
        dkeys, dvalues = _some_of_both(
            tiles, state, columns, values, base, dkeys, dvalues, LAST, LAST % STAGES, STOP - LAST, STEPS, FROM, TILE, K,
            V, HALF, layout, num_warps,
        )  # fmt: skip
    return dkeys, dvalues


@gluon.jit
def _some_of_both(
    tiles, state, columns, values, base, dkeys, dvalues, first,
    STAGE: gl.constexpr, COUNT: gl.constexpr, STEPS: gl.constexpr, FROM: gl.constexpr,
    TILE: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr,
    layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Adds the parts of COUNT tiles from `first` on; the first one is in buffer STAGE. Operands and waits are as in
    `ring.add_products`, with two products for each prefix."""
    PER: gl.constexpr = TILE // K
    STAGES: gl.constexpr = len(tiles)
    left, right = values, base
    f = column(columns, first * PER, layout)
    for n in gl.static_range(COUNT):
        await_tile(STAGES)
        to = tiles[(STAGE + n + copies_ahead(STAGES)) % STAGES]
        copy_tile(to, state, first + (n + copies_ahead(STAGES)), STEPS, K, TILE, V, HALF, num_warps)
        for u in gl.static_range(PER):
            before, early = left, right
            left, right = values * f, base * f
            if n * PER + u + 1 < COUNT * PER:
                f = column(columns, first * PER + (n * PER + u + 1), layout)
            part = tiles[(STAGE + n) % STAGES].slice(u * K, K, 0)
            dkeys = warpgroup_mma(left, part.permute([1, 0]), dkeys, is_async=True)
            dvalues = warpgroup_mma(right, part.slice(FROM, K - FROM, 0), dvalues, is_async=True)
            dkeys, dvalues, before, early, left, right = warpgroup_mma_wait(
                2 * running(u, PER, n, COUNT, STAGES), deps=(dkeys, dvalues, before, early, left, right)
            )
    return dkeys, dvalues


@gluon.jit
def _key_halves(
    state, z, keys_s, values_s,
    K: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr, BLOCK: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, Z: gl.constexpr, mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Returns the gradients of keys [BLOCK, K] and values [BLOCK, V] that come through the gradient of a state in
    halves and of its z."""
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    STEPS: gl.constexpr = K * K // TILE
    LOWER_STEPS: gl.constexpr = HALF * K // TILE
    tiles = ring(STAGES, TILE, V)
    if Z:
        copy_rows(tiles[STAGES - 1], z, K, K, TILE, K, num_warps)
    first_tiles(tiles, state, STEPS, K, TILE, V, HALF, num_warps)
    columns = stage_columns(keys_s.load(left_layout), K, BLOCK)
    dkeys = gl.zeros([BLOCK, K], gl.float32, mma)
    dvalues = gl.zeros([BLOCK, V], gl.float32, mma)
    if Z:
        dkeys = warpgroup_mma(keys_s, tiles[STAGES - 1].slice(0, K, 0), dkeys)
    values = values_s.load(left_layout)
    # A row with a lower prefix and an upper last index counts for two orderings.
    width = gl.arange(0, K, gl.SliceLayout(0, left_layout))
    base = keys_s.load(left_layout) * gl.where(width >= HALF, 2.0, 1.0).to(gl.bfloat16)[None, :]
    dkeys, dvalues = _both(
        tiles, state, columns, values, base, dkeys, dvalues, 0, LOWER_STEPS, STEPS, 0, TILE, K, V, HALF,
        left_layout, num_warps,
    )  # fmt: skip
    dkeys, dvalues = _both(
        tiles, state, columns, values, keys_s.slice(HALF, K - HALF, 1).load(left_layout), dkeys, dvalues,
        LOWER_STEPS, STEPS, STEPS, HALF, TILE, K, V, HALF, left_layout, num_warps,
    )  # fmt: skip
    for n in gl.static_range(STAGES):
        tiles[n]._keep_alive()
    return dkeys, dvalues


@gluon.jit
def _first_queries(
    q, q_st, q_sh, dout, H, first, after, within, end, g,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns buffers for queries and output gradients of three steps, and starts the copies of the first two."""
    queries_s = buffers(3, QUERIES, K)
    dy_s = buffers(3, QUERIES, V)
    for early in gl.static_range(2):
        head, s0 = query_step(first * 0 + early, first, after, within, R, BLOCK, QUERIES)
        h = g * R + head
        left = gl.where(early < R * (after + within), end - s0, 0)
        copy_rows(queries_s.index(early), q + s0.to(gl.int64) * q_st + h * q_sh, q_st, left, QUERIES, K, WARPS)
        copy_rows(dy_s.index(early), dout + (s0.to(gl.int64) * H + h) * V, H * V, left, QUERIES, V, WARPS)
        async_copy.commit_group()
    return queries_s, dy_s


@gluon.jit
def key_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, ds, dz, factor, delta, dk, dv, dsums,
    reach, starts, chunk_starts, blocks, T, tokens, spread, H, G, out_scale, grad_scale,
    K: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, R: gl.constexpr,
    BLOCK: gl.constexpr, QUERIES: gl.constexpr, CHUNK: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, STATES: gl.constexpr, FINAL: gl.constexpr, Z: gl.constexpr, PACKED: gl.constexpr,
    OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(K == V)
    start_next(OVERLAP)
    n, start, length, first, g = assign(starts, blocks, T, G, spread, BLOCK, CHUNK, PACKED, True)
    if PACKED:
        if first >= length:
            return
    end = length
    chunk_index = first * 0
    origin = first * 0
    if CHUNK > 0:
        chunk_index = first // CHUNK
        origin = chunk_index * CHUNK
        end = gl.minimum(origin + CHUNK, length)
    if reach is not None:
        end = gl.load(reach + reach_tile(n, g, gl.minimum(first + BLOCK, length) - 1, T, tokens))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, QUERIES, 16])
    UPPER: gl.constexpr = K - HALF

    keys_s = buffer(BLOCK, K)
    values_s = buffer(BLOCK, V)
    copy_rows(keys_s, k + (start + first) * k_st + g * k_sh, k_st, length - first, BLOCK, K, num_warps)
    copy_rows(values_s, v + (start + first) * v_st + g * v_sh, v_st, length - first, BLOCK, V, num_warps)
    q += start * q_st
    dout += start * (H * V)
    # First come all queries after the block, of every head, and then those of the block itself.
    after = gl.cdiv(gl.maximum(end - (first + BLOCK), 0), QUERIES)
    within = gl.cdiv(gl.minimum(end - first, BLOCK), QUERIES)
    total = R * (after + within)
    # If the part of the state needs all shared memory, the queries reuse it at the end.
    LATE: gl.constexpr = STATES and PARTS == 4
    if not LATE:
        queries_s, dy_s = _first_queries(
            q, q_st, q_sh, dout, H, first, after, within, end, g, K, V, R, BLOCK, QUERIES, num_warps
        )

    dkeys = gl.zeros([BLOCK, K], gl.float32, mma)
    dvalues = gl.zeros([BLOCK, V], gl.float32, mma)
    if STATES:
        leaving = FINAL or end < length
        if GATED:  # the decay from this block to the end of the chunk
            here = sums + (g + G) * tokens + start
            last_high, last_rest = sum_before(here, here + G * tokens, end, origin)
            high, rest = sum_before(here, here + G * tokens, gl.minimum(first + BLOCK, length), origin)
            kept = exp2((last_high - high) + (last_rest - rest))
            leaving &= kept > 0.0
        if leaving:
            if PACKED:
                chunk = gl.load(chunk_starts + n).to(gl.int64) + chunk_index
            else:
                chunk = n.to(gl.int64) * gl.cdiv(T, CHUNK) + chunk_index
            rows: gl.constexpr = HALF * K + UPPER * UPPER if PARTS == 2 else 5 * K * K // 8
            state = ds + (chunk * G + g) * (rows * V)
            matrix = dz + (chunk * G + g) * (K * K)
            if PARTS == 4:
                gl.static_assert(TILE == K)
                dkeys, dvalues = key_states(state, matrix, keys_s, values_s, K, V, BLOCK, STAGES, Z, mma, num_warps)
            else:
                dkeys, dvalues = _key_halves(
                    state, matrix, keys_s, values_s, K, V, HALF, BLOCK, TILE, STAGES, Z, mma, num_warps
                )
    if LATE:
        barrier()
        queries_s, dy_s = _first_queries(
            q, q_st, q_sh, dout, H, first, after, within, end, g, K, V, R, BLOCK, QUERIES, num_warps
        )

    # Decays are split at the last token of the block: 2**(L_i - L_ref) 2**(L_ref - L_j), where both are at most 1.
    here = sums + (g + G) * tokens + start
    low = here + G * tokens
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    i_range = gl.arange(0, QUERIES, gl.SliceLayout(0, score_mma))
    if GATED:
        high, rest = sum_before(here, low, gl.minimum(first + BLOCK, length), origin)
        own = gl.load(here + row, mask=row < length, other=0.0) - high
        own += gl.load(low + row, mask=row < length, other=0.0) - rest
        if STATES:
            dkeys *= kept
            dvalues *= kept
    for it in range(total):
        if GATED:
            if it == R * after:
                decay = exp2(-own)
                dkeys *= gl.convert_layout(decay, gl.SliceLayout(1, mma))[:, None]
                dvalues *= gl.convert_layout(decay, gl.SliceLayout(1, mma))[:, None]
        head, s0 = query_step(it, first, after, within, R, BLOCK, QUERIES)
        at = (g * R + head) * tokens + start + s0 + i_range
        there = s0 + i_range < end
        f = gl.load(factor + at, mask=there, other=0.0) * out_scale
        d = gl.load(delta + at, mask=there, other=0.0)
        if GATED:
            ref = (high - gl.load(here + s0)) + rest  # the high part is that of the tile
            later = gl.load(low + s0 + i_range, mask=there, other=float("-inf"))
        async_copy.wait_group(1)
        fence_async_shared()
        head1, s1 = query_step(it + 2, first, after, within, R, BLOCK, QUERIES)
        h1 = g * R + head1
        stage = (it + 2) % 3
        left = gl.where(it + 2 < total, end - s1, 0)
        copy_rows(queries_s.index(stage), q + s1.to(gl.int64) * q_st + h1 * q_sh, q_st, left, QUERIES, K, num_warps)
        copy_rows(dy_s.index(stage), dout + (s1.to(gl.int64) * H + h1) * V, H * V, left, QUERIES, V, num_warps)
        async_copy.commit_group()
        queries = queries_s.index(it % 3)
        dy = dy_s.index(it % 3)
        zeros = gl.zeros([BLOCK, QUERIES], gl.float32, score_mma)
        scores = warpgroup_mma(keys_s, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
        grad = warpgroup_mma(values_s, dy.permute([1, 0]), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        if it < R * after:
            if GATED:
                f *= exp2(later - ref)
            slope = scores * f[None, :]
        else:
            slope = scores * f[None, :]
            if GATED:
                slope *= exp2(later[None, :] - (own + ref)[:, None])
            slope = gl.where((row[:, None] <= (s0 + i_range)[None, :]) & (row < length)[:, None], slope, 0.0)
        weight = gl.convert_layout((slope * scores).to(gl.bfloat16), left_layout)
        dvalues = warpgroup_mma(weight, dy, dvalues, is_async=True)
        grad = warpgroup_mma_wait(1, deps=(grad,))
        grad = gl.convert_layout(((grad - d[None, :]) * slope).to(gl.bfloat16), left_layout)
        dkeys = warpgroup_mma(grad, queries, dkeys, is_async=True)
        dvalues, dkeys, weight, grad = warpgroup_mma_wait(0, deps=(dvalues, dkeys, weight, grad))
    async_copy.wait_group(0)

    dkeys *= grad_scale
    out_row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    if GATED:
        keys = keys_s.load(mma).to(gl.float32)
        gl.store(dsums + g * tokens + start + out_row, gl.sum(dkeys * keys, 1), mask=out_row < length)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [num_warps, 1], [1, 0])
    t = gl.arange(0, BLOCK, gl.SliceLayout(1, out_layout))
    c = gl.arange(0, K, gl.SliceLayout(0, out_layout))
    tile = dk + ((start + first) * G + g) * K + (t[:, None] * (G * K) + c[None, :])
    gl.store(tile, gl.convert_layout(dkeys.to(gl.bfloat16), out_layout), mask=(first + t < length)[:, None])
    value_out: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [num_warps, 1], [1, 0])
    t = gl.arange(0, BLOCK, gl.SliceLayout(1, value_out))
    c = gl.arange(0, V, gl.SliceLayout(0, value_out))
    tile = dv + ((start + first) * G + g) * V + (t[:, None] * (G * V) + c[None, :])
    gl.store(tile, gl.convert_layout(dvalues.to(gl.bfloat16), value_out), mask=(first + t < length)[:, None])
    await_last(OVERLAP)  # for the next kernel, which reads what both kernels have written
