"""The device on which a model runs, by name, and the precision in which it runs there."""

from contextlib import AbstractContextManager, nullcontext

import torch

from sympow.ops.availability import check_float64


def resolve_device(name: str) -> torch.device:
    """Returns the torch device of a name. "auto" means CUDA if it is available, otherwise the CPU.

    Raises ValueError if the device does not exist, cannot be used, or has no float64.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    check_float64(device)
    return device


def usual_precision(device: torch.device) -> str:
    """Returns the faster precision of training on a device: "float32" on a CPU without instructions for bfloat16.

    Such a CPU computes in bfloat16 several times as slowly as in float32.
    """
    if device.type != "cpu" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        return "bf16"
    return "float32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Gives the context in which a model of `TrainingConfig.precision` runs."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
