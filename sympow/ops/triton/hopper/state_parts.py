"""The parts of states in quarters (`rows.py`) in the gradients of p = 2 on Hopper, in Gluon.

With U = dy S^T, [tokens, rows], a row (a, j) adds x_a U to the gradient of x_j. If j is in a later quarter than a, it
also adds x_j U to the gradient of x_a, because the row (j, a) would be equal and is left out. So each tile, of K rows,
is read and multiplied once. Two multiply-adds for each entry of U remain, in float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.compat import barrier, reinterpret
from sympow.ops.triton.hopper.primitives import buffer, column, copy_rows, stage_columns
from sympow.ops.triton.hopper.ring import await_tile, first_in_one, next_in_one, ring_in_one, tile_in_one


@gluon.constexpr_function
def by_column(block, prefixes, width, warps):
    """Returns the layout [block, prefixes, width] of an accumulator [block, prefixes width] of the tensor cores."""

    def place(row, column):
        return [row, column // width, column % width]

    def powers(start, stop):
        return [start << i for i in range((stop // start).bit_length() - 1)]

    columns = [place(0, c) for c in powers(8, prefixes * width)]
    repeats = [place(r, 0) for r in powers(16 * warps, block)]
    registers = [place(0, 1), place(8, 0), *columns, *repeats]
    lanes = [place(0, 2), place(0, 4), place(1, 0), place(2, 0), place(4, 0)]
    split = [place(r, 0) for r in powers(16, 16 * warps)]
    return gl.DistributedLinearLayout(registers, lanes, split, [], [block, prefixes, width])


@gluon.jit
def _by_prefix(buffer, i, COUNT: gl.constexpr, K: gl.constexpr, BLOCK: gl.constexpr):
    """Returns the i-th COUNT rows of a buffer [K, 1, BLOCK], which has a row for each prefix, with tokens first:
    [BLOCK, COUNT]."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return reinterpret(buffer, buffer.dtype, [K // COUNT, COUNT, BLOCK], flat).index(i).permute([1, 0])


@gluon.jit
def _fold(
    acc, u, factors, x, others, i,
    COUNT: gl.constexpr, LAST: gl.constexpr, SUM: gl.constexpr,
    K: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns acc [BLOCK, K] plus the part of u [BLOCK, K], the product with COUNT prefixes, the i-th such group, each
    with K / COUNT last indices from LAST on. `factors` [BLOCK, COUNT] in shared memory are the entries of the prefixes.
    With SUM, the part of u in the gradient of the prefixes themselves, by the entries x of the last indices, is added
    to their rows of `others`."""
    WIDTH: gl.constexpr = K // COUNT
    if COUNT == 1:
        acc += u * factors.load(layout).to(gl.float32)
        if SUM:
            own = gl.sum(u * x, 1).expand_dims(1)
            _by_prefix(others, i, 1, K, BLOCK).store(own)
    else:
        view: gl.constexpr = by_column(BLOCK, COUNT, WIDTH, WARPS)
        u = gl.convert_layout(u.reshape([BLOCK, COUNT, WIDTH]), view, assert_trivial=True)
        f = factors.load(gl.SliceLayout(2, view)).to(gl.float32)
        acc = _add(acc, gl.sum(u * f.expand_dims(2), 1), LAST, K, BLOCK, layout, WARPS)
        if SUM:
            own = gl.sum(u * x.expand_dims(1), 2)
            _by_prefix(others, i, COUNT, K, BLOCK).store(own)
    return acc


@gluon.jit
def _add(
    acc, part,
    LAST: gl.constexpr, K: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns acc [BLOCK, K] plus part [BLOCK, WIDTH] in the columns from LAST on; the columns of a register are
    constants."""
    WIDTH: gl.constexpr = part.shape[1]
    view: gl.constexpr = by_column(BLOCK, K // WIDTH, WIDTH, WARPS)
    wide, _ = gl.broadcast(part.expand_dims(1), gl.zeros([BLOCK, K // WIDTH, WIDTH], gl.float32, view))
    wide = gl.convert_layout(wide.reshape([BLOCK, K]), layout, assert_trivial=True)
    column = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    return gl.where((column >= LAST) & (column < LAST + WIDTH), acc + wide, acc)


@gluon.jit
def _add_others(acc, others, K: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Returns acc plus gradients of the prefixes of the first three quarters that come through their last indices."""
    column = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    return gl.where(column < 3 * K // 4, acc + _by_prefix(others, 0, K, K, BLOCK).load(layout), acc)


@gluon.jit
def _above(x, FROM: gl.constexpr, axis_layout: gl.constexpr):
    """Returns x [BLOCK, WIDTH] in float32, with zeros before column FROM."""
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, axis_layout))[None, :]
    return gl.where(column >= FROM, x.to(gl.float32), 0.0)


@gluon.jit
def _query_band(
    tiles, state, columns, dy_s, x, others, acc, zero,
    START: gl.constexpr, STOP: gl.constexpr, PREFIX: gl.constexpr, COUNT: gl.constexpr, LAST: gl.constexpr,
    SUM: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    layout: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Adds the tiles START to STOP - 1, of COUNT prefixes each, from PREFIX on, with last indices from LAST on. `zero`
    is 0, which ptxas does not know, so that it does not unroll the loop."""
    for i in range(START, STOP + zero):
        tile = tile_in_one(tiles, i, STAGES)
        zeros = gl.zeros([BLOCK, K], gl.float32, layout)
        u = warpgroup_mma(dy_s, tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
        next_in_one(tiles, state, i, 5 * K // 8, K, V, STAGES, WARPS)
        u = warpgroup_mma_wait(0, deps=(u,))
        group = PREFIX // COUNT + (i - START)
        factors = _by_prefix(columns, group, COUNT, K, BLOCK)
        acc = _fold(acc, u, factors, x, others, group, COUNT, LAST, SUM, K, BLOCK, layout, WARPS)
    return acc


@gluon.jit
def query_states(
    q, q_st, left, state, z, dy_s, d,
    K: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, NORMALIZE: gl.constexpr,
    layout: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns the gradient of the `left` queries at q through the state and its normalizer's z, [BLOCK, K]. dy_s
    [BLOCK, V] in shared memory, whose copy was started, are the gradients of their outputs; d [BLOCK] is their part in
    that of the normalizer."""
    QUARTER: gl.constexpr = K // 4
    view: gl.constexpr = by_column(BLOCK, 2, K // 2, WARPS)
    queries_s = buffer(BLOCK, K)
    tiles = ring_in_one(STAGES, K, V)
    copy_rows(queries_s, q, q_st, left, BLOCK, K, WARPS)
    if NORMALIZE:  # Z reuses the memory of the tile that is copied last
        copy_rows(tiles.index(STAGES - 1), z, K, K, K, K, WARPS)
    first_in_one(tiles, state, K, V, STAGES, WARPS)
    await_tile(STAGES)
    columns = stage_columns(queries_s.load(gl.DotOperandLayout(0, layout, 2)), K, BLOCK)
    acc = gl.zeros([BLOCK, K], gl.float32, layout)
    if NORMALIZE:
        inner = warpgroup_mma(queries_s, tiles.index(STAGES - 1), acc, use_acc=False)
        acc -= inner * d[:, None]
    x = _above(queries_s.load(layout), QUARTER, layout)
    # Sums reuse the memory of the queries.
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    others = gl.allocate_shared_memory(gl.float32, [K, 1, BLOCK], flat)
    zero = gl.minimum(left, 0)
    acc = _query_band(
        tiles, state, columns, dy_s, x, others, acc, zero, 0, QUARTER, 0, 1, 0, True, K, V, BLOCK, STAGES, layout, WARPS
    )
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, gl.SliceLayout(1, view)))
    upper_column = K // 2 + gl.arange(0, K // 2, gl.SliceLayout(0, gl.SliceLayout(1, view)))
    upper = gl.load(q + (row[:, None] * q_st + upper_column[None, :]), mask=(row < left)[:, None], other=0.0)
    for half in gl.static_range(2):
        acc = _query_band(
            tiles, state, columns, dy_s, _above(upper, half * QUARTER, gl.SliceLayout(1, view)), others, acc, zero,
            (2 + half) * QUARTER // 2, (3 + half) * QUARTER // 2, (1 + half) * QUARTER, 2, K // 2, True, K, V, BLOCK,
            STAGES, layout, WARPS,
        )  # fmt: skip
    for square in gl.static_range(2):
        acc = _query_band(
            tiles, state, columns, dy_s, x, others, acc, zero, (8 + square) * QUARTER // 4, (9 + square) * QUARTER // 4,
            (1 + 2 * square) * QUARTER, 4, (1 + 2 * square) * QUARTER, False, K, V, BLOCK, STAGES, layout, WARPS,
        )  # fmt: skip
    async_copy.wait_group(0)
    barrier()
    return _add_others(acc, others, K, BLOCK, layout)


@gluon.jit
def _values_piece(
    keys_s, tile, f, dvalues, COLUMN: gl.constexpr, ROW: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr
):
    """Starts the product of WIDTH entries of keys, from COLUMN on, times the entry f of a prefix, with the rows from
    ROW on."""
    phi = keys_s.slice(COLUMN, WIDTH, 1).load(layout) * f
    return warpgroup_mma(phi, tile.slice(ROW, WIDTH, 0), dvalues, is_async=True)


@gluon.jit
def _key_band(
    tiles, state, columns, keys_s, values_s, others, dkeys, dvalues,
    START: gl.constexpr, STOP: gl.constexpr, PREFIX: gl.constexpr, COUNT: gl.constexpr, LAST: gl.constexpr,
    SAME: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    layout: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Does the same as `_query_band`, and adds the gradients of values. The first SAME of the last indices are in the
    quarter of the prefix; the others count for two orderings."""
    WIDTH: gl.constexpr = K // COUNT
    QUARTER: gl.constexpr = K // 4
    REST: gl.constexpr = WIDTH - SAME
    SPLIT: gl.constexpr = QUARTER if REST == 3 * QUARTER else 0  # the widths of pieces are powers of two
    PIECES: gl.constexpr = (SAME > 0) + (SPLIT > 0) + (REST > 0)
    left_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    x_layout: gl.constexpr = layout if COUNT == 1 else gl.SliceLayout(1, by_column(BLOCK, COUNT, WIDTH, WARPS))
    for i in range(START, STOP):
        tile = tile_in_one(tiles, i, STAGES)
        group = PREFIX // COUNT + (i - START)
        zeros = gl.zeros([BLOCK, K], gl.float32, layout)
        u = warpgroup_mma(values_s, tile.permute([1, 0]), zeros, use_acc=False, is_async=True)
        for n in gl.static_range(COUNT):
            f = column(columns, group * COUNT + n, left_layout)
            if SAME > 0:
                dvalues = _values_piece(keys_s, tile, f, dvalues, LAST, n * WIDTH, SAME, left_layout)
            if SPLIT > 0:
                dvalues = _values_piece(keys_s, tile, f + f, dvalues, LAST + SAME, n * WIDTH + SAME, SPLIT, left_layout)
            if REST > 0:
                dvalues = _values_piece(
                    keys_s, tile, f + f, dvalues, LAST + SAME + SPLIT, n * WIDTH + SAME + SPLIT, REST - SPLIT,
                    left_layout,
                )  # fmt: skip
        next_in_one(tiles, state, i, 5 * K // 8, K, V, STAGES, WARPS)
        u = warpgroup_mma_wait(COUNT * PIECES, deps=(u,))
        x = _above(keys_s.slice(LAST, WIDTH, 1).load(x_layout), SAME, x_layout)
        factors = _by_prefix(columns, group, COUNT, K, BLOCK)
        dkeys = _fold(dkeys, u, factors, x, others, group, COUNT, LAST, REST > 0, K, BLOCK, layout, WARPS)
        dvalues = warpgroup_mma_wait(0, deps=(dvalues,))
    return dkeys, dvalues


@gluon.jit
def key_states(
    state, z, keys_s, values_s,
    K: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, Z: gl.constexpr,
    layout: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns the gradients of keys [BLOCK, K] and values [BLOCK, V], which are in shared memory (their copies were
    started), through the gradients of the state and of its normalizer's z."""
    QUARTER: gl.constexpr = K // 4
    tiles = ring_in_one(STAGES, K, V)
    if Z:  # reuses the memory of the tile that is copied last
        copy_rows(tiles.index(STAGES - 1), z, K, K, K, K, WARPS)
    first_in_one(tiles, state, K, V, STAGES, WARPS)
    await_tile(STAGES)
    columns = stage_columns(keys_s.load(gl.DotOperandLayout(0, layout, 2)), K, BLOCK)
    dkeys = gl.zeros([BLOCK, K], gl.float32, layout)
    dvalues = gl.zeros([BLOCK, V], gl.float32, layout)
    if Z:
        dkeys = warpgroup_mma(keys_s, tiles.index(STAGES - 1), dkeys)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    others = gl.allocate_shared_memory(gl.float32, [K, 1, BLOCK], flat)
    dkeys, dvalues = _key_band(
        tiles, state, columns, keys_s, values_s, others, dkeys, dvalues, 0, QUARTER, 0, 1, 0, QUARTER, K, V, BLOCK,
        STAGES, layout, WARPS,
    )  # fmt: skip
    for half in gl.static_range(2):
        dkeys, dvalues = _key_band(
            tiles, state, columns, keys_s, values_s, others, dkeys, dvalues, (2 + half) * QUARTER // 2,
            (3 + half) * QUARTER // 2, (1 + half) * QUARTER, 2, K // 2, half * QUARTER, K, V, BLOCK, STAGES, layout,
            WARPS,
        )  # fmt: skip
    for square in gl.static_range(2):
        dkeys, dvalues = _key_band(
            tiles, state, columns, keys_s, values_s, others, dkeys, dvalues, (8 + square) * QUARTER // 4,
            (9 + square) * QUARTER // 4, (1 + 2 * square) * QUARTER, 4, (1 + 2 * square) * QUARTER, QUARTER, K, V,
            BLOCK, STAGES, layout, WARPS,
        )  # fmt: skip
    async_copy.wait_group(0)
    barrier()
    return _add_others(dkeys, others, K, BLOCK, layout), dvalues
