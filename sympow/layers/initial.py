"""Initial weights: drawn on the CPU, so that a seed gives the same weights on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MOST_BIAS = 1e30  # in size, so that float32 holds the biases of gates and the differences between them


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


def gate_biases(gate_bias: Sequence[float], n_kv_heads: int) -> Tensor:
    """Returns the initial biases [G] of a gate for each key/value head, on a line between the two of `gate_bias`.

    A single head gets their middle. The tensor is on the CPU.

    Raises ValueError unless `gate_bias` is two numbers of at most MOST_BIAS in size.
    """
    if len(gate_bias) != 2:
        raise ValueError(f"gate_bias is two numbers, of the first and the last head; got {gate_bias!r}")
    if not all(-MOST_BIAS <= bias <= MOST_BIAS for bias in gate_bias):
        raise ValueError(f"gate_bias must be finite, and at most {MOST_BIAS:g} in size; got {gate_bias!r}")
    first, last = gate_bias
    return torch.linspace((first + last) / 2 if n_kv_heads == 1 else first, last, n_kv_heads, device="cpu")
