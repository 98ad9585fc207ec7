"""The second half of an MLP, gelu(h + b) W^T + c, as PyTorch operators. Its backward keeps h alone.

The backward computes the output of the GELU again, which the gradient of W needs. The kernel that does this also
computes the gradient of h and its sum over the tokens, the gradient of b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.runtime.launcher import cast, ceil_div, jit, launch, operator, sharing

if TYPE_CHECKING:
    import triton.language as tl

ROWS, COLUMNS, BACKWARD_ROWS, BACKWARD_COLUMNS, WARPS = 8, 1024, 4, 256, 4  # of a tile
PROGRAMS = 8  # programs of the backward for each SM; each writes a part of the gradient of the bias

_SLOPE = 2 * 0.7978845608028654  # twice sqrt(2 / pi)
_CUBE = 0.044715


@jit
def _sigmoid(x):
    """Returns the factor of the GELU, (1 + tanh(z)) / 2 with z = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return 1.0 / (1.0 + tl.exp((x + x * x * x * _CUBE) * -_SLOPE))


@jit(do_not_specialize=["N"])
def gelu(
    hidden,  # [N, D]
    bias,  # [D]
    out,  # [N, D]
    N,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes a tile of gelu(hidden + bias).

    Grid: tiles, row by row; only the first axis of a grid has room for the rows.
    """
    across = tl.cdiv(D, COLUMNS)
    row = tl.cast(tl.program_id(0) // across, tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < N)[:, None] & (col < D)[None, :]
    place = row[:, None] * D + col[None, :]
    x = tl.load(hidden + place, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, (x * _sigmoid(x)).to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["N"])
def gelu_backward(
    grad,  # [N, D]: the gradient of the GELU's output; replaced by that of hidden
    hidden,  # [N, D]
    bias,  # [D]
    out,  # [N, D]: the GELU's output
    dbias,  # float32 [programs, D]: a part of the sum for each program of the second axis
    N,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes COLUMNS columns of every num_programs(1)-th block of ROWS rows.

    Grid: blocks of columns, programs that share the rows.
    """
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(bias + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)  # threads exchange sums only once, after the last block
    for block in range(tl.program_id(1), tl.cdiv(N, ROWS), tl.num_programs(1)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < N)[:, None] & (col < D)[None, :]
        place = row[:, None] * D + col[None, :]
        x = tl.load(hidden + place, mask=mask, other=0.0).to(tl.float32) + b
        given = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        s = _sigmoid(x)
        tl.store(out + place, (x * s).to(out.dtype.element_ty), mask=mask)
        slope = (1.0 + x * x * (3 * _CUBE)) * _SLOPE
        dx = given * s * (1.0 + x * (1.0 - s) * slope)
        total += dx
        tl.store(grad + place, dx.to(grad.dtype.element_ty), mask=mask)
    part = dbias + tl.cast(tl.program_id(1), tl.int64) * D
    tl.store(part + col, tl.sum(total, 0), mask=col < D)


@jit(do_not_specialize=["N"])
def column_sums(
    x,  # [N, D]
    out,  # float32 [programs, D]: a part of the sum for each program of the second axis
    N,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums COLUMNS columns of every num_programs(1)-th block of ROWS rows. Grid: as of `gelu_backward`."""
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(N, ROWS), tl.num_programs(1)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < N)[:, None] & (col < D)[None, :]
        total += tl.load(x + row[:, None] * D + col[None, :], mask=mask, other=0.0).to(tl.float32)
    part = out + tl.cast(tl.program_id(1), tl.int64) * D
    tl.store(part + col, tl.sum(total, 0), mask=col < D)


def _gelu(hidden: Tensor, bias: Tensor) -> Tensor:
    """Returns gelu(hidden + bias) of hidden [N, D]."""
    out, (rows, columns) = torch.empty_like(hidden), hidden.shape
    if rows:
        grid = (ceil_div(columns, COLUMNS) * ceil_div(rows, ROWS),)
        numbers = {"N": rows, "D": columns, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
        with torch.cuda.device_of(hidden):
            launch(gelu, grid, numbers, hidden=hidden, bias=bias, out=out)
    return out


def _gelu_backward(grad: Tensor, hidden: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gelu(hidden + bias) of hidden [N, D], and the gradient of the bias in float32.

    Overwrites `grad`, the gradient of the result, with that of hidden.
    """
    out, (grid, numbers) = torch.empty_like(hidden), _shared(hidden)
    if not len(hidden):
        return out, torch.zeros(hidden.shape[1], device=hidden.device)
    dbias = torch.empty(grid[1], hidden.shape[1], device=hidden.device, dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        launch(gelu_backward, grid, numbers, grad=grad, hidden=hidden, bias=bias, out=out, dbias=dbias)
    return out, dbias.sum(0)


def _column_sums(x: Tensor) -> Tensor:
    """Returns the sum of x [N, D] over N, in float32."""
    if not len(x):
        return torch.zeros(x.shape[1], device=x.device)
    grid, numbers = _shared(x)
    parts = torch.empty(grid[1], x.shape[1], device=x.device, dtype=torch.float32)
    with torch.cuda.device_of(x):
        launch(column_sums, grid, numbers, x=x, out=parts)
    return parts.sum(0)


def _shared(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns the grid and the numbers of a kernel whose programs share the rows of x [N, D]."""
    rows, columns = x.shape
    blocks = ceil_div(columns, BACKWARD_COLUMNS)
    shared = sharing(ceil_div(rows, BACKWARD_ROWS), blocks, PROGRAMS, x.device)
    numbers = {"N": rows, "D": columns, "ROWS": BACKWARD_ROWS, "COLUMNS": BACKWARD_COLUMNS, "num_warps": WARPS}
    return (blocks, shared), numbers


def _like_gradients(dy, hidden, bias, weight):
    return (*(x.new_empty(x.shape) for x in (hidden, bias, weight)), weight.new_empty(weight.shape[0]))


@operator(_like_gradients)
def gelu_linear_backward(
    dy: Tensor, hidden: Tensor, bias: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of hidden, bias, weight, and the bias of the output."""
    flat, dy = (x.reshape(-1, x.shape[-1]).contiguous() for x in (hidden, dy))
    dhidden = dy @ cast(weight, dy.dtype)
    out, dbias = _gelu_backward(dhidden, flat, bias.contiguous())
    dweight = cast(dy.t() @ out, weight.dtype)
    return dhidden.view(hidden.shape), cast(dbias, bias.dtype), dweight, cast(_column_sums(dy), weight.dtype)


def _keep(ctx, inputs, output):
    *kept, out_bias = inputs
    ctx.save_for_backward(*kept)
    ctx.out_bias = None if out_bias is None else out_bias.dtype


def _backward(ctx, dy):
    hidden, bias, weight = ctx.saved_tensors  # read only once: activation checkpointing frees them then
    *grads, dout_bias = gelu_linear_backward(dy, hidden, bias, weight)
    return *grads, None if ctx.out_bias is None else dout_bias.to(ctx.out_bias)


def _like_output(hidden, bias, weight, out_bias):
    return hidden.new_empty(*hidden.shape[:-1], weight.shape[0])


@operator(_like_output, _keep, _backward)
def gelu_linear(hidden: Tensor, bias: Tensor, weight: Tensor, out_bias: Tensor | None) -> Tensor:
    """Returns gelu(hidden + bias) weight^T + out_bias, [..., n], in the dtype of hidden [..., D].

    bias is [D], weight [n, D], out_bias [n] or None. The GELU is that of tanh, computed in float32.
    """
    flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    dtype = hidden.dtype
    y = F.linear(
        _gelu(flat, bias.contiguous()), cast(weight, dtype), None if out_bias is None else cast(out_bias, dtype)
    )
    return y.view(*hidden.shape[:-1], weight.shape[0])
