"""Packed documents in layers: their borders, and a function applied to each alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from sympow.ops.availability import concatenated
from sympow.ops.packed import borders, check_borders


def document_bounds(cu_seqlens: Tensor, x: Tensor) -> list[int]:
    """Returns the cu_seqlens of x [1, T, ...] as plain numbers, checked as in the op; documents may be empty."""
    check_borders(cu_seqlens, x.shape[0])
    return borders(cu_seqlens, x.shape[1])


def per_document(function: Callable[..., Tensor], cu_seqlens: Tensor | None, *tensors: Tensor) -> Tensor:
    """Calls function(*tensors), all [B, T, ...]; with cu_seqlens on each document alone, joined along time."""
    if cu_seqlens is None:
        return function(*tensors)
    bounds = document_bounds(cu_seqlens, tensors[0])
    lengths = [stop - start for start, stop in pairwise(bounds) if start < stop]
    # split, not slices: the gradient of a slice is as long as the whole row
    documents = zip(*(tensor.split(lengths, dim=1) for tensor in tensors), strict=True)
    return concatenated([function(*document) for document in documents], dim=1)
