"""AR hits of language models that differ in their mixers: `python -m benchmarks.ar_hits COMMAND`.

`exact` compares the counting with brute force and times it. `sources` counts hits by the source of the text. `run`
trains the unfinished recipes of sympow/recipes/hybrids.py and measures each in the same process. Several workers run at
the same time. `report` writes docs/results/ar-hits.md and its figures from the tables of all.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.ar_hits import exact, report, sources
from benchmarks.ar_hits.work import CONTROLS, OTHERS, RATE, RECIPES, Job, Trainer, guess, kind
from benchmarks.common.measure import known, refuses
from benchmarks.tables import RESULTS, ROOT
from sympow.data import load_tokenizer
from sympow.recall import write_results
from sympow.recipes.scaling import VOCAB_SIZE
from sympow.sweeps import Estimates, run_jobs
from sympow.training.devices import resolve_device

COMMITTED = RESULTS / "ar_hits"
PAGE = ROOT / "docs" / "results" / "ar-hits.md"
TABLES = ("run", "slices", "curves")
CONTEXT = 1023  # predictions in a row: windows of 1,024 tokens fill the documents


@refuses
def main() -> int:
    options = _parser().parse_args()
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ar_hits", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    compare = commands.add_parser("exact", help="compare with brute force, and time it")
    compare.set_defaults(command=_exact)
    compare.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    compare.add_argument("--tokens", type=int, default=1_000_000, help="to compare (default: 1000000)")
    compare.add_argument("--timed-tokens", type=int, default=10_000_000, help="to time (default: 10000000)")
    compare.add_argument("--frequent", type=int, default=50, help="of the comparison (default: 50)")
    compare.add_argument("--out", type=Path, default=COMMITTED, help="folder of exact.csv and timed.csv")

    redundancy = commands.add_parser("sources", help="count repeated bigrams by the source of the text")
    redundancy.set_defaults(command=_sources)
    redundancy.add_argument("--corpus", type=Path, required=True, help="folder of a corpus, with its tokenizer")
    redundancy.add_argument("--most", type=int, default=20, help="documents of a source (default: 20)")
    redundancy.add_argument("--out", type=Path, default=COMMITTED, help="folder of sources.csv")

    run = commands.add_parser("run", help="train and measure what is missing")
    run.set_defaults(command=_run)
    run.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    run.add_argument("--out", type=Path, required=True, help="folder of the tables, gone on with if it has some")
    run.add_argument("--rows", type=int, help="train on so many documents, evenly spaced (default: all)")
    run.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help=f"of the corpus (default: {VOCAB_SIZE})")
    run.add_argument("--recipes", required=True, help="names with commas between, controls, tables")
    run.add_argument("--seeds", type=int, default=3, help="(default: 3)")
    run.add_argument("--rates", default=str(RATE), help=f"learning rates; the page has the best (default: {RATE})")
    run.add_argument("--best-rate", action="store_true",
                     help="other seeds than 0 only at the learning rate that is best for seed 0")  # fmt: skip
    run.add_argument("changes", metavar="key=value", nargs="*", help="of every run, such as training.optimizer=muon")
    run.add_argument("--workers", type=int, default=1, help="processes, dealt out over the GPUs (default: 1)")
    run.add_argument("--minutes", type=float, default=math.inf, help="give up what is not done after these")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--toy", action="store_true", help="runs of a second, to try the program out")

    page = commands.add_parser("report", help="write the page and its figures")
    page.set_defaults(command=_report)
    page.add_argument("--results", type=Path, default=COMMITTED,
                      help="folder with a folder for each corpus (default: the committed)")  # fmt: skip
    page.add_argument("--page", type=Path, default=PAGE, help="file of the text; figures go to a folder beside it")
    return parser


def _exact(options: argparse.Namespace) -> int:
    train = exact.read_documents(options.corpus / "train.zarr", VOCAB_SIZE, options.timed_tokens)
    held_out = exact.read_documents(options.corpus / "heldout.zarr", VOCAB_SIZE, options.tokens + 65_536)
    row = exact.compare(train, held_out, VOCAB_SIZE, options.tokens, CONTEXT, options.frequent)
    timed = exact.clock(train, train, VOCAB_SIZE, CONTEXT)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, each in (("exact", row), ("timed", timed)):
        write_results(options.out / f"{name}.csv", [each])
        print(name, *(f"{key}={value}" for key, value in each.items()))
    wrong = [name for name in ("wrong_counts", "largest_difference_tokens") if row[name]]
    return int(bool(wrong) or row["slices_less_whole_nats"] > 1e-6)


def _sources(options: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(options.corpus)
    rows = sources.count(options.corpus, tokenizer, tokenizer.vocab_size, options.most)
    options.out.mkdir(parents=True, exist_ok=True)
    write_results(options.out / "sources.csv", rows)
    print(report.sources_table({"sources": rows}))
    return 0


def _run(options: argparse.Namespace) -> int:
    groups = {"controls": CONTROLS, "tables": OTHERS}
    recipes = [name for each in options.recipes.split(",") for name in groups.get(each, (each,))]
    unknown = [name for name in recipes if name not in RECIPES + CONTROLS + OTHERS]
    if unknown:
        raise ValueError(f"a recipe is one of {', '.join(RECIPES + CONTROLS + OTHERS)}; got {unknown[0]!r}")
    rates = [float(rate) for rate in options.rates.split(",")]
    changes = tuple(options.changes)
    for name in recipes:  # what no run can be made of is refused here, in one line
        Job(name, 0, rates[0]).config(options.toy, options.corpus, options.device, options.vocab_size, changes)
    tables = {name: known(options.out / f"{name}.csv") for name in TABLES}
    for row in tables["run"]:
        if (row["changes"] or "") != " ".join(changes):
            raise ValueError(f"runs in {options.out} have the changes {row['changes'] or 'none'}; "
                             f"got {' '.join(changes) or 'none'}: choose another --out")  # fmt: skip
    wanted = [Job(name, seed, rate) for seed in range(options.seeds) for rate in rates for name in recipes]
    device = resolve_device(options.device).type
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.workers)))
    trainer = Trainer(options.corpus, options.vocab_size, device, options.toy, changes, options.rows)
    deadline = time.time() + 60 * options.minutes
    with suppress(KeyboardInterrupt):  # Ctrl-C and SIGTERM stop the jobs that are running
        if options.best_rate:
            _train([job for job in wanted if job.seed == 0], trainer, tables, options, deadline)
            first = {name: [row for row in rows if row["seed"] == 0] for name, rows in tables.items()}
            best = {row["recipe"]: row["learning_rate"] for row in report.at_best_rates(first)["run"]}
            wanted = [job for job in wanted if job.seed and job.learning_rate == best.get(job.recipe)]
        _train(wanted, trainer, tables, options, deadline)
    return 0


def _train(
    wanted: list[Job], trainer: Trainer, tables: report.Tables, options: argparse.Namespace, deadline: float
) -> None:
    """Does the jobs that have no rows in the tables, adds their rows, and writes the tables after every job."""
    finished = {job_of(row) for row in tables["run"]}
    left = [job for job in wanted if job not in finished]
    print(f"{len(left)} of {len(wanted)} runs to do", flush=True)
    if not left:
        return
    estimates = Estimates(guess, kind, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    jobs = {f"{job.recipe}-seed{job.seed}-rate{job.learning_rate:g}": job for job in left}
    folder = options.out / "jobs" / ("toy" if options.toy else "full")
    minutes = (deadline - began) / 60
    try:
        for job, result, said, wait in run_jobs(
            jobs, trainer, folder, workers=options.workers, minutes=minutes, estimates=estimates
        ):
            if said is None:
                tables["run"].append(result["run"])
                tables["slices"] += result["slices"]
                tables["curves"] += result["curves"]
                for name in reversed(TABLES):  # the table of runs last, so that no run lacks its losses
                    write_results(options.out / f"{name}.csv", tables[name])
                row = result["run"]
                said = f"loss {row['held_out_loss']:.4f}, {row['tokens_per_second']:,} tokens/s, {row['seconds']} s"
            print(f"[{time.time() - began:.0f} s] {_name(job)}: {said}; about {wait / 60:.1f} min left", flush=True)
    finally:
        finished = {job_of(row) for row in tables["run"]}
        print("".join(f"not finished: {_name(job)}\n" for job in left if job not in finished), end="")


def _report(options: argparse.Namespace) -> int:
    corpora, compared = read_results(options.results)
    report.write(corpora, compared, options.page)
    for file in report.draw(corpora, options.page.with_suffix("")):
        print(file)
    return 0


def read_results(folder: Path) -> tuple[dict[str, report.Tables], report.Tables]:
    """Reads the tables of the runs on every corpus, at the best learning rate of every recipe, and those of the
    comparison with brute force."""
    corpora = {file.parent.name: report.at_best_rates({name: known(file.parent / f"{name}.csv") for name in TABLES})
               for file in sorted(folder.glob("*/run.csv"))}  # fmt: skip
    return corpora, {name: known(folder / f"{name}.csv") for name in ("exact", "timed", "sources")}


def job_of(row: dict[str, Any]) -> Job:
    """Returns the job of a row of the table of runs."""
    return Job(row["recipe"], row["seed"], row["learning_rate"])


def _name(job: Job) -> str:
    return f"{job.recipe}, seed {job.seed}, rate {job.learning_rate:g}"


if __name__ == "__main__":
    sys.exit(main())
