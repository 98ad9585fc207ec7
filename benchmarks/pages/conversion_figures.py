"""Draws the figures of the page of converted models: gaps during distillation, losses by position, and passkeys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sympow.evaluation.passkey import PasskeyRow, plot_passkeys
from sympow.evaluation.plot import curve_style

Row = dict[str, Any]
HEIGHT = (1.9, 3.4)  # nats
FIRST = 512  # positions up to here are left out: their losses are high and would flatten the rest


def draw_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws gap.png, positions.png and passkeys.png into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"gap": _gap(rows), "positions": _positions(rows)}
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png")
    plot_passkeys(_depths(rows), folder / "passkeys.png")
    return [folder / f"{name}.png" for name in (*figures, "passkeys")]


def _depths(rows: Sequence[Row]) -> list[PasskeyRow]:
    """Returns the passkeys of the last phase of each model in texts of the lengths that students are measured at."""
    found = [PasskeyRow(*(row[name] for name in PasskeyRow._fields)) for row in rows if row["kind"] == "depths"]
    last = set({row.model.rpartition("-")[0] or row.model: row.model for row in found}.values())
    lengths = {row.context for row in found if row.model != "teacher"}
    return [row for row in found if row.model in last and row.context in lengths]


def _gap(rows: Sequence[Row]) -> Figure:
    """Draws the held-out gap against the tokens read in phase A, with a curve for each student."""
    figure, axis = _panel()
    stages = [row for row in rows if row["kind"] == "stage" and row["run"].endswith("-A")]
    for name, style in _styles(rows).items():
        own = [row for row in stages if _student(row) == name]
        axis.plot([row["tokens"] / 1e6 for row in own], [row["gap"] for row in own], label=name, **style)
    axis.set_yscale("log")
    axis.minorticks_off()
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlabel("tokens read, million")
    axis.set_ylabel("held-out loss less the teacher's, nats")
    axis.set_title("The gap to the teacher in phase A, one run each")
    axis.legend()
    return figure


def _positions(rows: Sequence[Row]) -> Figure:
    """Draws the held-out loss against the position in a row: a panel for each set of rows, a curve for each model."""
    curves = [row for row in rows if row["kind"] == "positions"]
    sets = sorted({row["rows"] for row in curves})
    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    styles = _styles(rows) | {"teacher": {"color": "0.4", "linestyle": "dotted"}}
    for axis, number in zip(figure.subplots(1, len(sets), sharey=True, squeeze=False)[0], sets, strict=True):
        axis.grid(color="0.9")
        own = {_student(row): row for row in curves if row["rows"] == number}
        ends: list[int] = []
        for name, row in sorted(own.items(), key=lambda item: item[0] == "teacher"):
            bins = [each for each in row["bins"] if each["end"] > FIRST]
            ends = [each["end"] for each in bins]
            axis.plot(ends, [each["loss"] for each in bins], label=name, **styles[name])
        axis.set_xscale("log", base=2)
        axis.set_ylim(*HEIGHT)  # the teacher leaves the figure behind the length that it was made for
        axis.set_xticks(ends, [f"{end // 1024}k" for end in ends])
        axis.minorticks_off()
        axis.set_title(f"{number} held-out rows")
        axis.legend()
    figure.supxlabel("position in the row, up to")
    figure.supylabel("held-out loss, nats a token")
    figure.suptitle("Loss by position, one run each")
    return figure


def _student(row: Row) -> str:
    """Returns the name of the student without its phase, or "teacher"."""
    return "teacher" if row.get("model") == "teacher" else row["run"].rpartition("-")[0]


def _panel() -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    axis = figure.add_subplot()
    axis.grid(color="0.9")
    return figure, axis


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Returns how each student is drawn, by its name."""
    names = dict.fromkeys(_student(row) for row in rows if row["kind"] == "stage")
    return {name: curve_style(n) for n, name in enumerate(names)}
