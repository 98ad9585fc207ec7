"""Loss against context: `python -m benchmarks.context_scaling run --corpus FOLDER --out FOLDER --workers N`.

It trains and measures the grid, one process a GPU, and can be killed and given again. `report` draws the figures of its
results and writes the tables of docs/results/context-scaling.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.context_scaling.figures import draw
from benchmarks.context_scaling.grid import RATES, SCALES, grid, parts, settings
from benchmarks.context_scaling.launch import launch
from benchmarks.context_scaling.results import best, read
from benchmarks.context_scaling.tables import tables
from benchmarks.context_scaling.work import FINISHED
from benchmarks.tables import RESULTS, ROOT, with_tables
from sympow.recipes.scaling import STEPS
from sympow.training.loop import resolve_device

T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_scaling", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="train and measure what is missing")
    run.set_defaults(command=_run)
    run.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    run.add_argument("--out", type=Path, required=True, help="folder of the runs and their results")
    run.add_argument("--workers", type=int, default=1, help="processes; GPUs are dealt out to them (default: 1)")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--parts", default="a,d,f", help="those of the report that train (default: %(default)s)")
    run.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default: {STEPS})")
    run.add_argument("--rates", default=",".join(map(str, RATES)),
                     help="learning rates, or best: that of each setting's finished runs, for more seeds "
                          "(default: %(default)s)")  # fmt: skip
    run.add_argument("--seeds", default="0", help="(default: %(default)s)")
    run.add_argument("--scale", choices=SCALES, default="mini", help="toy: to try the program out (default: mini)")
    run.add_argument("--minutes", type=float, default=math.inf, help="after these, interrupt what still runs")
    report = commands.add_parser("report", help="draw figures and write tables")
    report.set_defaults(command=_report)
    report.add_argument("--results", type=Path, default=RESULTS / "context_scaling",
                        help="folder with runs.csv, bins.csv and curves.csv (default: %(default)s)")  # fmt: skip
    report.add_argument("--text", type=Path, default=ROOT / "docs" / "results" / "context-scaling.md",
                        help="file of the tables; figures go to a folder beside it (default: %(default)s)")  # fmt: skip
    options = parser.parse_args()
    try:
        return options.command(options)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    scale, names = SCALES[options.scale], options.parts.split(",")
    for name in names:
        if name not in parts(scale):
            raise ValueError(f"a part that trains is one of {', '.join(parts(scale))}; got {name!r}")
    if options.workers < 1 or options.steps < 2:
        raise ValueError(f"it takes a worker and two steps at least; got {options.workers} and {options.steps}")
    chosen = _rates(options.rates, settings(scale, names), options.out)
    counts = launch(
        grid(chosen, _numbers("--seeds", int, options.seeds)),
        scale,
        options.corpus,
        options.out,
        steps=options.steps,
        device=resolve_device(options.device).type,
        workers=options.workers,
        minutes=options.minutes,
    )
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return int(set(counts) - set(FINISHED) != set())


def _report(options: argparse.Namespace) -> int:
    results = read(options.results)
    writers = tables(results)
    text = with_tables(options.text.read_text(encoding="utf-8"), lambda name: writers[name]())
    options.text.write_text(text, encoding="utf-8")
    for file in draw(results, options.text.with_suffix("")):
        print(file)
    return 0


def _rates(text: str, asked: Sequence[tuple[str, int]], out: Path) -> dict[tuple[str, int], list[float]]:
    """The learning rates of each (variant, context)."""
    if text != "best":
        return dict.fromkeys(asked, _numbers("--rates", float, text))
    found = best(read(out).runs)
    for variant, context in asked:
        if (variant, context) not in found:
            raise ValueError(f"--rates best needs finished runs; {out} has none of {variant} at {context:,}")
    return {setting: [found[setting]] for setting in asked}


def _numbers(option: str, kind: Callable[[str], T], text: str) -> list[T]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas between; got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
