"""Decoding of one token on a DecodingState (sympow/ops/decoding_state.py) in one launch.

Every sequence of the batch has a slot in the tensors of the state. `slots` gives its number, and the strides between
slots are free. A program reads some rows of the state of one key/value head once, and multiplies them with phi(q) of
all query heads that share them. One more program for each query head attends to the tail. The program that finishes
last adds up the parts in the order of the rows, divides by the normalizer, writes the output, and appends the new token
to the tail. If the tail has no room for the tokens of the step, every program first folds the tail into its rows of the
state.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.ops.decoding_state import HASH, LEAST_SCALE
from sympow.ops.feature_map import multinomials, spow_indices
from sympow.ops.runtime.launcher import ahead, ceil_div, launch, next_power_of_2, operator
from sympow.ops.triton.plan import Decoding, decoding
from sympow.ops.triton.primitives import power

# Bytes of shared memory for tiles that are on their way. A program has 99 KB on those GPUs that have the least, and its
# sums between threads take some of it.
SHARED = 80 << 10
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_FIRST, _SECOND = (tl.constexpr(factor) for factor in HASH)


@triton.jit
def monomials(x, stride, head, heads, row, index, D, P: tl.constexpr):
    """Returns rows of phi of the x of each head without their weights, [HEADS, ROWS]. `index` is that of `tables`."""
    mask = (head < heads)[:, None] & (row < D)[None, :]
    x += head[:, None] * stride
    y = tl.where(mask, 1.0, 0.0)
    for m in tl.static_range(P):
        if m % 2 == 0:
            word = tl.load(index + m // 2 * D + row, mask=row < D, other=0)
        channel = (word >> (16 * (m % 2))) & 0xFFFF
        y *= tl.load(x + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _fold(
    sums, total, tail_k, tail_v, tail_g, held, row, index, root, D,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, SPOTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Adds the `held` tokens of a tail to rows of a state, [1, ROWS, COLUMNS] and [ROWS], by (M12), and returns the new
    rows."""
    col = tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    spot = tl.arange(0, SPOTS)
    left = tl.exp(tl.sum(tl.load(tail_g + spot, mask=spot < held, other=0.0), 0))
    sums *= left
    total *= left
    after = left * 0.0  # the log decay since the end of the block
    blocks = tl.cdiv(held, TOKENS)
    for back in range(blocks):
        first = (blocks - 1 - back) * TOKENS
        j = first + token
        later = tl.load(tail_g + j + 1, mask=j + 1 < held, other=0.0)
        phi = monomials(tail_k + first * K, K, token, held - first, row, index, D, P) * root[None, :]
        phi *= tl.exp(tl.cumsum(later, 0, reverse=True) + after)[:, None]
        after += tl.sum(later, 0)
        tile = tail_v + j[:, None] * V + col[None, :]
        values = tl.load(tile, mask=(j < held)[:, None] & (col < V)[None, :], other=0.0).to(tl.float32)
        sums += tl.sum(phi[:, :, None] * values[:, None, :], 0, keep_dims=True)
        total += tl.sum(phi, 0)
    return sums, total


@triton.jit
def _in_int8(x, row, col, folds):
    """Rounds rows [1, ROWS, COLUMNS] to int8 as `in_int8` of decoding_state.py does; returns them and scales [ROWS]."""
    scale = tl.max(tl.abs(x), 2) / 127 + tl.sum(x * 0.0, 2)  # the second term is NaN if a number is not finite
    scale = tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)
    bits = (row[None, :, None] * _FIRST + col[None, None, :]) * _SECOND
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _FIRST + folds * _FIRST
    upwards = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
    x = tl.floor(x * (1.0 / scale)[:, :, None] + upwards)
    return tl.minimum(tl.maximum(x, -127.0), 127.0).to(tl.int8), tl.sum(scale, 0)


@triton.jit(do_not_specialize=["room"])
def decode(
    q,  # [B, H, K], with strides of sequences and heads
    q_sb,
    q_sh,
    k,  # [B, G, K]
    k_sb,
    k_sg,
    v,  # [B, G, V]
    v_sb,
    v_sg,
    log_g,  # [B, G], or None
    g_sb,
    g_sg,
    slots,  # int32 [B]: the slots of the sequences; None: sequence b has slot b
    s,  # [slots, G, D, V] and so on, as in DecodingState, each with a stride between slots
    s_sn,
    z,
    z_sn,
    tail_k,
    tail_k_sn,
    tail_v,
    tail_v_sn,
    tail_g,
    tail_g_sn,
    count,
    count_sn,
    arrived,
    arrived_sn,
    scales,
    scales_sn,
    folds,
    folds_sn,
    index,  # tables of the rows of a state, see `tables`
    roots,
    parts,  # [B G, SPLITS + 1, HEADS, COLUMNS], workspace: the numerator's part of each program
    totals,  # [B G, SPLITS + 1, HEADS], workspace: the normalizer's parts
    out,  # [B, H, V]
    out_sb,
    scale,
    eps,
    D,
    G,
    tiles,  # tiles of a program
    room,  # tokens for which the tail must have room: this one and those that follow in the step
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,  # WIDTH, COLUMNS, HEADS and SPOTS are the next powers of two of K, V, R and CAPACITY
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    SPOTS: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a tile of the state
    TOKENS: tl.constexpr,  # tokens of a tile of the tail
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,  # rows of a tile that its threads sum separately
    STAGES: tl.constexpr,  # copies of a tile: one is used while the others are loaded
    FOLDED: tl.constexpr,  # tokens of the tail that are folded together
    RANKS: tl.constexpr,  # parts that are added together
    NORMALIZE: tl.constexpr,
    AHEAD: tl.constexpr,  # whether it is launched before the kernel before has ended
):
    """Decodes one token. Grid: SPLITS + R programs for each key/value head; each of the last R reads the tail for one
    query head."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0) // (SPLITS + R)  # of a sequence and a key/value head
    part = tl.program_id(0) % (SPLITS + R)
    n = tl.cast(pair, tl.int64)
    b = n // G
    g = n % G
    head = tl.arange(0, HEADS)
    col = tl.arange(0, COLUMNS)
    q += b * q_sb + g * R * q_sh
    place = b
    if slots is not None:
        place = tl.load(slots + b).to(tl.int64)
    s += place * s_sn + g * D * V
    z += place * z_sn + g * D
    tail_k += place * tail_k_sn + g * (CAPACITY * K)
    tail_v += place * tail_v_sn + g * (CAPACITY * V)
    tail_g += place * tail_g_sn + g * CAPACITY
    count += place * count_sn + g
    arrived += place * arrived_sn + g
    if scales is not None:
        scales += place * scales_sn + g * D
        folds += place * folds_sn + g
    held = tl.load(count)
    full = held + room > CAPACITY
    length = tl.where(full, 0, held)  # of the tail after it was folded, if it was
    spot = tl.arange(0, SPOTS)
    gate = tl.zeros([1], tl.float32)
    if log_g is not None:
        gate += tl.load(log_g + b * g_sb + g * g_sg).to(tl.float32)
    here = (n * (SPLITS + 1) + tl.minimum(part, SPLITS)) * HEADS

    if part < SPLITS:
        first = part * tiles
        last = tl.minimum(first + tiles, tl.cdiv(D, ROWS))
        acc = tl.zeros([HEADS, LANES, COLUMNS], tl.float32)
        total = tl.zeros([HEADS, ROWS], tl.float32)
        if full:
            turn = 0
            if folds is not None:
                turn = tl.load(folds) + 1
            for i in range(first, last):
                row = i * ROWS + tl.arange(0, ROWS)
                tile = s + tl.cast(i, tl.int64) * (ROWS * V) + tl.arange(0, ROWS)[None, :, None] * V
                tile += col[None, None, :]
                present = (row < D)[None, :, None] & (col < V)[None, None, :]
                rows = tl.load(tile, mask=present, other=0.0).to(tl.float32)
                if scales is not None:
                    rows *= tl.load(scales + row, mask=row < D, other=0.0)[None, :, None]
                weights = tl.load(z + row, mask=row < D, other=0.0)
                root = tl.load(roots + row, mask=row < D, other=0.0)
                rows, weights = _fold(
                    rows, weights, tail_k, tail_v, tail_g, held, row, index, root, D,
                    K, V, P, COLUMNS, SPOTS, FOLDED,
                )  # fmt: skip
                if scales is not None:
                    rows, unit = _in_int8(rows, row, col, turn)
                    tl.store(scales + row, unit, mask=row < D)
                tl.store(tile, rows.to(s.dtype.element_ty), mask=present)
                tl.store(z + row, weights, mask=row < D)
            tl.debug_barrier()  # threads read rows that other threads of this program wrote
        for i in tl.range(first, last, num_stages=STAGES):
            # The load has three dimensions, so that it has the layout of the products: a thread has 16 bytes of a row,
            # and sums its own rows. With two dimensions, Triton chooses another layout for the products.
            row = i * ROWS + tl.arange(0, ROWS)
            tile = s + tl.cast(i, tl.int64) * (ROWS * V) + tl.arange(0, ROWS)[None, :, None] * V + col[None, None, :]
            present = (row < D)[None, :, None] & (col < V)[None, None, :]
            rows = tl.load(tile, mask=present, other=0.0).to(tl.float32)
            root = tl.load(roots + row, mask=row < D, other=0.0)
            phi = monomials(q, q_sh, head, R, row, index, D, P) * root[None, :]
            if NORMALIZE:
                total += phi * tl.load(z + row, mask=row < D, other=0.0)[None, :]
            if scales is not None:
                phi *= tl.load(scales + row, mask=row < D, other=0.0)[None, :]
            products = phi[:, :, None] * rows
            acc += tl.sum(tl.reshape(products, [HEADS, ROWS // LANES, LANES, COLUMNS]), 1)
        gates = tl.load(tail_g + spot, mask=spot < length, other=0.0)
        left = power(scale, P) * tl.exp(gate + tl.sum(gates, 0))[:, None]
        tl.store(parts + (here + head)[:, None] * COLUMNS + col[None, :], tl.sum(acc, 1) * left)
        if NORMALIZE:
            tl.store(totals + here + head, tl.sum(total * left, 1))
    else:
        width = tl.arange(0, WIDTH)
        token = tl.arange(0, TOKENS)
        key = tl.load(k + b * k_sb + g * k_sg + width, mask=width < K, other=0.0).to(tl.float32)
        value = tl.load(v + b * v_sb + g * v_sg + col, mask=col < V, other=0.0).to(tl.float32)
        blocks = tl.cdiv(length, TOKENS)
        r = part - SPLITS
        query = tl.load(q + r * q_sh + width, mask=width < K, other=0.0).to(tl.float32) * scale
        sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
        weights = tl.zeros([TOKENS], tl.float32)
        after = gate  # log decay since the end of the block, summed from the end: large gates would absorb small ones
        for i in tl.range(0, blocks, num_stages=STAGES):
            j = (blocks - 1 - i) * TOKENS + token
            past = (j < length)[:, None]
            tile = tail_k + j[:, None] * K + width[None, :]
            keys = tl.load(tile, mask=past & (width < K)[None, :], other=0.0)
            tile = tail_v + j[:, None] * V + col[None, :]
            values = tl.load(tile, mask=past & (col < V)[None, :], other=0.0)
            later = tl.load(tail_g + j + 1, mask=j + 1 < length, other=0.0)
            w = power(tl.sum(keys.to(tl.float32) * query[None, :], 1), P)
            w *= tl.exp(tl.cumsum(later, 0, reverse=True) + after)
            sums += w[:, None] * values.to(tl.float32)
            weights += w
            after += tl.sum(later, 0)
        own = power(tl.sum(key * query, 0), P)
        tl.store(parts + (here + r) * COLUMNS + col, tl.sum(sums, 0) + own * value)
        if NORMALIZE:
            tl.store(totals + here + r, tl.sum(weights, 0) + own)

    tl.debug_barrier()  # all parts of this program are written
    if tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS + R - 1:
        flat = tl.arange(0, HEADS * COLUMNS)
        acc = tl.zeros([HEADS * COLUMNS], tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        for i in tl.range(0, SPLITS + 1, RANKS, num_stages=STAGES):
            rank = i + tl.arange(0, RANKS)
            there = (n * (SPLITS + 1) + rank)[:, None] * HEADS
            # .cg reads from the L2 cache, where the writes of other programs are, not from the L1 cache of this SM.
            ptrs = parts + there * COLUMNS + flat[None, :]
            acc += tl.sum(tl.load(ptrs, mask=(rank <= SPLITS)[:, None], other=0.0, cache_modifier=".cg"), 0)
            if NORMALIZE:
                ptrs = totals + there + head[None, :]
                present = (rank <= SPLITS)[:, None] & (head < R)[None, :]
                total += tl.sum(tl.load(ptrs, mask=present, other=0.0, cache_modifier=".cg"), 0)
        y = tl.reshape(acc, [HEADS, COLUMNS])
        if NORMALIZE:
            y /= total[:, None] + eps
        ptrs = out + b * out_sb + (g * R + head)[:, None] * V + col[None, :]
        tl.store(ptrs, y.to(out.dtype.element_ty), mask=(head < R)[:, None] & (col < V)[None, :])
        width = tl.arange(0, WIDTH)
        key = tl.load(k + b * k_sb + g * k_sg + width, mask=width < K, other=0.0)
        value = tl.load(v + b * v_sb + g * v_sg + col, mask=col < V, other=0.0)
        tl.store(tail_k + length * K + width, key.to(tail_k.dtype.element_ty), mask=width < K)
        tl.store(tail_v + length * V + col, value.to(tail_v.dtype.element_ty), mask=col < V)
        tl.store(tail_g + length + tl.arange(0, 1), gate)
        tl.store(count, length + 1)
        if folds is not None:
            tl.store(folds, tl.load(folds) + 1, mask=full)
        tl.store(arrived, 0)


def _fake(q, k, v, log_g, s, z, tail_k, tail_v, tail_g, count, arrived, scales, folds, slots, p, scale, normalize, eps):
    return q.new_empty(*q.shape[:3], v.shape[3])


@operator(_fake, changes=("s", "z", "tail_k", "tail_v", "tail_g", "count", "arrived", "scales", "folds"))
def power_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s: Tensor,
    z: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    tail_g: Tensor,
    count: Tensor,
    arrived: Tensor,
    scales: Tensor | None,
    folds: Tensor | None,
    slots: Tensor | None,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
) -> Tensor:
    """Decodes T tokens, one after another, on the tensors of a DecodingState, and returns out [B, T, H, V]."""
    (batch, time, heads, key_dim), groups, value_dim = q.shape, k.shape[2], v.shape[3]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    rows, dim, pairs, capacity = heads // groups, s.shape[2], batch * groups, tail_k.shape[2]
    columns, packed = next_power_of_2(value_dim), next_power_of_2(rows)
    width = next_power_of_2(key_dim)
    wide = q.dtype == torch.float32
    plan = decoding(pairs, dim, rows, packed, width, columns, s.element_size(), wide, q.device)
    # With a row of the state: its root, its z, its scale, its channels and, where these have 4 bytes, those of queries.
    numbers_a_row = 1 + normalize + (scales is not None) + (p + 1) // 2 + (packed * p if wide else 0)
    row = columns * s.element_size() + 4 * numbers_a_row
    token = (width + columns) * tail_k.element_size() + 4
    plan = _fitted(plan, dim, row, max(plan.tokens * token, plan.ranks * packed * 4 * (columns + normalize)))
    out = torch.empty(batch, time, heads, value_dim, device=q.device, dtype=v.dtype)
    parts = torch.empty(pairs, plan.splits + 1, packed, columns, device=q.device, dtype=torch.float32)
    totals = torch.empty(pairs if normalize else 0, plan.splits + 1, packed, device=q.device, dtype=torch.float32)
    index, roots = tables(key_dim, p, q.device)
    state = {"s": s, "z": z, "tail_k": tail_k, "tail_v": tail_v, "tail_g": tail_g, "count": count, "arrived": arrived}
    numbers: dict[str, Any] = {f"{name}_sn": x.stride(0) for name, x in state.items()}
    for name, of_int8 in (("scales", scales), ("folds", folds)):
        numbers[f"{name}_sn"] = 0 if of_int8 is None else of_int8.stride(0)
    for name, x in (("q", q), ("k", k), ("v", v)):
        numbers |= {f"{name}_sb": x.stride(0), f"{name}_s{'h' if name == 'q' else 'g'}": x.stride(2)}
    numbers |= {"g_sb": 0, "g_sg": 0} if log_g is None else {"g_sb": log_g.stride(0), "g_sg": log_g.stride(2)}
    numbers |= {"out_sb": out.stride(0), "scale": scale, "eps": eps, "D": dim, "G": groups, "tiles": plan.tiles}
    numbers |= {"K": key_dim, "V": value_dim, "P": p, "R": rows, "CAPACITY": capacity, "NORMALIZE": normalize}
    numbers |= {"WIDTH": width, "COLUMNS": columns, "HEADS": packed, "SPOTS": next_power_of_2(capacity)}
    numbers |= {"ROWS": plan.rows, "TOKENS": plan.tokens, "SPLITS": plan.splits, "LANES": plan.lanes}
    numbers |= {"STAGES": plan.stages, "FOLDED": plan.folded, "RANKS": plan.ranks}
    numbers |= {"num_warps": plan.warps, "maxnreg": plan.registers} | ahead(q.device)
    grid = (pairs * (plan.splits + rows),)
    together = time if time <= capacity else 1
    with torch.cuda.device_of(q):
        for i in range(time):
            now = {"q": q[:, i], "k": k[:, i], "v": v[:, i], "log_g": None if log_g is None else log_g[:, i]}
            launch(
                decode, grid, numbers | {"room": together if i == 0 else 1}, **now, slots=slots, **state, scales=scales,
                folds=folds, index=index, roots=roots, parts=parts, totals=totals, out=out[:, i],
            )  # fmt: skip
    return out


def _fitted(plan: Decoding, dim: int, row: int, other: int) -> Decoding:
    """Returns `plan` with tiles of the state so small, and stages so few, that copies fit into SHARED.

    Args:
        plan: a plan for D = `dim`.
        row: bytes that are copied for a row of a tile of the state.
        other: bytes of a tile of the tail or of the parts of the output, whichever is larger.
    """
    rows, stages = plan.rows, plan.stages
    while rows > 1 and (stages - 1) * rows * row > SHARED:
        rows //= 2
    while (stages - 1) * max(rows * row, other) > SHARED:
        stages -= 1
    if (rows, stages) == (plan.rows, plan.stages):
        return plan
    tiles = plan.tiles * (plan.rows // rows)
    splits = ceil_div(ceil_div(dim, rows), tiles)
    return replace(plan, rows=rows, lanes=min(plan.lanes, rows), tiles=tiles, splits=splits, stages=stages)


@lru_cache(maxsize=32)
def tables(key_dim: int, p: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the p channels of every row of (M7), two a word, int32 [(p + 1) // 2, D], and its weight, float32 [D]."""
    channels = spow_indices(key_dim, p).t().contiguous()
    index = channels[::2].clone()
    index[: p // 2] |= channels[1::2] << 16
    return index.to(device, torch.int32), multinomials(key_dim, p).sqrt().to(device, torch.float32)
