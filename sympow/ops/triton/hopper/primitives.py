"""Functions that the passes for Hopper share: order and location of programs, copies to shared memory, columns of
queries and keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sympow.ops.triton import gate
from sympow.ops.triton.hopper.compat import load_async, reinterpret

REACH_TILE = gl.constexpr(gate.REACH_TILE.value)


@gluon.jit
def exp2(x):
    """Returns 2**x by one instruction; 0 where the result would be subnormal."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def signed_power(x, P: gl.constexpr):
    """Returns x**P by multiplication."""
    y = x
    for _ in gl.static_range(P - 1):
        y *= x
    return y


@gluon.jit
def start_next(OVERLAP: gl.constexpr):
    """As `primitives.start_next`."""
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def await_last(OVERLAP: gl.constexpr):
    """As `primitives.await_last`."""
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def locate(pid, starts, blocks, T, BLOCK: gl.constexpr, PACKED: gl.constexpr):
    """As `primitives.locate`."""
    if PACKED:
        n = gl.load(blocks + 2 * pid)
        first = gl.load(blocks + 2 * pid + 1) * BLOCK
        start = gl.load(starts + n).to(gl.int64)
        length = (gl.load(starts + n + 1) - start).to(gl.int32)
    else:
        count = gl.cdiv(T, BLOCK)
        n = pid // count
        first = (pid % count) * BLOCK
        start = n.to(gl.int64) * T
        length = T
    return n, start, length, first


@gluon.jit
def assign(
    starts, blocks, T, H, spread, BLOCK: gl.constexpr, CHUNK: gl.constexpr, PACKED: gl.constexpr, FIRST: gl.constexpr
):
    """Returns the location of a program: a sequence (its number, start and length), its first token in the sequence,
    and the head.

    In the quadratic form the work of a block grows with its index, or, with FIRST, falls. Heads come one after another,
    because programs of the same head read the same tiles. The last `spread` heads are different: among their blocks,
    those with the most work come first, so that all programs end at about the same time.
    """
    if PACKED or CHUNK > 0:
        pid = gl.program_id(0)
        if not FIRST:
            pid = gl.num_programs(0) - 1 - pid
        n, start, length, first = locate(pid, starts, blocks, T, BLOCK, PACKED)
        return n, start, length, first, gl.program_id(1).to(gl.int64)
    else:
        count = gl.cdiv(T, BLOCK)
        pid = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        before = gl.maximum(gl.num_programs(0) * gl.num_programs(1) // count - spread, 0)  # heads of all sequences
        own = pid - before * count
        alone = own < 0
        block = gl.where(alone, pid % count, own // spread)
        if not FIRST:
            block = count - 1 - block
        head = gl.where(alone, pid // count, before + own % spread)
        n = head // H
        return n, n.to(gl.int64) * T, T, block * BLOCK, (head % H).to(gl.int64)


@gluon.jit
def reach_tile(n, g, token, T, tokens):
    """As `primitives.reach_tile`."""
    return (g * (tokens // T) + n) * gl.cdiv(T, REACH_TILE) + token // REACH_TILE


@gluon.jit
def sum_before(high, low, token, origin):
    """Returns the parts of the gate's sum (`gate.gate_sums`) before a token, at most `length`, of the chunk that begins
    at `origin`."""
    at = gl.maximum(token, 1) - 1
    later = token > origin
    return gl.where(later, gl.load(high + at), 0.0), gl.where(later, gl.load(low + at), 0.0)


@gluon.jit
def query_step(it, first, after, within, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr):
    """Returns the head within its group, and the first query of step `it` of the key pass."""
    own = it - R * after
    outside = own < 0
    head = gl.where(outside, it // gl.maximum(after, 1), own // within)
    s0 = gl.where(
        outside,
        first + BLOCK + (it % gl.maximum(after, 1)) * QUERIES,
        first + (own % within) * QUERIES,
    )
    return head, s0


@gluon.jit
def buffer(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Returns shared memory for rows [ROWS, WIDTH] of bfloat16, in the layout that products read."""
    return gl.allocate_shared_memory(
        gl.bfloat16, [ROWS, WIDTH], gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.bfloat16)
    )


@gluon.jit
def buffers(COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Returns what `buffer` does COUNT times, in one allocation [COUNT, ROWS, WIDTH]."""
    return gl.allocate_shared_memory(
        gl.bfloat16, [COUNT, ROWS, WIDTH], gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.bfloat16)
    )


@gluon.jit
def copy_rows(to, ptr, stride, left, ROWS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Starts the copy of rows [ROWS, WIDTH] into shared memory, with zeros from row `left` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    load_async(to, ptr + (r[:, None] * stride + c[None, :]), mask=(r < left)[:, None])


@gluon.jit
def store_rows(result, H, h, x, start, first, length, ROWS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Writes x [ROWS, WIDTH] to head h of a contiguous result [tokens, H, WIDTH], for the tokens of a sequence from
    `first` on. The sequence has `length` tokens, the first of which is `start`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    rows = gl.convert_layout(x.to(result.dtype.element_ty), layout)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    tile = result + ((start + first) * H + h) * WIDTH + (r[:, None] * (H * WIDTH) + c[None, :])
    gl.store(tile, rows, mask=(first + r < length)[:, None])


@gluon.jit
def stage_columns(x, K: gl.constexpr, BLOCK: gl.constexpr):
    """Writes x [BLOCK, K] to shared memory by columns, for `column`."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    columns = gl.allocate_shared_memory(gl.bfloat16, [K, 1, BLOCK], flat)
    reinterpret(columns, gl.bfloat16, [K, BLOCK], flat).store(x.permute([1, 0]))
    return columns


@gluon.jit
def column(columns, i, layout: gl.constexpr):
    """Returns entry i of the row of each token, a factor [BLOCK, 1]."""
    return columns.index(i).permute([1, 0]).load(layout)


@gluon.jit
def first_keys(
    k, k_st, v, v_st, begin, length,
    KEYS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns buffers for keys and values of three steps, from `begin` on, and starts the copies of two."""
    keys_s = buffers(3, KEYS, K)
    values_s = buffers(3, KEYS, V)
    for early in gl.static_range(2):
        s0 = begin + early * KEYS
        copy_rows(keys_s.index(early), k + s0.to(gl.int64) * k_st, k_st, length - s0, KEYS, K, WARPS)
        copy_rows(values_s.index(early), v + s0.to(gl.int64) * v_st, v_st, length - s0, KEYS, V, WARPS)
        async_copy.commit_group()
    return keys_s, values_s


@gluon.jit
def copy_state(
    to, state, i, stop,
    TILE: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the rows of every last index of TILE / K prefixes, the i-th such group, if i < stop.

    The rows of an upper prefix with a lower last index are those of the other order.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    c = gl.arange(0, V, gl.SliceLayout(0, layout))
    a = i * (TILE // K) + r // K
    j = r % K
    upper = gl.where(j >= HALF, HALF * K + (a - HALF) * (K - HALF) + (j - HALF), j * K + a)
    row = gl.where(a < HALF, a * K + j, upper)
    wanted = (a < gl.where(i < stop, K, 0))[:, None]
    load_async(to, state + (row[:, None] * V + c[None, :]), mask=wanted)


@gluon.jit
def step_pointers(
    it, x, x_st, x_sh, xt, xt_sh, y, y_st, y_sh, chunks, length,
    R: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    steps: gl.constexpr = CHUNK // STEP
    chunk = it // (R * steps)
    if REVERSE:
        chunk = chunks - 1 - chunk
    within = it % (R * steps)
    r = (within // steps).to(gl.int64)  # heads may be far apart
    s = chunk * CHUNK + (within % steps) * STEP
    wide = s.to(gl.int64)
    return x + (wide * x_st + r * x_sh), xt + (s + r * xt_sh), y + (wide * y_st + r * y_sh), length - s
