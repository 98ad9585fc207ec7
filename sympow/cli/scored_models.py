"""Models that the evaluations score: runs, and folders of Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sympow.cli.run_checks import check_tokenizers, labels_of
from sympow.data import DataConfig, Tokenizer
from sympow.training import load
from sympow.training.runs import saved_tokenizer


class Scored(NamedTuple):
    """Holds a model in evaluation mode.

    Attributes:
        model: a module with `forward(tokens)`, which returns logits, and `token_losses(tokens, targets)`, for tokens
            and targets [B, T].
        vocab_size: the size of the vocabulary; every token is below it.
        tokenizer: the tokenizer; None if the tokens have no text.
        data: the data config of the run; None if it is not known.
        context: the tokens of a sequence that the model was trained on, or can read at most; None if not known.
        held_out: the fingerprint of the documents that were held out in its training; None if it is not known.
    """

    model: Any
    vocab_size: int
    tokenizer: Tokenizer | None
    data: DataConfig | None
    context: int | None
    held_out: str | None = None


def load_scored(paths: Sequence[str], device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Scored]:
    """Loads models by label, with weights in `dtype`; None: that of their files.

    A path is a run's folder, a checkpoint, or a folder of transformers with a tokenizer.json.

    Raises the errors of `sympow.training.load`, and ValueError for models with different tokenizers.
    """
    models = {label: _load(path, device, dtype) for label, path in zip(labels_of(paths), paths, strict=True)}
    check_tokenizers({label: each.tokenizer for label, each in models.items()})
    return models


def _load(path: str, device: torch.device, dtype: torch.dtype | None) -> Scored:
    if _is_of_transformers(Path(path)):
        from sympow.integrations.transformers.scoring import load_causal_lm

        loaded = load_causal_lm(path, device, dtype)
        tokenizer = saved_tokenizer(Path(path), loaded.vocab_size)
        return Scored(loaded, loaded.vocab_size, tokenizer, None, loaded.longest)
    run = load(path, device, dtype)
    return Scored(run.model, run.config.model.vocab_size, run.tokenizer, run.config.data, run.config.training.context,
                  run.held_out)  # fmt: skip


def _is_of_transformers(folder: Path) -> bool:
    """Returns whether `save_pretrained` wrote the model in a folder. Run folders contain a config.json too."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return isinstance(content, dict) and "model_type" in content
    except (OSError, ValueError, RecursionError):
        return False
