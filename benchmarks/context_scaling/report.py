"""Writes the report from the committed tables: summary, sections with figures, missing runs, and bars.csv.

In the page each part stands between `<!-- part: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.context_scaling import figures, sections, verdicts
from benchmarks.context_scaling.found import Found, runs_of
from benchmarks.context_scaling.results import Row, version
from benchmarks.context_scaling.sections import SECTIONS, measured
from benchmarks.prose import wrapped
from sympow.recall import write_results

BARS = "bars.csv"
# What bars.csv calls the variants. "power_large" has p > 2 and at most 10 times the state of p = 2. Of the three
# variants with one softmax layer in six, "hybrid_softmax" is the one with windows.
BAR_VARIANTS = {"softmax": "softmax", "power": "power_p2", "power_p4_k24": "power_p4_k24",
                "power_p4_k32": "power_large", "power4": "power4", "hybrid_softmax": "hybrid_softmax_and_power",
                "hybrid_softmax_gate": "hybrid_gated_softmax_and_power",
                "hybrid_softmax_window": "hybrid_softmax", "hybrid_window": "hybrid_window"}  # fmt: skip


def _figure(study: str, found: Found) -> Any:
    return SECTIONS[study].figure(found, study=study)


FIGURES: dict[str, Callable[[Found], Any]] = {
    "summary": figures.summary,
    **{name: partial(_figure, name) for name in SECTIONS},
}


def filled(text: str, found: Found, figures_beside: str) -> str:
    """Returns the page with everything between marks written anew."""
    parts = {"summary": partial(_summary, found, figures_beside), "missing": partial(sections.missing, found),
             "results": partial(sections.results, found, figures_beside)}  # fmt: skip

    def written(match: re.Match) -> str:
        name = match[1]
        if name not in parts:
            raise ValueError(f"the page asks for the part {name!r}; there are {', '.join(parts)}")
        return f"<!-- part: {name} -->\n{wrapped(parts[name]())}\n<!-- end -->"

    return re.sub(r"<!-- part: (\S+) -->.*?<!-- end -->", written, text, flags=re.DOTALL)


def shown(found: Found) -> dict[str, Any]:
    """Returns the figures that the page shows, by their names."""
    drawn = {name: make(found) for name, make in FIGURES.items() if name == "summary" or measured(found, name)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def draw(found: Found, folder: Path) -> list[Path]:
    """Draws every figure that the page shows into a folder; returns their files."""
    files = []
    for name, figure in shown(found).items():
        folder.mkdir(parents=True, exist_ok=True)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1])
    return files


def bars(found: Found) -> list[Row]:
    """Returns the rows of bars.csv: a run of the bars each, with its speed alone on a GPU where that was timed.

    The version of the corpus is named without its number of rows.
    """
    studies = ("bars_1024", "bars_4096", "bar_65536", "tokens_4096")
    runs = dict.fromkeys(run for study in studies for run in runs_of(study))
    return [
        {"variant": BAR_VARIANTS[run.variant], "context": run.context,
         "corpus": version(corpus), "seed": seed, "tokens": run.tokens,
         "held_out_loss": row["held_out_loss"], "gain": row["gain"], "tokens_per_second": found.speed(run)}
        for run in runs for (corpus, seed), row in found.rows(run).items()
    ]  # fmt: skip


def write(folder: Path, page: Path) -> list[Path]:
    """Writes page, figures and bars.csv; returns the figures' files."""
    found, beside = Found(folder), page.with_suffix("")
    page.write_text(filled(page.read_text(encoding="utf-8"), found, beside.name), encoding="utf-8")
    rows = bars(found)
    if rows:
        write_results(folder / BARS, rows)
    return draw(found, beside)


def out_of_date(folder: Path, page: Path) -> list[str]:
    """Returns the files that differ from the tables: the page, bars.csv, and figures that are missing or not needed."""
    found, beside = Found(folder), page.with_suffix("")
    late = []
    text = page.read_text(encoding="utf-8")
    if filled(text, found, beside.name) != text:
        late.append(page.name)
    rows = bars(found)
    file = folder / BARS
    if rows and (not file.is_file() or _cells(rows) != file.read_text(encoding="utf-8")):
        late.append(BARS)
    there = {each.stem for each in beside.glob("*.png")}
    return late + [f"{name}.png" for name in sorted(shown(found).keys() ^ there)]


def _cells(rows: Sequence[Row]) -> str:
    lines = [
        ",".join(rows[0]),
        *(",".join("" if value is None else str(value) for value in row.values()) for row in rows),
    ]
    return "".join(f"{line}\n" for line in lines)


def _summary(found: Found, figures_beside: str) -> str:
    listed = "\n".join(f"- {sentence}" for sentence in verdicts.page(found))
    picture = f"\n\n![Held-out loss over that of softmax attention]({figures_beside}/summary.png)"
    return listed + (picture if figures.summary(found) is not None else "")
