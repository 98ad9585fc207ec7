"""The studies: for every claim and figure of the report, the runs that it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.context_scaling.grid import DOCUMENT, LONG, MIDDLE, SHORT, Run

CONTEXTS = (1024, 4096, 16_384, 65_536)
SWEEP = (1e-3, 2e-3, 4e-3)
# Long contexts are best at the lowest rate of the sweep, so that a lower one is tried there.
LOW_RATE = 5e-4
# Variants that are best at the highest rate of the sweep at 4,096 tokens, so that a higher one is tried.
HIGH_RATES = ("softmax_gate", "power_p4_k24", "power_p4_k32", "power4", "hybrid_softmax", "gated_delta_net")
# These studies compare learning rates, not variants.
RATE_STUDIES = ("rates_1024", "rates_4096", "rates_16384", "rates_65536")

# The learning rate by variant and context, from the studies of rates; all others have that of `Run`.
RATES: dict[tuple[str, int], float] = dict.fromkeys(
    (*((variant, 1024) for variant in
       ("softmax", "power", "power_p4_k32", "power4", "hybrid_softmax_window", "hybrid_window")),
     ("gated_delta_net", 4096)), 4e-3,
)  # fmt: skip

BARS = ("softmax", "power", "power_p4_k24", "power_p4_k32", "power4", "hybrid_softmax", "hybrid_softmax_gate",
        "hybrid_softmax_window", "hybrid_window")  # fmt: skip
CONTROLS = ("softmax", "softmax_gate", "power", "power_data", "power_ungated", "linear_gated", "window", "rwkv7",
            "gated_delta_net")  # fmt: skip
CONFORMAL = ("softmax_plain", "published_p2", "published_p2_gated", "conformal_p2", "published_p4",
             "published_p4_gated", "conformal_p4")  # fmt: skip
ABLATIONS = ("power_eps", "power_score", "power_gate_bias_0", "power_gate_bias_7", "power_frequencies",
             "power_positions", "power_data", "power_turned", "power_warmup", "power_no_bias", "power_unnormalized",
             "power_no_convolution", "power_no_head_norm", "power_no_output_gate", "power_plain")  # fmt: skip
BODIES = ("body_softmax", "body_power", "body_linear", "body_rwkv7")


@dataclass(frozen=True)
class Study:
    """Holds a named list of runs, at seed 0.

    Attributes:
        baseline: the variant that the others are compared with.
        seeds: how many its claim takes.
    """

    name: str
    question: str
    runs: tuple[Run, ...]
    baseline: str = "softmax"
    seeds: int = 3


def _runs(variants: Iterable[str], contexts: Iterable[int], **fields: int | str | None) -> list[Run]:
    return [Run(variant, context, **fields) for context in contexts for variant in variants]  # type: ignore[arg-type]


def _swept(runs: Iterable[Run], rates: Iterable[float]) -> list[Run]:
    return [replace(run, learning_rate=rate) for rate, run in product(rates, runs)]


def _axes() -> list[Run]:
    """Returns both variants along each axis of [SCRA]. Runs that several axes share occur once."""
    variants = ("softmax", "power")
    runs = []
    for tokens in (SHORT // 4, SHORT, MIDDLE):  # updates
        runs += _runs(variants, [16_384], tokens=tokens)
    for documents in (1, 4, 16):  # documents a batch, at the same updates
        runs += _runs(variants, [16_384], tokens=SHORT // 4 * documents, documents=documents)
    for size in ("tiny", None, "small"):  # parameters
        runs += _runs(variants, [16_384], size=size)
    for row_tokens in (1024, 4096, None):  # context: the same documents in every step, those of "bar_65536"
        runs += _runs(variants, [DOCUMENT], tokens=MIDDLE, documents=8, row_tokens=row_tokens)
    return list(dict.fromkeys(runs))


STUDIES = {
    study.name: study
    for study in (
        Study("bars_1024", "How far is power attention from softmax attention at 1,024 tokens?",
              tuple(_runs(BARS, [1024]))),
        Study("bars_4096", "How far is it at 4,096 tokens?", tuple(_runs(BARS, [4096]))),
        Study("bar_65536", "Who leads at 65,536 tokens, eight documents a step, 100 million tokens?",
              tuple(_runs(("softmax", "power"), [65_536], tokens=MIDDLE, documents=8))),
        Study("tokens_4096", "Does the ratio change with the tokens of a run?",
              tuple(run for tokens in (MIDDLE, SHORT, LONG)
                    for run in _runs(("softmax", "power", "power4"), [4096], tokens=tokens))),
        Study("tokens_16384", "Does the ratio change with the tokens of a run?",
              tuple(run for tokens in (SHORT // 4, SHORT, MIDDLE)
                    for run in _runs(("softmax", "power", "hybrid_window"), [16_384], tokens=tokens))),
        Study("by_context", "What does a longer context bring?",
              tuple(_runs(("softmax", "power", "hybrid_softmax", "hybrid_window"), CONTEXTS)
                    + _runs(("power_p4_k24",), CONTEXTS[:3]))),
        Study("rates_1024", "Which learning rate is the best?",
              tuple(_swept(_runs(BARS, [1024]), (*SWEEP[1:], 8e-3))), seeds=1),
        Study("rates_4096", "Which learning rate is the best?",
              tuple(_swept(_runs(BARS + CONTROLS[1:], [4096]), SWEEP)
                    + _swept(_runs(HIGH_RATES, [4096]), (8e-3,))), seeds=1),
        Study("rates_16384", "Which learning rate is the best?",
              tuple(_swept(_runs(("softmax", "power"), [16_384]), (LOW_RATE, *SWEEP))), seeds=1),
        Study("rates_65536", "Which learning rate is the best?",
              tuple(_swept(_runs(("softmax", "softmax_gate", "power"), [65_536], tokens=MIDDLE, documents=8), SWEEP)
                    + _swept(_runs(("softmax", "power"), [65_536], tokens=MIDDLE, documents=8), (LOW_RATE,))),
              seeds=1),
        Study("controls", "Is it the power, or the gate, the block, the size of the state?",
              tuple(_runs((*CONTROLS, "power_p4_k24"), [4096])
                    + _runs(("softmax", "softmax_gate", "power", "window"), [65_536], tokens=MIDDLE, documents=8))),
        Study("conformal", "Do gate and rotation keep the loss falling with context?",
              tuple(_runs(CONFORMAL, CONTEXTS[:3]) + _runs(CONFORMAL[:4], [65_536])),
              baseline="softmax_plain", seeds=1),
        Study("ablations", "What do the differences from the sources bring?",
              tuple(_runs(("power", *ABLATIONS), [4096])), baseline="power"),
        Study("powers", "How do p = 2, 4, 6 as published compare with softmax attention?",
              tuple(_runs(("softmax_plain", "published_p2", "published_p4", "published_p6"), [4096],
                          tokens=MIDDLE)), baseline="softmax_plain"),
        Study("scra_curves", "How do in-context curves change along training?",
              tuple(_runs(("softmax", "power", "linear_gated"), [65_536], tokens=MIDDLE, documents=8)), seeds=1),
        Study("scra_window", "Is power attention ahead of a window with a state of equal size?",
              tuple(_runs(("power", "window", "linear_gated", "linear", "window32"), [16_384, 65_536])),
              baseline="window"),
        Study("scra_axes", "Who gains from updates, documents a batch, parameters, and context itself?",
              tuple(_axes()), seeds=1),
        Study("scra_bodies", "What do mixers come to in the body of RWKV-7?", tuple(_runs(BODIES, [4096])),
              baseline="body_softmax", seeds=1),
        Study("scra_ratio", "How should equal FLOPs be shared by weights and state?",
              tuple(_runs(("ratio_1_12", "ratio_2_1", "ratio_4_1", "ratio_99_1"), [65_536])),
              baseline="ratio_1_12", seeds=1),
        Study("scra_states", "Who leads with equal states, parameters and tokens?",
              (*_runs(("softmax",), [1024]), *_runs(("window", "power"), [4096]))),
        Study("scra_latency", "Who leads at 65,536 tokens after equal time?",
              (*_runs(("softmax", "softmax_gate"), [65_536]),
               *_runs(("power", "window", "hybrid_window"), [65_536], tokens=MIDDLE)), seeds=1),
        Study("beyond", "What happens beyond the context trained at, up to 16 times?",
              tuple(_runs(("softmax", "softmax_gate", "power", "power_data", "power_ungated", "hybrid_softmax",
                           "hybrid_window"), [1024, 4096]))),
    )
}  # fmt: skip


def grid(names: Sequence[str], seeds: Sequence[int] | None = None) -> list[Run]:
    """Returns the runs of some studies in order of priority: study by study, in a study seed by seed.

    The longest runs show a trend, for which one seed is enough: they have seed 0 only.

    Args:
        names: of `STUDIES`; ValueError for others.
        seeds: instead of those of each study, 0, 1, ...
    """
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        raise ValueError(f"a study is one of {', '.join(STUDIES)}; got {unknown[0]!r}")
    runs: list[Run] = []
    for study in (STUDIES[name] for name in names):
        for seed in range(study.seeds) if seeds is None else seeds:
            chosen = [run for run in study.runs if seed == 0 or run.tokens < LONG]
            runs += [replace(with_rate(run, study), seed=seed) for run in chosen]
    return list(dict.fromkeys(runs))


def with_rate(run: Run, study: Study) -> Run:
    """Returns the run with the learning rate of its variant and context, unless the study was there to find it."""
    if study.name in RATE_STUDIES:
        return run
    return replace(run, learning_rate=RATES.get((run.variant, run.trained_at), run.learning_rate))
