"""Linear maps that are computed in float32 at least, of gates, steps of positions and long filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sympow.layers.initial import draw_normal
from sympow.ops.availability import concatenated
from sympow.ops.fused.float32_linear import float32_linear


class Float32Linear(nn.Module):
    """Maps x [..., d] to x W^T + b [..., n], computed in float32 at least.

    Gates and the steps of positions, which are summed over the context, are such maps, and so are long filters.

    It is not a subclass of `nn.Linear`. Some frameworks, such as Hugging Face (`_init_weights`) and Zoology, draw the
    weights of every `nn.Linear` again and set its bias to 0. They do not change the initial values of this class.
    Muon moves weights of `nn.Linear` only (`sympow.training.muon`), and AdamW those of this class.

    Args:
        d_model: d.
        width: n.
        bias: whether there is b.
    """

    def __init__(self, d_model: int, width: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, d_model))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def reset_parameters(self, std: float, generator: torch.Generator | None = None) -> None:
        """Draws W from N(0, std) and sets b to 0."""
        draw_normal(self.weight, std, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., d] to x W^T + b [..., width], computed in float32."""
        return linear_float32(self, x)

    def extra_repr(self) -> str:
        """Returns the options that `repr` of the module shows."""
        return f"in_features={self.weight.shape[1]}, out_features={len(self.weight)}, bias={self.bias is not None}"


def linear_float32(linear: nn.Linear | Float32Linear, x: Tensor) -> Tensor:
    """Returns linear(x) in float32 at least, also under autocast: decays and positions add up over the context."""
    return float32_linear(x, linear.weight, linear.bias)


def linears_float32(linears: Sequence[nn.Linear | Float32Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Returns `linear_float32` of x [B, T, d] for each layer, computed in one product so that x is read only once."""
    if len(linears) < 2 or x.shape[1] == 1:  # joining the weights takes longer than a product of one token
        return tuple(linear_float32(linear, x) for linear in linears)
    weight = concatenated([linear.weight for linear in linears])
    biases = [x.new_zeros(len(n.weight), dtype=n.weight.dtype) if n.bias is None else n.bias for n in linears]
    return float32_linear(x, weight, concatenated(biases)).split([len(n.weight) for n in linears], -1)
