"""What softmax attention carries from token to token beside its keys and values. This file needs no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.layers import MixerState
from sympow.layers.attention import AttentionMixer
from sympow.layers.base import Mixer
from sympow.layers.float32_linear import Float32Linear
from sympow.layers.gate_channels import gated_key_dim, gated_keys, gated_queries, limited
from sympow.layers.softmax import GatedScores
from sympow.ops.running_sums import sums_so_far


@dataclass
class InputState(MixerState):
    """Holds the state of a convolution, and the sums of the gates.

    Attributes:
        past: [B, k - 1, d], the last inputs of a convolution of k taps; None without one.
        log_sum: float64 [B, G], the sum of the log gates so far; None without a gate.
    """

    counters: ClassVar[tuple[str, ...] | None] = ()

    past: Tensor | None
    log_sum: Tensor | None


def keeps_cache(mixer: Mixer) -> bool:
    """Tells whether a mixer is softmax attention, whose keys and values vLLM keeps."""
    return isinstance(mixer, GatedScores)


def keeps_input(mixer: AttentionMixer) -> bool:
    """Tells whether softmax attention carries a state beside keys and values."""
    return mixer.convolution is not None or gate_of(mixer) is not None


def gate_of(mixer: AttentionMixer) -> Float32Linear | None:
    """Returns the linear layer of the gate of softmax attention, None if it has no gate."""
    return mixer.gate if isinstance(mixer, GatedScores) else None


def channels(mixer: AttentionMixer) -> int:
    """Returns the channels that a head needs in a cache: those of keys, with the sums of the gates, or of values."""
    return max(mixer.head_dim if gate_of(mixer) is None else gated_key_dim(mixer.head_dim), mixer.value_dim)


def input_state(
    mixer: AttentionMixer, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> InputState:
    """Returns the state before the first token of one sequence; options as in `Mixer.init_state`."""
    past = None if mixer.convolution is None else mixer.convolution.init_state(1, device, dtype)
    if gate_of(mixer) is None:
        return InputState(past, None)
    device = mixer.out.weight.device if device is None else device
    return InputState(past, torch.zeros(1, mixer.n_kv_heads, dtype=torch.float64, device=device))


def step_input(mixer: AttentionMixer, x: Tensor, state: InputState) -> tuple[Sequence[Tensor], InputState]:
    """Continues sequences by x [B, T', d].

    Returns the output of the convolution [B, T', d], or x without one, and with a gate the sums of the log gates,
    float64 [B, T', G]; then the state.
    """
    past, log_sum, gate = state.past, state.log_sum, gate_of(mixer)
    if mixer.convolution is not None and past is not None:
        x, past = mixer.convolution.step(x, past)
    if gate is None or log_sum is None:
        return (x,), InputState(past, log_sum)
    sums = sums_so_far(limited(F.logsigmoid(gate(x))), log_sum)
    return (x, sums), InputState(past, sums[:, -1])


def cached_heads(
    mixer: AttentionMixer, x: Tensor, sums: Tensor | None, positions: Tensor, size: int
) -> tuple[Tensor, ...]:
    """Returns queries, keys and values for a cache, with `size` channels a head: [N, H size], [N, G size] twice.

    The gates are channels of queries and keys; see `sympow.layers.gate_channels`. The scale of the scores is K**-0.5.

    Args:
        mixer: projects and rotates.
        x: [N, d], the output of the convolution.
        sums: float64 [N, G], the sums of the log gates; None without a gate.
        positions: int64 [N].
        size: at least `channels(mixer)`.
    """
    q, k, v = mixer.rotated_heads(x[:, None], positions)
    if sums is not None:
        q, k = gated_queries(q), gated_keys(k, sums[:, None])
    return tuple(F.pad(part, (0, size - part.shape[-1])).flatten(1) for part in (q, k, v))
