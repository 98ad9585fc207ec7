"""Products with the tiles of a state that pass through a ring of buffers in shared memory, for the passes for Hopper.

The compiler inserts a barrier before a copy into a buffer that another thread may still read. Here every buffer is an
allocation of its own, and loops are unrolled over the buffers. So the compiler knows the buffer of every copy and every
product, and inserts no barrier. Unrolled loops take registers, and the passes of `state_parts.py` have none left. They
and the loops over levels of rows have all buffers in one allocation (`ring_in_one`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.primitives import buffer, buffers, column, copy_rows, copy_state


@gluon.constexpr_function
def copies_ahead(stages):
    """Returns how many iterations before its products the copy of a tile is started. With more than three buffers, the
    products of the previous tile may still run when a copy is started."""
    return stages - 2 if stages > 3 else stages - 1


@gluon.jit
def ring(STAGES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Returns a tuple of STAGES buffers [ROWS, WIDTH]."""
    tiles = ()
    for _ in gl.static_range(STAGES):
        tiles = tiles + (buffer(ROWS, WIDTH),)
    return tiles


@gluon.jit
def copy_tile(
    to, state, i, STEPS: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copy of tile i of STEPS, TILE rows of V columns; nothing is copied if there is no such tile.

    If HALF is not 0, the state has halves (`rows.py`), and the tile has the rows of every last index, ROWS of them, of
    TILE / ROWS prefixes.
    """
    if HALF > 0:
        copy_state(to, state, i, STEPS, TILE, ROWS, V, HALF, WARPS)
    else:
        copy_rows(to, state + i * (TILE * V), V, gl.where(i < STEPS, TILE, 0), TILE, V, WARPS)
    async_copy.commit_group()


@gluon.jit
def await_tile(STAGES: gl.constexpr):
    """Waits for the copy of a tile that was started `copies_ahead` iterations ago."""
    async_copy.wait_group(copies_ahead(STAGES) - 1)
    fence_async_shared()


@gluon.jit
def first_tiles(
    tiles, state, STEPS: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the first tiles, and waits for the first one and for all copies before."""
    for early in gl.static_range(copies_ahead(len(tiles))):
        copy_tile(tiles[early], state, gl.to_tensor(early), STEPS, ROWS, TILE, V, HALF, WARPS)
    await_tile(len(tiles))


@gluon.jit
def ring_in_one(STAGES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Returns one buffer [STAGES, ROWS, WIDTH], for at most three stages and loops that are not unrolled."""
    gl.static_assert(STAGES <= 3)
    return buffers(STAGES, ROWS, WIDTH)


@gluon.jit
def first_in_one(tiles, state, TILE: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Starts the copies of the first tiles into `ring_in_one`; there are at least so many."""
    for early in gl.static_range(copies_ahead(STAGES)):
        copy_rows(tiles.index(early), state + early * TILE * V, V, TILE, TILE, V, WARPS)
        async_copy.commit_group()


@gluon.jit
def next_in_one(
    tiles, state, i, STEPS: gl.constexpr, TILE: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr
):
    """Starts the copy of the tile that is used `copies_ahead` iterations after tile i."""
    ahead = i + copies_ahead(STAGES)
    # Not by `copy_tile`, whose order of operations changes the machine code of the key pass for p = 3, K = 64.
    left = gl.where(ahead < STEPS, TILE, 0)
    copy_rows(tiles.index(ahead % STAGES), state + ahead * (TILE * V), V, left, TILE, V, WARPS)
    async_copy.commit_group()


@gluon.jit
def tile_in_one(tiles, i, STAGES: gl.constexpr):
    """Returns tile i after its copy."""
    await_tile(STAGES)
    return tiles.index(i % STAGES)


@gluon.jit
def add_products(
    tiles, state, base, columns, acc,
    START: gl.constexpr, STOP: gl.constexpr, STEPS: gl.constexpr, PREFIX: gl.constexpr, ROWS: gl.constexpr,
    TILE: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns acc plus the products with the tiles START to STOP - 1 of STEPS. The left operand of a prefix, from
    PREFIX on, is `base` times its entry of `columns`. A prefix has ROWS rows. The right operand is the tile, or if HALF
    is not 0 (`copy_tile`), the transposed tile."""
    STAGES: gl.constexpr = len(tiles)
    LAST: gl.constexpr = STOP - (STOP - START) % STAGES
    for i in range(START, LAST, STAGES):
        acc = _add_some(
            tiles, state, base, columns, acc, i, PREFIX + (i - START) * (TILE // ROWS), START % STAGES, STAGES, STEPS,
            ROWS, TILE, V, HALF, layout, WARPS,
        )  # fmt: skip
    if LAST < STOP:
        acc = _add_some(
            tiles, state, base, columns, acc, LAST, PREFIX + (LAST - START) * (TILE // ROWS), LAST % STAGES,
            STOP - LAST, STEPS, ROWS, TILE, V, HALF, layout, WARPS,
        )  # fmt: skip
    return acc


@gluon.jit
def _add_some(
    tiles, state, base, columns, acc, first, prefix,
    STAGE: gl.constexpr, COUNT: gl.constexpr, STEPS: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr,
    V: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns acc plus the products with COUNT tiles from `first` on; the first one is in buffer STAGE.

    An operand is computed in registers while the products of the previous one run. It is passed to the wait for its own
    products, because the tensor cores read its registers until then.
    """
    STAGES: gl.constexpr = len(tiles)
    AHEAD: gl.constexpr = copies_ahead(STAGES)
    PER: gl.constexpr = TILE // ROWS
    phi = base
    f = column(columns, prefix, layout)
    for n in gl.static_range(COUNT):
        await_tile(STAGES)
        copy_tile(tiles[(STAGE + n + AHEAD) % STAGES], state, first + (n + AHEAD), STEPS, ROWS, TILE, V, HALF, WARPS)
        for u in gl.static_range(PER):
            before = phi
            phi = base * f
            if n * PER + u + 1 < COUNT * PER:
                f = column(columns, prefix + (n * PER + u + 1), layout)
            right = tiles[(STAGE + n) % STAGES].slice(u * ROWS, ROWS, 0)
            if HALF > 0:
                right = right.permute([1, 0])
            acc = warpgroup_mma(phi, right, acc, is_async=True)
            acc, before, phi = warpgroup_mma_wait(running(u, PER, n, COUNT, STAGES), deps=(acc, before, phi))
    return acc


@gluon.constexpr_function
def running(u, per, n, count, stages):
    """Returns how many products may still run after those of prefix u of tile n. The products of a tile must be done
    before the copy into its buffer is started."""
    return 1 if u + 1 < per or (n + 1 < count and stages > 3) else 0
