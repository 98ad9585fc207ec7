"""Products of rows with weights and what surrounds them, for a step that reads one token of up to 64 sequences.

Such a product reads its weights once and does little else, so a step is as fast as its kernels are few. For a few rows
(`few_rows`), one kernel norms a row, convolves it, multiplies it with up to four weights, and applies what follows each
product: a bias, a rotation, the function of a gate or of an MLP, the residual. For more rows (`more_rows`), another
kernel prepares the rows before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sympow.ops.availability import autocast_dtype, has_kernels
from sympow.ops.first_order import refuse_tangents
from sympow.ops.fused.few_rows import few_rows
from sympow.ops.fused.more_rows import more_rows, prepare_rows
from sympow.ops.runtime.launcher import ahead, ceil_div, is_followed, launch, next_power_of_2, processors, shared_memory

FEW_ROWS, MOST_ROWS = 3, 64  # of x, for the kernel that norms its rows again in every program, and for the others
FEW_WIDE_ROWS = 8  # of float32, which the other kernels do not take
BYTES = 16  # that a thread loads at once
OF_WARP = 2048  # bytes of a row of weights for each warp of a program
MOST_BYTES = 8 * OF_WARP  # of a row
HELD = 16  # loads of weights that a thread has in its registers

NOTHING, GELU, SWIGLU, LOG_SIGMOID, SIGMOID = range(5)


class Norm(NamedTuple):
    """Describes a norm of x [..., d]: an RMSNorm, or a LayerNorm if it is `centered`.

    With a weight of fewer numbers, every part of so many channels is normed by itself.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool


class Taps(NamedTuple):
    """Describes a causal convolution by channel: weight [d, k], bias [d], and the inputs before, [B, k - 1, d]."""

    weight: Tensor
    bias: Tensor
    past: Tensor


class Turn(NamedTuple):
    """Describes the rotation of the first outputs of the first product, in heads of K channels.

    positions: int64 or float64 [1 or B]; frequencies: float64 [K / 2]; outputs: number of outputs that are rotated.
    """

    positions: Tensor
    frequencies: Tensor
    outputs: int


class Shift(NamedTuple):
    """Describes the past of a convolution, [B, k - 1, d], and the newest input [B, 1, d], which is added to it."""

    past: Tensor
    newest: Tensor


class Product(NamedTuple):
    """Describes a product: weight [n, d], bias [n], and the function that is applied to the result.

    `more` is a second bias, of the first product only, as are GELU and SWIGLU. With SWIGLU, there is no bias, and the
    weight has the rows of the gate, and below them those of the values. LOG_SIGMOID and SIGMOID, which is multiplied by
    `factor`, are of narrow products only.
    """

    weight: Tensor
    bias: Tensor | None = None
    more: Tensor | None = None
    function: int = NOTHING
    factor: float = 1.0


def takes_step(x: Tensor, tensors: Iterable[Tensor | None]) -> bool:
    """Returns whether the kernels multiply x [B, 1, d] with weights, all of which `tensors` lists."""
    most = FEW_WIDE_ROWS if x.dtype == torch.float32 else MOST_ROWS
    if x.shape[1] != 1 or not 0 < x.shape[0] <= most or torch.is_grad_enabled() or autocast_dtype(x) is not None:
        return False
    if not has_kernels(x.device, x.dtype) or is_followed(x):
        return False
    return all(w is None or _plain(w, x) for w in tensors)


def _plain(weight: Tensor, x: Tensor) -> bool:
    """Returns whether the kernel takes a weight for x."""
    same = type(weight) in (Tensor, torch.nn.Parameter) and weight.dtype == x.dtype and weight.device == x.device
    narrow = weight.ndim < 2 or weight.shape[-1] * weight.element_size() <= MOST_BYTES  # a bias has any length
    return same and weight.is_contiguous() and narrow


class Results(NamedTuple):
    """Holds what `step_products` returns.

    first, second and narrow: the results [B, 1, n]; inputs: what the convolution got, [B, 1, d], if it is still to be
    added to the inputs before; positions: int64 [B], those after the token, for a rotation by int64 positions.
    """

    first: Tensor
    second: Tensor | None
    narrow: list[Tensor]
    inputs: Tensor | None
    positions: Tensor | None


def step_products(
    x: Tensor,
    first: Product,
    second: Product | None = None,
    narrow: Sequence[Product] = (),
    *,
    norm: Norm | None = None,
    gate: Tensor | None = None,
    taps: Taps | None = None,
    turn: Turn | None = None,
    residual: Tensor | None = None,
    shift: Shift | None = None,
) -> Results:
    """Multiplies x [B, 1, d] with weights, for inputs that `takes_step` accepts.

    Args:
        x: the rows.
        first: a product.
        second: another one; it has no function.
        narrow: up to two products with few outputs. Their results are float32.
        norm: of x before the products. A norm of parts is an RMSNorm; `takes_parts` tells which the kernel takes.
        gate: [B, 1, d], for a factor silu(gate), after the norm if there is one.
        taps: a convolution after the norm. The inputs before are changed only if the result has no `inputs`.
        turn: the rotation of the first outputs of the first product.
        residual: [B, 1, n], added to the first result.
        shift: the past of a convolution whose newest input is now added, in place.
    """
    refuse_tangents("step_products", (x, gate, residual))
    x, (batch, _, inputs) = x.contiguous(), x.shape
    few = batch <= (FEW_WIDE_ROWS if x.dtype == torch.float32 else FEW_ROWS)
    factor = next((product.factor for product in narrow if product.function == SIGMOID), 1.0)
    tensors: dict[str, Tensor | None] = dict.fromkeys(_TENSORS) | {"residual": residual, "more": first.more}
    numbers: dict[str, Any] = dict.fromkeys(_NUMBERS, 0) | {"factor": factor, "B": batch, "D": inputs}
    ys: list[Tensor | None] = []
    for i, product in enumerate((first, second, *narrow)):
        y = None
        if product is not None:
            outputs = len(product.weight) // (1 + (product.function == SWIGLU))
            y = x.new_empty(batch, 1, outputs, dtype=x.dtype if i < 2 else torch.float32)
            tensors |= {f"w{i}": product.weight, f"b{i}": product.bias, f"y{i}": y}
            numbers |= {f"N{i}": outputs} | ({} if i == 1 else {f"FUNCTION{i}": product.function})
        ys.append(y)
    moved = None
    if turn is not None:
        moved = x.new_empty(batch, dtype=torch.int64) if turn.positions.dtype == torch.int64 else None
        tensors |= {"positions": turn.positions, "frequencies": turn.frequencies, "moved": moved}
        numbers |= {"position_sb": turn.positions.stride(0) if len(turn.positions) > 1 else 0}
        numbers |= {"TURNED": turn.outputs, "K": 2 * len(turn.frequencies)}
    around = _around(x, norm, gate, taps)
    with torch.cuda.device_of(x):
        if few:
            given = None if taps is None else torch.empty_like(x)
            _launch_few(x, tensors, numbers, *around, given, shift)
        else:
            given = None
            _launch_more(_prepared(x, *around), tensors, numbers)
    return Results(ys[0], ys[1], ys[2:], given, moved)  # type: ignore[arg-type]


def _around(
    x: Tensor, norm: Norm | None, gate: Tensor | None, taps: Taps | None
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Returns the tensors and the numbers of what comes before the products."""
    tensors: dict[str, Tensor | None] = dict.fromkeys(("norm", "center", "gate", "taps", "offset", "past"))
    numbers: dict[str, Any] = {"eps": 0.0, "past_sb": 0, "past_st": 0, "HEAD": 0, "CENTERED": False, "WIDTH": 0}
    tensors["gate"] = gate
    if norm is not None:
        tensors |= {"norm": norm.weight, "center": norm.bias}
        numbers |= {"eps": norm.eps, "HEAD": len(norm.weight), "CENTERED": norm.centered}
    if taps is not None:
        tensors |= {"taps": taps.weight, "offset": taps.bias, "past": taps.past}
        numbers |= {"WIDTH": taps.weight.shape[1], "past_sb": taps.past.stride(0), "past_st": taps.past.stride(1)}
    return tensors, numbers


def _launch_few(
    x: Tensor,
    tensors: dict[str, Tensor | None],
    numbers: dict[str, Any],
    around: dict[str, Tensor | None],
    numbers_around: dict[str, Any],
    given: Tensor | None,
    shift: Shift | None,
) -> None:
    """Launches the kernel that does all for its row; `given` is what the convolution gets, which it writes."""
    inputs, size = x.shape[2], x.element_size()
    warps = next_power_of_2(ceil_div(inputs * size, OF_WARP))
    block = warps * 32 * BYTES // size
    chunks = ceil_div(inputs, block)
    counts = [numbers[f"N{i}"] for i in range(4)]
    tile, loads = 8, chunks * (1 + (numbers["FUNCTION0"] == SWIGLU))
    while tile > 2 and (tile * loads > HELD or sum(counts) < 2 * tile * processors(x.device)):
        tile //= 2
    programs = sum(ceil_div(n, tile) for n in counts)
    shifted: dict[str, Tensor | None] = {"shifted": None, "newest": None}
    numbers_shifted = {"shifted_sb": 0, "shifted_st": 0, "SHIFT": 0, "D0": 0}
    if shift is not None and shift.past.shape[1]:  # a convolution of one tap has no past
        (_, held, channels), (of_row, of_input, _) = shift.past.shape, shift.past.stride()
        shifted = {"shifted": shift.past, "newest": shift.newest}
        numbers_shifted = {"shifted_sb": of_row, "shifted_st": of_input, "SHIFT": held, "D0": channels}
        programs += ceil_div(channels, block)
    sizes = {"TILE": tile, "BLOCK": block, "CHUNKS": chunks, "num_warps": warps} | ahead(x.device)
    launch(
        few_rows, (programs * x.shape[0],), numbers | numbers_around | numbers_shifted | sizes,
        x=x, inputs=given, **tensors, **around, **shifted,
    )  # fmt: skip


def _prepared(x: Tensor, around: dict[str, Tensor | None], numbers: dict[str, Any]) -> Tensor:
    """Returns the rows that are multiplied, after a launch if there is anything to do."""
    if not any(tensor is not None for tensor in around.values()):
        return x
    sizes = {"D": x.shape[2], "BLOCK": next_power_of_2(x.shape[2]), "num_warps": 4} | ahead(x.device)
    out = torch.empty_like(x)
    launch(prepare_rows, (x.shape[0],), numbers | sizes, x=x, out=out, **around)
    return out


def _launch_more(x: Tensor, tensors: dict[str, Tensor | None], numbers: dict[str, Any]) -> None:
    """Launches the kernel for all rows."""
    counts, inputs = [numbers[f"N{i}"] for i in range(4)], x.shape[2]
    if sum(counts) >= 128 * processors(x.device):
        tile, step, stages = 128, 64, 3
    elif sum(counts) >= 16 * processors(x.device):
        tile, step, stages = 32, 128, 5
    else:
        tile, step, stages = 16, 64 if inputs <= 1024 else 256, 5
    copied = 2 * step * (MOST_ROWS + tile * (1 + (numbers["FUNCTION0"] == SWIGLU)))  # bytes at once
    stages = max(1, min(stages, shared_memory(x.device) // copied))
    sizes = {"ROWS": MOST_ROWS, "TILE": tile, "STEP": step, "STAGES": stages, "num_warps": 4} | ahead(x.device)
    launch(more_rows, (sum(ceil_div(n, tile) for n in counts),), numbers | sizes, x=x, **tensors)


def takes_parts(channels: int, x: Tensor) -> bool:
    """Returns whether the kernel norms parts of so many channels."""
    return channels <= 32 * BYTES // x.element_size() and channels == next_power_of_2(channels)


_TENSORS = (
    "w0", "b0", "more", "y0", "residual", "w1", "b1", "y1", "w2", "b2", "y2", "w3", "b3", "y3",
    "positions", "frequencies", "moved",
)  # fmt: skip
_NUMBERS = (
    "position_sb", "N0", "N1", "N2", "N3", "TURNED", "K", "FUNCTION0", "FUNCTION2", "FUNCTION3",
)  # fmt: skip
