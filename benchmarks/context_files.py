"""Measures what rounding a context costs: `python -m benchmarks.context_files RUN --csv FILE`.

A model reads the beginning of held-out rows. Its context is saved and loaded with each dtype, and the loss on the next
tokens is measured from the loaded state. Rows and tokens are the same for all dtypes, so all differences come from the
files. For comparison, the loss is also measured after only the last token of the context. Times are those of one file,
and include the fingerprint of the weights.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.measure import csv_file, measured, write
from sympow.data import open_corpus
from sympow.layers.state_file import STATE_DTYPES
from sympow.models import Context, LanguageModel, load_context, save_context
from sympow.training import load


def rows_of(documents, tokens: int, count: int) -> list[Tensor]:
    """Returns the beginnings of `count` documents that are long enough, [1, tokens] each."""
    fitting = [i for i, length in enumerate(documents.lengths) if length >= tokens]
    if len(fitting) < count:
        raise ValueError(f"{count} documents of {tokens:,} tokens are needed; there are {len(fitting)}")
    return [torch.from_numpy(documents[i][:tokens].astype("int64"))[None] for i in fitting[:count]]


@torch.no_grad()
def loss_behind(model: LanguageModel, context: Context, tokens: Tensor) -> float:
    """Returns the mean loss of tokens [1, T] after a context, which is used up: each token is predicted, then read."""
    logits, state, losses = context.logits, context.state, []
    for column in tokens.split(1, dim=1):
        if logits is None:
            raise ValueError("the context is empty")
        losses.append(F.cross_entropy(logits.float(), column[:, 0]))
        logits, state = model.step(column, state)
    return float(torch.stack(losses).double().mean())


def measure(path: str, read: int, predicted: int, count: int) -> list[dict]:
    """Returns a row for each dtype."""
    run = load(path)
    rows = rows_of(open_corpus(run.config.data, tokenizer=run.tokenizer).held_out, read + predicted, count)
    losses: dict[str, list[float]] = {dtype: [] for dtype in ("one token", "never stopped", *STATE_DTYPES)}
    sizes, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for tokens in rows:
            context = Context.begin(run.model).read(run.model, tokens[:, :read])
            for dtype in STATE_DTYPES:
                file = Path(folder) / dtype
                started = perf_counter()
                save_context(file, run.model, context, dtype=dtype)
                saved = perf_counter()
                loaded = load_context(file, run.model)
                seconds[dtype] = (saved - started, perf_counter() - saved)
                sizes[dtype] = file.stat().st_size
                losses[dtype].append(loss_behind(run.model, loaded, tokens[:, read:]))
            short = Context.begin(run.model).read(run.model, tokens[:, read - 1 : read])
            losses["one token"].append(loss_behind(run.model, short, tokens[:, read:]))
            losses["never stopped"].append(loss_behind(run.model, context, tokens[:, read:]))
    whole = sum(losses["never stopped"]) / count
    return [
        {
            "dtype": dtype,
            "tokens_read": read,
            "tokens_predicted": predicted,
            "rows": count,
            "bytes": sizes[dtype],
            "write_seconds": seconds[dtype][0],
            "load_seconds": seconds[dtype][1],
            "loss_never_stopped": whole,
            "loss_after_one_token": sum(losses["one token"]) / count,
            "loss": sum(losses[dtype]) / count,
            "more_loss_percent": 100 * (sum(losses[dtype]) / count / whole - 1),
            "bit_equal": losses[dtype] == losses["never stopped"],
        }
        for dtype in STATE_DTYPES
    ]


def main() -> None:
    """Prints the rows, and writes them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run's folder or a checkpoint")
    parser.add_argument("--read", type=int, default=4096, help="tokens read before the file (default: 4096)")
    parser.add_argument("--predicted", type=int, default=256, help="tokens predicted behind it (default: 256)")
    parser.add_argument("--rows", type=int, default=8, help="held-out documents (default: 8)")
    parser.add_argument("--csv", type=csv_file, help="write the rows to a file")
    options = parser.parse_args()
    rows = measure(options.run, options.read, options.predicted, options.rows)
    for row in rows:
        equal = " (bit-equal)" if row["bit_equal"] else ""
        print(
            f"{row['dtype']:>9}: {row['bytes']:>10,} bytes, loss {row['loss']:.5f}, "
            f"{row['more_loss_percent']:+.4f}% of {row['loss_never_stopped']:.5f}{equal}, "
            f"written in {row['write_seconds']:.3f} s, loaded in {row['load_seconds']:.3f} s"
        )
    print(f"after the last token alone, in place of all that was read: loss {rows[0]['loss_after_one_token']:.5f}")
    if options.csv:
        write(options.csv, [row | measured("cpu") for row in rows])


if __name__ == "__main__":
    main()
