"""Packed documents in layers: their borders, and a function applied to each alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def document_bounds(cu_seqlens: Tensor, x: Tensor) -> list[int]:
    """Returns the cu_seqlens of x [1, T, ...] as plain numbers, checked; documents may be empty."""
    integer = not cu_seqlens.is_floating_point() and cu_seqlens.dtype != torch.bool
    if x.shape[0] != 1 or cu_seqlens.ndim != 1 or not integer:
        raise ValueError(
            f"cu_seqlens is an integer tensor [N + 1] and needs a batch of 1; "
            f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)} with a batch of {x.shape[0]}"
        )
    bounds = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != x.shape[1] or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {x.shape[1]}; got {bounds}")
    return bounds


def per_document(function: Callable[..., Tensor], cu_seqlens: Tensor | None, *tensors: Tensor) -> Tensor:
    """Calls function(*tensors), all [B, T, ...]; with cu_seqlens on each document alone, joined along time."""
    if cu_seqlens is None:
        return function(*tensors)
    bounds = document_bounds(cu_seqlens, tensors[0])
    lengths = [stop - start for start, stop in pairwise(bounds) if start < stop]
    # split, not slices: the gradient of a slice is as long as the whole row
    documents = zip(*(tensor.split(lengths, dim=1) for tensor in tensors), strict=True)
    return torch.cat([function(*document) for document in documents], dim=1)
