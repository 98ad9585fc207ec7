"""The quadratic form, p = 2, and its gradients for Hopper, in Gluon: as `forward.output_pass`, `backward.query_pass`
and `backward.key_pass`.

`scales` [H, tokens] is log2 of what a query's scores are multiplied with, decay and normalizer in one: a score's own is
2**(scales_i - L_j). Vectors of a step stand in shared memory beside its tiles. What is past the end of a sequence is
zeros there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper_output import assign, await_last, copy_rows, start_next
from sympow.ops.triton.hopper_states import exp2


@gluon.jit
def places(COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for COUNT tiles [ROWS, WIDTH]."""
    return gl.allocate_shared_memory(
        gl.bfloat16, [COUNT, ROWS, WIDTH], gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.bfloat16)
    )


@gluon.jit
def vector_places(COUNT: gl.constexpr, ROWS: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def copy_vector(buffer, ptr, left, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """As `copy_rows`, of one number a row."""
    i = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    async_copy.async_copy_global_to_shared(buffer, ptr + i, mask=i < left)


@gluon.jit
def store_rows(ptr, stride, x, left, ROWS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Writes x [ROWS, WIDTH] up to row `left`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    tile = ptr + (r[:, None] * stride + c[None, :])
    gl.store(tile, gl.convert_layout(x.to(ptr.dtype.element_ty), layout), mask=(r < left)[:, None])


@gluon.jit
def _copy_keys(
    keys_s, values_s, sums_s, k, k_st, v, v_st, here, i, stop, length,
    KEYS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of step i, none from `stop` on."""
    s0 = i * KEYS
    left = gl.where(i < stop, length - s0, 0)
    copy_rows(keys_s.index(i % 3), k + s0.to(gl.int64) * k_st, k_st, left, KEYS, K, WARPS)
    copy_rows(values_s.index(i % 3), v + s0.to(gl.int64) * v_st, v_st, left, KEYS, V, WARPS)
    if GATED:
        copy_vector(sums_s.index(i % 3), here + s0, left, KEYS, WARPS)
    async_copy.commit_group()


@gluon.jit
def _output_steps(
    begin, stop, steps, acc, total, queries, queries_s, keys_s, values_s, sums_s,
    k, k_st, v, v_st, here, own, ref, row, length,
    KEYS: gl.constexpr, BLOCK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, OWN: gl.constexpr, GATED: gl.constexpr,
    NORMALIZE: gl.constexpr, HOLD: gl.constexpr, mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """acc and the normalizer plus the parts of the steps `begin` to `stop` - 1 of keys. OWN: some of them are after
    some of the queries."""
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KEYS, 16])
    j = gl.arange(0, KEYS, gl.SliceLayout(0, score_mma))
    for i in range(begin, stop):
        async_copy.wait_group(1)
        fence_async_shared()
        right = keys_s.index(i % 3).permute([1, 0])
        scores = gl.zeros([BLOCK, KEYS], gl.float32, score_mma)
        if HOLD:
            scores = warpgroup_mma(queries, right, scores, use_acc=False, is_async=True)
        else:
            scores = warpgroup_mma(queries_s, right, scores, use_acc=False, is_async=True)
        if GATED:
            there = sums_s.index(i % 3).load(gl.SliceLayout(0, score_mma))
            if not OWN:
                there = exp2(ref - there)
        if HOLD:
            scores, queries = warpgroup_mma_wait(0, deps=(scores, queries))
        else:
            scores = warpgroup_mma_wait(0, deps=(scores,))
        weight = scores * scores
        if OWN:
            if GATED:
                weight *= exp2(own[:, None] - there[None, :])
            weight = gl.where(row[:, None] >= (i * KEYS + j)[None, :], weight, 0.0)
        else:
            if GATED:
                weight *= there[None, :]
        if NORMALIZE:
            total += gl.sum(weight, 1)
        weight = gl.convert_layout(weight.to(gl.bfloat16), left_layout)
        acc = warpgroup_mma(weight, values_s.index(i % 3), acc, is_async=True)
        _copy_keys(
            keys_s, values_s, sums_s, k, k_st, v, v_st, here, i + 2, steps, length, KEYS, K, V, GATED, num_warps
        )
        acc, _ = warpgroup_mma_wait(0, deps=(acc, weight))
    return acc, total, queries


@gluon.jit
def output_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, sums, out, norm,
    starts, chunk_starts, blocks, T, tokens, spread, H, G, out_scale, eps,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr,
    GATED: gl.constexpr, NORMALIZE: gl.constexpr, PACKED: gl.constexpr, HOLD: gl.constexpr, OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """HOLD: queries stay in registers, as in `query_pass`."""
    _, start, length, first, h = assign(starts, blocks, T, H, spread, BLOCK, 0, PACKED, False)
    if PACKED:
        if first >= length:
            return
    g = h // R
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, V, 16])
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KEYS, 16])
    k += start * k_st + g * k_sh
    v += start * v_st + g * v_sh
    here = sums + g * tokens + start
    queries_s = places(1, BLOCK, K).index(0)
    keys_s = places(3, KEYS, K)
    values_s = places(3, KEYS, V)
    sums_s = vector_places(3, KEYS)
    copy_rows(queries_s, q + (start + first) * q_st + h * q_sh, q_st, length - first, BLOCK, K, num_warps)
    await_last(OVERLAP)
    steps = gl.cdiv(gl.minimum(first + BLOCK, length), KEYS)
    for early in gl.static_range(2):
        _copy_keys(
            keys_s, values_s, sums_s, k, k_st, v, v_st, here, first * 0 + early, steps, length,
            KEYS, K, V, GATED, num_warps,
        )  # fmt: skip
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    own = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, score_mma))
    # Decays go through the last token before the block: 2**(L_i - L_ref) 2**(L_ref - L_j), both at most 1.
    ref = 0.0
    if GATED:
        own = gl.load(here + row, mask=row < length, other=0.0)
        ref = gl.load(here + gl.maximum(first - 1, 0))
        ref = gl.where(first > 0, ref, 0.0)
    acc = gl.zeros([BLOCK, V], gl.float32, mma)
    total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, score_mma))
    async_copy.wait_group(1)
    if HOLD:
        queries = queries_s.load(gl.DotOperandLayout(0, score_mma, 2))
    else:
        queries = queries_s
    acc, total, queries = _output_steps(
        0, first // KEYS, steps, acc, total, queries, queries_s, keys_s, values_s, sums_s, k, k_st, v, v_st, here, own,
        ref, row, length, KEYS, BLOCK, K, V, False, GATED, NORMALIZE, HOLD, mma, num_warps,
    )  # fmt: skip
    if GATED:
        since = exp2(own - ref)
        acc *= gl.convert_layout(since, gl.SliceLayout(1, mma))[:, None]
        total *= since
    acc, total, queries = _output_steps(
        first // KEYS, steps, steps, acc, total, queries, queries_s, keys_s, values_s, sums_s, k, k_st, v, v_st, here,
        own, ref, row, length, KEYS, BLOCK, K, V, True, GATED, NORMALIZE, HOLD, mma, num_warps,
    )  # fmt: skip
    async_copy.wait_group(0)

    acc *= out_scale
    if NORMALIZE:
        total = total * out_scale + eps
        acc *= gl.convert_layout(1.0 / total, gl.SliceLayout(1, mma))[:, None]
        gl.store(norm + h * tokens + start + row, total, mask=row < length)
    store_rows(out + ((start + first) * H + h) * V, H * V, acc, length - first, BLOCK, V, num_warps)


@gluon.jit
def _key_steps(
    begin, stop, steps, acc, queries, dy, queries_s, dy_s, keys_s, values_s, sums_s,
    k, k_st, v, v_st, here, own, ref, d, row, length,
    KEYS: gl.constexpr, BLOCK: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    OWN: gl.constexpr, GATED: gl.constexpr, HOLD: gl.constexpr, mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """acc plus the parts of the steps `begin` to `stop` - 1 of keys. OWN: some are after some of the queries."""
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KEYS, 16])
    j = gl.arange(0, KEYS, gl.SliceLayout(0, score_mma))
    for i in range(begin, stop):
        async_copy.wait_group(1)
        fence_async_shared()
        keys = keys_s.index(i % 3)
        right = keys.permute([1, 0])
        zeros = gl.zeros([BLOCK, KEYS], gl.float32, score_mma)
        if HOLD:
            grad = warpgroup_mma(dy, values_s.index(i % 3).permute([1, 0]), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma(queries, right, zeros, use_acc=False, is_async=True)
        else:
            grad = warpgroup_mma(dy_s, values_s.index(i % 3).permute([1, 0]), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma(queries_s, right, zeros, use_acc=False, is_async=True)
        if GATED:
            there = sums_s.index(i % 3).load(gl.SliceLayout(0, score_mma))
        if HOLD:
            grad, scores, queries, dy = warpgroup_mma_wait(0, deps=(grad, scores, queries, dy))
        else:
            grad, scores = warpgroup_mma_wait(0, deps=(grad, scores))
        grad = (grad - d[:, None]) * scores
        if OWN:
            if GATED:
                grad *= exp2(own[:, None] - there[None, :])
            grad = gl.where(row[:, None] >= (i * KEYS + j)[None, :], grad, 0.0)
        else:
            if GATED:
                grad *= exp2(ref - there)[None, :]
        grad = gl.convert_layout(grad.to(gl.bfloat16), left_layout)
        acc = warpgroup_mma(grad, keys, acc, is_async=True)
        _copy_keys(
            keys_s, values_s, sums_s, k, k_st, v, v_st, here, i + 2, steps, length, KEYS, K, V, GATED, num_warps
        )
        acc, _ = warpgroup_mma_wait(0, deps=(acc, grad))
    return acc, queries, dy


@gluon.jit
def query_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, scales, delta, dq, dsums,
    starts, chunk_starts, blocks, T, tokens, spread, H, G, grad_scale,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr,
    GATED: gl.constexpr, NORMALIZE: gl.constexpr, PACKED: gl.constexpr, HOLD: gl.constexpr, OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """HOLD: queries and output gradients stay in registers, from which products of few columns are read faster."""
    _, start, length, first, h = assign(starts, blocks, T, H, spread, BLOCK, 0, PACKED, False)
    if PACKED:
        if first >= length:
            return
    g = h // R
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KEYS, 16])
    held: gl.constexpr = gl.DotOperandLayout(0, score_mma, 2)
    q += (start + first) * q_st + h * q_sh
    k += start * k_st + g * k_sh
    v += start * v_st + g * v_sh
    here = sums + g * tokens + start
    dy_s = places(1, BLOCK, V).index(0)
    queries_s = places(1, BLOCK, K).index(0)
    keys_s = places(3, KEYS, K)
    values_s = places(3, KEYS, V)
    sums_s = vector_places(3, KEYS)
    copy_rows(dy_s, dout + ((start + first) * H + h) * V, H * V, length - first, BLOCK, V, num_warps)
    copy_rows(queries_s, q, q_st, length - first, BLOCK, K, num_warps)
    steps = gl.cdiv(gl.minimum(first + BLOCK, length), KEYS)
    await_last(OVERLAP)
    start_next(OVERLAP)  # it reads what this one has waited for
    for early in gl.static_range(2):
        _copy_keys(
            keys_s, values_s, sums_s, k, k_st, v, v_st, here, first * 0 + early, steps, length,
            KEYS, K, V, GATED, num_warps,
        )  # fmt: skip
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    d = gl.load(delta + h * tokens + start + row, mask=row < length, other=0.0)
    own = gl.load(scales + h * tokens + start + row, mask=row < length, other=0.0)
    # Decays go through the last token before the block: 2**(L_i - L_ref) 2**(L_ref - L_j), both at most 1.
    ref = 0.0
    if GATED:
        ref = gl.load(here + gl.maximum(first - 1, 0))
        ref = gl.where(first > 0, ref, 0.0)
    acc = gl.zeros([BLOCK, K], gl.float32, mma)
    async_copy.wait_group(1)
    if HOLD:
        queries = queries_s.load(held)
        dy = dy_s.load(held)
    else:
        queries = queries_s
        dy = dy_s
    acc, queries, dy = _key_steps(
        0, first // KEYS, steps, acc, queries, dy, queries_s, dy_s, keys_s, values_s, sums_s,
        k, k_st, v, v_st, here, own, ref, d, row, length, KEYS, BLOCK, K, V, False, GATED, HOLD, mma, num_warps,
    )  # fmt: skip
    if GATED:
        acc *= gl.convert_layout(exp2(own - ref), gl.SliceLayout(1, mma))[:, None]
    acc, queries, dy = _key_steps(
        first // KEYS, steps, steps, acc, queries, dy, queries_s, dy_s, keys_s, values_s, sums_s,
        k, k_st, v, v_st, here, own, ref, d, row, length, KEYS, BLOCK, K, V, True, GATED, HOLD, mma, num_warps,
    )  # fmt: skip
    async_copy.wait_group(0)

    if not GATED:
        acc *= gl.convert_layout(exp2(own), gl.SliceLayout(1, mma))[:, None]
    acc *= grad_scale
    if GATED and not NORMALIZE:
        x = queries_s.load(mma).to(gl.float32)
        out_row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
        gl.store(dsums + h * tokens + start + out_row, gl.sum(acc * x, 1), mask=out_row < length)
    store_rows(dq + ((start + first) * H + h) * K, H * K, acc, length - first, BLOCK, K, num_warps)


@gluon.jit
def query_step(it, first, after, within, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr):
    """The head within its group and the first query of step `it` of the key pass: first all queries after the block,
    of every head, then those of the block itself."""
    if R == 1:
        return first * 0, first + gl.where(it < after, BLOCK + it * QUERIES, (it - after) * QUERIES)
    else:
        own = it - R * after
        outside = own < 0
        head = gl.where(outside, it // gl.maximum(after, 1), own // within)
        later = BLOCK + (it % gl.maximum(after, 1)) * QUERIES
        return head, first + gl.where(outside, later, (own % within) * QUERIES)


@gluon.jit
def _copy_queries(
    queries_s, dy_s, scales_s, delta_s, q, q_st, q_sh, dout, scales, delta, it, total, first, after, within, length,
    tokens, H,
    QUERIES: gl.constexpr, BLOCK: gl.constexpr, R: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of step `it`, none from `total` on. Pointers are those of the group's first head."""
    head, s0 = query_step(it, first, after, within, R, BLOCK, QUERIES)
    left = gl.where(it < total, length - s0, 0)
    stage = it % 3
    copy_rows(queries_s.index(stage), q + s0.to(gl.int64) * q_st + head * q_sh, q_st, left, QUERIES, K, WARPS)
    copy_rows(dy_s.index(stage), dout + (s0.to(gl.int64) * H + head) * V, H * V, left, QUERIES, V, WARPS)
    at = head.to(gl.int64) * tokens + s0
    copy_vector(scales_s.index(stage), scales + at, left, QUERIES, WARPS)
    copy_vector(delta_s.index(stage), delta + at, left, QUERIES, WARPS)
    async_copy.commit_group()


@gluon.jit
def _query_steps(
    begin, stop, total, dkeys, dvalues, keys, values, keys_s, values_s, queries_s, dy_s, scales_s, delta_s,
    q, q_st, q_sh, dout, scales, delta, first, after, within, length, tokens, H, own, ref, row,
    QUERIES: gl.constexpr, BLOCK: gl.constexpr, R: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    OWN: gl.constexpr, GATED: gl.constexpr, HOLD: gl.constexpr, mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dkeys and dvalues plus the parts of the steps `begin` to `stop` - 1. OWN: the queries are the block's own."""
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
        if HOLD:
            scores = warpgroup_mma(keys, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
            grad = warpgroup_mma(values, dy.permute([1, 0]), zeros, use_acc=False, is_async=True)
        else:
            scores = warpgroup_mma(keys_s, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
            grad = warpgroup_mma(values_s, dy.permute([1, 0]), zeros, use_acc=False, is_async=True)
        f = scales_s.index(stage).load(gl.SliceLayout(0, score_mma))
        d = delta_s.index(stage).load(gl.SliceLayout(0, score_mma))
        _, s0 = query_step(it, first, after, within, R, BLOCK, QUERIES)
        if s0 + QUERIES > length:
            f = gl.where(s0 + i < length, f, float("-inf"))
        if not OWN:
            f = exp2(f - ref)
        if HOLD:
            scores, keys = warpgroup_mma_wait(1, deps=(scores, keys))
        else:
            scores = warpgroup_mma_wait(1, deps=(scores,))
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
        if HOLD:
            grad, values = warpgroup_mma_wait(1, deps=(grad, values))
        else:
            grad = warpgroup_mma_wait(1, deps=(grad,))
        grad = gl.convert_layout(((grad - d[None, :]) * slope).to(gl.bfloat16), left_layout)
        dkeys = warpgroup_mma(grad, queries, dkeys, is_async=True)
        _copy_queries(
            queries_s, dy_s, scales_s, delta_s, q, q_st, q_sh, dout, scales, delta, it + 2, total, first, after, within,
            length, tokens, H, QUERIES, BLOCK, R, K, V, num_warps,
        )  # fmt: skip
        dvalues, dkeys, weight, grad = warpgroup_mma_wait(0, deps=(dvalues, dkeys, weight, grad))
    return dkeys, dvalues, keys, values


@gluon.jit
def key_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, scales, delta, dk, dv, dsums,
    starts, chunk_starts, blocks, T, tokens, spread, H, G, grad_scale,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr,
    GATED: gl.constexpr, PACKED: gl.constexpr, HOLD: gl.constexpr, OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """HOLD: as in `query_pass`, of keys and values."""
    gl.static_assert(K == V)
    start_next(OVERLAP)
    _, start, length, first, g = assign(starts, blocks, T, G, spread, BLOCK, 0, PACKED, True)
    if PACKED:
        if first >= length:
            return
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, QUERIES, 16])
    held: gl.constexpr = gl.DotOperandLayout(0, score_mma, 2)
    keys_s = places(1, BLOCK, K).index(0)
    values_s = places(1, BLOCK, V).index(0)
    queries_s = places(3, QUERIES, K)
    dy_s = places(3, QUERIES, V)
    scales_s = vector_places(3, QUERIES)
    delta_s = vector_places(3, QUERIES)
    copy_rows(keys_s, k + (start + first) * k_st + g * k_sh, k_st, length - first, BLOCK, K, num_warps)
    copy_rows(values_s, v + (start + first) * v_st + g * v_sh, v_st, length - first, BLOCK, V, num_warps)
    q += start * q_st + g * R * q_sh
    dout += (start * H + g * R) * V
    scales += g * R * tokens + start
    delta += g * R * tokens + start
    after = gl.cdiv(gl.maximum(length - (first + BLOCK), 0), QUERIES)
    within = gl.cdiv(gl.minimum(length - first, BLOCK), QUERIES)
    total = R * (after + within)
    for early in gl.static_range(2):
        _copy_queries(
            queries_s, dy_s, scales_s, delta_s, q, q_st, q_sh, dout, scales, delta, first * 0 + early, total, first,
            after, within, length, tokens, H, QUERIES, BLOCK, R, K, V, num_warps,
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
    if HOLD:
        keys = keys_s.load(held)
        values = values_s.load(held)
    else:
        keys = keys_s
        values = values_s
    dkeys, dvalues, keys, values = _query_steps(
        0, R * after, total, dkeys, dvalues, keys, values, keys_s, values_s, queries_s, dy_s, scales_s, delta_s,
        q, q_st, q_sh, dout, scales, delta, first, after, within, length, tokens, H, own, ref, row,
        QUERIES, BLOCK, R, K, V, False, GATED, HOLD, mma, num_warps,
    )  # fmt: skip
    if GATED:
        decay = gl.convert_layout(exp2(ref - own), gl.SliceLayout(1, mma))
        dkeys *= decay[:, None]
        dvalues *= decay[:, None]
    dkeys, dvalues, keys, values = _query_steps(
        R * after, total, total, dkeys, dvalues, keys, values, keys_s, values_s, queries_s, dy_s, scales_s, delta_s,
        q, q_st, q_sh, dout, scales, delta, first, after, within, length, tokens, H, own, ref, row,
        QUERIES, BLOCK, R, K, V, True, GATED, HOLD, mma, num_warps,
    )  # fmt: skip
    async_copy.wait_group(0)

    dkeys *= grad_scale
    if GATED:
        out_row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
        x = keys_s.load(mma).to(gl.float32)
        gl.store(dsums + g * tokens + start + out_row, gl.sum(dkeys * x, 1), mask=out_row < length)
    store_rows(dk + ((start + first) * G + g) * K, G * K, dkeys, length - first, BLOCK, K, num_warps)
    store_rows(dv + ((start + first) * G + g) * V, G * V, dvalues, length - first, BLOCK, V, num_warps)
    await_last(OVERLAP)  # for the next kernel, which reads what both have written
