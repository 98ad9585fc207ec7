"""Associative recall of a trained language model, in tokens of its vocabulary, without training for the task."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from sympow.data.mqar import RecallTask, generate
from sympow.ops.memory import check_memory

PAIRS = (16, 32, 64, 128, 256)
LENGTH = 8  # tokens of a passage for each of its pairs
_TOKEN_BYTES = 16  # of memory for each token of the passages, at least
LOGIT_ELEMENTS = 1 << 25  # of the logits formed at once, at least those of a passage


class Score(NamedTuple):
    """Holds the mean loss in nats over `tokens` targets, and the share of targets that are the likeliest prediction.

    Both are NaN where there is no target, as the filler of passages that are full of pairs.
    """

    loss: float
    accuracy: float
    tokens: int


class Probed(NamedTuple):
    """Holds a model's scores on requested values and on filler, in passages of `pairs` pairs and `length` tokens."""

    pairs: int
    length: int
    asked: Score
    filler: Score


class Passages(NamedTuple):
    """Holds tokens, int64 [n, N], and whether the next token is a requested value, or filler: bool [n, N - 1] each."""

    tokens: np.ndarray
    asked: np.ndarray
    filler: np.ndarray


def passages(
    pairs: int, vocab_size: int, rows: int, seed: int = 0, *, length: int | None = None, filler: str = "random"
) -> Passages:
    """Draws passages of key-value pairs: random tokens of a vocabulary, which no model can have learned.

    A passage starts with its pairs, in which a value follows each key. After the pairs, every key occurs once more,
    followed by its value, at distances from the power law of `RecallTask`. The tokens between them are filler: random
    tokens that are neither keys nor values of the passage. The model has to predict the second occurrences of values.
    Zoology's appendix G has `length` 1024 and `filler` "zero".

    Args:
        pairs: the number of pairs of a passage. All keys are different, and so are all values.
        vocab_size: the size of the vocabulary from which tokens are drawn.
        rows: the number of passages.
        seed: the seed of the draw.
        length: the number of tokens of a passage; None: LENGTH for each pair.
        filler: "random", or "zero" for one token, which is the same in all passages.

    Raises ValueError if the vocabulary or the passage is too small for so many pairs, and for passages that are larger
    than the free memory.
    """
    task = RecallTask(length=length or LENGTH * pairs, pairs=pairs, vocab_size=vocab_size, filler=filler)
    check_memory(f"length = {task.length:,} with queries in {rows:,} passages", _TOKEN_BYTES * rows * task.length)
    drawn = generate(task, rows, seed)
    places, values = drawn.queries()
    tokens = drawn.tokens.copy()
    np.put_along_axis(tokens, places + 1, values, axis=1)
    asked, fill = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    np.put_along_axis(asked, places, True, axis=1)
    fill[:, task.context :] = True
    np.put_along_axis(fill, np.concatenate([places, places + 1], axis=1), False, axis=1)
    own = np.random.default_rng([seed, vocab_size]).permutation(vocab_size)  # no token is always a key
    return Passages(own[tokens], asked[:, :-1], fill[:, 1:])


def probe(
    model: Any,
    vocab_size: int,
    pairs: int,
    *,
    queries: int = 2048,
    seed: int = 0,
    length: int | None = None,
    filler: str = "random",
) -> Probed:
    """Asks a language model for values in passages of key-value pairs.

    Args:
        model: a module whose `forward` maps tokens [B, T] to logits [B, T, V], as `LanguageModel`. It is put in
            evaluation mode meanwhile.
        vocab_size: the size of its vocabulary.
        pairs: as for `passages`.
        seed: as for `passages`.
        queries: the number of values to ask for; at least one whole passage is used.
        length: as for `passages`.
        filler: as for `passages`.
    """
    tokens, asked, fill = passages(pairs, vocab_size, max(1, queries // pairs), seed, length=length, filler=filler)
    device = next(model.parameters()).device
    size = max(1, LOGIT_ELEMENTS // (tokens.shape[1] * vocab_size))
    found = []
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(tokens), size):
                batch = torch.from_numpy(tokens[start : start + size]).to(device)
                logits, targets = model(batch[:, :-1]).float(), batch[:, 1:]
                losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
                found.append(torch.stack([losses.double(), (logits.argmax(-1) == targets).double()]).cpu().numpy())
    finally:
        model.train(training)
    loss, right = np.concatenate(found, axis=1)
    asked_score, filler_score = (
        Score(float(loss[where].mean()), float(right[where].mean()), int(where.sum()))
        if where.any()
        else Score(math.nan, math.nan, 0)
        for where in (asked, fill)
    )
    return Probed(pairs, tokens.shape[1], asked_score, filler_score)


def fitting(pairs: int, vocab_size: int, *, length: int | None = None, filler: str = "random") -> bool:
    """Tells whether a vocabulary holds the keys, the values and some filler of passages of so many pairs."""
    try:
        RecallTask(length=length or LENGTH * pairs, pairs=pairs, vocab_size=vocab_size, filler=filler)
    except ValueError:
        return False
    return True
