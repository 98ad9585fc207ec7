"""The documents of all runs, in memory, and the batches of one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.context_scaling.grid import Run, Scale
from sympow.data import Corpus, DataConfig, Subset, TokenCorpus, open_corpus

HELD_OUT = 16  # documents that losses are measured on: a million tokens


class Documents(NamedTuple):
    """Holds the training documents and the held-out documents."""

    train: TokenCorpus
    held_out: TokenCorpus


def read_documents(scale: Scale, corpus: Path) -> Documents:
    """Reads the corpus of a scale whole."""
    return read_data(Run("softmax", 65_536).config(scale, corpus).data)


def read_data(data: DataConfig, rows: int | None = None) -> Documents:
    """Reads a corpus into memory, with `rows` training documents, evenly spaced; short rows of compressed chunks would
    be too slow to read."""
    splits = open_corpus(data)
    return Documents(_spaced(splits.train, rows or len(splits.train)), _spaced(splits.held_out, HELD_OUT))


def name_of(corpus: Corpus) -> str:
    """Returns what tables call the corpus of a run: its number of documents and the begin of its fingerprint."""
    return f"{len(corpus)} rows, {corpus.fingerprint[:12]}"


def _spaced(corpus: Corpus, count: int) -> TokenCorpus:
    """Returns `count` evenly spaced documents, or all where there are not so many, by the same fingerprint."""
    if count < len(corpus):
        corpus = Subset(corpus, np.linspace(0, len(corpus) - 1, count).astype(np.int64))
    texts = [corpus[i] for i in range(len(corpus))]
    offsets = np.cumsum([0, *(len(text) for text in texts)], dtype=np.int64)
    return TokenCorpus(np.concatenate(texts), offsets, corpus.vocab_size, corpus.fingerprint)
