"""Softmax attention of hybrids on vLLM's key/value cache."""

from __future__ import annotations

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from sympow.layers.attention import AttentionMixer
from sympow.layers.base import Mixer
from sympow.layers.softmax import SoftmaxAttention
from sympow.layers.window import WindowAttention


class CachedAttention(nn.Module):
    """Computes softmax attention to all earlier tokens, or to a window, with vLLM.

    Args:
        mixer: projects the tokens, rotates queries and keys, and maps the heads' outputs.
        name: the name of the layer, unique in the model.
        vllm_config: the configuration of the engine, in which the layer registers itself.
    """

    def __init__(self, mixer: AttentionMixer, name: str, vllm_config: VllmConfig):
        super().__init__()
        self.mixer = mixer
        self.attention = Attention(
            mixer.n_heads,
            mixer.head_dim,
            mixer.head_dim**-0.5,
            num_kv_heads=mixer.n_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=mixer.window if isinstance(mixer, WindowAttention) else None,
            prefix=name,
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Mixes the tokens x [N, d] of a batch at int64 positions [N]: [N, d]."""
        rows = x[:, None]
        q, k, v = self.mixer.rotated_heads(rows, positions)
        y = self.attention(q.flatten(1), k.flatten(1), v.flatten(1))
        return self.mixer.output(rows, y.view(len(x), 1, self.mixer.n_heads, self.mixer.value_dim))[:, 0]


def keeps_cache(mixer: Mixer) -> bool:
    """Tells whether a mixer is softmax attention as vLLM computes it."""
    if not isinstance(mixer, SoftmaxAttention | WindowAttention):
        return False
    plain = mixer.convolution is None and mixer.value_dim == mixer.head_dim
    return plain and getattr(mixer, "gate", None) is None
