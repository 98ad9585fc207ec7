"""Divides long rows into segments for the state pass, and joins the states of the segments.

A program of the state pass processes a whole row in order. With few rows and heads, there are too few programs for all
SMs. So the pass computes the segments of a row independently, as if they were documents packed in one row, and
`join_segments` adds what comes in from the earlier segments (in reverse, from the later ones). This is exact up to
rounding, because states are linear in the incoming state: a segment's states get the incoming state times the decay
since the start of the segment. Decays that are 0 to the passes are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.ops.runtime.launcher import Launcher, ceil_div, next_power_of_2
from sympow.ops.triton.plan import Plan
from sympow.ops.triton.primitives import rounded

BLOCK, WARPS = 1024, 4  # elements of a state in a program of `join_segments`
MOST = 16  # segments of a row
# Programs of the state pass that an SM runs at the same time, by registers: for K above 32, and for others.
PROGRAMS, NARROW_PROGRAMS = 2, 3
LEAST_GAIN = 0.1  # share of the time of the state pass that segments must save
# Of `join_segments`, in the time of a chunk of the state pass: a chunk of states of all SMs, and a launch.
JOIN, LAUNCH = 0.25, 1.0


@dataclass(frozen=True)
class Segments:
    """Describes the segments of rows.

    Attributes:
        count: segments of a row; 1: rows are not divided, and there are no tables.
        chunks: chunks of a segment; the last segment of a row may have fewer.
        starts: int32 [rows count + 1], the first token of every segment over all rows, and the end of the last.
        chunk_starts: int32 [rows count], the first chunk of every segment over all rows.
        blocks: int32 [blocks, 2], the segment of each block of tokens of `weigh`, and the block's index in it.
    """

    count: int
    chunks: int
    starts: Tensor | None = None
    chunk_starts: Tensor | None = None
    blocks: Tensor | None = None


def segments_of(plan: Plan, programs: int, block: int) -> Segments:
    """Returns the segments of the rows of a plan in the chunked form.

    Args:
        programs: of the state pass for one key/value head of one row.
        block: tokens of a program of `weigh`.
    """
    layout, chunks = plan.layout, ceil_div(plan.layout.length, plan.chunk)
    at_once = PROGRAMS if plan.K > 32 else NARROW_PROGRAMS
    total = programs * plan.G * layout.sequences
    count = 1 if layout.packed else number(chunks, total, plan.processors, at_once)
    each = ceil_div(chunks, count)
    if count == 1:
        return Segments(1, each)
    firsts = [n * layout.length + i * each * plan.chunk for n in range(layout.sequences) for i in range(count)]
    ends = [*firsts[1:], layout.tokens]
    blocks = [
        (n, i)
        for n, (first, end) in enumerate(zip(firsts, ends, strict=True))
        for i in range(ceil_div(end - first, block))
    ]
    chunk_starts = [n * chunks + i * each for n in range(layout.sequences) for i in range(count)]
    tables = ([*firsts, layout.tokens], chunk_starts, blocks)
    return Segments(count, each, *(torch.tensor(x, dtype=torch.int32).to(plan.device) for x in tables))


def few(programs: int, processors: int) -> bool:
    """Returns whether the programs of an undivided pass have half of their tiles, so that there are twice as many.

    An SM should have two programs, which hide each other's latency.
    """
    return programs < 2 * processors


def number(chunks: int, programs: int, processors: int, at_once: int = PROGRAMS) -> int:
    """Returns the number of segments of a row with which the states take the least time.

    Programs run in rounds, some on each SM. Times are estimated in chunks of one program.

    Args:
        chunks: of a row.
        programs: of the state pass for all heads of all rows.
        processors: SMs of the GPU.
        at_once: programs that an SM runs at the same time.
    """
    slots = at_once * processors

    def time(count: int) -> float:
        rounds = ceil_div(programs * count, slots)
        if count == 1:
            return chunks * (ceil_div(2 * programs, processors) / 3 if few(programs, processors) else rounds)
        joined = LAUNCH + JOIN * chunks * programs / slots * (count - 1) / count
        return rounds * ceil_div(chunks, count) + joined

    counts = {ceil_div(chunks, ceil_div(chunks, n)) for n in range(1, min(MOST, chunks) + 1)}
    best = min(sorted(counts), key=time)
    return best if time(best) <= (1 - LEAST_GAIN) * time(1) else 1


def join_blocks(plan: Plan, z: bool) -> int:
    """Returns the number of programs of `join_segments` for the states S, and Z if it exists, of one segment."""
    return ceil_div(plan.row_count * plan.V, BLOCK) + (ceil_div(plan.K * plan.K, BLOCK) if z else 0)


def join_launcher(
    plan: Plan, segments: Segments, z: bool, init: bool, init_z: bool, end: bool, products: bool, reverse: bool
) -> Launcher:
    """Returns the launcher of `join_segments`; the arguments after `segments` tell which of its tensors there are."""
    blocks = join_blocks(plan, z)
    numbers: dict[str, Any] = plan.sequences() | {"G": plan.G, "rows": plan.row_count, "parts": blocks + 1}
    numbers |= {"count": segments.count, "own": segments.chunks}
    numbers |= {"chunks": ceil_div(plan.layout.length, plan.chunk)}
    constants = {"K": plan.K, "V": plan.V, "CHUNK": plan.chunk, "BLOCK": BLOCK, "num_warps": WARPS}
    constants |= {"OWN": next_power_of_2(segments.chunks), "S_BLOCKS": join_blocks(plan, z=False)}
    constants |= {"GATED": plan.gated, "INIT": init, "INIT_Z": init_z, "END": end, "PRODUCTS": products}
    grid = (blocks, plan.G, plan.layout.sequences * segments.count)
    return Launcher(join_segments, grid, numbers | constants | {"REVERSE": reverse, "PRECISION": plan.precision})


@triton.jit
def _join(
    states, finals, init, end, other, weights, sums, products, T, G, g, row, block, n, width, count, own, chunks, parts,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr, GATED: tl.constexpr,
    INIT: tl.constexpr, END: tl.constexpr, PRODUCTS: tl.constexpr, WEIGHTED: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Joins one block of elements of the n-th segment of a row, in the order of the pass; see `join_segments`."""
    i = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    m = tl.arange(0, OWN)
    came = tl.zeros([BLOCK], tl.float32)
    if INIT:
        came += tl.load(init + (row * G + g) * width + i, mask=mask, other=0.0).to(tl.float32)
    for earlier in range(n):
        segment = count - 1 - earlier if REVERSE else earlier
        last = tl.load(finals + ((row * count + segment) * G + g) * width + i, mask=mask, other=0.0)
        if GATED:
            end_of = tl.minimum((segment * own + m + 1) * CHUNK, T) - 1
            there = m < tl.minimum(own, chunks - segment * own)
            came *= tl.exp2(tl.sum(tl.load(sums + end_of, mask=there, other=0.0), 0))
        came += last
    segment = count - 1 - n if REVERSE else n
    first = segment * own
    many = tl.minimum(own, chunks - first)
    decays = tl.zeros([OWN], tl.float32)  # log2 of the decay of each chunk, in the order of the pass
    if GATED:
        chunk = first + (many - 1 - m if REVERSE else m)
        decays = tl.load(sums + tl.minimum((chunk + 1) * CHUNK, T) - 1, mask=m < many, other=0.0)
    done = 0
    decay = 0.0  # log2 of the decay since the segment began
    left = 1.0
    if not INIT:
        left = tl.where(n > 0, 1.0, 0.0)  # nothing comes into the first segment
    while (done < many) & (left > 0.0):
        at = first + (many - 1 - done if REVERSE else done)
        here = states + ((row * chunks + at) * G + g) * width + i
        before = tl.load(here, mask=mask, other=0.0)
        after = rounded((before.to(tl.float32) + came * left).to(before.dtype), PRECISION)
        tl.store(here, after, mask=mask)
        if PRODUCTS:
            wanted = at + 1 < chunks
            theirs = other + ((row * chunks + at) * G + g) * width + i
            y = tl.load(theirs, mask=tl.where(wanted, mask, False), other=0.0).to(tl.float32)
            if WEIGHTED:
                y *= tl.load(weights + i // COLUMNS, mask=mask, other=0.0)
            # Of the rounded states, as the pass has it: the key pass reads rounded states, so the same rounding errors
            # are in both, and cancel in the gradient of the gate.
            product = tl.sum((after.to(tl.float32) - before.to(tl.float32)) * y, 0)
            tl.store(products + ((row * chunks + at) * G + g) * parts + 1 + tl.program_id(0), product, mask=wanted)
        if GATED:
            decay += tl.sum(tl.where(m == done, decays, 0.0), 0)
            left = tl.exp2(decay)
        done += 1
    if END:
        if n == count - 1:
            total = tl.exp2(tl.sum(decays, 0)) if GATED else 1.0
            last = tl.load(finals + ((row * count + segment) * G + g) * width + i, mask=mask, other=0.0)
            tl.store(end + (row * G + g) * width + i, came * total + last, mask=mask)


@triton.jit(do_not_specialize=["T", "tokens", "count", "own", "chunks", "parts"])
def join_segments(
    s,  # [chunks, G, rows, V], states of the segments; replaced by those of the rows of tokens
    z,  # [chunks, G, K, K], or None
    s_finals,  # float32 [N count, G, rows, V], the last states of the segments
    z_finals,  # float32 [N count, G, K, K], or None
    s_init,  # [N, G, rows, V], what comes into the rows of tokens, or None
    z_init,
    s_end,  # float32 [N, G, rows, V], or None: gets the last states of the rows of tokens
    z_end,
    s_other,  # [chunks, G, rows, V], or None: what the states are multiplied with
    z_other,
    weights,  # float32 [rows] of the rows of S in these products, or None
    products,  # float64 [chunks, G, parts], or None
    sums,  # float32 [G, tokens]: log2 of the decay within each chunk
    T,
    tokens,
    G,
    rows,  # of S
    count,  # segments of a row of tokens
    own,  # chunks of a segment
    chunks,  # of a row of tokens
    parts,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,  # the next power of two of own
    S_BLOCKS: tl.constexpr,  # programs of S; those that follow are of Z
    GATED: tl.constexpr,
    INIT: tl.constexpr,
    INIT_Z: tl.constexpr,
    END: tl.constexpr,
    PRODUCTS: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,  # of the products that take the states as factors
):
    """Adds what comes in from earlier segments to the states of every segment. Grid: blocks of S and Z, key/value
    heads, segments.

    With products, the change of the inner product with the states at `other` is added for every chunk of a row but the
    last. Part 0 is not written, and a part that does not change is not written either.
    """
    block = tl.program_id(0)
    g = tl.cast(tl.program_id(1), tl.int64)
    row = tl.cast(tl.program_id(2) // count, tl.int64)
    n = tl.program_id(2) % count
    sums += g * tokens + row * T
    if block < S_BLOCKS:
        _join(
            s, s_finals, s_init, s_end, s_other, weights, sums, products, T, G, g, row, block, n, rows * V, count, own,
            chunks, parts, V, CHUNK, BLOCK, OWN, GATED, INIT, END, PRODUCTS, True, REVERSE,
            PRECISION,
        )  # fmt: skip
    elif z is not None:
        _join(
            z, z_finals, z_init, z_end, z_other, weights, sums, products, T, G, g, row, block - S_BLOCKS, n, K * K,
            count, own, chunks, parts, K, CHUNK, BLOCK, OWN, GATED, INIT_Z, END, PRODUCTS, False, REVERSE,
            PRECISION,
        )  # fmt: skip
