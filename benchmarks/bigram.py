"""Measures the loss of a model of bigrams that sees the last 32 tokens: `python -m benchmarks.bigram --corpus FOLDER`.

Runs with a higher loss have not learned, and tables mark them. The probability of a token is a mean of four shares:
that of its bigram among those of the token before it in the training documents, that of the token in these documents,
its share of the last 32 tokens, and one of the vocabulary. The weights of the mean are those with the lowest loss.
"""

from __future__ import annotations

import argparse
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import csv_file, known, read, refuses, write
from benchmarks.context_scaling.data import Documents, name_of, read_documents
from benchmarks.context_scaling.grid import SCALES
from sympow.evaluation import count_bigrams

WINDOW = 32
COLUMNS = ("window", "loss", "weights", "tokens", "corpus")
TABLE = Path(__file__).parent / "results" / "bigram.csv"
KERNEL = "1600 rows, 44d47a9151c6"  # the corpus of most runs
ROUNDS = 50  # of expectation and maximization; the loss is the same to 1e-6 after 30


def bigram_row(documents: Documents) -> dict[str, Any]:
    """Returns the loss on held-out documents, in nats a token, the weights, and the corpus."""
    size = documents.train.vocab_size
    counts = count_bigrams(documents.train, size)
    single = np.zeros(size)
    for index in range(len(documents.train)):
        single += np.bincount(documents.train[index], minlength=size)
    # How often a token is the first of a bigram, for all tokens.
    firsts = np.bincount(counts.keys // size, weights=counts.counts, minlength=size)
    parts = []
    for index in range(len(documents.held_out)):
        text = np.asarray(documents.held_out[index]).astype(np.int64)
        before, after = text[:-1], text[1:]
        seen = sum(_shifted(text, distance) == after for distance in range(1, WINDOW + 1))
        there = np.minimum(np.arange(1, len(text)), WINDOW)
        parts.append(np.stack([counts.lookup(before, after) / np.maximum(firsts[before], 1),
                               single[after] / single.sum(), seen / there, np.full(len(after), 1 / size)]))  # fmt: skip
    shares = np.concatenate(parts, axis=1)
    weights = np.full(len(shares), 1 / len(shares))
    for _ in range(ROUNDS):
        mixed = weights[:, None] * shares
        weights = (mixed / mixed.sum(0)).mean(1)
    loss = -np.log(weights @ shares).mean()
    return {"window": WINDOW, "loss": round(float(loss), 4), "weights": [round(x, 4) for x in weights.tolist()],
            "tokens": shares.shape[1], "corpus": name_of(documents.train)}  # fmt: skip


def _shifted(text: np.ndarray, distance: int) -> np.ndarray:
    """Returns for every token but the first the token `distance` before it; -1 where there is none."""
    return np.concatenate([np.full(distance - 1, -1), text])[: len(text) - 1]


@lru_cache
def not_learned(corpus: str = KERNEL) -> float:
    """Returns the loss from which on a run counts as one that has not learned: on a corpus not measured, KERNEL's."""
    losses = {row["corpus"]: row["loss"] for row in read(TABLE)}
    return losses.get(corpus, losses[KERNEL])


@refuses
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bigram", description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    parser.add_argument("--scale", choices=SCALES, default="full", help="toy: to try the program out")
    table = partial(csv_file, columns=COLUMNS)
    parser.add_argument("--csv", type=table, default=TABLE, help="file that gets the row (default: the committed)")
    args = parser.parse_args()
    row = bigram_row(read_documents(SCALES[args.scale], args.corpus))
    write(args.csv, [*(other for other in known(args.csv) if other["corpus"] != row["corpus"]), row])
    print(f"{row['corpus']}: {row['loss']} nats a token")


if __name__ == "__main__":
    sys.exit(main())
