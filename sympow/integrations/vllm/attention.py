"""Softmax attention of hybrids on vLLM's key/value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from sympow.integrations.vllm.states import PagedStates, step_states
from sympow.layers import MixerState
from sympow.layers.attention import AttentionMixer
from sympow.layers.base import Float32Linear, Mixer
from sympow.layers.gate_channels import gated_key_dim, gated_keys, gated_queries, limited
from sympow.layers.softmax import SoftmaxAttention
from sympow.layers.window import WindowAttention
from sympow.ops.running_sums import sums_so_far


@dataclass
class InputState(MixerState):
    """Holds what softmax attention carries beside keys and values.

    Attributes:
        past: [B, k - 1, d], the last inputs of a convolution of k taps; None without one.
        log_sum: float64 [B, G], the sum of the log gates so far; None without a gate.
    """

    counters: ClassVar[tuple[str, ...] | None] = ()

    past: Tensor | None
    log_sum: Tensor | None


class InputStates(PagedStates):
    """Steps the convolution and the sums of the gates of softmax attention. Arguments as in `CachedAttention`."""

    def __init__(self, mixer: AttentionMixer, size: int, name: str, vllm_config: VllmConfig):
        super().__init__(input_state(mixer), size, name, vllm_config)
        self.mixer = mixer

    def stepped(self, x: Tensor, state: InputState) -> tuple[Sequence[Tensor], InputState]:
        """Returns the output of the convolution [B, T', d], and with a gate its sums, float64 [B, T', G]."""
        past, log_sum, gate = state.past, state.log_sum, gate_of(self.mixer)
        if self.mixer.convolution is not None and past is not None:
            x, past = self.mixer.convolution.step(x, past)
        if gate is None or log_sum is None:
            return (x,), InputState(past, log_sum)
        sums = sums_so_far(limited(F.logsigmoid(gate(x))), log_sum)
        return (x, sums), InputState(past, sums[:, -1])


class CachedAttention(nn.Module):
    """Computes softmax attention to all earlier tokens, or to a window, with vLLM.

    The gates are channels of queries and keys; see `sympow.layers.gate_channels`. A convolution and the sums of the
    gates have a state in a page of their own.

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
        outs = [torch.empty_like(x)]
        if gate_of(self.mixer) is not None:
            outs.append(x.new_empty(len(x), self.mixer.n_kv_heads, dtype=torch.float64))
        if self.states is not None:
            x, *sums = step_states(self.states.name, x, outs)
        rows = x[:, None]
        q, k, v = self.mixer.rotated_heads(rows, positions)
        if len(outs) == 2:
            q, k = gated_queries(q), gated_keys(k, sums[0][:, None])
        size = self.attention.head_size
        q, k, v = (F.pad(part, (0, size - part.shape[-1])).flatten(1) for part in (q, k, v))
        y = self.attention(q, k, v).view(-1, 1, self.mixer.n_heads, size)
        return self.mixer.output(rows, y[..., : self.mixer.value_dim])[:, 0]


def keeps_cache(mixer: Mixer) -> bool:
    """Tells whether a mixer is softmax attention, whose keys and values vLLM keeps."""
    return isinstance(mixer, SoftmaxAttention | WindowAttention)


def keeps_input(mixer: AttentionMixer) -> bool:
    """Tells whether softmax attention carries a state beside keys and values."""
    return mixer.convolution is not None or gate_of(mixer) is not None


def gate_of(mixer: AttentionMixer) -> Float32Linear | None:
    """Returns the linear layer of the gate of softmax attention, None if it has no gate."""
    return mixer.gate if isinstance(mixer, SoftmaxAttention) else None


def input_state(mixer: AttentionMixer, **options: Any) -> InputState:
    """Returns what softmax attention carries before the first token of one sequence; options of `Mixer.init_state`."""
    past = None
    if mixer.convolution is not None:
        past = mixer.convolution.init_state(1, options.get("device"), options.get("dtype"))
    if gate_of(mixer) is None:
        return InputState(past, None)
    device = options.get("device", mixer.out.weight.device)
    return InputState(past, torch.zeros(1, mixer.n_kv_heads, dtype=torch.float64, device=device))


def head_size(mixer: AttentionMixer) -> int:
    """Returns the channels of a head in vLLM's cache: a number that vLLM's kernels take. The rest is 0.

    Raises ValueError for heads that are too wide.
    """
    keys = mixer.head_dim if gate_of(mixer) is None else gated_key_dim(mixer.head_dim)
    channels = max(keys, mixer.value_dim)
    sizes = CPUAttentionBackend.get_supported_head_sizes() if current_platform.is_cpu() else range(8, 257, 8)
    found = next((size for size in sizes if size >= channels), None)
    if found is None:
        raise ValueError(f"vLLM takes heads of at most {max(sizes)} channels; softmax attention has {channels} here")
    return found
