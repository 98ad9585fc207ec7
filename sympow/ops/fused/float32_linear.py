"""Linear maps to a few channels, computed in float32 for numbers that are summed over the context.

On a GPU, maps of bfloat16 are one kernel each way. The tensor cores multiply bfloat16, so float32 numbers are split
into three parts of bfloat16, which hold all 24 bits. Each part is a product of its own. These products take less time
than reading x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import autocast_dtype, has_kernels, without_autocast
from sympow.ops.runtime.launcher import cast, ceil_div, jit, launch, next_power_of_2, operator, sharing

if TYPE_CHECKING:
    import triton.language as tl

WIDEST = 32  # channels of the result with a kernel
LEAST = 16  # channels of a product, at least
ROWS, STEP, STAGES = 64, 64, 4  # of the forward: rows of a program, and inputs of an iteration
BACKWARD_ROWS, BACKWARD_STEP, WARPS = 128, 64, 4  # rows of an iteration, and inputs of a program
PROGRAMS = 2  # programs of the backward for each SM; each writes a part of the gradient of the weights


def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x weight^T + bias, computed in float32 at least, also under autocast.

    On a GPU, for x in bfloat16 and up to 32 channels, one kernel computes the forward and one kernel the backward. They
    do not copy x to float32.

    Args:
        x: [..., d].
        weight: [n, d].
        bias: [n]; None: 0.

    Returns:
        [..., n], float32, or float64 of such weights.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    halves = x.dtype == torch.bfloat16 and dtype == torch.float32
    if halves and len(weight) <= WIDEST and has_kernels(x.device, x.dtype):
        y = fused_float32_linear(x.reshape(-1, x.shape[-1]), weight)
        return (y if bias is None else y + bias.to(dtype)).view(*x.shape[:-1], len(weight))
    if x.dtype == weight.dtype == dtype and autocast_dtype(x) is None:
        return F.linear(x, weight, bias)  # casts would cost a decoded token time, and change nothing
    with without_autocast(x):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


@jit
def _parts(x):
    """Returns three tensors of bfloat16 whose sum is the float32 x."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@jit(do_not_specialize=["N"])
def narrow(
    x,  # bfloat16 [N, D]
    weight,  # float32 [WIDTH, D]
    y,  # float32 [N, WIDTH]
    N,
    D,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # the next power of two of WIDTH, at least 16
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Maps ROWS rows. Grid: blocks of rows."""
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLUMNS)
    d = tl.arange(0, STEP)
    # The tensor cores cut off sums. So the large products have a sum of their own, with few additions.
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    rest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, D, STEP, num_stages=STAGES):
        inside = first + d < D
        xs = tl.load(x + row[:, None] * D + (first + d)[None, :], mask=(row < N)[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight + col[None, :] * D + (first + d)[:, None], mask=inside[:, None] & (col < WIDTH)[None, :],
                    other=0.0)  # fmt: skip
        high, middle, low = _parts(w.to(tl.float32))
        rest = tl.dot(xs, low, rest)
        rest = tl.dot(xs, middle, rest)
        acc = tl.dot(xs, high, acc)
    tl.store(y + row[:, None] * WIDTH + col[None, :], acc + rest, mask=(row < N)[:, None] & (col < WIDTH)[None, :])


@jit(do_not_specialize=["N"])
def narrow_backward(
    dy,  # float32 [N, WIDTH]
    x,  # bfloat16 [N, D]
    weight,  # float32 [WIDTH, D]
    dx,  # bfloat16 [N, D]
    dweight,  # float32 [programs, WIDTH, D]: a part of the sum for each program of the second axis
    N,
    D,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Computes STEP inputs of dx and of the gradient of the weights, for every num_programs(1)-th block of ROWS rows.

    Grid: blocks of inputs, programs that share the rows.
    """
    d = tl.program_id(0) * STEP + tl.arange(0, STEP)
    col = tl.arange(0, COLUMNS)
    kept = (col < WIDTH)[:, None] & (d < D)[None, :]
    w = tl.load(weight + col[:, None] * D + d[None, :], mask=kept, other=0.0).to(tl.float32)
    w_high, w_middle, _ = _parts(w)
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    rest = tl.zeros([STEP, COLUMNS], tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(N, ROWS), tl.num_programs(1)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < N)[:, None] & (d < D)[None, :]
        given = tl.load(dy + row[:, None] * WIDTH + col[None, :], mask=(row < N)[:, None] & (col < WIDTH)[None, :],
                        other=0.0)  # fmt: skip
        high, middle, low = _parts(given)
        xs = tl.trans(tl.load(x + row[:, None] * D + d[None, :], mask=mask, other=0.0))
        rest = tl.dot(xs, low, rest)
        rest = tl.dot(xs, middle, rest)
        total = tl.dot(xs, high, total)
        grad = tl.dot(middle, w_high)  # rounded to bfloat16, so products of smaller parts do not count
        grad = tl.dot(high, w_middle, grad)
        grad = tl.dot(high, w_high, grad)
        tl.store(dx + row[:, None] * D + d[None, :], grad.to(dx.dtype.element_ty), mask=mask)
    part = dweight + tl.cast(tl.program_id(1), tl.int64) * (WIDTH * D)
    tl.store(part + col[None, :] * D + d[:, None], total + rest, mask=tl.trans(kept))


def _constants(x: Tensor, weight: Tensor) -> dict[str, int]:
    width = len(weight)
    columns = max(LEAST, next_power_of_2(width))
    return {"N": x.shape[0], "D": x.shape[1], "WIDTH": width, "COLUMNS": columns, "num_warps": WARPS}


def _like_gradients(dy, x, weight):
    return x.new_empty(x.shape), torch.empty_like(weight)


@operator(_like_gradients)
def float32_linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    rows, inputs = x.shape
    dx = torch.empty_like(x)
    blocks = ceil_div(inputs, BACKWARD_STEP)
    shared = sharing(ceil_div(rows, BACKWARD_ROWS), blocks, PROGRAMS, x.device)
    if not rows:
        return dx, torch.zeros_like(weight)
    parts = torch.empty(shared, *weight.shape, device=x.device, dtype=torch.float32)
    sizes = {"ROWS": BACKWARD_ROWS, "STEP": BACKWARD_STEP}
    with torch.cuda.device_of(x):
        launch(
            narrow_backward, (blocks, shared), _constants(x, weight) | sizes,
            dy=dy, x=x, weight=weight, dx=dx, dweight=parts,
        )  # fmt: skip
    return dx, cast(parts.sum(0), weight.dtype)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors  # read only once: activation checkpointing frees them then
    return float32_linear_backward(dy, x, weight)


def _like_output(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@operator(_like_output, _keep, _backward)
def fused_float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [N, D] weight^T of weight [n, D], float32 [N, n]; x is bfloat16, weight is float32 or narrower."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(x.shape[0], len(weight), device=x.device, dtype=torch.float32)
    if x.shape[0]:
        sizes = {"ROWS": ROWS, "STEP": STEP, "STAGES": STAGES}
        with torch.cuda.device_of(x):
            launch(narrow, (ceil_div(x.shape[0], ROWS),), _constants(x, weight) | sizes, x=x, weight=weight, y=y)
    return y
