"""A step of the delta rule: one kernel reads a state, corrects it by a new token, and writes it, (M19) and (M20).

The correction u = beta (v - gamma S^T phi(k)) needs all rows of the state before any row can be written. But a column
of u needs only the same column of the state. So a program has a few columns of one head, and keeps rows of them in its
registers. The other rows are read twice, the second time from the L2 cache if they are still there.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from sympow.ops.runtime.launcher import ceil_div, launch, next_power_of_2, operator, processors
from sympow.ops.triton.decode import monomials, tables
from sympow.ops.triton.primitives import power


@triton.jit
def _tile(s, first, col, D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr):
    """Returns the indices of ROWS rows of a state, the places of some of their columns, [1, ROWS, COLUMNS], and which
    of these places exist."""
    row = tl.arange(0, ROWS)
    tile = s + tl.cast(first, tl.int64) * V + row[None, :, None] * V + col[None, None, :]
    return first + row, tile, (first + row < D)[None, :, None] & (col < V)[None, None, :]


@triton.jit
def correct(
    q,  # [B, H, K], with strides of sequences and heads
    q_sb,
    q_sh,
    k,  # [B, G, K]
    k_sb,
    k_sg,
    v,  # [B, G, V]
    v_sb,
    v_sg,
    beta,  # [B, G]
    beta_sb,
    beta_sg,
    log_g,  # [B, G], or None
    g_sb,
    g_sg,
    s,  # float32 [B, G, D, V], with a stride of sequences
    s_sb,
    index,  # tables of the rows of a state, see `tables`
    roots,
    out,  # [B, H, V]
    out_sb,
    G,
    D: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,  # the next power of two of K
    HEADS: tl.constexpr,  # the next power of two of R
    COLUMNS: tl.constexpr,  # columns of a program
    KEPT: tl.constexpr,  # rows that are kept in registers, at most D
    ROWS: tl.constexpr,  # rows of a tile of the others
    STAGES: tl.constexpr,  # tiles in memory or on their way
):
    """Corrects COLUMNS columns of one head by one token. Grid: cdiv(V, COLUMNS) programs for each key/value head, so
    that programs that run together read the same rows."""
    blocks: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    n = tl.cast(tl.program_id(0) // blocks, tl.int64)
    b = n // G
    g = n % G
    col = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    one = tl.arange(0, 1)
    head = tl.arange(0, HEADS)
    width = tl.arange(0, WIDTH)
    q += b * q_sb + g * R * q_sh
    k += b * k_sb + g * k_sg
    s += b * s_sb + g * D * V
    first_row, first_tile, within = _tile(s, 0, col, D, V, KEPT)
    kept = tl.load(first_tile, mask=within, other=0.0, eviction_policy="evict_first")  # the L1 cache keeps the tables
    gamma = 1.0
    if log_g is not None:
        gamma = tl.exp(tl.load(log_g + b * g_sb + g * g_sg).to(tl.float32))
    value = tl.load(v + b * v_sb + g * v_sg + col, mask=col < V, other=0.0).to(tl.float32)
    key = tl.load(k + width, mask=width < K, other=0.0).to(tl.float32)

    root = tl.load(roots + first_row)[None, :]
    phi = monomials(k, 0, one, 1, first_row, index, D, P) * root
    read = tl.sum(phi[:, :, None] * kept, 1)
    if KEPT < D:
        acc = tl.zeros([1, ROWS, COLUMNS], tl.float32)
        for i in tl.range(0, (D - KEPT + ROWS - 1) // ROWS, num_stages=STAGES):
            row, tile, mask = _tile(s, KEPT + i * ROWS, col, D, V, ROWS)
            rows = tl.load(tile, mask=mask, other=0.0)
            weight = tl.load(roots + row, mask=row < D, other=0.0)[None, :]
            acc += (monomials(k, 0, one, 1, row, index, D, P) * weight)[:, :, None] * rows
        read += tl.sum(acc, 1)
    u = tl.load(beta + b * beta_sb + g * beta_sg).to(tl.float32) * (value[None, :] - gamma * read)  # [1, COLUMNS]

    tl.debug_barrier()  # if threads hold the same numbers, as of a small state, all of them have read them
    tl.store(first_tile, gamma * kept + phi[:, :, None] * u[:, None, :], mask=within)
    sums = tl.zeros([HEADS, ROWS, COLUMNS], tl.float32)
    if KEPT < D:
        for i in tl.range(0, (D - KEPT + ROWS - 1) // ROWS, num_stages=STAGES):
            row, tile, mask = _tile(s, KEPT + i * ROWS, col, D, V, ROWS)
            rows = tl.load(tile, mask=mask, other=0.0)
            weight = tl.load(roots + row, mask=row < D, other=0.0)[None, :]
            sums += (monomials(q, q_sh, head, R, row, index, D, P) * weight)[:, :, None] * rows
            written = (monomials(k, 0, one, 1, row, index, D, P) * weight)[:, :, None] * u[:, None, :]
            tl.debug_barrier()
            tl.store(tile, gamma * rows + written, mask=mask)
    others = tl.sum(sums, 1)
    for r in range(R):
        phi = monomials(q + r * q_sh, 0, one, 1, first_row, index, D, P) * root
        read = tl.sum(phi[:, :, None] * kept, 1)
        if KEPT < D:
            read += tl.sum(tl.where((head == r)[:, None], others, 0.0), 0)[None, :]
        query = tl.load(q + r * q_sh + width, mask=width < K, other=0.0).to(tl.float32)
        y = gamma * read + power(tl.sum(query * key, 0), P) * u
        place = out + b * out_sb + (g * R + r) * V + col[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=(col < V)[None, :])


class _Limits(NamedTuple):
    of_a_program: int  # numbers of a state that a program keeps
    of_a_thread: int  # of these numbers
    of_a_tile: int  # of the numbers of a tile of other rows that are a thread's own
    columns: int  # of a program that reads most rows twice


_HOPPER, _INTERPRETER = _Limits(32768, 128, 4, 64), _Limits(32, 1, 1, 8)
_REGISTERS = 65536  # of an SM
_SECTOR = 8  # numbers that the L2 cache reads at once


@lru_cache(maxsize=256)
def _plan(pairs: int, dim: int, value_dim: int, rows: int, device: torch.device) -> dict[str, int]:
    """Returns the sizes of a launch for `pairs` of sequences and key/value heads, D, V and R.

    A program has as many columns as it can keep. With few pairs it has fewer, so that every SM has a program, but no
    less than one read of the L2 cache brings. Where most of a large state is read twice and there are many pairs,
    it has many columns and keeps few rows.
    """
    limits = _INTERPRETER if knobs.runtime.interpret else _HOPPER
    few = processors(device)
    heads, columns = next_power_of_2(rows), next_power_of_2(value_dim)
    kept, least = next_power_of_2(dim + 1) // 2, min(_SECTOR, columns)
    while columns > least and (kept * columns > limits.of_a_program or pairs * ceil_div(value_dim, columns) < few):
        columns //= 2
    programs, of_a_tile = 1, limits.of_a_tile  # programs of an SM at once
    if dim - kept > kept // 8 or kept * columns > limits.of_a_program:
        # The loops over many other rows need registers too, and wait for memory: an SM should have several programs.
        # Many columns share the monomials of a row.
        programs, wide = 2, min(limits.columns, next_power_of_2(value_dim))
        if pairs * ceil_div(value_dim, wide) >= 2 * few:
            programs, columns, of_a_tile = 4, wide, 2 * of_a_tile
    of_a_thread = max(1, limits.of_a_thread // min(2, programs))
    kept = min(kept, max(1, limits.of_a_program // programs // columns))
    warps = max(1, kept * columns // (32 * of_a_thread))
    # A thread has a sum of its own for each of its numbers of a tile and each query head.
    tile = max(1, 32 * warps * max(1, min(of_a_tile, 4 * of_a_tile // heads)) // columns)
    if knobs.runtime.interpret:
        tile = max(1, limits.of_a_program // columns)
    stages = 1 if dim - kept <= tile else max(3, programs)
    sizes = {"HEADS": heads, "COLUMNS": columns, "KEPT": kept, "ROWS": tile, "STAGES": stages}
    return sizes | {"num_warps": warps, "maxnreg": min(255, _REGISTERS // (32 * warps) // programs)}


def _fake(q, k, v, beta, log_g, s, p):
    return v.new_empty(*q.shape[:3], v.shape[3])


@operator(_fake, changes=("s",))
def power_delta_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_g: Tensor | None, s: Tensor, p: int
) -> Tensor:  # fmt: skip
    """Corrects a state by T tokens, one after another, in place, and returns out [B, T, H, V] in the dtype of v.

    Shapes are those of `power_delta_rule_step`; s is float32. A state whose sequences are contiguous, with any stride
    between them, is not copied.
    """
    (batch, time, heads, key_dim), (groups, dim, value_dim) = q.shape, s.shape[1:]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    size = dim * value_dim
    dense = s.stride()[1:] == (size, value_dim, 1) and s.stride(0) >= groups * size
    state = s if dense else s.contiguous()
    out = torch.empty(batch, time, heads, value_dim, device=q.device, dtype=v.dtype)
    index, roots = tables(key_dim, p, q.device)
    numbers: dict[str, Any] = {"q_sb": q.stride(0), "q_sh": q.stride(2), "s_sb": state.stride(0)}
    for name, x in (("k", k), ("v", v), ("beta", beta), ("g", log_g)):
        numbers |= {f"{name}_sb": 0 if x is None else x.stride(0), f"{name}_sg": 0 if x is None else x.stride(2)}
    numbers |= {"out_sb": out.stride(0), "G": groups, "D": dim, "K": key_dim, "V": value_dim, "P": p}
    numbers |= {"R": heads // groups, "WIDTH": next_power_of_2(key_dim)}
    pairs = batch * groups
    plan = _plan(pairs, dim, value_dim, heads // groups, q.device)
    grid = (pairs * ceil_div(value_dim, plan["COLUMNS"]),)
    with torch.cuda.device_of(q):
        for i in range(time if pairs else 0):
            gates = None if log_g is None else log_g[:, i]
            launch(
                correct, grid, numbers | plan, q=q[:, i], k=k[:, i], v=v[:, i], beta=beta[:, i], log_g=gates, s=state,
                index=index, roots=roots, out=out[:, i],
            )  # fmt: skip
    if state is not s:
        s.copy_(state)
    return out
