"""The state pass of p = 3 and 4 for Hopper, in Gluon: as `hopper_states`, with prefixes of several indices.

The factors of a step, a product of p - 1 entries for each token and prefix, are formed once and shared by the warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper_states import by_prefix, exp2, places, step_pointers

ROWS_PER_WARP = gl.constexpr(32)


@gluon.jit
def _copy_step(
    stage, x, stride, y, y_st, left, xs, ys,
    K: gl.constexpr, V: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Copies keys [K, STEP], transposed and padded already, and values [STEP, V] of one step."""
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [WARPS, 1], [1, 0])
    m = gl.arange(0, K, gl.SliceLayout(1, x_layout))
    t = gl.arange(0, STEP, gl.SliceLayout(0, x_layout))
    some = (m < gl.where(left > 0, K, 0))[:, None]
    async_copy.async_copy_global_to_shared(xs.index(stage), x + (m[:, None] * stride + t[None, :]), mask=some)
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    t = gl.arange(0, STEP, gl.SliceLayout(1, y_layout))
    col = gl.arange(0, V, gl.SliceLayout(0, y_layout))
    async_copy.async_copy_global_to_shared(
        ys.index(stage), y + (t[:, None] * y_st + col[None, :]), mask=(t < left)[:, None]
    )
    async_copy.commit_group()


@gluon.jit
def _write(
    out, acc, prefix, count, row0,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, V: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    acc = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
    where = places(prefix, row0, PREFIXES, WIDTH, WIDTH, V, layout)
    gl.store(out + where, acc, mask=(prefix + m // WIDTH < count)[:, None])


@gluon.jit
def _read(
    ptr, prefix, count, row0,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, V: gl.constexpr, layout: gl.constexpr, to: gl.constexpr,
):  # fmt: skip
    m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
    where = places(prefix, row0, PREFIXES, WIDTH, WIDTH, V, layout)
    return gl.convert_layout(gl.load(ptr + where, mask=(prefix + m // WIDTH < count)[:, None], other=0.0), to)


@gluon.jit
def _tile(keys, factors, i: gl.constexpr, M: gl.constexpr, PREFIXES: gl.constexpr, STEP: gl.constexpr,
          layout: gl.constexpr, left_layout: gl.constexpr):  # fmt: skip
    """Rows [M, STEP] of the i-th PREFIXES prefixes: each prefix's factors times the keys [rows of a prefix, STEP]."""
    f = factors.slice(i * PREFIXES, PREFIXES, 0).load(gl.SliceLayout(1, layout))
    tile = (f.expand_dims(1) * keys.expand_dims(0)).reshape([M, STEP])
    return gl.convert_layout(tile, left_layout, assert_trivial=True)


@gluon.jit
def _walk(
    xt, xt_sh, stride, y, y_st, y_sh, sums, prefixes, out, out_step, init, final, prefix, count, row0,
    chunks, length, xs, ys, fs,
    WIDTH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, P: gl.constexpr, R: gl.constexpr,
    STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr,
):  # fmt: skip
    """Four tiles of rows, from `prefix` on, through all chunks of a sequence; the prefix `count` is none of theirs any
    more. Pointers are at the first token, chunk and head, the keys `xs` in shared memory at the last indices."""
    M: gl.constexpr = ROWS_PER_WARP * WARPS
    PREFIXES: gl.constexpr = M // WIDTH
    FACTORS: gl.constexpr = 4 * PREFIXES
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    layout: gl.constexpr = by_prefix(PREFIXES, M, STEP, WARPS)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    if INIT:
        a0 = _read(init, prefix, count, row0, PREFIXES, WIDTH, V, out_layout, mma)
        a1 = _read(init, prefix + PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout, mma)
        a2 = _read(init, prefix + 2 * PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout, mma)
        a3 = _read(init, prefix + 3 * PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout, mma)
    else:
        a0 = gl.zeros([M, V], gl.float32, mma)
        a1 = gl.zeros([M, V], gl.float32, mma)
        a2 = gl.zeros([M, V], gl.float32, mma)
        a3 = gl.zeros([M, V], gl.float32, mma)

    # Of each prefix the first entry is weighted by its token, the others are not.
    f_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [WARPS, 1], [1, 0])
    n = gl.minimum(prefix + gl.arange(0, FACTORS, gl.SliceLayout(1, f_layout)), count - 1) * (P - 1)
    t = gl.arange(0, STEP, gl.SliceLayout(0, f_layout))[None, :]
    at0 = (gl.load(prefixes + n).to(gl.int64) * stride)[:, None] + t
    at1 = ((K + 1 + gl.load(prefixes + n + 1)).to(gl.int64) * stride)[:, None] + t
    at2 = ((K + 1 + gl.load(prefixes + n + (P - 2))).to(gl.int64) * stride)[:, None] + t

    plain = (K + 1) * stride
    total = chunks * (R * (CHUNK // STEP))
    for early in gl.static_range(STAGES - 1):
        _, x_here, y_here, left = step_pointers(
            chunks * 0 + early, y, 0, 0, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        left = gl.where(early < total, left, 0)
        _copy_step(early, x_here + plain, stride, y_here, y_st, left, xs, ys, K, V, STEP, WARPS)
    _, x_now, _, left = step_pointers(
        chunks * 0, y, 0, 0, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
    )
    some = (t < gl.where((total > 0) & (left > 0), STEP, 0)) & (n >= 0)[:, None]
    f0 = gl.load(x_now + at0, mask=some, other=0.0)
    f1 = gl.load(x_now + at1, mask=some, other=0.0)
    f2 = gl.load(x_now + at2, mask=some, other=0.0)
    for it in range(total):
        if it % (R * (CHUNK // STEP)) == 0:
            chunk = it // (R * (CHUNK // STEP))
            if REVERSE:
                chunk = chunks - 1 - chunk
            here = out + chunk.to(gl.int64) * out_step
            _write(here, a0, prefix, count, row0, PREFIXES, WIDTH, V, out_layout)
            _write(here, a1, prefix + PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout)
            _write(here, a2, prefix + 2 * PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout)
            _write(here, a3, prefix + 3 * PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout)
            if GATED:
                decay = exp2(gl.load(sums + gl.minimum((chunk + 1) * CHUNK, length) - 1))
                a0 *= decay
                a1 *= decay
                a2 *= decay
                a3 *= decay
        product = f0.to(gl.float32) * f1.to(gl.float32)
        if P > 3:
            product *= f2.to(gl.float32)
        factors = fs.index(it % 2)
        factors.store(product.to(gl.bfloat16))
        stage = it % STAGES
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        ahead = it + (STAGES - 1)
        _, x_here, y_here, left = step_pointers(
            ahead, y, 0, 0, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        left = gl.where(ahead < total, left, 0)
        _copy_step(ahead % STAGES, x_here + plain, stride, y_here, y_st, left, xs, ys, K, V, STEP, WARPS)
        _, x_next, _, left = step_pointers(
            it + 1, y, 0, 0, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        some = (t < gl.where((it + 1 < total) & (left > 0), STEP, 0)) & (n >= 0)[:, None]
        f0 = gl.load(x_next + at0, mask=some, other=0.0)
        f1 = gl.load(x_next + at1, mask=some, other=0.0)
        if P > 3:
            f2 = gl.load(x_next + at2, mask=some, other=0.0)
        keys = xs.index(stage).slice(K - WIDTH, WIDTH, 0).load(gl.SliceLayout(0, layout))
        values = ys.index(stage)
        w0 = warpgroup_mma(_tile(keys, factors, 0, M, PREFIXES, STEP, layout, left_layout), values, a0, is_async=True)
        w1 = warpgroup_mma(_tile(keys, factors, 1, M, PREFIXES, STEP, layout, left_layout), values, a1, is_async=True)
        w2 = warpgroup_mma(_tile(keys, factors, 2, M, PREFIXES, STEP, layout, left_layout), values, a2, is_async=True)
        w3 = warpgroup_mma(_tile(keys, factors, 3, M, PREFIXES, STEP, layout, left_layout), values, a3, is_async=True)
        a0, a1, a2, a3 = warpgroup_mma_wait(0, deps=(w0, w1, w2, w3))
    async_copy.wait_group(0)
    if FINAL:
        _write(final, a0, prefix, count, row0, PREFIXES, WIDTH, V, out_layout)
        _write(final, a1, prefix + PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout)
        _write(final, a2, prefix + 2 * PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout)
        _write(final, a3, prefix + 3 * PREFIXES, count, row0, PREFIXES, WIDTH, V, out_layout)


def prefixes_of_program(width: int, warps: int) -> int:
    return 4 * (ROWS_PER_WARP.value * warps // width)


def programs(key_dim: int, half: int, lower: int, upper: int, warps: int) -> int:
    """Programs of `state_pass` for one head of one sequence."""
    low = -(-lower // prefixes_of_program(key_dim, warps))
    return low + (-(-upper // prefixes_of_program(key_dim - half, warps)) if upper else 0)


@gluon.jit
def state_pass(
    xt, stride, y, y_st, y_sh, sums, prefixes, s_out, s_init, s_final, starts, chunk_starts, T, tokens, G,
    K: gl.constexpr, V: gl.constexpr, P: gl.constexpr, HALF: gl.constexpr,
    LOWER: gl.constexpr, UPPER: gl.constexpr, R: gl.constexpr,
    STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr,
    ALIGN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: groups of prefixes, the lower ones first, kv heads, sequences."""
    g = gl.program_id(1).to(gl.int64)
    n = gl.program_id(2)
    if PACKED:
        start = gl.load(starts + n).to(gl.int64)
        length = (gl.load(starts + n + 1) - start).to(gl.int32)
        chunk0 = gl.load(chunk_starts + n).to(gl.int64)
    else:
        start = n.to(gl.int64) * T
        length = T
        chunk0 = n.to(gl.int64) * gl.cdiv(T, CHUNK)
    chunks = gl.cdiv(length, CHUNK)
    NARROW: gl.constexpr = K - HALF
    LOW: gl.constexpr = 4 * (ROWS_PER_WARP * num_warps // K)
    GROUPS: gl.constexpr = (LOWER + LOW - 1) // LOW
    rows: gl.constexpr = LOWER * K + UPPER * NARROW
    xs = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, K, STEP], gl.NVMMASharedLayout.get_default_for([K, STEP], gl.bfloat16)
    )
    ys = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, STEP, V], gl.NVMMASharedLayout.get_default_for([STEP, V], gl.bfloat16)
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    xt_sh = stride * (2 * K + 1)
    xt += g * R * xt_sh + gl.multiple_of((start + (ALIGN - 1)) // ALIGN * ALIGN + n.to(gl.int64) * ALIGN, ALIGN)
    y += start * y_st + g * R * y_sh
    sums += g * tokens + start
    out = s_out + (chunk0 * G + g) * (rows * V)
    end = (n.to(gl.int64) * G + g) * (rows * V)
    group = gl.program_id(0)
    if group < GROUPS:
        fs = gl.allocate_shared_memory(gl.bfloat16, [2, LOW, STEP], flat)
        _walk(
            xt, xt_sh, stride, y, y_st, y_sh, sums, prefixes, out, G * rows * V, s_init + end, s_final + end,
            group * LOW, LOWER, 0, chunks, length, xs, ys, fs, K, K, V, P, R, STEP, CHUNK, STAGES, num_warps, GATED,
            REVERSE, INIT, FINAL,
        )  # fmt: skip
    elif UPPER > 0:
        HIGH: gl.constexpr = 4 * (ROWS_PER_WARP * num_warps // NARROW)
        upper_fs = gl.allocate_shared_memory(gl.bfloat16, [2, HIGH, STEP], flat)
        _walk(
            xt, xt_sh, stride, y, y_st, y_sh, sums, prefixes, out, G * rows * V, s_init + end, s_final + end,
            LOWER + (group - GROUPS) * HIGH, LOWER + UPPER, LOWER * (K - NARROW), chunks, length, xs, ys, upper_fs,
            NARROW, K, V, P, R, STEP, CHUNK, STAGES, num_warps, GATED, REVERSE, INIT, FINAL,
        )  # fmt: skip
