"""Counts repeated bigrams by the source of the text (Zoology, appendix D.2, Figures 4 and 5)."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sympow.data import Tokenizer
from sympow.data.zarr_corpus import ZarrCorpus
from sympow.evaluation import HitLosses
from sympow.layers.repeats import distance_to_previous

LENGTH = 2048  # tokens of a sequence
LEAST = 10  # documents of a source; smaller sources are left out
# Words that say little about what a text is about. The source takes another list.
STOP_WORDS = """
a about after all also an and any are as at be been before being both but by can could did do does doing down each
few for from had has have having he her here him his how i if in into is it its just me more most my no nor not
now of off on once only or other our out over own same she should so some such than that the their them then there
these they this those through to too under until up us very was we were what when where which while who whom why
will with would you your
"""


def meaningful(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Returns which tokens have a letter or a digit and are no stop word, bool [vocab_size]."""
    stop = frozenset(STOP_WORDS.split())
    texts = (tokenizer.decode([token]).strip().lower() for token in range(vocab_size))
    return np.array([any(c.isalnum() for c in text) and text not in stop for text in texts])


def rows_of_sources(folder: Path) -> dict[str, np.ndarray]:
    """Returns the training rows of a corpus folder by source, the first folder of a document's directory.

    Raises FileNotFoundError for a folder without documents.jsonl.
    """
    found: dict[str, list[int]] = {}
    start = 0
    for line in (folder / "documents.jsonl").read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        if document["split"] == "train":
            rows = range(start, start := start + document["rows"])
            found.setdefault(document["directory"].split("/")[0], []).extend(rows)
    return {name: np.array(rows) for name, rows in found.items() if name and len(rows) >= LEAST}


def hits_of(texts: Collection[np.ndarray], counted: np.ndarray) -> HitLosses:
    """Counts repeated bigrams in sequences of `LENGTH` tokens, by their distance. There are no losses.

    Args:
        texts: the tokens of documents.
        counted: bool [vocabulary], which tokens count; a bigram counts if both of its tokens do.
    """
    size = len(counted)
    tokens = np.zeros(LENGTH.bit_length(), np.int64)
    sequences = 0
    for text in texts:
        rows = text[: len(text) // LENGTH * LENGTH].astype(np.int64).reshape(-1, LENGTH)
        distance = distance_to_previous(torch.from_numpy(rows[:, :-1] * size + rows[:, 1:])).numpy()
        distance = distance[counted[rows[:, :-1]] & counted[rows[:, 1:]]]
        tokens += np.bincount(np.frexp(distance.astype(float))[1], minlength=len(tokens))
        sequences += len(rows)
    shape = (1, len(tokens), 1)
    return HitLosses(LENGTH - 1, sequences, np.zeros(1, np.int64), np.array([0, 2]), 1, tokens.reshape(shape),
                     np.zeros(shape))  # fmt: skip


def count(folder: Path, tokenizer: Tokenizer, vocab_size: int, most: int) -> list[dict[str, Any]]:
    """Returns a row for each source of a corpus folder and distance.

    Args:
        folder: of `sympow kernel-corpus`, `doc-corpus` or `corpus`.
        tokenizer: of the corpus.
        vocab_size: of the corpus.
        most: documents that are read of a source, evenly spaced.
    """
    corpus = ZarrCorpus(str(folder / "train.zarr"), vocab_size)
    counted = meaningful(tokenizer, vocab_size)
    found = []
    for name, rows in sorted(rows_of_sources(folder).items()):
        chosen = rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)]
        hits = hits_of([corpus[int(row)] for row in chosen], counted)
        exponent = round(hits.distance_law()[1], 4)
        for cell, rate in zip(hits.by_distance(), hits.distance_rates(), strict=True):
            found.append({"source": name, "sequences": hits.rows, "exponent": exponent, "start": cell.start,
                          "end": cell.end, "hits": cell.tokens, "rate": float(f"{rate:.4g}")})  # fmt: skip
    return found
