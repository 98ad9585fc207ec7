"""Checks that AR hits are counted as their definition says, and measures how fast."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ar_hits import brute_force
from benchmarks.common.measure import measured
from sympow.data import TokenCorpus
from sympow.data.zarr_corpus import ZarrCorpus
from sympow.evaluation import HitLosses, choose_rows, count_bigrams, hit_losses
from sympow.evaluation.ar_hits import FREQUENT, PARTS


class Known(torch.nn.Module):
    """Computes losses that depend only on a token and the previous token. They are multiples of 1/8, so that sums are
    exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def token_losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((3 * tokens + 5 * targets) % 97).double() / 8


def compare(train: Any, held_out: Any, vocab_size: int, tokens: int, context: int, frequent: int) -> dict[str, Any]:
    """Measures about `tokens` tokens in both ways.

    Returns:
        A row: the largest difference in tokens and in summed losses over all slices and cells, the difference between
        the sum of the slices and the whole in nats per token, and the seconds of both.
    """
    began = time.perf_counter()
    rows = -(-tokens // context)
    counts = count_bigrams(train, vocab_size)
    found = hit_losses(Known(), held_out, counts, context, rows, frequent=frequent)
    ours = time.perf_counter() - began
    began = time.perf_counter()
    texts = [
        held_out[int(document)][start : start + context + 1].astype(np.int64)
        for document, start in choose_rows(held_out, context, rows)
    ]
    losses = [Known().token_losses(*(torch.from_numpy(part) for part in (text[:-1], text[1:]))) for text in texts]
    oracle_counts = brute_force.count(train)
    oracle = brute_force.tally(
        [text.tolist() for text in texts], [each.tolist() for each in losses], oracle_counts, frequent
    )
    theirs = time.perf_counter() - began
    wrong_counts = sum(
        int(counts.lookup(np.int64(first), np.int64(second))) != number
        for (first, second), number in oracle_counts.items()
    )
    differences = [_difference(found, name, oracle) for name in _names(found)]
    slices = [found.slice(name) for name in PARTS]
    whole = sum(cell.tokens * cell.loss for cell in slices if cell.tokens) / found.slice("all").tokens
    return {
        "tokens": found.slice("all").tokens,
        "counted_tokens": counts.tokens,
        "bigrams": len(oracle_counts),
        "context": context,
        "frequent": frequent,
        "hits": found.slice("hits").tokens,
        "wrong_counts": wrong_counts + abs(len(oracle_counts) - len(counts.keys)),
        "cells": len(differences),
        "largest_difference_tokens": max(each[0] for each in differences),
        "largest_difference_nats": max(each[1] for each in differences),
        "slices_less_whole_nats": abs(whole - found.slice("all").loss),
        "seconds": round(ours, 2),
        "brute_force_seconds": round(theirs, 2),
        **measured("cpu"),
    }


def clock(train: Any, held_out: Any, vocab_size: int, context: int) -> dict[str, Any]:
    """Times counting all bigrams of `train`, and splitting all rows of `held_out` by them."""
    began = time.perf_counter()
    counts = count_bigrams(train, vocab_size)
    counted = time.perf_counter() - began
    found = hit_losses(Known(), held_out, counts, context, int(held_out.lengths.sum()))
    seconds = time.perf_counter() - began
    return {
        "tokens": found.slice("all").tokens,
        "counted_tokens": counts.tokens,
        "bigrams": len(counts.keys),
        "context": context,
        "frequent": FREQUENT,
        "hits": found.slice("hits").tokens,
        "seconds": round(seconds, 2),
        "counting_seconds": round(counted, 2),
        **measured("cpu"),
    }


def read_documents(path: Path, vocab_size: int, tokens: int) -> TokenCorpus:
    """Reads the first documents of a zarr array, at least so many tokens, into memory."""
    corpus = ZarrCorpus(str(path), vocab_size)
    enough = int(np.searchsorted(np.cumsum(corpus.lengths), tokens)) + 1
    return TokenCorpus.from_documents([corpus[i] for i in range(min(enough, len(corpus)))], vocab_size)


def _names(found: HitLosses) -> list[tuple[str, int, int]]:
    """Yields slices, and cells by distance and by count, each with the counts or distances of brute force in it."""
    names = [(name, 0, 0) for name in PARTS]
    names += [("distance", cell.start, cell.end) for cell in found.by_distance()]
    names += [("count", cell.start, cell.end) for cell in found.by_count(True)]
    return names + [("new, count", cell.start, cell.end) for cell in found.by_count(False)]


def _difference(
    found: HitLosses, name: tuple[str, int, int], oracle: dict[str, tuple[int, float]]
) -> tuple[int, float]:
    """Returns by how many tokens and nats a slice or cell differs from brute force."""
    kind, start, end = name
    cells = {"distance": found.by_distance, "count": lambda: found.by_count(True),
             "new, count": lambda: found.by_count(False)}  # fmt: skip
    if kind in cells:
        (cell,) = (each for each in cells[kind]() if each.start == start)
        inside = [
            value for key, value in oracle.items()
            if key.rpartition(" ")[0] == kind and start <= int(key.rpartition(" ")[2]) < end
        ]  # fmt: skip
    else:
        cell, inside = found.slice(kind), [oracle.get(kind, (0, 0.0))]
    tokens, nats = sum(each[0] for each in inside), sum(each[1] for each in inside)
    return abs(cell.tokens - tokens), abs((cell.loss * cell.tokens if cell.tokens else 0.0) - nats)
