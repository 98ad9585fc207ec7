"""Decoding: one token on a DecodingState (sympow/ops/decoding.py) in one launch.

A sequence of the batch stands in a slot of the state's tensors: `slots` names it, and only strides between slots are
free. A program owns some rows of one kv head's state, reads them once and multiplies them by phi(q) of all the query
heads that share them; one more program a query head attends to the tail. The program that arrives last adds the parts
up, in a fixed order, divides by the normalizer, writes the output and appends the new token to the tail. If the tail
had no room for it and what follows it in its step, every program folded it into its own rows before it read them.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.ops.feature_map import multinomials, spow_indices
from sympow.ops.triton import config
from sympow.ops.triton.launcher import launch
from sympow.ops.triton.primitives import power
from sympow.ops.triton.registration import operator


@triton.jit
def _monomials(x, stride, head, heads, row, end, index, D, P: tl.constexpr):
    """[HEADS, ROWS]: rows of phi, up to `end`, of the x of each head, without their weights. `index` as in `_tables`.

    At least as many elements as threads: else Triton has every thread load all that it needs, again and again.
    """
    mask = (head < heads)[:, None] & (row < end)[None, :]
    x += head[:, None] * stride
    y = tl.where(mask, 1.0, 0.0)
    for m in tl.static_range(P):
        if m % 2 == 0:
            word = tl.load(index + m // 2 * D + row, mask=row < end, other=0)
        channel = (word >> (16 * (m % 2))) & 0xFFFF
        y *= tl.load(x + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _weighted(x, stride, head, heads, row, end, index, roots, D, P: tl.constexpr):
    """`_monomials` with their weights."""
    root = tl.load(roots + row, mask=row < end, other=0.0)
    return _monomials(x, stride, head, heads, row, end, index, D, P) * root[None, :]


@triton.jit
def _fold(
    s, z, tail_k, tail_v, tail_g, index, roots, first, end, left, held, D,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """(M12): the `held` tokens of a tail into the rows [first, end) of a state. `left` is what their gates leave of the
    state."""
    col = tl.arange(0, COLUMNS)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        tile = s + tl.cast(start, tl.int64) * V + tl.arange(0, ROWS)[:, None] * V + col[None, :]
        mask = (row < end)[:, None] & (col < V)[None, :]
        sums = tl.load(tile, mask=mask, other=0.0).to(tl.float32) * left
        total = tl.load(z + row, mask=row < end, other=0.0) * left
        root = tl.load(roots + row, mask=row < end, other=0.0)
        after = 0.0  # the log decay since the end of the tokens below
        blocks = tl.cdiv(held, BATCH)
        for i in range(blocks):
            j = (blocks - 1 - i) * BATCH + tl.arange(0, BATCH)
            later = tl.load(tail_g + j + 1, mask=j + 1 < held, other=0.0)
            kept = tl.exp(tl.cumsum(later, 0, reverse=True) + after)
            phi = _monomials(tail_k, K, j, held, row, end, index, D, P) * root[None, :] * kept[:, None]
            value = tl.load(
                tail_v + j[:, None] * V + col[None, :], mask=(j < held)[:, None] & (col < V)[None, :], other=0.0
            ).to(tl.float32)
            sums = tl.dot(tl.trans(phi), value, sums, input_precision="ieee")
            total += tl.sum(phi, 0)
            after += tl.sum(later, 0)
        tl.store(tile, sums.to(s.dtype.element_ty), mask=mask)
        tl.store(z + row, total, mask=row < end)


@triton.jit
def _read_state(
    q, q_sh, s, z, index, roots, first, end, D,
    V: tl.constexpr, P: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """phi(q) S [HEADS, COLUMNS] and phi(q) Z [HEADS] of the rows [first, end).

    A tile is ROWS / GROUP times GROUP rows: as many as all threads hold with one load each, so that a thread adds up
    what it has loaded, and no other has a part in that before the end.
    """
    STEPS: tl.constexpr = ROWS // GROUP
    head = tl.arange(0, HEADS)
    flat = tl.arange(0, ROWS)
    step = tl.arange(0, STEPS)[None, :, None, None] * GROUP + tl.arange(0, GROUP)[None, None, :, None]
    col = tl.arange(0, COLUMNS)[None, None, None, :]
    acc = tl.zeros([HEADS, GROUP, COLUMNS], tl.float32)
    total = tl.zeros([HEADS, ROWS], tl.float32)
    phi = _weighted(q, q_sh, head, R, first + flat, end, index, roots, D, P)
    for start in tl.range(first, end, ROWS, num_stages=STAGES):
        tile = s + tl.cast(start, tl.int64) * V + step * V + col
        rows = tl.load(tile, mask=(start + step < end) & (col < V), other=0.0).to(tl.float32)
        if NORMALIZE:
            total += phi * tl.load(z + start + flat, mask=start + flat < end, other=0.0)[None, :]
        acc += tl.sum(tl.reshape(phi, [HEADS, STEPS, GROUP])[:, :, :, None] * rows, 1)
        # Of the next tile: what they are made of comes while this one is still on its way.
        phi = _weighted(q, q_sh, head, R, start + ROWS + flat, end, index, roots, D, P)
    return tl.sum(acc, 1), tl.sum(total, 1)


@triton.jit
def _read_tail(
    query, key, value, tail_k, tail_v, tail_g, length, gate,
    K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Weighted values [COLUMNS] and the sum of weights of the first `length` tokens of a tail and of the new token.
    `query` [WIDTH] has the scale; `gate` [1] is the log gate of the new token."""
    width = tl.arange(0, WIDTH)
    col = tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    weight = power(tl.sum(key * query, 0), P)
    y = weight * value
    after = gate  # the log decay since the end of the block: added up from the end, or large gates hide small
    blocks = tl.cdiv(length, TOKENS)
    for i in range(blocks):
        j = (blocks - 1 - i) * TOKENS + token
        past = (j < length)[:, None]
        keys = tl.load(tail_k + j[:, None] * K + width[None, :], mask=past & (width < K)[None, :], other=0.0)
        values = tl.load(tail_v + j[:, None] * V + col[None, :], mask=past & (col < V)[None, :], other=0.0)
        later = tl.load(tail_g + j + 1, mask=j + 1 < length, other=0.0)
        w = power(tl.sum(keys.to(tl.float32) * query[None, :], 1), P)
        w *= tl.exp(tl.cumsum(later, 0, reverse=True) + after)
        y += tl.sum(w[:, None] * values.to(tl.float32), 0)
        weight += tl.sum(w, 0)
        after += tl.sum(later, 0)
    return y, weight


@triton.jit
def _add_up(
    parts, totals, first,
    V: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    RANKS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The sums over the PARTS parts of a kv head, from part `first` on: [HEADS, COLUMNS] and [HEADS]."""
    head = tl.arange(0, HEADS)
    col = tl.arange(0, COLUMNS)
    acc = tl.zeros([HEADS, RANKS, COLUMNS], tl.float32)
    total = tl.zeros([HEADS, RANKS], tl.float32)
    for i in tl.static_range(0, PARTS, RANKS):
        rank = i + tl.arange(0, RANKS)
        there = (first + rank)[None, :] * R + head[:, None]
        mask = (head < R)[:, None] & (rank < PARTS)[None, :]
        tile = parts + there[:, :, None] * V + col[None, None, :]
        # .cg: from where the other programs' writes are, past the cache of this multiprocessor.
        acc += tl.load(tile, mask=mask[:, :, None] & (col < V)[None, None, :], other=0.0, cache_modifier=".cg")
        if NORMALIZE:
            total += tl.load(totals + there, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(acc, 1), tl.sum(total, 1)


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
    slots,  # int32 [B]: where the sequences stand; None: sequence b in slot b
    s,  # [slots, G, D, V] and so on, as in DecodingState, each with the stride of its slots
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
    index,  # tables of the rows, see `_tables`
    roots,
    parts,  # [B G, SPLITS + 1, R, V], written here: what each program has of the numerator, the tail's last
    totals,  # [B G, SPLITS + 1, R]: of the normalizer
    out,  # [B, H, V]
    out_sb,
    scale,
    eps,
    D,
    G,
    share,  # rows of a program
    room,  # this token and those to come that must not find the tail full
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,  # WIDTH, COLUMNS, HEADS and SPOTS are the powers of two that hold K, V, R and CAPACITY
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    SPOTS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile of the state, and GROUP those that are loaded at once
    GROUP: tl.constexpr,
    FOLD_ROWS: tl.constexpr,  # of a tile that is folded, with FOLD_TOKENS of the tail at a time
    FOLD_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile of the tail
    RANKS: tl.constexpr,  # parts that are added up at once
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Grid: R + SPLITS programs a kv head; the first R read the tail, a query head each."""
    pair = tl.program_id(0) // (R + SPLITS)  # of a sequence and a kv head
    part = tl.program_id(0) % (R + SPLITS)
    n = tl.cast(pair, tl.int64)
    b = n // G
    g = n % G
    slot = b
    if slots is not None:
        slot = tl.load(slots + b).to(tl.int64)
    head = tl.arange(0, HEADS)
    col = tl.arange(0, COLUMNS)
    q += b * q_sb + g * R * q_sh
    s += slot * s_sn + g * D * V
    z += slot * z_sn + g * D
    tail_k += slot * tail_k_sn + g * (CAPACITY * K)
    tail_v += slot * tail_v_sn + g * (CAPACITY * V)
    tail_g += slot * tail_g_sn + g * CAPACITY
    count += slot * count_sn + g
    arrived += slot * arrived_sn + g
    held = tl.load(count)
    full = held + room > CAPACITY
    length = tl.where(full, 0, held)  # of the tail, once it is folded if it is
    gate = tl.zeros([1], tl.float32)
    if log_g is not None:
        gate += tl.load(log_g + b * g_sb + g * g_sg).to(tl.float32)
    first_part = n * (SPLITS + 1)

    if part >= R:
        first = (part - R) * share
        end = tl.minimum(first + share, D)
        spot = tl.arange(0, SPOTS)
        gates = tl.sum(tl.load(tail_g + spot, mask=spot < held, other=0.0), 0)
        if full:
            left = tl.exp(gates)
            _fold(
                s, z, tail_k, tail_v, tail_g, index, roots, first, end, left, held, D,
                K, V, P, COLUMNS, FOLD_ROWS, FOLD_TOKENS,
            )  # fmt: skip
            tl.debug_barrier()  # threads read rows that others of this program wrote
        sums, total = _read_state(
            q, q_sh, s, z, index, roots, first, end, D, V, P, R, COLUMNS, HEADS, ROWS, GROUP, STAGES, NORMALIZE
        )
        left = power(scale, P) * tl.exp(gate + tl.where(full, 0.0, gates))
        there = (first_part + part - R) * R + head
        ptrs = parts + there[:, None] * V + col[None, :]
        tl.store(ptrs, sums * left[:, None], mask=(head < R)[:, None] & (col < V)[None, :])
        if NORMALIZE:
            tl.store(totals + there, total * left, mask=head < R)
    else:
        width = tl.arange(0, WIDTH)
        query = tl.load(q + part * q_sh + width, mask=width < K, other=0.0).to(tl.float32) * scale
        key = tl.load(k + b * k_sb + g * k_sg + width, mask=width < K, other=0.0).to(tl.float32)
        value = tl.load(v + b * v_sb + g * v_sg + col, mask=col < V, other=0.0).to(tl.float32)
        y, weight = _read_tail(
            query, key, value, tail_k, tail_v, tail_g, length, gate, K, V, P, WIDTH, COLUMNS, TOKENS
        )
        here = (first_part + SPLITS) * R + part
        tl.store(parts + here * V + col, y, mask=col < V)
        if NORMALIZE:
            tl.store(totals + here, weight)

    tl.debug_barrier()  # all of this program's parts are written
    if tl.atomic_add(arrived, 1, sem="acq_rel") == R + SPLITS - 1:
        summed, weights = _add_up(parts, totals, first_part, V, R, COLUMNS, HEADS, SPLITS + 1, RANKS, NORMALIZE)
        if NORMALIZE:
            summed /= weights[:, None] + eps
        ends = out + b * out_sb + (g * R + head)[:, None] * V + col[None, :]
        tl.store(ends, summed.to(out.dtype.element_ty), mask=(head < R)[:, None] & (col < V)[None, :])
        channel = tl.arange(0, WIDTH)
        new_key = tl.load(k + b * k_sb + g * k_sg + channel, mask=channel < K, other=0.0)
        new_value = tl.load(v + b * v_sb + g * v_sg + col, mask=col < V, other=0.0)
        tl.store(tail_k + length * K + channel, new_key.to(tail_k.dtype.element_ty), mask=channel < K)
        tl.store(tail_v + length * V + col, new_value.to(tail_v.dtype.element_ty), mask=col < V)
        tl.store(tail_g + length + tl.arange(0, 1), gate)
        tl.store(count, length + 1)
        tl.store(arrived, 0)


def _fake(q, k, v, log_g, s, z, tail_k, tail_v, tail_g, count, arrived, slots, p, scale, normalize, eps):
    return q.new_empty(*q.shape[:3], v.shape[3])


@operator(_fake, changes=("s", "z", "tail_k", "tail_v", "tail_g", "count", "arrived"))
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
    slots: Tensor | None,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
) -> Tensor:
    """Decodes T tokens one after another on the tensors of a DecodingState, and returns out [B, T, H, V]."""
    (batch, time, heads, key_dim), groups, value_dim = q.shape, k.shape[2], v.shape[3]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    rows, dim, pairs, capacity = heads // groups, s.shape[2], batch * groups, tail_k.shape[2]
    plan = config.decoding(pairs, dim, rows, key_dim, value_dim, s.element_size(), q.device)
    out = torch.empty(batch, time, heads, value_dim, device=q.device, dtype=v.dtype)
    parts = torch.empty(pairs, plan.splits + 1, rows, value_dim, device=q.device, dtype=torch.float32)
    totals = torch.empty(pairs if normalize else 0, plan.splits + 1, rows, device=q.device, dtype=torch.float32)
    index, roots = _tables(key_dim, p, q.device)
    state = {"s": s, "z": z, "tail_k": tail_k, "tail_v": tail_v, "tail_g": tail_g, "count": count, "arrived": arrived}
    numbers: dict[str, Any] = {f"{name}_sn": x.stride(0) for name, x in state.items()}
    for name, x in (("q", q), ("k", k), ("v", v)):
        numbers |= {f"{name}_sb": x.stride(0), f"{name}_s{'h' if name == 'q' else 'g'}": x.stride(2)}
    numbers |= {"g_sb": 0, "g_sg": 0} if log_g is None else {"g_sb": log_g.stride(0), "g_sg": log_g.stride(2)}
    numbers |= {"out_sb": out.stride(0), "scale": scale, "eps": eps, "D": dim, "G": groups, "share": plan.share}
    numbers |= {"K": key_dim, "V": value_dim, "P": p, "R": rows, "CAPACITY": capacity, "NORMALIZE": normalize}
    numbers |= {"SPOTS": config.next_power_of_2(capacity), **plan.constants}
    grid = (pairs * (rows + plan.splits),)
    together = time if time <= capacity else 1
    with torch.cuda.device_of(q):
        for i in range(time):
            now = {"q": q[:, i], "k": k[:, i], "v": v[:, i], "log_g": None if log_g is None else log_g[:, i]}
            launch(
                decode, grid, numbers | {"room": together if i == 0 else 1}, **now, slots=slots, **state,
                index=index, roots=roots, parts=parts, totals=totals, out=out[:, i],
            )  # fmt: skip
    return out


@lru_cache(maxsize=32)
def _tables(key_dim: int, p: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of every row of (M7) its p channels, two in a word, int32 [(p + 1) // 2, D], and its weight, float32 [D]."""
    channels = spow_indices(key_dim, p).t().contiguous()
    index = channels[::2].clone()
    index[: p // 2] |= channels[1::2] << 16
    return index.to(device, torch.int32), multinomials(key_dim, p).sqrt().to(device, torch.float32)
