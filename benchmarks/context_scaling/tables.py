"""The report's tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.context_scaling.found import Found, baseline_of, pick, runs_of, varying
from benchmarks.context_scaling.grid import DOCUMENT, Run, setting_of
from benchmarks.context_scaling.labels import label, setting
from benchmarks.context_scaling.paired import Interval
from benchmarks.context_scaling.results import Row
from benchmarks.context_scaling.studies import STUDIES

MISSING = "not run yet"


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
            compared = ["", "", ""]
        else:
            share = found.ratio(run, other, "gain")
            compared = [_text(found.difference(run, other), 3, sign=True), _text(found.ratio(run, other), 3),
                        "" if share is None else f"{share.mean:.0%}"]  # fmt: skip
        lines.append([*cells, _text(found.mean(run, "held_out_loss"), 3), *compared[:2], gains, compared[2],
                      str(len(found.rows(run)))])  # fmt: skip
    return table(["trained at" if varying(runs) == ["context"] else "", "", "held-out loss", f"less {base}",
                  f"over {base}", "gain", "gain over it", "seeds"], lines)  # fmt: skip


def rates(found: Found, study: str) -> str:
    """Shows every variant's loss by learning rate, the best in bold. Leaves out what has no finished run."""
    runs = [run for run in runs_of(study) if found.rows(run)]
    sweep = sorted({run.learning_rate for run in runs})
    lines = []
    for variant in dict.fromkeys(run.variant for run in runs):
        losses = {rate: found.mean(pick(study, variant, learning_rate=rate), "held_out_loss") for rate in sweep}
        known = {rate: loss.mean for rate, loss in losses.items() if loss is not None}
        cells = [_text(losses[rate], 3) or MISSING for rate in sweep]
        best = sweep.index(min(known, key=known.__getitem__))
        cells[best] = f"**{cells[best]}**"
        lines.append([label(variant), *cells])
    return table(["learning rate", *(f"{rate:g}" for rate in sweep)], lines)


def budgets(found: Found, study: str) -> str:
    """Compares power with softmax attention at equal tokens, FLOPs and time, where the first of the two runs ends.

    The loss of the longer run is interpolated. Its learning rate has not fallen to its last value at that point.
    """
    lines = []
    for run in (each for each in runs_of(study) if each.variant == "power"):
        base = pick(study, "softmax", **_setting(run))
        if not (found.rows(run) and found.rows(base)):
            continue
        cells = [_text(found.difference(run, base), 3, sign=True) or MISSING]
        for costs in (_flops, _seconds):
            ours, theirs = costs(found, run), costs(found, base)
            if ours is None or theirs is None:
                cells += [MISSING]
                continue
            least, most = sorted((ours[-1][0], theirs[-1][0]))
            cells += [f"{_at(least, ours) - _at(least, theirs):+.3f} ({most / least:.1f}x)"]
        lines.append([setting(run, varying(runs_of(study))), *cells])
    return table(["trained at", "at equal tokens", "at equal FLOPs", "at equal time"], lines)


def beyond(found: Found, study: str) -> str:
    """Shows losses up to the end of the context trained at and beyond it."""
    lines = []
    for run in runs_of(study):
        far = min(16 * run.trained_at, DOCUMENT)
        rows = [of_seed[-1] for of_seed in found.positions(run, far) if of_seed]
        if rows:
            ends = [mean(row[str(run.trained_at * n)] for row in rows) for n in (1, 4, 16) if run.trained_at * n <= far]
            cells = [*(f"{end:.3f}" for end in ends), f"{ends[-1] - ends[0]:+.3f}"]
            lines.append([f"{run.trained_at:,} tokens", label(run.variant), *cells])
    return table(["trained at N", "", "N/2 to N", "2 N to 4 N", "8 N to 16 N", "the last less the first"], lines)


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


def _flops(found: Found, run: Run) -> list[tuple[float, float]] | None:
    """Returns losses along training by FLOPs, means over seeds; None where these are not known."""
    flops, curve = found.mean(run, "flops"), along(found, run)
    return None if flops is None or not curve else [(share * flops.mean, loss) for share, loss in curve]


def _seconds(found: Found, run: Run) -> list[tuple[float, float]] | None:
    """Returns the same by seconds alone on a GPU."""
    speed, curve = found.speed(run), along(found, run)
    return None if speed is None or not curve else [(share * run.tokens / speed, loss) for share, loss in curve]


def along(found: Found, run: Run) -> list[tuple[float, float]]:
    """Returns (share of the run, held-out loss), the mean over seeds, at every point along training."""
    curves: list[list[Row]] = found.positions(run)
    if not curves:
        return []
    return [(points[0]["step"] / run.steps, mean(point["held_out_loss"] for point in points))
            for points in zip(*curves, strict=True)]  # fmt: skip


def _at(cost: float, curve: Sequence[tuple[float, float]]) -> float:
    """Returns the loss at a cost, on the line through the points around it."""
    before, after = next((pair for pair in pairwise(curve) if cost <= pair[1][0]), curve[-2:])
    share = (cost - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])
