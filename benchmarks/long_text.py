"""Measures what rows of a million tokens of text bring: the loss by position, and what it owes to the far context.

A model of power attention (`scaling:power`) is trained on rows of `--context` tokens from documents of a million
tokens. Then it reads every held-out document twice: once whole, and once in rows of `--context` tokens, where it has
forgotten all that stands before the row. Both losses are compared on the same tokens, those in the second half of a
row. There the model that reads rows knows at least half a row, so that their difference is the part of the far context.
The loss by position alone would not show it, because some parts of a document are harder than others.

OUT/long_text.csv holds a row for each range of positions: `loss` of whole documents; on the tokens in the second half
of a row, `loss_late` of whole documents and `loss_in_rows`; `gain`, their difference, and `gain_half`, half of its 95%
interval over the documents. OUT/long_text.png shows them. Rows of other contexts and seeds in OUT are kept. A training
that was stopped continues.

    sympow kernel-corpus --source PACKAGE --row-tokens 1048576 --out FOLDER
    python -m benchmarks.long_text --corpus FOLDER --out OUT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.intervals import interval
from benchmarks.common.measure import known, measured, write
from benchmarks.context_scaling.data import name_of, read_data
from benchmarks.context_scaling.work import fast_attention
from sympow.data import Batches, Corpus
from sympow.evaluation.context_loss import bin_edges, score_rows
from sympow.models import LanguageModel
from sympow.recipes import load_recipe
from sympow.training import RunConfig, load_model, override, train
from sympow.training.devices import autocast

RECIPE = "scaling:power"
TOKENS = 1528 * 65_536  # of a training: 100 million
GAINS = ("loss_late", "loss_in_rows", "gain", "gain_half")  # columns; None at positions up to the training context
GAIN_ROWS = 6  # that are printed


def run_config(args: argparse.Namespace) -> RunConfig:
    """Returns the config of the recipe on rows of the context, one a step; its warm-up keeps its share of the steps."""
    config = load_recipe(RECIPE)
    steps = max(1, args.tokens // args.context)
    warmup = round(steps * config.training.warmup_steps / config.training.steps)
    every = max(1, steps // 4)
    return override(config, [
        f"name=context-{args.context}-seed-{args.seed}",
        f"data.path={args.corpus / 'train.zarr'}", f"data.held_out_path={args.corpus / 'heldout.zarr'}",
        f"training.context={args.context}", "training.batch_size=1", f"training.steps={steps}",
        f"training.warmup_steps={warmup}", "training.optimizer=adamw", f"training.learning_rate={args.learning_rate}",
        f"training.seed={args.seed}", f"training.device={args.device}", f"training.checkpoint_every={every}",
        "training.keep_checkpoints=1", f"execution.compile={'true' if args.compile else 'false'}",
    ])  # fmt: skip


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

    figure = Figure(figsize=(7, 6))
    above, below = figure.subplots(2, 1, sharex=True)
    for i, key in enumerate(dict.fromkeys((row["trained_context"], row["seed"]) for row in rows)):
        own = [row for row in rows if (row["trained_context"], row["seed"]) == key]
        gained = [row for row in own if row["gain"] is not None]
        name = f"{key[0]:,} tokens, seed {key[1]}"
        above.plot([row["end"] for row in own], [row["loss"] for row in own], "o-", color=f"C{i}", label=name)
        above.axvline(key[0], color=f"C{i}", linestyle=":")
        below.errorbar([row["end"] for row in gained], [row["gain"] for row in gained],
                       [row["gain_half"] or 0.0 for row in gained], fmt="o-", capsize=3, color=f"C{i}")  # fmt: skip
    below.axhline(0.0, color="grey", linewidth=0.8)
    above.set(ylabel="loss, nats a token", title="Power attention on documents of text")
    below.set(xscale="log", xlabel="position in the document, tokens", ylabel="gain from the far context, nats")
    above.legend(title="trained on rows of")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_text", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--corpus", type=Path, required=True, help="that of `sympow kernel-corpus`")
    parser.add_argument("--context", type=int, default=65_536, help="tokens of the training rows (default: 65536)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of the training (default: {TOKENS})")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest one (default: 2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the rows (default: 0)")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and the results")
    args = parser.parse_args()
    config = run_config(args)
    documents = read_data(config.data)
    lengths = set(documents.held_out.lengths.tolist())
    if len(lengths) > 1 or min(lengths) < 2 * args.context:
        raise SystemExit(f"held-out documents must have one length, at least twice the context of {args.context:,}; "
                         f"got {min(lengths):,} to {max(lengths):,} tokens")  # fmt: skip
    batches = Batches(documents.train, args.context, 1, args.seed, pack=False)
    with fast_attention(args.device):
        trained = train(config, batches, args.out / config.name)
        if trained.stopped_by:
            print(f"stopped by {trained.stopped_by} at step {trained.step}: the same command goes on")
            return 1
        model = load_model(args.out / config.name, torch.device(args.device)).model
        with autocast(config.training.precision, torch.device(args.device)):
            in_rows = losses_in_rows(model, documents.held_out, args.context)
            whole = losses_in_rows(model, documents.held_out, min(lengths))
    key = {"trained_context": args.context, "seed": args.seed}
    about = key | {"tokens": config.training.steps * args.context, "documents": len(whole), "length": min(lengths)}
    about |= {"recipe": RECIPE, "corpus": name_of(documents.train), **measured(args.device)}
    file = args.out / "long_text.csv"
    rows = [row for row in known(file) if {name: row[name] for name in key} != key]
    rows += [about | row for row in by_position(whole, in_rows, args.context)]
    write(file, rows)
    plot(rows, args.out / "long_text.png")
    for row in rows[-GAIN_ROWS:]:
        print(
            f"positions {row['start']:,} to {row['end'] - 1:,}: loss {row['loss']:.4f}"
            + (
                ""
                if row["gain"] is None
                else f", gain from the far context {row['gain']:+.4f} +- {row['gain_half'] or 0:.4f}"
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
