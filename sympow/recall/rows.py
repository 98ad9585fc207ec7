"""Rows of recall on the device, and how a model answers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.data.mqar import mixture
from sympow.models import RecallModel
from sympow.ops.memory import check_memory
from sympow.recall.config import AnyTask, RecallConfig
from sympow.training.devices import autocast
from sympow.training.loop import shows_divergence

TRAIN, VALIDATION, TEST = 0, 1, 2  # streams of the data seed
_TOKEN_BYTES = 4
_LOGIT_ELEMENTS = 1 << 25  # formed at once where accuracy is measured


class Part(NamedTuple):
    """Holds the rows of one task on the device, int32: tokens [n, N], places and labels of their queries [n, D]."""

    tokens: Tensor
    places: Tensor
    labels: Tensor

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Selects the rows at index [B], as int64."""
        tokens, places, labels = (tensor.index_select(0, index).long() for tensor in self)
        return tokens, places, labels


@lru_cache(maxsize=9)  # so that the runs of a sweep share what three tasks need
def load(tasks: tuple[AnyTask, ...], examples: int, seed: tuple[int, ...], device: str) -> list[Part]:
    """Draws `examples` rows of the tasks together and puts them on the device: one part for each task.

    Raises ValueError for rows that are larger than the free memory of the machine.
    """
    parts, length = [], sum(task.length for task in tasks) // len(tasks)
    check_memory(f"data of {examples:,} examples with a length of {length:,}", _TOKEN_BYTES * examples * length)
    for drawn in mixture(tasks, examples, seed):
        places, labels = drawn.queries()
        tensors = (torch.from_numpy(array.astype("int32", copy=False)) for array in (drawn.tokens, places, labels))
        parts.append(Part(*(tensor.to(device) for tensor in tensors)))
    return parts


class RecallScore(NamedTuple):
    """Holds a mean loss in nats and the share of queries answered right."""

    loss: float
    accuracy: float


def measure(model: RecallModel, parts: Sequence[Part], config: RecallConfig) -> RecallScore:
    """Measures the mean loss in nats and the share of queries answered right, over all queries of all parts.

    A model that has diverged may refuse its own numbers. Then the loss is NaN, and no query is answered right.
    """
    try:
        return _measured(model, parts, config)
    except Exception as error:
        if not shows_divergence(error):
            raise
        return RecallScore(math.nan, 0.0)


@torch.no_grad()
def _measured(model: RecallModel, parts: Sequence[Part], config: RecallConfig) -> RecallScore:
    model.eval()
    device = parts[0].tokens.device
    loss, right, asked = torch.zeros((), device=device), torch.zeros((), device=device), 0
    for part in parts:
        pairs = part.labels.shape[1]
        rows = max(1, _LOGIT_ELEMENTS // (pairs * model.config.vocab_size))
        for index in torch.arange(len(part.tokens), device=device).split(rows):
            tokens, places, labels = part.rows(index)
            with autocast(config.precision, device):
                logits = model.query_logits(tokens, places).float().flatten(0, 1)
            loss += F.cross_entropy(logits, labels.flatten(), reduction="sum")
            right += (logits.argmax(1) == labels.flatten()).sum()
        asked += part.labels.numel()
    return RecallScore(loss.item() / asked, right.item() / asked)
