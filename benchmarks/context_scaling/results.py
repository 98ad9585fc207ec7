"""The three tables of results, and the learning rate that each setting is judged at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sympow.recall import write_results
from sympow.recall.results import group, read_rows

Row = dict[str, Any]
Setting = tuple[str, int]  # variant and training context


@dataclass(frozen=True)
class Results:
    """runs: a row a run; bins: its losses by position; curves: its losses along training."""

    runs: list[Row]
    bins: list[Row]
    curves: list[Row]


def collect(records: Path, folder: Path) -> None:
    """Writes the tables of all records of a folder."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in records.glob("*.json")]
    found.sort(key=lambda record: tuple(record["run"].values()))
    runs = [{**record["run"], "status": record["status"], **record.get("row", {}), **record.get("about", {})}
            for record in found]  # fmt: skip
    bins, curves = (
        [{**record["run"], **_rounded(line)} for record in found for line in record.get(name, [])]
        for name in ("bins", "curve")
    )
    for name, rows in (("runs", runs), ("bins", bins), ("curves", curves)):
        write_results(folder / f"{name}.csv", rows)


def read(folder: Path) -> Results:
    """The tables that `collect` wrote into a folder. ValueError where one is missing."""
    for name in ("runs", "bins", "curves"):
        if not (folder / f"{name}.csv").is_file():
            raise ValueError(f"{folder} holds no results: it has no {name}.csv")
    return Results(*(read_rows(folder / f"{name}.csv") for name in ("runs", "bins", "curves")))


def best(runs: list[Row]) -> dict[Setting, float]:
    """The learning rate of each setting whose finished runs, all seeds together, have the lowest held-out loss."""
    found = {}
    finished = [run for run in runs if run["status"] == "done"]
    for setting, rows in group(finished, "variant", "context").items():
        rates = group(rows, "learning_rate")
        ((found[setting],), _) = min(rates.items(), key=lambda item: mean(row["held_out_loss"] for row in item[1]))
    return found


def at_best(results: Results) -> Results:
    """What finished, at the best learning rate of each setting."""
    rates = best(results.runs)
    runs = [run for run in results.runs if run["status"] == "done"]
    return Results(*(
        [row for row in rows if row["learning_rate"] == rates.get((row["variant"], row["context"]))]
        for rows in (runs, results.bins, results.curves)
    ))  # fmt: skip


def _rounded(line: Row) -> Row:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in line.items()}
