"""The delta rule by Triton kernels: prediction errors and their gradients, see `sympow.ops.delta_solve`.

Within a chunk, blocks of tokens are solved one after another by one program a head. What the tokens of a block take
from one another is computed before, for all blocks at once and without gates: with (D o A)_ij = d_i / d_j A_ij,
(I + D o A)^-1 is D o (I + A)^-1. Between chunks the state is read and written by the kernels of power attention. So are
output and gradients.

Log decays are sums of two float32 numbers, `high` and `low` [B, T, G], relative to the start of a chunk. The difference
of two of them keeps its digits behind a gate that has decayed everything.
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
from sympow.ops.triton.plan import Call
from sympow.ops.triton.primitives import power as power_of
from sympow.ops.types import PowerState

BLOCK = 64  # tokens that are solved together
_CHUNK = 2048  # tokens of a chunk of rows that need more than one
_ALONE = 4096  # the longest row that is one chunk, without states
_GROUP = 4  # blocks that one program solves; what earlier groups return for them is computed by many programs
_ROWS = 64  # rows of a program that adds up the gradients of keys
_VANISHES = 256.0  # -log2 of a decay that is 0 in float32
_LOG2_E = 1.4426950408889634


class Decays(NamedTuple):
    """Holds log2 of the decay from the start of the chunk to each token, as a sum of two float32 [B, T, G]."""

    high: Tensor
    low: Tensor


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _decay(high_i, low_i, high_j, low_j):
    """Returns the decay from tokens j (columns) to tokens i (rows); 1 where j is later than i."""
    return tl.exp2(tl.minimum((high_i[:, None] - high_j[None, :]) + (low_i[:, None] - low_j[None, :]), 0.0))


@triton.jit
def _decay_to_columns(high_i, low_i, high_j, low_j):
    """Returns the decay from tokens i (rows) to tokens j (columns); 1 where i is later than j."""
    return tl.exp2(tl.minimum((high_j[None, :] - high_i[:, None]) + (low_j[None, :] - low_i[:, None]), 0.0))


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
def _less_earlier(
    acc, x, high_i, low_i, k, update, high, low, start, g, G, first, last,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns acc [BLOCK, COLUMNS] of tokens with keys x, less what the updates of blocks first to last - 1 return."""
    t = tl.arange(0, BLOCK)
    c = tl.arange(0, COLUMNS)
    for j in range(first, last):
        other = (start + j * BLOCK + t) * G + g
        y = tl.load(k + other[:, None] * K + tl.arange(0, K)[None, :])
        w = power_of(tl.dot(x, tl.trans(y), input_precision=PRECISION), P)
        if GATED:
            w *= _decay(high_i, low_i, tl.load(high + other), tl.load(low + other))
        u = tl.load(update + other[:, None] * V + c[None, :], mask=(c < V)[None, :], other=0.0)
        acc -= tl.dot(w.to(u.dtype), u, input_precision=PRECISION)
    return acc


@triton.jit
def earlier_pass(
    k, source, target, high, low, update, first, T, count, group, G,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes target, float32: source less what the updates of earlier groups of blocks return, for one group.

    source and target are [B, T, G, V]. The chunk has `count` tokens and begins at `first`. `group` is the first block
    of the group. Grid: blocks of the group, rows, G.
    """
    b = tl.cast(tl.program_id(1), tl.int64)
    g = tl.program_id(2)
    start = b * T + first
    c = tl.arange(0, COLUMNS)
    n = (group + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    valid = n < count
    token = (start + n) * G + g
    x = tl.load(k + token[:, None] * K + tl.arange(0, K)[None, :], mask=valid[:, None], other=0.0)
    mask = valid[:, None] & (c < V)[None, :]
    here = token[:, None] * V + c[None, :]
    acc = tl.load(source + here, mask=mask, other=0.0).to(tl.float32)
    high_i = tl.load(high + token, mask=valid, other=0.0) if GATED else None
    low_i = tl.load(low + token, mask=valid, other=0.0) if GATED else None
    acc = _less_earlier(
        acc, x, high_i, low_i, k, update, high, low, start, g, G, 0, group, K, V, COLUMNS, P, BLOCK, GATED, PRECISION
    )
    tl.store(target + here, acc, mask=mask)


@triton.jit
def solve_pass(
    k, source, beta, high, low, corrections, errors, update, first, T, count, group, blocks, G,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes errors and update = beta errors, [B, T, G, V], of `blocks` blocks from the block `group` on.

    source [B, T, G, V] has what earlier chunks and groups leave of the values. The chunk has `count` tokens and begins
    at `first`. Grid: rows, G.
    """
    b = tl.cast(tl.program_id(0), tl.int64)
    g = tl.program_id(1)
    start = b * T + first
    c = tl.arange(0, COLUMNS)
    t = tl.arange(0, BLOCK)
    for i in range(group, group + blocks):
        n = i * BLOCK + t
        valid = n < count
        token = (start + n) * G + g
        x = tl.load(k + token[:, None] * K + tl.arange(0, K)[None, :], mask=valid[:, None], other=0.0)
        mask = valid[:, None] & (c < V)[None, :]
        here = token[:, None] * V + c[None, :]
        acc = tl.load(source + here, mask=mask, other=0.0).to(tl.float32)
        high_i = tl.load(high + token, mask=valid, other=0.0) if GATED else None
        low_i = tl.load(low + token, mask=valid, other=0.0) if GATED else None
        acc = _less_earlier(
            acc, x, high_i, low_i, k, update, high, low, start, g, G, group, i, K, V, COLUMNS, P, BLOCK, GATED,
            PRECISION,
        )  # fmt: skip
        at = corrections + ((b * tl.cdiv(T, BLOCK) + first // BLOCK + i) * G + g) * (BLOCK * BLOCK)
        r = tl.load(at + t[:, None] * BLOCK + t[None, :])
        if GATED:
            r *= _decay(high_i, low_i, high_i, low_i)
        scale = tl.load(beta + token, mask=valid, other=0.0)[:, None]
        error = acc - tl.dot(r, acc * scale, input_precision="ieee" if PRECISION == "ieee" else "tf32")
        tl.store(errors + here, error.to(errors.dtype.element_ty), mask=mask)
        tl.store(update + here, (error * scale).to(update.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # other threads read the update in the next iteration


@triton.jit
def _less_later(
    acc, x, high_i, low_i, k, dv, high, low, start, g, G, first, last, count,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns acc [BLOCK, COLUMNS] of tokens with keys x, less what the gradients dv of blocks first to last - 1 say of
    their updates."""
    t = tl.arange(0, BLOCK)
    c = tl.arange(0, COLUMNS)
    for j in range(first, last):
        later = j * BLOCK + t < count
        other = (start + j * BLOCK + t) * G + g
        y = tl.load(k + other[:, None] * K + tl.arange(0, K)[None, :], mask=later[:, None], other=0.0)
        w = power_of(tl.dot(x, tl.trans(y), input_precision=PRECISION), P)
        if GATED:
            high_j = tl.load(high + other, mask=later, other=0.0)
            low_j = tl.load(low + other, mask=later, other=0.0)
            w *= _decay_to_columns(high_i, low_i, high_j, low_j)
        e = tl.load(dv + other[:, None] * V + c[None, :], mask=later[:, None] & (c < V)[None, :], other=0.0)
        acc -= tl.dot(w.to(e.dtype), e, input_precision=PRECISION)
    return acc


@triton.jit
def later_pass(
    k, source, target, high, low, dv, first, T, count, group, blocks, G,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes target, float32: source less what the gradients dv of later groups say of the updates of one group.

    source and target are [B, T, G, V]. The chunk has `count` tokens and begins at `first`. `group` is the first block
    of the group, which has `blocks`. Grid: blocks of the group, rows, G.
    """
    b = tl.cast(tl.program_id(1), tl.int64)
    g = tl.program_id(2)
    start = b * T + first
    c = tl.arange(0, COLUMNS)
    n = (group + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    valid = n < count
    token = (start + n) * G + g
    x = tl.load(k + token[:, None] * K + tl.arange(0, K)[None, :], mask=valid[:, None], other=0.0)
    mask = valid[:, None] & (c < V)[None, :]
    here = token[:, None] * V + c[None, :]
    acc = tl.load(source + here, mask=mask, other=0.0).to(tl.float32)
    high_i = tl.load(high + token, mask=valid, other=0.0) if GATED else None
    low_i = tl.load(low + token, mask=valid, other=0.0) if GATED else None
    acc = _less_later(
        acc, x, high_i, low_i, k, dv, high, low, start, g, G, group + blocks, tl.cdiv(count, BLOCK), count,
        K, V, COLUMNS, P, BLOCK, GATED, PRECISION,
    )  # fmt: skip
    tl.store(target + here, acc, mask=mask)


@triton.jit
def solve_gradient_pass(
    k, source, errors, beta, high, low, corrections, dv, dbeta, first, T, count, group, blocks, G,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dv [B, T, G, V] and dbeta [B, T, G] of `blocks` blocks from the block `group` on, the last one first.

    source [B, T, G, V] is the gradient of the updates, from all outputs, states and later groups. The chunk has `count`
    tokens and begins at `first`. Grid: rows, G.
    """
    b = tl.cast(tl.program_id(0), tl.int64)
    g = tl.program_id(1)
    start = b * T + first
    c = tl.arange(0, COLUMNS)
    t = tl.arange(0, BLOCK)
    for step in range(blocks):
        i = group + blocks - 1 - step
        n = i * BLOCK + t
        valid = n < count
        token = (start + n) * G + g
        x = tl.load(k + token[:, None] * K + tl.arange(0, K)[None, :], mask=valid[:, None], other=0.0)
        mask = valid[:, None] & (c < V)[None, :]
        here = token[:, None] * V + c[None, :]
        acc = tl.load(source + here, mask=mask, other=0.0).to(tl.float32)
        high_i = tl.load(high + token, mask=valid, other=0.0) if GATED else None
        low_i = tl.load(low + token, mask=valid, other=0.0) if GATED else None
        acc = _less_later(
            acc, x, high_i, low_i, k, dv, high, low, start, g, G, i + 1, group + blocks, count, K, V, COLUMNS, P,
            BLOCK, GATED, PRECISION,
        )  # fmt: skip
        at = corrections + ((b * tl.cdiv(T, BLOCK) + first // BLOCK + i) * G + g) * (BLOCK * BLOCK)
        r = tl.load(at + t[None, :] * BLOCK + t[:, None])  # transposed
        if GATED:
            r *= _decay_to_columns(high_i, low_i, high_i, low_i)
        scale = tl.load(beta + token, mask=valid, other=0.0)[:, None]
        h = acc - tl.dot(r, acc * scale, input_precision="ieee" if PRECISION == "ieee" else "tf32")
        tl.store(dv + here, (h * scale).to(dv.dtype.element_ty), mask=mask)
        error = tl.load(errors + here, mask=mask, other=0.0).to(tl.float32)
        tl.store(dbeta + token, tl.sum(h * error, 1), mask=valid)
        tl.debug_barrier()  # other threads read dv in the next iteration


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


def solve(
    k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, state: Tensor | None, options: DeltaOptions
) -> tuple[Tensor, Tensor]:
    """Returns the errors e and the updates u, [B, T, G, V] in the dtype of v; see `delta_solve.solve`."""
    chunks = _Chunks(k, v, beta, log_g, options)
    errors, update = torch.empty_like(v), torch.empty_like(v)
    rows = None if state is None else chunks.from_public(state)
    target = chunks.new_target()
    for span in chunks.spans:
        source = v
        if rows is not None:
            target[:, span] = v[:, span] - chunks.past(span) * chunks.read(k[:, span], rows)
            source = target
        for group, blocks in chunks.groups_of(span):
            if group:
                tensors = {"source": source, "target": target, "update": update}
                chunks.launch(earlier_pass, span, group, blocks, True, **tensors)
            given = target if group else source
            chunks.launch(solve_pass, span, group, blocks, source=given, errors=errors, update=update)
        if span != chunks.spans[-1]:
            rows = chunks.advanced(rows, span, k[:, span], update[:, span] * chunks.kept(span))
    return errors, update


def solve_gradient(
    k: Tensor, errors: Tensor, beta: Tensor, log_g: Tensor | None, du: Tensor, options: DeltaOptions
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of v and beta; see `delta_solve.solve_gradient`."""
    chunks = _Chunks(k, errors, beta, log_g, options)
    dv, dbeta, du = torch.empty_like(errors), torch.empty_like(beta), du.contiguous()
    target, rows = chunks.new_target(), None
    for span in reversed(chunks.spans):
        source = du
        if rows is not None:
            target[:, span] = du[:, span] + chunks.kept(span) * chunks.read(k[:, span], rows)
            source = target
        for group, blocks in reversed(chunks.groups_of(span)):
            later = (group + blocks) * BLOCK < span.stop - span.start
            if later:
                chunks.launch(later_pass, span, group, blocks, True, source=source, target=target, dv=dv)
            given = target if later else source
            chunks.launch(solve_gradient_pass, span, group, blocks, source=given, errors=errors, dv=dv, dbeta=dbeta)
        if span != chunks.spans[0]:
            rows = chunks.advanced(rows, span, k[:, span], dv[:, span] * -chunks.past(span))
    return dv, dbeta


def attend(
    q: Tensor, k: Tensor, u: Tensor, log_g: Tensor | None, state: Tensor | None, options: DeltaOptions
) -> tuple[Tensor, Tensor | None]:
    """Computes power attention without a normalizer; see `delta_solve.attend`."""
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
        self.spans = [slice(i, min(i + self.size, self.time)) for i in range(0, self.time, self.size)]
        self.decays = None if log_g is None else self._decays(log_g)
        blocks = ceil_div(self.time, BLOCK)
        shape = (self.batch * blocks, self.groups, BLOCK, BLOCK)
        self.corrections = torch.empty(shape, device=k.device, dtype=torch.float32)
        constants = {"K": self.key_dim, "P": self.p, "BLOCK": BLOCK, "PRECISION": self._precision, "num_warps": 1}
        # Three products of tf32 have nearly all digits of float32, and take less time than its own on Hopper.
        exact = "tf32x3" if self._precision == "tf32" and plan.on_hopper(k.device) else "ieee"
        grid = (self.batch * blocks, self.groups)
        numbers = {"T": self.time, "G": self.groups}
        arguments: dict[str, Any] = numbers | constants | {"FULL": exact}
        launch_kernel(block_corrections, grid, arguments, k=self.k, beta=self.beta, out=self.corrections)

    def groups_of(self, span: slice) -> list[tuple[int, int]]:
        """Returns the groups of blocks of the chunk at `span`: the first block and the number of blocks."""
        blocks = ceil_div(span.stop - span.start, BLOCK)
        return [(i, min(_GROUP, blocks - i)) for i in range(0, blocks, _GROUP)]

    def launch(
        self, kernel: Any, span: slice, group: int, blocks: int, parallel: bool = False, **tensors: Tensor
    ) -> None:
        """Launches a kernel on a group of blocks of the chunk at `span`; `parallel`: a program for every block."""
        high, low = (None, None) if self.decays is None else self.decays
        numbers = {"first": span.start, "T": self.time, "count": span.stop - span.start, "G": self.groups}
        numbers |= {"group": group, "blocks": blocks}
        own = {"k": self.k, "beta": self.beta, "high": high, "low": low, "corrections": self.corrections}
        names = (*kernel.arg_names, "num_warps")
        arguments = {name: x for name, x in (numbers | self._constants()).items() if name in names}
        given = {name: x for name, x in (own | tensors).items() if name in names}
        grid = (blocks, self.batch, self.groups) if parallel else (self.batch, self.groups)
        launch_kernel(kernel, grid, arguments, **given)

    def new_target(self) -> Tensor:
        """Returns memory for what the solution of a group starts from, float32 [B, T, G, V]."""
        return torch.empty(self.batch, self.time, self.groups, self.value_dim, device=self.k.device)

    def past(self, span: slice) -> Tensor | float:
        """Returns the decay from the start of the chunk to each token, [B, C, G, 1]."""
        if self.decays is None:
            return 1.0
        return (self.decays.high[:, span] + self.decays.low[:, span]).exp2()[..., None]

    def kept(self, span: slice) -> Tensor | float:
        """Returns the decay from each token to the end of the chunk, [B, C, G, 1]."""
        if self.decays is None:
            return 1.0
        high, low = (x[:, span] for x in self.decays)
        return ((high[:, -1:] - high) + (low[:, -1:] - low)).exp2()[..., None]

    def read(self, x: Tensor, rows: Tensor) -> Tensor:
        """Returns phi(x) times the state: x [B, C, G, K] -> float32 [B, C, G, V]."""
        call = self._call(x, x.new_zeros(*x.shape[:3], self.value_dim, dtype=self.dtype))
        out, _ = launch.output(call, rows.to(self.dtype), self._no_z(call), True, False, 1.0, True)
        return out

    def advanced(self, rows: Tensor | None, span: slice, x: Tensor, y: Tensor) -> Tensor:
        """Returns the state after the decay of a chunk, plus phi(x)^T y for x [B, C, G, K] and y [B, C, G, V]."""
        call = self._call(x, y.to(self.dtype))
        if rows is not None and self.decays is not None:
            rows = rows * self.past(span)[:, -1, :, :, None]  # type: ignore[index]
        ends = launch.new_ends(call, False)
        launch.states(call, rows, None if rows is None else self._no_z(call), ends, False)
        return ends[0]

    def from_public(self, state: Tensor) -> Tensor:
        """Returns a public state in the rows of the kernels, float32 [B, G, rows, V]."""
        some = self.given[:, :1]
        call = self._call(some, some.new_zeros(*some.shape[:3], self.value_dim, dtype=self.dtype))
        return power.from_public(call.plan.rows, state, None)[0].float()

    def _call(self, x: Tensor, y: Tensor) -> Call:
        return Call(x.contiguous(), x.contiguous(), y.contiguous(), None, None, self.p, 1.0, x.shape[1], self._tf32)

    def _no_z(self, call: Call) -> Tensor | None:
        shape = call.plan.end_shapes(False)[1]
        return torch.zeros(shape, device=self.k.device, dtype=torch.float32) if shape[0] else None

    def _decays(self, log_g: Tensor) -> Decays:
        steps = log_g.transpose(1, 2).double().mul(_LOG2_E).clamp(min=-_VANISHES)
        padded = torch.nn.functional.pad(steps, (0, -self.time % self.size)).unflatten(2, (-1, self.size))
        sums = padded.cumsum(3).flatten(2)[:, :, : self.time]  # along memory, which is faster
        high = sums.float()
        return Decays(*(x.transpose(1, 2).contiguous() for x in (high, (sums - high).float())))

    def _constants(self) -> dict:
        columns = max(16, next_power_of_2(self.value_dim))
        constants = {"K": self.key_dim, "V": self.value_dim, "COLUMNS": columns, "P": self.p, "BLOCK": BLOCK}
        gated = {"GATED": self.decays is not None, "PRECISION": self._precision}
        wide = max(self.key_dim, columns) > 64
        return constants | gated | {"num_warps": 8 if wide else 4}

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
