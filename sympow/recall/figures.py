"""Figures of recall from rows of results. They show the learning rates that validation chose, unless they show all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from math import ceil, floor, log2, nan
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import Any

from sympow.evaluation import plot
from sympow.files import naming
from sympow.recall.results import Row, chosen, group

SOLVED = 0.9  # a number of pairs counts as recalled from this accuracy on
GUESSING = "guessing, 1/D"
PANEL = (4, 3.4)  # inches
BESIDE = 4  # points between the marks of two models with equal values
TITLE = 40  # characters of a line of a title, which is as wide as a panel


def draw_figures(rows: Sequence[Row], folder: str | os.PathLike[str]) -> list[Path]:
    """Draws every figure for which the rows have data into `folder`. Returns the paths of the files.

    The figures are:
    - accuracy_width and accuracy_length (Zoology Figure 2), accuracy_pairs (Figure 6), accuracy_heads (Figure 7):
      accuracy against one column. A point is the mean over seeds, a bar extends from the lowest to the highest seed.
      Such a figure is drawn if a model has several values of the column.
    - frontier: accuracy against bytes of state.
    - learning_rates: accuracy against all learning rates, with a dot for each seed.
    - capacity: the largest number of pairs recalled with 90% accuracy, against KiB of state.
    - learning_curves: validation accuracy against epochs, a curve for each seed.

    Figures of an accuracy contain a line for guessing, 1/D, the accuracy of naming a random value of the row.

    Raises ValueError without rows, ImportError without matplotlib.
    """
    if not rows:
        raise ValueError("figures need at least one row of results")
    best = chosen(rows)
    figures: dict[str, Any] = {
        "accuracy_width": _against(best, "width", "width d", ("length", "pairs")),
        "accuracy_length": _against(_without_depth(best), "length", "tokens of a row N", ("layers", "width")),
        "accuracy_pairs": _against(best, "pairs", "key-value pairs D", ("length", "width")),
        "accuracy_heads": _against(best, "heads", "heads", ("length", "pairs", "width")),
        "frontier": _frontier(best),
        "learning_rates": _learning_rates(rows),
        "capacity": _capacity(best),
        "learning_curves": _learning_curves(best),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(Path(folder) / f"{name}.png")
            with naming(written[-1]):
                figure.savefig(written[-1])
    return written


def _against(rows: Sequence[Row], x: str, x_label: str, panels: tuple[str, ...]) -> Any:
    """Draws test accuracy against column `x`, with a panel for each combination of `panels` with several values."""
    rows = _with_models([row for row in rows if row[x] is not None], x, *panels)
    several = {key: same for key, same in sorted(group(rows, *panels).items(), key=_by_size)
               if any(len({row[x] for row in of_model}) > 1 for of_model in group(same, "model").values())}  # fmt: skip
    if x == "length":  # several tasks of one length are no seeds of each other
        several = {key: same for key, same in several.items()
                   if len({row["test"] for row in same}) == len({row[x] for row in same})}  # fmt: skip
    if not several:
        return None
    figure, axes = plot.panels(len(several), PANEL)
    for axis, (key, same) in zip(axes, several.items(), strict=True):
        for style, shift, of_model in _by_model(rows, same):
            _line(axis, sorted(group(of_model, x).items()), style, shift)
        values = sorted({row[x] for row in same})
        _guessing(axis, same, x)
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{value:,}" for value in values])
        axis.minorticks_off()
        axis.margins(x=0.1)
        axis.set_xlabel(x_label)
        axis.set_title(_title(panels, key))
    return _finish(figure, axes, "test accuracy", rows)


def _frontier(rows: Sequence[Row]) -> Any:
    """Draws test accuracy against bytes of state, with a panel for each task."""
    rows = _with_models([row for row in rows if row["state_bytes"]])
    if not rows:
        return None
    tasks = group(rows, "test")
    figure, axes = plot.panels(len(tasks), PANEL)
    for axis, ((task,), same) in zip(axes, tasks.items(), strict=True):
        for style, _, of_model in _by_model(rows, same):
            _line(axis, sorted(group(of_model, "state_bytes").items()), style)
        _guessing(axis, same)
        axis.set_xscale("log", base=10)
        axis.set_xlabel("state a sequence, bytes")
        axis.set_title(task)
    return _finish(figure, axes, "test accuracy", rows)


def _learning_rates(rows: Sequence[Row]) -> Any:
    """Draws validation accuracy against learning rate, with a panel for each task and width."""
    rows = _with_models(rows)
    several = {key: same for key, same in sorted(group(rows, "length", "pairs", "width").items(), key=_by_size)
               if len({row["learning_rate"] for row in same}) > 1}  # fmt: skip
    if not several:
        return None
    figure, axes = plot.panels(len(several), PANEL)
    for axis, (key, same) in zip(axes, several.items(), strict=True):
        for style, shift, of_model in _by_model(rows, same):
            points = sorted(group(of_model, "learning_rate").items())
            rates = [key[0] for key, _ in points]
            found = [[row["validation_accuracy"] for row in seeds] for _, seeds in points]
            _dotted_line(axis, rates, found, mean, style, shift)
        _guessing(axis, same)
        axis.set_xscale("log")
        axis.set_xlabel("learning rate")
        axis.set_title(_title(("length", "pairs", "width"), key))
    return _finish(figure, axes, "validation accuracy", rows)


def _learning_curves(rows: Sequence[Row]) -> Any:
    """Draws validation accuracy against epochs, with a panel for each training task and width, and a curve per seed.

    If a run was tested on several tasks, only one of its rows is drawn, because their validations are the same.
    """
    once = {row["run"]: row for row in rows if row.get("validation_accuracies")}
    rows = _with_models(list(once.values()))
    if not rows:
        return None
    panels = dict(sorted(group(rows, "train", "width").items()))
    figure, axes = plot.panels(len(panels), PANEL)
    for axis, ((task, width), same) in zip(axes, panels.items(), strict=True):
        for style, _, of_model in _by_model(rows, same):
            for row in of_model:
                accuracies = json.loads(row["validation_accuracies"])
                epochs = [(number + 1) / row["validations"] for number in range(len(accuracies))]
                axis.plot(epochs, accuracies, **style)
        _guessing(axis, same)
        axis.set_xlabel("epochs")
        axis.set_title(f"{task}, d {width:,}")
    return _finish(figure, axes, "validation accuracy", rows)


def _capacity(rows: Sequence[Row]) -> Any:
    """Draws the largest number of recalled pairs against KiB of state.

    A point is the median over the seeds of a model of one size, a dot is one seed. The state is the state after the row
    with the largest number of recalled pairs, or after the shortest row if no number of pairs is recalled.
    """
    rows = _with_models([row for row in rows if row["state_bytes"] and row["pairs"]])
    if len({row["pairs"] for row in rows}) < 2:
        return None
    figure, axes = plot.panels(1, (8, 5))
    (axis,) = axes
    sizes: list[float] = []
    for style, shift, of_model in _by_model(rows, rows):
        points = []
        for model in group(of_model, "width", "mixers").values():
            seeds = [_held(same) for same in group(model, "seed").values()]
            points.append((max(size for _, size in seeds), [pairs for pairs, _ in seeds]))
        points.sort()
        sizes += [size for size, _ in points]
        if any(median(held) == 0 for _, held in points):  # no line through runs that recall nothing
            style = style | {"linestyle": "none"}
        _dotted_line(axis, [size for size, _ in points], [held for _, held in points], median, style, shift)
    axis.set_xscale("log", base=2)
    powers = [2.0**n for n in range(floor(log2(min(sizes))), ceil(log2(max(sizes))) + 1)]
    axis.set_xticks(powers, [f"{power:,g}" for power in powers])
    ticks = [0, *sorted({row["pairs"] for row in rows})]
    axis.set_yscale("symlog", base=2, linthresh=ticks[1])
    axis.set_ylim(bottom=-0.3 * ticks[1])
    axis.set_yticks(ticks, ["none", *(f"{tick:,}" for tick in ticks[1:])])
    axis.minorticks_off()
    axis.set_xlabel("state a sequence, KiB")
    least, most = (f"N {pick(row['length'] for row in rows):,}" for pick in (min, max))
    axis.set_title(f"Pairs held at {SOLVED:.0%} accuracy, {least if least == most else f'{least} to {most}'}")
    return _finish(figure, axes, "most pairs D", rows, accuracy=False)


def _held(rows: Sequence[Row]) -> tuple[int, float]:
    """Returns the largest number of pairs that a model and seed recall, and the KiB of the state for it."""
    solved = [row for row in rows if row["test_accuracy"] >= SOLVED]
    if not solved:
        return 0, min(row["state_bytes"] for row in rows) / 1024
    most = max(solved, key=lambda row: (row["pairs"], row["state_bytes"]))
    return most["pairs"], most["state_bytes"] / 1024


_SHORT = {"length": "N {:,}", "pairs": "D {:,}", "width": "d {:,}", "layers": "{} layers"}


def _by_size(item: tuple[tuple[Any, ...], Any]) -> list[Any]:
    """Sorts by the values of columns, of which one may be unknown."""
    return [-1 if value is None else value for value in item[0]]


def _title(names: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(_SHORT[n].format(v) for n, v in zip(names, values, strict=True) if v is not None)


def _with_models(rows: Sequence[Row], *shown: str) -> list[Row]:
    """Returns the rows with a column "model": the label, and heads, layers and MLP if models with the label differ.

    A column is left out if it depends on the width only, or if it is one of those that are `shown` in another way.
    """
    named: list[Row] = []
    for same in group(rows, "label").values():
        at_width = group(same, "width").values()
        apart = [name for name in ("heads", "layers", "mlp_ratio") if name not in shown and
                 any(len({row[name] for row in rows}) > 1 for rows in at_width)]  # fmt: skip
        named += [{**row, "model": ", ".join([row["label"], *(f"{n} {row[n]}" for n in apart)])} for row in same]
    return named


def _without_depth(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with labels that do not end with the number of layers."""
    return [{**row, "label": row["label"].removesuffix(f", {row['layers']} layers")} for row in rows]


def _by_model(all_rows: Sequence[Row], rows: Sequence[Row]) -> list[tuple[dict[str, Any], float, list[Row]]]:
    """Returns the rows of every model, how it is drawn, and by how many points it is moved to the right.

    So models with equal values are beside each other. All panels draw a model in the same way.
    """
    models = list(group(all_rows, "model"))
    styled = []
    for key, same in group(rows, "model").items():
        n = models.index(key)
        style: dict[str, Any] = plot.curve_style(n)
        styled.append((style | {"label": key[0], "markersize": 5}, (n - (len(models) - 1) / 2) * BESIDE, same))
    return styled


def _line(
    axis: Any, points: Sequence[tuple[tuple[Any, ...], list[Row]]], style: dict[str, Any], shift: float = 0.0
) -> None:
    """Draws mean accuracies with bars from the lowest to the highest seed. A point is its x, in a tuple, and its rows.

    A line joins points whose seeds are all above guessing; the others have failed.
    """
    seeds = [[row["test_accuracy"] for row in rows] for _, rows in points]
    means = [mean(values) for values in seeds]
    solved = [min(values) > _guess(rows) for values, (_, rows) in zip(seeds, points, strict=True)]
    low = [middle - min(values) for middle, values in zip(means, seeds, strict=True)]
    high = [max(values) - middle for middle, values in zip(means, seeds, strict=True)]
    x = [at for (at,), _ in points]
    marks = style | {"linestyle": "none", "label": "_nolegend_"}
    drawn = axis.errorbar(x, means, yerr=[low, high], capsize=3, elinewidth=1, **marks)
    joined = [middle if every else nan for middle, every in zip(means, solved, strict=True)]
    plot.move(axis, [*drawn.get_children(), *axis.plot(x, joined, **style)], shift)


def _guess(rows: Sequence[Row]) -> float:
    """Returns the highest accuracy of naming a random value of the row, 1/D; 0 where it is not known."""
    return max((1 / row["pairs"] for row in rows if row["pairs"]), default=0.0)


def _guessing(axis: Any, rows: Sequence[Row], x: str = "") -> None:
    """Draws 1/D, the accuracy of naming a random value of the row, if the pairs D of all `rows` are known."""
    if any(not row["pairs"] for row in rows):
        return
    style = {"label": GUESSING, "color": "0.4", "linestyle": (0, (1, 1)), "linewidth": 1.2, "zorder": 1}
    pairs = sorted({row["pairs"] for row in rows})
    if x in ("pairs", "length"):
        points = sorted({(row[x], row["pairs"]) for row in rows})
        axis.plot([at for at, _ in points], [1 / d for _, d in points], **style)
    elif len(pairs) == 1:
        axis.axhline(1 / pairs[0], **style)


def _dotted_line(
    axis: Any, x: Sequence[float], seeds: Sequence[Sequence[float]], middle: Callable[..., float],
    style: dict[str, Any], shift: float,
) -> None:  # fmt: skip
    """Draws the middle of `seeds`, a list of values for every x, and all values as dots."""
    drawn = axis.plot(x, [middle(values) for values in seeds], **style)
    for at, values in zip(x, seeds, strict=True):
        drawn += axis.plot([at] * len(values), values, ".", color=style["color"], markersize=5, alpha=0.6)
    plot.move(axis, drawn, shift)


def _finish(figure: Any, axes: Sequence[Any], y_label: str, rows: Sequence[Row], accuracy: bool = True) -> Any:
    """Sets grid and limits, wraps titles, draws one legend for all panels, and tells the rows of training and seeds."""
    points = group(rows, "model", "mixers", "width", "heads", "layers", "test", "learning_rate").values()
    examples = sorted({row["examples"] for row in rows})
    told = [f"{' to '.join(f'{n:,}' for n in dict.fromkeys((examples[0], examples[-1])))} rows of training"]
    told.append(plot.told_seeds([len({row["seed"] for row in same}) for same in points]))
    figure.suptitle(f"N: tokens of a row, D: pairs, d: width; {', '.join(told)}", fontsize=10)
    plot.set_grid(axes)
    for axis in axes:
        if accuracy:
            axis.set_ylim(-0.03, 1.03)
        axis.set_ylabel(y_label)
        axis.set_title(fill(axis.get_title(), TITLE))
    plot.shared_legend(figure, axes, last=GUESSING)
    return figure
