"""Random tensors and weights from a seed of their own, equal on every device."""

from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal values, drawn in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@torch.no_grad()
def disturb(module: Module, std: float, seed: int = 0) -> Module:
    """Adds draws from N(0, std) to all parameters: nothing stays at a special initial value, and every part matters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter += std * drawn.to(parameter.device)
    return module


@torch.no_grad()
def make_every_token_matter(model: Module) -> Module:
    """Enlarges the matrices of an untrained language model, so that every token matters to the next."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter *= 8
    # With a tied head the likeliest token would always be the last one.
    model.final_norm.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model
