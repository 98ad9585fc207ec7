"""The kernels of `step_products` for a few dozen rows of half precision: one prepares the rows, one multiplies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sympow.ops.fused.few_rows import biases, finish, gated, weights_of
from sympow.ops.fused.rotation import _cos_sin
from sympow.ops.runtime.launcher import jit

if TYPE_CHECKING:
    import triton.language as tl


@jit
def prepare_rows(
    x,  # [B, D]
    norm,  # as of `few_rows`, to `past`
    center,
    gate,
    taps,
    offset,
    past,  # gets the newest input
    out,  # [B, D]
    eps,
    past_sb,
    past_st,
    D: tl.constexpr,
    HEAD: tl.constexpr,
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # the next power of two of D
    AHEAD: tl.constexpr,
):
    """Norms, gates and convolves a row."""
    d = tl.arange(0, BLOCK)
    real = d < D
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.cast(tl.program_id(0), tl.int64)
    y = tl.load(x + b * D + d, mask=real, other=0.0).to(tl.float32)
    if HEAD > 0:
        PART: tl.constexpr = BLOCK if HEAD == D else HEAD
        y = tl.reshape(y, [BLOCK // PART, PART])
        if CENTERED:
            y = tl.where(tl.reshape(real, y.shape), y - (tl.sum(y, 1) / HEAD)[:, None], 0.0)
        y = y * (1.0 / tl.sqrt(tl.sum(y * y, 1) / HEAD + eps))[:, None]
        y = tl.reshape(y, [BLOCK]) * tl.load(norm + d % HEAD, mask=real, other=0.0).to(tl.float32)
        if center is not None:
            y += tl.load(center + d, mask=real, other=0.0).to(tl.float32)
    if gate is not None:
        y = gated(y, gate + b * D, d, D)
    if taps is not None:
        newest = y.to(x.dtype.element_ty)
        y = tl.load(offset + d, mask=real, other=0.0).to(tl.float32)
        past += b * past_sb + d
        for s in tl.static_range(WIDTH - 1):
            old = tl.load(past + s * past_st, mask=real, other=0.0)
            y += old.to(tl.float32) * tl.load(taps + d * WIDTH + s, mask=real, other=0.0).to(tl.float32)
            if s > 0:  # a thread reads and writes its own channels
                tl.store(past + (s - 1) * past_st, old, mask=real)
        y += newest.to(tl.float32) * tl.load(taps + d * WIDTH + WIDTH - 1, mask=real, other=0.0).to(tl.float32)
        if WIDTH > 1:
            tl.store(past + (WIDTH - 2) * past_st, newest.to(past.dtype.element_ty), mask=real)
    tl.store(out + b * D + d, y.to(out.dtype.element_ty), mask=real)


@jit
def more_rows(
    x,  # [B, D]
    w0,  # from here on as of `few_rows`
    b0,
    more,
    y0,
    residual,
    w1,
    b1,
    y1,
    w2,
    b2,
    y2,
    w3,
    b3,
    y3,
    positions,
    frequencies,
    moved,
    factor,
    position_sb,
    B,
    N0,
    N1,
    N2,
    N3,
    TURNED,
    D: tl.constexpr,
    K: tl.constexpr,
    FUNCTION0: tl.constexpr,
    FUNCTION2: tl.constexpr,
    FUNCTION3: tl.constexpr,
    ROWS: tl.constexpr,  # at least B; products of 64 rows use all of a tensor core
    TILE: tl.constexpr,  # outputs of a program
    STEP: tl.constexpr,  # inputs that are multiplied at once
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Computes TILE outputs of all rows. Grid: tiles of the outputs of all products."""
    pid = tl.program_id(0)
    begin1 = tl.cdiv(N0, TILE)
    begin2 = begin1 + tl.cdiv(N1, TILE)
    begin3 = begin2 + tl.cdiv(N2, TILE)
    w, begin, n = weights_of(pid, w0, w1, w2, w3, begin1, begin2, begin3, N0, N1, N2, N3)
    row = (pid - begin) * TILE + tl.arange(0, TILE)
    inside = row < n
    b = tl.arange(0, ROWS)
    present = b < B
    col = tl.arange(0, STEP)
    bias = biases(pid, row, inside, b0, more, b1, b2, b3, begin1, begin2, begin3)
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    both = present[:, None] & inside[None, :]
    rest = tl.zeros([ROWS, TILE], tl.float32)
    if residual is not None:
        rest += tl.load(residual + b[:, None] * N0 + row[None, :], mask=both & (pid < begin1), other=0.0).to(tl.float32)
    cos, sin = 1.0, 0.0
    if positions is not None:
        pair = pid * (TILE // 2) + tl.arange(0, TILE // 2)
        frequency = tl.load(frequencies + pair % (K // 2), mask=pair < TURNED // 2, other=0.0)
        position = tl.load(positions + b * position_sb, mask=present, other=0)
        if moved is not None:
            tl.store(moved + b, position + 1, mask=present & (pid == 0))
        cos, sin = _cos_sin(position.to(tl.float64)[:, None] * frequency[None, :])
    of_x = x + b[:, None] * D + col[None, :]
    of_w = w + row.to(tl.int64)[None, :] * D + col[:, None]
    y = tl.zeros([ROWS, TILE], tl.float32)
    value = tl.zeros([ROWS, TILE], tl.float32)
    for first in tl.range(0, D, STEP, num_stages=STAGES):
        real = first + col < D
        xs = tl.load(of_x + first, mask=present[:, None] & real[None, :], other=0.0)
        y = tl.dot(xs, tl.load(of_w + first, mask=real[:, None] & inside[None, :], other=0.0), y)
        if FUNCTION0 == 2:
            lower = of_w + tl.cast(n, tl.int64) * D
            value = tl.dot(xs, tl.load(lower + first, mask=real[:, None] & inside[None, :], other=0.0), value)
    y += bias[None, :]
    if FUNCTION0 == 2:
        y = y / (1.0 + tl.exp(-y)) * value
    finish(
        y, rest, cos, sin, pid, begin1, begin2, begin3, b[:, None], row[None, :], both,
        y0, y1, y2, y3, N0, N1, N2, N3, factor, positions is not None, FUNCTION0, FUNCTION2, FUNCTION3,
    )  # fmt: skip
