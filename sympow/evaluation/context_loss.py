"""Held-out loss by context position: the in-context-learning curve, and the best-context loss.

The mean loss of a model that uses its context falls with the position. Positions are put into bins whose widths double,
because the loss is nearly a linear function of the logarithm of the position.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sympow.files import naming
from sympow.progress import Progress

LEAST_POSITIONS = 64  # the smallest width of a bin for the best-context loss
BATCH_TOKENS = 1 << 15  # tokens in a forward pass, at least one row
COLUMNS = ("run", "bin_start", "bin_end", "loss", "stderr", "tokens", "train_context")  # of `write_csv`


class Documents(Protocol):
    """Gives documents as 1-D integer arrays, and their lengths. Evaluations need no more of a corpus."""

    @property
    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each document, integers, 1-D."""
        ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


class Bin(NamedTuple):
    """Holds the mean loss at positions start..end-1, of which position t is predicted from t + 1 tokens.

    loss: the mean in nats; stderr: the standard error of the mean over the rows, NaN for a single row; tokens: the
    number of targets in the bin.
    """

    start: int
    end: int
    loss: float
    stderr: float
    tokens: int


@dataclass(frozen=True)
class ContextLosses:
    """Holds losses of one model on rows of `context` predictions.

    position_losses: mean over the rows of the loss at every position, nats, float64 [context].
    row_losses: mean of every row in every bin, nats, float64 [rows, bins].
    """

    position_losses: np.ndarray
    row_losses: np.ndarray

    @property
    def context(self) -> int:
        """Returns the predictions in a row."""
        return len(self.position_losses)

    @property
    def rows(self) -> int:
        """Returns the number of rows."""
        return len(self.row_losses)

    @property
    def tokens(self) -> int:
        """Returns the number of targets predicted."""
        return self.rows * self.context

    @property
    def loss(self) -> float:
        """Returns the mean over all positions, in nats."""
        return float(self.position_losses.mean())

    @property
    def bins(self) -> list[Bin]:
        """Returns the curve as bins of positions in ascending order.

        The standard error treats rows as independent, although windows of one document are not exactly independent.
        """
        means = self.row_losses.mean(axis=0)
        errors = np.full(len(means), np.nan)
        if self.rows > 1:
            errors = self.row_losses.std(axis=0, ddof=1) / self.rows**0.5
        edges = bin_edges(self.context)
        return [
            Bin(start, end, float(mean), float(error), self.rows * (end - start))
            for start, end, mean, error in zip(edges[:-1], edges[1:], means, errors, strict=True)
        ]

    @property
    def best(self) -> Bin:
        """Returns the bin with the lowest loss, which is called the best-context loss.

        The best-context loss shows how well the model predicts with the context length that suits it best, for any
        context that it was trained or evaluated on [Buckman & Gelada, Compute-Optimal Context Size, 2024].

        Bins of fewer than LEAST_POSITIONS positions are left out, unless the context is too short for larger bins.
        Their loss depends on how texts start, not on the use of the context.
        """
        wide = [each for each in self.bins if each.end - each.start >= LEAST_POSITIONS]
        return min(wide or self.bins, key=lambda each: each.loss)


class Curve(NamedTuple):
    """Holds a run's losses under its name, with the context it was trained on if known."""

    run: str
    losses: ContextLosses
    train_context: int | None = None


def bin_edges(context: int) -> list[int]:
    """Returns edges of the bins of positions 0..context-1: 0, 1, 2, 4, 8, ... and `context`."""
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    return [0, *(1 << k for k in range((context - 1).bit_length())), context]


def choose_rows(corpus: Documents, context: int, rows: int, seed: int = 0) -> np.ndarray:
    """Chooses the parts of a corpus to evaluate on: int64 [rows, 2], document and first token, in reading order.

    Documents of at least context + 1 tokens are cut into windows of context + 1, of which `rows` are drawn
    without replacement, or all if there are no more. The draw depends on the lengths and the arguments
    alone, so every model of one tokenizer is evaluated on the same rows.

    Raises ValueError if no document is long enough; the message names the longest document.
    """
    if context < 1 or rows < 1:
        raise ValueError(f"context and rows must be at least 1, got context={context} and rows={rows}")
    width = context + 1
    lengths = np.asarray(corpus.lengths)
    windows = lengths // width
    ends = np.cumsum(windows)
    if not len(lengths):
        raise ValueError("the corpus to evaluate on has no documents")
    if ends[-1] == 0:
        longest = int(lengths.argmax())
        raise ValueError(
            f"a context of {context:,} needs a document of {width:,} tokens; the longest is document {longest} "
            f"with {lengths[longest]:,}"
        )
    drawn = np.random.default_rng(seed).choice(ends[-1], size=min(rows, int(ends[-1])), replace=False)
    drawn.sort()
    documents = np.searchsorted(ends, drawn, side="right")
    first = drawn - (ends[documents] - windows[documents])
    return np.stack([documents, first * width], axis=1).astype(np.int64)


def context_losses(
    model: Any, corpus: Documents, context: int, rows: int = 16, *, seed: int = 0, progress: str | None = None
) -> ContextLosses:
    """Computes the losses of a model at every position of held-out rows.

    Args:
        model: a module with `token_losses(tokens, targets) -> [B, T]`, as `sympow.models.LanguageModel`. It is put in
            evaluation mode meanwhile. Rows go to the device of its parameters.
        corpus: documents, a `sympow.data` corpus.
        context: the number of predictions in a row; it may exceed the context that the model was trained on.
        rows: see `choose_rows`.
        seed: see `choose_rows`.
        progress: the name of the task in the progress on stderr, see `Progress`; None: no progress.

    Raises ValueError if no document is long enough; ImportError without tqdm if a bar is to be shown.
    """
    chosen = choose_rows(corpus, context, rows, seed)
    edges = bin_edges(context)
    widths = np.diff(edges)
    sums = np.zeros(context)
    row_losses = []
    for scored in score_rows(model, corpus, chosen, context, progress=progress):
        sums += scored.losses.sum(axis=0)
        row_losses.append(np.add.reduceat(scored.losses, edges[:-1], axis=1) / widths)
    return ContextLosses(sums / len(chosen), np.concatenate(row_losses))


class ScoredRows(NamedTuple):
    """Holds some of the rows that were chosen, and a model's losses on them.

    rows: int64 [B, 2], as for `choose_rows`; tokens: int64 [B, context + 1]; losses: nats, float64 [B, context].
    """

    rows: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray


def score_rows(
    model: Any, corpus: Documents, chosen: np.ndarray, context: int, *, progress: str | None = None
) -> Iterator[ScoredRows]:
    """Yields the losses of a model on rows, a batch of BATCH_TOKENS tokens at a time, in the order of the rows.

    Args:
        model: as for `context_losses`.
        corpus: as for `context_losses`.
        context: as for `context_losses`.
        progress: as for `context_losses`.
        chosen: what `choose_rows` gives.
    """
    device = next(model.parameters()).device
    training = model.training
    size = max(1, BATCH_TOKENS // context)
    model.eval()
    try:
        with Progress(progress or "", "row", total=len(chosen), quiet=progress is None) as bar:
            for start in range(0, len(chosen), size):
                batch = chosen[start : start + size]
                text = np.stack([corpus[int(i)][first : first + context + 1] for i, first in batch]).astype(np.int64)
                tokens = torch.from_numpy(text).to(device)
                with torch.no_grad():
                    losses = model.token_losses(tokens[:, :-1], tokens[:, 1:]).double().cpu().numpy()
                yield ScoredRows(batch, text, losses)
                bar.advance(len(batch))
    finally:
        model.train(training)


def write_csv(path: str | os.PathLike[str], curves: Iterable[Curve]) -> None:
    """Writes the curves of several runs as one table, a line for each bin.

    Columns: run, bin_start, bin_end (exclusive), loss and stderr in nats a token, tokens, train_context (empty where
    it is not known).
    """
    with naming(path), open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for run, losses, train_context in curves:
            for start, end, loss, stderr, tokens in losses.bins:
                writer.writerow([run, start, end, f"{loss:.6f}", f"{stderr:.6f}", tokens, train_context])
