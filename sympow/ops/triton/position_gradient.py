"""The gradient of the positions by which queries and keys were rotated.

A rotation of q_i and k_i by a small additional angle e moves them by e J q_i and e J k_i, where J maps a pair of
channels (a, b) to its frequency times (-b, a). So the gradient of position i is dq_i . J q_i + dk_i . J k_i. Positions
are running sums, so the gradient of a step is the sum of these terms from its token on. The terms between two later
tokens cancel in that sum up to rounding. At the end of a chunk the sum is known in another way. A rotation of all later
tokens has the same effect as the opposite rotation of the state S, so the sum is -dS . J S, with J applied to the rows
of a state by the product rule. `position_gradient` changes the gradient of the last position of every chunk so that the
sums of later gradients start again there. Without rounding, this change would be 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.fused import rotation
from sympow.ops.runtime.launcher import Launcher, ceil_div, launch, next_power_of_2
from sympow.ops.triton.plan import Call, Plan
from sympow.ops.triton.rows import Rows

TERM_BLOCK = 64  # tokens of a block
ROW_ELEMENTS, STATE_PARTS = 2048, 8  # rows of a tile of a state, and programs of one state

pairs = rotation.pairs.by_triton


@triton.jit
def _moments(x, dx, inside, WIDTH: tl.constexpr, K: tl.constexpr):
    """Returns dx . J x of each pair without its frequency, [BLOCK, WIDTH / 2]."""
    mask = inside[:, None] & (tl.arange(0, WIDTH) < K)[None, :]
    a, b = pairs(tl.load(x, mask=mask, other=0.0))
    da, db = pairs(tl.load(dx, mask=mask, other=0.0))
    return a * db - b * da


@triton.jit(do_not_specialize=["T"])
def turn_terms(
    q,  # [B, T, H, K], with strides of rows, tokens and heads; channels are contiguous
    q_sb,
    q_st,
    q_sh,
    k,  # [B, T, G, K]
    k_sb,
    k_st,
    k_sg,
    dq,  # contiguous
    dk,
    frequencies,  # float64 [K / 2]
    terms,  # float64 [B, T, G], the result
    T,
    G,
    R: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # the next power of two of K
    BLOCK: tl.constexpr,
):
    """Computes the terms. Grid: blocks of BLOCK tokens of all rows, key/value heads."""
    blocks = tl.cdiv(T, BLOCK)
    n = tl.cast(tl.program_id(0) // blocks, tl.int64)
    token = tl.cast(tl.program_id(0) % blocks * BLOCK, tl.int64) + tl.arange(0, BLOCK)
    g = tl.program_id(1)
    inside = token < T
    col = tl.arange(0, WIDTH)[None, :]
    pair = tl.arange(0, WIDTH // 2)
    place = n * T + token
    k += n * k_sb + tl.cast(g, tl.int64) * k_sg
    moments = _moments(k + token[:, None] * k_st + col, dk + (place * G + g)[:, None] * K + col, inside, WIDTH, K)
    for h in range(g * R, (g + 1) * R):
        here = q + n * q_sb + tl.cast(h, tl.int64) * q_sh
        given = dq + (place * (G * R) + h)[:, None] * K
        moments += _moments(here + token[:, None] * q_st + col, given + col, inside, WIDTH, K)
    frequency = tl.load(frequencies + pair, mask=pair < K // 2, other=0.0).to(tl.float32)
    tl.store(terms + place * G + g, tl.sum(moments * frequency[None, :], 1).to(tl.float64), mask=inside)


@triton.jit
def _rates(channel, frequencies):
    """Returns the factor by which J multiplies the other channel of the pair."""
    frequency = tl.load(frequencies + channel // 2).to(tl.float32)
    return tl.where(channel % 2 == 0, -frequency, frequency)


@triton.jit
def turned_states(
    s,  # [chunks, G, rows, V]: the states before each chunk
    ds,  # the gradients of those after each chunk
    z,  # [chunks, G, K, K]
    dz,
    weights,  # float32 [rows]: the share of each row in an inner product
    channels,  # int32 [P, rows]: the channels of each row
    partners,  # int32 [P, rows]: the row with the other channel of the pair instead
    frequencies,  # float64 [K / 2]
    products,  # float64 [chunks, G, parts], the result: parts of dS . J S at the ends of all chunks but the last
    T,
    G,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,  # the next power of two of V
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,  # rows of a tile
    Z: tl.constexpr,
):
    """Computes the products. Grid: chunks of all rows, key/value heads, parts."""
    chunk = tl.cast(tl.program_id(0), tl.int64)
    if (tl.program_id(0) % tl.cdiv(T, CHUNK) + 1) * CHUNK < T:
        g = tl.program_id(1)
        s += ((chunk + 1) * G + g) * rows * V
        ds += (chunk * G + g) * rows * V
        col = tl.arange(0, COLUMNS)[None, :]
        acc = tl.zeros([BLOCK], tl.float32)
        for i in range(tl.program_id(2) * BLOCK, rows, tl.num_programs(2) * BLOCK):
            row = i + tl.arange(0, BLOCK)
            inside = row < rows
            mask = inside[:, None] & (col < V)
            own = tl.load(ds + row[:, None] * V + col, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weights + row, mask=inside, other=0.0)
            for j in tl.static_range(P):
                channel = tl.load(channels + j * rows + row, mask=inside, other=0)
                partner = tl.load(partners + j * rows + row, mask=inside, other=0)
                other = tl.load(s + partner[:, None] * V + col, mask=mask, other=0.0).to(tl.float32)
                acc += tl.sum(own * other, 1) * (weight * _rates(channel, frequencies))
        total = tl.sum(acc.to(tl.float64), 0)
        if Z:
            z += ((chunk + 1) * G + g) * (K * K)
            dz += (chunk * G + g) * (K * K)
            b = tl.arange(0, K)
            matrix = tl.zeros([K], tl.float32)
            for a in range(tl.program_id(2), K, tl.num_programs(2)):
                own = tl.load(dz + a * K + b).to(tl.float32)
                matrix += own * tl.load(z + (a ^ 1) * K + b).to(tl.float32) * _rates(a, frequencies)
                matrix += own * tl.load(z + a * K + (b ^ 1)).to(tl.float32) * _rates(b, frequencies)
            total += tl.sum(matrix.to(tl.float64), 0)
        tl.store(products + (chunk * G + g) * tl.num_programs(2) + tl.program_id(2), total)


def products_with_states(
    call: Call, s: Tensor, z: Tensor, ds: Tensor, dz: Tensor, frequencies: Tensor, reads_z: bool
) -> Tensor:
    """Returns -dS . J S at the end of every chunk, float64 [B, chunks, G], 0 at the end of a row.

    The arguments are the states before each chunk, the gradients of those after, and float64 frequencies [K/2].
    """
    plan, frequencies = call.plan, frequencies.contiguous()
    products = torch.zeros(plan.layout.blocks(plan.chunk), plan.G, STATE_PARTS, device=s.device, dtype=torch.float64)
    plan.once(_turned_states, reads_z)(s=s, ds=ds, z=z, dz=dz, frequencies=frequencies, products=products)
    return products.sum(2).neg_().view(plan.layout.sequences, -1, plan.G)


def _turned_states(plan: Plan, reads_z: bool) -> Launcher:
    rows = plan.rows
    if not isinstance(rows, Rows):
        raise TypeError(f"states are turned in plain rows; got {type(rows).__name__}")
    channels, partners = rows.pairs_on(plan.device)
    tables = {"weights": rows.shares_on(plan.device), "channels": channels, "partners": partners}
    numbers = {"T": plan.layout.length, "G": plan.G, "rows": plan.row_count}
    constants = {"K": plan.K, "V": plan.V, "COLUMNS": plan.columns, "P": plan.p, "CHUNK": plan.chunk}
    constants |= {"BLOCK": max(1, ROW_ELEMENTS // plan.columns), "Z": reads_z}
    grid = (plan.layout.blocks(plan.chunk), plan.G, STATE_PARTS)
    return Launcher(turned_states, grid, numbers | constants | tables)


def position_gradient(
    q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, frequencies: Tensor, chunk: int, products: Tensor | None
) -> Tensor:
    """Returns the gradient of the positions of every token and key/value head, float64 [B, T, G].

    Args:
        q, k: rotated, [B, T, H, K] and [B, T, G, K].
        dq, dk: their gradients.
        frequencies: float64 [K/2].
        chunk: tokens of a chunk.
        products: those of `products_with_states`; None: the sums do not start again at chunks.
    """
    (batch, time, heads, key_dim), groups = q.shape, k.shape[2]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    terms = torch.empty(batch, time, groups, device=q.device, dtype=torch.float64)
    numbers: dict[str, Any] = {"q_sb": q.stride(0), "q_st": q.stride(1), "q_sh": q.stride(2), "T": time, "G": groups}
    numbers |= {"k_sb": k.stride(0), "k_st": k.stride(1), "k_sg": k.stride(2), "R": heads // groups}
    numbers |= {"K": key_dim, "WIDTH": next_power_of_2(key_dim), "BLOCK": TERM_BLOCK}
    tensors = {"q": q, "k": k, "dq": dq.contiguous(), "dk": dk.contiguous()}
    grid = (batch * ceil_div(time, TERM_BLOCK), groups)
    launch(turn_terms, grid, numbers, **tensors, frequencies=frequencies.contiguous(), terms=terms)
    if products is None:
        return terms
    count = products.shape[1]
    sums = pad(terms, (0, 0, 0, count * chunk - time)).view(batch, count, chunk, groups).sum(2)
    # From the end of a chunk to the end of the next one, the terms should add up to the difference of the two products.
    terms[:, chunk - 1 : (count - 1) * chunk : chunk] += products[:, :-1] - products[:, 1:] - sums[:, 1:]
    return terms
