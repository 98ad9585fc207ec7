"""The state pass for p = 2 on Hopper, in Gluon. It computes the same as `states.state_pass`, with explicit layouts and
copies. A tile of rows is computed in the registers from which the tensor cores read it: transposed keys, which are read
from shared memory once for each step, times one factor of each token for each prefix, while the previous products run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.compat import barrier, load_async
from sympow.ops.triton.hopper.primitives import exp2, step_pointers
from sympow.ops.triton.hopper.ring import await_tile, copies_ahead, ring
from sympow.ops.triton.rows import bands as bands_of_rows

bands = gluon.constexpr_function(bands_of_rows)


@gluon.constexpr_function
def by_prefix(prefixes, tile, step, warps):
    """Returns the layout [prefixes, rows, step] of a left operand [prefixes rows, step] of the tensor cores."""
    rows = tile // prefixes

    def place(row, column):
        return [row // rows, row % rows, column]

    columns = [place(0, 2**i) for i in range(4, step.bit_length() - 1)]
    repeats = [place(16 * warps * 2**i, 0) for i in range((tile // (16 * warps)).bit_length() - 1)]
    registers = [place(0, 1), place(8, 0), place(0, 8), *columns, *repeats]
    lanes = [place(0, 2), place(0, 4), place(1, 0), place(2, 0), place(4, 0)]
    split = [place(16 * 2**i, 0) for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, split, [], [prefixes, rows, step])


@gluon.jit
def _load_factors(
    factors, i: gl.constexpr, PREFIXES: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, left_layout: gl.constexpr
):
    """Returns the factors of tile i, of PREFIXES prefixes, as `_times` takes them."""
    if PREFIXES == 1:
        return factors.slice(i, 1, 0).load(left_layout)
    else:
        layout: gl.constexpr = gl.SliceLayout(1, by_prefix(PREFIXES, 16 * WARPS, STEP, WARPS))
        return factors.slice(i * PREFIXES, PREFIXES, 0).load(layout)


@gluon.jit
def _times(keys, f, PREFIXES: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, left_layout: gl.constexpr):
    """Returns a tile: the keys [M, STEP], repeated for each of PREFIXES prefixes, times the factors of these."""
    if PREFIXES == 1:
        return keys * f
    else:
        layout: gl.constexpr = by_prefix(PREFIXES, 16 * WARPS, STEP, WARPS)
        rows = gl.convert_layout(keys.reshape([PREFIXES, 16 * WARPS // PREFIXES, STEP]), layout, assert_trivial=True)
        tile = (rows * f.expand_dims(1)).reshape([16 * WARPS, STEP])
        return gl.convert_layout(tile, left_layout, assert_trivial=True)


@gluon.jit
def places(
    prefix, row0,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Returns the indices of a tile in a state of V columns: WIDTH of the ROWS rows of each prefix, from row0 on."""
    m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
    col = gl.arange(0, V, gl.SliceLayout(0, layout))
    return (row0 + (prefix + m // WIDTH) * ROWS + m % WIDTH)[:, None] * V + col[None, :]


@gluon.jit
def _write(
    out, acc, is_z: gl.constexpr, prefix, row0,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    acc = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
    here = places(0 if is_z else prefix, row0, PREFIXES, WIDTH, ROWS, V, layout)
    gl.store(out + here, acc, mask=(m < (WIDTH if is_z else PREFIXES * WIDTH))[:, None])  # Z is one prefix


@gluon.jit
def _write_all(
    out, is_z: gl.constexpr, prefix, row0, accs,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    for n in gl.static_range(len(accs)):
        _write(out, accs[n], is_z, prefix + n * PREFIXES, row0, PREFIXES, WIDTH, ROWS, V, layout)


@gluon.jit
def computed_here(x):
    """Returns x. What depends on it is computed here; computed before the loop, it would take registers all along."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _multiply_and_write(
    out, other, followed, acc, is_z: gl.constexpr, prefix, row0, last,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr,
    FIRST: gl.constexpr, layout: gl.constexpr, out_layout: gl.constexpr,
):  # fmt: skip
    """Does the same as `_write`, and returns the part of each row in the inner product with the state at `other`, which
    may be `out`: [rows], 0 unless `followed`. Between parts of K (`rows.py`) one row counts for both orderings."""
    m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
    wanted = (m < (WIDTH if is_z else PREFIXES * WIDTH)) & followed
    here = places(0 if is_z else prefix, row0, PREFIXES, WIDTH, ROWS, V, layout)
    theirs = gl.load(other + here, mask=wanted[:, None], other=0.0).to(gl.float32)
    # Rounded as it is when it is written. The key pass reads the rounded state, so the same rounding errors are in
    # both, and cancel in the gradient of the gate.
    own = acc.to(out.dtype.element_ty).to(gl.float32)
    x = gl.sum(theirs * own, 1)
    if not is_z:
        between = (prefix + m // WIDTH) // FIRST != (last + m % WIDTH) // FIRST
        x *= gl.where(between, 2.0, 1.0)
    x = gl.where(wanted, x, 0.0)  # rows beside Z belong to no prefix, so `acc` is arbitrary there
    barrier()  # all threads have read what is overwritten now
    _write(out, acc, is_z, prefix, row0, PREFIXES, WIDTH, ROWS, V, out_layout)
    return x


@gluon.jit
def _multiply_and_write_all(
    out, other, products, followed, is_z: gl.constexpr, prefix, row0, last, accs,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr,
    FIRST: gl.constexpr, layout: gl.constexpr, out_layout: gl.constexpr,
):  # fmt: skip
    """Adds to products [1] the sum of `_multiply_and_write` over all tiles."""
    prefix = computed_here(prefix)
    x = gl.zeros([PREFIXES * WIDTH], gl.float32, gl.SliceLayout(1, layout))
    for n in gl.static_range(len(accs)):
        x += _multiply_and_write(
            out, other, followed, accs[n], is_z, prefix + n * PREFIXES, row0, last, PREFIXES, WIDTH, ROWS, V, FIRST,
            layout, out_layout,
        )  # fmt: skip
    gl.store(products, gl.sum(x, 0))


@gluon.jit
def _read(
    ptr, is_z: gl.constexpr, prefix, row0,
    PREFIXES: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr,
    layout: gl.constexpr, to: gl.constexpr,
):  # fmt: skip
    m = gl.arange(0, PREFIXES * WIDTH, gl.SliceLayout(1, layout))
    here = places(0 if is_z else prefix, row0, PREFIXES, WIDTH, ROWS, V, layout)
    wanted = (m < (WIDTH if is_z else PREFIXES * WIDTH))[:, None]
    return gl.convert_layout(gl.load(ptr + here, mask=wanted, other=0.0), to)


@gluon.jit
def _load_step(
    xs, ys, fs, x, x_st, xt, stride, y, y_st, left,
    WIDTH: gl.constexpr, M: gl.constexpr, V: gl.constexpr, FACTORS: gl.constexpr, STEP: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Copies keys [STEP, M] (columns repeated if WIDTH < M), values [STEP, V], factors [FACTORS, STEP] of a step."""
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // M, M // 8], [WARPS, 1], [1, 0])
    t = gl.arange(0, STEP, gl.SliceLayout(1, x_layout))
    m = gl.arange(0, M, gl.SliceLayout(0, x_layout))
    load_async(xs, x + (t[:, None] * x_st + (m % WIDTH)[None, :]), mask=(t < left)[:, None])
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    t = gl.arange(0, STEP, gl.SliceLayout(1, y_layout))
    col = gl.arange(0, V, gl.SliceLayout(0, y_layout))
    load_async(ys, y + (t[:, None] * y_st + col[None, :]), mask=(t < left)[:, None])
    f_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, FACTORS, gl.SliceLayout(1, f_layout))
    t = gl.arange(0, STEP, gl.SliceLayout(0, f_layout))
    some = (r < gl.where(left > 0, FACTORS, 0))[:, None]  # after the end of the sequence there is not even padding
    load_async(fs, xt + (r[:, None] * stride + t[None, :]), mask=some)
    async_copy.commit_group()


@gluon.jit
def _walk(
    x, x_st, x_sh, xt, xt_sh, stride, y, y_st, y_sh, sums, out, out_step, init, final, other, products,
    products_step, is_z: gl.constexpr, prefix, row0, last, chunks, length,
    WIDTH: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, FIRST: gl.constexpr, R: gl.constexpr,
    TILES: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    """Computes TILES tiles of rows, from `prefix` on, through all chunks of a sequence, WIDTH of the ROWS rows of each
    prefix. Pointers are to the first token, chunk and head; `x` is at the first last index, `xt` at the row of the
    prefix too. `other` is part of s_forward or z_forward of `state_pass`. last: the first last index. FIRST: channels
    of a part of K. The loop over steps is unrolled over the buffers, as in `ring.py`."""
    LEAST: gl.constexpr = 16 * WARPS  # a product has at least so many rows
    PREFIXES: gl.constexpr = LEAST // WIDTH if WIDTH < LEAST else 1
    M: gl.constexpr = PREFIXES * WIDTH
    gl.static_assert(STAGES > 3)  # the products of the last step still read a buffer while copies are started
    AHEAD: gl.constexpr = copies_ahead(STAGES)
    STEPS: gl.constexpr = R * (CHUNK // STEP)
    gl.static_assert(STEPS % STAGES == 0)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    xs = ring(STAGES, STEP, M)
    ys = ring(STAGES, STEP, V)
    fs = ()
    for _ in gl.static_range(STAGES):
        fs = fs + (gl.allocate_shared_memory(gl.bfloat16, [TILES * PREFIXES, STEP], flat),)
    accs = ()
    for n in gl.static_range(TILES):
        if INIT:
            acc = _read(init, is_z, prefix + n * PREFIXES, row0, PREFIXES, WIDTH, ROWS, V, out_layout, mma)
        else:
            acc = gl.zeros([M, V], gl.float32, mma)
        accs = accs + (acc,)

    total = chunks * STEPS
    for early in gl.static_range(AHEAD):
        x_here, f_here, y_here, left = step_pointers(
            chunks * 0 + early, x, x_st, x_sh, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
        )
        left = gl.where(early < total, left, 0)
        _load_step(
            xs[early], ys[early], fs[early], x_here, x_st, f_here, stride, y_here, y_st, left,
            WIDTH, M, V, TILES * PREFIXES, STEP, WARPS,
        )  # fmt: skip
    for number in range(chunks):
        chunk = chunks - 1 - number if REVERSE else chunks * 0 + number
        here = out + chunk.to(gl.int64) * out_step
        if AFTER:
            gl.static_assert(products is None)
        elif products is not None:
            _multiply_and_write_all(
                here, other + chunk.to(gl.int64) * out_step, products + chunk.to(gl.int64) * products_step, number > 0,
                is_z, prefix, row0, last, accs, PREFIXES, WIDTH, ROWS, V, FIRST, mma, out_layout,
            )  # fmt: skip
        else:
            _write_all(here, is_z, prefix, row0, accs, PREFIXES, WIDTH, ROWS, V, out_layout)
        if GATED:
            decay = exp2(gl.load(sums + gl.minimum((chunk + 1) * CHUNK, length) - 1))
            decayed = ()
            for n in gl.static_range(TILES):
                decayed = decayed + (accs[n] * decay,)
            accs = decayed
        for first in range(0, STEPS, STAGES):
            tile = gl.zeros([M, STEP], gl.bfloat16, left_layout)
            for u in gl.static_range(STAGES):
                await_tile(STAGES)
                ahead = number * STEPS + (first + (u + AHEAD))
                x_here, f_here, y_here, left = step_pointers(
                    ahead, x, x_st, x_sh, xt, xt_sh, y, y_st, y_sh, chunks, length, R, STEP, CHUNK, REVERSE
                )
                left = gl.where(ahead < total, left, 0)
                _load_step(
                    xs[(u + AHEAD) % STAGES], ys[(u + AHEAD) % STAGES], fs[(u + AHEAD) % STAGES], x_here, x_st, f_here,
                    stride, y_here, y_st, left, WIDTH, M, V, TILES * PREFIXES, STEP, WARPS,
                )  # fmt: skip
                keys = xs[u].permute([1, 0]).load(left_layout)
                f = _load_factors(fs[u], 0, PREFIXES, STEP, WARPS, left_layout)
                for n in gl.static_range(TILES):
                    # The tensor cores read the registers of a tile until its products are done. So a tile is passed to
                    # the wait for its products, which run while the next tile is computed.
                    before = tile
                    tile = _times(keys, f, PREFIXES, STEP, WARPS, left_layout)
                    if n + 1 < TILES:
                        f = _load_factors(fs[u], n + 1, PREFIXES, STEP, WARPS, left_layout)
                    acc = warpgroup_mma(tile, ys[u], accs[n], is_async=True)
                    acc, before, tile = warpgroup_mma_wait(1, deps=(acc, before, tile))
                    accs = accs[:n] + (acc,) + accs[n + 1 :]
            done = warpgroup_mma_wait(0, deps=accs + (tile,))
            accs = done[:TILES]
    async_copy.wait_group(0)
    if AFTER:
        _write_all(out, is_z, prefix, row0, accs, PREFIXES, WIDTH, ROWS, V, mma)
    if FINAL:  # in the order of the registers: another order takes so many registers that fewer programs fit on an SM
        _write_all(final, is_z, prefix, row0, accs, PREFIXES, WIDTH, ROWS, V, mma)


def programs(key_dim: int, parts: int, tiles: int, tile: int, warps: int) -> int:
    """Returns the number of programs of `state_pass` for one head of one sequence."""
    return first_program(key_dim, parts, tiles, tile, warps, 0)


@gluon.constexpr_function
def first_program(key_dim, parts, tiles, tile, warps, width):
    """Returns the first program of the bands of a width, in parts; for width 0 the number of all programs."""
    size = key_dim // parts
    wider = [w for _, _, w in bands(parts) if w > width]
    own = [size // prefixes_of_program(size, w, tiles, tile, warps) * across(size, w, tile) for w in wider]
    return key_dim // tile + sum(own)


@gluon.constexpr_function
def first_row(key_dim, parts, width):
    """Returns the first row of the bands of a width, in parts; for width 0 the number of all rows."""
    return sum(w for _, _, w in bands(parts) if w > width) * (key_dim // parts) ** 2


@gluon.constexpr_function
def levels(parts):
    """Returns the number of widths of bands."""
    return parts.bit_length()


@gluon.constexpr_function
def across(size, band, tile):
    """Returns the number of programs that share the prefixes of a band, whose last indices they divide."""
    return max(1, band * size // tile)


@gluon.constexpr_function
def prefixes_of_program(size, band, tiles, tile, warps):
    """Returns the number of prefixes of a program of a band."""
    return tiles * max(1, 16 * warps // min(tile, band * size))


@gluon.jit
def _walk_band(
    part, x, x_st, x_sh, xt, xt_sh, stride, y, y_st, y_sh, sums, out, out_step, init, final, other, products,
    products_step, chunks, length,
    K: gl.constexpr, V: gl.constexpr, PARTS: gl.constexpr, BAND: gl.constexpr, R: gl.constexpr,
    TILES: gl.constexpr, WIDTH: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr,
    AFTER: gl.constexpr,
):  # fmt: skip
    """Does `_walk` if program `part` is one of the bands that are BAND parts of K wide."""
    SIZE: gl.constexpr = K // PARTS
    ROWS: gl.constexpr = BAND * SIZE
    ACROSS: gl.constexpr = across(SIZE, BAND, WIDTH)
    PREFIXES: gl.constexpr = prefixes_of_program(SIZE, BAND, TILES, WIDTH, WARPS)
    OWN: gl.constexpr = SIZE // PREFIXES * ACROSS  # programs of a band
    FROM: gl.constexpr = first_program(K, PARTS, TILES, WIDTH, WARPS, BAND)
    STOP: gl.constexpr = first_program(K, PARTS, TILES, WIDTH, WARPS, BAND // 2)
    if (part >= FROM) & (part < STOP):
        band = (part - FROM) // OWN
        within = (part - FROM) % OWN
        # Part i of the prefixes and the first part s of the last indices, as in `rows.bands`: PARTS - i has the binary
        # digit BAND.
        i = band * 0
        s = band * 0
        if BAND < PARTS:
            i = band // BAND * (2 * BAND) + band % BAND + 1
            s = (band // BAND * 2 + 1) * BAND
        prefix = i * SIZE + within // ACROSS * PREFIXES
        slice_start = within % ACROSS * WIDTH
        row0 = first_row(K, PARTS, BAND) + (band - i) * (SIZE * ROWS) + slice_start
        last = s * SIZE + slice_start
        _walk(
            x + last, x_st, x_sh, xt + prefix.to(gl.int64) * stride, xt_sh, stride, y, y_st, y_sh, sums, out, out_step,
            init, final, other, products, products_step, False, prefix, row0, last, chunks, length,
            ROWS // ACROSS, ROWS, V, SIZE, R, TILES, STEP, CHUNK, STAGES, WARPS, GATED, REVERSE, INIT, FINAL, AFTER,
        )  # fmt: skip


@gluon.jit
def state_pass(
    x, x_st, x_sh, xt, stride, y, y_st, y_sh, sums, s_out, z_out, s_init, z_init, s_final, z_final,
    s_forward, z_forward, products, starts, chunk_starts, T, tokens, row_states, G,
    K: gl.constexpr, V: gl.constexpr, PARTS: gl.constexpr, R: gl.constexpr,
    TILES: gl.constexpr, WIDTH: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, REVERSE: gl.constexpr, INIT: gl.constexpr, FINAL: gl.constexpr, AFTER: gl.constexpr,
    PACKED: gl.constexpr, ALIGN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Computes the states. Grid: parts of the state, key/value heads, sequences. A part is a group of prefixes with
    WIDTH of the last indices each, or with all last indices of a band that is narrower. The first parts are those of Z,
    whose values are the keys (so K = V); then the bands of rows follow (`rows.bands`). s_forward, z_forward and
    products are those of `states.state_pass`, as are row_states and AFTER, with which Z is left out."""
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
        chunk0 = n.to(gl.int64) * row_states
    chunks = gl.cdiv(length, CHUNK)
    SLICES: gl.constexpr = K // WIDTH
    SIZE: gl.constexpr = K // PARTS
    rows: gl.constexpr = first_row(K, PARTS, 0)
    offset = gl.multiple_of((start + (ALIGN - 1)) // ALIGN * ALIGN + n.to(gl.int64) * ALIGN, ALIGN)
    xt_sh = stride * (K + 1)
    part = gl.program_id(0)
    x += start * x_st + g * R * x_sh
    y += start * y_st + g * R * y_sh
    xt += g * R * xt_sh + offset
    sums += g * tokens + start
    end = n.to(gl.int64) * G + g
    if products is not None:
        s_forward += (chunk0 * G + g) * (rows * V)
        z_forward += (chunk0 * G + g) * (K * K)
        products += (chunk0 * G + g) * gl.num_programs(0) + part
    products_step = G * gl.num_programs(0)
    if not AFTER:
        if part < SLICES:
            last = part * WIDTH
            _walk(
                x + last, x_st, x_sh, xt + K * stride.to(gl.int64), xt_sh, stride, x, x_st, x_sh, sums,
                z_out + (chunk0 * G + g) * (K * K), G * K * K, z_init + end * (K * K), z_final + end * (K * K),
                z_forward, products, products_step, True, part * 0, last, last, chunks, length,
                WIDTH, K, V, SIZE, R, 1, STEP, CHUNK, STAGES, num_warps, GATED, REVERSE, INIT, FINAL, AFTER,
            )  # fmt: skip
    for level in gl.static_range(levels(PARTS)):
        _walk_band(
            part, x, x_st, x_sh, xt, xt_sh, stride, y, y_st, y_sh, sums, s_out + (chunk0 * G + g) * (rows * V),
            G * rows * V, s_init + end * (rows * V), s_final + end * (rows * V), s_forward, products, products_step,
            chunks, length, K, V, PARTS, PARTS >> level, R, TILES, WIDTH, STEP, CHUNK, STAGES, num_warps, GATED,
            REVERSE, INIT, FINAL, AFTER,
        )  # fmt: skip
