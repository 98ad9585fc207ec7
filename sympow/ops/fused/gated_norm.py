"""The norm of every head's output, and the output gate: in plain torch, and on a GPU by one kernel each way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import has_kernels
from sympow.ops.runtime.launcher import cast, ceil_div, jit, launch, next_power_of_2, operator, sharing

if TYPE_CHECKING:
    import triton.language as tl

ELEMENTS, BACKWARD_ELEMENTS, WARPS = 4096, 2048, 4  # elements of a tile of heads
PROGRAMS = 16  # programs of the backward for each SM; each writes a part of the gradient of the weights


def gated_norm(y: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Returns RMSNorm(y) * weight over the channels of every head, times silu(gate).

    Each factor is left out where it is not given.

    y * (mean of y**2 over V + eps)**-0.5 is computed in float32 at least.

    Args:
        y: [B, T, H, V].
        weight: [V] of the norm; None: no norm.
        gate: [B, T, H V]; None: no gate.
        eps: added to the mean square.

    Returns:
        [B, T, H V], in the dtype of y.
    """
    if weight is None and gate is None:
        return y.flatten(2)
    if has_kernels(y.device, y.dtype):
        return fused_gated_norm(y, weight, gate, eps)
    dtype = torch.promote_types(y.dtype, torch.float32)
    out = y.to(dtype)
    if weight is not None:
        out = F.rms_norm(out, (y.shape[3],), weight.to(dtype), eps)
    out = out.flatten(2)
    if gate is not None:
        out = out * F.silu(gate.to(dtype))
    return out.to(y.dtype)


@jit(do_not_specialize=["ROWS"])
def norm_gate(
    y,  # [ROWS, V], a row for each head of each token
    weight,  # [V], or None: no norm
    gate,  # [ROWS, V], or None: no gate
    out,  # [ROWS, V]
    eps,
    ROWS,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Norms and gates a tile of TILE rows. WIDTH is the next power of two of V."""
    row = tl.cast(tl.program_id(0), tl.int64) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, WIDTH)
    mask = (row < ROWS)[:, None] & (col < V)[None, :]
    place = row[:, None] * V + col[None, :]
    value = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / V + eps)
        w = tl.load(weight + col, mask=col < V, other=0.0).to(tl.float32)
        value = value * scale[:, None] * w[None, :]
    if gate is not None:
        g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
        value = value * g / (1.0 + tl.exp(-g))
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["ROWS"])
def norm_gate_backward(
    dout,  # [ROWS, V]
    y,  # [ROWS, V]
    weight,  # [V], or None
    gate,  # [ROWS, V], or None
    dy,  # [ROWS, V]
    dweight,  # float32 [programs, V]: a part of the sum for each program, or None
    dgate,  # [ROWS, V], or None
    eps,
    ROWS,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Computes the gradients of every num_programs-th tile of TILE rows, and their part in that of the weights."""
    col = tl.arange(0, WIDTH)
    total = tl.zeros([TILE, WIDTH], tl.float32)  # threads exchange sums only once, after the last tile
    w = tl.full([WIDTH], 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + col, mask=col < V, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(ROWS, TILE), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        mask = (row < ROWS)[:, None] & (col < V)[None, :]
        place = row[:, None] * V + col[None, :]
        value = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dout + place, mask=mask, other=0.0).to(tl.float32)
        scale = tl.full([TILE], 1.0, tl.float32)
        if weight is not None:
            scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / V + eps)
        normed = value * scale[:, None]
        if gate is not None:
            g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-g))
            of_gate = grad * normed * w[None, :] * sigmoid * (1.0 + g * (1.0 - sigmoid))
            tl.store(dgate + place, of_gate.to(dgate.dtype.element_ty), mask=mask)
            grad = grad * g * sigmoid
        if weight is not None:
            total += grad * normed
            grad = grad * w[None, :]
            along = tl.sum(grad * normed, 1) / V
            grad = (grad - normed * along[:, None]) * scale[:, None]
        tl.store(dy + place, grad.to(dy.dtype.element_ty), mask=mask)
    if weight is not None:
        tl.store(dweight + tl.program_id(0) * V + col, tl.sum(total, 0), mask=col < V)


def _tiles(y: Tensor, elements: int) -> tuple[int, int, dict[str, int]]:
    """Returns the number of rows of heads, the rows of a tile of so many elements, and the constants of the kernels."""
    value_dim = y.shape[3]
    width = next_power_of_2(value_dim)
    tile = max(1, elements // width)
    return y.numel() // value_dim, tile, {"V": value_dim, "WIDTH": width, "TILE": tile}


def _like_gradients(dout, y, weight, gate, eps):
    return y.new_empty(y.shape), *(y.new_empty(0) if x is None else x.new_empty(x.shape) for x in (weight, gate))


@operator(_like_gradients)
def gated_norm_backward(
    dout: Tensor, y: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of y, weight and gate; an empty tensor for what was not given."""
    dout, y = dout.contiguous(), y.contiguous()
    weight, gate = (None if x is None else x.contiguous() for x in (weight, gate))
    rows, tile, dims = _tiles(y, BACKWARD_ELEMENTS)
    programs = sharing(ceil_div(rows, tile), 1, PROGRAMS, y.device)
    dy, dgate = torch.empty_like(y), y.new_empty(0) if gate is None else torch.empty_like(gate)
    parts = torch.empty if rows else torch.zeros  # every program writes its own row
    dweight = None if weight is None else parts(max(1, programs), y.shape[3], device=y.device)
    if rows:
        with torch.cuda.device_of(y):
            launch(
                norm_gate_backward, (programs,), {"eps": eps, "ROWS": rows, "num_warps": WARPS} | dims,
                dout=dout, y=y, weight=weight, gate=gate, dy=dy, dweight=dweight, dgate=dgate,
            )  # fmt: skip
    if dweight is None or weight is None:
        return dy, y.new_empty(0), dgate
    return dy, cast(dweight.sum(0), weight.dtype), dgate


def _keep(ctx, inputs, output):
    y, weight, gate, ctx.eps = inputs
    ctx.save_for_backward(y, weight, gate)


def _backward(ctx, dout):
    y, weight, gate = ctx.saved_tensors  # read only once: activation checkpointing frees them then
    dy, dweight, dgate = gated_norm_backward(dout, y, weight, gate, ctx.eps)
    return dy, None if weight is None else dweight, None if gate is None else dgate, None


def _like_output(y, weight, gate, eps):
    return y.new_empty(*y.shape[:2], y.shape[2] * y.shape[3])


@operator(_like_output, _keep, _backward)
def fused_gated_norm(y: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
    """Norms y [B, T, H, V] over V, times weight [V], times silu(gate [B, T, H V]): [B, T, H V]."""
    y = y.contiguous()
    weight, gate = (None if x is None else x.contiguous() for x in (weight, gate))
    out = y.new_empty(*y.shape[:2], y.shape[2] * y.shape[3])
    rows, tile, dims = _tiles(y, ELEMENTS)
    if rows:
        with torch.cuda.device_of(y):
            arguments = {"eps": eps, "ROWS": rows, "num_warps": WARPS} | dims
            grid = (ceil_div(rows, tile),)
            launch(norm_gate, grid, arguments, y=y, weight=weight, gate=gate, out=out)
    return out
