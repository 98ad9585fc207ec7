"""The output pass for Hopper, in Gluon. It computes the same as `output.output_pass`, with explicit layouts and copies.

Tiles of the state are copied through shared memory. The rows of a prefix are the queries times p - 1 of their own
columns. They are computed in registers while the previous product runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.compat import barrier, reinterpret
from sympow.ops.triton.hopper.primitives import (
    assign,
    await_last,
    buffer,
    copy_rows,
    exp2,
    first_keys,
    reach_tile,
    stage_columns,
    store_rows,
    sum_before,
)
from sympow.ops.triton.hopper.ring import (
    add_products,
    await_tile,
    first_in_one,
    first_tiles,
    next_in_one,
    ring,
    ring_in_one,
    tile_in_one,
)
from sympow.ops.triton.hopper.states import bands, first_row


@gluon.constexpr_function
def in_groups(block, depth, groups, warps):
    """Returns the layout [block, 2, groups, depth / groups / 2] of a left operand [block, depth] of tensor cores."""
    run = depth // groups // 2
    columns = [[0, 0, 0, 1 << i] for i in range(run.bit_length() - 1)]
    columns += [[0, 0, 1 << i, 0] for i in range(groups.bit_length() - 1)]
    columns += [[0, 1, 0, 0]]
    repeats = [[16 * warps << i, 0, 0, 0] for i in range((block // (16 * warps)).bit_length() - 1)]
    registers = [columns[0], [8, 0, 0, 0], *columns[3:], *repeats]
    lanes = [columns[1], columns[2], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    split = [[16 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, split, [], [block, 2, groups, run])


@gluon.constexpr_function
def of_last_indices(block, depth, groups, warps):
    """Returns `in_groups` without the groups, with its halves side by side: [block, depth / groups]."""
    whole = in_groups(block, depth, groups, warps)
    registers, lanes, split = (
        [[row, half * (depth // groups // 2) + column] for row, half, _, column in bases]
        for bases in (whole.reg_bases, whole.lane_bases, whole.warp_bases)
    )
    return gl.DistributedLinearLayout(registers, lanes, split, [], [block, depth // groups])


@gluon.constexpr_function
def before_level(levels, level):
    """Returns the rows, groups and weights of the levels before."""
    rows = sum(groups * max(16, width) for groups, width in levels[:level])
    weights = sum(2 * groups * max(1, 16 // width) for groups, width in levels[:level])
    return rows, sum(groups for groups, _ in levels[:level]), weights


@gluon.jit
def stage_pairs(columns, K: gl.constexpr, SKIP: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Writes the products of two entries of each token, without the first SKIP entries, by columns: (0, 0), (0, 1), (1,
    1), (0, 2) and so on."""
    RUN: gl.constexpr = BLOCK // (32 * WARPS) if BLOCK > 32 * WARPS else 1
    OWN: gl.constexpr = K - SKIP
    layout: gl.constexpr = gl.BlockedLayout([1, RUN], [1, 32], [1, WARPS], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pairs = gl.allocate_shared_memory(gl.bfloat16, [OWN * (OWN + 1) // 2, 1, BLOCK], flat)
    for j in gl.static_range(OWN):
        x = columns.index(SKIP + j).load(layout)
        if K <= 16:
            for i in gl.static_range(j + 1):
                pairs.index(j * (j + 1) // 2 + i).store(columns.index(i).load(layout) * x)
        else:  # unrolled, the loop would be long
            for i in range(j + 1):
                pairs.index(j * (j + 1) // 2 + i).store(columns.index(SKIP + i).load(layout) * x)
    return pairs


@gluon.jit
def from_level(
    acc, columns, products, tiles, state, entries, weights, before: gl.constexpr, steps: gl.constexpr,
    GROUPS: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, left_layout: gl.constexpr,
):  # fmt: skip
    """Returns acc plus the products of the queries' rows with those of the state, for one level (`levels.Levels`).
    `before` has the rows, groups and weights of the levels before, and `steps` the tiles of all levels. A prefix is k
    of `columns` and u of `products`, which are both in shared memory by columns."""
    GROUP: gl.constexpr = 16 // WIDTH if WIDTH < 16 else 1
    DEPTH: gl.constexpr = GROUP * WIDTH
    EACH: gl.constexpr = TILE // DEPTH
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = in_groups(BLOCK, DEPTH, GROUP, WARPS)
    by_half: gl.constexpr = gl.SliceLayout(3, layout)
    by_prefix: gl.constexpr = gl.SliceLayout(1, by_half)
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(0, by_half)))[:, None]
    member = gl.arange(0, GROUP, gl.SliceLayout(0, gl.SliceLayout(0, by_half)))[None, :]
    grouped = reinterpret(products, gl.bfloat16, [products.shape[0] // GROUP, GROUP, BLOCK], flat)
    last = reinterpret(columns, gl.bfloat16, [K, BLOCK], flat).slice(K - WIDTH, WIDTH, 0).permute([1, 0])
    base = last.load(of_last_indices(BLOCK, DEPTH, GROUP, WARPS)).reshape([BLOCK, 2, WIDTH // 2])
    base = gl.convert_layout(base, gl.SliceLayout(2, layout), assert_trivial=True).expand_dims(2)
    for i in range(GROUPS // EACH):
        number = before[0] // TILE + i
        tile = tile_in_one(tiles, number, STAGES)
        for n in gl.static_range(EACH):
            at = i * EACH + n
            entry = gl.load(entries + before[1] + at)
            w = gl.load(weights + before[2] + at * (2 * GROUP) + (member * 2 + half))
            f = grouped.index(entry & 0xFFFF).permute([1, 0]).load(by_prefix)
            f *= columns.index(entry >> 16).permute([1, 0]).load(by_prefix)
            f = f.expand_dims(1) * w.expand_dims(0)
            phi = (base * f.expand_dims(3)).reshape([BLOCK, DEPTH])
            phi = gl.convert_layout(phi, left_layout, assert_trivial=True)
            acc = warpgroup_mma(phi, tile.slice(n * DEPTH, DEPTH, 0), acc, is_async=True)
        next_in_one(tiles, state, number, steps, TILE, V, STAGES, WARPS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc


@gluon.jit
def _row_parts(x, BLOCK: gl.constexpr, WIDTH: gl.constexpr):
    """Returns sums [BLOCK, 4] of x [BLOCK, WIDTH] in a product's layout: those of the columns that one thread has."""
    return gl.sum(gl.sum(x.reshape([BLOCK, WIDTH // 8, 4, 2]), 3), 1)


@gluon.constexpr_function
def joined_bands(parts):
    """Returns (first, stop, s, w) of the bands of rows (`rows.bands`), where bands that have all of their last indices
    in later parts are joined: prefixes in the parts from `first` to `stop` - 1, last indices in the w parts from s on.
    """
    joined = []
    for i, s, w in bands(parts):
        if joined and i < s and joined[-1][1:] == (i, s, w):
            joined[-1] = (joined[-1][0], i + 1, s, w)
        else:
            joined.append((i, i + 1, s, w))
    return joined


@gluon.constexpr_function
def joined_count(parts):
    """Returns the number of `joined_bands`."""
    return len(joined_bands(parts))


@gluon.constexpr_function
def joined(parts, n, field):
    """Returns a number of the n-th of `joined_bands`."""
    return joined_bands(parts)[n][field]


@gluon.constexpr_function
def first_tile(parts, n, size, tile):
    """Returns the first tile of the n-th of `joined_bands`."""
    return sum((stop - first) * size * w * size for first, stop, _, w in joined_bands(parts)[:n]) // tile


@gluon.jit
def _renamed(x):
    """Returns x in new registers, by an instruction that LLVM does not look into."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _through_band(
    tiles, state, queries_s, columns, acc,
    FIRST: gl.constexpr, STOP: gl.constexpr, PART: gl.constexpr, WIDTH: gl.constexpr, TILE0: gl.constexpr,
    STEPS: gl.constexpr, SIZE: gl.constexpr, TILE: gl.constexpr, V: gl.constexpr, layout: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Returns acc plus the queries' products with a band (`joined_bands`), whose rows start at tile TILE0: prefixes in
    the parts from FIRST to STOP - 1, last indices in WIDTH parts from PART on, where a part has SIZE channels."""
    ROWS: gl.constexpr = WIDTH * SIZE
    base = queries_s.slice(PART * SIZE, ROWS, 1).load(layout)
    # A row whose last index is in a later part than its prefix counts for both orderings.
    if PART > FIRST:
        base += base
    elif WIDTH > 1:
        last = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
        base *= gl.where(last >= SIZE, 2, 1).to(gl.bfloat16)[None, :]
    COUNT: gl.constexpr = (STOP - FIRST) * SIZE * ROWS // TILE
    return add_products(
        tiles, state, base, columns, acc, TILE0, TILE0 + COUNT, STEPS, FIRST * SIZE, ROWS, TILE, V, 0, layout, WARPS
    )


@gluon.jit
def _through_rows(
    acc, total, queries_s, state, z,
    K: gl.constexpr, V: gl.constexpr, PARTS: gl.constexpr, BLOCK: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, NORMALIZE: gl.constexpr, mma: gl.constexpr, score_mma: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns acc plus the queries' products with a state of p = 2 (`rows.py`), and with NORMALIZE, total plus those
    with z, [BLOCK]."""
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    z_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    SIZE: gl.constexpr = K // PARTS
    STEPS: gl.constexpr = first_row(K, PARTS, 0) // TILE
    tiles = ring(STAGES, TILE, V)
    if NORMALIZE:  # K = V; Z reuses the memory of the tile that is copied last
        copy_rows(tiles[STAGES - 1], z, K, K, TILE, K, WARPS)
    first_tiles(tiles, state, STEPS, K, TILE, V, 0, WARPS)
    if NORMALIZE:
        inner = warpgroup_mma(queries_s, tiles[STAGES - 1].slice(0, K, 0), gl.zeros([BLOCK, K], gl.float32, z_mma))
        inner *= queries_s.load(z_mma).to(gl.float32)
        total = gl.convert_layout(gl.sum(inner, 1), gl.SliceLayout(1, score_mma))
    columns = stage_columns(queries_s.load(layout), K, BLOCK)
    for n in gl.static_range(joined_count(PARTS)):
        acc = _through_band(
            tiles, state, queries_s, columns, acc, joined(PARTS, n, 0), joined(PARTS, n, 1), joined(PARTS, n, 2),
            joined(PARTS, n, 3), first_tile(PARTS, n, SIZE, TILE), STEPS, SIZE, TILE, V, layout, WARPS,
        )  # fmt: skip
        if PARTS > 4:
            # In a row of hundreds of products, LLVM copies the sums once, even where products still write them. So they
            # get new registers after each band, where no product runs.
            acc = _renamed(acc)
    for n in gl.static_range(STAGES):
        tiles[n]._keep_alive()
    return acc, total


@gluon.jit
def output_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, sums, s, z, out, norm, prefixes, weights,
    reach, starts, chunk_starts, blocks, T, tokens, row_states, spread, H, G, out_scale, eps,
    K: gl.constexpr, V: gl.constexpr, P: gl.constexpr, PARTS: gl.constexpr, LEVELS: gl.constexpr,
    SKIP: gl.constexpr, R: gl.constexpr,
    BLOCK: gl.constexpr, KEYS: gl.constexpr, CHUNK: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, NORMALIZE: gl.constexpr, STATES: gl.constexpr, INIT: gl.constexpr, PACKED: gl.constexpr,
    OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Computes the output. `prefixes` and `weights` are those of plain rows, or the entries and weights of LEVELS,
    which has groups and width of each level (`levels.Levels`); the channels of levels start at SKIP. row_states: as in
    `output.output_pass`."""
    n, start, length, first, h = assign(starts, blocks, T, H, spread, BLOCK, CHUNK, PACKED, False)
    if PACKED:
        if first >= length:
            return
    g = h // R
    origin = first * 0
    if CHUNK > 0:
        origin = (first // CHUNK) * CHUNK
    begin = origin
    if reach is not None:
        await_last(OVERLAP)
        begin = gl.load(reach + reach_tile(n, g, first, T, tokens))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, V, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, KEYS, 16])
    rows: gl.constexpr = before_level(LEVELS, len(LEVELS))[0] if len(LEVELS) > 0 else first_row(K, PARTS, 0)

    # Products within the chunk read queries from shared memory. Queries that were kept in registers across a loop gave
    # wrong results (Triton 3.6 to 3.7).
    queries_s = buffer(BLOCK, K)
    copy_rows(queries_s, q + (start + first) * q_st + h * q_sh, q_st, length - first, BLOCK, K, num_warps)
    async_copy.commit_group()
    k += start * k_st + g * k_sh
    v += start * v_st + g * v_sh
    # If the tiles of the state need all shared memory, keys and values reuse it at the end.
    LATE: gl.constexpr = STATES and K > 64
    if not LATE:
        keys_s, values_s = first_keys(k, k_st, v, v_st, begin, length, KEYS, K, V, num_warps)

    acc = gl.zeros([BLOCK, V], gl.float32, mma)
    total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, score_mma))
    if STATES:
        entering = INIT or begin > 0
        if GATED:  # the decay from the state to this block; if it is 0, no row is read
            await_last(OVERLAP)
            kept = exp2(gl.load(sums + g * tokens + start + first - 1, mask=first > begin, other=0.0))
            entering &= kept > 0.0
        if entering:
            if PACKED:
                chunk = gl.load(chunk_starts + n).to(gl.int64) + begin // CHUNK
            else:
                chunk = n.to(gl.int64) * row_states + begin // CHUNK
            state = s + (chunk * G + g) * (rows * V)
            if len(LEVELS) > 0:
                state_s = ring_in_one(STAGES, TILE, V)
                first_in_one(state_s, state, TILE, V, STAGES, num_warps)
                await_tile(STAGES)
                base = queries_s.load(left_layout)
                columns = stage_columns(base, K, BLOCK)
                products = columns
                if P > 3:
                    products = stage_pairs(columns, K, SKIP, BLOCK, num_warps)
                for level in gl.static_range(len(LEVELS)):
                    acc = from_level(
                        acc, columns, products, state_s, state, prefixes, weights, before_level(LEVELS, level),
                        rows // TILE, LEVELS[level][0], LEVELS[level][1], BLOCK, K, V, TILE, STAGES, num_warps,
                        left_layout,
                    )  # fmt: skip
                state_s._keep_alive()
            else:
                acc, total = _through_rows(
                    acc, total, queries_s, state, z + (chunk * G + g) * (K * K), K, V, PARTS, BLOCK, TILE, STAGES,
                    NORMALIZE, mma, score_mma, num_warps,
                )  # fmt: skip
    if LATE:
        async_copy.wait_group(0)
        barrier()
        keys_s, values_s = first_keys(k, k_st, v, v_st, begin, length, KEYS, K, V, num_warps)

    await_last(OVERLAP)
    # Decays are split at the last token before the block: 2**(L_i - L_ref) 2**(L_ref - L_j), where both are at most 1.
    here = sums + (g + G) * tokens + start
    low = here + G * tokens
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    j = gl.arange(0, KEYS, gl.SliceLayout(0, score_mma))
    if GATED:
        high, rest = sum_before(here, low, first, origin)
        own = gl.load(here + row, mask=row < length, other=0.0) - high
        own += gl.load(low + row, mask=row < length, other=0.0) - rest
        if STATES:
            acc *= kept
            total *= kept
        since = exp2(own)
    end = gl.minimum(first + BLOCK, length)
    steps = gl.cdiv(end - begin, KEYS)
    before = (first - begin) // KEYS
    # A step sums the elements of a row that one thread has. Threads are added up at the end.
    parts = _row_parts(gl.zeros([BLOCK, KEYS], gl.float32, score_mma), BLOCK, KEYS)
    if GATED:  # the high part of a tile is loaded a step ahead
        tile_high = gl.load(here + begin)
    for i in range(steps):
        s0 = begin + i * KEYS
        if GATED:
            if i == before:
                acc *= gl.convert_layout(since, gl.SliceLayout(1, mma))[:, None]
                total *= since
                parts *= gl.convert_layout(since, gl.SliceLayout(1, parts.type.layout))[:, None]
            ref = (high - tile_high) + rest
            tile_high = gl.load(here + gl.minimum(s0 + KEYS, length - 1))
            there = gl.load(low + s0 + j, mask=s0 + j < length, other=0.0)
        async_copy.wait_group(1)
        fence_async_shared()
        s1 = s0 + 2 * KEYS
        stage = (i + 2) % 3
        copy_rows(keys_s.index(stage), k + s1.to(gl.int64) * k_st, k_st, end - s1, KEYS, K, num_warps)
        copy_rows(values_s.index(stage), v + s1.to(gl.int64) * v_st, v_st, end - s1, KEYS, V, num_warps)
        async_copy.commit_group()
        scores = gl.zeros([BLOCK, KEYS], gl.float32, score_mma)
        scores = warpgroup_mma(queries_s, keys_s.index(i % 3).permute([1, 0]), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if P == 4:
            weight = scores * scores
            weight *= weight
        else:
            weight = scores
            for _ in gl.static_range(P - 1):
                weight *= scores
        if i < before:
            if GATED:
                weight *= exp2(ref - there)[None, :]
        else:
            if GATED:
                weight *= exp2((own + ref)[:, None] - there[None, :])
            weight = gl.where(row[:, None] >= (s0 + j)[None, :], weight, 0.0)
        if NORMALIZE:
            parts += _row_parts(weight, BLOCK, KEYS)
        weight = gl.convert_layout(weight.to(gl.bfloat16), left_layout)
        acc = warpgroup_mma(weight, values_s.index(i % 3), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    async_copy.wait_group(0)

    acc *= out_scale
    if NORMALIZE:
        total += gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, score_mma))
        total = total * out_scale + eps
        acc *= gl.convert_layout(1.0 / total, gl.SliceLayout(1, mma))[:, None]
        gl.store(norm + h * tokens + start + row, total, mask=row < length)
    store_rows(out, H, h, acc, start, first, length, BLOCK, V, num_warps)
