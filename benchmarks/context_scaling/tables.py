"""The report's tables in Markdown, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

import torch

from benchmarks.context_scaling.figures import BY_CONTEXT, COMPARED, label
from benchmarks.context_scaling.results import Results, Row, at_best
from sympow.evaluation import size_tables
from sympow.models import PRESETS, LanguageModel, MixerConfig, preset
from sympow.ops.cost import ModelShape
from sympow.recall.results import group
from sympow.recipes import load_recipe

PUBLISHED_RATIOS = {"power_ungated": 1.03, "power4_ungated": 0.98, "power6_ungated": 0.97}  # [SPT]


def tables(results: Results) -> dict[str, Callable[[], str]]:
    """The writers of all tables."""
    chosen = at_best(results)
    return {
        "runs": lambda: runs(results.runs),
        "loss": lambda: loss(chosen.runs),
        "beyond": lambda: beyond(chosen),
        "compute": lambda: compute(chosen.runs),
        "weight-state": weight_state,
        "powers": lambda: powers(chosen.runs),
        "additions": lambda: additions(chosen.runs),
    }


def runs(rows: Sequence[Row]) -> str:
    """What was run, on what."""
    statuses = {status: len(same) for (status,), same in group(rows, "status").items()}
    finished = [row for row in rows if row["status"] == "done"]
    if not finished:
        return "No run has finished."
    tokens, seconds = (sum(row[name] for row in finished) for name in ("tokens", "seconds"))
    where = [", ".join(dict.fromkeys(str(row[name]) for row in finished)) for name in ("processor", "torch", "commit")]
    cells = [
        ("runs", ", ".join(f"{count} {status}" for status, count in statuses.items())),
        ("parameters", _span([row["parameters"] for row in finished])),
        ("steps of a run", _span([row["steps"] for row in finished])),
        ("tokens of a run", _span([row["tokens"] for row in finished])),
        ("FLOPs of a run", _span([row["flops"] for row in finished], "{:.2g}")),
        ("learning rates", ", ".join(f"{rate:g}" for rate in sorted({row["learning_rate"] for row in rows}))),
        ("seeds", ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))),
        ("tokens trained on in all, time of it", f"{tokens:,}; {seconds / 60:,.0f} min of one device"),
        ("device; torch; commit", "; ".join(where)),
    ]
    return _table(["", "of all runs"], cells)


def loss(rows: Sequence[Row]) -> str:
    """(a): at the context trained at, with the best learning rate."""
    contexts = sorted({row["context"] for row in rows})
    lines = []
    for variant in (*BY_CONTEXT, "linear", "window"):
        found = {context: same for (context,), same in group(_of(rows, variant), "context").items()}
        cells = (f"{_loss(found[context])} ({found[context][0]['learning_rate']:g})" if context in found else ""
                 for context in contexts)  # fmt: skip
        if found:
            lines.append((label(variant), *cells))
    return _table(["held-out loss (best learning rate)", *(f"{context:,}" for context in contexts)], lines)


def beyond(chosen: Results) -> str:
    """(b): loss at the end of the context trained at, at four times that, and at the end of the longest."""
    longest = max((row["context"] for row in chosen.runs), default=0)
    lines = []
    for variant in BY_CONTEXT:
        for context in sorted({row["context"] for row in chosen.runs} - {longest}):
            bins = [row for row in _of(chosen.bins, variant) if row["context"] == context]
            bins = [row for row in bins if row["evaluated_context"] == longest]
            if not bins:
                continue
            once, four, last = (_mean_between(bins, end // 2, end) for end in (context, 4 * context, longest))
            cells = (_number(once), _number(four), _number(last), _number(four and once and four - once, "{:+.3f}"))
            lines.append((label(variant), f"{context:,}", *cells))
    heading = ["", "trained at N", "N/2 to N", "2 N to 4 N", f"{longest // 2:,} to {longest:,}", "4 N less N"]
    return _table(heading, lines)


def compute(rows: Sequence[Row]) -> str:
    """(d): the longest context."""
    longest = max((row["context"] for row in rows), default=0)
    lines = []
    for variant in COMPARED:
        same = [row for row in _of(rows, variant) if row["context"] == longest]
        if same:
            peaks = [row["peak_bytes"] for row in same if row["peak_bytes"] is not None]
            lines.append((label(variant), _loss(same), f"{same[0]['flops']:.3g}", f"{_mean(same, 'seconds'):,.0f}",
                          f"{_mean(same, 'tokens_per_second'):,.0f}",
                          f"{max(peaks) / 2**30:.1f}" if peaks else ""))  # fmt: skip
    return _table([f"at {longest:,} tokens", "held-out loss", "FLOPs", "s", "tokens/s", "peak, GiB"], lines)


def weight_state() -> str:
    """(e): of the 124M model."""
    of_shape = {table.name: table for table in size_tables(ModelShape.of(*PRESETS["small"]))}
    table = of_shape["weight_state_flop_ratio"]
    rows = [[column.show(value) for column, value in zip(table.columns, row, strict=True)] for row in table.rows]
    return _table([column.heading for column in table.columns], rows)


def powers(rows: Sequence[Row]) -> str:
    """(f): loss over that of softmax, where p = 4 and 6 were trained."""
    context = next((row["context"] for row in _of(rows, "power6_ungated")), None)
    same = [row for row in rows if row["context"] == context]
    softmax = _of(same, "softmax")
    lines = []
    for variant, published in PUBLISHED_RATIOS.items():
        if softmax and _of(same, variant):
            ratio = _mean(_of(same, variant), "held_out_loss") / _mean(softmax, "held_out_loss")
            lines.append((label(variant), _loss(_of(same, variant)), f"{ratio:.3f}", f"{published:.2f}"))
    heading = [f"at {context:,} tokens" if context else "", "held-out loss", "over softmax", "published"]
    return _table(heading, lines)


def additions(rows: Sequence[Row]) -> str:
    """(g): what gate and rotation add: parameters of the 124M model, and time of a step in these runs."""
    plain = _parameters("power_ungated")
    contexts = sorted({row["context"] for row in _of(rows, "power_ungated")})
    lines = []
    for variant in ("power_gated", "power"):
        cells = []
        for context in contexts:
            same = [row for row in rows if row["context"] == context]
            before, after = _of(same, "power_ungated"), _of(same, variant)
            ratio = _mean(before, "tokens_per_second") / _mean(after, "tokens_per_second") if after else None
            cells.append(_number(ratio, "{:.2f}x"))
        lines.append((label(variant), f"{_parameters(variant) / plain - 1:.2%}", *cells))
    heading = ["over power, p = 2", "parameters, 124M model", *(f"time at {context:,}" for context in contexts)]
    return _table(heading, lines)


def _parameters(variant: str) -> int:
    """Of the small shape with the mixer of a recipe."""
    (mixer,) = load_recipe(f"scaling:{variant}").model.mixers
    with torch.device("meta"):
        return LanguageModel(preset("small", mixers=MixerConfig(mixer.name, mixer.options))).num_parameters()


def _of(rows: Sequence[Row], variant: str) -> list[Row]:
    return [row for row in rows if row["variant"] == variant]


def _mean(rows: Sequence[Row], name: str) -> float:
    return mean(row[name] for row in rows)


def _loss(rows: Sequence[Row]) -> str:
    """The mean over seeds, and half their spread where there are several."""
    losses = [row["held_out_loss"] for row in rows]
    spread = (max(losses) - min(losses)) / 2
    return f"{mean(losses):.3f}" + (f" ± {spread:.3f}" if len(losses) > 1 else "")


def _mean_between(bins: Sequence[Row], start: int, end: int) -> float | None:
    """Mean loss over positions; the last bin ends one before the longest context."""
    inside = [row for row in bins if start <= row["start"] and row["end"] <= end]
    tokens = sum(row["tokens"] for row in inside)
    return sum(row["loss"] * row["tokens"] for row in inside) / tokens if tokens else None


def _number(value: float | None, form: str = "{:.3f}") -> str:
    return "" if value is None else form.format(value)


def _span(values: Sequence[float], form: str = "{:,}") -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "No results yet."
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
