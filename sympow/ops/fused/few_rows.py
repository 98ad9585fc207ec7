"""The kernel of `step_products` for a few rows.

A program has all numbers of a few rows of the weights in its registers. On NVIDIA GPUs since Hopper it loads them while
the kernel before still runs (programmatic dependent launch). It then waits for the results of that kernel. Every
program norms and convolves its row again, which for so few rows takes less time than another launch.
"""

# mypy: disable-error-code="assignment, index, unreachable, var-annotated"
# (Triton's tuples grow, which mypy does not follow.)

from __future__ import annotations

from typing import TYPE_CHECKING

from sympow.ops.fused.gelu_linear import _sigmoid
from sympow.ops.fused.rotation import _cos_sin
from sympow.ops.runtime.launcher import jit

if TYPE_CHECKING:
    import triton.language as tl


@jit
def _log1p(x):
    """Returns log(1 + x) of x in [0, 1], with the relative error of float32."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@jit
def _gate(x, FUNCTION: tl.constexpr, factor):
    """Applies the function of a gate."""
    if FUNCTION == 3:
        return tl.minimum(x, 0.0) - _log1p(tl.exp(-tl.abs(x)))
    elif FUNCTION == 4:
        return factor / (1.0 + tl.exp(-x))
    else:
        return x


@jit
def _heads_normed(x, norm, d, eps, D: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Norms parts of HEAD channels of x [BLOCK]."""
    parts = tl.reshape(x * x, [BLOCK // HEAD, HEAD])
    scale = 1.0 / tl.sqrt(tl.sum(parts, 1) / HEAD + eps)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], [BLOCK // HEAD, HEAD]), [BLOCK])
    return x * scale * tl.load(norm + d % HEAD).to(tl.float32)


@jit
def gated(x, gate, d, D: tl.constexpr):
    """Multiplies channels d of x with silu(gate)."""
    g = tl.load(gate + d, mask=d < D, other=0.0).to(tl.float32)
    return x * g / (1.0 + tl.exp(-g))


@jit
def _taps(taps, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the values of each of WIDTH taps, for up to BLOCK channels."""
    values = ()
    if WIDTH == 4:  # loads of 16 bytes, which then change threads
        flat = tl.arange(0, 4 * BLOCK)
        whole = tl.load(taps + flat, mask=flat < 4 * channels, other=0.0)
        even, odd = tl.split(tl.reshape(whole, [BLOCK, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        values = (first, second, third, fourth)
    else:
        col = tl.arange(0, BLOCK)
        for s in tl.static_range(WIDTH):
            values += (tl.load(taps + col * WIDTH + s, mask=col < channels, other=0.0),)
    return values


@jit
def weights_of(pid, w0, w1, w2, w3, begin1, begin2, begin3, N0, N1, N2, N3):
    """Returns the weights of a program, the first program of these weights, and the number of their outputs."""
    w = w0
    begin = pid * 0
    n = N0
    if w1 is not None:  # noqa: SIM102 - Triton decides this while it compiles
        if pid >= begin1:
            w = w1
            begin = begin1
            n = N1
    if w2 is not None:  # noqa: SIM102 - Triton decides this while it compiles
        if pid >= begin2:
            w = w2
            begin = begin2
            n = N2
    if w3 is not None:  # noqa: SIM102 - Triton decides this while it compiles
        if pid >= begin3:
            w = w3
            begin = begin3
            n = N3
    return w, begin, n


@jit
def biases(pid, row, inside, b0, more, b1, b2, b3, begin1, begin2, begin3):
    """Returns the biases of outputs `row` of a program, which are `inside` those of its weights."""
    bias = row * 0.0
    if b0 is not None:
        bias += tl.load(b0 + row, mask=inside & (pid < begin1), other=0.0).to(tl.float32)
    if more is not None:
        bias += tl.load(more + row, mask=inside & (pid < begin1), other=0.0).to(tl.float32)
    if b1 is not None:
        bias += tl.load(b1 + row, mask=inside & (pid >= begin1) & (pid < begin2), other=0.0).to(tl.float32)
    if b2 is not None:
        bias += tl.load(b2 + row, mask=inside & (pid >= begin2) & (pid < begin3), other=0.0).to(tl.float32)
    if b3 is not None:
        bias += tl.load(b3 + row, mask=inside & (pid >= begin3), other=0.0).to(tl.float32)
    return bias


@jit
def finish(
    y, rest, cos, sin, pid, begin1, begin2, begin3, b, row, inside, y0, y1, y2, y3, N0, N1, N2, N3, factor,
    TURN: tl.constexpr, FUNCTION0: tl.constexpr, FUNCTION2: tl.constexpr, FUNCTION3: tl.constexpr,
):  # fmt: skip
    """Applies what follows a product to y [rows, outputs], adds `rest` to the first result, and writes y.

    `b` is the index of the rows [rows, 1], `row` that of the outputs [1, outputs].
    """
    if FUNCTION0 == 1:
        y = y * _sigmoid(y)
    if pid < begin1:
        if TURN:
            even, odd = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
            y = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), y.shape)
        tl.store(y0 + b * N0 + row, (y + rest).to(y0.dtype.element_ty), mask=inside)
    elif pid < begin2:
        if y1 is not None:
            tl.store(y1 + b * N1 + row, y.to(y1.dtype.element_ty), mask=inside)
    elif pid < begin3:
        if y2 is not None:
            tl.store(y2 + b * N2 + row, _gate(y, FUNCTION2, factor), mask=inside)
    else:
        if y3 is not None:
            tl.store(y3 + b * N3 + row, _gate(y, FUNCTION3, factor), mask=inside)


@jit
def few_rows(
    x,  # [B, D]
    norm,  # [D] or [HEAD], or None: no norm
    center,  # [D], the bias of the norm, or None
    gate,  # [B, D]: after the norm, the row is multiplied by silu(gate); or None
    taps,  # [D, WIDTH], or None: no convolution
    offset,  # [D]
    past,  # [B, WIDTH - 1, D], strides past_sb and past_st
    inputs,  # [B, D]: what the convolution gets of x, which the first program writes
    w0,  # [N0, D], with SWIGLU [2 N0, D]
    b0,  # [N0], or None; with SWIGLU None
    more,  # [N0], or None
    y0,  # [B, N0]
    residual,  # [B, N0], or None
    w1,  # [N1, D], or None
    b1,
    y1,
    w2,  # [N2, D], or None
    b2,
    y2,  # float32 [B, N2]
    w3,
    b3,
    y3,
    positions,  # int64 or float64 [1 or B], with stride position_sb; None: no rotation
    frequencies,  # float64 [K // 2]
    moved,  # int64 [B], positions + 1, or None
    shifted,  # [B, SHIFT, D0], strides shifted_sb and shifted_st: the past of a convolution that gets one more input
    newest,  # [B, D0], that input
    eps,
    factor,
    past_sb,
    past_st,
    shifted_sb,
    shifted_st,
    position_sb,
    B,
    N0,
    N1,
    N2,
    N3,
    D0,
    TURNED,
    D: tl.constexpr,
    K: tl.constexpr,
    HEAD: tl.constexpr,  # channels of a part that is normed, D for all
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    FUNCTION0: tl.constexpr,  # of the first product
    FUNCTION2: tl.constexpr,
    FUNCTION3: tl.constexpr,
    TILE: tl.constexpr,  # outputs of a program
    BLOCK: tl.constexpr,  # inputs that the threads load at once
    CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,  # whether it is launched before the kernel before has ended
):
    """Computes TILE outputs of a row. The programs behind the products shift the past of another convolution.

    Grid: tiles of the outputs of all products, then blocks of the past that is shifted, for each of B rows. Programs
    with the same weights follow each other, so that all but the first find them in the L2 cache.
    """
    pid = tl.program_id(0) // B
    b = tl.cast(tl.program_id(0) % B, tl.int64)
    begin1 = tl.cdiv(N0, TILE)
    begin2 = begin1 + tl.cdiv(N1, TILE)
    begin3 = begin2 + tl.cdiv(N2, TILE)
    end = begin3 + tl.cdiv(N3, TILE)
    w, begin, n = weights_of(pid, w0, w1, w2, w3, begin1, begin2, begin3, N0, N1, N2, N3)
    row = (pid - begin) * TILE + tl.arange(0, TILE)
    inside = row < n
    col = tl.arange(0, BLOCK)
    place = row.to(tl.int64)[:, None] * D + col[None, :]

    # What no kernel before has written is loaded first.
    held, values, norms, centers, tap_values, offsets = (), (), (), (), (), ()
    for c in tl.static_range(CHUNKS):
        real = c * BLOCK + col < D
        held += (tl.load(w + place + c * BLOCK, mask=inside[:, None] & real[None, :], other=0.0),)
        if FUNCTION0 == 2:
            lower = w + tl.cast(n, tl.int64) * D
            values += (tl.load(lower + place + c * BLOCK, mask=inside[:, None] & real[None, :], other=0.0),)
    for c in tl.static_range(CHUNKS):
        d = c * BLOCK + col
        if HEAD == D:
            norms += (tl.load(norm + d, mask=d < D, other=0.0),)
        if center is not None:
            centers += (tl.load(center + d, mask=d < D, other=0.0),)
        if taps is not None:
            offsets += (tl.load(offset + d, mask=d < D, other=0.0),)
            tap_values += (_taps(taps + c * BLOCK * WIDTH, D - c * BLOCK, WIDTH, BLOCK),)
    bias = biases(pid, row, inside, b0, more, b1, b2, b3, begin1, begin2, begin3)
    frequency = 0.0
    if positions is not None:
        pair = pid * (TILE // 2) + tl.arange(0, TILE // 2)
        frequency = tl.load(frequencies + pair % (K // 2), mask=pair < TURNED // 2, other=0.0)
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if shifted is not None:  # noqa: SIM102
        if pid >= end:
            d = (pid - end) * BLOCK + col
            to = shifted + b * shifted_sb + d
            for s in tl.static_range(SHIFT - 1):  # a thread reads and writes its own channels
                tl.store(to + s * shifted_st, tl.load(to + (s + 1) * shifted_st, mask=d < D0), mask=d < D0)
            new = tl.load(newest + b * D0 + d, mask=d < D0)
            tl.store(to + (SHIFT - 1) * shifted_st, new.to(shifted.dtype.element_ty), mask=d < D0)

    rest = tl.zeros([TILE], tl.float32)  # what is added in the end is loaded before the sums, which wait for x
    if residual is not None:
        rest += tl.load(residual + b * N0 + row, mask=inside & (pid < begin1), other=0.0).to(tl.float32)
    cos, sin = 1.0, 0.0
    if positions is not None:
        position = tl.load(positions + b * position_sb)
        if moved is not None:
            tl.store(moved + b, position + 1, mask=pid == 0)
        cos, sin = _cos_sin(position.to(tl.float64) * frequency[None, :])
    given = ()
    total = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(CHUNKS):
        d = c * BLOCK + col
        one = tl.load(x + b * D + d, mask=d < D, other=0.0).to(tl.float32)
        if HEAD > 0 and HEAD < D:
            one = _heads_normed(one, norm, d, eps, D, HEAD, BLOCK)
        if gate is not None and HEAD != D:
            one = gated(one, gate + b * D, d, D)
        given += (one,)
        total += one if CENTERED else one * one
    if HEAD == D:
        mean = tl.sum(total, 0) / D
        if CENTERED:
            total = tl.zeros([BLOCK], tl.float32)
            for c in tl.static_range(CHUNKS):
                apart = tl.where(c * BLOCK + col < D, given[c] - mean, 0.0)
                total += apart * apart
            scale = 1.0 / tl.sqrt(tl.sum(total, 0) / D + eps)
        else:
            scale = 1.0 / tl.sqrt(mean + eps)
            mean = 0.0
        normed = ()
        for c in tl.static_range(CHUNKS):
            one = (given[c] - mean) * scale * norms[c].to(tl.float32)
            if center is not None:
                one += centers[c].to(tl.float32)
            if gate is not None:
                one = gated(one, gate + b * D, c * BLOCK + col, D)
            normed += (one,)
        given = normed
    if taps is not None:
        convolved = ()
        for c in tl.static_range(CHUNKS):
            d = c * BLOCK + col
            rounded = given[c].to(inputs.dtype.element_ty)
            if pid == 0:
                tl.store(inputs + b * D + d, rounded, mask=d < D)
            one = offsets[c].to(tl.float32)
            one += rounded.to(tl.float32) * tap_values[c][WIDTH - 1].to(tl.float32)
            for s in tl.static_range(WIDTH - 1):
                old = tl.load(past + b * past_sb + s * past_st + d, mask=d < D, other=0.0).to(tl.float32)
                one += old * tap_values[c][s].to(tl.float32)
            convolved += (one,)
        given = convolved

    acc = tl.zeros([TILE, BLOCK], tl.float32)
    for c in tl.static_range(CHUNKS):
        acc += held[c].to(tl.float32) * given[c][None, :]
    y = tl.sum(acc, 1) + bias
    if FUNCTION0 == 2:
        acc = tl.zeros([TILE, BLOCK], tl.float32)
        for c in tl.static_range(CHUNKS):
            acc += values[c].to(tl.float32) * given[c][None, :]
        y = y / (1.0 + tl.exp(-y)) * tl.sum(acc, 1)
    finish(
        y[None, :], rest[None, :], cos, sin, pid, begin1, begin2, begin3, b, row[None, :], inside[None, :],
        y0, y1, y2, y3, N0, N1, N2, N3, factor, positions is not None, FUNCTION0, FUNCTION2, FUNCTION3,
    )  # fmt: skip
