"""Counts every pair of neighbouring tokens in a corpus, which is read as a stream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sympow.evaluation.context_loss import Documents
from sympow.progress import Progress

BLOCK = 1 << 22  # bigrams that are sorted at once


class BigramCounts:
    """Holds counts of bigrams, as `count_bigrams` returns them.

    Args:
        keys: the bigrams that occur, as first * vocab_size + second, 1-D, ascending.
        counts: the number of occurrences of each bigram in `keys`, 1-D.
        vocab_size: the size of the vocabulary; every token is below it.
        tokens: the number of tokens that were read.
    """

    def __init__(self, keys: np.ndarray, counts: np.ndarray, vocab_size: int, tokens: int):
        self.keys, self.counts = keys, counts
        self.vocab_size, self.tokens = vocab_size, tokens

    def lookup(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns how often `second` followed `first`, int64, of their shape; both hold tokens.

        Raises ValueError for tokens outside of the vocabulary.
        """
        for tokens in (first, second):
            if np.size(tokens) and not (np.min(tokens) >= 0 and np.max(tokens) < self.vocab_size):
                raise ValueError(f"the bigrams are of a vocabulary of {self.vocab_size} tokens; got tokens from "
                                 f"{np.min(tokens)} to {np.max(tokens)}")  # fmt: skip
        if not len(self.keys):
            return np.zeros(np.shape(first), np.int64)
        wanted = _keys(first, second, self.vocab_size, self.keys.dtype)
        place = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
        return np.where(self.keys[place] == wanted, self.counts[place], 0)


def count_bigrams(
    corpus: Documents, vocab_size: int, *, tokens: int | None = None, progress: str | None = None
) -> BigramCounts:
    """Counts the bigrams within the documents of a corpus; none reaches from one document into the next.

    Memory grows with the number of different bigrams, not with the length of the corpus.

    Args:
        corpus: documents, a `sympow.data` corpus.
        vocab_size: every token is below it.
        tokens: about how many tokens to read, in evenly spaced documents; None: all.
        progress: the name of the task in the progress on stderr, as for `context_losses`.

    Raises ValueError for a vocabulary that is too small for a token, or too large for bigrams in 64 bits.
    """
    if not 1 <= vocab_size < 1 << 31:
        raise ValueError(f"vocab_size must be from 1 to 2**31 - 1, got {vocab_size}")
    dtype = np.dtype(np.uint32 if vocab_size <= 1 << 16 else np.int64)
    chosen = _spaced(corpus, tokens)
    read = 0
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    with Progress(progress or "", "document", total=len(chosen), quiet=progress is None) as bar:
        for block, documents, length in _blocks(corpus, chosen, vocab_size, dtype):
            read += length
            parts.append(_counted(np.sort(block)))
            while len(parts) > 1 and len(parts[-2][0]) <= 2 * len(parts[-1][0]):  # so each key is merged rarely
                parts.append(_merged(parts.pop(), parts.pop()))
            bar.advance(documents)
    while len(parts) > 1:
        parts.append(_merged(parts.pop(), parts.pop()))
    keys, counts = parts[0] if parts else (np.empty(0, dtype), np.empty(0, np.int64))
    return BigramCounts(keys, counts, vocab_size, read)


def _spaced(corpus: Documents, tokens: int | None) -> np.ndarray:
    """Returns documents that hold about this many tokens, evenly spaced among all."""
    lengths = np.asarray(corpus.lengths)
    total = int(lengths.sum())
    if tokens is None or tokens >= total:
        return np.arange(len(lengths))
    if tokens < 1:
        raise ValueError(f"tokens to count bigrams in must be at least 1, got {tokens}")
    return np.linspace(0, len(lengths) - 1, max(1, len(lengths) * tokens // total)).astype(np.int64)


def _blocks(
    corpus: Documents, chosen: np.ndarray, vocab_size: int, dtype: np.dtype
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yields bigrams of several documents or of a part of one, the number of documents that ended, and of tokens."""
    held: list[np.ndarray] = []
    size, documents, length = 0, 0, 0
    for index in chosen:
        text = corpus[int(index)]
        if len(text) and not 0 <= int(text.min()) <= int(text.max()) < vocab_size:
            raise ValueError(f"document {index} holds tokens {text.min()} to {text.max()}, of {vocab_size}")
        for start in range(0, len(text), BLOCK):
            part = text[start : start + BLOCK + 1]
            held.append(_keys(part[:-1], part[1:], vocab_size, dtype))
            size += len(held[-1])
            if size >= BLOCK:
                yield np.concatenate(held), documents, length
                held, size, documents, length = [], 0, 0, 0
        documents, length = documents + 1, length + len(text)
    yield np.concatenate([np.empty(0, dtype), *held]), documents, length


def _keys(first: np.ndarray, second: np.ndarray, vocab_size: int, dtype: np.dtype) -> np.ndarray:
    return np.asarray(first).astype(dtype) * dtype.type(vocab_size) + np.asarray(second).astype(dtype)


def _counted(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct values of an ascending array, and how often each occurs."""
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)])
    return ordered[starts], np.diff(np.append(starts, len(ordered)))


def _merged(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    keys, counts = np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
    return keys[starts], np.add.reduceat(counts, starts) if len(starts) else counts
