"""The tables of docs/results/context-scaling.md, and those that `python -m benchmarks.context_scaling show` prints."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.intervals import Interval
from benchmarks.context_scaling.claims import LEAST, claims, judged
from benchmarks.context_scaling.found import Found, baseline_of, runs_of
from benchmarks.context_scaling.grid import SETTING, Run, setting_of
from benchmarks.context_scaling.labels import label, setting
from benchmarks.context_scaling.studies import STUDIES, grid
from benchmarks.pages.prose import table


def claims_table(found: Found, not_learned: float, least: int = LEAST) -> str:
    """Returns a row for each claim of which there are `least` pairs: its bound, the number, pairs, verdict, study."""
    lines = []
    for claim in claims():
        row = judged(claim, found, not_learned)
        if row is not None and row.value.count >= least:
            bound = f"{'>=' if claim.least else '<='} {claim.bound:g}"
            words = " ".join(filter(None, [claim.source, claim.words]))
            lines.append([words, bound, row.value.text(), str(row.value.count), row.verdict])
    return table("claim | bound | value | pairs | verdict", lines)


def studies_table(found: Found) -> str:
    """Returns a row for each study: its question, and how many of its runs are finished."""
    lines = []
    for study in STUDIES.values():
        runs = grid([study.name])
        lines.append([f"`{study.name}`", study.question, f"{sum(map(found.finished, runs))} of {len(runs)}"])
    return table("study | question | runs", lines, left=(0, 1))


def comparison(found: Found, study: str, not_learned: float) -> str:
    """Returns a row for each finished run of a study, beside its baseline in the same setting."""
    runs, base = runs_of(study), label(STUDIES[study].baseline)
    lines: list[list[str]] = []
    for run in sorted(runs, key=lambda run: [str(value or 0).zfill(12) for value in setting_of(run)]):
        if not found.rows(run):
            continue
        other = baseline_of(run, study)
        mark = "" if found.learned(run, not_learned) else " (not learned)"
        loss = _text(found.mean(run, "held_out_loss"), 3) + mark
        less, times = (None, None) if other == run else (found.difference(run, other), found.ratio(run, other))
        cells = [setting(run, varying(runs)), f"{label(run.variant)}, {run.learning_rate:g}", loss,
                 _text(less, 3, sign=True), _text(times, 3), _text(found.mean(run, "best_loss"), 3),
                 _text(found.mean(run, "gain"), 2), str(less.count if less else "")]  # fmt: skip
        lines.append(cells)
    return table(
        f" | model, rate | loss | less {base} | times {base} | best context | gain | pairs", lines, left=(0, 1)
    )


def varying(runs: Sequence[Run]) -> list[str]:
    """Returns the parts of the setting in which runs differ; the context alone if it tells all settings apart."""
    if len({run.context for run in runs}) == len({setting_of(run) for run in runs}):
        return ["context"]
    return [name for name in SETTING if len({getattr(run, name) for run in runs}) > 1]


def _text(value: Interval | None, digits: int, sign: bool = False) -> str:
    return "" if value is None else value.text(digits, sign)
