"""Finds earlier occurrences of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def distance_to_previous(tokens: Tensor) -> Tensor:
    """Returns the distances of tokens [B, T] to their last occurrences, int64 [B, T]; 0 for a first occurrence.

    By sorting: O(T log T).
    """
    ordered, position = tokens.sort(dim=1, stable=True)
    again = ordered[:, 1:] == ordered[:, :-1]
    distance = torch.zeros_like(position)
    distance[:, 1:] = torch.where(again, position[:, 1:] - position[:, :-1], 0)
    return torch.empty_like(distance).scatter_(1, position, distance)


def checked_tokens(tokens: Tensor | None, x: Tensor) -> Tensor:
    """Returns `tokens`; raises ValueError unless there is an int64 token for every row of x [B, T, d]."""
    if tokens is None:
        raise ValueError("this mixer needs the tokens that x stands for")
    if tokens.shape != x.shape[:2] or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be int64 {list(x.shape[:2])}; got {tokens.dtype} {list(tokens.shape)}")
    return tokens
