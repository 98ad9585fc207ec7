"""Models that the evaluations score: runs, and folders of Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sympow.cli.runs import check_tokenizers, labels_of
from sympow.data import DataConfig, Tokenizer
from sympow.training import load
from sympow.training.runs import saved_tokenizer


class Scored(NamedTuple):
    """Holds a model in evaluation mode.

    Attributes:
        model: has `forward(tokens)`, logits, and `token_losses(tokens, targets)`, both of rows [B, T].
        vocab_size: every token is below it.
        tokenizer: None for tokens without text.
        data: the run's; None where it is not known.
        context: tokens of a row that it was trained on, or that it reads at most; None where it is not known.
    """

    model: Any
    vocab_size: int
    tokenizer: Tokenizer | None
    data: DataConfig | None
    context: int | None


def load_scored(paths: Sequence[str], device: torch.device) -> dict[str, Scored]:
    """Loads models by label: each a run's folder, a checkpoint, or a folder of transformers with its tokenizer.json.

    Raises as `sympow.training.load`, and ValueError for models of different tokenizers.
    """
    models = {label: _load(path, device) for label, path in zip(labels_of(paths), paths, strict=True)}
    check_tokenizers({label: each.tokenizer for label, each in models.items()})
    return models


def _load(path: str, device: torch.device) -> Scored:
    if _is_of_transformers(Path(path)):
        from sympow.integrations.transformers.scoring import load_causal_lm

        loaded = load_causal_lm(path, device)
        return Scored(loaded, loaded.vocab_size, saved_tokenizer(Path(path)), None, loaded.longest)
    run = load(path, device)
    return Scored(run.model, run.config.model.vocab_size, run.tokenizer, run.config.data, run.config.training.context)


def _is_of_transformers(folder: Path) -> bool:
    """Returns whether a folder holds a model as `save_pretrained` writes it. Run folders have a config.json too."""
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
