"""The figures of docs/sources.md: what the papers draw, of runs in this repository."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from statistics import fmean
from typing import Any

from benchmarks.context_scaling.grid import BEST, DOCUMENT, SEEDS, recipe
from benchmarks.pages.context_tables import TRAINED_AT, Evidence
from benchmarks.pages.learning_tables import PAPERS, POWERS
from sympow.evaluation.plot import FIRST_CONTEXT, curve_style, empty_figure, set_grid, shared_legend
from sympow.models import LanguageModel
from sympow.training.throughput import token_flops

POWERS_RATE = 4e-3  # the best rate of all models of [SPT] but p = 2
NORM, BODY = "+head_norm=true", "body of RWKV-7, norm of heads, Muon"
STAGES = 4  # curves of a model in the figure of learning in context


def draw_powers(evidence: Evidence) -> Any:
    """Returns the figure of [SPT], section 2: losses along training of the powers and of softmax attention."""
    figure = empty_figure("figures", (7.6, 3.4))
    axis = figure.subplots()
    _draw(axis, {PAPERS[variant]: losses(evidence.along_muon(variant, TRAINED_AT, POWERS_RATE)) for variant in POWERS})
    axis.set_xlabel("million tokens of training")
    title = f"{TRAINED_AT:,} tokens of context, Muon with the rate {POWERS_RATE:g}, one run each"
    return _finished(figure, [axis], title)


def draw_conformal(evidence: Evidence, p: int) -> Any:
    """Returns a figure of [CST], Figure 3 (p = 4) or 4 (p = 2): losses along training without and with a gate."""
    contexts = (1024, 4096, 16_384)
    variants = {"softmax_plain": "softmax attention", f"published_p{p}": "power attention",
                f"published_p{p}_gated": "with a gate",
                f"conformal_p{p}": "with a gate and a learned rotation"}  # fmt: skip
    figure = empty_figure("figures", (7.6, 3))
    axes = figure.subplots(1, len(contexts))
    for axis, context in zip(axes, contexts, strict=True):
        _draw(axis, {label: losses(evidence.along(variant, context)) for variant, label in variants.items()})
        axis.set_title(f"{context:,} tokens", fontsize=10)
        axis.set_xlabel("million tokens of training")
    return _finished(figure, axes, f"p = {p}, one run each")


def draw_flops(evidence: Evidence) -> Any:
    """Returns the figure of [SCRA], 1 and 3: losses along training by FLOPs, by context."""
    contexts, variants = (32, 1024, 8192), ("body_softmax" + NORM, "body_linear", "body_window32" + NORM)
    figure = empty_figure("figures", (7.6, 3))
    axes = figure.subplots(1, len(contexts))
    for axis, context in zip(axes, contexts, strict=True):
        _draw(axis, {_label(variant): by_flops(evidence, variant, context, seeds=(0,)) for variant in variants})
        _log_ticks(axis, (0.5, 1, 2, 4, 8))
        axis.set_title(f"{context:,} tokens", fontsize=10)
        axis.set_xlabel("PFLOPs of training")
    return _finished(figure, axes, f"{BODY}, 30 million tokens, one run each")


def draw_long(evidence: Evidence) -> Any:
    """Returns the figure of [SCRA], 9: losses by FLOPs and by position, in rows of whole documents."""
    names = ("softmax", "power", "window")
    variants = [f"body_{name}{NORM}" for name in names]
    figure = empty_figure("figures", (7.6, 3.4))
    axes = figure.subplots(1, 2)
    _draw(axes[0], {_label(each): by_flops(evidence, each, DOCUMENT, seeds=SEEDS) for each in variants})
    _log_ticks(axes[0], (1, 2, 4, 8, 16, 32))
    axes[0].set_xlabel("PFLOPs of training")
    ends = {_label(each): _by_position(evidence, each, DOCUMENT, -1) for each in variants}
    _draw(axes[1], ends | {"softmax attention after 4 PFLOPs": _by_position(evidence, variants[0], DOCUMENT, 0)})
    _log_ticks(axes[1], (16, 256, 4096, DOCUMENT))
    axes[1].set_xlabel("tokens of context")
    return _finished(figure, axes, f"rows of {DOCUMENT:,} tokens, {BODY}, means of three seeds")


def draw_in_context(evidence: Evidence) -> Any:
    """Returns the figure of [SCRA], 4: losses by position of two models in rows of 1,024 tokens, along training."""
    context, variants = 1024, ("body_window32" + NORM, "body_linear")
    figure = empty_figure("figures", (7.6, 3.2))
    axes = figure.subplots(1, len(variants), sharey=True)
    for axis, variant in zip(axes, variants, strict=True):
        rows = evidence.along_muon(variant, context, BEST)
        stages = sorted(list(rows)[::-2][:STAGES])
        _draw(axis, {f"after {tokens / 1e6:.0f}M tokens": positions(rows[tokens]) for tokens in stages})
        _log_ticks(axis, (1, 4, 16, 64, 256, context))
        axis.set_title(_label(variant), fontsize=10)
        axis.set_xlabel("tokens of context")
    return _finished(figure, axes, f"rows of {context:,} tokens, {BODY}, one run each")


def losses(rows: Mapping[int, Mapping[str, Any]]) -> dict[float, float]:
    """Returns the loss of each row of `Evidence.along`, by million tokens."""
    return {tokens / 1e6: row["held_out_loss"] for tokens, row in rows.items()}


def positions(row: Mapping[str, Any]) -> dict[float, float]:
    """Returns the losses of a row by position."""
    return {int(name): loss for name, loss in row.items() if name.isdecimal() and loss is not None}


def by_flops(evidence: Evidence, variant: str, context: int, seeds: Sequence[int]) -> dict[float, float]:
    """Returns the mean loss over seeds along training, by PFLOPs; {} where a seed has no rows."""
    curves = [losses(evidence.along_muon(variant, context, BEST, seed)) for seed in seeds]
    if not all(curves):
        return {}
    each = flops(variant, context) / 1e9  # PFLOPs of a million tokens
    return {tokens * each: fmean(curve[tokens] for curve in curves) for tokens in curves[0]}


def _by_position(evidence: Evidence, variant: str, context: int, stage: int) -> dict[float, float]:
    """Returns the mean losses over seeds by position, of one evaluation along training."""
    curves = [positions([*evidence.along_muon(variant, context, BEST, seed).values()][stage]) for seed in SEEDS]
    return {at: fmean(curve[at] for curve in curves) for at in curves[0] if at >= FIRST_CONTEXT}


@cache
def flops(variant: str, context: int) -> float:
    """Returns the FLOPs of training on one token in rows of `context`; ValueError if a mixer does not count them."""
    found = token_flops(LanguageModel(recipe(variant).model, seed=0), context)
    if found is None:
        raise ValueError(f"a mixer of {variant} does not count its FLOPs")
    return found


def _label(variant: str) -> str:
    return PAPERS[variant].partition(", body of RWKV-7")[0]


def _draw(axis: Any, curves: Mapping[str, Mapping[float, float]]) -> None:
    """Draws curves by label; those without points are left out."""
    for place, (label, curve) in enumerate((label, curve) for label, curve in curves.items() if curve):
        axis.plot(list(curve), list(curve.values()), **curve_style(place) | {"markersize": 4, "label": label})


def _log_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """Gives a panel a logarithmic axis with those of some ticks that lie within its data."""
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_xticks(shown, [f"{tick:,}" for tick in shown])
    axis.set_xticks([], minor=True)


def _finished(figure: Any, axes: Any, title: str) -> Any:
    axes[0].set_ylabel("loss, nats")
    figure.suptitle(title, fontsize=10)
    set_grid(axes)
    shared_legend(figure, axes)
    return figure


# In the folders of the pages.
FIGURES: dict[str, Callable[[Evidence], Any]] = {
    "context-scaling/conformal_p4.png": partial(draw_conformal, p=4),
    "context-scaling/conformal_p2.png": partial(draw_conformal, p=2),
    "learning/powers.png": draw_powers,
    "learning/scra_flops.png": draw_flops,
    "learning/scra_long.png": draw_long,
    "learning/scra_in_context.png": draw_in_context,
}
