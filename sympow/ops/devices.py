"""Refuses devices without float64, in which positions and sums over a whole context are computed."""

from __future__ import annotations

from functools import lru_cache

import torch

WITH_FLOAT64 = ("cpu", "cuda", "meta")


def check_float64(device: torch.device) -> None:
    """Raises ValueError for a device that is not there or has no float64, such as that of Apple's GPUs (MPS)."""
    if device.type not in WITH_FLOAT64 and not has_float64(device.type):
        raise ValueError(
            f"sympow computes positions and sums over the context in float64, which the device {str(device)!r} does "
            "not have: use the CPU or a CUDA device"
        )


@lru_cache(maxsize=8)
def has_float64(kind: str) -> bool:
    """Returns whether a tensor of float64 can be made on this kind of device."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        with unset_fake_temporarily():
            torch.zeros(1, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError, AssertionError, ImportError):  # each kind of device raises others
        return False
    return True
