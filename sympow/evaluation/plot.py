"""In-context-learning curves of several runs in one image."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from sympow.evaluation.context_loss import Bin, Curve
from sympow.files import naming
from sympow.packages import from_extra

# Okabe and Ito's palette, told apart by colour-blind readers too; markers tell the curves apart in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B", "#7F7F7F", "#6A3D9A")
MARKERS = "osD^vPXh<>"
FIRST_CONTEXT = 16  # shorter contexts are left out of the image: their losses are high and would flatten the rest


def plot_context_losses(curves: Sequence[Curve], path: str | os.PathLike[str]) -> None:
    """Draws the curves into an image, whose format follows from the suffix of `path` (.png, .svg, .pdf).

    A point is the mean loss of a bin, at the geometric middle of its context lengths; the band is one standard
    error. Vertical lines mark the contexts trained on, where they lie within the image.

    Raises ValueError without curves, ImportError without matplotlib.
    """
    if not curves:
        raise ValueError("a plot needs at least one curve")
    figure = empty_figure("curves", (8, 5))
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes = figure.add_subplot()
    for n, curve in enumerate(curves):
        bins = shown_bins(curve)
        middles = [((each.start + 1) * each.end) ** 0.5 for each in bins]
        losses = [each.loss for each in bins]
        best = curve.losses.best
        label = f"{curve.run}: best-context loss {best.loss:.3f} at {_tokens(best.end)} tokens"
        style = curve_style(n)
        axes.plot(middles, losses, markersize=5, label=label, **style)
        low = [each.loss - each.stderr for each in bins]
        high = [each.loss + each.stderr for each in bins]
        axes.fill_between(middles, low, high, alpha=0.2, linewidth=0, color=style["color"])
    longest = max(curve.losses.context for curve in curves)
    for context in sorted({curve.train_context or 0 for curve in curves}):
        if not 0 < context <= longest:
            continue
        axes.axvline(context, color="0.35", linestyle="--", linewidth=1)
        axes.annotate(
            f"trained on {_tokens(context)}",
            xy=(context, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            color="0.35",
            fontsize=9,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlim(right=longest * 1.1)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=32))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tokens(x)))
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("held-out loss (nats a token)")
    axes.set_title("Loss by context length")
    set_grid([axes])
    axes.legend(fontsize=9)
    with naming(path):
        figure.savefig(path)


def empty_figure(what: str, size: tuple[float, float]) -> Any:
    """Returns a figure of matplotlib; ImportError without it, which says that drawing `what` needs the package."""
    with from_extra("eval", f"drawing {what} needs matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=size, dpi=150, layout="constrained")


def panels(count: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Returns a figure with panels of a size, two in a row at most, so that it can be read on a page."""
    columns = min(2, count)
    lines = -(-count // columns)
    figure = empty_figure("figures", (size[0] * columns, size[1] * lines))
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def curve_style(n: int) -> dict[str, str]:
    """Returns how curve number `n` is drawn. After all colours come other markers, dashed and then dotted."""
    again = n // len(COLOURS)
    marker, line = MARKERS[(n + 3 * again) % len(MARKERS)], ("-", "--", ":")[again % 3]
    return {"color": COLOURS[n % len(COLOURS)], "marker": marker, "linestyle": line}


def move(axis: Any, drawn: Sequence[Any], points: float) -> None:
    """Moves what is drawn so many points to the right of its data."""
    from matplotlib.transforms import ScaledTranslation

    for artist in drawn:
        artist.set_transform(axis.transData + ScaledTranslation(points / 72, 0, axis.figure.dpi_scale_trans))


def set_grid(axes: Sequence[Any]) -> None:
    """Draws a grid below the curves of some panels."""
    for axis in axes:
        axis.grid(True, color="0.9")
        axis.set_axisbelow(True)


def shared_legend(figure: Any, axes: Sequence[Any], last: str = "") -> None:
    """Draws one legend for all panels, below them, each label once; the label `last` at the end.

    The legend has as many columns as fit, and the figure becomes higher by its lines.
    """
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if last in handles:
        handles[last] = handles.pop(last)
    for columns in range(min(len(handles), 6), 0, -1):
        look = {"loc": "outside lower center", "ncols": columns, "fontsize": 9}
        legend = figure.legend(handles.values(), handles.keys(), **look)
        box = legend.get_window_extent()
        if box.width < figure.bbox.width or columns == 1:
            figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)
            return
        legend.remove()


def told_seeds(counts: Collection[int]) -> str:
    """Returns how many seeds the points of a figure have: "one seed", "3 seeds" or "1 to 3 seeds"."""
    least, most = min(counts), max(counts)
    return "one seed" if most == 1 else f"{most} seeds" if least == most else f"{least} to {most} seeds"


def shown_bins(curve: Curve) -> list[Bin]:
    """Returns the bins that are drawn: those from FIRST_CONTEXT on, or all where the curve ends before."""
    bins = curve.losses.bins
    return [each for each in bins if each.start >= FIRST_CONTEXT] or bins


def _tokens(count: float) -> str:
    """Returns a context by its short name: 1,024 as "1k"."""
    whole = round(count)
    return f"{whole // 1024:,}k" if whole >= 1024 and whole % 1024 == 0 else f"{whole:,}"
