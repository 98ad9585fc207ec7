"""Losses by the count and the distance of bigrams, of several runs in one image."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sympow.evaluation.ar_hits import Cell, HitLosses
from sympow.evaluation.plot import curve_style, empty_figure, set_grid, shared_legend
from sympow.files import naming

LEAST = 30  # tokens of a point that is drawn; the mean of fewer says little


def plot_ar_hits(measured: Mapping[str, HitLosses], path: str | os.PathLike[str]) -> None:
    """Draws results of `hit_losses` of several runs on the same rows. The suffix of `path` gives the image format.

    The image has three panels. The first shows the loss against the count of the bigram in training, for repeats
    (solid) and for tokens that are new in their row (dashed). The second shows the loss of AR hits against the distance
    to the last occurrence of the bigram. The third shows the number of AR hits at each distance, with the fitted power
    law. Points of fewer than LEAST tokens are left out.

    Raises ValueError without runs, ImportError without matplotlib.
    """
    if not measured:
        raise ValueError("a plot needs at least one run")
    figure = empty_figure("curves", (8, 7))
    panels = figure.subplot_mosaic([["counts", "counts"], ["distances", "rates"]])
    counts, distances, rates = (panels[name] for name in ("counts", "distances", "rates"))
    for n, (run, losses) in enumerate(measured.items()):
        style: dict[str, Any] = curve_style(n) | {"markersize": 4}
        _line(counts, losses.by_count(repeated=True), **style, label=run)
        _line(counts, losses.by_count(repeated=False), **style | {"linestyle": "--"})
        _line(distances, losses.by_distance(), **style)
    draw_rates(rates, next(iter(measured.values())))
    first = next(iter(measured.values()))
    counts.axvline(first.frequent, color="0.35", linestyle=":", linewidth=1)
    counts.set_title("Repeated in the row (solid), new in it (dashed)", fontsize=10)
    counts.set_xlabel("times that the bigram occurs in training")
    counts.set_xscale("symlog", linthresh=1)
    counts.set_xlim(left=-0.2)
    distances.set_title(f"AR hits: repeated, at most {first.frequent:,} times in training", fontsize=10)
    distances.set_xlabel("tokens since the bigram ended last")
    distances.set_xscale("log", base=2)
    for axis in (counts, distances):
        axis.set_ylabel("held-out loss (nats a token)")
    set_grid((counts, distances, rates))
    figure.suptitle(f"{first.slice('all').tokens:,} held-out tokens, one run each", fontsize=10)
    shared_legend(figure, (counts,))
    with naming(path):
        figure.savefig(path)


def draw_rates(axis: Any, losses: HitLosses) -> None:
    """Draws the number of AR hits at each distance, and the fitted power law, into a panel."""
    found = [
        (cell.middle, rate)
        for cell, rate in zip(losses.by_distance(), losses.distance_rates(), strict=True)
        if cell.tokens >= LEAST
    ]
    axis.set_title("AR hits by distance", fontsize=10)
    axis.set_xlabel("tokens since the bigram ended last")
    axis.set_ylabel("AR hits a token and distance")
    if not found:
        return
    axis.plot(*zip(*found, strict=True), color="black", marker="o", markersize=4, linestyle="none")
    factor, exponent = losses.distance_law()
    if math.isfinite(exponent):
        law = [(x, factor * x**-exponent) for x, _ in found]
        axis.plot(*zip(*law, strict=True), color="0.35", linewidth=1, label=f"distance to the power {-exponent:.2f}")
        axis.legend(fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")


def _line(axis: Any, cells: Sequence[Cell], **style: Any) -> None:
    points = [(cell.middle, cell.loss) for cell in cells if cell.tokens >= LEAST]
    if points:
        axis.plot(*zip(*points, strict=True), **style)
