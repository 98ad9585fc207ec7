"""Divides long rows into segments for the state pass, and joins the states of the segments.

A program of the state pass processes a whole row in order. With few rows and heads, there are too few programs for all
SMs. So the pass computes the segments of a row independently, as if they were documents packed in one row, and `join`
adds what comes in from the earlier segments (in reverse, from the later ones). This is exact up to rounding, because
states are linear in the incoming state: a segment's states get the incoming state times the decay since the start of
the segment. Decays that are 0 to the passes are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.ops.triton import config
from sympow.ops.triton.launcher import Launcher
from sympow.ops.triton.plan import Plan

BLOCK, WARPS = 1024, 4  # elements of a state in a program of `join`
MOST = 16  # segments of a row
# Programs of the state pass that an SM runs at the same time, by registers: for K above 32, and for others.
PROGRAMS, NARROW_PROGRAMS = 2, 3
LEAST_GAIN = 0.1  # share of the time of the state pass that segments must save
JOIN = 0.25  # the time of `join` for a chunk over that of the state pass, if all states of all SMs are read and written


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
    layout, chunks = plan.layout, config.ceil_div(plan.layout.length, plan.chunk)
    slots = config.processors(plan.device) * (PROGRAMS if plan.K > 32 else NARROW_PROGRAMS)
    count = 1 if layout.packed else number(chunks, programs * plan.G * layout.sequences, slots)
    each = config.ceil_div(chunks, count)
    if count == 1:
        return Segments(1, each)
    firsts = [n * layout.length + i * each * plan.chunk for n in range(layout.sequences) for i in range(count)]
    ends = [*firsts[1:], layout.tokens]
    blocks = [
        (n, i)
        for n, (first, end) in enumerate(zip(firsts, ends, strict=True))
        for i in range(config.ceil_div(end - first, block))
    ]
    chunk_starts = [n * chunks + i * each for n in range(layout.sequences) for i in range(count)]
    tables = ([*firsts, layout.tokens], chunk_starts, blocks)
    return Segments(count, each, *(torch.tensor(x, dtype=torch.int32).to(plan.device) for x in tables))


def number(chunks: int, programs: int, slots: int) -> int:
    """Returns the number of segments of a row with which the states take the least time.

    Programs run in rounds of `slots` programs. The time is estimated in chunks of one program.

    Args:
        chunks: of a row.
        programs: of the state pass for all heads of all rows.
        slots: programs that a GPU runs at the same time.
    """

    def time(count: int) -> float:
        rounds = config.ceil_div(programs * count, slots)
        joined = JOIN * chunks * programs / slots * (count - 1) / count
        return rounds * config.ceil_div(chunks, count) + joined

    counts = {config.ceil_div(chunks, config.ceil_div(chunks, n)) for n in range(1, min(MOST, chunks) + 1)}
    best = min(sorted(counts), key=time)
    return best if time(best) <= (1 - LEAST_GAIN) * time(1) else 1


def product_parts(plan: Plan, z: bool) -> int:
    """Returns the number of parts of a product that the launches of `join_segments` for S, and for Z, write."""
    return blocks_of(plan.row_count * plan.V) + (blocks_of(plan.K * plan.K) if z else 0)


def blocks_of(width: int) -> int:
    """Returns the number of programs of `join_segments` for one state of so many elements."""
    return config.ceil_div(width, BLOCK)


def join_launcher(
    plan: Plan, segments: Segments, columns: int, width: int, first_part: int, parts: int, reverse: bool, **given: bool
) -> Launcher:
    """Returns the launcher of `join_segments` for states of `width` elements; `given` are its flags."""
    numbers: dict[str, Any] = plan.sequences() | {"G": plan.G, "width": width, "columns": columns}
    numbers |= {"count": segments.count, "own": segments.chunks, "first_part": first_part, "parts": parts}
    numbers |= {"chunks": config.ceil_div(plan.layout.length, plan.chunk)}
    constants = {"CHUNK": plan.chunk, "BLOCK": BLOCK, "GATED": plan.gated, "REVERSE": reverse, "num_warps": WARPS}
    return Launcher(join_segments, (blocks_of(width), plan.G, plan.layout.sequences), numbers | constants | given)


@triton.jit(do_not_specialize=["T", "tokens", "count", "own", "chunks", "first_part", "parts"])
def join_segments(
    states,  # [chunks, G, width], of the segments; becomes that of the rows
    finals,  # float32 [rows count, G, width], the last states of the segments
    init,  # [rows, G, width], or None
    end,  # float32 [rows, G, width], or None: the last states of the rows
    other,  # [chunks, G, width], or None: what the states are multiplied with
    weights,  # float32 [width / columns], or None
    sums,  # float32 [G, tokens]: log2 of the decay within each chunk
    products,  # float64 [chunks, G, parts], or None
    T,
    tokens,
    G,
    width,  # elements of a state
    columns,
    count,  # segments of a row
    own,  # chunks of a segment
    chunks,  # of a row
    first_part,  # the first of the parts of the products that this launch writes
    parts,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    INIT: tl.constexpr,
    END: tl.constexpr,
    PRODUCTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Joins BLOCK elements of the states of a row. Grid: blocks of elements, key/value heads, rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.cast(tl.program_id(1), tl.int64)
    row = tl.cast(tl.program_id(2), tl.int64)
    mask = i < width
    step = tl.cast(width, tl.int64) * G
    states += (row * chunks * G + g) * width
    if PRODUCTS:
        other += (row * chunks * G + g) * width
        products += (row * chunks * G + g) * parts + first_part + tl.program_id(0)
    sums += g * tokens + row * T
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + i // columns, mask=mask, other=0.0)
    came = tl.zeros([BLOCK], tl.float32)
    if INIT:
        came += tl.load(init + (row * G + g) * width + i, mask=mask, other=0.0).to(tl.float32)
    for n in range(count):
        segment = count - 1 - n if REVERSE else n
        first = segment * own
        many = tl.minimum(own, chunks - first)
        decay = 0.0  # log2 of the decay since the segment began
        for m in range(many):
            chunk = first + (many - 1 - m if REVERSE else m)
            here = states + chunk * step + i
            left = tl.exp2(decay) if GATED else 1.0
            if not INIT:
                left = tl.where(n > 0, left, 0.0)  # nothing comes into the first segment
            if PRODUCTS:
                x = tl.load(here, mask=mask, other=0.0)
                # Rounded as it is written: the key pass reads the rounded state, so the same rounding errors are in
                # both, and cancel in the gradient of the gate.
                x = (x.to(tl.float32) + came * left).to(x.dtype)
                wanted = chunk + 1 < chunks
                y = tl.load(other + chunk * step + i, mask=tl.where(wanted, mask, False), other=0.0).to(tl.float32)
                product = tl.sum(x.to(tl.float32) * y * weight, 0)
                tl.store(products + tl.cast(chunk, tl.int64) * G * parts, product, mask=wanted)
                tl.store(here, x, mask=tl.where(left > 0.0, mask, False))
            elif left > 0.0:
                x = tl.load(here, mask=mask, other=0.0)
                tl.store(here, (x.to(tl.float32) + came * left).to(x.dtype), mask=mask)
            if GATED:
                decay += tl.load(sums + tl.minimum((chunk + 1) * CHUNK, T) - 1)
        last = tl.load(finals + ((row * count + segment) * G + g) * width + i, mask=mask, other=0.0)
        came = came * (tl.exp2(decay) if GATED else 1.0) + last
    if END:
        tl.store(end + (row * G + g) * width + i, came, mask=mask)
