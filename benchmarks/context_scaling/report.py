"""Writes the report from the committed tables: tables, figures, verdicts, numbers within sentences, and bars.csv.

In the page they stand between `<!-- KIND: NAME -->` and `<!-- end -->`, KIND one of those of `Writer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.context_scaling import figures, tables, verdicts
from benchmarks.context_scaling.found import Found, pick, runs_of
from benchmarks.context_scaling.results import Row
from benchmarks.context_scaling.studies import STUDIES
from benchmarks.prose import wrapped
from sympow.recall import write_results

BARS = "bars.csv"
# What bars.csv calls the variants. "power_large" is that of p > 2 with at most 10 times the state of p = 2, and
# "hybrid_softmax" the better one of two with one softmax layer in six.
BAR_VARIANTS = {"softmax": "softmax", "power": "power_p2", "power_p4_k24": "power_p4_k24",
                "power_p4_k32": "power_large", "power4": "power4", "hybrid_softmax": "hybrid_softmax_and_power",
                "hybrid_softmax_window": "hybrid_softmax", "hybrid_window": "hybrid_window"}  # fmt: skip

TABLES: dict[str, Callable[[Found], str]] = {
    **{name: partial(tables.comparison, study=name) for name in STUDIES if "rates" not in name},
    **{name: partial(tables.rates, study=name) for name in STUDIES if "rates" in name},
    "budgets": partial(tables.budgets, study="by_context"),
    "beyond_positions": tables.beyond,
    "overview": tables.overview,
    "speed": tables.speeds,
}
FIGURES: dict[str, Callable[[Found], Any]] = {
    "bars_1024": partial(figures.differences, study="bars_1024"),
    "bars_4096": partial(figures.differences, study="bars_4096"),
    "bar_65536": partial(figures.by_cost, study="bar_65536"),
    "tokens_4096": partial(figures.by_number, study="tokens_4096", field="tokens", ratio=True),
    "by_context": partial(figures.by_number, study="by_context", field="context"),
    "rates_1024": partial(figures.learning_rates, study="rates_1024"),
    "rates": partial(figures.learning_rates, study="rates"),
    "controls": partial(figures.differences, study="controls"),
    "conformal": partial(figures.by_number, study="conformal", field="context", ratio=True),
    "ablations": partial(figures.differences, study="ablations"),
    "powers": partial(figures.differences, study="powers"),
    "scra_curves": partial(figures.checkpoints, study="scra_curves"),
    "scra_window": partial(figures.differences, study="scra_window"),
    "scra_axes": partial(figures.axes_of_scale, study="scra_axes"),
    "scra_bodies": partial(figures.differences, study="scra_bodies"),
    "scra_ratio": partial(figures.by_cost, study="scra_ratio"),
    "scra_latency": partial(figures.by_cost, study="scra_latency"),
    "beyond": partial(figures.by_position, study="beyond"),
}


class Writer:
    """Gives what stands at each mark of the page."""

    def __init__(self, found: Found, figures_beside: str):
        self._found, self._beside = found, figures_beside

    def table(self, name: str) -> str:
        return TABLES[name](self._found) if name in TABLES else _unknown("table", name, list(TABLES))

    def figure(self, name: str) -> str:
        if name not in FIGURES:
            return _unknown("figure", name, list(FIGURES))
        if FIGURES[name](self._found) is None:
            return f"(Figure: {tables.MISSING}.)"
        return f"![{STUDIES[name].question}]({self._beside}/{name}.png)"

    def verdict(self, name: str) -> str:
        if name == "page":
            return wrapped(" ".join(verdicts.page(self._found)))
        if name not in verdicts.VERDICTS:
            return _unknown("verdict", name, list(verdicts.VERDICTS))
        return wrapped("\n".join(f"- {sentence}" for sentence in verdicts.VERDICTS[name](self._found)))

    def command(self, name: str) -> str:
        return f"`python -m benchmarks.context_scaling run --studies {name} --corpus FOLDER --out OUT`"

    def number(self, name: str) -> str:
        """Of STUDY/VARIANT/COLUMN: a mean over seeds, or over the baseline's where the column ends in "_ratio"."""
        study, variant, column = name.split("/")
        run = pick(study, variant)
        if column.endswith("_ratio"):
            value = self._found.ratio(run, pick(study, STUDIES[study].baseline), column.removesuffix("_ratio"))
        else:
            value = self._found.mean(run, column)
        return tables.MISSING if value is None else value.text()


def filled(text: str, writer: Writer) -> str:
    """Returns the page with everything between marks written anew."""

    def written(match: re.Match) -> str:
        kind, name = match[1], match[2]
        content = getattr(writer, kind)(name)
        gap = "" if kind == "number" else "\n"
        return f"<!-- {kind}: {name} -->{gap}{content}{gap}<!-- end -->"

    return re.sub(
        r"<!-- (table|figure|verdict|command|number): (\S+) -->.*?<!-- end -->", written, text, flags=re.DOTALL
    )


def draw(found: Found, folder: Path) -> list[Path]:
    """Draws every figure for which there are rows into a folder; returns their files."""
    files = []
    for name, make in FIGURES.items():
        figure = make(found)
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1])
    return files


def bars(found: Found) -> list[Row]:
    """Returns the rows of bars.csv: a run of the bars each, with its speed alone on a GPU where that was timed."""
    studies = ("bars_1024", "bars_4096", "bar_65536", "tokens_4096")
    runs = dict.fromkeys(run for study in studies for run in runs_of(study))
    return [
        {"variant": BAR_VARIANTS[run.variant], "context": run.context, "seed": seed, "tokens": run.tokens,
         "held_out_loss": row["held_out_loss"], "gain": row["gain"], "tokens_per_second": found.speed(run)}
        for run in runs for seed, row in sorted(found.rows(run).items())
    ]  # fmt: skip


def write(folder: Path, page: Path) -> list[Path]:
    """Writes page, figures and bars.csv; returns the figures' files."""
    found, beside = Found(folder), page.with_suffix("")
    page.write_text(filled(page.read_text(encoding="utf-8"), Writer(found, beside.name)), encoding="utf-8")
    rows = bars(found)
    if rows:
        write_results(folder / BARS, rows)
    return draw(found, beside)


def out_of_date(folder: Path, page: Path) -> list[str]:
    """Returns what does not follow from the tables: the page, bars.csv, and figures that are missing or should not be
    there."""
    found, beside = Found(folder), page.with_suffix("")
    late = []
    text = page.read_text(encoding="utf-8")
    if filled(text, Writer(found, beside.name)) != text:
        late.append(page.name)
    rows = bars(found)
    file = folder / BARS
    if rows and (not file.is_file() or _cells(rows) != file.read_text(encoding="utf-8")):
        late.append(BARS)
    drawn = {name for name, make in FIGURES.items() if make(found) is not None}
    there = {each.stem for each in beside.glob("*.png")}
    return late + [f"{name}.png" for name in sorted(drawn ^ there)]


def _cells(rows: Sequence[Row]) -> str:
    lines = [
        ",".join(rows[0]),
        *(",".join("" if value is None else str(value) for value in row.values()) for row in rows),
    ]
    return "".join(f"{line}\n" for line in lines)


def _unknown(kind: str, name: str, known: list[str]) -> str:
    raise ValueError(f"the page asks for the {kind} {name!r}; there are {', '.join(known)}")
