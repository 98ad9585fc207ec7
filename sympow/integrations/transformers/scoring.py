"""Causal language models of transformers with the interface of the evaluations of sympow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from sympow.data.tokenizer_files import json_object
from sympow.integrations.transformers.configuration import SympowConfig
from sympow.integrations.transformers.errors import reading, without_bars
from sympow.integrations.transformers.pretrained.power_models import POWER_MODELS
from sympow.integrations.transformers.weight_files import check_loaded

_ELEMENTS = 1 << 26  # of the logits formed at once, at least those of a row


class ScoredCausalLM(nn.Module):
    """Wraps a causal language model of transformers with the methods of `LanguageModel` that evaluations call.

    Args:
        model: the result of `AutoModelForCausalLM.from_pretrained`.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    @property
    def vocab_size(self) -> int:
        """Returns the number of embeddings; every token is below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def longest(self) -> int | None:
        """Returns the longest sequence that the model's configuration allows, in tokens; None if it has no limit."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes logits [B, T, V] of the token after each of tokens [B, T]; ValueError for rows that are too long."""
        if self.longest is not None and tokens.shape[1] > self.longest:
            raise ValueError(f"the model reads rows of {self.longest:,} tokens at most; got {tokens.shape[1]:,}")
        return self.model(input_ids=tokens, use_cache=False).logits

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Computes -log p(target) in nats of targets [B, T], float32 or float64 [B, T]."""
        rows = max(1, _ELEMENTS // (tokens.shape[1] * self.vocab_size))
        losses = []
        for some, wanted in zip(tokens.split(rows), targets.split(rows), strict=True):
            logits = self(some)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted))
        return torch.cat(losses)


def load_causal_lm(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> ScoredCausalLM:
    """Loads the model of a folder, without the network, in evaluation mode.

    Weights have `dtype`; None: that of their file. What transformers computes in float32 stays in float32.

    Raises the errors of `reading`, such as ValueError for a file of weights that is cut, those of `check_loaded`, and
    ValueError for Brumby and PowerCoder, which transformers does not read.
    """
    with reading(path):
        kind = json_object(Path(path) / "config.json").get("model_type")
    if kind in POWER_MODELS:
        raise ValueError(f"{path}: transformers does not read {kind} models, of which `sympow convert` makes a run")
    with reading(path), without_bars():
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    check_loaded(report, str(path), own=kind == SympowConfig.model_type)
    return ScoredCausalLM(model.to(device)).eval()
