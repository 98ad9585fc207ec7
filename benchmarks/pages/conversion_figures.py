"""Draws the figures of the page of converted models: gaps during distillation, losses by position, and passkeys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from sympow.evaluation.passkey import PasskeyRow, plot_passkeys
from sympow.evaluation.plot import curve_style, empty_figure, set_grid, shared_legend

Row = dict[str, Any]
HEIGHT = (2.05, 2.6)  # nats
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


def _gap(rows: Sequence[Row]) -> Any:
    """Draws the held-out gap of each student against the tokens read, in phase A and after each phase."""
    figure = empty_figure("figures", (8, 7))
    during, after = figure.subplots(2)
    stages = [row for row in rows if row["kind"] == "stage"]
    losses = {row["run"]: row["converted"] - row["teacher"] for row in rows if row["kind"] == "loss"}
    last = {row["run"]: row["tokens"] / 1e6 for row in stages}  # of each phase
    for name, style in _styles(rows).items():
        own = [row for row in stages if row["run"] == f"{name}-A"]
        during.plot([row["tokens"] / 1e6 for row in own], [row["gap"] for row in own], label=name, **style)
        runs = sorted(run for run in last if run.rpartition("-")[0] == name)
        read = dict(zip(runs, accumulate(last[run] for run in runs), strict=True))
        known = [run for run in runs if run in losses]
        after.plot([read[run] for run in known], [losses[run] for run in known], **style)
    during.set_yscale("log")
    during.minorticks_off()
    after.set_yscale("symlog", linthresh=0.05)
    after.minorticks_off()
    ticks = [0.1, 0.2, 0.5, 1, 2, 5]
    during.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ticks = [-0.05, 0, 0.05, *ticks[:-1]]
    after.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    during.set_title("during phase A, rows of 8,192 tokens", fontsize=10)
    after.set_title("after each phase, rows of 2,048 tokens", fontsize=10)
    after.set_xlabel("tokens read, million")
    set_grid((during, after))
    figure.supylabel("held-out loss less the teacher's, nats", fontsize=10)
    figure.suptitle("The gap to the teacher, one run each", fontsize=10)
    shared_legend(figure, (during,))
    return figure


def _positions(rows: Sequence[Row]) -> Any:
    """Draws the held-out loss against the position in a row: a panel for each set of rows, a curve for each model."""
    curves = [row for row in rows if row["kind"] == "positions"]
    sets = sorted({row["rows"] for row in curves})
    figure = empty_figure("figures", (8, 4.6))
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
        axis.set_title(f"{number} held-out rows; the teacher was made for 8k tokens")
        axis.legend()
    figure.supxlabel("position in the row, up to")
    figure.supylabel("held-out loss, nats a token")
    figure.suptitle("Loss by position, one run each")
    return figure


def _student(row: Row) -> str:
    """Returns the name of the student without its phase, or "teacher"."""
    return "teacher" if row.get("model") == "teacher" else row["run"].rpartition("-")[0]


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Returns how each student is drawn, by its name."""
    names = dict.fromkeys(_student(row) for row in rows if row["kind"] == "stage")
    return {name: curve_style(n) for n, name in enumerate(names)}
