"""The gradient passes of the quadratic form for p = 2 on Hopper, in Gluon. They are like those of
`hopper.query_gradient` and `hopper.key_gradient` without states, for rows that are not packed.

In the query pass, the TMA copies tiles of keys and values. It needs no registers for addresses, so three programs fit
on an SM. In the key pass, keys and values are in registers, from where products of few columns read them faster than
from shared memory. The factor of the scores is loaded with the tiles of a step. It combines decay and normalizer: b_ij
n_i is near_i 2**(high_i - L_j), where L_i = high_i + low_i. `near` and its logarithm `scales` [H, tokens] are written
by `gradients.row_factors`. Blocks and steps are tiles of the gate's sums, so all tokens of one have the same high part.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sympow.ops.runtime.launcher import Tile
from sympow.ops.triton.hopper.compat import load_async, load_tile, reinterpret
from sympow.ops.triton.hopper.primitives import (
    REACH_TILE,
    assign,
    await_last,
    buffers,
    copy_rows,
    exp2,
    query_step,
    reach_tile,
    start_next,
    sum_before,
)

_STAGES = gl.constexpr(3)  # of the query pass: tiles of keys and values that are being copied or used


def key_tile(shape: tuple[int, ...], token_stride: int, head_stride: int, rows: int) -> Tile:
    """Describes for the TMA [B, T, heads, K] tiles of `rows` tokens of a head, zeros past the end of a sequence."""
    _, time, _, width = shape
    strides = [time * token_stride, token_stride, head_stride, 1]
    layout = gl.NVMMASharedLayout.get_default_for([1, rows, 1, width], gl.bfloat16)
    return Tile(list(shape), strides, [1, rows, 1, width], layout)


@gluon.jit
def _vectors(COUNT: gl.constexpr, ROWS: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _copy_vector(buffer, ptr, left, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Does the same as `copy_rows` for one number of each row."""
    i = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    load_async(buffer, ptr + i, mask=i < left)


@gluon.jit
def _store_rows(ptr, stride, x, left, ROWS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Writes x [ROWS, WIDTH] up to row `left`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    tile = ptr + (r[:, None] * stride + c[None, :])
    gl.store(tile, gl.convert_layout(x.to(gl.bfloat16), layout), mask=(r < left)[:, None])


@gluon.jit
def _bring(buffer, descriptor, n, token, head, bar, wanted, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Starts the copy of a tile [ROWS, WIDTH] by the TMA; `bar` is signalled when it is done."""
    BLOCK: gl.constexpr = [1, ROWS, 1, WIDTH]
    tile = reinterpret(buffer, gl.bfloat16, BLOCK, gl.NVMMASharedLayout.get_default_for(BLOCK, gl.bfloat16))
    load_tile(descriptor, [n, token, head, 0], bar, tile, wanted)


@gluon.jit
def _bring_keys(
    keys_s, values_s, bars, keys, values, begin, i, steps, n, g,
    KEYS: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Starts the copies of step i, none from `steps` on; the first step starts at token `begin`."""
    wanted = i < steps
    stage = i % _STAGES
    mbarrier.expect(bars.index(stage), KEYS * (K + V) * 2, wanted)
    _bring(keys_s.index(stage), keys, n, begin + i * KEYS, g, bars.index(stage), wanted, KEYS, K)
    _bring(values_s.index(stage), values, n, begin + i * KEYS, g, bars.index(stage), wanted, KEYS, V)


@gluon.jit
def _load_sums(here, i, length, KEYS: gl.constexpr, WARPS: gl.constexpr):
    """Returns the sums of the keys of step i."""
    j = i * KEYS + gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.load(here + j, mask=j < length, other=0.0)


@gluon.jit
def _key_steps(
    start, stop, steps, acc, queries_s, dy_s, keys_s, values_s, sums_s, bars, keys, values, begin, n, g, here, low,
    own, high, rest, d, row, length,
    KEYS: gl.constexpr, BLOCK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, OWN: gl.constexpr, GATED: gl.constexpr,
    mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Returns acc plus the parts of the steps `start` to `stop` - 1. OWN: some keys come after some queries. Rows and
    length count from token `begin`, at which the first step starts.

    For other steps, `sums_s` has the decay from the key to the block, before which the sum has the parts `high` and
    `rest`. So an exponential is computed once for each key, not for each thread. `here` and `low` point to the parts of
    the sums from token `begin` on.
    """
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KEYS, 16])
    j = gl.arange(0, KEYS, gl.SliceLayout(0, score_mma))
    for i in range(start, stop):
        stage = i % _STAGES
        ahead = i + (_STAGES - 1)
        mbarrier.wait(bars.index(stage), (i // _STAGES) & 1)
        if GATED:
            coming = _load_sums(low, ahead, length, KEYS, num_warps)
            ref = (high - gl.load(here + gl.minimum(ahead * KEYS, length - 1))) + rest
        tile = keys_s.index(stage)
        zeros = gl.zeros([BLOCK, KEYS], gl.float32, score_mma)
        scores = warpgroup_mma(queries_s, tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
        grad = warpgroup_mma(dy_s, values_s.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
        if GATED:
            there = sums_s.index(stage).load(gl.SliceLayout(0, score_mma))
        scores = warpgroup_mma_wait(1, deps=(scores,))
        if OWN:
            if GATED:
                scores *= exp2(own[:, None] - there[None, :])
            scores = gl.where(row[:, None] >= (i * KEYS + j)[None, :], scores, 0.0)
        else:
            if GATED:
                scores *= there[None, :]
        grad = warpgroup_mma_wait(0, deps=(grad,))
        grad = gl.convert_layout(((grad - d[:, None]) * scores).to(gl.bfloat16), left_layout)
        acc = warpgroup_mma(grad, tile, acc, is_async=True)
        _bring_keys(keys_s, values_s, bars, keys, values, begin, ahead, steps, n, g, KEYS, K, V)
        if GATED:
            if not OWN:
                coming = gl.where(ahead < stop, exp2(ref - coming), coming)
            sums_s.index(ahead % _STAGES).store(coming)
        acc, _ = warpgroup_mma_wait(0, deps=(acc, grad))
    return acc


@gluon.jit
def query_pass(
    keys, values, q, q_st, q_sh, dout, sums, factor, delta, dq, dsums, reach, T, tokens, spread, H, grad_scale,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr,
    GATED: gl.constexpr, OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Computes dq and dsums. `keys` and `values` are descriptors of tiles of KEYS tokens."""
    gl.static_assert(BLOCK == REACH_TILE and KEYS == REACH_TILE)
    n, start, length, first, h = assign(None, None, T, H, spread, BLOCK, 0, False, False)
    g = (h // R).to(gl.int32)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KEYS, 16])
    dy_s = buffers(1, BLOCK, V).index(0)
    queries_s = buffers(1, BLOCK, K).index(0)
    keys_s = buffers(_STAGES, KEYS, K)
    values_s = buffers(_STAGES, KEYS, V)
    sums_s = _vectors(_STAGES, KEYS)
    bars = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(bars.index(stage), count=1)
    copy_rows(dy_s, dout + ((start + first) * H + h) * V, H * V, length - first, BLOCK, V, num_warps)
    copy_rows(queries_s, q + (start + first) * q_st + h * q_sh, q_st, length - first, BLOCK, K, num_warps)
    async_copy.commit_group()
    begin = first * 0
    if reach is not None:
        await_last(OVERLAP)
        begin = gl.load(reach + reach_tile(n, g, first, T, tokens))
    steps = gl.cdiv(gl.minimum(first + BLOCK, length) - begin, KEYS)
    before = (first - begin) // KEYS
    for early in gl.static_range(_STAGES - 1):
        _bring_keys(keys_s, values_s, bars, keys, values, begin, first * 0 + early, steps, n, g, KEYS, K, V)

    await_last(OVERLAP)
    start_next(OVERLAP)  # the next kernel reads what this one has waited for
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    at = h * tokens + start + row
    d = gl.load(delta + at, mask=row < length, other=0.0)
    # Decays are split at the last token before the block: 2**(L_i - L_ref) 2**(L_ref - L_j), where both are at most 1.
    here = sums + (g + H // R).to(gl.int64) * tokens + start
    low = here + (H // R) * tokens
    own = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, score_mma))
    high = 0.0
    rest = 0.0
    if GATED:
        own = gl.load(low + row, mask=row < length, other=0.0)
        high, rest = sum_before(here, low, first, 0)
        for early in gl.static_range(_STAGES - 1):
            coming = _load_sums(low + begin, early, length - begin, KEYS, num_warps)
            ref = (high - gl.load(here + gl.minimum(begin + early * KEYS, length - 1))) + rest
            sums_s.index(early).store(gl.where(early < before, exp2(ref - coming), coming))
    acc = gl.zeros([BLOCK, K], gl.float32, mma)
    async_copy.wait_group(0)
    fence_async_shared()
    acc = _key_steps(
        0, before, steps, acc, queries_s, dy_s, keys_s, values_s, sums_s, bars, keys, values, begin, n, g,
        here + begin, low + begin, own, high, rest, d, row - begin, length - begin, KEYS, BLOCK, K, V, False, GATED,
        mma, num_warps,
    )  # fmt: skip
    if GATED:
        since = (gl.load(here + first) - high) - rest
        acc *= gl.convert_layout(exp2(own + since), gl.SliceLayout(1, mma))[:, None]
    acc = _key_steps(
        before, steps, steps, acc, queries_s, dy_s, keys_s, values_s, sums_s, bars, keys, values, begin, n, g,
        here + begin, low + begin, own, high, rest, d, row - begin, length - begin, KEYS, BLOCK, K, V, True, GATED,
        mma, num_warps,
    )  # fmt: skip

    scale = gl.load(factor + at, mask=row < length, other=0.0) * grad_scale
    acc *= gl.convert_layout(scale, gl.SliceLayout(1, mma))[:, None]
    if GATED:
        x = queries_s.load(mma).to(gl.float32)
        out_row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
        gl.store(dsums + h * tokens + start + out_row, gl.sum(acc * x, 1), mask=out_row < length)
    _store_rows(dq + ((start + first) * H + h) * K, H * K, acc, length - first, BLOCK, K, num_warps)
    bars._keep_alive()


@gluon.jit
def _step(it, first, after, within, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr):
    """Returns `query_step`. A group of one head needs no division, which would slow down so short an iteration."""
    if R == 1:
        return first * 0, first + gl.where(it < after, BLOCK + it * QUERIES, (it - after) * QUERIES)
    else:
        return query_step(it, first, after, within, R, BLOCK, QUERIES)


@gluon.jit
def _copy_queries(
    queries_s, dy_s, near_s, delta_s, q, q_st, q_sh, dout, near, delta, it, total, first, after, within, length,
    tokens, H,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of step `it`, none from `total` on. Pointers are those of the group's first head."""
    head, s0 = _step(it, first, after, within, R, BLOCK, QUERIES)
    left = gl.where(it < total, length - s0, 0)
    stage = it % 3
    head = head.to(gl.int64)
    copy_rows(queries_s.index(stage), q + s0.to(gl.int64) * q_st + head * q_sh, q_st, left, QUERIES, K, WARPS)
    copy_rows(dy_s.index(stage), dout + (s0.to(gl.int64) * H + head) * V, H * V, left, QUERIES, V, WARPS)
    at = head * tokens + s0
    _copy_vector(near_s.index(stage), near + at, left, QUERIES, WARPS)
    _copy_vector(delta_s.index(stage), delta + at, left, QUERIES, WARPS)
    async_copy.commit_group()


@gluon.jit
def _steps(
    begin, stop, total, dkeys, dvalues, keys, values, queries_s, dy_s, near_s, delta_s,
    q, q_st, q_sh, dout, here, scales, near, delta, first, after, within, length, tokens, H, own, high, rest, row,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr,
    OWN: gl.constexpr, GATED: gl.constexpr, mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Returns dkeys and dvalues plus the parts of the steps `begin` to `stop` - 1. OWN: the queries are those of the
    block.

    keys and values are carried through the loop and its waits. Otherwise nothing keeps their registers while products
    read them.
    """
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, QUERIES, 16])
    i = gl.arange(0, QUERIES, gl.SliceLayout(0, score_mma))
    decay = 0.0  # the high part of a step's sums less the sum at the end of the block; read one step ahead
    if GATED and not OWN:
        decay = (gl.load(here + gl.minimum(first + BLOCK, length - 1)) - high) - rest
    for it in range(begin, stop):
        async_copy.wait_group(1)
        fence_async_shared()
        stage = it % 3
        queries = queries_s.index(stage)
        dy = dy_s.index(stage)
        zeros = gl.zeros([BLOCK, QUERIES], gl.float32, score_mma)
        scores = warpgroup_mma(keys, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
        grad = warpgroup_mma(values, dy.permute([1, 0]), zeros, use_acc=False, is_async=True)
        head, s0 = _step(it, first, after, within, R, BLOCK, QUERIES)
        if OWN:
            there = head.to(gl.int64) * tokens + s0 + i
            f = gl.load(scales + there, mask=s0 + i < length, other=float("-inf"))
        else:
            f = near_s.index(stage).load(gl.SliceLayout(0, score_mma))
            if GATED:
                f *= exp2(decay)
                _, s1 = _step(it + 1, first, after, within, R, BLOCK, QUERIES)
                decay = (gl.load(here + gl.minimum(s1, length - 1)) - high) - rest
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
        d = delta_s.index(stage).load(gl.SliceLayout(0, score_mma))
        grad, values = warpgroup_mma_wait(1, deps=(grad, values))
        grad = gl.convert_layout(((grad - d[None, :]) * slope).to(gl.bfloat16), left_layout)
        dkeys = warpgroup_mma(grad, queries, dkeys, is_async=True)
        _copy_queries(
            queries_s, dy_s, near_s, delta_s, q, q_st, q_sh, dout, near, delta, it + 2, total, first, after, within,
            length, tokens, H, K, V, R, BLOCK, QUERIES, num_warps,
        )  # fmt: skip
        dvalues, dkeys, weight, grad = warpgroup_mma_wait(0, deps=(dvalues, dkeys, weight, grad))
    return dkeys, dvalues, keys, values


@gluon.jit
def key_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, scales, near, delta, dk, dv, dsums,
    reach, starts, chunk_starts, blocks, T, tokens, spread, H, G, grad_scale,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr,
    GATED: gl.constexpr, OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(K == V and BLOCK == REACH_TILE and QUERIES == REACH_TILE)
    start_next(OVERLAP)
    n, start, length, first, g = assign(starts, blocks, T, G, spread, BLOCK, 0, False, True)
    end = length
    if reach is not None:
        end = gl.load(reach + reach_tile(n, g, gl.minimum(first + BLOCK, length) - 1, T, tokens))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, QUERIES, 16])
    held: gl.constexpr = gl.DotOperandLayout(0, score_mma, 2)
    keys_s = buffers(1, BLOCK, K).index(0)
    values_s = buffers(1, BLOCK, V).index(0)
    queries_s = buffers(3, QUERIES, K)
    dy_s = buffers(3, QUERIES, V)
    near_s = _vectors(3, QUERIES)
    delta_s = _vectors(3, QUERIES)
    copy_rows(keys_s, k + (start + first) * k_st + g * k_sh, k_st, length - first, BLOCK, K, num_warps)
    copy_rows(values_s, v + (start + first) * v_st + g * v_sh, v_st, length - first, BLOCK, V, num_warps)
    q += start * q_st + g * R * q_sh
    dout += (start * H + g * R) * V
    scales += g * R * tokens + start
    near += g * R * tokens + start
    delta += g * R * tokens + start
    # First come all queries after the block, of every head, and then those of the block itself.
    after = gl.cdiv(gl.maximum(end - (first + BLOCK), 0), QUERIES)
    within = gl.cdiv(gl.minimum(length - first, BLOCK), QUERIES)
    total = R * (after + within)
    for early in gl.static_range(2):
        _copy_queries(
            queries_s, dy_s, near_s, delta_s, q, q_st, q_sh, dout, near, delta, first * 0 + early, total, first,
            after, within, length, tokens, H, K, V, R, BLOCK, QUERIES, num_warps,
        )  # fmt: skip

    dkeys = gl.zeros([BLOCK, K], gl.float32, mma)
    dvalues = gl.zeros([BLOCK, V], gl.float32, mma)
    # Decays are split at the last token of the block: 2**(L_i - L_ref) 2**(L_ref - L_j), where both are at most 1.
    here = sums + (g + G) * tokens + start
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    low = here + G * tokens
    own = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, score_mma))
    high = 0.0
    rest = 0.0
    last = gl.minimum(first + BLOCK, length) - 1
    if GATED:
        own = gl.load(low + row, mask=row < length, other=0.0)
        high = gl.load(here + last)
        rest = gl.load(low + last)
    async_copy.wait_group(1)
    keys = keys_s.load(held)
    values = values_s.load(held)
    dkeys, dvalues, keys, values = _steps(
        0, R * after, total, dkeys, dvalues, keys, values, queries_s, dy_s, near_s, delta_s,
        q, q_st, q_sh, dout, here, scales, near, delta, first, after, within, length, tokens, H, own, high, rest, row,
        K, V, R, BLOCK, QUERIES, False, GATED, mma, num_warps,
    )  # fmt: skip
    if GATED:
        decay = gl.convert_layout(exp2(rest - own), gl.SliceLayout(1, mma))  # the block is one tile
        dkeys *= decay[:, None]
        dvalues *= decay[:, None]
    dkeys, dvalues, _, _ = _steps(
        R * after, total, total, dkeys, dvalues, keys, values, queries_s, dy_s, near_s, delta_s,
        q, q_st, q_sh, dout, here, scales, near, delta, first, after, within, length, tokens, H, own, high, rest, row,
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
    await_last(OVERLAP)  # for the next kernel, which reads what both kernels have written
