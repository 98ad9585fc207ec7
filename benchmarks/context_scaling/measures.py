"""Measures of a model: held-out loss, loss by position, gain from context, best-context loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sympow.data import Corpus, Subset, TokenCorpus
from sympow.evaluation import ContextLosses, context_losses
from sympow.models import LanguageModel
from sympow.training.devices import autocast

EARLY = (64, 128)  # positions that the gain from context starts at
BEYOND = 16  # times the context trained at, the most that a model is evaluated at
DOCUMENTS_ALONG = 4  # held-out documents that losses are measured on along a run


def measure(model: LanguageModel, held_out: Corpus, context: int, precision: str) -> ContextLosses:
    """Returns the losses on all documents, cut into rows of `context` tokens, which hold one prediction less."""
    with autocast(precision, next(model.parameters()).device):
        return context_losses(model, held_out, context - 1, rows=int(held_out.lengths.sum()))


def contexts_of(trained_at: int, longest: int) -> list[int]:
    """Returns the contexts that a finished model is evaluated at: that of the training, and far beyond."""
    return sorted({trained_at, min(BEYOND * trained_at, longest)})


def some_of(held_out: TokenCorpus) -> Subset:
    """Returns the documents that losses are measured on along a run, evenly spaced among all."""
    chosen = np.linspace(0, len(held_out) - 1, min(DOCUMENTS_ALONG, len(held_out))).astype(np.int64)
    return Subset(held_out, chosen)


def by_position(losses: ContextLosses) -> dict[str, float]:
    """Returns the mean losses of positions that double in number, by their end: "128" is of positions 64 to 127. The
    last bin, which lacks the position that has no target, is named like the others."""
    return {str(1 << (each.end - 1).bit_length()): round(each.loss, 4) for each in losses.bins}


def gain(row: Mapping[str, Any], context: int) -> float | None:
    """Returns the gain from context, in nats: the loss at positions 64 to 127 minus the loss of the last half.

    Args:
        row: a row of `by_position`.
        context: of the evaluation; None where its last half does not lie behind position 127.
    """
    if context < 4 * EARLY[0]:
        return None
    return round(row[str(EARLY[1])] - row[str(context)], 4)
