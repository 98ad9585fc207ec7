"""Whether there are kernels for a device and a dtype, also where the package triton is missing."""

from __future__ import annotations

import importlib.util

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
NO_TRITON = "needs the package triton, which is not installed"


def refusal_of_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel takes tensors of this device and dtype, as the end of a sentence; None if they do."""
    if not HAS_TRITON:
        return NO_TRITON
    from sympow.ops import triton

    return triton.unsupported_tensors(device, dtype)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels are taken unasked: on GPUs, not in Triton's interpreter."""
    return device.type == "cuda" and refusal_of_kernels(device, dtype) is None
