"""Branches in the CUDA graph of a step.

The kernels of a few tokens leave most of a GPU idle, so branches can run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


def beside(compute: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Returns a function that returns `compute()`, to be called once.

    While a CUDA graph is captured without gradients, the computation becomes a branch of the graph. The branch starts
    at this call, and ends where the returned function is called. In all other cases the returned function does the
    computation.

    Args:
        compute: launches kernels on the current stream. It reads no tensor that is changed before the result is asked
            for.
        device: of the tensors.
    """
    if device.type != "cuda" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return compute
    if not torch.cuda.is_current_stream_capturing():
        return compute
    current, branch = torch.cuda.current_stream(device), _branch(device)
    branch.wait_stream(current)
    with torch.cuda.stream(branch):
        result = compute()

    def joined() -> Tensor:
        current.wait_stream(branch)
        return result

    return joined


@lru_cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which branches are captured."""
    return torch.cuda.Stream(device)
