"""Loss on AR hits, the tokens of real text that can be recalled from the context, and on other tokens.

The bigram of a token is the token before it and the token itself. A token is a repeat if its bigram occurred earlier in
the same sequence. A repeat is an AR hit if its bigram is rare in the training data, so that the weights alone cannot
predict it. Source: Zoology (Arora et al., 2023, arXiv 2312.04927), section 3.2, where a rare bigram occurs at most
1,250 times in the training data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sympow.evaluation.bigrams import BigramCounts
from sympow.evaluation.context_loss import Documents, choose_rows, score_rows
from sympow.layers.repeats import distance_to_previous

FREQUENT = 1250  # a bigram with more occurrences in the training data is no AR hit
# Slices of all tokens. Each token is in exactly one of "hits", "frequent" and "new"; "other" is "frequent" and "new".
SLICES = ("all", "hits", "other", "frequent", "new")
PARTS = ("hits", "frequent", "new")


class Cell(NamedTuple):
    """Holds the number and mean loss of the tokens whose count, distance or document is start..end-1.

    The loss is in nats, NaN for no tokens.
    """

    start: int
    end: int
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """Returns exp of the mean loss."""
        return math.exp(self.loss)

    @property
    def middle(self) -> float:
        """Returns the geometric middle of its counts or distances."""
        return math.sqrt(self.start * (self.end - 1))


@dataclass(frozen=True)
class HitLosses:
    """Holds losses of one model, summed over tokens in the same bins of distance and count of their bigrams.

    Attributes:
        context: the number of predictions in a sequence.
        rows: the number of sequences that were read.
        documents: int64 [N], the indices of the documents of these sequences, ascending.
        count_edges: int64 [C + 1]; count bin c contains bigrams with count_edges[c] to count_edges[c + 1] - 1
            occurrences in the training data.
        frequent: the count above which a bigram is no AR hit; an edge of the bins.
        tokens: int64 [N, D, C], the number of tokens. Distance bin 0 contains bigrams that are new in their sequence,
            bin b those that occurred last 2**(b - 1) to 2**b - 1 tokens before.
        losses: float64 [N, D, C], the sums of losses in nats.
    """

    context: int
    rows: int
    documents: np.ndarray
    count_edges: np.ndarray
    frequent: int
    tokens: np.ndarray
    losses: np.ndarray

    def by_document(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens and the summed losses of a slice, one of SLICES, in every document: [N] each."""
        where = self._where(name)
        return self.tokens[:, where].sum(axis=1), self.losses[:, where].sum(axis=1)

    def document_cells(self, name: str) -> list[Cell]:
        """Returns a cell of a slice for every document; the cell starts at the document's index."""
        parts = zip(self.documents.tolist(), *self.by_document(name), strict=True)
        return [_cell(document, document + 1, tokens, losses) for document, tokens, losses in parts]

    def slice(self, name: str) -> Cell:
        """Returns a slice, one of SLICES, as a cell of all counts."""
        tokens, losses = (values.sum() for values in self.by_document(name))
        return _cell(0, int(self.count_edges[-1]), tokens, losses)

    def by_count(self, repeated: bool) -> list[Cell]:
        """Returns the losses of repeats, or of all other tokens, by the count of their bigrams in training."""
        some = np.s_[:, 1:] if repeated else np.s_[:, :1]
        tokens, losses = (values[some].sum(axis=(0, 1)) for values in (self.tokens, self.losses))
        edges = self.count_edges.tolist()
        return [_cell(*each) for each in zip(edges[:-1], edges[1:], tokens, losses, strict=True)]

    def by_distance(self) -> list[Cell]:
        """Returns the losses of AR hits by the number of tokens since the last occurrence of their bigram."""
        rare = self._where("hits")
        tokens = np.where(rare, self.tokens, 0).sum(axis=(0, 2))
        losses = np.where(rare, self.losses, 0).sum(axis=(0, 2))
        return [_cell(1 << b >> 1, 1 << b, tokens[b], losses[b]) for b in range(1, len(tokens))]

    def distance_rates(self) -> list[float]:
        """Returns the number of AR hits per token and distance, for every cell of `by_distance`.

        The number of hits is divided by the number of tokens that have so many tokens before them, because long
        distances are rare in a short sequence.
        """
        rates = []
        for cell in self.by_distance():
            last = min(cell.end, self.context) - 1
            pairs = self.rows * sum(self.context - distance for distance in (cell.start, last)) / 2
            pairs *= last - cell.start + 1
            rates.append(cell.tokens / pairs if pairs > 0 else math.nan)
        return rates

    def distance_law(self) -> tuple[float, float]:
        """Returns c and a of the power law rate = c * distance**-a that fits `distance_rates` best.

        Distances are weighted by tokens. Both are NaN where AR hits have fewer than two distances.
        """
        found = [
            (cell.middle, rate, cell.tokens)
            for cell, rate in zip(self.by_distance(), self.distance_rates(), strict=True)
            if cell.tokens
        ]
        if len(found) < 2:
            return math.nan, math.nan
        distances, rates, tokens = map(np.array, zip(*found, strict=True))
        slope, level = np.polyfit(np.log(distances), np.log(rates), 1, w=np.sqrt(tokens))
        return math.exp(level), -float(slope)

    def _where(self, name: str) -> np.ndarray:
        """Returns the cells of a slice, bool [D, C]."""
        if name not in SLICES:
            raise ValueError(f"a slice is one of {', '.join(SLICES)}; got {name!r}")
        repeated = (np.arange(self.tokens.shape[1]) > 0)[:, None]
        rare = self.count_edges[:-1] <= self.frequent
        hits = repeated & rare
        return {
            "all": hits | True,
            "hits": hits,
            "other": ~hits,
            "frequent": repeated & ~rare,
            "new": ~repeated & (rare | True),
        }[name]


class Share(NamedTuple):
    """Tells how much a slice contributes to the gap between two models, with the ends of 95% intervals.

    nats: the contribution of the slice to the difference of mean losses. share: this contribution divided by the whole
    difference.
    """

    nats: float
    nats_low: float
    nats_high: float
    share: float
    share_low: float
    share_high: float


def bigram_distances(tokens: np.ndarray) -> np.ndarray:
    """Returns the distance from each token of `tokens` [B, T + 1] to the last occurrence of its bigram, int64 [B, T].

    The first token has no bigram. A distance of 0 means that the bigram is new in its sequence.
    """
    rows = torch.from_numpy(np.asarray(tokens, np.int64))
    return distance_to_previous(rows[:, :-1] * (int(tokens.max(initial=0)) + 1) + rows[:, 1:]).numpy()


def hit_losses(
    model: Any,
    corpus: Documents,
    counts: BigramCounts,
    context: int,
    rows: int = 16,
    *,
    frequent: int = FREQUENT,
    seed: int = 0,
    progress: str | None = None,
) -> HitLosses:
    """Measures a model's losses on held-out rows by the distance and the count of the bigram of every token.

    Args:
        model: a module with `token_losses(tokens, targets)`.
        corpus: the held-out documents.
        context: the number of predicted tokens in a sequence.
        rows: the number of sequences to read. They are the sequences that `context_losses` reads.
        seed: the seed that chooses the sequences, as for `context_losses`.
        progress: the name of the task in the progress on stderr; None: no progress.
        counts: the counts of bigrams in the training documents, from `count_bigrams`.
        frequent: the largest count of an AR hit's bigram in the training data.

    Memory grows with the number of documents that are read, by about 8 KB each, not with the number of tokens.

    Raises ValueError if no document is long enough, and for a `frequent` below 0.
    """
    if frequent < 0:
        raise ValueError(f"frequent must be at least 0, got {frequent}")
    chosen = choose_rows(corpus, context, rows, seed)
    documents = np.unique(chosen[:, 0])
    edges = np.array(sorted({0, frequent + 1, *(1 << k for k in range(48))}), np.int64)
    shape = (len(documents), (context - 1).bit_length() + 1, len(edges) - 1)
    tokens, losses = np.zeros(math.prod(shape), np.int64), np.zeros(math.prod(shape))
    for scored in score_rows(model, corpus, chosen, context, progress=progress):
        distance = bigram_distances(scored.tokens)
        count = counts.lookup(scored.tokens[:, :-1], scored.tokens[:, 1:])
        cells = np.searchsorted(documents, scored.rows[:, :1]) * shape[1] + _bit_lengths(distance)
        cells = (cells * shape[2] + np.searchsorted(edges, count, side="right") - 1).ravel()
        tokens += np.bincount(cells, minlength=len(tokens))
        losses += np.bincount(cells, weights=scored.losses.ravel(), minlength=len(losses))
    return HitLosses(context, len(chosen), documents, edges, frequent, tokens.reshape(shape), losses.reshape(shape))


def gap_shares(ours: HitLosses, base: HitLosses, *, draws: int = 2000, seed: int = 0) -> dict[str, Share]:
    """Returns the contribution of every slice to the gap between two models: losses of `ours` minus those of `base`.

    Intervals come from a bootstrap over documents, because windows of one document are not independent.

    Raises ValueError for models that were measured on different sequences or slices.
    """
    same = ours.frequent == base.frequent and ours.tokens.shape == base.tokens.shape
    if not same or not (np.array_equal(ours.tokens, base.tokens) and np.array_equal(ours.documents, base.documents)):
        raise ValueError("the gap of two models is that on the same rows and bigram counts; these have others")
    parts = [(*ours.by_document(name), base.by_document(name)[1]) for name in SLICES]
    tokens, mine, theirs = (np.stack(column, axis=-1)[None] for column in zip(*parts, strict=True))
    return dict(zip(SLICES, bootstrap_shares(tokens, mine - theirs, draws=draws, seed=seed), strict=True))


def bootstrap_shares(
    tokens: np.ndarray, differences: np.ndarray, *, draws: int = 2000, seed: int = 0
) -> Sequence[Share]:
    """Returns the shares of slices in a gap. The first slice must contain all tokens.

    Args:
        tokens: [R, N, S], the number of tokens for every training seed, document and slice.
        differences: [R, N, S], the summed losses of one model minus those of another.
        draws: the number of bootstrap draws. Each draws R seeds and N documents with replacement.
        seed: the seed of the draws.
    """
    seeds, documents = differences.shape[:2]
    rng = np.random.default_rng(seed)
    drawn_seeds = rng.multinomial(seeds, [1 / seeds] * seeds, draws).astype(float)
    drawn_documents = rng.multinomial(documents, [1 / documents] * documents, draws).astype(float)

    def summed(by_seed: np.ndarray, by_document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        whole = np.einsum("br,bn,rn->b", by_seed, by_document, tokens[..., 0])[:, None]
        nats = np.einsum("br,bn,rns->bs", by_seed, by_document, differences) / whole
        with np.errstate(divide="ignore", invalid="ignore"):
            return nats, nats / nats[:, :1]

    nats, share = (values[0] for values in summed(np.ones((1, seeds)), np.ones((1, documents))))
    bounds = [np.quantile(values, (0.025, 0.975), axis=0) for values in summed(drawn_seeds, drawn_documents)]
    columns = np.stack([nats, *bounds[0], share, *bounds[1]], axis=1)
    return [Share(*row) for row in columns.tolist()]


def published_share(hits: float, whole: float) -> float:
    """Returns the share of AR hits in a gap by the rule of the source. Both arguments are gaps in nats.

    The share is at most 1. It is 1 if a model is better on all tokens together but not on the hits. It is NaN if the
    model is worse on neither.
    """
    if whole <= 0:
        return 1.0 if hits > 0 else math.nan
    return min(1.0, hits / whole)


def _bit_lengths(values: np.ndarray) -> np.ndarray:
    """Returns the bit length of integers from 0 to 2**52: 0, 1, 2, 2, 3, ..."""
    return np.frexp(values.astype(np.float64))[1]


def _cell(start: int, end: int, tokens: int, losses: float) -> Cell:
    return Cell(start, end, int(tokens), float(losses) / int(tokens) if tokens else math.nan)
