"""The body of Llama (Touvron et al., 2023) and of Qwen2, Qwen3 and SmolLM: RMSNorm and a gated MLP."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from sympow.models.bodies.base import PreNormBlock
from sympow.models.config import ModelConfig
from sympow.models.norms import RMSNorm
from sympow.ops.fused.step_products import SWIGLU


class LlamaBlock(PreNormBlock):
    """Computes x + mixer(RMSNorm(x)), then x + W_down (silu(W_gate y) * W_up y), y = RMSNorm(x): SwiGLU, no biases.

    `mlp_in` holds the rows of W_gate and then those of W_up, `mlp_out` is W_down. There is no norm after the
    embedding. The features of attention in the published models are options of the mixer; see docs/guides/bodies.md.

    The weights start as those of the gpt2 body: N(0, 0.02), but N(0, 0.02 / sqrt(2 n_layers)) into the residual
    stream; norms at 1.

    Args:
        config: that of the model.
        layer: the number of the block, from 0.
    """

    norms_embedding = False
    step_function = SWIGLU

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer, hidden=2 * config.mlp_width, bias=False)
        self._fused = {"mlp_in": [config.mlp_width] * 2} if self.has_mlp else {}

    @staticmethod
    def norm(config: ModelConfig) -> nn.Module:
        """Makes an RMSNorm."""
        return RMSNorm(config.d_model, config.norm_eps)

    @staticmethod
    def other_weights(config: ModelConfig) -> int:
        """Counts the elements of the three matrices of the MLP."""
        return 3 * config.d_model * config.mlp_width

    def fused(self) -> dict[str, list[int]]:
        """Names `mlp_in`, which holds W_gate and W_up; see `Block.fused`."""
        return self._fused

    def _narrowed(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return self.mlp_out(F.silu(gate) * up)
