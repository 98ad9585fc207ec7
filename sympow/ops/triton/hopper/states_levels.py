"""The state pass for p = 3 and 4 on Hopper, in Gluon. It is like `hopper.states`, with prefixes of several indices.

In each tile of rows, a thread has one prefix with four of its last indices. It computes their factor, a product of p -
1 entries of each token, where it is used. So a thread reads 8 tokens of a row of keys at once. The tensor cores then
take the tokens of a step in another order, and the values are copied in that order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.compat import load_async
from sympow.ops.triton.hopper.primitives import buffers, exp2, step_pointers

LAST = gl.constexpr(4)  # last indices of a tile


@gluon.constexpr_function
def owned(step, warps):
    """Returns the layout [prefixes, last indices, step] of a tile: a thread has one prefix, and step / 4 consecutive
    tokens."""
    rows = [[0, 1, 0], [0, 2, 0]]
    tokens = [[0, 0, 1 << i] for i in range(step.bit_length() - 1)]
    registers = [tokens[0], rows[0], tokens[1], *tokens[2:-2], rows[1]]
    lanes = [*tokens[-2:], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    split = [[8 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, split, [], [8 * warps, 4, step])


@gluon.constexpr_function
def owned_factors(step, warps):
    """Returns `owned` without the last indices."""
    registers = [[0, 1 << i] for i in range(step.bit_length() - 3)]
    lanes = [[0, step // 4], [0, step // 2], [1, 0], [2, 0], [4, 0]]
    split = [[8 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, split, [], [8 * warps, step])


@gluon.constexpr_function
def owned_keys(step, warps):
    """Returns `owned` without the prefixes."""
    registers = [*[[0, 1 << i] for i in range(step.bit_length() - 3)], [1, 0], [2, 0]]
    lanes = [[0, step // 4], [0, step // 2], [0, 0], [0, 0], [0, 0]]
    split = [[0, 0] for _ in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, split, [], [4, step])


@gluon.constexpr_function
def last_indices(width, tiles):
    """Returns the number of prefixes of a program's tiles."""
    return min(width, LAST.value * tiles)


@gluon.constexpr_function
def before_level(levels, level, tiles, warps):
    """Returns the rows, prefixes and programs of the levels before."""
    rows, prefixes, count = 0, 0, 0
    for groups, width in levels[:level]:
        members, here = groups * max(1, 16 // width), min(width, LAST.value * tiles)
        rows += members * width
        prefixes += members
        count += -(-members // (8 * warps * (LAST.value * tiles // here))) * (width // here)
    return rows, prefixes, count


def programs(levels: tuple[tuple[int, int], ...], tiles: int, warps: int) -> int:
    """Returns the number of programs of `state_pass` for one head of one sequence."""
    return before_level(levels, len(levels), tiles, warps)[2]


@gluon.jit
def _copy_step(
    stage, x, stride, y, y_st, left, xs, ys,
    ROWS: gl.constexpr, V: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Copies keys [ROWS, STEP], transposed and padded, and values [STEP, V] in the order of the tensor cores."""
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [WARPS, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, x_layout))
    t = gl.arange(0, STEP, gl.SliceLayout(0, x_layout))
    some = (m < gl.where(left > 0, ROWS, 0))[:, None]
    load_async(xs.index(stage), x + (m[:, None] * stride + t[None, :]), mask=some)
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    i = gl.arange(0, STEP, gl.SliceLayout(1, y_layout))
    # Of 16 positions in the order of the tensor cores, a thread has 0, 1, 8 and 9, and so on. Its consecutive tokens go
    # to these.
    t = i % 2 + i // 8 % 2 * 2 + i // 16 * 4 + i // 2 % 4 * (STEP // 4)
    col = gl.arange(0, V, gl.SliceLayout(0, y_layout))
    load_async(ys.index(stage), y + (t[:, None] * y_st + col[None, :]), mask=(t < left)[:, None])
    async_copy.commit_group()


@gluon.jit
def _places(
    i: gl.constexpr, prefix, part, count,
    WIDTH: gl.constexpr, HERE: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Returns the indices of the elements of tile i in a level, and a mask of those that exist."""
    GROUP: gl.constexpr = 16 // WIDTH if WIDTH < 16 else 1
    RUN: gl.constexpr = 8 // GROUP
    PER: gl.constexpr = HERE // LAST  # tiles of a prefix
    m = gl.arange(0, 8 * WARPS * LAST, gl.SliceLayout(1, layout))
    col = gl.arange(0, V, gl.SliceLayout(0, layout))
    n = prefix + (i // PER) * (8 * WARPS) + m // 16 % WARPS * 8 + m % 8
    j = part * HERE + (i % PER) * LAST + m // (16 * WARPS) * 2 + m // 8 % 2
    row = n // GROUP * (GROUP * WIDTH) + j // RUN * 8 + n % GROUP * RUN + j % RUN
    return row[:, None] * V + col[None, :], (n < count)[:, None]


@gluon.jit
def _write(
    out, acc, i: gl.constexpr, prefix, part, count,
    WIDTH: gl.constexpr, HERE: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    where, some = _places(i, prefix, part, count, WIDTH, HERE, V, WARPS, layout)
    gl.store(out + where, gl.convert_layout(acc.to(out.dtype.element_ty), layout), mask=some)


@gluon.jit
def _write_all(
    out, a0, a1, a2, a3, prefix, part, count,
    WIDTH: gl.constexpr, HERE: gl.constexpr, TILES: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    _write(out, a0, 0, prefix, part, count, WIDTH, HERE, V, WARPS, layout)
    if TILES > 1:
        _write(out, a1, 1, prefix, part, count, WIDTH, HERE, V, WARPS, layout)
    if TILES > 2:
        _write(out, a2, 2, prefix, part, count, WIDTH, HERE, V, WARPS, layout)
        _write(out, a3, 3, prefix, part, count, WIDTH, HERE, V, WARPS, layout)


@gluon.jit
def _read(
    ptr, i: gl.constexpr, prefix, part, count,
    WIDTH: gl.constexpr, HERE: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr,
    to: gl.constexpr,
):  # fmt: skip
    where, some = _places(i, prefix, part, count, WIDTH, HERE, V, WARPS, layout)
    return gl.convert_layout(gl.load(ptr + where, mask=some, other=0.0), to)


@gluon.jit
def _sources(prefixes, n, P: gl.constexpr):
    """Returns the indices of prefixes n, a byte each."""
    first = prefixes + n * (P - 1)
    return gl.load(first) | gl.load(first + 1) << 8 | gl.load(first + (P - 2)) << 16


@gluon.jit
def _entries(xt, stride, sources, some, K: gl.constexpr, P: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr):
    """Returns the entries of prefixes for the tokens of a step, [prefixes, STEP] each, the first weighted by token."""
    t = gl.arange(0, STEP, gl.SliceLayout(0, owned_factors(STEP, WARPS)))[None, :]
    some = (t < gl.where(some, STEP, 0)) & (sources >= 0)[:, None]
    plain = xt + (K + 1) * stride
    f0 = gl.load(xt + ((sources & 0xFF).to(gl.int64) * stride)[:, None] + t, mask=some, other=0.0)
    f1 = gl.load(plain + ((sources >> 8 & 0xFF).to(gl.int64) * stride)[:, None] + t, mask=some, other=0.0)
    f2 = f1
    if P > 3:
        f2 = gl.load(plain + ((sources >> 16).to(gl.int64) * stride)[:, None] + t, mask=some, other=0.0)
    return f0, f1, f2


@gluon.jit
def _times(x, y):
    """Returns x y with two elements for each instruction; a plain product is not always compiled so."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _product(f0, f1, f2, P: gl.constexpr):
    f = _times(f0, f1)
    if P > 3:
        f = _times(f, f2)
    return f


@gluon.jit
def _tile(keys, factors, i: gl.constexpr, HERE: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr,
          left_layout: gl.constexpr):  # fmt: skip
    """Returns the rows [8 WARPS LAST, STEP] of tile i: the factors of its prefixes times keys at its last indices."""
    layout: gl.constexpr = owned(STEP, WARPS)
    x = keys.slice(i % (HERE // LAST) * LAST, LAST, 0).load(owned_keys(STEP, WARPS))
    x = gl.convert_layout(x, gl.SliceLayout(0, layout), assert_trivial=True)
    f = gl.convert_layout(factors, gl.SliceLayout(1, layout), assert_trivial=True)
    tile = f.expand_dims(1) * x.expand_dims(0)
    tile = tile.reshape([WARPS, 8, 2, 2, 4, STEP // 16, 2, 2]).permute([2, 0, 3, 1, 5, 6, 4, 7])
    return gl.convert_layout(tile.reshape([8 * WARPS * LAST, STEP]), left_layout, assert_trivial=True)


@gluon.jit
def _walk(
    xt, xt_sh, stride, y, y_st, y_sh, sums, prefixes, out, out_step, init, final, prefix, part, count,
    chunks, length, xs, ys,
    WIDTH: gl.constexpr, TILES: gl.constexpr, K: gl.constexpr, V: gl.constexpr, P: gl.constexpr, R: gl.constexpr,
    STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    """Computes TILES tiles of the rows of a level, from `prefix` on, through all chunks of a sequence, for part `part`
    of the last indices of the level. Pointers are to the first token, chunk and head, and to the level."""
    HERE: gl.constexpr = last_indices(WIDTH, TILES)
    PER: gl.constexpr = HERE // LAST
    SETS: gl.constexpr = TILES // PER  # of prefixes, one a thread
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    M: gl.constexpr = 8 * WARPS * LAST
    a0 = gl.zeros([M, V], gl.float32, mma)
    a1 = gl.zeros([M, V], gl.float32, mma)
    a2 = gl.zeros([M, V], gl.float32, mma)
    a3 = gl.zeros([M, V], gl.float32, mma)
    if INIT:
        a0 = _read(init, 0, prefix, part, count, WIDTH, HERE, V, WARPS, out_layout, mma)
        if TILES > 1:
            a1 = _read(init, 1, prefix, part, count, WIDTH, HERE, V, WARPS, out_layout, mma)
        if TILES > 2:
            a2 = _read(init, 2, prefix, part, count, WIDTH, HERE, V, WARPS, out_layout, mma)
            a3 = _read(init, 3, prefix, part, count, WIDTH, HERE, V, WARPS, out_layout, mma)

    plain = (K + 1 + K - WIDTH + part * HERE).to(gl.int64) * stride
    total = chunks * (R * (CHUNK // STEP))
    for early in gl.static_range(STAGES - 1):
        _, x_here, y_here, left = step_pointers(
            chunks * 0 + early, y, 0, 0, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        left = gl.where(early < total, left, 0)
        _copy_step(early, x_here + plain, stride, y_here, y_st, left, xs, ys, HERE, V, STEP, WARPS)
    n = prefix + gl.arange(0, 8 * WARPS, gl.SliceLayout(1, owned_factors(STEP, WARPS)))
    n0 = _sources(prefixes, gl.minimum(n, count - 1), P)
    n1 = _sources(prefixes, gl.minimum(n + 8 * WARPS, count - 1), P)
    n2 = _sources(prefixes, gl.minimum(n + 16 * WARPS, count - 1), P)
    n3 = _sources(prefixes, gl.minimum(n + 24 * WARPS, count - 1), P)
    _, x_now, _, left = step_pointers(
        chunks * 0, y, 0, 0, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
    )
    some = (total > 0) & (left > 0)
    f0, f1, f2 = _entries(x_now, stride, n0, some, K, P, STEP, WARPS)
    p0 = _product(f0, f1, f2, P)
    p1 = p0
    p2 = p0
    p3 = p0
    if SETS > 1:
        f0, f1, f2 = _entries(x_now, stride, n1, some, K, P, STEP, WARPS)
        p1 = _product(f0, f1, f2, P)
    if SETS > 2:
        f0, f1, f2 = _entries(x_now, stride, n2, some, K, P, STEP, WARPS)
        p2 = _product(f0, f1, f2, P)
        f0, f1, f2 = _entries(x_now, stride, n3, some, K, P, STEP, WARPS)
        p3 = _product(f0, f1, f2, P)
    for it in range(total):
        if it % (R * (CHUNK // STEP)) == 0:
            chunk = it // (R * (CHUNK // STEP))
            if REVERSE:
                chunk = chunks - 1 - chunk
            here = out + chunk.to(gl.int64) * out_step
            if not AFTER:
                _write_all(here, a0, a1, a2, a3, prefix, part, count, WIDTH, HERE, TILES, V, WARPS, out_layout)
            if GATED:
                decay = exp2(gl.load(sums + gl.minimum((chunk + 1) * CHUNK, length) - 1))
                a0 *= decay
                if TILES > 1:
                    a1 *= decay
                if TILES > 2:
                    a2 *= decay
                    a3 *= decay
        stage = it % STAGES
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        ahead = it + (STAGES - 1)
        _, x_here, y_here, left = step_pointers(
            ahead, y, 0, 0, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        left = gl.where(ahead < total, left, 0)
        _copy_step(ahead % STAGES, x_here + plain, stride, y_here, y_st, left, xs, ys, HERE, V, STEP, WARPS)
        _, x_next, _, left = step_pointers(
            it + 1, y, 0, 0, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        some = (it + 1 < total) & (left > 0)
        keys = xs.index(stage)
        values = ys.index(stage)
        # The factors of the next step are computed while the products of this step run.
        f0, f1, f2 = _entries(x_next, stride, n0, some, K, P, STEP, WARPS)
        w0 = warpgroup_mma(_tile(keys, p0, 0, HERE, STEP, WARPS, left_layout), values, a0, is_async=True)
        if TILES == 1:
            a0 = warpgroup_mma_wait(0, deps=(w0,))
            p0 = _product(f0, f1, f2, P)
        elif TILES == 2:
            if SETS == 1:
                p1 = p0
            w1 = warpgroup_mma(_tile(keys, p1, 1, HERE, STEP, WARPS, left_layout), values, a1, is_async=True)
            p0 = _product(f0, f1, f2, P)
            if SETS > 1:
                f0, f1, f2 = _entries(x_next, stride, n1, some, K, P, STEP, WARPS)
                p1 = _product(f0, f1, f2, P)
            a0, a1 = warpgroup_mma_wait(0, deps=(w0, w1))
        else:
            if SETS == 1:
                p1 = p0
                p2 = p0
                p3 = p0
            elif SETS == 2:
                p3 = p1
                p2 = p1
                p1 = p0
            w1 = warpgroup_mma(_tile(keys, p1, 1, HERE, STEP, WARPS, left_layout), values, a1, is_async=True)
            p0 = _product(f0, f1, f2, P)
            if SETS > 1:
                f0, f1, f2 = _entries(x_next, stride, n1, some, K, P, STEP, WARPS)
            w2 = warpgroup_mma(_tile(keys, p2, 2, HERE, STEP, WARPS, left_layout), values, a2, is_async=True)
            if SETS > 1:
                p1 = _product(f0, f1, f2, P)
            if SETS > 2:
                w0, w1 = warpgroup_mma_wait(1, deps=(w0, w1))  # frees their registers
                f0, f1, f2 = _entries(x_next, stride, n2, some, K, P, STEP, WARPS)
                p2 = _product(f0, f1, f2, P)
                f0, f1, f2 = _entries(x_next, stride, n3, some, K, P, STEP, WARPS)
            w3 = warpgroup_mma(_tile(keys, p3, 3, HERE, STEP, WARPS, left_layout), values, a3, is_async=True)
            if SETS > 2:
                p3 = _product(f0, f1, f2, P)
            a0, a1, a2, a3 = warpgroup_mma_wait(0, deps=(w0, w1, w2, w3))
    async_copy.wait_group(0)
    if AFTER:
        _write_all(out, a0, a1, a2, a3, prefix, part, count, WIDTH, HERE, TILES, V, WARPS, out_layout)
    if FINAL:
        _write_all(final, a0, a1, a2, a3, prefix, part, count, WIDTH, HERE, TILES, V, WARPS, out_layout)


@gluon.jit
def _level(
    xt, xt_sh, stride, y, y_st, y_sh, sums, prefixes, out, out_step, init, final, chunks, length, ys,
    before: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, P: gl.constexpr, R: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr,
    AFTER: gl.constexpr,
):  # fmt: skip
    """Runs a program of one level; `before` has the rows, prefixes and programs of the levels before."""
    HERE: gl.constexpr = last_indices(WIDTH, TILES)
    PARTS: gl.constexpr = WIDTH // HERE
    GROUP: gl.constexpr = 16 // WIDTH if WIDTH < 16 else 1
    program = gl.program_id(0) - before[2]
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, HERE, STEP], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    _walk(
        xt, xt_sh, stride, y, y_st, y_sh, sums, prefixes + before[1] * (P - 1), out + before[0] * V, out_step,
        init + before[0] * V, final + before[0] * V, program // PARTS * (8 * WARPS * LAST * TILES // HERE),
        program % PARTS, GROUPS * GROUP, chunks, length, xs, ys, WIDTH, TILES, K, V, P, R, STEP, CHUNK, STAGES, WARPS,
        GATED, REVERSE, INIT, FINAL, AFTER,
    )  # fmt: skip


@gluon.jit
def state_pass(
    xt, stride, y, y_st, y_sh, sums, prefixes, s_out, s_init, s_final, starts, chunk_starts, T, tokens, row_states, G,
    K: gl.constexpr, V: gl.constexpr, P: gl.constexpr, LEVELS: gl.constexpr, R: gl.constexpr,
    TILES: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, AFTER: gl.constexpr,
    PACKED: gl.constexpr, ALIGN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Computes the states. LEVELS has groups and width of each level, as in `levels.Levels`. Grid: programs, key/value
    heads, sequences. row_states and AFTER are those of `states.state_pass`."""
    g = gl.program_id(1).to(gl.int64)
    n = gl.program_id(2)
    if PACKED:
        start = gl.load(starts + n).to(gl.int64)
        length = (gl.load(starts + n + 1) - start).to(gl.int32)
        chunk0 = gl.load(chunk_starts + n).to(gl.int64)
    else:
        start = n.to(gl.int64) * T
        length = T
        chunk0 = n.to(gl.int64) * row_states
    chunks = gl.cdiv(length, CHUNK)
    rows: gl.constexpr = before_level(LEVELS, len(LEVELS), TILES, num_warps)[0]
    ys = buffers(STAGES, STEP, V)
    xt_sh = stride * (2 * K + 1)
    xt += g * R * xt_sh + gl.multiple_of((start + (ALIGN - 1)) // ALIGN * ALIGN + n.to(gl.int64) * ALIGN, ALIGN)
    y += start * y_st + g * R * y_sh
    sums += g * tokens + start
    out = s_out + (chunk0 * G + g) * (rows * V)
    end = (n.to(gl.int64) * G + g) * (rows * V)
    for level in gl.static_range(len(LEVELS)):
        if (gl.program_id(0) >= before_level(LEVELS, level, TILES, num_warps)[2]) & (
            gl.program_id(0) < before_level(LEVELS, level + 1, TILES, num_warps)[2]
        ):
            _level(
                xt, xt_sh, stride, y, y_st, y_sh, sums, prefixes, out, G * rows * V, s_init + end, s_final + end,
                chunks, length, ys, before_level(LEVELS, level, TILES, num_warps), LEVELS[level][0], LEVELS[level][1],
                TILES, K, V, P, R, STEP, CHUNK, STAGES, num_warps, GATED, REVERSE, INIT, FINAL, AFTER,
            )  # fmt: skip
