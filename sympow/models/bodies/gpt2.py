"""The body of GPT-2 (Radford et al., 2019), with an extra LayerNorm after the embedding and no learned positions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from sympow.models.bodies.base import PreNormBlock
from sympow.models.config import ModelConfig
from sympow.models.norms import LayerNorm


class GPT2Block(PreNormBlock):
    """x + mixer(LayerNorm(x)), then x + mlp(LayerNorm(x)), the MLP of two linear maps with biases around a GELU.

    The weights start as those of GPT-2: N(0, 0.02), but N(0, 0.02 / sqrt(2 n_layers)) into the residual stream;
    biases at 0 and norms at 1.

    Args:
        config: that of the model.
        layer: the number of the block, from 0.
    """

    norms_embedding = True

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

    def _narrowed(self, hidden: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(hidden, approximate="tanh"))
