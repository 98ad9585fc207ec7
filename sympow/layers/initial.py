"""Initial weights: drawn on the CPU, so that a seed gives the same weights on every device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def init_linear(linear: nn.Linear, std: float, generator: torch.Generator | None = None) -> None:
    """Draws the weights from N(0, std) and sets the bias to 0; see `Mixer.reset_parameters`."""
    draw_normal(linear.weight, std, generator)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


@torch.no_grad()
def draw_normal(weight: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fills `weight` from N(0, std), drawn on the CPU; on the meta device nothing is drawn."""
    if not weight.is_meta:
        weight.copy_(torch.empty(weight.shape, device="cpu").normal_(0, std, generator=generator))


@torch.no_grad()
def draw_orthogonal(weight: Tensor, gain: float, generator: torch.Generator | None = None) -> None:
    """Fills `weight` with `gain` times an orthogonal matrix, as `draw_normal` does."""
    if not weight.is_meta:
        values = torch.empty(weight.shape, device="cpu")
        weight.copy_(nn.init.orthogonal_(values, gain, generator=generator))


@torch.no_grad()
def draw_uniform(weight: Tensor, low: float, high: float, generator: torch.Generator | None = None) -> None:
    """Fills `weight` with uniform draws from [low, high), as `draw_normal` does."""
    if not weight.is_meta:
        weight.copy_(torch.empty(weight.shape, device="cpu").uniform_(low, high, generator=generator))
