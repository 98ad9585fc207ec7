"""The report's tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any

from benchmarks.context_scaling.found import Found, baseline_of, pick, runs_of, varying
from benchmarks.context_scaling.grid import Run, setting_of
from benchmarks.context_scaling.labels import label, setting
from benchmarks.context_scaling.paired import Interval, interval
from benchmarks.context_scaling.results import Row
from benchmarks.context_scaling.studies import STUDIES

MISSING = "not run yet"
Curve = Sequence[tuple[float, float]]  # costs and losses


def comparison(found: Found, study: str) -> str:
    """Compares all finished runs of a study with its baseline in the same setting."""
    runs, base = runs_of(study), label(STUDIES[study].baseline)
    lines: list[list[str]] = []
    for run in sorted(runs, key=lambda run: [str(value or 0).zfill(12) for value in setting_of(run)]):
        other = baseline_of(run, study)
        alike = [each for each in runs if (each.variant, setting_of(each)) == (run.variant, setting_of(run))]
        rate = f", rate {run.learning_rate:g}" if len(alike) > 1 else ""
        if not found.rows(run):
            continue
        cells = [setting(run, varying(runs)), label(run.variant) + rate]
        gains = _text(found.mean(run, "gain"), 2)
        if other == run:
            compared = ["", "", "", ""]
        else:
            less, share = found.difference(run, other), found.ratio(run, other, "gain")
            compared = [_text(less, 3, sign=True), _text(found.ratio(run, other), 3),
                        "" if share is None else f"{share.mean:.0%}", str(less.count if less else 0)]  # fmt: skip
        losses = [_text(found.mean(run, name), 3) for name in ("held_out_loss", "best_loss")]
        lines.append([*cells, losses[0], *compared[:2], losses[1], gains, compared[2], str(len(found.rows(run))),
                      compared[3]])  # fmt: skip
    return table(["trained at" if varying(runs) == ["context"] else "", "", "held-out loss", f"less {base}",
                  f"over {base}", "best-context loss", "gain", "gain over it", "runs", "pairs"], lines)  # fmt: skip


def rates(found: Found, study: str) -> str:
    """Shows every variant's loss at the default learning rate, and the differences from it over pairs at the others.

    A difference without pairs is that of the means, and the cell says so. The best rate is in bold, unless there is no
    difference over pairs. Variants without runs at the default rate are left out.
    """
    sweep = sorted({run.learning_rate for run in runs_of(study)} - {Run.learning_rate})
    lines = []
    for variant in dict.fromkeys(run.variant for run in runs_of(study)):
        of_rate = {run.learning_rate: run for run in runs_of(study) if run.variant == variant}
        base = of_rate[Run.learning_rate]
        of_base = found.mean(base, "held_out_loss")
        if of_base is None:
            continue
        cells, known = [_text(of_base, 3)], [0.0]
        for run in map(of_rate.get, sweep):
            loss, change = (found.mean(run, "held_out_loss"), found.difference(run, base)) if run else (None, None)
            known.append(inf if change is None else change.mean)
            if loss is not None and change is None:
                cells.append(f"{loss.mean - of_base.mean:+.3f} (no pair)")
            else:
                cells.append(MISSING if run and loss is None else _text(change, 3, sign=True))
        if known.count(inf) < len(sweep):
            best = known.index(min(known))
            cells[best] = f"**{cells[best]}**"
        lines.append([label(variant), *cells])
    return table(["", f"loss at {Run.learning_rate:g}", *(f"change at {rate:g}" for rate in sweep)], lines)


def budgets(found: Found, study: str) -> str:
    """Compares power with softmax attention at equal tokens, and at equal FLOPs and time.

    The latter are those of the last point along the cheaper run. The loss of the other run is interpolated; its
    learning rate has not fallen as far at that point.
    """
    lines = []
    for run in (each for each in runs_of(study) if each.variant == "power"):
        base = pick(study, "softmax", **_setting(run))
        if not (found.rows(run) and found.rows(base)):
            continue
        cells = [_text(found.difference(run, base), 3, sign=True) or MISSING]
        for cost in (_flops, _seconds):
            costs = [cost(found, each) for each in (run, base)]
            values = [_at_equal_cost(*pair) for pair in _curves(found, (run, base), costs)]
            times = f" ({max(costs) / min(costs):.1f}x)" if values else MISSING
            cells.append(_text(interval(values), 3, sign=True) + times)
        lines.append([setting(run, varying(runs_of(study))), *cells])
    return table(["trained at", "at equal tokens", "at equal FLOPs", "at equal time"], lines)


def beyond(found: Found, study: str) -> str:
    """Shows losses beyond the context trained at less those in the last half of it, means over all runs."""
    lines = []
    for run in runs_of(study):
        context = run.trained_at
        rows = found.last(run, 16 * context).values()
        if rows:
            changes = [interval([row[str(n * context)] - row[str(context)] for row in rows]) for n in (4, 16)]
            cells = [*(_text(change, 3, sign=True) for change in changes), str(len(rows))]
            lines.append([f"{context:,} tokens", label(run.variant), *cells])
    heading = ["2 N to 4 N less N/2 to N", "8 N to 16 N less N/2 to N", "runs"]
    return table(["trained at N", "", *heading], lines)


def best_context(found: Found, study: str) -> str:
    """Compares the best-context losses and FLOPs of a study's runs, which have different contexts of training."""
    runs = runs_of(study)
    base = pick(study, STUDIES[study].baseline)
    lines = []
    for run in (each for each in runs if found.rows(each)):
        less = None if run == base else found.difference(run, base, "best_loss")
        losses = [_text(found.mean(run, "best_loss"), 3), _text(less, 3, sign=True)]
        counts = [str(len(found.rows(run))), str(less.count) if less else ""]
        flops = f"{_flops(found, run) / 1e15:.1f}"
        lines.append([setting(run, ["context"]), label(run.variant), flops, *losses, *counts])
    heading = ["trained at", "", "FLOPs (10^15)", "best-context loss", f"less {label(base.variant)}", "runs", "pairs"]
    return table(heading, lines)


def speeds(found: Found, study: str) -> str:
    """Shows tokens a second of training steps, alone on a GPU, for a study's variants."""
    variants = {run.variant for run in runs_of(study)}
    cases = [row for row in found.times() if row["variant"] in variants]
    contexts = sorted({row["context"] for row in cases})
    lines = []
    for variant, mode in dict.fromkeys((row["variant"], row["mode"]) for row in cases):
        rows = {row["context"]: row for row in cases if (row["variant"], row["mode"]) == (variant, mode)}
        cells = [f"{rows[context]['tokens_per_second']:,}" if context in rows else MISSING for context in contexts]
        lines.append([label(variant), mode, *cells])
    return table(["tokens/s", "", *(f"{context:,}" for context in contexts)], lines)


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown; without rows it says that nothing is there."""
    if not rows:
        return f"({MISSING})"
    lines = [heading, ["---", "---", *["---:"] * (len(heading) - 2)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _setting(run: Run) -> dict[str, Any]:
    return {"context": run.context, "tokens": run.tokens, "documents": run.documents, "row_tokens": run.row_tokens}


def _text(value: Interval | None, digits: int, sign: bool = False) -> str:
    return "" if value is None else value.text(digits, sign)


def _flops(found: Found, run: Run) -> float:
    """Returns the FLOPs of a run; 0 where they are not known."""
    flops = found.mean(run, "flops")
    return 0.0 if flops is None else flops.mean


def _seconds(found: Found, run: Run) -> float:
    """Returns the seconds of a run alone on a GPU; 0 where they are not known."""
    speed = found.speed(run)
    return 0.0 if speed is None else run.tokens / speed


def _curves(found: Found, runs: Sequence[Run], costs: Sequence[float]) -> list[list[Curve]]:
    """Returns, for every sample that all runs have, losses along each run by its cost; [] if a cost is not known."""
    if not all(costs):
        return []
    known = [found.along(run) for run in runs]
    samples = sorted(set.intersection(*(set(curves) for curves in known)))
    return [
        [[(row["step"] / run.steps * cost, row["held_out_loss"]) for row in curves[sample]]
         for run, cost, curves in zip(runs, costs, known, strict=True)]
        for sample in samples
    ]  # fmt: skip


def _at_equal_cost(ours: Curve, theirs: Curve) -> float:
    """Returns the difference of two losses at the last point of the cheaper curve."""
    least = min(ours[-1][0], theirs[-1][0])
    return _at(least, ours) - _at(least, theirs)


def along(found: Found, runs: Sequence[Run]) -> dict[Run, list[tuple[float, list[Row]]]]:
    """Returns for every run that has any: (share of the run, rows) at points along training.

    The rows are those of the samples that all these runs have or, if there are none, of all samples of each run.
    """
    known = {run: curves for run in runs if (curves := found.along(run))}
    common = set.intersection(*map(set, known.values())) if known else set()
    points = {}
    for run, curves in known.items():
        chosen = [{row["step"]: row for row in rows} for sample, rows in curves.items() if sample in (common or curves)]
        steps = sorted(set.intersection(*map(set, chosen)))
        points[run] = [(step / run.steps, [curve[step] for curve in chosen]) for step in steps]
    return points


def _at(cost: float, curve: Curve) -> float:
    """Returns the loss at a cost, on the line through the points around it."""
    before, after = next((pair for pair in pairwise(curve) if cost <= pair[1][0]), curve[-2:])
    share = (cost - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])
