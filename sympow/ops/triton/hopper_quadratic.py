"""The key pass of the quadratic form for Hopper, p = 2, in Gluon: as `hopper_backward.key_pass` without states, and for
rows that are not packed.

Registers that those would take hold keys and values, from where products of few columns read them faster than from
shared memory. What a step's scores are multiplied with comes with its tiles, decay and normalizer in one: `scales`
[H, tokens] as `backward.row_factors` writes them, so that b_ij n_i is 2**(scales_i - L_j).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper_backward import query_step
from sympow.ops.triton.hopper_output import assign, await_last, copy_rows, start_next
from sympow.ops.triton.hopper_states import exp2


@gluon.jit
def _tiles(COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for COUNT tiles [ROWS, WIDTH]."""
    return gl.allocate_shared_memory(
        gl.bfloat16, [COUNT, ROWS, WIDTH], gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.bfloat16)
    )


@gluon.jit
def _vectors(COUNT: gl.constexpr, ROWS: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _copy_vector(buffer, ptr, left, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """As `copy_rows`, of one number a row."""
    i = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    async_copy.async_copy_global_to_shared(buffer, ptr + i, mask=i < left)


@gluon.jit
def _store_rows(ptr, stride, x, left, ROWS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Writes x [ROWS, WIDTH] up to row `left`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    tile = ptr + (r[:, None] * stride + c[None, :])
    gl.store(tile, gl.convert_layout(x.to(gl.bfloat16), layout), mask=(r < left)[:, None])


@gluon.jit
def _step(it, first, after, within, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr):
    """`query_step`, whose divisions count in so short a turn: a group of one head needs none."""
    if R == 1:
        return first * 0, first + gl.where(it < after, BLOCK + it * QUERIES, (it - after) * QUERIES)
    else:
        return query_step(it, first, after, within, R, BLOCK, QUERIES)


@gluon.jit
def _copy_queries(
    queries_s, dy_s, scales_s, delta_s, q, q_st, q_sh, dout, scales, delta, it, total, first, after, within, length,
    tokens, H,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of step `it`, none from `total` on. Pointers are those of the group's first head."""
    head, s0 = _step(it, first, after, within, R, BLOCK, QUERIES)
    left = gl.where(it < total, length - s0, 0)
    stage = it % 3
    copy_rows(queries_s.index(stage), q + s0.to(gl.int64) * q_st + head * q_sh, q_st, left, QUERIES, K, WARPS)
    copy_rows(dy_s.index(stage), dout + (s0.to(gl.int64) * H + head) * V, H * V, left, QUERIES, V, WARPS)
    at = head.to(gl.int64) * tokens + s0
    _copy_vector(scales_s.index(stage), scales + at, left, QUERIES, WARPS)
    _copy_vector(delta_s.index(stage), delta + at, left, QUERIES, WARPS)
    async_copy.commit_group()


@gluon.jit
def _steps(
    begin, stop, total, dkeys, dvalues, keys, values, queries_s, dy_s, scales_s, delta_s,
    q, q_st, q_sh, dout, scales, delta, first, after, within, length, tokens, H, own, ref, row,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr,
    OWN: gl.constexpr, GATED: gl.constexpr, mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dkeys and dvalues plus the parts of the steps `begin` to `stop` - 1. OWN: the queries are the block's own.

    keys and values go through the loop and its waits: else nothing keeps their registers while products read them."""
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, QUERIES, 16])
    i = gl.arange(0, QUERIES, gl.SliceLayout(0, score_mma))
    for it in range(begin, stop):
        async_copy.wait_group(1)
        fence_async_shared()
        stage = it % 3
        queries = queries_s.index(stage)
        dy = dy_s.index(stage)
        zeros = gl.zeros([BLOCK, QUERIES], gl.float32, score_mma)
        scores = warpgroup_mma(keys, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
        grad = warpgroup_mma(values, dy.permute([1, 0]), zeros, use_acc=False, is_async=True)
        f = scales_s.index(stage).load(gl.SliceLayout(0, score_mma))
        d = delta_s.index(stage).load(gl.SliceLayout(0, score_mma))
        _, s0 = _step(it, first, after, within, R, BLOCK, QUERIES)
        if s0 + QUERIES > length:
            f = gl.where(s0 + i < length, f, float("-inf"))
        if not OWN:
            f = exp2(f - ref)
        scores, keys = warpgroup_mma_wait(1, deps=(scores, keys))
        if OWN:
            if GATED:
                slope = scores * exp2(f[None, :] - own[:, None])
            else:
                slope = scores * exp2(f)[None, :]
            slope = gl.where(row[:, None] <= (s0 + i)[None, :], slope, 0.0)
        else:
            slope = scores * f[None, :]
        weight = gl.convert_layout((slope * scores).to(gl.bfloat16), left_layout)
        dvalues = warpgroup_mma(weight, dy, dvalues, is_async=True)
        grad, values = warpgroup_mma_wait(1, deps=(grad, values))
        grad = gl.convert_layout(((grad - d[None, :]) * slope).to(gl.bfloat16), left_layout)
        dkeys = warpgroup_mma(grad, queries, dkeys, is_async=True)
        _copy_queries(
            queries_s, dy_s, scales_s, delta_s, q, q_st, q_sh, dout, scales, delta, it + 2, total, first, after, within,
            length, tokens, H, K, V, R, BLOCK, QUERIES, num_warps,
        )  # fmt: skip
        dvalues, dkeys, weight, grad = warpgroup_mma_wait(0, deps=(dvalues, dkeys, weight, grad))
    return dkeys, dvalues, keys, values


@gluon.jit
def key_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, scales, delta, dk, dv, dsums,
    starts, chunk_starts, blocks, T, tokens, spread, H, G, grad_scale,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr,
    GATED: gl.constexpr, OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(K == V)
    start_next(OVERLAP)
    _, start, length, first, g = assign(starts, blocks, T, G, spread, BLOCK, 0, False, True)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, QUERIES, 16])
    held: gl.constexpr = gl.DotOperandLayout(0, score_mma, 2)
    keys_s = _tiles(1, BLOCK, K).index(0)
    values_s = _tiles(1, BLOCK, V).index(0)
    queries_s = _tiles(3, QUERIES, K)
    dy_s = _tiles(3, QUERIES, V)
    scales_s = _vectors(3, QUERIES)
    delta_s = _vectors(3, QUERIES)
    copy_rows(keys_s, k + (start + first) * k_st + g * k_sh, k_st, length - first, BLOCK, K, num_warps)
    copy_rows(values_s, v + (start + first) * v_st + g * v_sh, v_st, length - first, BLOCK, V, num_warps)
    q += start * q_st + g * R * q_sh
    dout += (start * H + g * R) * V
    scales += g * R * tokens + start
    delta += g * R * tokens + start
    # First all queries after the block, of every head, then those of the block itself.
    after = gl.cdiv(gl.maximum(length - (first + BLOCK), 0), QUERIES)
    within = gl.cdiv(gl.minimum(length - first, BLOCK), QUERIES)
    total = R * (after + within)
    for early in gl.static_range(2):
        _copy_queries(
            queries_s, dy_s, scales_s, delta_s, q, q_st, q_sh, dout, scales, delta, first * 0 + early, total, first,
            after, within, length, tokens, H, K, V, R, BLOCK, QUERIES, num_warps,
        )  # fmt: skip

    dkeys = gl.zeros([BLOCK, K], gl.float32, mma)
    dvalues = gl.zeros([BLOCK, V], gl.float32, mma)
    # Decays go through the last token of the block: 2**(L_i - L_ref) 2**(L_ref - L_j), both at most 1.
    here = sums + g * tokens + start
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    own = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, score_mma))
    ref = 0.0
    if GATED:
        own = gl.load(here + row, mask=row < length, other=0.0)
        ref = gl.load(here + gl.minimum(first + BLOCK, length) - 1)
    async_copy.wait_group(1)
    keys = keys_s.load(held)
    values = values_s.load(held)
    dkeys, dvalues, keys, values = _steps(
        0, R * after, total, dkeys, dvalues, keys, values, queries_s, dy_s, scales_s, delta_s,
        q, q_st, q_sh, dout, scales, delta, first, after, within, length, tokens, H, own, ref, row,
        K, V, R, BLOCK, QUERIES, False, GATED, mma, num_warps,
    )  # fmt: skip
    if GATED:
        decay = gl.convert_layout(exp2(ref - own), gl.SliceLayout(1, mma))
        dkeys *= decay[:, None]
        dvalues *= decay[:, None]
    dkeys, dvalues, _, _ = _steps(
        R * after, total, total, dkeys, dvalues, keys, values, queries_s, dy_s, scales_s, delta_s,
        q, q_st, q_sh, dout, scales, delta, first, after, within, length, tokens, H, own, ref, row,
        K, V, R, BLOCK, QUERIES, True, GATED, mma, num_warps,
    )  # fmt: skip
    async_copy.wait_group(0)

    dkeys *= grad_scale
    if GATED:
        out_row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
        x = keys_s.load(mma).to(gl.float32)
        gl.store(dsums + g * tokens + start + out_row, gl.sum(dkeys * x, 1), mask=out_row < length)
    _store_rows(dk + ((start + first) * G + g) * K, G * K, dkeys, length - first, BLOCK, K, num_warps)
    _store_rows(dv + ((start + first) * G + g) * V, G * V, dvalues, length - first, BLOCK, V, num_warps)
    await_last(OVERLAP)  # for the next kernel, which reads what both have written
