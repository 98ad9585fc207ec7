"""Trains both recipes of the demo at the same learning rates: `python -m benchmarks.demo_learning_rates --csv FILE`.

The demo compares power attention with softmax attention, so each must have its best learning rate: this is how they
were chosen. Every run is the demo's own (same data, steps, warmup and batch) but for the learning rate and the seed,
and is judged as the demo judges it, by the held-out loss at 4 times the context of the training. Runs are processes of
their own, two threads each, as many at a time as there are pairs of cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from benchmarks.common.measure import commit, processor, write
from sympow.recipes import load_recipe

MIXERS = ("power", "softmax")
LEARNING_RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
SEEDS = (0,)


def run(mixer: str, learning_rate: float, seed: int, folder: Path) -> dict:
    """Trains and evaluates one run; returns its row."""
    out = folder / f"{mixer}-{learning_rate}-{seed}"
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    changes = [f"training.learning_rate={learning_rate}", f"training.seed={seed}", "training.device=cpu"]
    sympow = [sys.executable, "-m", "sympow"]
    train = [*sympow, "train", f"demo:{mixer}", *changes, "--out", str(out), "--quiet"]
    subprocess.run(train, check=True, env=environment, stdout=subprocess.DEVNULL)
    table = out / "context_loss.csv"
    evaluate = [*sympow, "evaluate", str(out), "--device", "cpu", "--csv", str(table)]
    subprocess.run(evaluate, check=True, env=environment, stdout=subprocess.DEVNULL)
    context = load_recipe(f"demo:{mixer}").training.context
    with open(table, newline="") as file:
        bins = [(int(row["bin_start"]), float(row["loss"]), int(row["tokens"])) for row in csv.DictReader(file)]

    def mean(rows: list[tuple[int, float, int]]) -> float:
        return round(sum(loss * tokens for _, loss, tokens in rows) / sum(tokens for *_, tokens in rows), 4)

    row = {
        "mixer": mixer,
        "learning_rate": learning_rate,
        "seed": seed,
        "loss_within_training_context": mean([b for b in bins if b[0] < context]),
        "loss_beyond": mean([b for b in bins if b[0] >= context]),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_learning_rates", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--csv", type=Path, required=True, help="file the rows are written to")
    args = parser.parse_args()
    torch.set_num_threads(2)
    jobs = max(1, (os.cpu_count() or 2) // 2)
    runs = list(product(LEARNING_RATES, SEEDS, MIXERS))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda r: run(r[2], r[0], r[1], Path(folder)), runs))
    about = {"processor": processor("cpu"), "commit": commit(), "torch": torch.__version__}
    write(args.csv, [row | about for row in rows])


if __name__ == "__main__":
    main()
