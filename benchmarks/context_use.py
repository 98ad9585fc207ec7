"""Measures what a trained model makes of its context, and how far back: `python -m benchmarks.context_use`.

All measures are of whole held-out documents. The table has a row for each measure and length, and the value of every
document, so that two models are compared on the same tokens of each document:

- "cut" n: the loss of the second half of a document, of which the model reads rows of n tokens. Every token that counts
  has n/2 to n - 1 tokens before it in its row. At the length of the documents the model reads them whole.
- "position" n: the loss at positions n/4 to n - 1 of whole documents.
- "hits" n: the loss of AR hits whose bigram occurred last n/4 to n - 1 tokens before.
- "copy" n: passages of other documents are put into a document, and repeated at its end, 3n/4 tokens later. The value
  is the loss of the second half of the repeated passages. At length 0 they are not put in, but repeated all the same.
- "recalled" n: the share of these tokens that have a probability above one half.

`python -m benchmarks.learning run --measures` measures models at the end of their training, without files of weights.

    python -m benchmarks.context_use --runs RUN ... --corpus FOLDER --csv FILE
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.intervals import Interval, interval
from benchmarks.common.measure import csv_file, measured, refuses, write
from benchmarks.context_scaling.data import name_of, read_data
from sympow.data import TokenCorpus
from sympow.evaluation import BigramCounts, count_bigrams
from sympow.evaluation.ar_hits import FREQUENT, bigram_distances
from sympow.evaluation.context_loss import score_rows
from sympow.models import LanguageModel
from sympow.training import load_model
from sympow.training.devices import autocast

Row = dict[str, Any]

LENGTHS = (256, 1024, 4096, 16_384, 65_536)
PASSAGE, PASSAGES = 32, 4  # tokens of a repeated passage; passages of a document at every length


def context_use(
    model: LanguageModel, held_out: TokenCorpus, counts: BigramCounts, precision: str, lengths: Sequence[int] = LENGTHS
) -> list[Row]:
    """Returns a row for each measure and length: "measure", "length", "value", and "documents", the value of each.

    Args:
        model: in evaluation or training mode.
        held_out: documents of equal length, the last of `lengths`.
        counts: of the bigrams of the training documents.
        precision: as in a training config.
        lengths: powers of two, ascending.

    Raises ValueError for documents of other lengths.
    """
    if set(held_out.lengths.tolist()) != {lengths[-1]}:
        raise ValueError(f"documents must have {lengths[-1]:,} tokens; got {held_out.lengths.min():,} to "
                         f"{held_out.lengths.max():,}")  # fmt: skip
    with autocast(precision, next(model.parameters()).device):
        found = {("cut", length): _cut(model, held_out, length) for length in lengths[:-1]}
        found |= _whole(model, held_out, counts, lengths)
        found |= _copies(model, held_out, [length for length in lengths if length >= LENGTHS[0]])
    return [{"measure": measure, "length": length, "value": _mean(values),
             "documents": [_rounded(value) for value in values]}
            for (measure, length), values in found.items()]  # fmt: skip


def _cut(model: LanguageModel, held_out: TokenCorpus, length: int) -> np.ndarray:
    """Returns the loss of the second half of each document, in rows of `length` tokens."""
    count, whole, half = len(held_out), int(held_out.lengths[0]), length // 2
    starts = np.arange(whole // 2 - half, whole - length + 1, half)
    chosen = np.stack([np.repeat(np.arange(count), len(starts)), np.tile(starts, count)], 1)
    losses = [scored.losses[:, half - 1 :].mean(1) for scored in score_rows(model, held_out, chosen, length - 1)]
    return np.concatenate(losses).reshape(count, -1).mean(1)


def _whole(
    model: LanguageModel, held_out: TokenCorpus, counts: BigramCounts, lengths: Sequence[int]
) -> dict[tuple[str, int], np.ndarray]:
    """Returns the measures of documents that are read whole, by measure and length."""
    whole = lengths[-1]
    losses, distances = [], []
    for scored in score_rows(model, held_out, _all_of(held_out), whole - 1):
        rare = counts.lookup(scored.tokens[:, :-1], scored.tokens[:, 1:]) <= FREQUENT
        losses.append(scored.losses)
        distances.append(np.where(rare, bigram_distances(scored.tokens), 0))
    loss, distance = np.concatenate(losses), np.concatenate(distances)
    found = {("cut", whole): loss[:, whole // 2 - 1 :].mean(1)}
    found |= {("position", length): loss[:, length // 4 - 1 : length - 1].mean(1) for length in lengths}
    for length in lengths:
        hits = (distance >= length // 4) & (distance < length)
        sums, numbers = np.where(hits, loss, 0).sum(1), hits.sum(1)
        found["hits", length] = np.where(numbers > 0, sums / np.maximum(numbers, 1), math.nan)
    return found


def _copies(model: LanguageModel, held_out: TokenCorpus, lengths: Sequence[int]) -> dict[tuple[str, int], np.ndarray]:
    """Returns the losses of passages that are repeated at the end of documents, and the share of tokens recalled."""
    if not lengths:
        return {}
    found: dict[tuple[str, int], np.ndarray] = {}
    for put_in in (True, False):
        texts = np.stack([with_copies(held_out, index, lengths, put_in) for index in range(len(held_out))])
        offsets = np.arange(len(texts) + 1) * texts.shape[1]
        corpus = TokenCorpus(texts.reshape(-1), offsets, held_out.vocab_size, held_out.fingerprint)
        scored = score_rows(model, corpus, _all_of(corpus), texts.shape[1] - 1)
        loss = np.concatenate([each.losses for each in scored])[:, -len(lengths) * PASSAGES * PASSAGE :]
        # [documents, lengths, tokens of the second halves of passages]
        late = loss.reshape(len(texts), len(lengths), PASSAGES, PASSAGE)[..., PASSAGE // 2 :]
        late = late.reshape(len(texts), len(lengths), -1)
        if put_in:
            for place, length in enumerate(lengths):
                found["copy", length] = late[:, place].mean(1)
                found["recalled", length] = (late[:, place] < math.log(2)).mean(1)
        else:
            found["copy", 0], found["recalled", 0] = late.mean((1, 2)), (late < math.log(2)).mean((1, 2))
    return found


def with_copies(held_out: TokenCorpus, index: int, lengths: Sequence[int], put_in: bool) -> np.ndarray:
    """Returns a document that ends with passages of the next one, for every length PASSAGES of them.

    Args:
        held_out: documents of equal length.
        index: of the document.
        lengths: with `put_in`, a passage is at 3/4 of its length before its repetition, too.
        put_in: whether the passages occur before.
    """
    text = np.array(held_out[index])
    other = np.asarray(held_out[(index + 1) % len(held_out)])
    # No two passages share tokens, or one would be said before without being put in.
    count = len(lengths) * PASSAGES
    starts = np.random.default_rng(index).choice(len(other) // PASSAGE, count, replace=False) * PASSAGE
    place = len(text) - count * PASSAGE
    for length, start in zip(np.repeat(lengths, PASSAGES).tolist(), starts.tolist(), strict=True):
        passage = other[start : start + PASSAGE]
        text[place : place + PASSAGE] = passage
        if put_in:
            text[place - length * 3 // 4 :][:PASSAGE] = passage
        place += PASSAGE
    return text


def _all_of(corpus: TokenCorpus) -> np.ndarray:
    """Returns the rows of `score_rows` that are whole documents."""
    return np.stack([np.arange(len(corpus)), np.zeros(len(corpus), np.int64)], 1)


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return _rounded(known.mean()) if len(known) else None


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)


class Compared(NamedTuple):
    """Holds the mean difference of two models, with 95% intervals over documents and over seeds.

    The interval over documents is that of each document's mean over the seeds.
    """

    documents: Interval
    seeds: Interval


def compared(ours: Sequence[Sequence[float | None]], base: Sequence[Sequence[float | None]]) -> Compared | None:
    """Compares two models, or two measures of one, on the same documents; None without a seed.

    Args:
        ours: of every seed the values of all documents, None where a document has none.
        base: in the same order.
    """
    if not ours:
        return None
    less = np.array(ours, dtype=float) - np.array(base, dtype=float)
    by_document, by_seed = less.mean(0), np.nanmean(less, axis=1)
    documents = interval(by_document[~np.isnan(by_document)].tolist())
    seeds = interval(by_seed.tolist())
    return None if documents is None or seeds is None else Compared(documents, seeds)


@refuses
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_use", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of `sympow train`")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--csv", type=csv_file, required=True, help="file the rows are written to")
    args = parser.parse_args()
    rows: list[Row] = []
    for folder in args.runs:
        loaded = load_model(folder, torch.device(args.device))
        config = loaded.config
        paths = {"path": str(args.corpus / "train.zarr"), "held_out_path": str(args.corpus / "heldout.zarr")}
        documents = read_data(replace(config.data, **paths))
        counts = count_bigrams(documents.train, documents.train.vocab_size)
        longest = int(documents.held_out.lengths.max())
        lengths = [length for length in LENGTHS if length < longest] + [longest]
        about = {"run": config.name, "corpus": name_of(documents.train)}
        found = context_use(loaded.model, documents.held_out, counts, config.training.precision, lengths)
        rows += [about | row | measured(args.device) for row in found]
        write(args.csv, rows)
        for row in found:
            print(f"{config.name}: {row['measure']} {row['length']:,}: {row['value']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
