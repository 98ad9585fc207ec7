"""Softmax attention of hybrids on vLLM's key/value cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from sympow.integrations.vllm.inputs import (
    InputState,
    cached_heads,
    channels,
    gate_of,
    input_state,
    keeps_input,
    step_input,
)
from sympow.integrations.vllm.states import PagedStates, step_states
from sympow.layers.attention import AttentionMixer
from sympow.layers.window import WindowAttention


class InputStates(PagedStates):
    """Steps the convolution and the sums of the gates of softmax attention. Arguments as in `CachedAttention`."""

    def __init__(self, mixer: AttentionMixer, size: int, name: str, vllm_config: VllmConfig):
        super().__init__(input_state(mixer), size, name, vllm_config)
        self.mixer = mixer

    def stepped(self, x: Tensor, state: InputState) -> tuple[Sequence[Tensor], InputState]:
        """Steps the convolution and the sums; see `PagedStates.stepped`."""
        return step_input(self.mixer, x, state)


class CachedAttention(nn.Module):
    """Computes softmax attention to all earlier tokens, or to a window, with vLLM.

    A convolution and the sums of the gates have a state, in a page of their own.

    Args:
        mixer: projects the tokens, rotates queries and keys, and maps the heads' outputs.
        size: the bytes of a page of the engine, the same in all layers.
        name: the name of the layer, unique in the model.
        vllm_config: the configuration of the engine, in which the layer registers itself.
    """

    def __init__(self, mixer: AttentionMixer, size: int, name: str, vllm_config: VllmConfig):
        super().__init__()
        self.mixer = mixer
        self.states = InputStates(mixer, size, f"{name}.input", vllm_config) if keeps_input(mixer) else None
        self.attention = Attention(
            mixer.n_heads,
            head_size(mixer),
            mixer.head_dim**-0.5,
            num_kv_heads=mixer.n_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=mixer.window if isinstance(mixer, WindowAttention) else None,
            prefix=name,
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Mixes the tokens x [N, d] of a batch at int64 positions [N]: [N, d]."""
        sums, size = None, self.attention.head_size
        if self.states is not None and gate_of(self.mixer) is not None:
            sums = x.new_empty(len(x), self.mixer.n_kv_heads, dtype=torch.float64)
        if self.states is not None:
            x = step_states(self.states.name, x, [torch.empty_like(x), *([] if sums is None else [sums])])[0]
        y = self.attention(*cached_heads(self.mixer, x, sums, positions, size))
        y = y.view(-1, 1, self.mixer.n_heads, size)[..., : self.mixer.value_dim]
        return self.mixer.output(x[:, None], y)[:, 0]


def head_size(mixer: AttentionMixer) -> int:
    """Returns the channels of a head in vLLM's cache: a number that vLLM's kernels take. Spare channels are 0.

    Raises ValueError for heads that are too wide.
    """
    sizes = CPUAttentionBackend.get_supported_head_sizes() if current_platform.is_cpu() else range(8, 257, 8)
    needed = channels(mixer)
    found = next((size for size in sizes if size >= needed), None)
    if found is None:
        raise ValueError(f"vLLM takes heads of at most {max(sizes)} channels; softmax attention needs {needed}")
    return found
