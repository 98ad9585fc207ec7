"""Draws the lengths of the documents of a corpus."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from sympow.data.builders.corpus_folder import Entry, read_entries, read_summary
from sympow.data.builders.sources import SPLITS
from sympow.files import naming
from sympow.packages import from_extra

_COLOURS = {"train": "#0072B2", "heldout": "#E69F00"}  # of Okabe and Ito's palette
_NAMES = {"train": "training", "heldout": "held out"}
_BINS_AN_OCTAVE = 2


def plot_document_lengths(corpus: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Draws histograms of a corpus's documents over their tokens before cutting: their number, and their tokens.

    Args:
        corpus: the folder that `write_corpus` wrote.
        path: the path of the image. Its suffix gives the format (.png, .svg, .pdf).

    Raises FileNotFoundError where there is no corpus, ValueError for a damaged one, ImportError without matplotlib.
    """
    with from_extra("eval", "drawing lengths needs matplotlib"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    entries, row = read_entries(corpus), read_summary(Path(corpus))["row_tokens"]
    lengths = {split: _lengths(entries, split) for split in SPLITS}
    edges = bin_edges(np.concatenate(list(lengths.values())), row)

    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    count, mass = figure.subplots(2, sharex=True)
    for axes, weights, label in ((count, np.ones_like, "documents"), (mass, lambda n: n / 1e6, "tokens (millions)")):
        axes.hist(
            list(lengths.values()),
            edges,
            weights=[weights(each) for each in lengths.values()],
            stacked=True,
            color=[_COLOURS[split] for split in lengths],
            edgecolor="white",
            linewidth=0.5,
            label=[_label(entries, split) for split in lengths],
        )
        axes.axvline(row, color="0.2", linestyle="--", linewidth=1)
        axes.set_ylabel(label)
        axes.grid(True, axis="y", color="0.9")
        axes.set_axisbelow(True)
    count.annotate(
        f"a row: {row:,} tokens",
        xy=(row, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        rotation=90,
        ha="left",
        va="top",
        color="0.2",
        fontsize=9,
    )
    count.legend(fontsize=9)
    mass.set_xscale("log", base=2)
    mass.xaxis.set_major_locator(LogLocator(base=2, numticks=32))
    mass.xaxis.set_minor_locator(NullLocator())
    mass.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tokens(x)))
    mass.set_xlabel("length of a document before cutting (tokens)")
    kept = sum(entry.rows for entry in entries) * row / sum(entry.tokens for entry in entries)
    count.set_title(f"Documents by length; {kept:.0%} of their tokens fill whole rows")
    with naming(path):
        figure.savefig(path)


def bin_edges(lengths: np.ndarray, row: int) -> np.ndarray:
    """Returns float64 [bins + 1]: edges evenly spaced in the logarithm that hold all lengths, one of them at `row`."""
    first = np.floor(np.log2(max(lengths.min(), 1) / row) * _BINS_AN_OCTAVE)
    last = np.floor(np.log2(lengths.max() / row) * _BINS_AN_OCTAVE) + 1
    return row * 2 ** (np.arange(first, last + 1) / _BINS_AN_OCTAVE)


def _lengths(entries: list[Entry], split: str) -> np.ndarray:
    return np.array([entry.tokens for entry in entries if entry.split == split], dtype=np.int64)


def _label(entries: list[Entry], split: str) -> str:
    chosen = [entry for entry in entries if entry.split == split]
    tokens, rows = sum(entry.tokens for entry in chosen), sum(entry.rows for entry in chosen)
    return f"{_NAMES[split]}: {len(chosen):,} documents, {tokens / 1e6:,.1f}M tokens, {rows:,} rows"


def _tokens(count: float) -> str:
    """Returns 65,536 as "64k" and 1,048,576 as "1M"."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if count >= unit:
            return f"{count / unit:g}{name}"
    return f"{count:g}"
