"""Compares training on several ranks with training on one rank.

The same run is done on one rank ("one"), on several ranks that share every row ("several"), and on one rank that
continues from the middle of "several" ("continued"). A run on one rank that computes its rows in two halves ("halves")
shows the effect of rounding alone. Rows are Markov chains (`benchmarks.common.chains`), or with --text pieces of
Python's standard library in bytes.

    python -m benchmarks.training_ranks --out DIR
    torchrun --nproc-per-node 2 -m benchmarks.training_ranks --out DIR
    python -m benchmarks.training_ranks --out DIR

Each call trains the runs that are missing in DIR and possible on its ranks, so every call may be repeated. The last
call writes DIR/ranks.csv. It ends with exit code 1 if losses differ by more than is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import torch

from benchmarks.common.chains import DATA, Chains, options, run_config
from benchmarks.common.measure import measured, write
from benchmarks.training import world_size
from sympow.data import Batches, ByteTokenizer, open_corpus
from sympow.training import ExecutionConfig, RunConfig, read_metrics, train
from sympow.training.checkpoint import checkpoint_path, latest_step
from sympow.training.ranks import launched

ALLOWED = 1e-3  # of the loss, relative, at every step


def batches(args: argparse.Namespace, rows: int) -> Chains | Batches:
    """Returns the training batches of `rows` rows. The rows do not depend on their number in a batch."""
    if args.text:
        return Batches(open_corpus(DATA).train, args.context, rows, pack=DATA.pack)
    return Chains(args.context, rows, args.vocabulary)


def config_of(args: argparse.Namespace) -> RunConfig:
    """Returns the config of the run on one rank. It saves a checkpoint in the middle and at the end."""
    vocabulary = ByteTokenizer.vocab_size if args.text else args.vocabulary
    kept = {"log_every": 1, "checkpoint_every": args.steps // 2, "keep_checkpoints": 2}
    return run_config(args, "ranks", vocabulary, warmup_steps=args.warmup, **kept)


def train_missing(args: argparse.Namespace) -> None:
    """Trains missing runs: "several" on several ranks; on one rank "one", "halves" and, after "several",
    "continued"."""
    config, whole = config_of(args), batches(args, args.rows)
    out, steps = args.out, args.steps
    if world_size() > 1:
        execution = ExecutionConfig(context_parallel=world_size())
        train(dataclasses.replace(config, execution=execution), whole, out / "several", quiet=True)
        return
    train(config, whole, out / "one", quiet=True)
    half = args.rows // 2
    halves = dataclasses.replace(config, training=dataclasses.replace(config.training, micro_batch_size=half))
    train(halves, batches(args, half), out / "halves", quiet=True)
    if latest_step(out / "several") < steps:
        return
    if not (out / "continued").exists():
        shutil.copytree(out / "several", out / "continued")
        shutil.rmtree(checkpoint_path(out / "continued", steps, sharded=True))
    train(config, whole, out / "continued", quiet=True)


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(run)}


def compare(out: Path, steps: int) -> list[dict]:
    """Compares "several" and "halves" with "one", and "continued" with "several". Returns the largest relative
    differences of losses, over the steps that the first run of each pair took itself."""
    rows = []
    pairs = [("several", "one", 1), ("halves", "one", 1), ("continued", "several", steps // 2 + 1)]
    for run, reference, first in pairs:
        a, b = losses(out / run), losses(out / reference)
        errors = {step: abs(a[step] - b[step]) / b[step] for step in range(first, steps + 1)}
        worst = max(errors, key=errors.__getitem__)
        rows.append(
            {"run": run, "against": reference, "first_step": first, "steps": steps, "worst_step": worst}
            | {"difference": float(f"{errors[worst]:.2e}"), "allowed": ALLOWED}
            | {"first_loss": b[1], "last_loss": b[steps], "last_difference": float(f"{errors[steps]:.2e}")}
        )
    return rows


def main() -> int:
    parser = options("benchmarks.training_ranks", __doc__, rows=8, steps=100, learning_rate=3e-4)
    parser.add_argument("--text", action="store_true", help="train on Python's standard library, in bytes, not chains")
    parser.add_argument("--warmup", type=int, help="steps that the learning rate rises over (default: a tenth of all)")
    args = parser.parse_args()
    if args.warmup is None:
        args.warmup = args.steps // 10
    if args.rows % 2:
        parser.error(f"--rows must be even, as they also pass in two halves; got {args.rows}")
    with launched(torch.device(args.device)):
        train_missing(args)
        if world_size() > 1:
            return 0
    if latest_step(args.out / "continued") < args.steps:
        print(f"{args.out} has no run on several ranks yet: start this with torchrun, then once more on one")
        return 0
    rows = compare(args.out, args.steps)
    for row in rows:
        print(
            f"{row['run']} against {row['against']}, steps {row['first_step']} to {row['steps']}: losses from "
            f"{row['first_loss']:.4f} to {row['last_loss']:.4f} differ by at most {row['difference']:.1e} "
            f"(step {row['worst_step']}); {row['allowed']:.0e} is allowed"
        )
    about = measured(args.device)
    config = config_of(args)
    settings = {"model": config.model.to_dict(), "training": config.training.to_dict(), "text": args.text}
    write(args.out / "ranks.csv", [row | settings | about for row in rows])
    return int(any(row["difference"] > row["allowed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
