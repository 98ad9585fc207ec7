"""Losses of rows of logits and their gradients, by one kernel that reads the logits and writes the gradients over them.

`sympow.models.cross_entropy.CrossEntropy` specifies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sympow.ops.runtime.launcher import jit, launch, next_power_of_2, operator

if TYPE_CHECKING:
    import triton.language as tl

# Columns that a program holds at once, and its warps at that width. With more programs on an SM, a row would leave the
# L2 cache before it is read for the second time.
COLUMNS, WARPS = 8192, 8


@jit
def token_losses(
    logits,  # [N, W], replaced by the gradients of the losses; rows are W apart
    targets,  # int64 [N]
    losses,  # float32 [N]
    W,
    IGNORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the loss of one row and its gradient, softmax less one at the target; both 0 for a target of IGNORE.

    The loss is NaN for a target that is not in the row.
    """
    i_n = tl.program_id(0)
    logits += tl.cast(i_n, tl.int64) * W
    column = tl.arange(0, BLOCK)
    target = tl.load(targets + i_n)
    real = target != IGNORE
    inside = (target >= 0) & (target < W)
    of_target = tl.load(logits + target, mask=inside, other=float("nan")).to(tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    blocks = tl.cdiv(W, BLOCK)
    for block in range(blocks):
        place = block * BLOCK + column
        x = tl.load(logits + place, mask=place < W, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        found = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(found == float("-inf"), 0.0, found)  # a block may hold no token
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = found
    tl.store(losses + i_n, tl.where(real, tl.log(total) + largest - of_target, 0.0))
    scale = tl.where(real, 1.0 / total, 0.0)
    tl.debug_barrier()  # all threads have read the logit of the target, which is overwritten now
    for i in range(blocks):
        place = (blocks - 1 - i) * BLOCK + column  # the last block first, which is still in the cache
        x = tl.load(logits + place, mask=place < W, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        grad = tl.exp(x - largest) * scale - tl.where((place == target) & real, 1.0, 0.0)
        tl.store(logits + place, grad.to(logits.dtype.element_ty), mask=place < W, eviction_policy="evict_first")


def _like_losses(logits, targets, ignore):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@operator(_like_losses, changes=("logits",))
def cross_entropy_of_rows(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """Returns the losses, float32 [N], of logits [N, W], and overwrites the logits with the gradients of the losses.

    Targets are int64 [N]; `ignore` is the target of rows without a loss. Any other target that is no column has a loss
    of NaN. Logits are contiguous. A row has at least one logit that is not -inf.
    """
    rows, width = logits.shape
    targets = targets.contiguous()
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    if rows:
        block = min(COLUMNS, next_power_of_2(width))
        constants = {"IGNORE": ignore, "BLOCK": block, "num_warps": max(1, WARPS * block // COLUMNS)}
        with torch.cuda.device_of(logits):
            launch(token_losses, (rows,), {"W": width} | constants, logits=logits, targets=targets, losses=losses)
    return losses
