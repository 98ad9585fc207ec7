"""Reads single tokens with CUDA graphs, for `generate` of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from sympow.integrations.transformers.cache import SympowCache
from sympow.layers import MixerState
from sympow.models import ModelState

if TYPE_CHECKING:
    from sympow.integrations.transformers.modeling import SympowBlock, SympowForCausalLM


class ModelSteps:
    """Steps a model of transformers as `LanguageModel.step` does, through its own modules with their hooks.

    Args:
        model: the model.
    """

    def __init__(self, model: SympowForCausalLM):
        self._model = model
        self.embedding = model.model.embedding

    def init_state(self, batch_size: int) -> ModelState:
        """Returns the state before the first token."""
        blocks = [cast("SympowBlock", layer).block for layer in self._model.model.layers]
        return ModelState([block.init_state(batch_size) for block in blocks])

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Maps int64 [B, 1] to logits [B, vocab_size], and the state to the one after it."""
        last, after = self._model.model.step(tokens, list(state.layers))
        return self._model.lm_head(last[:, -1]), ModelState(cast(list[MixerState], after))


def logits_by_graph(
    model: SympowForCausalLM, tokens: Tensor, mask: Tensor | None, cache: Any, logits_to_keep: int | Tensor
) -> Tensor | None:
    """Reads one token of every sequence with a CUDA graph, as `SympowCache.stepped`.

    Returns logits [B, vocab_size], or None if that is not possible: if the model is not on a single GPU, with
    gradients, in code that torch.compile traces, with padding, and if hidden states are requested.
    """
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if tokens.shape[1:] != (1,) or not tokens.is_cuda or torch.is_grad_enabled() or len(devices) > 1:
        return None
    if not isinstance(cache, SympowCache) or not isinstance(logits_to_keep, int) or torch.compiler.is_compiling():
        return None
    if model.config.output_hidden_states or not (mask is None or cache.takes_a_token(mask)):
        return None
    return cache.stepped(tokens, ModelSteps(model))
