"""The delta rule by Triton kernels: prediction errors and their gradients, see `sympow.ops.delta_solve`.

Within a chunk, groups of blocks of tokens are solved one after another, the blocks of a group by the same program. What
the tokens of a block take from one another is computed before, for all blocks at once and without gates: with
(D o A)_ij = d_i / d_j A_ij, (I + D o A)^-1 is D o (I + A)^-1. What a group takes from others is computed by many
programs. Between chunks the state is read and written by the kernels of power attention. So are output and gradients.

Log decays are sums of two float32 numbers, `high` and `low`, relative to the start of a chunk. The difference of two of
them keeps its digits behind a gate that has decayed everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.ops import delta_solve
from sympow.ops.delta_types import DeltaGradients, DeltaOptions
from sympow.ops.feature_map import spow_dim
from sympow.ops.runtime.launcher import ceil_div, next_power_of_2, operator
from sympow.ops.runtime.launcher import launch as launch_kernel
from sympow.ops.triton import adapt as power
from sympow.ops.triton import launch, plan
from sympow.ops.triton.gate import REACH_TILE, gate_sums
from sympow.ops.triton.plan import SUM_BLOCK, Call, Gate, Shapes
from sympow.ops.triton.primitives import power as power_of
from sympow.ops.types import PowerState

BLOCK = 64  # tokens that are solved together
_CHUNK = 2048  # tokens of a chunk of rows that need more than one
_ALONE = 4096  # the longest row that is one chunk, without states
_CORRECTIONS = {"num_warps": 1}  # options of the launch of `block_corrections`
_ROWS = 64  # rows of a program that adds up the gradients of keys
_VANISHED = tl.constexpr(150.0)  # -log2 of a decay that is 0 in float32


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _rows_of(k, beta, start, first, T, G, g, K: tl.constexpr, ROWS: tl.constexpr):
    """Returns keys [ROWS, K] and beta [ROWS] of ROWS tokens of a head; zeros behind the end of the row."""
    t = tl.arange(0, ROWS)
    valid = first + t < T
    token = (start + first + t) * G + g
    x = tl.load(k + token[:, None] * K + tl.arange(0, K)[None, :], mask=valid[:, None], other=0.0)
    return x, tl.load(beta + token, mask=valid, other=0.0)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Returns a b for float32 matrices."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _system(x, y, P: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (x_i . y_j)**P."""
    return power_of(tl.dot(x, tl.trans(y), input_precision=PRECISION), P)


@triton.jit
def _own_corrections(x, b, P: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Returns N of (I + M B) N = M for M = tril((x_i . x_j)**P, -1) and B = diag(b), by substitution: [ROWS, ROWS]."""
    t = tl.arange(0, ROWS)
    rows, cols = t[:, None], t[None, :]
    scores = _system(x, x, P, PRECISION)
    system = tl.where(rows < cols, scores * b[:, None], 0.0)  # M B transposed: [j, i]
    found = tl.where(rows > cols, scores, 0.0)
    for i in range(1, ROWS):
        a = tl.sum(tl.where(cols == i, system, 0.0), 1)  # the entries of row i, by j
        found -= tl.where(rows == i, tl.sum(a[:, None] * found, 0)[None, :], 0.0)
    return found


@triton.jit
def _joined(rest, own, b, PRECISION: tl.constexpr):
    """Returns the solution N of (I + M B) N = rest, where `own` is that for M on the right-hand side."""
    return rest - _product(own, rest * b[:, None], PRECISION)


@triton.jit
def block_corrections(
    k, beta, out, T, G,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Computes out [blocks, G, BLOCK, BLOCK], float32: N of (I + M B) N = M for every block of tokens, without gates.

    M = tril((k_i . k_j)**P, -1) and B = diag(beta). So (I + M B)^-1 = I - N B and (I + B M)^-1 = I - B N, of which the
    forward and the backward need one each. k is [B, T, G, K] and beta [B, T, G]. Grid: blocks over all rows, G.

    The block has four parts, whose products have the precision FULL; N_ba for parts b > a solves (I + M_bb B_b) N_ba =
    M_ba - sum_{a<=c<b} M_bc B_c N_ca.
    """
    count = tl.cdiv(T, BLOCK)
    g = tl.program_id(1)
    first = (tl.program_id(0) % count) * BLOCK
    start = tl.cast(tl.program_id(0) // count, tl.int64) * T
    N: tl.constexpr = BLOCK // 4
    x0, b0 = _rows_of(k, beta, start, first, T, G, g, K, N)
    x1, b1 = _rows_of(k, beta, start, first + N, T, G, g, K, N)
    x2, b2 = _rows_of(k, beta, start, first + 2 * N, T, G, g, K, N)
    x3, b3 = _rows_of(k, beta, start, first + 3 * N, T, G, g, K, N)
    n00 = _own_corrections(x0, b0, P, N, PRECISION)
    n11 = _own_corrections(x1, b1, P, N, PRECISION)
    n22 = _own_corrections(x2, b2, P, N, PRECISION)
    n33 = _own_corrections(x3, b3, P, N, PRECISION)
    m10 = _system(x1, x0, P, PRECISION)
    m21 = _system(x2, x1, P, PRECISION)
    m32 = _system(x3, x2, P, PRECISION)
    m20 = _system(x2, x0, P, PRECISION)
    m31 = _system(x3, x1, P, PRECISION)
    rest = m10 - _product(m10, b0[:, None] * n00, FULL)
    n10 = _joined(rest, n11, b1, FULL)
    rest = m21 - _product(m21, b1[:, None] * n11, FULL)
    n21 = _joined(rest, n22, b2, FULL)
    rest = m32 - _product(m32, b2[:, None] * n22, FULL)
    n32 = _joined(rest, n33, b3, FULL)
    rest = m20 - _product(m20, b0[:, None] * n00, FULL) - _product(m21, b1[:, None] * n10, FULL)
    n20 = _joined(rest, n22, b2, FULL)
    rest = m31 - _product(m31, b1[:, None] * n11, FULL) - _product(m32, b2[:, None] * n21, FULL)
    n31 = _joined(rest, n33, b3, FULL)
    rest = _system(x3, x0, P, PRECISION)
    rest -= _product(rest, b0[:, None] * n00, FULL)
    rest -= _product(m31, b1[:, None] * n10, FULL) + _product(m32, b2[:, None] * n20, FULL)
    n30 = _joined(rest, n33, b3, FULL)
    t = tl.arange(0, N)
    base = out + (tl.cast(tl.program_id(0), tl.int64) * G + g) * (BLOCK * BLOCK) + t[:, None] * BLOCK + t[None, :]
    zero = n00 * 0.0
    tl.store(base, n00)
    tl.store(base + N, zero)
    tl.store(base + 2 * N, zero)
    tl.store(base + 3 * N, zero)
    tl.store(base + N * BLOCK, n10)
    tl.store(base + N * BLOCK + N, n11)
    tl.store(base + N * BLOCK + 2 * N, zero)
    tl.store(base + N * BLOCK + 3 * N, zero)
    tl.store(base + 2 * N * BLOCK, n20)
    tl.store(base + 2 * N * BLOCK + N, n21)
    tl.store(base + 2 * N * BLOCK + 2 * N, n22)
    tl.store(base + 2 * N * BLOCK + 3 * N, zero)
    tl.store(base + 3 * N * BLOCK, n30)
    tl.store(base + 3 * N * BLOCK + N, n31)
    tl.store(base + 3 * N * BLOCK + 2 * N, n32)
    tl.store(base + 3 * N * BLOCK + 3 * N, n33)


@triton.jit
def _log_decay(high, low, early, late):
    """Returns log2 of the decay from tokens `early` to tokens `late` of the chunk, at most 0."""
    rest = tl.load(low + late) - tl.load(low + early)
    return tl.minimum((tl.load(high + late) - tl.load(high + early)) + rest, 0.0)


@triton.jit
def _decay(high_early, low_early, high_late, low_late):
    """Returns the decay between tokens with these log decays; 1 where the first is the later one."""
    return tl.exp2(tl.minimum((high_late - high_early) + (low_late - low_early), 0.0))


@triton.jit
def _source(
    source, read, high, low, n, t, row, local, count, G, c, V: tl.constexpr, GATED: tl.constexpr, LATER: tl.constexpr
):
    """Returns channels c of what tokens n + t [ROWS] of a chunk start from: source, less `read` times a decay.

    source is [B, T, G, V], in which token n of the head is row `row`. `read`, None or float32 [B, count, G, V], in
    which token n is row `local`, is what the state before the chunk returns. If LATER, it is what the negative of the
    gradient of the state behind the chunk gives.
    """
    valid = n + t < count
    mask = valid[:, None] & (c < V)
    place = t[:, None] * (G * V) + c
    acc = tl.load(source + row * V + place, mask=mask, other=0.0).to(tl.float32)
    if read is not None:
        x = tl.load(read + local * V + place, mask=mask, other=0.0)
        if GATED:
            high_n = tl.load(high + n + t, mask=valid, other=0.0)
            low_n = tl.load(low + n + t, mask=valid, other=0.0)
            if LATER:
                x *= _decay(high_n, low_n, tl.load(high + count - 1), tl.load(low + count - 1))[:, None]
            else:
                x *= _decay(0.0, 0.0, high_n, low_n)[:, None]
        acc -= x
    return acc


@triton.jit
def _near_end(j, count, SPAN: tl.constexpr, LATER: tl.constexpr):
    """Returns the last token of the group of token j, or its first one if LATER; the last of all for later tokens."""
    if LATER:
        return tl.minimum(j // SPAN * SPAN, count - 1)
    else:
        return tl.minimum(j // SPAN * SPAN + (SPAN - 1), count - 1)


@triton.jit
def groups_pass(
    k, source, read, sums, faded, target, T, count, group, G,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr, LATER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes target, float32 [B, G, SPAN, COLUMNS], for the group of SPAN tokens that begins at token `group`.

    That is what `_source` returns, less what the updates of earlier groups return; if LATER, less what the gradients of
    the values of later groups say of the updates. Tensors of all tokens begin with the chunk, which has `count` tokens.
    faded [B, G, groups SPAN, COLUMNS] has these updates, decayed to the end of their own group, or these gradients,
    decayed to the start of it. Grid: tiles of ROWS tokens of the group, rows, G.
    """
    b = tl.cast(tl.program_id(1), tl.int64)
    g = tl.cast(tl.program_id(2), tl.int64)
    batch = tl.cast(tl.num_programs(1), tl.int64)
    start = b * T
    t = tl.arange(0, ROWS)
    s = tl.arange(0, STEP)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    channel = tl.arange(0, K)[None, :]
    n = group + tl.program_id(0) * ROWS
    valid = n + t < count
    row = (start + n) * G + g
    x = tl.load(k + row * K + (t[:, None] * (G * K) + channel), mask=valid[:, None], other=0.0)
    groups = tl.cdiv(count, SPAN)
    faded += (b * G + g) * groups * (SPAN * COLUMNS)
    high = sums
    low = sums
    begin = group * 0
    end = group // SPAN
    if LATER:
        begin = end + 1
        end = groups
    if GATED:
        high += g * batch * T + start
        low = high + G * batch * T
        # From j to i everything decays in three parts: from j to the end of its group, then to the first token of the
        # group of i, then to i. The second part is one number for two groups. If LATER, the other way round.
        border = group
        if LATER:
            border = group + SPAN - 1
        gone = group * 0  # groups of which nothing is left at the border
        for i in range(begin, end, 32):
            other = i + tl.arange(0, 32)
            if LATER:
                far = _log_decay(high, low, border, tl.minimum(other * SPAN, count - 1))
            else:
                far = _log_decay(high, low, tl.minimum(other * SPAN + SPAN - 1, border), border)
            gone += tl.sum(((far < -_VANISHED) & (other < end)).to(tl.int32), 0)
        if LATER:
            end -= gone
        else:
            begin += gone
        high_b = tl.load(high + border)
        low_b = tl.load(low + border)
        near = _near_end(begin * SPAN, count, SPAN, LATER)
        high_j = tl.load(high + near)
        low_j = tl.load(low + near)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in range(begin * SPAN, tl.minimum(end * SPAN, count), STEP):
        keys = k + ((start + j) * G + g) * K + (s * (G * K) + channel)
        if LATER:
            y = tl.load(keys, mask=j + s < count, other=0.0)
        else:
            y = tl.load(keys)
        u = tl.load(faded + tl.cast(j, tl.int64) * COLUMNS + (s * COLUMNS + c))
        w = power_of(tl.dot(x, tl.trans(y), input_precision=PRECISION), P)
        if GATED:
            if LATER:
                w *= _decay(high_b, low_b, high_j, low_j)
            else:
                w *= _decay(high_j, low_j, high_b, low_b)
            near = _near_end(j + STEP, count, SPAN, LATER)  # of the next iteration, which need not wait for the loads
            high_j = tl.load(high + near)
            low_j = tl.load(low + near)
        acc = tl.dot(w.to(u.dtype), u, acc, input_precision=PRECISION)
    if GATED:
        high_n = tl.load(high + n + t, mask=valid, other=0.0)
        low_n = tl.load(low + n + t, mask=valid, other=0.0)
        if LATER:
            acc *= _decay(high_n, low_n, high_b, low_b)[:, None]
        else:
            acc *= _decay(high_b, low_b, high_n, low_n)[:, None]
    local = (b * count + n) * G + g
    acc = _source(source, read, high, low, n, t, row, local, count, G, c, V, GATED, LATER) - acc
    target += ((b * G + g) * SPAN + tl.program_id(0) * ROWS) * COLUMNS
    tl.store(target + (t[:, None] * COLUMNS + c), acc)


@triton.jit
def _block(
    k, beta, source, read, target, high, low, own, T, count, group, b, g, G, c,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    GATED: tl.constexpr, LATER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Returns keys, beta and what the solution starts from of the block whose first token is `own` of the group."""
    t = tl.arange(0, BLOCK)
    n = group + own
    valid = n + t < count
    row = (b * T + n) * G + g
    keys = k + row * K + (t[:, None] * (G * K) + tl.arange(0, K)[None, :])
    x = tl.load(keys, mask=valid[:, None], other=0.0)
    scale = tl.load(beta + row + t * G, mask=valid, other=0.0)
    if ALONE:
        local = (b * count + n) * G + g
        acc = _source(source, read, high, low, n, t, row, local, count, G, c, V, GATED, LATER)
    else:
        acc = tl.load(target + ((b * G + g) * SPAN + own) * COLUMNS + (t[:, None] * COLUMNS + c))
    return x, scale, acc


@triton.jit
def solve_pass(
    k, beta, source, read, target, sums, corrections, errors, update, recent, faded, dbeta, T, count, group, G,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, GATED: tl.constexpr, LATER: tl.constexpr, ALONE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes errors and update = beta errors, [B, T, G, V], for the group of SPAN tokens that begins at `group`.

    If LATER, it computes the gradients of the values, in place of update, and the part of each program in dbeta,
    [parts, B, T, G], given the errors. ALONE: no other group comes before in the solution, and the group starts from
    what `_source` returns; otherwise from target, see `groups_pass`. If they are not None, `recent` [B, count, G, V]
    gets a copy of update, and faded what `groups_pass` reads of it. Tensors begin with the chunk, as in that pass.
    Grid: rows, G, parts of WIDTH channels.

    Blocks of the group are solved one after another, the last one first if LATER.
    """
    b = tl.cast(tl.program_id(0), tl.int64)
    g = tl.cast(tl.program_id(1), tl.int64)
    high = sums
    low = sums
    if GATED:
        batch = tl.cast(tl.num_programs(0), tl.int64)
        high += g * batch * T + b * T
        low = high + G * batch * T
    t = tl.arange(0, BLOCK)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCKS: tl.constexpr = SPAN // BLOCK
    last = tl.minimum(group + SPAN, count) - 1
    keys = ()
    updates = ()
    lefts = ()  # the token of each solved block that is next to the blocks that are not solved
    following = _block(
        k, beta, source, read, target, high, low, SPAN - BLOCK if LATER else 0, T, count, group, b, g, G, c,
        K, V, COLUMNS, BLOCK, SPAN, GATED, LATER, ALONE,
    )  # fmt: skip
    for m in tl.static_range(BLOCKS):
        x, scale, acc = following
        if m + 1 < BLOCKS:  # starts now, because loads take about as long as the solution of a block
            following = _block(
                k, beta, source, read, target, high, low, SPAN - (m + 2) * BLOCK if LATER else (m + 1) * BLOCK, T,
                count, group, b, g, G, c, K, V, COLUMNS, BLOCK, SPAN, GATED, LATER, ALONE,
            )  # fmt: skip
        n = group + (SPAN - (m + 1) * BLOCK if LATER else m * BLOCK)
        valid = n + t < count
        row = (b * T + n) * G + g
        mask = valid[:, None] & (c < V)
        place = t[:, None] * (G * V) + c
        at = ((b * tl.cdiv(T, BLOCK) + n // BLOCK) * G + g) * (BLOCK * BLOCK)
        r = tl.load(corrections + at + (t[:, None] * BLOCK + t[None, :]), mask=valid[:, None], other=0.0)
        if LATER:
            r = tl.trans(r)
            error = tl.load(errors + row * V + place, mask=mask, other=0.0)
        if GATED:
            # Everything decays from j to i in three parts, as in `groups_pass`, here from block to block.
            front = tl.minimum(n, count - 1)
            back = tl.minimum(front + BLOCK, count) - 1
            high_n = tl.load(high + n + t, mask=valid, other=0.0)
            low_n = tl.load(low + n + t, mask=valid, other=0.0)
            to_front = _decay(tl.load(high + front), tl.load(low + front), high_n, low_n)
            to_back = _decay(high_n, low_n, tl.load(high + back), tl.load(low + back))
        found = tl.zeros([BLOCK, WIDTH], tl.float32)
        for j in tl.static_range(m):
            w = power_of(tl.dot(x, tl.trans(keys[j]), input_precision=PRECISION), P)
            if GATED:
                if LATER:
                    w *= tl.exp2(_log_decay(high, low, back, lefts[j]))
                else:
                    w *= tl.exp2(_log_decay(high, low, lefts[j], front))
            found = tl.dot(w.to(updates[j].dtype), updates[j], found, input_precision=PRECISION)
        if GATED:
            if LATER:
                acc -= found * to_back[:, None]
                r *= _decay(high_n[:, None], low_n[:, None], high_n[None, :], low_n[None, :])
            else:
                acc -= found * to_front[:, None]
                r *= _decay(high_n[None, :], low_n[None, :], high_n[:, None], low_n[:, None])
        else:
            acc -= found
        # The sign brings r into registers, as decays do, and the product is no number that was loaded. So both are kept
        # in shared memory at the same place one after the other, and neither where keys or updates are kept, see
        # `compile_kernels.py` in the tests.
        acc = tl.dot(-r, acc * scale[:, None], acc, input_precision="ieee" if PRECISION == "ieee" else "tf32")
        u = acc * scale[:, None]
        if m + 1 < BLOCKS:
            keys += (x,)
            kept = u
            if GATED:
                if LATER:
                    kept *= to_front[:, None]
                    lefts += (front,)
                else:
                    kept *= to_back[:, None]
                    lefts += (back,)
            updates += (kept.to(update.dtype.element_ty),)
        if LATER:
            part = tl.cast(tl.program_id(2), tl.int64) * tl.num_programs(0) * T * G
            tl.store(dbeta + part + row + t * G, tl.sum(acc * error.to(tl.float32), 1), mask=valid)
        else:
            tl.store(errors + row * V + place, acc.to(errors.dtype.element_ty), mask=mask)
        tl.store(update + row * V + place, u.to(update.dtype.element_ty), mask=mask)
        if recent is not None:
            local = (b * count + n) * G + g
            tl.store(recent + local * V + place, u.to(recent.dtype.element_ty), mask=mask)
        if faded is not None:
            if GATED:
                if LATER:
                    u *= _decay(tl.load(high + group), tl.load(low + group), high_n, low_n)[:, None]
                else:
                    u *= _decay(high_n, low_n, tl.load(high + last), tl.load(low + last))[:, None]
            at = ((b * G + g) * tl.cdiv(count, SPAN) * SPAN + n) * COLUMNS
            tl.store(faded + at + (t[:, None] * COLUMNS + c), u.to(faded.dtype.element_ty))


@triton.jit
def key_gradient_pass(
    k, u, dv, first, second, third, out, count,
    K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes out [count, K]: first + second + third + 2 P (k . k)**(P - 1) (dv . u) k, for k [count, K] and u and dv
    [count, V]. Grid: blocks of BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    there, mask = row * V + c, (row < count) & (c < V)
    own = tl.load(u + there, mask=mask, other=0.0).to(tl.float32)
    own = tl.sum(own * tl.load(dv + there, mask=mask, other=0.0).to(tl.float32), 1)
    c = tl.arange(0, CHANNELS)[None, :]
    here, mask = row * K + c, (row < count) & (c < K)
    x = tl.load(k + here, mask=mask, other=0.0).to(tl.float32)
    if P > 1:
        own *= power_of(tl.sum(x * x, 1), P - 1)
    acc = 2 * P * own[:, None] * x
    acc += tl.load(first + here, mask=mask, other=0.0).to(tl.float32)
    acc += tl.load(second + here, mask=mask, other=0.0).to(tl.float32)
    acc += tl.load(third + here, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + here, acc.to(out.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------- backend


class _States(NamedTuple):
    """Holds the states between chunks, in the rows of the kernels."""

    before: Tensor  # those before each chunk, [B chunks, G, rows, V]
    size: int  # tokens of a chunk
    init: bool  # whether the first chunk has a state
    last: Tensor | None  # behind the last chunk, float32 [B, G, rows, V]; None unless it is returned


def solve(
    k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None, options: DeltaOptions
) -> tuple[Tensor, Tensor, _States | None]:
    """Returns the errors e and the updates u, [B, T, G, V] in the dtype of v, and the states between chunks.

    See `delta_solve.solve`. A row of one chunk has no states.
    """
    chunks = _Chunks(k, v, beta, log_g, options)
    errors, update = torch.empty_like(v), torch.empty_like(v)
    rows = None if state is None else chunks.from_public(state)
    several = len(chunks.spans) > 1
    if several:
        chunks.keep_states()
    for span in chunks.spans:
        more = span != chunks.spans[-1] or (several and options.return_state)
        recent = chunks.solve(span, rows, more, False, source=v, errors=errors, update=update)
        if recent is not None:
            rows = chunks.advanced(rows, span, recent, False)
    if chunks.states is None:
        return errors, update, None
    return errors, update, _States(chunks.states.flatten(0, 1), chunks.size, state is not None, rows)


def solve_gradient(
    k: Tensor, errors: Tensor, beta: Tensor, log_g: Tensor | None, du: Tensor, options: DeltaOptions
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of v and beta; see `delta_solve.solve_gradient`."""
    chunks = _Chunks(k, errors, beta, log_g, options)
    dv, rows = torch.empty_like(errors), None
    dbeta = torch.empty(chunks.parts, *beta.shape, device=beta.device, dtype=beta.dtype)
    tensors = {"source": du.contiguous(), "errors": errors, "update": dv, "dbeta": dbeta}
    for span in reversed(chunks.spans):
        recent = chunks.solve(span, rows, span != chunks.spans[0], True, **tensors)
        if recent is not None:
            rows = chunks.advanced(rows, span, recent, True)
    return dv, dbeta[0] if chunks.parts == 1 else dbeta.sum(0)


def attend(
    q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, states: _States | None,
    options: DeltaOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes power attention without a normalizer; see `delta_solve.attend`."""
    if states is not None:
        call = Call(q, k, u, log_g, None, options.p, 1.0, states.size, _tf32(u.dtype))
        out, _ = launch.output(call, states.before, None, states.init, False, 1.0, False)
        last = states.last if options.return_state else None
        return out, None if last is None else call.plan.rows.to_public(last)
    before = None if state is None else PowerState(state, state.new_zeros(state.shape[:3]), options.p, k.shape[3])
    out, after = power.attention(
        q, k, u, log_g, before, p=options.p, scale=1.0, normalize=False, eps=1.0, chunk_size=options.chunk_size,
        return_state=options.return_state,
    )  # fmt: skip
    return out, None if after is None else after.s


def attend_gradient(
    q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, last: Tensor | None, dout: Tensor,
    dlast: Tensor | None, options: DeltaOptions,
) -> DeltaGradients:  # fmt: skip
    """Returns the gradients of `attend`; see `delta_solve.attend_gradient`."""
    p, time, has_state = options.p, q.shape[1], state is not None or dlast is not None
    chunk = options.chunk_size
    if chunk is None:
        chunk = power.automatic_chunk_size(q, k, u, log_g, None, p, True, has_state)
    chunk = chunk if chunk < time else time if has_state else 0
    width = k.shape[3]
    if not chunk:  # the quadratic form takes tiles of whole powers of two
        q, k = power.padded(q), power.padded(k)
    z = None if state is None or p != 2 else state.new_zeros(state.shape[:3])
    dz = None if dlast is None or p != 2 else dlast.new_zeros(dlast.shape[:3])
    empty = u.new_empty(0, dtype=torch.float32)
    result = power.Forward(u, empty, last, None, None, None, None, None)
    call = power.Options(p, 1.0, False, 1.0, chunk, dlast is not None, _tf32(u.dtype), False, True)
    dq, dk, du, dlog_g, ds, *_ = power.backward(dout, dlast, dz, q, k, u, log_g, state, z, None, None, result, call)
    return DeltaGradients(dq[..., :width], dk[..., :width], du, dlog_g, ds)


def key_gradient(k: Tensor, u: Tensor, dv: Tensor, parts: Sequence[Tensor], p: int) -> Tensor:
    """Returns the gradient of the keys; see `delta_solve.key_gradient`."""
    out, count, value_dim = torch.empty_like(k), k[..., 0].numel(), u.shape[3]
    widths = {"CHANNELS": next_power_of_2(k.shape[3]), "COLUMNS": next_power_of_2(value_dim)}
    constants = {"K": k.shape[3], "V": value_dim, "P": p, **widths}
    first, second, third = (x.contiguous() for x in parts)
    tensors = {"k": k.contiguous(), "u": u, "dv": dv, "first": first, "second": second, "third": third, "out": out}
    grid = (ceil_div(count, _ROWS),)
    launch_kernel(key_gradient_pass, grid, {"count": count, "BLOCK": _ROWS} | constants, **tensors)
    return out


class _Chunks:
    """Cuts the rows of one call into chunks, and launches the kernels on one of them.

    Args:
        k: [B, T, G, K]. v: [B, T, G, V], only its shape and dtype are used. beta: [B, T, G]. log_g: [B, T, G], or None.
        options: of the call.
    """

    def __init__(self, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, options: DeltaOptions):
        self.k, self.beta, self.p = power.padded(k).contiguous(), beta.contiguous(), options.p
        self.given = k
        self.batch, self.time, self.groups, self.key_dim = self.k.shape
        self.value_dim, self.dtype = v.shape[3], v.dtype
        size = options.chunk_size
        if size is None:
            size = self.time if self.time <= _ALONE or not power.has_states(self.p, k.shape[3]) else _CHUNK
        self.size = ceil_div(size, BLOCK) * BLOCK
        if self.size < self.time:  # the output reads the states of these chunks
            self.size = Shapes(k, k, v, None, self.p, self.size, False).chunk
        self.spans = [slice(i, min(i + self.size, self.time)) for i in range(0, self.time, self.size)]
        self.columns = max(16, next_power_of_2(self.value_dim))
        self.log_g, self.sums = log_g, None if log_g is None else self._sums(log_g)
        self.group_launch, self.solve_launch = plan.delta_launches(
            self.key_dim, self.columns, self.dtype, k.device, self.batch * self.groups
        )
        # Two programs then fit on an SM.
        self.limit = {"maxnreg": 128} if self.group_launch is plan.HOPPER_DELTA[64][0] else {}
        self.parts = ceil_div(self.columns, self.solve_launch.step)
        # What one group starts from, and what groups read of others.
        span = self.solve_launch.block
        self.target = self._new(span, dtype=torch.float32)
        self.faded = self._new(ceil_div(min(self.size, self.time), span) * span)
        self.keys: tuple[slice, Tensor] | None = None
        self.made: dict[Any, Tensor] = {}
        self.states: Tensor | None = None
        blocks = ceil_div(self.time, BLOCK)
        shape = (self.batch * blocks, self.groups, BLOCK, BLOCK)
        self.corrections = torch.empty(shape, device=k.device, dtype=torch.float32)
        constants = {"K": self.key_dim, "P": self.p, "BLOCK": BLOCK, "PRECISION": self._precision} | _CORRECTIONS
        # Three products of tf32 have nearly all digits of float32, and take less time than its own on Hopper.
        exact = "tf32x3" if self._precision == "tf32" and plan.on_hopper(k.device) else "ieee"
        grid = (self.batch * blocks, self.groups)
        numbers = {"T": self.time, "G": self.groups}
        arguments: dict[str, Any] = numbers | constants | {"FULL": exact}
        launch_kernel(block_corrections, grid, arguments, k=self.k, beta=self.beta, out=self.corrections)

    def solve(
        self, span: slice, rows: Tensor | None, more: bool, later: bool, *, source: Tensor, **tensors: Tensor
    ) -> Tensor | None:
        """Solves the chunk at `span` group by group, from the last one on if `later`; see `solve_pass`.

        Args:
            span: of the chunk.
            rows: the state before the chunk, or if `later` the negative of the gradient of the state behind it; None
                for zeros.
            more: whether `advanced` is called next.
            later: computes the gradients.
            source: as for `_source`.
            **tensors: other arguments of `solve_pass`.

        Returns:
            The updates of the chunk [B, C, G, V], or None unless `more`.
        """
        count = span.stop - span.start
        read = None if rows is None else self._read(span, rows)
        recent = torch.empty(self.batch, count, *source.shape[2:], device=source.device, dtype=self.dtype)
        size, one = self.group_launch, self.solve_launch
        width = min(one.step, self.columns)
        groups = range(0, count, one.block)
        numbers = {"T": self.time, "count": count, "G": self.groups}
        constants: dict[str, Any] = {"K": self.key_dim, "V": self.value_dim, "COLUMNS": self.columns, "P": self.p}
        constants |= {"SPAN": one.block, "GATED": self.sums is not None, "LATER": later, "PRECISION": self._precision}
        # What begins at the chunk is a view, because every number of an argument makes a launcher of its own.
        first = span.start
        sums = None if self.sums is None else self.sums[:, :, first:]
        own = {"k": self.k[:, first:], "source": source[:, first:], "read": read, "sums": sums, "target": self.target}
        own["faded"] = self.faded if len(groups) > 1 else None
        more_own: dict[str, Tensor | None] = {
            "beta": self.beta[:, first:],
            "corrections": self.corrections[first // BLOCK :],
        }
        more_own |= {"recent": recent if more else None, "dbeta": None}
        more_own |= {name: x[..., first:, :] if name == "dbeta" else x[:, first:] for name, x in tensors.items()}
        rows_of_program = {"ROWS": size.block, "STEP": size.step} | size.options | self.limit
        grid = (self.batch, self.groups)
        for group in reversed(groups) if later else groups:
            alone = group == groups[-1 if later else 0]
            own_numbers = {"group": group} | numbers | constants
            if not alone:
                launch_kernel(groups_pass, (one.block // size.block, *grid), own_numbers | rows_of_program, **own)
            arguments = own_numbers | {"BLOCK": BLOCK, "WIDTH": width, "ALONE": alone} | one.options
            launch_kernel(solve_pass, (*grid, self.parts), arguments, **own, **more_own)
        return recent if more else None

    def keep_states(self) -> None:
        """Makes room for the states before each chunk, [B, chunks, G, rows, V], which `solve` then keeps."""
        shape = (self.batch, len(self.spans), self.groups, self._some_call().plan.row_count, self.value_dim)
        self.states = torch.empty(shape, device=self.k.device, dtype=self.dtype)

    def advanced(self, rows: Tensor | None, span: slice, recent: Tensor, later: bool) -> Tensor:
        """Returns the state behind the chunk at `span`, given that before it and the updates of the chunk.

        If `later`, it returns the negative of the gradient of the state before the chunk, given that of the state
        behind it, and the gradients of the values.
        """
        keys = self._keys(span)
        gate = None if self.log_g is None else self.log_g[:, span]
        call = Call(keys, keys, recent, gate, None, self.p, 1.0, keys.shape[1], self._tf32)
        ends = launch.new_ends(call, False)
        shape = (self.groups, call.plan.layout.tokens)
        # Without a normalizer, the factors of outputs are 1, and its own gradients are 0.
        gradient = (recent, self._filled(1, *shape), self._filled(0, *shape)) if later else None
        launch.states(call, rows, None if rows is None else self._no_z(call), ends, False, gradient)
        return ends[0]

    def _read(self, span: slice, rows: Tensor) -> Tensor:
        """Returns phi(k) times the state for the chunk at `span`, float32 [B, C, G, V]."""
        keys = self._keys(span)
        batch, time, heads, _ = keys.shape
        # The pass adds the outputs of values within the chunk, which are zeros here. As if a gate left no earlier
        # tiles of keys, it reads only those of a query's own tile.
        values = self._filled(0, self.value_dim, dtype=self.dtype).expand(batch, time, heads, -1)
        gate = Gate(rows.new_empty(0), self._tiles(time), None)
        call = Call(keys, keys, values, None, None, self.p, 1.0, time, self._tf32, gate=gate)
        if self.states is None:
            before = rows.to(self.dtype)
        else:
            before = self.states[:, span.start // self.size].copy_(rows).contiguous()
        out, _ = launch.output(call, before, None, True, False, 1.0, True)
        return out

    def from_public(self, state: Tensor) -> Tensor:
        """Returns a public state in the rows of the kernels, float32 [B, G, rows, V]."""
        return power.from_public(self._some_call().plan.rows, state, None)[0].float()

    def _keys(self, span: slice) -> Tensor:
        """Returns the keys of the chunk at `span`, [B, C, G, K]. They are copied once."""
        if self.keys is None or self.keys[0] != span:
            self.keys = span, self.given[:, span].contiguous()
        return self.keys[1]

    def _some_call(self) -> Call:
        """Returns a call of one token, whose plan has the rows of all chunks."""
        x = self.given[:, :1]
        y = self._filled(0, *x.shape[:3], self.value_dim, dtype=self.dtype)
        return Call(x, x, y, None, None, self.p, 1.0, 1, self._tf32)

    def _no_z(self, call: Call) -> Tensor | None:
        shape = call.plan.end_shapes(False)[1]
        return self._filled(0, *shape) if shape[0] else None

    def _filled(self, number: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor of one number, which is made once."""
        key = (number, shape, dtype)
        if key not in self.made:
            self.made[key] = torch.full(shape, float(number), device=self.k.device, dtype=dtype)
        return self.made[key]

    def _tiles(self, time: int) -> Tensor:
        """Returns for each tile of a chunk its first token, see `gate.gate_sums`. They are made once."""
        if time not in self.made:
            first = torch.arange(0, time, REACH_TILE.value, device=self.k.device, dtype=torch.int32)
            self.made[time] = first.repeat(self.groups * self.batch)
        return self.made[time]

    def _new(self, tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = (self.batch, self.groups, tokens, self.columns)
        return torch.empty(shape, device=self.k.device, dtype=dtype or self.dtype)

    def _sums(self, log_g: Tensor) -> Tensor:
        """Returns log2 of the decay from the start of the chunk to each token as two numbers, [2, G, B T]."""
        sums = torch.empty(2, self.groups, self.batch * self.time, device=log_g.device, dtype=torch.float32)
        block = min(SUM_BLOCK, max(REACH_TILE.value, next_power_of_2(self.size)))
        numbers = {"T": self.time, "tokens": self.batch * self.time, "G": self.groups, "CHUNK": self.size, "most": 0.0}
        options = {"BLOCK": block, "TILED": False, "PACKED": False, "OVERLAP": False}
        nothing = dict.fromkeys(("begins", "ends", "starts", "chunks"))
        grid = (self.batch * len(self.spans), self.groups)
        launch_kernel(gate_sums, grid, numbers | options, log_g=log_g.contiguous(), sums=sums, **nothing)
        return sums

    @property
    def _tf32(self) -> bool:
        return _tf32(self.dtype)

    @property
    def _precision(self) -> str:
        return "tf32" if self._tf32 or self.dtype != torch.float32 else "ieee"


def _tf32(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32


# ------------------------------------------------------------------------------------------------- operator


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None, options: DeltaOptions
) -> tuple[Tensor, Tensor | None]:
    """Computes what `power_delta_rule` promises, for inputs that it has checked and the kernels take."""
    dtype, (p, chunk, final), (key_dim, value_dim) = v.dtype, options, (q.shape[3], v.shape[3])
    if dtype == torch.float16:  # powers leave its range
        q, k, v = q.float(), k.float(), v.float()
    level_dim = plan.leveled_key_dim(key_dim, p, q.dtype, q.device)
    q, k = power.padded(q, level_dim), power.padded(k, level_dim)
    beta, gates = beta.float(), None if log_g is None else log_g.float()
    state = None if state is None else power.widened(state, key_dim, q.shape[3], p)
    widest = power.widest_values(level_dim is not None)
    outs, ends = [], []
    for first in range(0, value_dim, widest):
        part = power.padded(v[..., first : first + widest])
        before = None if state is None else power.padded(state[..., first : first + widest]).contiguous()
        out, last, *_ = power_delta(q, k, part.contiguous(), beta, gates, before, p, chunk or 0, final)
        width = min(widest, value_dim - first)
        outs.append(out[..., :width])
        ends.append(last[..., :width])
    out = (outs[0] if len(outs) == 1 else torch.cat(outs, -1)).to(dtype)
    if not final:
        return out, None
    return out, power.narrowed(torch.cat(ends, -1), key_dim, q.shape[3], p)


class _Backend:
    """Holds the functions of `DeltaBackend`."""

    solve, solve_gradient = staticmethod(solve), staticmethod(solve_gradient)
    attend, attend_gradient = staticmethod(attend), staticmethod(attend_gradient)
    key_gradient = staticmethod(key_gradient)


def _like_gradients(dout, dlast, q, k, v, beta, log_g, state, errors, update, last, p, chunk):
    grads = [torch.empty_like(x) for x in (q, k, v, beta)]
    return *grads, *(beta.new_empty(0) if x is None else torch.empty_like(x) for x in (log_g, state))


@operator(_like_gradients)
def power_delta_backward(
    dout: Tensor,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_g: Tensor | None,
    state: Tensor | None,
    errors: Tensor,
    update: Tensor,
    last: Tensor,
    p: int,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k, v, beta, log_g and the incoming state; empty for what was not given."""
    with torch.cuda.device_of(q) if power.is_elsewhere(q) else nullcontext():
        options = DeltaOptions(p, chunk or None, dlast is not None)
        end = last if dlast is not None else None
        dout = dout.to(q.dtype).contiguous()
        found = delta_solve.backward(_Backend, q, k, beta, log_g, state, errors, update, end, dout, dlast, options)
    dq, dk, dv, dbeta, dlog_g, ds = (beta.new_empty(0) if x is None else x.contiguous() for x in found)
    return dq, dk, dv, dbeta, dlog_g, ds


def _like_forward(q, k, v, beta, log_g, state, p, chunk, final):
    out = q.new_empty(*q.shape[:3], v.shape[3])
    shape = (q.shape[0], k.shape[2], spow_dim(q.shape[3], p), v.shape[3]) if final else (0,) * 4
    return out, beta.new_empty(shape), torch.empty_like(v), torch.empty_like(v)


def _keep(ctx, inputs, output):
    q, k, v, beta, log_g, state, ctx.p, ctx.chunk, ctx.final = inputs
    _, last, errors, update = output
    ctx.save_for_backward(q, k, v, beta, log_g, state, errors, update, last)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlast, *_):
    q, k, v, beta, log_g, state, errors, update, last = ctx.saved_tensors
    if dout is None:
        dout = q.new_zeros(*q.shape[:3], v.shape[3])
    dlast = dlast if ctx.final else None
    tensors = (q, k, v, beta, log_g, state, errors, update, last)
    *grads, dlog_g, ds = power_delta_backward(dout, dlast, *tensors, ctx.p, ctx.chunk)
    return *grads, None if log_g is None else dlog_g, None if state is None else ds, None, None, None


@operator(_like_forward, _keep, _backward)
def power_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_g: Tensor | None,
    state: Tensor | None,
    p: int,
    chunk: int,
    final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes out [B, T, H, V], the last state [B, G, D, V], empty unless `final`, errors and updates [B, T, G, V].

    chunk: tokens of a chunk; 0: the kernels choose.
    """
    with torch.cuda.device_of(q) if power.is_elsewhere(q) else nullcontext():
        options = DeltaOptions(p, chunk or None, final)
        out, last, errors, update = delta_solve.forward(_Backend, q, k, v, beta, log_g, state, options)
    return out, beta.new_empty((0,) * 4) if last is None else last, errors, update
