"""The state pass of p = 2 for Hopper, in Gluon: as `states.state_pass`, with layouts and copies under control.

A tile of rows is formed in registers, where the tensor cores read it: keys come transposed out of shared memory once a
step and meet one factor a token for each of the program's prefixes, while the products of the prefix before run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _factor(fs, i: gl.constexpr, row, PREFIXES: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """[1 or rows, STEP]: the factors of tile i, whose PREFIXES prefixes have WIDTH rows each."""
    f = fs.slice(i * PREFIXES, 1, 0).load(layout)
    for u in gl.static_range(1, PREFIXES):
        f = gl.where(row >= u * WIDTH, fs.slice(i * PREFIXES + u, 1, 0).load(layout), f)
    return f


@gluon.jit
def _write(
    out, acc, prefix, row0, PREFIXES: gl.constexpr, WIDTH: gl.constexpr, V: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The rows of a tile, WIDTH a prefix; those of the first prefix are at row0 + prefix WIDTH."""
    acc = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
    col = gl.arange(0, V, gl.SliceLayout(0, layout))
    gl.store(out + (row0 + prefix * WIDTH + m)[:, None] * V + col[None, :], acc)


@gluon.jit
def _write_all(
    out, is_z, prefix, row0, a0, a1, a2, a3,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, V: gl.constexpr, TILES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    if is_z:  # one prefix alone
        tile = gl.convert_layout(a0.to(out.dtype.element_ty), layout)
        m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
        col = gl.arange(0, V, gl.SliceLayout(0, layout))
        gl.store(out + m[:, None] * V + col[None, :], tile, mask=(m < WIDTH)[:, None])
    else:
        _write(out, a0, prefix, row0, PREFIXES, WIDTH, V, layout)
        _write(out, a1, prefix + PREFIXES, row0, PREFIXES, WIDTH, V, layout)
        if TILES > 2:
            _write(out, a2, prefix + 2 * PREFIXES, row0, PREFIXES, WIDTH, V, layout)
            _write(out, a3, prefix + 3 * PREFIXES, row0, PREFIXES, WIDTH, V, layout)


@gluon.jit
def _read(
    ptr, is_z, prefix, row0, PREFIXES: gl.constexpr, WIDTH: gl.constexpr, V: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
    col = gl.arange(0, V, gl.SliceLayout(0, layout))
    row = gl.where(is_z, m, row0 + prefix * WIDTH + m)
    wanted = (m < gl.where(is_z, WIDTH, PREFIXES * WIDTH))[:, None]
    return gl.load(ptr + row[:, None] * V + col[None, :], mask=wanted, other=0.0)


@gluon.jit
def _load_step(
    stage, x, x_st, xt, stride, y, y_st, left, xs, ys, fs,
    WIDTH: gl.constexpr, M: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Copies keys [STEP, M] (columns repeated if WIDTH < M), values [STEP, V] and factors [ROWS, STEP] of one step."""
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // M, M // 8], [WARPS, 1], [1, 0])
    t = gl.arange(0, STEP, gl.SliceLayout(1, x_layout))
    m = gl.arange(0, M, gl.SliceLayout(0, x_layout))
    async_copy.async_copy_global_to_shared(
        xs.index(stage), x + (t[:, None] * x_st + (m % WIDTH)[None, :]), mask=(t < left)[:, None]
    )
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    t = gl.arange(0, STEP, gl.SliceLayout(1, y_layout))
    col = gl.arange(0, V, gl.SliceLayout(0, y_layout))
    async_copy.async_copy_global_to_shared(
        ys.index(stage), y + (t[:, None] * y_st + col[None, :]), mask=(t < left)[:, None]
    )
    f_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, f_layout))
    t = gl.arange(0, STEP, gl.SliceLayout(0, f_layout))
    some = (r < gl.where(left > 0, ROWS, 0))[:, None]  # past the sequence's end there is not even padding
    async_copy.async_copy_global_to_shared(fs.index(stage), xt + (r[:, None] * stride + t[None, :]), mask=some)
    async_copy.commit_group()


@gluon.jit
def _step_pointers(
    it, x, x_st, x_sh, xt, xt_sh, y, y_st, y_sh, chunks, length,
    R: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    steps: gl.constexpr = CHUNK // STEP
    chunk = it // (R * steps)
    if REVERSE:
        chunk = chunks - 1 - chunk
    within = it % (R * steps)
    r = within // steps
    s = chunk * CHUNK + (within % steps) * STEP
    wide = s.to(gl.int64)
    return x + (wide * x_st + r * x_sh), xt + (s + r * xt_sh), y + (wide * y_st + r * y_sh), length - s


@gluon.jit
def _walk(
    x, x_st, x_sh, xt, xt_sh, stride, y, y_st, y_sh, sums, out, out_step, init, final, is_z, prefix, row0,
    chunks, length, G, xs, ys, fs,
    WIDTH: gl.constexpr, V: gl.constexpr, R: gl.constexpr,
    TILES: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr,
):  # fmt: skip
    """TILES tiles of rows, from `prefix` on, through all chunks of a sequence. Pointers are at its first token, chunk
    and head, `xt` at the prefix's row too."""
    LEAST: gl.constexpr = 16 * WARPS  # rows of a product at least
    PREFIXES: gl.constexpr = LEAST // WIDTH if WIDTH < LEAST else 1
    M: gl.constexpr = PREFIXES * WIDTH
    ROWS: gl.constexpr = TILES * PREFIXES
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, M, gl.SliceLayout(1, left_layout))[:, None]
    a0 = gl.zeros([M, V], gl.float32, mma)
    a1 = gl.zeros([M, V], gl.float32, mma)
    a2 = gl.zeros([M, V], gl.float32, mma)
    a3 = gl.zeros([M, V], gl.float32, mma)
    if INIT:
        a0 = gl.convert_layout(_read(init, is_z, prefix, row0, PREFIXES, WIDTH, V, out_layout), mma)
        if not is_z:
            a1 = gl.convert_layout(_read(init, is_z, prefix + PREFIXES, row0, PREFIXES, WIDTH, V, out_layout), mma)
            if TILES > 2:
                i = prefix + 2 * PREFIXES
                a2 = gl.convert_layout(_read(init, is_z, i, row0, PREFIXES, WIDTH, V, out_layout), mma)
                i = prefix + 3 * PREFIXES
                a3 = gl.convert_layout(_read(init, is_z, i, row0, PREFIXES, WIDTH, V, out_layout), mma)

    total = chunks * (R * (CHUNK // STEP))
    for early in gl.static_range(STAGES - 1):
        x_here, f_here, y_here, left = _step_pointers(
            chunks * 0 + early, x, x_st, x_sh, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        left = gl.where(early < total, left, 0)
        _load_step(
            early, x_here, x_st, f_here, stride, y_here, y_st, left, xs, ys, fs, WIDTH, M, V, ROWS, STEP, WARPS
        )
    for it in range(total):
        if it % (R * (CHUNK // STEP)) == 0:
            chunk = it // (R * (CHUNK // STEP))
            if REVERSE:
                chunk = chunks - 1 - chunk
            here = out + chunk.to(gl.int64) * out_step
            _write_all(here, is_z, prefix, row0, a0, a1, a2, a3, PREFIXES, WIDTH, V, TILES, out_layout)
            if GATED:
                decay = gl.exp(gl.load(sums + gl.minimum((chunk + 1) * CHUNK, length) - 1))
                a0 *= decay
                a1 *= decay
                if TILES > 2:
                    a2 *= decay
                    a3 *= decay
        stage = it % STAGES
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        ahead = it + (STAGES - 1)
        x_here, f_here, y_here, left = _step_pointers(
            ahead, x, x_st, x_sh, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        left = gl.where(ahead < total, left, 0)
        _load_step(
            ahead % STAGES, x_here, x_st, f_here, stride, y_here, y_st, left, xs, ys, fs, WIDTH, M, V, ROWS, STEP,
            WARPS,
        )  # fmt: skip
        keys = xs.index(stage).permute([1, 0]).load(left_layout)
        values = ys.index(stage)
        factors = fs.index(stage)
        p0 = keys * _factor(factors, 0, row, PREFIXES, WIDTH, left_layout)
        w0 = warpgroup_mma(p0, values, a0, is_async=True)
        p1 = keys * _factor(factors, 1, row, PREFIXES, WIDTH, left_layout)
        w1 = warpgroup_mma(p1, values, a1, is_async=True)
        if TILES > 2:
            p2 = keys * _factor(factors, 2, row, PREFIXES, WIDTH, left_layout)
            w2 = warpgroup_mma(p2, values, a2, is_async=True)
            p3 = keys * _factor(factors, 3, row, PREFIXES, WIDTH, left_layout)
            w3 = warpgroup_mma(p3, values, a3, is_async=True)
            a0, a1, a2, a3 = warpgroup_mma_wait(0, deps=(w0, w1, w2, w3))
        else:
            a0, a1 = warpgroup_mma_wait(0, deps=(w0, w1))
    async_copy.wait_group(0)
    if FINAL:
        _write_all(final, is_z, prefix, row0, a0, a1, a2, a3, PREFIXES, WIDTH, V, TILES, out_layout)


@gluon.jit
def state_pass(
    x, x_st, x_sh, xt, stride, y, y_st, y_sh, sums, s_out, z_out, s_init, z_init, s_final, z_final,
    starts, chunk_starts, T, tokens, G,
    K: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr, R: gl.constexpr,
    TILES: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr,
    ALIGN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows (the first is that of Z, whose values are the keys; so K = V), kv heads, sequences."""
    gl.static_assert(K == V)
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
    UPPER: gl.constexpr = K - HALF
    # Of a lower and of an upper prefix: rows of a tile, prefixes of a program.
    LEAST: gl.constexpr = 16 * num_warps
    LOWER_M: gl.constexpr = LEAST if K < LEAST else K
    UPPER_M: gl.constexpr = LEAST if UPPER < LEAST else UPPER
    LOWER_ROWS: gl.constexpr = TILES * (LOWER_M // K)
    UPPER_ROWS: gl.constexpr = TILES * (UPPER_M // UPPER)
    rows: gl.constexpr = HALF * K + UPPER * UPPER
    ys = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, STEP, V], gl.NVMMASharedLayout.get_default_for([STEP, V], gl.bfloat16)
    )
    offset = gl.multiple_of((start + (ALIGN - 1)) // ALIGN * ALIGN + n.to(gl.int64) * ALIGN, ALIGN)
    xt_sh = stride * (K + 1)
    x += start * x_st + g * R * x_sh
    y += start * y_st + g * R * y_sh
    xt += g * R * xt_sh + offset
    sums += g * tokens + start
    end = n.to(gl.int64) * G + g
    tile = gl.program_id(0) - 1
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if tile < HALF // LOWER_ROWS:
        is_z = tile < 0
        prefix = tile * LOWER_ROWS
        out = s_out + (chunk0 * G + g) * (rows * V)
        out_step = G * rows * V
        init = s_init + end * (rows * V)
        final = s_final + end * (rows * V)
        if is_z:
            prefix = prefix * 0 + K
            y = x
            y_st = x_st
            y_sh = x_sh
            out = z_out + (chunk0 * G + g) * (K * K)
            out_step = G * K * K
            init = z_init + end * (K * K)
            final = z_final + end * (K * K)
        xs = gl.allocate_shared_memory(
            gl.bfloat16, [STAGES, STEP, LOWER_M], gl.NVMMASharedLayout.get_default_for([STEP, LOWER_M], gl.bfloat16)
        )
        fs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, LOWER_ROWS, STEP], flat)
        _walk(
            x, x_st, x_sh, xt + prefix.to(gl.int64) * stride, xt_sh, stride, y, y_st, y_sh, sums, out, out_step, init,
            final, is_z, prefix, 0, chunks, length, G, xs, ys, fs, K, V, R, TILES, STEP, CHUNK, STAGES, num_warps,
            GATED, REVERSE, INIT, FINAL,
        )  # fmt: skip
    else:
        prefix = HALF + (tile - HALF // LOWER_ROWS) * UPPER_ROWS
        upper_x = gl.allocate_shared_memory(
            gl.bfloat16, [STAGES, STEP, UPPER_M], gl.NVMMASharedLayout.get_default_for([STEP, UPPER_M], gl.bfloat16)
        )
        upper_f = gl.allocate_shared_memory(gl.bfloat16, [STAGES, UPPER_ROWS, STEP], flat)
        _walk(
            x + HALF, x_st, x_sh, xt + prefix.to(gl.int64) * stride, xt_sh, stride, y, y_st, y_sh, sums,
            s_out + (chunk0 * G + g) * (rows * V), G * rows * V, s_init + end * (rows * V), s_final + end * (rows * V),
            False, prefix, HALF * K - HALF * UPPER, chunks, length, G, upper_x, ys, upper_f, UPPER, V, R, TILES, STEP,
            CHUNK, STAGES, num_warps, GATED, REVERSE, INIT, FINAL,
        )  # fmt: skip
