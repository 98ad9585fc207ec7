"""Measures how models use their context: `python -m benchmarks.context_scaling COMMAND`.

`run` trains and measures the unfinished runs of some studies. `speed` times training steps. `merge` adds the results of
both to the committed tables. `report` writes docs/results/context-scaling.md and its figures from these tables.
`subset` makes a small corpus, which is easy to copy. A finished run is a row of a table, so a study can be completed in
several calls.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.context_scaling import cost, report, results, speed
from benchmarks.context_scaling.data import name_of
from benchmarks.context_scaling.grid import DOCUMENT, SCALES, Run
from benchmarks.context_scaling.studies import STUDIES, grid
from benchmarks.context_scaling.subset import write_subset
from benchmarks.context_scaling.work import DONE, FAILED, Trainer
from benchmarks.tables import RESULTS, ROOT
from sympow.data import open_corpus
from sympow.recall import write_results
from sympow.recall.results import read_rows
from sympow.sweeps import Estimates, Finished, Work, run_jobs
from sympow.training.step import resolve_device

T = TypeVar("T")
J = TypeVar("J")
COMMITTED = RESULTS / "context_scaling"
PAGE = ROOT / "docs" / "results" / "context-scaling.md"


def main() -> int:
    options = _parser().parse_args()
    try:
        if getattr(options, "workers", 1) < 1:
            raise ValueError(f"it takes a worker at least; got {options.workers}")
        return options.command(options)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_scaling", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="train and measure what is missing")
    run.set_defaults(command=_run)
    run.add_argument("--studies", help=f"in order of priority, of {', '.join(STUDIES)}")
    run.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    run.add_argument("--seeds", help="instead of the studies' own")
    run.add_argument("--rates", help="learning rates instead of the runs' own")
    run.add_argument("--variants", help="only these of the studies' variants; without studies: what to train")
    help_contexts = "only these contexts of the studies' runs; without studies: what to train at (default: 1024)"
    run.add_argument("--contexts", help=help_contexts)
    run.add_argument("--compile", action="store_true", help="run blocks through torch.compile")

    timed = commands.add_parser("speed", help="time training steps, alone on a GPU")
    timed.set_defaults(command=_speed)
    timed.add_argument("--variants", required=True, help="recipes of sympow/recipes/scaling.py")
    timed.add_argument("--contexts", default="1024,4096,16384,65536", help="(default: %(default)s)")
    timed.add_argument("--modes", default="eager,compiled", help="(default: %(default)s)")

    for command in (run, timed):
        command.add_argument("--out", type=Path, required=True, help="folder of the tables that this command writes")
        command.add_argument("--workers", type=int, default=1, help="processes, dealt out over the GPUs (default: 1)")
        command.add_argument("--minutes", type=float, default=math.inf, help="give up what is not done after these")
        command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        command.add_argument("--scale", choices=SCALES, default="full", help="toy: to try the program out")
        help_known = "folder of tables whose finished rows of this corpus are not repeated (default: the committed)"
        command.add_argument("--known", type=Path, default=COMMITTED, help=help_known)

    merge = commands.add_parser("merge", help="add finished rows to the committed tables")
    merge.set_defaults(command=_merge)
    merge.add_argument("--from", dest="source", type=Path, required=True, help="folder that run or speed wrote")
    merge.add_argument("--into", type=Path, default=COMMITTED, help="(default: the committed)")

    page = commands.add_parser("report", help="write the page, its figures and bars.csv from the committed tables")
    page.set_defaults(command=_report)
    page.add_argument("--results", type=Path, default=COMMITTED, help="(default: the committed)")
    page.add_argument("--page", type=Path, default=PAGE, help="file of the text; figures go to a folder beside it")
    page.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is out of date")

    subset = commands.add_parser("subset", help="make a smaller corpus")
    subset.set_defaults(command=_subset)
    subset.add_argument("--corpus", type=Path, required=True, help="that of `sympow kernel-corpus`")
    subset.add_argument("--out", type=Path, required=True)
    subset.add_argument("--rows", type=int, required=True, help="documents to train on")
    return parser


def _run(options: argparse.Namespace) -> int:
    seeds = options.seeds and _listed("--seeds", int, options.seeds)
    rates = options.rates and _listed("--rates", float, options.rates)
    runs = _chosen(options, seeds, rates)
    device = resolve_device(options.device).type
    data = Run("softmax", DOCUMENT).config(SCALES[options.scale], options.corpus, device).data
    corpus = name_of(open_corpus(data).train)
    found = results.read(options.out)
    finished = found.finished(corpus) | results.read(options.known).finished(corpus)
    left = [run for run in runs if run not in finished]
    print(f"{len(left)} of {len(runs)} runs to do", flush=True)
    if not left:
        return 0
    trainer = Trainer(options.scale, options.corpus, device, options.compile)
    estimates = Estimates(cost.guess, cost.kind, _company(options.workers, device) * (0.5 if options.compile else 1))
    begun, done = time.time(), 0
    for run, result, error, wait in _done({run.name: run for run in left}, trainer, options, estimates):
        failed = {**_fields(run), "scale": options.scale, "status": FAILED, "error": error, "corpus": corpus}
        row, positions = (failed, []) if error else (result["row"], result["positions"])
        found.add(row, positions)
        found.write(options.out)
        done += row["status"] == DONE
        said = f"held-out loss {row['held_out_loss']:.4f}" if row["status"] == DONE else row["error"]
        print(f"[{time.time() - begun:.0f} s] {run.name}: {said}, {row.get('tokens_per_second') or 0:,} tokens/s; "
              f"{done} of {len(left)} done, about {wait / 60:.1f} min left", flush=True)  # fmt: skip
    missing = [run for run in left if run not in found.finished(corpus)]
    print(f"{done} of {len(left)} runs done in {(time.time() - begun) / 60:.1f} min" + "".join(
        f"\nnot finished: {run.name}" for run in missing[:20]), flush=True)  # fmt: skip
    return 0


def _chosen(options: argparse.Namespace, seeds: list[int] | None, rates: list[float] | None) -> list[Run]:
    """Returns the runs of studies, or of given variants (with changes) at the number of tokens of most studies."""
    variants = _listed("--variants", str, options.variants) if options.variants else []
    contexts = _listed("--contexts", int, options.contexts) if options.contexts else []
    if options.studies:
        runs = grid(_listed("--studies", str, options.studies), seeds, rates)
        runs = [run for run in runs if not contexts or run.context in contexts]
        return [run for run in runs if not variants or run.variant in variants]
    if not variants:
        raise ValueError("--studies or --variants is needed: what to train")
    chosen = product(contexts or [1024], seeds or [0], rates or [Run.learning_rate], variants)
    return [Run(variant, context, learning_rate=rate, seed=seed) for context, seed, rate, variant in chosen]


def _speed(options: argparse.Namespace) -> int:
    chosen = product(_listed("--variants", str, options.variants), _listed("--contexts", int, options.contexts),
                     _listed("--modes", str, options.modes))  # fmt: skip
    cases = [speed.Case(*each) for each in chosen]
    rows = _rows(options.out / speed.SPEED)
    known = {tuple(row[name] for name in speed.KEY) for row in rows + _rows(options.known / speed.SPEED)}
    left = [case for case in cases if (case.variant, case.context, case.mode) not in known]
    print(f"{len(left)} of {len(cases)} to time", flush=True)
    device = resolve_device(options.device).type
    if device == "cuda" and options.workers > torch.cuda.device_count():
        raise ValueError(f"of {options.workers} workers some would share one of {torch.cuda.device_count()} GPUs")
    options.out.mkdir(parents=True, exist_ok=True)
    estimates = Estimates(speed.guess, speed.kind, 1)
    timer = speed.Timer(options.scale, device)
    for case, result, error, wait in _done({case.name: case for case in left}, timer, options, estimates):
        if not error:
            rows.append(result)
            write_results(options.out / speed.SPEED, rows)
        said = error or f"{result['tokens_per_second']:,} tokens/s"
        print(f"{case.variant} at {case.context:,}, {case.mode}: {said}; about {wait / 60:.1f} min left", flush=True)
    return 0


def _done(
    jobs: Mapping[str, J], work: Work[J], options: argparse.Namespace, estimates: Estimates[J]
) -> Iterator[Finished[J]]:
    """Yields jobs when they end. Running jobs are stopped when the time is over, and at Ctrl-C and SIGTERM."""
    # A worker's share of the processor; torch reads it as it is imported there.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.workers)))
    folder = options.out / "jobs" / options.scale
    with suppress(KeyboardInterrupt):
        yield from run_jobs(jobs, work, folder, workers=options.workers, minutes=options.minutes, estimates=estimates)


def _company(workers: int, device: str) -> float:
    """Returns the factor by which a run takes longer if several runs share its GPU. It is less than their number."""
    gpus = torch.cuda.device_count() if device == "cuda" else workers
    return max(1.0, 0.7 * workers / gpus)


def _merge(options: argparse.Namespace) -> int:
    if (options.source / results.RUNS).is_file():
        print(f"{results.merge(options.source, options.into)} runs added")
    new, old = _rows(options.source / speed.SPEED), _rows(options.into / speed.SPEED)
    if new:
        keys = [tuple(row[name] for name in speed.KEY) for row in old + new]
        if len(set(keys)) < len(keys):
            raise ValueError(f"{options.into / speed.SPEED} has some of the cases of {options.source} already")
        options.into.mkdir(parents=True, exist_ok=True)
        write_results(options.into / speed.SPEED, sorted(old + new, key=lambda row: [row[name] for name in speed.KEY]))
        print(f"{len(new)} times added")
    return 0


def _subset(options: argparse.Namespace) -> int:
    size = write_subset(options.corpus, options.out, options.rows)
    print(f"{options.out}: {size / 1e6:.1f} MB")
    return 0


def _report(options: argparse.Namespace) -> int:
    if options.check:
        late = report.out_of_date(options.results, options.page)
        print("".join(f"out of date: {name}\n" for name in late), end="")
        return int(bool(late))
    for file in report.write(options.results, options.page):
        print(file)
    return 0


def _rows(file: Path) -> list[dict[str, Any]]:
    return read_rows(file, texts=("commit",)) if file.is_file() else []


def _fields(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in results.KEY}


def _listed(option: str, kind: Callable[[str], T], text: str) -> list[T]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} takes values with commas between; got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
