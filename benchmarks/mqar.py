"""Runs a sweep of associative recall and stores its results: `python -m benchmarks.mqar mqar:anchors --csv FILE`.

The rows are those of `sympow mqar`, each with the commit and the processor. A run whose rows are in the file is not
repeated, so the same command continues a sweep that was stopped, also by Ctrl-C or SIGTERM. The anchors must reach 99%.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from statistics import median
from typing import Any

from benchmarks.common.measure import csv_file, measured
from sympow.recall import RecallConfig, Sweep, run_sweep, summary
from sympow.recall.results import Row, chosen, group, read_rows
from sympow.recall.sweep import EXECUTORS, RESULTS, collect, keep
from sympow.recipes import load_sweep
from sympow.training import override

LEAST = {"mqar-anchors": 0.99}  # median test accuracy over the seeds, of every model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mqar", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="such as mqar:anchors")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="of every run, such as epochs=4")
    parser.add_argument("--only", metavar="key=value", action="append", default=[],
                        help="only runs with this value, such as width=128; several must all hold")  # fmt: skip
    parser.add_argument("--best-rate", action="store_true",
                        help="other seeds than the first only at the best rate of the first")  # fmt: skip
    parser.add_argument("--csv", type=csv_file, required=True, help="file of the rows, gone on with if it has some")
    parser.add_argument("--out", type=Path, help="folder of the sweep (default: runs/ and its name)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--executor", choices=EXECUTORS, default="process", help="(default: process)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch every step anew")
    args = parser.parse_intermixed_args()
    sweep = load_sweep(args.recipe).override(args.overrides)
    folder = args.out or Path("runs") / sweep.name
    kept = read_rows(args.csv, texts=("commit",)) if args.csv.is_file() else []
    known = {row["run"] for row in kept}
    strange = sorted(known - {run.id for run in sweep.runs})
    if strange:  # they would be lost: the file gets the rows of the sweep
        parser.error(f"{args.csv} holds {len(strange)} runs that are not of this sweep, such as {strange[0]}: "
                     "give another file")  # fmt: skip
    keep(kept, folder)
    wanted = [run for run in sweep.runs if override(run, args.only) == run]
    if not wanted:
        parser.error(f"no run of {sweep.name} has {' and '.join(args.only)}")

    def part(runs: list[RecallConfig]) -> Sweep:
        """Returns the sweep of some runs, and of those whose rows are in the file."""
        ours = {run.id for run in runs} | known
        return Sweep(sweep.name, tuple(run for run in sweep.runs if run.id in ours))

    def train(runs: list[RecallConfig]) -> list[dict[str, Any]]:
        return run_sweep(
            part(runs),
            folder,
            executor=args.executor,
            jobs=args.jobs,
            device=args.device,
            compiled=not args.no_compile,
            cuda_graphs=not args.no_cuda_graphs,
            about=measured(args.device),
        )

    try:
        if args.best_rate:
            first = [run for run in wanted if run.seed == min(each.seed for each in wanted)]
            with suppress(RuntimeError):  # of a run that failed; it is tried again below, after the others
                train(first)
            wanted = first + at_best_rate(wanted, collect(part(first), folder))
        rows = train(wanted)
    finally:
        if (folder / RESULTS).is_file():
            copyfile(folder / RESULTS, args.csv)
    print(summary(rows))
    least = LEAST.get(sweep.name, 0.0)
    missed = [label for (label,), same in group(rows, "label").items()
              if median(row["test_accuracy"] for row in same) < least]  # fmt: skip
    if missed:
        print(f"below {least:.0%}: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def at_best_rate(runs: Sequence[RecallConfig], rows: Sequence[Row]) -> list[RecallConfig]:
    """Returns the runs that differ in the seed alone from a run whose learning rate is the best of its setting.

    Args:
        runs: the runs of all seeds.
        rows: the rows of the first seed.
    """
    seed = min(run.seed for run in runs)
    best = {row["run"] for row in chosen([row for row in rows if row["seed"] == seed])}
    return [run for run in runs if run.seed != seed and replace(run, seed=seed).id in best]


if __name__ == "__main__":
    sys.exit(main())
