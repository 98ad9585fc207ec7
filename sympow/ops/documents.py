"""Packed documents: N of them along the time of one row, with their borders in cu_seqlens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sympow.ops.constants import has_values


def check_borders(cu_seqlens: Tensor, batch: int) -> None:
    """Raises TypeError or ValueError unless cu_seqlens is an integer tensor [N + 1] and the batch is 1.

    Its values are not checked, because the host would have to wait for a GPU.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"cu_seqlens must be an int32 or int64 tensor; got {getattr(cu_seqlens, 'dtype', cu_seqlens)!r}"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] for N >= 1 documents; got {list(cu_seqlens.shape)}")
    if batch != 1:
        raise ValueError(f"packed documents (cu_seqlens) lie along T of a batch of 1; got B = {batch}")


def borders(cu_seqlens: Tensor, time: int) -> list[int]:
    """Returns the values of cu_seqlens.

    Raises ValueError unless they rise from 0 to `time`, and for a tensor without values.

    For a tensor on a GPU the host waits.
    """
    if not torch.compiler.is_dynamo_compiling() and not has_values(cu_seqlens):
        raise ValueError("cu_seqlens must have values here; got a fake or a meta tensor, as in torch.export")
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != time or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {time} without falling; got {ends[:8]}...{ends[-1]}")
    return ends


def document_starts(cu_seqlens: Tensor, time: int) -> Tensor:
    """Returns the first token of the document of every token: int32 [T], from cu_seqlens [N + 1]."""
    token = torch.arange(time, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return cu_seqlens[document].to(torch.int32)
