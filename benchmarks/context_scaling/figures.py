"""The report's figures. A variant looks the same in all of them; where seeds differ, a point is their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.context_scaling.grid import MAIN
from benchmarks.context_scaling.results import Results, Row, at_best
from sympow.evaluation.plot import FIRST_CONTEXT
from sympow.recall.results import group

# By variant: its name, a colour of Okabe and Ito's palette, a marker and a line.
STYLES = {
    "softmax": ("softmax", "#000000", "o", "-"),
    "power_ungated": ("power, p = 2", "#D55E00", "s", "-"),
    "power_gated": ("power, p = 2, gate", "#0072B2", "D", "-"),
    "power": ("power, p = 2, gate and rotation", "#009E73", "^", "-"),
    "power4_gated": ("power, p = 4, gate", "#CC79A7", "v", "-"),
    "power4_ungated": ("power, p = 4", "#CC79A7", "v", "--"),
    "power6_ungated": ("power, p = 6", "#CC79A7", "v", ":"),
    "window": ("window of 8,192", "#E69F00", "P", "-"),
    "linear": ("linear", "#56B4E9", "X", "-"),
}
BY_CONTEXT = (*MAIN, "power4_gated")  # in parts (a) and (b)
COMPARED = ("softmax", "linear", "window", "power")  # in part (d)
LOSS = "held-out loss (nats a token)"


def label(variant: str) -> str:
    return STYLES[variant][0]


def draw(results: Results, folder: Path) -> list[Path]:
    """Every figure for which there are results, as a .png in `folder`, which is made; the files."""
    chosen = at_best(results)
    figures = {
        "loss": _loss(chosen),
        "learning_rates": _learning_rates(results.runs),
        "evaluation_context": _evaluation_context(chosen),
        "training_curves": _training_curves(chosen),
        "compute": _compute(chosen),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1])
    return written


def _loss(chosen: Results) -> Any:
    """(a): loss against the context of the training, at that context."""
    rows = [row for row in chosen.runs if row["variant"] in BY_CONTEXT]
    if not rows:
        return None
    figure, (axis,) = _panels(1, (6, 4.5))
    for variant, same in _by_variant(rows):
        seeds = group(sorted(same, key=lambda row: row["context"]), "context")
        losses = [[row["held_out_loss"] for row in of_seed] for of_seed in seeds.values()]
        means = [mean(each) for each in losses]
        bars = [[m - min(x) for m, x in zip(means, losses, strict=True)],
                [max(x) - m for m, x in zip(means, losses, strict=True)]]  # fmt: skip
        axis.errorbar([context for (context,) in seeds], means, yerr=bars, capsize=3, **_style(variant))
    _contexts(axis, sorted({row["context"] for row in rows}))
    axis.set_xlabel("context trained and evaluated at (tokens)")
    return _finish(figure, [axis], LOSS)


def _learning_rates(runs: Sequence[Row]) -> Any:
    """All learning rates, where there are several, a panel a context; what diverged has no point."""
    rows = [run for run in runs if run["status"] == "done"]
    rates = sorted({row["learning_rate"] for row in rows})
    if len(rates) < 2:
        return None
    contexts = sorted({row["context"] for row in rows})
    figure, axes = _panels(len(contexts))
    for axis, context in zip(axes, contexts, strict=True):
        for variant, same in _by_variant([row for row in rows if row["context"] == context]):
            points = sorted(group(same, "learning_rate").items())
            losses = [mean(row["held_out_loss"] for row in of_rate) for _, of_rate in points]
            axis.plot([rate for (rate,), _ in points], losses, **_style(variant))
        axis.set_xscale("log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        axis.set_xlabel("learning rate")
        axis.set_title(f"context {context:,}")
    return _finish(figure, axes, LOSS)


def _evaluation_context(chosen: Results) -> Any:
    """(b): loss by position up to the longest context, a panel for each shorter one trained at."""
    longest = max((row["context"] for row in chosen.runs), default=0)
    rows = [row for row in chosen.bins if row["evaluated_context"] == longest != row["context"]]
    rows = [row for row in rows if row["variant"] in BY_CONTEXT]
    if not rows:
        return None
    contexts = sorted({row["context"] for row in rows})
    figure, axes = _panels(len(contexts))
    for axis, context in zip(axes, contexts, strict=True):
        _by_position(axis, [row for row in rows if row["context"] == context])
        axis.axvline(context, color="0.35", linestyle="--", linewidth=1)
        axis.set_title(f"trained at {context:,}")
    return _finish(figure, axes, LOSS)


def _training_curves(chosen: Results) -> Any:
    """(c): training loss behind the warmup, whose losses would flatten the rest; a panel a context."""
    last = max((row["step"] for row in chosen.curves), default=0)
    rows = [row for row in chosen.curves if row["step"] > last // 10]
    if not rows:
        return None
    contexts = sorted({row["context"] for row in rows})
    figure, axes = _panels(len(contexts))
    for axis, context in zip(axes, contexts, strict=True):
        for variant, same in _by_variant([row for row in rows if row["context"] == context]):
            points = sorted(group(same, "tokens").items())
            losses = [mean(row["loss"] for row in of_step) for _, of_step in points]
            axis.plot([tokens / 1e6 for (tokens,), _ in points], losses, **_style(variant) | {"marker": ""})
        axis.set_xlabel("tokens (millions)")
        axis.set_title(f"context {context:,}")
    return _finish(figure, axes, "training loss (nats a token)")


def _compute(chosen: Results) -> Any:
    """(d): at the longest context, held-out loss along the training against FLOPs and time; and by position."""
    longest = max((row["context"] for row in chosen.runs), default=0)

    def of_part(rows: list[Row]) -> list[Row]:
        return [row for row in rows if row["context"] == longest and row["variant"] in COMPARED]

    runs, bins = of_part(chosen.runs), of_part(chosen.bins)
    curves = [row for row in of_part(chosen.curves) if row["held_out_loss"] is not None]
    if not curves:
        return None
    figure, axes = _panels(3)
    for axis, name, x_label in zip(axes, ("flops", "seconds"), ("training FLOPs", "training time (s)"), strict=False):
        for variant, same in _by_variant(curves):
            ends = [run for run in runs if run["variant"] == variant]
            per_token = mean(run[name] / run["tokens"] for run in ends)
            points = sorted(group(same, "tokens").items())
            losses = [mean(row["held_out_loss"] for row in of_step) for _, of_step in points]
            axis.plot([per_token * tokens for (tokens,), _ in points], losses, **_style(variant))
        axis.set_xscale("log")
        axis.set_xlabel(x_label)
    _by_position(axes[2], bins)
    return _finish(figure, axes, LOSS)


def _by_position(axis: Any, bins: Sequence[Row]) -> None:
    """Mean loss of each bin at the geometric middle of its contexts; the first bins would flatten the rest."""
    for variant, same in _by_variant([row for row in bins if row["start"] >= FIRST_CONTEXT]):
        points = sorted(group(same, "start", "end").items())
        middles = [((start + 1) * end) ** 0.5 for (start, end), _ in points]
        axis.plot(middles, [mean(row["loss"] for row in of_bin) for _, of_bin in points], **_style(variant))
    _contexts(axis, [1 << n for n in range(6, 18, 2) if bins and 1 << n <= 2 * max(row["end"] for row in bins)])
    axis.set_xlabel("context (tokens)")


def _by_variant(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(variant, same) for variant in STYLES if (same := [row for row in rows if row["variant"] == variant])]


def _style(variant: str) -> dict[str, Any]:
    name, colour, marker, line = STYLES[variant]
    return {"label": name, "color": colour, "marker": marker, "linestyle": line, "markersize": 5}


def _contexts(axis: Any, ticks: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()


def _panels(count: int, size: tuple[float, float] = (4, 3.6)) -> tuple[Any, list[Any]]:
    """A figure with panels side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing figures needs matplotlib: pip install 'sympow[eval]'") from error
    figure = Figure(figsize=(size[0] * count + 2.4, size[1]), dpi=150, layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False).flat)


def _finish(figure: Any, axes: Sequence[Any], y_label: str) -> Any:
    """Grid, labels, and one legend for all panels beside them."""
    handles: dict[str, Callable[..., Any]] = {}
    for axis in axes:
        axis.grid(True, color="0.9")
        axis.set_axisbelow(True)
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    axes[0].set_ylabel(y_label)
    names = [style[0] for style in STYLES.values() if style[0] in handles]
    figure.legend([handles[name] for name in names], names, loc="outside right upper", fontsize=9)
    return figure
