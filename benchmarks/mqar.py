"""Runs a sweep of associative recall and stores its results: `python -m benchmarks.mqar mqar:anchors --csv FILE`.

The rows are those of `sympow mqar`, each with the commit and the processor. A run whose rows are in the file is not
repeated, so the same command continues a sweep that was stopped. The anchors must reach 99%.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shutil import copyfile
from statistics import median

from benchmarks.measure import measured
from sympow.recall import run_sweep, summary
from sympow.recall.results import group, read_rows
from sympow.recall.sweep import EXECUTORS, RESULTS, keep
from sympow.recipes import load_sweep

LEAST = {"mqar-anchors": 0.99}  # median test accuracy over the seeds, of every model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mqar", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="such as mqar:anchors")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="of every run, such as epochs=4")
    parser.add_argument("--csv", type=Path, required=True, help="file of the rows, gone on with if it has some")
    parser.add_argument("--out", type=Path, help="folder of the sweep (default: runs/ and its name)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--executor", choices=EXECUTORS, default="process", help="(default: process)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch every step anew")
    args = parser.parse_intermixed_args()
    sweep = load_sweep(args.recipe).override(args.overrides)
    folder = args.out or Path("runs") / sweep.name
    if args.csv.is_file():
        keep(read_rows(args.csv, texts=("commit",)), folder)
    try:
        rows = run_sweep(
            sweep,
            folder,
            executor=args.executor,
            jobs=args.jobs,
            device=args.device,
            compiled=not args.no_compile,
            cuda_graphs=not args.no_cuda_graphs,
            about=measured(args.device),
        )
    finally:
        if (folder / RESULTS).is_file():
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            copyfile(folder / RESULTS, args.csv)
    print(summary(rows))
    least = LEAST.get(sweep.name, 0.0)
    missed = [label for (label,), same in group(rows, "label").items()
              if median(row["test_accuracy"] for row in same) < least]  # fmt: skip
    if missed:
        print(f"below {least:.0%}: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
