"""All gradients of the quadratic form, p = 2, in one pass for Hopper, in Gluon: five products where the passes of
`hopper_quadratic` need seven, as scores and their gradients are formed once.

A program owns keys and walks over the queries from its own on. What it has for their gradient it leaves in shared
memory, and warps of their own add it up in memory, in float32, while the others go on. Programs take turns at it in
a fixed order, from the keys nearest to the queries to the first ones, so that two runs are bitwise equal. Those that
come first in a turn are launched first: a program waits for none that may not have begun.
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

from sympow.ops.triton.hopper_output import await_last, barrier, copy_rows, start_next
from sympow.ops.triton.hopper_quadratic import copy_vector, places, store_rows, vector_places
from sympow.ops.triton.hopper_states import exp2


@gluon.jit
def _await_turn(turn, count):
    """Waits until `count` programs have added. Every thread acquires for itself."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; again: ld.acquire.gpu.global.s32 $0, [$1]; setp.lt.s32 p, $0, $2; @p bra again; }",
        "=&r,l,r", [turn.to(gl.int64, bitcast=True), count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _add_parts(
    parts_s, full, empty, turns, acc, dq, first, length, padded, tokens, H, heads, grad_scale,
    K: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Adds what the program has for the gradients of queries, tile by tile, ROWS rows at a time. The first program of a
    turn writes, the last one, of the sequence's first keys, writes the sum to dq. READ: by load and store, not by a
    reduction where the memory is."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // K, K // 4], [WARPS, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, K, gl.SliceLayout(0, layout))
    steps = gl.cdiv(length - first, QUERIES)
    n = first * 0
    for head in range(heads):
        mine = acc + (first * 0 + head).to(gl.int64) * padded * K
        for s in range(steps):
            s0 = first + s * QUERIES
            turn = turns + head * (padded // QUERIES) + s0 // QUERIES
            mbarrier.wait(full.index(n & 1), (n >> 1) & 1)
            before = (s0 - first) // BLOCK
            _await_turn(turn, before)
            part_s = parts_s.index(n & 1)
            for m in gl.static_range(QUERIES // ROWS):
                part = part_s.slice(m * ROWS, ROWS, 0).load(layout)
                t = s0 + m * ROWS + r
                tile = mine + (s0 + m * ROWS).to(gl.int64) * K + (r[:, None] * K + c[None, :])
                if first == 0:
                    if before > 0:
                        part += gl.load(tile, cache_modifier=".cg")
                    out = dq + (s0.to(gl.int64) * H + head) * K
                    place = out + ((m * ROWS + r)[:, None] * (H * K) + c[None, :])
                    gl.store(place, (part * grad_scale).to(gl.bfloat16), mask=(t < length)[:, None])
                else:
                    if before == 0:
                        gl.store(tile, part, cache_modifier=".cg")
                    else:
                        if READ:
                            gl.store(tile, part + gl.load(tile, cache_modifier=".cg"), cache_modifier=".cg")
                        else:
                            gl.atomic_add(tile, part, sem="relaxed")
            barrier()
            mbarrier.arrive(empty.index(n & 1), count=1)
            if first > 0:
                gl.atomic_add(turn, 1, sem="release")
            n += 1


@gluon.jit
def _copy_step(
    queries_s, dy_s, scales_s, delta_s, q, q_st, dout, dy_st, scales, delta, s0, length, stage,
    QUERIES: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Starts the copy of what belongs to the queries from s0 on."""
    left = length - s0
    copy_rows(queries_s.index(stage), q + s0.to(gl.int64) * q_st, q_st, left, QUERIES, K, WARPS)
    copy_rows(dy_s.index(stage), dout + s0.to(gl.int64) * dy_st, dy_st, left, QUERIES, V, WARPS)
    copy_vector(scales_s.index(stage), scales + s0, left, QUERIES, WARPS)
    copy_vector(delta_s.index(stage), delta + s0, left, QUERIES, WARPS)
    async_copy.commit_group()


@gluon.jit
def _hand_over(part, parts_s, empty, n):
    """Leaves the n-th tile for `_add_parts`, which is told of it after the next barrier (`_announce`)."""
    mbarrier.wait(empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    parts_s.index(n & 1).store(part)


@gluon.jit
def _announce(full, n):
    mbarrier.arrive(full.index(n & 1), count=1, pred=n >= 0)


@gluon.jit
def _walk(
    begin, stop, n, q, q_st, dout, dy_st, scales, delta, sums, first, length,
    keys_s, values_s, slopes_s, queries_s, dy_s, scales_s, delta_s, parts_s, full, empty, dkeys, dvalues,
    K: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
    OWN: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """dkeys and dvalues plus the parts of the steps `begin` to `stop` - 1 of queries, counted from the block's first
    token on. OWN: they are the block's own tokens. The gradient of a step's queries is formed in the next one, while
    the tensor cores would wait; n counts them."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    score_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, QUERIES, 16])
    ROWS: gl.constexpr = QUERIES // 16 if QUERIES // 16 < WARPS else WARPS
    part_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, WARPS // ROWS], [16, K * ROWS // WARPS, 16])
    i = gl.arange(0, QUERIES, gl.SliceLayout(0, score_mma))
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, score_mma))
    ref = 0.0
    past = gl.full([BLOCK], 1.0, gl.float32, gl.SliceLayout(1, score_mma))
    own = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, score_mma))
    if GATED:
        own = gl.load(sums + row, mask=row < length, other=0.0)
        # Decays go through the last token of the block: 2**(L_i - L_ref) 2**(L_ref - L_j), both at most 1.
        ref = gl.load(sums + gl.minimum(first + BLOCK, length) - 1)
        past = exp2(ref - own)
    for s in range(begin, stop):
        s0 = first + s * QUERIES
        stage = s % STAGES
        async_copy.wait_group(STAGES - 2)
        barrier()
        fence_async_shared()
        _announce(full, n - 2)  # handed over in the turn before
        queries = queries_s.index(stage)
        dy = dy_s.index(stage)
        zeros = gl.zeros([BLOCK, QUERIES], gl.float32, score_mma)
        scores = warpgroup_mma(keys_s, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
        grad = warpgroup_mma(values_s, dy.permute([1, 0]), zeros, use_acc=False, is_async=True)
        part = gl.zeros([QUERIES, K], gl.float32, part_mma)
        part = warpgroup_mma(slopes_s.permute([1, 0]), keys_s, part, use_acc=False, is_async=True)
        f = scales_s.index(stage).load(gl.SliceLayout(0, score_mma))
        d = delta_s.index(stage).load(gl.SliceLayout(0, score_mma))
        if s0 + QUERIES > length:
            f = gl.where(s0 + i < length, f, float("-inf"))
        if not OWN:
            f = exp2(f - ref)
        scores = warpgroup_mma_wait(2, deps=(scores,))
        if OWN:
            if GATED:
                slope = scores * exp2(f[None, :] - own[:, None])
            else:
                slope = scores * exp2(f)[None, :]
            slope = gl.where(row[:, None] <= (s0 + i)[None, :], slope, 0.0)
        else:
            slope = scores * f[None, :]
            if GATED:
                slope *= past[:, None]
        weight = gl.convert_layout((slope * scores).to(gl.bfloat16), left_layout)
        dvalues = warpgroup_mma(weight, dy, dvalues, is_async=True)
        grad = warpgroup_mma_wait(2, deps=(grad,))
        slope = ((grad - d[None, :]) * slope).to(gl.bfloat16)
        left = gl.convert_layout(slope, left_layout)
        dkeys = warpgroup_mma(left, queries, dkeys, is_async=True)
        part = warpgroup_mma_wait(2, deps=(part,))
        if n > 0:
            _hand_over(part, parts_s, empty, n - 1)
        barrier()  # all have read `slopes_s`
        slopes_s.store(slope)
        fence_async_shared()
        _copy_step(
            queries_s, dy_s, scales_s, delta_s, q, q_st, dout, dy_st, scales, delta, s0 + (STAGES - 1) * QUERIES,
            length, (s + STAGES - 1) % STAGES, QUERIES, K, V, WARPS,
        )  # fmt: skip
        dvalues, dkeys, weight, left = warpgroup_mma_wait(0, deps=(dvalues, dkeys, weight, left))
        n += 1
    return dkeys, dvalues, n


@gluon.jit
def _gradients(
    q, q_st, q_sh, dout, scales, delta, sums, dk, dv, dsums, first, length, tokens, H, G, heads, grad_scale,
    keys_s, values_s, slopes_s, queries_s, dy_s, scales_s, delta_s, parts_s, full, empty,
    K: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """dk and dv of the block; hands over the parts of dq. Pointers are those of the sequence and the group."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    ROWS: gl.constexpr = QUERIES // 16 if QUERIES // 16 < WARPS else WARPS
    part_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, WARPS // ROWS], [16, K * ROWS // WARPS, 16])
    PER: gl.constexpr = BLOCK // QUERIES
    dkeys = gl.zeros([BLOCK, K], gl.float32, mma)
    dvalues = gl.zeros([BLOCK, V], gl.float32, mma)
    slopes_s.store(gl.zeros([BLOCK, QUERIES], gl.bfloat16, gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])))
    fence_async_shared()
    steps = gl.cdiv(length - first, QUERIES)
    n = first * 0
    for head in range(heads):
        queries = q + head * q_sh
        dy = dout + head * V
        at = (first * 0 + head).to(gl.int64) * tokens
        for early in gl.static_range(STAGES - 1):
            _copy_step(
                queries_s, dy_s, scales_s, delta_s, queries, q_st, dy, H * V, scales + at, delta + at,
                first + early * QUERIES, length, early, QUERIES, K, V, WARPS,
            )  # fmt: skip
        dkeys, dvalues, n = _walk(
            0, gl.minimum(PER, steps), n, queries, q_st, dy, H * V, scales + at, delta + at, sums, first, length,
            keys_s, values_s, slopes_s, queries_s, dy_s, scales_s, delta_s, parts_s, full, empty, dkeys, dvalues,
            K, V, BLOCK, QUERIES, STAGES, True, GATED, WARPS,
        )  # fmt: skip
        dkeys, dvalues, n = _walk(
            PER, steps, n, queries, q_st, dy, H * V, scales + at, delta + at, sums, first, length,
            keys_s, values_s, slopes_s, queries_s, dy_s, scales_s, delta_s, parts_s, full, empty, dkeys, dvalues,
            K, V, BLOCK, QUERIES, STAGES, False, GATED, WARPS,
        )  # fmt: skip
        async_copy.wait_group(0)
        barrier()
    fence_async_shared()
    barrier()
    _announce(full, n - 2)
    part = gl.zeros([QUERIES, K], gl.float32, part_mma)
    part = warpgroup_mma(slopes_s.permute([1, 0]), keys_s, part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    _hand_over(part, parts_s, empty, n - 1)
    barrier()
    _announce(full, n - 1)

    dkeys *= grad_scale
    left = length - first
    if GATED:
        t = gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
        x = keys_s.load(mma).to(gl.float32)
        gl.store(dsums + first + t, gl.sum(dkeys * x, 1), mask=t < left)
    store_rows(dk + first.to(gl.int64) * (G * K), G * K, dkeys, left, BLOCK, K, WARPS)
    store_rows(dv + first.to(gl.int64) * (G * V), G * V, dvalues, left, BLOCK, V, WARPS)


@gluon.jit
def fused_pass(
    q, q_st, q_sh, k, k_st, k_sh, v, v_st, v_sh, dout, sums, scales, delta, turns, acc, dq, dk, dv, dsums,
    T, padded, tokens, H, G, grad_scale,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, QUERIES: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr, REGISTERS: gl.constexpr, GATED: gl.constexpr,
    OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dq, dk, dv. Grid: blocks of keys times kv heads of all sequences, in one axis.

    turns, int32 zeros [N, H, padded / QUERIES]: how many programs have added; acc, float32 [N, H, padded, K], need not
    be set; padded is T up to a multiple of BLOCK.
    """
    gl.static_assert(K == V)
    start_next(OVERLAP)
    count = gl.cdiv(T, BLOCK)
    pid = gl.program_id(0)
    first = (count - 1 - pid % count) * BLOCK
    n = (pid // count) // G
    g = ((pid // count) % G).to(gl.int64)
    start = n.to(gl.int64) * T
    keys_s = places(1, BLOCK, K).index(0)
    values_s = places(1, BLOCK, V).index(0)
    slopes_s = places(1, BLOCK, QUERIES).index(0)
    queries_s = places(STAGES, QUERIES, K)
    dy_s = places(STAGES, QUERIES, V)
    scales_s = vector_places(STAGES, QUERIES)
    delta_s = vector_places(STAGES, QUERIES)
    parts_s = gl.allocate_shared_memory(
        gl.float32, [2, QUERIES, K], gl.NVMMASharedLayout.get_default_for([QUERIES, K], gl.float32)
    )
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=1)
    copy_rows(keys_s, k + (start + first) * k_st + g * k_sh, k_st, T - first, BLOCK, K, num_warps)
    copy_rows(values_s, v + (start + first) * v_st + g * v_sh, v_st, T - first, BLOCK, V, num_warps)
    await_last(OVERLAP)
    h = g * R
    gl.warp_specialize(
        [
            (
                _gradients,
                (
                    q + start * q_st + h * q_sh, q_st, q_sh, dout + (start * H + h) * V, scales + h * tokens + start,
                    delta + h * tokens + start, sums + g * tokens + start, dk + (start * G + g) * K,
                    dv + (start * G + g) * V, dsums + g * tokens + start, first, T, tokens, H, G, R, grad_scale,
                    keys_s, values_s, slopes_s, queries_s, dy_s, scales_s, delta_s, parts_s, full, empty,
                    K, V, BLOCK, QUERIES, STAGES, GATED, num_warps,
                ),
            ),
            (
                _add_parts,
                (
                    parts_s, full, empty, turns + (n * H + h) * (padded // QUERIES),
                    acc + (n * H + h) * padded.to(gl.int64) * K, dq + (start * H + h) * K, first, T, padded, tokens, H,
                    R, grad_scale, K, BLOCK, QUERIES, ROWS, READ, 4,
                ),
            ),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
