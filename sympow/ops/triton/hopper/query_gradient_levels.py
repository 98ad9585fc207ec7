"""The gradient of queries for p = 3 and 4 on Hopper, in Gluon.

It equals that of `gradients.query_pass`, with the rows of `levels.Levels`.

The gradient with respect to x_j through a state is p times the sum over prefixes (u, k) of x_u x_k (y S[u, k, j]^T),
where y is the output's gradient or the values. The tensor cores compute it in the steps of `levels.Slopes`. A step
multiplies y x_u with a tile of the state, the rows of some consecutive k and every j, and adds the product to an
accumulator of that width. Only after all u, the accumulator is multiplied with x_k and summed over k. So an operand is
computed once for several prefixes. The rows of a tile are not adjacent in the state; a table has their indices.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sympow.ops.triton.hopper.compat import load_async, reinterpret
from sympow.ops.triton.hopper.primitives import (
    buffer,
    buffers,
    column,
    copy_rows,
    exp2,
    first_keys,
    locate,
    stage_columns,
)
from sympow.ops.triton.hopper.query_gradient import within_chunk


@gluon.constexpr_function
def tile_layout(width, warps):
    """Returns the layout for the copy of a tile of rows, `width` elements each: 16 bytes for each thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def step_count(key_dim, p, group):
    """Returns the number of steps of `levels.Slopes` over all blocks of `group` k."""
    below = range(group, key_dim + 1, group)
    return sum(below) if p == 3 else sum(m * (m + 1) // 2 for m in below)


@gluon.jit
def steps_before(block, P: gl.constexpr, GROUP: gl.constexpr):
    """Returns `step_count` of the first `block` blocks."""
    blocks = block * (block + 1) // 2
    if P == 3:
        return GROUP * blocks
    else:
        return (GROUP * GROUP * (blocks * (2 * block + 1) // 3) + GROUP * blocks) // 2


@gluon.jit
def _tile_rows(rows, turn, TURNS: gl.constexpr, TILE: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr):
    """Returns the indices in the state of the rows of an iteration's tiles; after the last iteration, those of the last
    one."""
    r = gl.arange(0, TILE, gl.SliceLayout(1, tile_layout(V, WARPS)))
    return gl.load(rows + gl.minimum(turn, TURNS - 1) * TILE + r)


@gluon.jit
def _copy_tile(buffer, state, where, V: gl.constexpr, WARPS: gl.constexpr):
    """Starts the copy of the rows `where` of a state."""
    c = gl.arange(0, V, gl.SliceLayout(0, tile_layout(V, WARPS)))
    load_async(buffer, state + (where[:, None] * V + c[None, :]))
    async_copy.commit_group()


@gluon.jit
def _weighted(columns, entry, P: gl.constexpr, layout: gl.constexpr):
    """Returns the product of the entries of each token at u times the weight of the step, a factor [BLOCK, 1]."""
    f = column(columns, entry & 0xFF, layout)
    if P > 3:
        f *= column(columns, entry >> 8 & 0xFF, layout)
    return f * (entry & -65536).to(gl.float32, bitcast=True).to(gl.bfloat16)


@gluon.jit
def through_state(
    state,  # [rows, V]: the state of the chunk and key/value head
    rows,  # int32 [steps, GROUP K]: `Slopes.rows`
    entries,  # int32 [steps]: `Slopes.entries`
    columns,  # shared [K, 1, BLOCK]: the queries or keys by columns
    y_s,  # shared [BLOCK, V]: the other factor of the gradient
    K: gl.constexpr,
    V: gl.constexpr,
    P: gl.constexpr,
    SKIP: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUP: gl.constexpr,  # consecutive k of a step
    PER: gl.constexpr,  # steps in an iteration of the loop
    STAGES: gl.constexpr,  # iterations whose tiles are in shared memory
    layout: gl.constexpr,  # stride of the result
    WARPS: gl.constexpr,
):
    """Returns the gradient of the queries or keys through a state, without the factor p, [BLOCK, K]."""
    WIDE: gl.constexpr = GROUP * K
    TURNS: gl.constexpr = step_count(K - SKIP, P, GROUP) // PER
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDE, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    tiles = buffers(STAGES, PER * WIDE, V)
    for early in gl.static_range(STAGES - 1):
        where = _tile_rows(rows, early, TURNS, PER * WIDE, V, WARPS)
        _copy_tile(tiles.index(early), state, where, V, WARPS)
    where = _tile_rows(rows, STAGES - 1, TURNS, PER * WIDE, V, WARPS)
    by_block = reinterpret(columns, gl.bfloat16, [K // GROUP, GROUP, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    y = y_s.load(left_layout)
    acc = gl.zeros([BLOCK, K], gl.float32, layout)
    first = gl.load(entries)
    second = gl.load(entries + (PER - 1))
    for block in range((K - SKIP) // GROUP):
        wide = gl.zeros([BLOCK, WIDE], gl.float32, mma)
        # Both bounds are computed from `block`. If a count were carried from block to block, Triton 3.6 and 3.7 would
        # replace it by its first value, a constant (the pass `sccp`), and every block would start at 0.
        for i in range(steps_before(block, P, GROUP) // PER, steps_before(block + 1, P, GROUP) // PER):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            tile = tiles.index(i % STAGES)
            # The second operand is computed while the first product runs. The iteration ends when both products are
            # done.
            phi = y * _weighted(columns, first, P, left_layout)
            wide = warpgroup_mma(phi, tile.slice(0, WIDE, 0).permute([1, 0]), wide, is_async=True)
            if PER > 1:
                phi = y * _weighted(columns, second, P, left_layout)
                wide = warpgroup_mma(phi, tile.slice(WIDE, WIDE, 0).permute([1, 0]), wide, is_async=True)
            _copy_tile(tiles.index((i + (STAGES - 1)) % STAGES), state, where, V, WARPS)
            where = _tile_rows(rows, i + STAGES, TURNS, PER * WIDE, V, WARPS)
            after = entries + gl.minimum(i + 1, TURNS - 1) * PER
            first = gl.load(after)
            second = gl.load(after + (PER - 1))
            wide = warpgroup_mma_wait(0, deps=(wide,))
        parts = wide.reshape([BLOCK, GROUP, K])
        x = by_block.index(SKIP // GROUP + block).permute([1, 0]).load(gl.SliceLayout(2, parts.type.layout))
        acc += gl.convert_layout(gl.sum(parts * x.to(gl.float32).expand_dims(2), 1), layout, assert_trivial=True)
    async_copy.wait_group(0)
    tiles._keep_alive()
    return acc


@gluon.jit
def query_pass(
    q,  # [tokens, H, K], bfloat16; its strides by token and head
    q_st,
    q_sh,
    k,  # [tokens, G, K]
    k_st,
    k_sh,
    v,  # [tokens, G, V]
    v_st,
    v_sh,
    dout,  # [tokens, H, V], contiguous
    sums,  # float32 [G, tokens]: log2 of the decay from the chunk's start on
    s,  # [chunks, G, rows, V]: the states before the chunks, rows of `Levels`
    rows,  # int32 [steps, GROUP K]: `Slopes.rows`
    entries,  # int32 [steps]: `Slopes.entries`
    dq,  # [tokens, H, K], contiguous: the result
    dsums,  # float32 [H, tokens]: q . dq; written if GATED
    starts,  # int32 [N + 1]: cu_seqlens; read if PACKED, as the next two
    chunk_starts,  # int32 [N]: the first chunk of each sequence
    blocks,  # int32 [programs, 2]: the sequence of each block, and the index of the block in it
    T,  # tokens of a sequence, unless PACKED
    tokens,  # of all sequences
    H,  # query heads
    G,  # kv heads
    grad_scale,  # of the result
    K: gl.constexpr,
    V: gl.constexpr,
    P: gl.constexpr,
    SKIP: gl.constexpr,  # channels in front that are zero (`levels.Levels`)
    ROWS: gl.constexpr,  # of a state
    GROUP: gl.constexpr,  # k of a step
    PER: gl.constexpr,  # steps in an iteration of its loop
    R: gl.constexpr,  # H / G
    BLOCK: gl.constexpr,  # queries of a program
    KEYS: gl.constexpr,  # of a step within the chunk
    CHUNK: gl.constexpr,  # a multiple of BLOCK
    STAGES: gl.constexpr,  # iterations whose tiles of the state are in shared memory
    GATED: gl.constexpr,
    STATES: gl.constexpr,
    INIT: gl.constexpr,  # whether the state before the first chunk is not zero
    PACKED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes dq and dsums. Grid: blocks of queries, heads."""
    pid = gl.num_programs(0) - 1 - gl.program_id(0)
    n, start, length, first = locate(pid, starts, blocks, T, BLOCK, PACKED)
    if PACKED:
        if first >= length:
            return
    h = gl.program_id(1).to(gl.int64)
    g = h // R
    begin = (first // CHUNK) * CHUNK
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)

    queries_s = buffer(BLOCK, K)
    dy_s = buffer(BLOCK, V)
    copy_rows(queries_s, q + (start + first) * q_st + h * q_sh, q_st, length - first, BLOCK, K, num_warps)
    copy_rows(dy_s, dout + ((start + first) * H + h) * V, H * V, length - first, BLOCK, V, num_warps)
    async_copy.commit_group()
    k += start * k_st + g * k_sh
    v += start * v_st + g * v_sh
    keys_s, values_s = first_keys(k, k_st, v, v_st, begin, length, KEYS, K, V, num_warps)

    acc = gl.zeros([BLOCK, K], gl.float32, mma)
    entering = INIT or begin > 0
    if GATED:  # the decay from the state to this block; if it is 0, no row is read
        kept = exp2(gl.load(sums + g * tokens + start + first - 1, mask=first > begin, other=0.0))
        entering &= kept > 0.0
    if STATES:
        if entering:
            if PACKED:
                chunk = gl.load(chunk_starts + n).to(gl.int64) + begin // CHUNK
            else:
                chunk = n.to(gl.int64) * gl.cdiv(T, CHUNK) + begin // CHUNK
            async_copy.wait_group(2)  # queries and output gradients have arrived
            columns = stage_columns(queries_s.load(left_layout), K, BLOCK)
            state = s + (chunk * G + g) * (ROWS * V)
            acc = through_state(
                state, rows, entries, columns, dy_s, K, V, P, SKIP, BLOCK, GROUP, PER, STAGES, mma, num_warps
            )

    if GATED:
        acc *= kept
    acc = within_chunk(
        acc, queries_s, dy_s, keys_s, values_s, None, k, k_st, v, v_st, sums, g, G, tokens, start, length, first, begin,
        begin, P, K, V, BLOCK, KEYS, GATED, mma, num_warps,
    )  # fmt: skip

    acc *= grad_scale
    if GATED:
        out_row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
        queries = queries_s.load(mma).to(gl.float32)
        gl.store(dsums + h * tokens + start + out_row, gl.sum(acc * queries, 1), mask=out_row < length)
    out_layout: gl.constexpr = tile_layout(K, num_warps)
    t = gl.arange(0, BLOCK, gl.SliceLayout(1, out_layout))
    c = gl.arange(0, K, gl.SliceLayout(0, out_layout))
    tile = dq + ((start + first) * H + h) * K + (t[:, None] * (H * K) + c[None, :])
    gl.store(tile, gl.convert_layout(acc.to(gl.bfloat16), out_layout), mask=(first + t < length)[:, None])
