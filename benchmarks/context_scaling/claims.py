"""The claims of the page: each a number of committed rows, and the bound that it was claimed to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.common.intervals import Interval, interval
from benchmarks.context_scaling.found import Found, pick
from benchmarks.context_scaling.grid import DOCUMENT, MIDDLE, SHORT, Run
from benchmarks.context_scaling.labels import label

LEAST = 3  # the least number of pairs, or of runs where none are compared, for a verdict
HOLDS, FAILS, OPEN, ONE, UNTAUGHT = "holds", "does not hold", "open", "one run", "not learned"


@dataclass(frozen=True)
class Claim:
    """Describes a claim.

    Attributes:
        study: whose runs it is about.
        source: the paper that makes it; "": the project.
        words: what the number is.
        bound: that the number does not exceed; with `least`, the lower bound.
        value: returns the number; None where rows are missing.
        runs: that the number is of.
    """

    study: str
    source: str
    words: str
    bound: float
    value: Callable[[Found], Interval | None]
    runs: tuple[Run, ...]
    least: bool = False


class Judged(NamedTuple):
    """Holds a claim with its number and verdict."""

    claim: Claim
    value: Interval
    verdict: str


def judged(claim: Claim, found: Found, not_learned: float) -> Judged | None:
    """Returns the verdict on a claim; None without rows.

    A claim holds, or does not, if its number is a mean of three values or more, and its 95% interval lies on one side
    of the bound. There is no verdict if one of the models has not learned (see `Found.learned`).
    """
    value = claim.value(found)
    if value is None:
        return None
    low, high, limit = (-value.high, -value.low, -claim.bound) if claim.least else (value.low, value.high, claim.bound)
    word = HOLDS if high <= limit else FAILS if low > limit else OPEN
    if value.count < LEAST:
        word = ONE if value.count == 1 else OPEN
    return Judged(claim, value, word if all(found.learned(run, not_learned) for run in claim.runs) else UNTAUGHT)


def _claim(
    study: str, run: Run, base: Run, bound: float, source: str, how: str = "less", column: str = "held_out_loss",
    least: bool = False, words: str = "",
) -> Claim:  # fmt: skip
    """Returns a claim on a column of a run less that of another one, or times it."""

    def value(found: Found) -> Interval | None:
        return (found.difference if how == "less" else found.ratio)(run, base, column)

    what = {"held_out_loss": "", "gain": "gain: ", "best_loss": "best context: "}[column]
    tokens = f", {run.tokens / 1e6:.0f}M" if run.tokens != SHORT else ""
    words = words or f"{label(run.variant)} {how} {label(base.variant)}, {run.context:,}{tokens}"
    return Claim(study, source, what + words, bound, value, (run, base), least)


def _pairs(
    study: str, pairs: Iterable[tuple[str, str, float]], source: str = "", how: str = "less",
    column: str = "held_out_loss", least: bool = False, **setting: Any,
) -> Iterator[Claim]:  # fmt: skip
    """Yields claims on pairs of variants in one setting, each with its bound."""
    for variant, other, bound in pairs:
        run, base = (pick(study, each, **setting) for each in (variant, other))
        yield _claim(study, run, base, bound, source, how, column, least)


def _softmax(study: str, bounds: dict[str, float], **setting: Any) -> Iterator[Claim]:
    pairs = [(variant, "softmax", bound) for variant, bound in bounds.items()]
    return _pairs(study, pairs, how="times", **setting)


def _beyond(context: int, variant: str, rises: bool) -> Claim:
    """Claims that the loss beyond the context of training rises, or does not."""
    run = pick("beyond", variant, context=context)

    def value(found: Found) -> Interval | None:
        rows = found.last(run, 16 * context).values()
        return interval([row[str(16 * context)] - row[str(context)] for row in rows])

    words = f"{label(variant)}: loss at 8 N to 16 N less that at N/2 to N, N = {context:,}"
    return Claim("beyond", "[CST]", words, 0.0, value, (run,), rises)


def _change(study: str, variant: str, base: str, source: str, least: bool = False) -> Claim:
    """Claims that the ratio to a baseline falls, or rises, from 1,024 to 65,536 tokens."""
    ends = [[pick(study, each, context=context) for each in (variant, base)] for context in (1024, DOCUMENT)]

    def value(found: Found) -> Interval | None:
        first, last = (found.ratio(*pair) for pair in ends)
        if first is None or last is None:
            return None
        half = None if first.half is None or last.half is None else (first.half**2 + last.half**2) ** 0.5
        return Interval(last.mean - first.mean, half, min(first.count, last.count))

    words = f"{label(variant)} times {label(base)}: at 65,536 less at 1,024"
    return Claim(study, source, words, 0.0, value, (*ends[0], *ends[1]), least)


def _equal_state(variant: str, other: str, behind: bool = False) -> Claim:
    """Claims that a model in long rows is ahead of, or behind, one in rows of its own length with a state as large."""
    run, base = (pick("scra_states", each) for each in (variant, other))
    words = f"{label(variant)}, {run.context:,}, less {label(other)}, {base.context:,}"
    return _claim("scra_states", run, base, 0.0, "[SCRA]", column="best_loss", least=behind, words=words)


def claims() -> list[Claim]:
    """Returns all claims in the order of the page."""
    others = ("softmax_gate", "window", "linear_gated", "rwkv7", "gated_delta_net")
    controls = [("power", each, 0.0) for each in (*others, "power_data", "power_ungated")]
    return [
        *_softmax("bars_1024", {"power": 1.10, "power_p4_k24": 1.05, "power_p4_k32": 1.05, "power4": 1.03,
                                "hybrid_softmax": 1.005, "hybrid_softmax_gate": 1.005,
                                "hybrid_softmax_window": 1.005, "hybrid_window": 1.05}),
        *_pairs("bars_1024", [("power", "softmax", 0.6)], how="times", column="gain", least=True),
        *_softmax("bars_4096", {"hybrid_softmax": 1.01, "hybrid_softmax_gate": 1.01, "hybrid_softmax_window": 1.01,
                                "hybrid_window": 1.06}),
        *_softmax("bar_65536", {"power": 0.99}),
        *_softmax("tokens_4096", {"power": 1.03, "power4": 1.00}, tokens=MIDDLE),
        *_pairs("controls", [*controls, *(("power_p4_k24", each, 0.0) for each in others)], context=4096),
        *_pairs("controls", [("power", "softmax_gate", 0.0), ("power", "window", 0.0)], context=DOCUMENT),
        *(claim for context in (16_384, DOCUMENT) for claim in _pairs(
            "scra_window", [("power", "window", 0.0), ("linear_gated", "window32", 0.0)], "[SCRA]", context=context)),
        _change("by_context", "power", "softmax", "[SCRA]"),
        _change("conformal", "published_p2", "softmax_plain", "[CST]", least=True),
        *(_change("conformal", each, "softmax_plain", "[CST]") for each in ("published_p2_gated", "conformal_p2")),
        *(_beyond(context, variant, rises) for context in (1024, 4096)
          for variant, rises in (("power", False), ("power_ungated", True))),
        *_pairs("powers", [("published_p2", "softmax_plain", 1.03), ("published_p4", "softmax_plain", 0.98),
                           ("published_p6", "softmax_plain", 0.97)], "[SPT]", "times"),
        *_pairs("scra_curves", [("power", "linear_gated", 0.0)], "[SCRA]", column="gain", least=True),
        _equal_state("power", "softmax"), _equal_state("window", "softmax", behind=True),
        _equal_state("power", "window"),
        *_pairs("scra_bodies", [("body_power", each, 0.0) for each in ("body_softmax", "body_linear", "body_rwkv7")],
                "[SCRA]"),
        *_pairs("scra_ratio", [(balanced, extreme, 0.0) for balanced in ("ratio_2_1", "ratio_4_1")
                               for extreme in ("ratio_1_12", "ratio_99_1")], "[SCRA]"),
        *_pairs("scra_latency", [("power", "softmax", 0.0), ("power", "softmax_gate", 0.0), ("power", "window", 0.0),
                                 ("hybrid_window", "window", 0.0)], "[SCRA]"),
    ]  # fmt: skip
