"""Whether there are kernels for a device and a dtype, also where the package triton is missing or too old."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from importlib import metadata

import torch

_LEAST = (3, 6)  # earlier versions have another Gluon, and compile it in another way
_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm")


def why_no_triton() -> str | None:
    """Returns why Triton cannot be used, as the end of a sentence, or None if it can. Triton is not imported."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            too_old = tuple(map(int, re.findall(r"\d+", version)[:2])) < _LEAST
            return f"needs triton >= {'.'.join(map(str, _LEAST))}; found {version}" if too_old else None
    return None


# Why there are no kernels at all, as the end of a sentence; None if there are. It is computed once, and does not load
# triton.
NO_TRITON = why_no_triton()


def refusal_of_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why no kernel supports this device and dtype, as the end of a sentence; None if one does."""
    if NO_TRITON:
        return NO_TRITON
    from sympow.ops import triton

    return triton.unsupported_tensors(device, dtype)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether "auto" takes kernels: on GPUs, not in Triton's interpreter nor for torch.export.

    An exported program then holds operators of torch alone, and runs on any device.
    """
    if torch.compiler.is_exporting():
        return False
    return device.type == "cuda" and refusal_of_kernels(device, dtype) is None
