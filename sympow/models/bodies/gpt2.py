"""The body of GPT-2 (Radford et al., 2019), with an extra LayerNorm after the embedding and no learned positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sympow.layers.base import is_plain
from sympow.models.bodies.base import PreNormBlock
from sympow.models.config import ModelConfig
from sympow.models.norms import LayerNorm
from sympow.ops.availability import dtype_in_products, has_kernels
from sympow.ops.fused.gelu_linear import gelu_linear
from sympow.ops.fused.step_products import GELU


class GPT2Block(PreNormBlock):
    """Computes x + mixer(LayerNorm(x)), then x + mlp(LayerNorm(x)); the MLP is two linear maps around a GELU.

    The weights start as those of GPT-2: N(0, 0.02), but N(0, 0.02 / sqrt(2 n_layers)) into the residual stream;
    biases at 0 and norms at 1.

    Args:
        config: that of the model.
        layer: the number of the block, from 0.
    """

    norms_embedding = True
    step_function = GELU

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer, hidden=config.mlp_width, bias=True)

    @staticmethod
    def norm(config: ModelConfig) -> nn.Module:
        """Makes a LayerNorm."""
        return LayerNorm(config.d_model)

    @staticmethod
    def other_weights(config: ModelConfig) -> int:
        """Counts the elements of the two matrices of the MLP."""
        return 2 * config.d_model * config.mlp_width

    def mlp(self, x: Tensor) -> Tensor:
        """Computes the MLP's output for x [B, T, d]; on a GPU the gradients of the GELU are one kernel."""
        if not self.takes_kernels(x):
            return super().mlp(x)
        hidden = F.linear(self.mlp_norm(x), self.mlp_in.weight)  # without the bias, whose gradient the kernel sums up
        return gelu_linear(hidden, self.mlp_in.bias, self.mlp_out.weight, self.mlp_out.bias)

    def takes_kernels(self, x: Tensor) -> bool:
        """Returns whether the MLP is two products with a kernel between them, and all gradients are to be computed."""
        if not (is_plain(self.mlp_in, nn.Linear) and is_plain(self.mlp_out, nn.Linear)):
            return False
        learned = self.mlp_in.bias is not None and self.mlp_in.bias.requires_grad and self.mlp_out.weight.requires_grad
        learned = learned and torch.is_grad_enabled()
        return learned and has_kernels(x.device, dtype_in_products(x))

    def _narrowed(self, hidden: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(hidden, approximate="tanh"))
