"""Whether autocast is on, and computation without it. The meta device has no autocast."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Returns a context in which autocast changes no dtype on the device of x."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype of products under autocast on the device of x, None where autocast is off."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Returns torch.cat of tensors. Under autocast, torch.cat refuses a half precision other than that of autocast."""
    if autocast_dtype(tensors[0]) is None:
        return torch.cat(tensors, dim)  # type: ignore[arg-type]
    with without_autocast(tensors[0]):
        return torch.cat(tensors, dim)  # type: ignore[arg-type]
