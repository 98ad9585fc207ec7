"""Branches in the CUDA graph of a step.

The kernels of a few tokens leave most of a GPU idle, so branches can run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


@contextmanager
def parallel_branch(compute: Callable[[], Result], device: torch.device) -> Iterator[Callable[[], Result]]:
    """Runs `compute` in parallel with the body of a `with` block; yields a function that returns the result.

    While a CUDA graph is captured without gradients, the computation becomes a branch of the graph. The branch starts
    before the body and ends with it. In all other cases the given function computes when it is called.

    Args:
        compute: launches kernels on the current stream. It reads no tensor that the body changes.
        device: the device of the tensors.
    """
    if device.type != "cuda" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield compute
        return
    if not torch.cuda.is_current_stream_capturing():
        yield compute
        return
    current, branch = torch.cuda.current_stream(device), branch_of(device)
    branch.wait_stream(current)
    try:
        with torch.cuda.stream(branch):
            result = compute()
        yield lambda: result
    finally:  # also of an error, because a graph with an open branch cannot be ended
        current.wait_stream(branch)


@lru_cache
def branch_of(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which branches are captured."""
    return torch.cuda.Stream(device)
