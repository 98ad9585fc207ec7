"""Draws the figures of the page of converted models: gaps during distillation, losses by position, and passkeys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sympow.evaluation.passkey import PasskeyRow, plot_passkeys
from sympow.evaluation.plot import COLOURS, MARKERS

Row = dict[str, Any]
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
    found = [[row[name] for name in PasskeyRow._fields] for row in rows if row["kind"] == "depths"]
    return [PasskeyRow(model, int(context), float(depth), int(texts), float(accuracy), float(digits))
            for model, context, depth, texts, accuracy, digits in found]  # fmt: skip


def _gap(rows: Sequence[Row]) -> Figure:
    """Draws the held-out gap against the tokens read, with a curve for each student."""
    figure, axis = _panel()
    stages = [row for row in rows if row["kind"] == "stage"]
    for name, style in _styles(rows).items():
        own = [row for row in stages if row["run"] == name]
        axis.plot([row["tokens"] / 1e6 for row in own], [row["gap"] for row in own], label=name, **style)
    axis.axhline(0, color="0.4", linestyle="dotted", label="teacher")
    axis.set_yscale("symlog", linthresh=0.1)
    ticks = [-0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlabel("tokens read, million")
    axis.set_ylabel("held-out loss less the teacher's, nats")
    axis.set_title("The gap to the teacher while the students learn, one run each")
    axis.legend()
    return figure


def _positions(rows: Sequence[Row]) -> Figure:
    """Draws the held-out loss against the position in a row, with a panel for each number of held-out rows."""
    found = [row for row in rows if row["kind"] == "positions"]
    counts = sorted({row["rows"] for row in found}, reverse=True)
    figure = Figure(figsize=(5 * max(1, len(counts)), 4.2), dpi=150, layout="constrained")
    for n, count in enumerate(counts):
        axis = figure.add_subplot(1, len(counts), n + 1)
        axis.grid(color="0.9")
        _curves(axis, [row for row in found if row["rows"] == count], _styles(rows))
        axis.set_title(f"{count} held-out rows, one run", fontsize=10)
        axis.tick_params("x", rotation=30)
    return figure


def _curves(axis: Any, rows: Sequence[Row], styles: dict[str, dict[str, str]]) -> None:
    """Draws a curve for each student, and one for the teacher."""
    curves = {row["run"] if row["model"] == "converted" else "teacher": row for row in rows}
    ends: list[int] = []
    styles = styles | {"teacher": {"color": "0.4", "linestyle": "dotted"}}
    for name, row in sorted(curves.items(), key=lambda item: item[0] == "teacher"):
        bins = [each for each in row["bins"] if each["end"] > FIRST]
        ends = [each["end"] for each in bins]
        axis.plot(ends, [each["loss"] for each in bins], label=name, **styles[name])
    axis.set_xscale("log", base=2)
    axis.set_xticks(ends, [f"{end:,}" for end in ends])
    axis.minorticks_off()
    axis.set_xlabel("position in the row, up to")
    axis.set_ylabel("held-out loss, nats a token")
    axis.legend()


def _panel() -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    axis = figure.add_subplot()
    axis.grid(color="0.9")
    return figure, axis


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Returns how each student is drawn, by its name."""
    names = dict.fromkeys(row["run"] for row in rows if row["kind"] == "stage")
    return {name: {"color": COLOURS[n], "marker": MARKERS[n]} for n, name in enumerate(names)}
