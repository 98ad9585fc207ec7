"""The tables of results: a row a run (runs.csv), and its losses by position along training (positions.csv)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.context_scaling.grid import Run
from benchmarks.context_scaling.work import DONE, NOT_FINITE
from sympow.recall import write_results
from sympow.recall.results import read_rows

Row = dict[str, Any]

FINISHED = (DONE, NOT_FINITE)  # statuses of runs that are not repeated
RUNS, POSITIONS = "runs.csv", "positions.csv"
KEY = tuple(each.name for each in fields(Run))
COLUMNS = (*KEY, "scale", "status", "held_out_loss", "gain", "best_loss", "best_context", "parameters", "steps",
           "flops", "tokens_per_second", "seconds", "peak_bytes", "compiled", "error", "processor", "torch", "commit",
           "code", "corpus")  # fmt: skip


@dataclass
class Results:
    """Holds the rows of both tables; `positions` has rows for runs in `runs` only."""

    runs: list[Row] = field(default_factory=list)
    positions: list[Row] = field(default_factory=list)

    def add(self, row: Row, positions: Iterable[Row]) -> None:
        """Puts a run's record in place of an earlier one of the same run on the same corpus."""
        run, corpus = key_of(row)
        self.runs = [other for other in self.runs if key_of(other) != (run, corpus)] + [row]
        kept = [other for other in self.positions if (other["run"], other["corpus"]) != (run.name, corpus)]
        self.positions = kept + list(positions)

    def finished(self, corpus: str) -> set[Run]:
        """Returns the runs on a corpus that are not to be repeated."""
        return {run_of(row) for row in self.runs if row["status"] in FINISHED and row["corpus"] == corpus}

    def write(self, folder: Path) -> None:
        """Writes both tables, each whole or not at all; that of runs last, so that none lacks its losses."""
        folder.mkdir(parents=True, exist_ok=True)
        bins = sorted({name for row in self.positions for name in row if name.isdecimal()}, key=int)
        columns = ("run", "corpus", "step", "evaluated_context", "documents", "held_out_loss", *bins)
        write_results(folder / POSITIONS, [{name: row.get(name) for name in columns} for row in self.positions])
        write_results(folder / RUNS, [{name: row.get(name) for name in COLUMNS} for row in self.runs])


def run_of(row: Row) -> Run:
    """Returns the run of a row of runs.csv."""
    return Run(**{name: row[name] for name in KEY})


def key_of(row: Row) -> tuple[Run, str]:
    """Returns the run of a row and its corpus, a key that occurs once in the tables."""
    return run_of(row), row["corpus"]


def version(corpus: str) -> str:
    """Returns the name of a corpus without its number of rows."""
    return corpus.rpartition(" ")[2]


def read(folder: Path) -> Results:
    """Reads the tables of a folder; empty ones where it has none."""
    if not (folder / RUNS).is_file():
        return Results()
    runs = read_rows(folder / RUNS, texts=("commit", "code", "corpus"))
    names = {(run_of(row).name, row["corpus"]) for row in runs}
    positions = read_rows(folder / POSITIONS, texts=("corpus",))
    positions = [row for row in positions if (row["run"], row["corpus"]) in names]
    return Results(runs, [{name: value for name, value in row.items() if value is not None} for row in positions])


def merge(source: Path, target: Path) -> int:
    """Adds the finished runs of one folder to the tables of another, sorted; returns how many.

    Raises ValueError for a run on a corpus that both have finished, and for runs at another scale than those that the
    target has.
    """
    new, old = read(source), read(target)
    rows = [row for row in new.runs if row["status"] in FINISHED]
    there = {key_of(row) for row in old.runs if row["status"] in FINISHED}
    doubles = sorted(run.name for run, _ in there & {key_of(row) for row in rows})
    if doubles:
        raise ValueError(f"{target} has {len(doubles)} of these runs already, {doubles[0]} for one")
    scales = {row["scale"] for row in [*old.runs, *rows]}
    if len(scales) > 1:
        raise ValueError(f"runs to compare share their scale; {source} and {target} have {sorted(scales)}")
    names = {(run.name, corpus) for run, corpus in map(key_of, rows)}
    positions = [row for row in new.positions if (row["run"], row["corpus"]) in names]
    merged = Results(sorted(old.runs + rows, key=_order), old.positions + positions)
    merged.positions.sort(key=lambda row: (row["run"], row["corpus"], row["step"], row["evaluated_context"]))
    merged.write(target)
    return len(rows)


def _order(row: Row) -> tuple[Any, ...]:
    return tuple((value is not None, value) for value in (row[name] for name in (*KEY, "corpus")))
