"""Measures what a context file saves: `python -m benchmarks.context_restore RUN --csv FILE`.

A model reads held-out documents one after the other, and starts again with the first when they end. After each of the
given numbers of tokens, its context is saved to a float32 file and loaded. The first tokens of the likeliest
continuation must be the same with the file as without it. Restoring includes all of `load_context`: the checksum, the
fingerprint of the weights and the state.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.common.measure import csv_file, measured, write
from sympow.data import open_corpus
from sympow.models import Context, generate, load_context, save_context
from sympow.progress import Progress
from sympow.training import load

CONTINUED = 32  # tokens that are compared for each file


def endless(documents) -> Iterator[Tensor]:
    """Yields tokens [1, at most 65,536] of the documents, over and over."""
    while True:
        for document in (documents[i] for i in range(len(documents))):
            yield from torch.from_numpy(document.astype("int64"))[None].split(65_536, dim=1)


def pieces(arrays: Iterator[Tensor], counts: list[int], chunk: int) -> Iterator[Tensor]:
    """Yields the same tokens in pieces of `chunk`, cut where one of the rising `counts` is reached; it ends at the last
    count."""
    held, done = next(arrays), 0
    for count in counts:
        while done < count:
            wanted = min(chunk, count - done)
            while held.shape[1] < wanted:
                held = torch.cat([held, next(arrays)], dim=1)
            yield held[:, :wanted]
            held, done = held[:, wanted:], done + wanted


def measure(path: str, counts: list[int], chunk: int, repeats: int = 5) -> list[dict]:
    """Returns a row for each number of tokens, in rising order."""
    run = load(path)
    documents = open_corpus(run.config.data, tokenizer=run.tokenizer).held_out
    context, seconds, rows = Context.begin(run.model), 0.0, []
    nothing = torch.empty(1, 0, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder, Progress("reading", "token", total=max(counts)) as progress:
        file = Path(folder) / "context"
        for piece in pieces(endless(documents), sorted(counts), chunk):
            started = perf_counter()
            context = context.read(run.model, piece, chunk=chunk)
            seconds += perf_counter() - started
            progress.advance(piece.shape[1])
            if context.tokens not in counts:
                continue
            save_context(file, run.model, context)
            restored = []
            for _ in range(repeats):
                started = perf_counter()
                loaded = load_context(file, run.model)
                restored.append(perf_counter() - started)
            tokens = [
                generate(run.model, nothing, CONTINUED, temperature=0, context=each).tokens
                for each in (context, loaded)
            ]
            rows.append(
                {
                    "tokens_read": context.tokens,
                    "bytes": file.stat().st_size,
                    "read_seconds": seconds,
                    "restore_seconds": median(restored),
                    "slowest_restore_seconds": max(restored),
                    "same_continuation": torch.equal(*tokens),
                }
            )
    return rows


def main() -> None:
    """Prints the rows, and writes them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run's folder or a checkpoint")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000],
                        help="read before a file is written (default: 1,000 to 1,000,000 by tens)")  # fmt: skip
    parser.add_argument("--chunk", type=int, default=1024, help="tokens read at a time (default: 1024)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--csv", type=csv_file, help="write the rows to a file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = measure(options.run, options.tokens, options.chunk)
    for row in rows:
        print(
            f"{row['tokens_read']:>10,} tokens: read in {row['read_seconds']:.1f} s, {row['bytes']:,} bytes, "
            f"restored in {row['restore_seconds']:.4f} s, "
            f"continued {'alike' if row['same_continuation'] else 'OTHERWISE'}"
        )
    if options.csv:
        write(options.csv, [row | measured("cpu") for row in rows])


if __name__ == "__main__":
    main()
