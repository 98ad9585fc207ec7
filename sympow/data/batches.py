"""Batches of rows of tokens from documents. They are deterministic, endless, and have random access.

A document of n tokens has n - 1 predictions: of every token except the first, from the tokens before it. The document
is cut into pieces of `context` predictions. Each piece starts with the last token of the piece before it, so that every
token is predicted once. A last piece that lacks only one prediction counts as a piece, and its last token has no
target. Therefore documents of exactly `context` tokens, as in LongCrawl64, make full rows. A shorter rest, 1 to
context - 2 predictions, is the document's tail.

A batch is of one of two kinds:
- full: B pieces, tokens [B, T], cu_seqlens None. The target is -100 where a document ends at the end of its row.
- packed: tails are joined to rows of T, and B rows to tokens [1, B T], with bounds of all tails in cu_seqlens. Only
  packed rows are padded, at their end. The padding is a sequence of its own, and its targets are -100.
Each kind has its own order of rows, which is shuffled again in every epoch. Packed batches are distributed evenly among
full ones, in the proportion of the rows. A batch may contain rows of two epochs, and no row is left out: `Batches.rows`
batches, which are B epochs, predict every target exactly B times.

Of a `Mixture`, every corpus has its own rows and its own epochs. The rows of a batch come from the corpora in turn, so
that the predictions are in the proportions of the weights, in every stretch of batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from sympow.data.corpus import Corpus, Mixture

IGNORED = -100  # the target of padding, as in torch's cross_entropy

_FULL, _PACKED = 0, 1  # streams of the random order
_ROUNDS = 6


class Batch(NamedTuple):
    """Holds tokens and their successors.

    Both are int64 [B, T], or [1, B T] with cu_seqlens int32 [N + 1]. A target of -100 means that there is no target.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor | None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Returns the batch on a device."""
        tokens, targets = (t.to(device, non_blocking=non_blocking) for t in self[:2])
        borders = self.cu_seqlens
        return Batch(tokens, targets, None if borders is None else borders.to(device, non_blocking=non_blocking))


class Batches:
    """Gives batches by index: `batches[i]` is batch i, for every i >= 0.

    A batch depends on the corpus, the arguments and i only. Therefore the position of a run is one integer,
    micro-batches are consecutive indices, and rank r of R takes the indices i R + r. Access takes the same time for
    every i.

    Args:
        corpus: the documents, or a `Mixture`.
        context: T, the number of predictions in a row.
        batch_size: B, the number of rows in a batch.
        seed: the seed of the order, at least 0.
        pack: whether there are packed batches. If not, all batches are full and tails are left out.

    Attributes:
        rows: the number of rows in an epoch; an epoch is rows / batch_size batches. Of a mixture, the rows of all
            corpora together.
        targets: the number of predictions in these rows.

    Raises ValueError for arguments out of range, or if a corpus has no row.
    """

    def __init__(self, corpus: Corpus, context: int, batch_size: int, seed: int = 0, pack: bool = True):
        for name, value, least in (("context", context, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.corpus, self.context, self.batch_size = corpus, context, batch_size
        self.seed, self.pack = seed, pack
        corpora, weights = (corpus.corpora, corpus.weights) if isinstance(corpus, Mixture) else ((corpus,), (1.0,))
        self._sources = [_Rows(each, context, pack) for each in corpora]
        self.rows = sum(source.rows for source in self._sources)
        self.targets = sum(source.targets for source in self._sources)
        # A source gives rows at a rate that makes its predictions a share of `weight`, packed ones in their proportion.
        rates = [
            Fraction(weight) * source.rows / source.targets
            for weight, source in zip(weights, self._sources, strict=True)
        ]
        self._rates = [
            [rate * source.counts[stream] / source.rows for rate, source in zip(rates, self._sources, strict=True)]
            for stream in (_FULL, _PACKED)
        ]
        self._packed_share = sum(self._rates[_PACKED], Fraction(0)) / sum(rates, Fraction(0))

    def __getitem__(self, index: int) -> Batch:
        if index < 0:
            raise IndexError(f"batches are numbered from 0, got {index}")
        # Of the first i batches, i * share are packed: spread evenly.
        packed_before = int(index * self._packed_share)
        if int((index + 1) * self._packed_share) > packed_before:
            return self._packed_batch(self._order(_PACKED, packed_before))
        return self._full_batch(self._order(_FULL, index - packed_before))

    def state(self) -> dict[str, Any]:
        """Returns JSON values for a checkpoint that determine the batches, except for the index."""
        return {
            "corpus": self.corpus.fingerprint,
            "context": self.context,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "pack": self.pack,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError, which names the differences, unless `state` comes from batches equal to these."""
        now = self.state()
        changed = [
            f"{name} was {state.get(name)} and is {now.get(name)}"
            for name in now | state
            if name not in now or name not in state or state[name] != now[name]
        ]
        if changed:
            raise ValueError(f"the data are not those of the checkpoint: {'; '.join(changed)}")

    def _order(self, stream: int, batch: int) -> list[tuple[int, int]]:
        """Returns the rows of batch `batch` of a stream, as pairs of a source and its row.

        Every source repeats all its rows, shuffled anew each time.
        """
        sources, places = _take_turns(batch * self.batch_size, self.batch_size, self._rates[stream])
        rows = np.empty(self.batch_size, dtype=np.int64)
        for number in np.unique(sources):
            count = self._sources[number].counts[stream]
            for epoch in np.unique(places[sources == number] // count):
                here = (sources == number) & (places // count == epoch)
                key = (self.seed, stream, int(epoch), *([int(number)] if number else []))
                rows[here] = shuffled(places[here] - epoch * count, count, key)
        return list(zip(sources.tolist(), rows.tolist(), strict=True))

    def _full_batch(self, rows: list[tuple[int, int]]) -> Batch:
        pieces = np.full((len(rows), self.context + 1), IGNORED, dtype=np.int64)
        for piece, (source, row) in zip(pieces, rows, strict=True):
            tokens = self._sources[source].piece(row)
            piece[: len(tokens)] = tokens
        data = torch.from_numpy(pieces)
        return Batch(data[:, :-1].contiguous(), data[:, 1:].contiguous(), None)

    def _packed_batch(self, rows: list[tuple[int, int]]) -> Batch:
        tokens = np.zeros((1, self.batch_size * self.context), dtype=np.int64)
        targets = np.full_like(tokens, IGNORED)
        borders = [0]
        for number, (source, row) in enumerate(rows):
            for tail in self._sources[source].tails(row):
                here = slice(borders[-1], borders[-1] + len(tail) - 1)
                tokens[0, here], targets[0, here] = tail[:-1], tail[1:]
                borders.append(here.stop)
            row_end = (number + 1) * self.context
            if borders[-1] < row_end:
                borders.append(row_end)
        cu_seqlens = torch.tensor(borders, dtype=torch.int32)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), cu_seqlens)


class _Rows:
    """Holds the rows of one corpus.

    Attributes:
        counts: the numbers of full and of packed rows.
        rows: their sum.
        targets: the number of predictions in all rows.
    """

    def __init__(self, corpus: Corpus, context: int, pack: bool):
        self._corpus, self._context = corpus, context
        predictions = np.maximum(corpus.lengths - 1, 0)
        pieces = (predictions + (context > 1)) // context  # a row of one token would have no target at all
        self._piece_ends = np.cumsum(pieces)  # rows of documents 0..i, for finding a row's document
        packed_rows = 0
        self.targets = int(np.minimum(pieces * context, predictions).sum())
        if pack:
            tails = np.maximum(predictions - pieces * context, 0)
            with_tail = np.flatnonzero(tails)
            order, self._tail_starts = pack_lengths(tails[with_tail], context)
            self._tails = with_tail[order]  # documents; packed row r takes those from _tail_starts[r] on
            packed_rows = len(self._tail_starts) - 1
            self.targets += int(tails.sum())
        self.counts = (int(self._piece_ends[-1]), packed_rows)
        self.rows = sum(self.counts)
        if not self.rows and pack:
            raise ValueError("the corpus has nothing to predict: no document holds 2 tokens")
        if not self.rows:
            raise ValueError(
                f"no document fills a row of context = {context} tokens, the longest has {corpus.lengths.max()}: "
                "use a shorter context, or packing (data.pack=true)"
            )

    def piece(self, row: int) -> np.ndarray:
        """Returns the tokens of a full row and their last target, if there is one."""
        document = int(np.searchsorted(self._piece_ends, row, side="right"))
        first_row = int(self._piece_ends[document - 1]) if document else 0
        start = (row - first_row) * self._context
        return self._corpus[document][start : start + self._context + 1]

    def tails(self, row: int) -> Iterator[np.ndarray]:
        """Yields the tails in a packed row, each with its last target."""
        for document in self._tails[self._tail_starts[row] : self._tail_starts[row + 1]]:
            whole = self._corpus[int(document)]
            yield whole[(len(whole) - 1) // self._context * self._context :]


def _take_turns(first: int, count: int, rates: list[Fraction]) -> tuple[np.ndarray, np.ndarray]:
    """Shares numbers among sources in proportion to their rates, spread evenly.

    Returns for the numbers from `first` to `first + count - 1` the source, and how many earlier numbers it has, int64
    [count] both. The first source takes its share of all numbers, the second its share of the others, and so on.
    """
    numbers = [first + i for i in range(count)]
    sources, open_to = np.empty(count, dtype=np.int64), np.arange(count)
    places = np.empty(count, dtype=np.int64)
    rest = sum(rates, Fraction(0))
    for source, rate in enumerate(rates):
        share = rate / rest if rest else Fraction(0)
        taken = [int((n + 1) * share) > int(n * share) for n in numbers]
        chosen = open_to[taken]
        sources[chosen] = source
        places[chosen] = [int(n * share) for n, own in zip(numbers, taken, strict=True) if own]
        numbers = [n - int(n * share) for n, own in zip(numbers, taken, strict=True) if not own]
        open_to = open_to[np.logical_not(taken)]
        rest -= rate
    return sources, places


def pack_lengths(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs lengths of 1..capacity into rows of at most `capacity` in sum, by first-fit decreasing.

    Returns (order, starts), int64: row r contains the items `order[starts[r]:starts[r + 1]]`. Repeatedly adding the
    largest item that still fits into a row is first-fit decreasing. Rows with the same lengths are made at once, so the
    time depends on the number of different lengths, not on the number of items.
    """
    by_length = np.argsort(lengths, kind="stable")
    sizes, first, counts = np.unique(lengths[by_length], return_index=True, return_counts=True)
    available = sizes.tolist()
    left = dict(zip(available, counts.tolist(), strict=True))
    # by_length[taken[s]] is the next item of size s
    taken = dict(zip(available, first.tolist(), strict=True))
    blocks, widths, repeats = [], [], []
    while available:
        row: dict[int, int] = {}
        room, position = capacity, len(available)
        while (position := bisect_right(available, room, hi=position) - 1) >= 0:
            size = available[position]
            row[size] = min(left[size], room // size)
            room -= row[size] * size
        times = min(left[size] // number for size, number in row.items())
        columns = []
        for size, number in row.items():
            items = by_length[taken[size] : taken[size] + times * number]
            columns.append(items.reshape(times, number))
            taken[size] += times * number
            left[size] -= times * number
            if not left[size]:
                available.remove(size)
        blocks.append(np.concatenate(columns, axis=1).ravel())
        widths.append(sum(row.values()))
        repeats.append(times)
    starts = np.concatenate([[0], np.cumsum(np.repeat(widths, repeats))]).astype(np.int64)
    return np.concatenate([np.empty(0, np.int64), *blocks]), starts


def shuffled(positions: np.ndarray, length: int, key: tuple[int, ...]) -> np.ndarray:
    """Permutes positions in 0..length-1 with a permutation that depends on the key; returns int64.

    A Feistel network over the next power of 4 is applied repeatedly until the result is below `length` (Black and
    Rogaway, 2002). This needs no table. A table for an epoch of LongCrawl64 would have gigabytes.
    """
    half = max(2, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    values = np.asarray(positions).astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= length
    return values.astype(np.int64)


@lru_cache(maxsize=64)
def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    return np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = right ^ key  # then the finalizer of SplitMix64, which wraps around 2**64 by design
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << shift) | right
