"""The report's figures. A variant looks the same in all of them. Points of differences and ratios are means over pairs,
all others over the runs of a variant. Bars are 95% intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from benchmarks.context_scaling.found import Found, baseline_of, runs_of, varying
from benchmarks.context_scaling.grid import DOCUMENT, Run, setting_of
from benchmarks.context_scaling.labels import LOOKS, label, setting
from benchmarks.context_scaling.paired import Interval
from benchmarks.context_scaling.results import version
from benchmarks.context_scaling.studies import STUDIES
from benchmarks.context_scaling.tables import along

LOSS = "held-out loss (nats a token)"
FIRST = 32  # the end of the first bin of positions that is drawn; losses before would flatten the rest
SHADES = ("#bdd7e7", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b", "#000000")  # light to dark


def summary(found: Found) -> Any:
    """Draws the loss over that of softmax attention for every variant of the bars, a colour a context."""
    looks = {"bars_1024": ("#56B4E9", "o"), "bars_4096": ("#E69F00", "s"), "bar_65536": ("#000000", "^")}
    points: dict[str, list[tuple[str, Interval]]] = {}
    for study in looks:
        for run in runs_of(study):
            base = baseline_of(run, study)
            value = None if base == run else found.ratio(run, base)
            if value is not None:
                points.setdefault(run.variant, []).append((study, value))
    if not points:
        return None
    figure, axes = panels(1, (4.6, 1.2 + 0.38 * len(points)))
    for place, variant in enumerate(points):
        for study, value in points[variant]:
            colour, marker = looks[study]
            height = place + 0.2 * (list(looks).index(study) - 1)
            axes[0].errorbar([value.mean], [height], xerr=[[value.half or 0.0]] * 2, capsize=3, markersize=5,
                             color=colour, marker=marker, linestyle="",
                             label=f"{runs_of(study)[0].context:,} tokens")  # fmt: skip
    axes[0].set_yticks(range(len(points)), [label(variant) for variant in points])
    axes[0].set_ylim(len(points) - 0.5, -0.5)
    axes[0].axvline(1, color="0.35", linewidth=1)
    axes[0].set_xlabel("held-out loss over that of softmax attention", fontsize=9)
    finish(figure, axes, legend=False)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    axes[0].legend(handles.values(), handles.keys(), loc="lower right", fontsize=9)
    return figure


def differences(found: Found, study: str) -> Any:
    """Draws the difference of every run to the baseline in its setting, a panel a setting."""
    runs = runs_of(study)
    groups: dict[tuple, list[tuple[Run, Interval]]] = {}
    for run in runs:
        base = baseline_of(run, study)
        value = None if base == run else found.difference(run, base)
        if value is not None:
            groups.setdefault(setting_of(run), []).append((run, value))
    if not groups:
        return None
    most = max(map(len, groups.values()))
    figure, axes = panels(len(groups), (3.6, 1.3 + 0.32 * most), share="x")
    for axis, group in zip(axes, groups.values(), strict=True):
        for place, (run, value) in enumerate(group):
            look = LOOKS.get(run.variant)
            axis.errorbar([value.mean], [place], xerr=[[value.half or 0.0]] * 2, capsize=3, markersize=6,
                          color=look.colour if look else "#0072B2", marker=look.marker if look else "o")  # fmt: skip
        axis.set_yticks(range(len(group)), [label(run.variant) for run, _ in group])
        axis.set_ylim(len(group) - 0.5, -0.5)
        axis.axvline(0, color="0.35", linewidth=1)
        axis.set_title(setting(group[0][0], varying(runs)), fontsize=10)
        axis.set_xlabel(f"loss less {label(STUDIES[study].baseline)} (nats)", fontsize=9)
        axis.locator_params(axis="x", nbins=5)
    return finish(figure, axes, legend=False)


def by_number(found: Found, study: str, field: str, ratio: bool = False) -> Any:
    """Draws loss (or its ratio to the baseline's) and gain against a number of the runs' setting."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs_of(study), key=lambda run: getattr(run, field)):
        if found.rows(run):
            groups.setdefault(run.variant, []).append(run)
    if not groups:
        return None
    figure, axes = panels(2)
    for variant, runs in groups.items():
        for axis, name in zip(axes, ("held_out_loss", "gain"), strict=True):
            points = [(getattr(run, field), _value(found, run, study, name, ratio)) for run in runs]
            known = [(x, value) for x, value in points if value is not None]
            if known:
                bars = [value.half or 0.0 for _, value in known]
                axis.errorbar([x for x, _ in known], [value.mean for _, value in known], yerr=bars, capsize=3,
                              **style(variant))  # fmt: skip
    names = {"context": "context trained and evaluated at (tokens)", "tokens": "tokens of the run (millions)"}
    for axis in axes:
        numbers(axis, sorted({getattr(run, field) for runs in groups.values() for run in runs}), field == "tokens")
        axis.set_xlabel(names[field])
    base = label(STUDIES[study].baseline)
    axes[0].set_ylabel(f"held-out loss over {base}" if ratio else LOSS)
    axes[1].set_ylabel(f"gain from context over {base}" if ratio else "gain from context (nats)")
    return finish(figure, axes)


def by_cost(found: Found, study: str) -> Any:
    """Draws the held-out loss along training against tokens, FLOPs and time alone on a GPU, where these are known."""
    curves = along(found, runs_of(study))
    runs = list(curves)
    if not runs:
        return None
    several = len({run.tokens for run in runs}) > 1
    names = {run: label(run.variant) + (f", {run.tokens / 1e6:.0f}M" if several else "") for run in runs}
    totals = {
        "tokens (millions)": {run: run.tokens / 1e6 for run in runs},
        "training FLOPs (10^15)": {run: flops.mean / 1e15 for run in runs if (flops := found.mean(run, "flops"))},
        "training time (s)": {run: run.tokens / speed for run in runs if (speed := found.speed(run))},
    }
    known = {name: of_runs for name, of_runs in totals.items() if of_runs}
    figure, axes = panels(len(known))
    for axis, (name, of_runs) in zip(axes, known.items(), strict=True):
        for run, total in of_runs.items():
            losses = [mean(row["held_out_loss"] for row in rows) for _, rows in curves[run]]
            axis.plot([share * total for share, _ in curves[run]], losses,
                      **style(run.variant) | {"label": names[run]})  # fmt: skip
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel(name)
    axes[0].set_ylabel(LOSS)
    return finish(figure, axes)


def by_position(found: Found, study: str) -> Any:
    """Draws loss by position, up to 16 times the context trained at, a panel a context and version of the corpus."""
    runs = [run for run in runs_of(study) if found.rows(run)]
    if not runs:
        return None
    groups = sorted({(run.trained_at, corpus) for run in runs for corpus in found.corpora([run])})
    figure, axes = panels(len(groups))
    for axis, (context, corpus) in zip(axes, groups, strict=True):
        far = min(16 * context, DOCUMENT)
        for run in (each for each in runs if each.trained_at == context):
            rows = [row for sample, row in found.last(run, far).items() if sample[0] == corpus]
            _positions(axis, rows, style(run.variant))
        numbers(axis, [1 << n for n in range(6, 17, 2) if 1 << n <= far])
        axis.axvline(context, color="0.35", linestyle="--", linewidth=1)
        axis.set_title(f"trained at {context:,}, corpus {version(corpus)}", fontsize=10)
        axis.set_xlabel("position (tokens)")
    axes[0].set_ylabel(LOSS)
    return finish(figure, axes)


def checkpoints(found: Found, study: str) -> Any:
    """Draws loss by position at the points along training, a panel a variant."""
    curves = along(found, runs_of(study))
    if not curves:
        return None
    figure, axes = panels(len(curves), share="y")
    for axis, (run, points) in zip(axes, curves.items(), strict=True):
        for colour, (share, rows) in zip(SHADES[-len(points) :], points, strict=False):
            look = {"label": f"{share:.0%} of the run", "color": colour, "marker": "o", "markersize": 3}
            _positions(axis, rows, look)
        numbers(axis, [1 << n for n in range(6, 17, 2) if 1 << n <= run.trained_at])
        axis.set_title(label(run.variant), fontsize=10)
        axis.set_xlabel("position (tokens)")
    axes[0].set_ylabel(LOSS)
    return finish(figure, axes)


def axes_of_scale(found: Found, study: str) -> Any:
    """Draws the loss against each axis along which runs of the study differ, all else being equal."""
    runs = [run for run in runs_of(study) if found.rows(run)]
    chosen: list[tuple[str, Callable[[Run], bool], Callable[[Run], float]]] = [
        ("updates", lambda run: run.documents == 1 and run.size is None, lambda run: run.steps),
        ("documents a step", lambda run: run.row_tokens is None and run.context < DOCUMENT and run.size is None
         and run.steps == 115, lambda run: run.documents),
        ("weights of the blocks (millions)", lambda run: run.documents == 1 and run.steps == 460,
         lambda run: {"tiny": 0.8, "small": 85.0}.get(run.size or "", 10.6)),
        ("context, in the same documents (tokens)", lambda run: run.context == DOCUMENT, lambda run: run.trained_at),
    ]  # fmt: skip
    if not runs:
        return None
    figure, axes = panels(len(chosen))
    for axis, (name, condition, number) in zip(axes, chosen, strict=True):
        here = sorted(filter(condition, runs), key=number)
        for variant in dict.fromkeys(run.variant for run in here):
            points = [(number(run), found.mean(run, "held_out_loss")) for run in here if run.variant == variant]
            axis.plot([x for x, _ in points], [value.mean for _, value in points if value], **style(variant))
        numbers(axis, sorted({number(run) for run in here}))
        axis.set_xlabel(name)
    axes[0].set_ylabel(LOSS)
    return finish(figure, axes)


def learning_rates(found: Found, study: str) -> Any:
    """Draws the difference of every variant's loss to that at the default learning rate against the rate."""
    groups: dict[str, list[tuple[float, Interval]]] = {}
    for run in sorted(runs_of(study), key=lambda run: run.learning_rate):
        value = found.difference(run, baseline_of(run, study))
        if value is not None:
            groups.setdefault(run.variant, []).append((run.learning_rate, value))
    groups = {variant: points for variant, points in groups.items() if len(points) > 1}
    if not groups:
        return None
    figure, axes = panels(1, (5.5, 4))
    for variant, points in groups.items():
        bars = [value.half or 0.0 for _, value in points]
        axes[0].errorbar([rate for rate, _ in points], [value.mean for _, value in points], yerr=bars, capsize=3,
                         **style(variant))  # fmt: skip
    axes[0].axhline(0, color="0.35", linewidth=1)
    axes[0].set_xscale("log")
    sweep = sorted({rate for points in groups.values() for rate, _ in points})
    axes[0].set_xticks(sweep, [f"{rate:g}" for rate in sweep])
    axes[0].minorticks_off()
    axes[0].set_xlabel("learning rate")
    axes[0].set_ylabel(f"loss less that at {Run.learning_rate:g} (nats)")
    return finish(figure, axes)


def _value(found: Found, run: Run, study: str, name: str, ratio: bool) -> Interval | None:
    return found.ratio(run, baseline_of(run, study), name) if ratio else found.mean(run, name)


def _positions(axis: Any, rows: Sequence[dict], look: dict[str, Any]) -> None:
    """Draws the mean loss of each bin of positions at their geometric middle."""
    if rows:
        ends = [int(name) for name in rows[0] if name.isdecimal() and int(name) >= FIRST]
        axis.plot([end / 2**0.5 for end in ends], [mean(row[str(end)] for row in rows) for end in ends], **look)


def style(variant: str) -> dict[str, Any]:
    look = LOOKS[variant]
    return {"label": label(variant), "color": look.colour, "marker": look.marker, "linestyle": look.line,
            "markersize": 5}  # fmt: skip


def numbers(axis: Any, ticks: Sequence[float], millions: bool = False) -> None:
    """Gives a logarithmic axis plain numbers."""
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick / 1e6:.0f}" if millions else f"{tick:,g}" if tick < 1e3 else f"{tick:,.0f}"
                            for tick in ticks])  # fmt: skip
    axis.minorticks_off()


def panels(count: int, size: tuple[float, float] = (4, 3.6), share: str = "") -> tuple[Any, list[Any]]:
    """Returns a figure with panels side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing figures needs matplotlib: pip install 'sympow[eval]'") from error
    figure = Figure(figsize=(size[0] * count + 2.4, size[1]), dpi=130, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, sharex=share == "x", sharey=share == "y")
    return figure, list(axes.flat)


def finish(figure: Any, axes: Sequence[Any], legend: bool = True) -> Any:
    """Adds a grid, and one legend for all panels beside them."""
    handles: dict[str, Any] = {}
    for axis in axes:
        axis.grid(True, color="0.9")
        axis.set_axisbelow(True)
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if legend:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=9)
    return figure
