"""Measures what texts of a million tokens bring to trained models: the loss by position, and what it owes to the far
context.

`python -m benchmarks.learning run --keep RUNS` keeps its runs. Each of them reads texts, which are held-out rows of the
corpus that follow one another, in one document or in several. It reads them twice: once whole, and once in rows of the
length of its training, where it has forgotten all that stands before the row. Both losses are compared on the same
tokens, those in the second half of a row. There the model that reads rows knows at least half a row, so that their
difference is the part of the context that is farther away. The loss by position alone would not show it, because some
parts of a text are harder than others.

FILE holds a row for each run and range of positions: `loss` of whole documents; on the tokens in the second half of a
row, `loss_late` of whole documents and `loss_in_rows`; `gain`, their difference, and `gain_half`, half of its 95%
interval over the documents. A figure beside FILE shows them. Rows of other runs in FILE are kept.

    python -m benchmarks.long_text --corpus CORPUS --runs RUNS/* --csv FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.intervals import interval
from benchmarks.common.measure import known, measured, refuses, write
from benchmarks.context_scaling.data import name_of
from benchmarks.context_scaling.work import fast_attention
from benchmarks.pages.context_tables import MODELS, model_look
from sympow.data import Corpus, TokenCorpus, ZarrCorpus
from sympow.evaluation.context_loss import bin_edges, score_rows
from sympow.models import LanguageModel
from sympow.training import load
from sympow.training.devices import autocast

KEY = ("variant", "trained_context", "tokens", "optimizer", "learning_rate", "seed")  # a run
SHOWN_FROM = 512  # positions of the figure
GAINS = ("loss_late", "loss_in_rows", "gain", "gain_half")  # columns; None at positions up to the training context


def losses_in_rows(model: LanguageModel, documents: Corpus, width: int) -> np.ndarray:
    """Returns the loss of every token of documents of equal length that are cut into rows of `width` tokens, float64
    [documents, tokens]. It is NaN for the first token of a row, which is not predicted, and for an incomplete row at
    the end."""
    count, length = len(documents), int(documents.lengths[0])
    starts = np.arange(0, length - width + 1, width)
    chosen = np.stack([np.repeat(np.arange(count), len(starts)), np.tile(starts, count)], 1)
    losses = np.full((count, length), np.nan)
    for scored in score_rows(model, documents, chosen, width - 1, progress=f"rows of {width:,} tokens"):
        for (document, start), row in zip(scored.rows, scored.losses, strict=True):
            losses[document, start + 1 : start + width] = row
    return losses


def by_position(whole: np.ndarray, in_rows: np.ndarray, width: int) -> list[dict[str, Any]]:
    """Returns a row of the results for each range of positions.

    Args:
        whole: losses [documents, tokens] of the model that reads whole documents.
        in_rows: those of the model that reads rows of `width` tokens.
        width: tokens of a row.
    """
    rows = []
    for start, end in pairwise(bin_edges(whole.shape[1])[1:]):  # the first token is not predicted
        row = {"start": start, "end": end, "loss": whole[:, start:end].mean()} | dict.fromkeys(GAINS)
        places = np.arange(start, end)
        late = places[places % width >= width // 2]
        if start >= width and len(late):
            gains = interval((in_rows - whole)[:, late].mean(1).tolist())
            means = (whole[:, late].mean(), in_rows[:, late].mean(), gains and gains.mean, gains and gains.half)
            row |= dict(zip(GAINS, means, strict=True))
        rows.append({name: round(float(x), 5) if isinstance(x, float) else x for name, x in row.items()})
    return rows


def plot(rows: Sequence[dict], path: Path) -> None:
    """Draws the loss of whole documents by position, and below it the gain from the far context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    runs = dict.fromkeys(tuple(row[name] for name in KEY) for row in rows)
    seeds = len({row["seed"] for row in rows})
    for i, key in enumerate(runs):
        own = [row for row in rows if tuple(row[name] for name in KEY) == key]
        gained = [row for row in own if row["gain"] is not None]
        variant = own[0]["variant"]
        look = model_look(variant) if variant in MODELS else {"color": f"C{i}", "marker": "o"}
        name = MODELS.get(variant, variant) + (f", seed {own[0]['seed']}" if seeds > 1 else "")
        shown = [row for row in own if row["end"] > SHOWN_FROM]
        above.plot([row["end"] for row in shown], [row["loss"] for row in shown], **look, label=name)
        above.axvline(own[0]["trained_context"], color="grey", linestyle=":")
        below.errorbar([row["end"] for row in gained], [row["gain"] for row in gained],
                       [row["gain_half"] or 0.0 for row in gained], capsize=3, **look)  # fmt: skip
    below.axhline(0.0, color="grey", linewidth=0.8)
    trained = sorted({(row["tokens"], row["trained_context"]) for row in rows})
    sizes = "; ".join(f"{tokens / 1e6:,.0f}M tokens in rows of {context:,}" for tokens, context in trained)
    title = f"Held-out texts of a million tokens, after training on\n{sizes} (dotted)"
    title += "" if seeds > 1 else ", one run each"
    above.set(ylabel="loss, nats a token", title=title)
    below.set(xscale="log", xlabel="position in the text, tokens", ylabel="gain from the far context, nats")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=130)


def read_documents(corpus: Path, length: int, count: int, vocab_size: int) -> TokenCorpus:
    """Returns held-out documents, evenly spaced among those of `length` tokens, each of rows that follow one another.

    Raises ValueError where the rows of the corpus are not enough for one document.
    """
    rows = ZarrCorpus(str(corpus / "heldout.zarr"), vocab_size)
    each = length // int(rows.lengths[0])
    possible = len(rows) // each if each else 0
    if possible == 0:
        raise ValueError(f"expected held-out rows for a document of {length:,} tokens; got {len(rows)} rows of "
                         f"{rows.lengths[0]:,} tokens")  # fmt: skip
    chosen = np.linspace(0, possible - 1, min(count, possible)).astype(np.int64)
    documents = (np.concatenate([rows[i] for i in range(n * each, (n + 1) * each)]) for n in chosen)
    return TokenCorpus.from_documents(documents, vocab_size)


def score(folder: Path, corpus: Path, length: int, count: int, device: str) -> list[dict[str, Any]]:
    """Returns the rows of the model of a run folder of `benchmarks.learning`.

    Raises ValueError for documents that are not twice as long as the rows of the training.
    """
    run = load(folder, torch.device(device))
    settings = run.config.training
    if length < 2 * settings.context:
        raise ValueError(f"documents must have at least {2 * settings.context:,} tokens, twice the context of "
                         f"{folder.name}; got {length:,}")  # fmt: skip
    documents = read_documents(corpus, length, count, run.config.model.vocab_size)
    with fast_attention(device), autocast(settings.precision, torch.device(device)):
        in_rows = losses_in_rows(run.model, documents, settings.context)
        whole = losses_in_rows(run.model, documents, int(documents.lengths[0]))
    about = {"variant": folder.name.partition(f"-{settings.context}-")[0], "trained_context": settings.context,
             "tokens": settings.steps * settings.batch_size * settings.context, "optimizer": settings.optimizer,
             "learning_rate": settings.learning_rate, "seed": settings.seed, "documents": len(whole),
             "length": whole.shape[1], "corpus": name_of(documents), **measured(device)}  # fmt: skip
    return [about | row for row in by_position(whole, in_rows, settings.context)]


@refuses
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_text", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--corpus", type=Path, required=True, help="the whole corpus that the runs trained on")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs that were kept")
    parser.add_argument("--length", type=int, default=1_048_576, help="tokens of a document (default: 1048576)")
    parser.add_argument("--documents", type=int, default=15, help="that are read (default: 15)")
    parser.add_argument("--csv", type=Path, required=True, help="the file of the results")
    args = parser.parse_args()
    for folder in args.runs:
        found = score(folder, args.corpus, args.length, args.documents, args.device)
        key = {name: found[0][name] for name in KEY}
        rows = [row for row in known(args.csv) if {name: row[name] for name in KEY} != key] + found
        write(args.csv, rows)
        plot(rows, args.csv.with_suffix(".png"))
        for row in found:
            gain = "" if row["gain"] is None else f", gain {row['gain']:+.4f} +- {row['gain_half'] or 0:.4f}"
            print(f"{folder.name}, {row['start']:,} to {row['end'] - 1:,}: loss {row['loss']:.4f}{gain}", flush=True)


if __name__ == "__main__":
    main()
