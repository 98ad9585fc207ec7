"""The sections of the report, one for each study: its claims, its tables and its figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.context_scaling import figures, tables, verdicts
from benchmarks.context_scaling.found import Found, baseline_of, runs_of
from benchmarks.context_scaling.grid import setting_of
from benchmarks.context_scaling.results import version
from benchmarks.context_scaling.studies import RATE_STUDIES, STUDIES, grid


@dataclass(frozen=True)
class Section:
    """Describes a study's part of the page.

    Attributes:
        heading: of the section.
        text: the claim and its source.
        figure: draws the study; returns None where there are no rows.
        tables: instead of the comparison with the study's baseline.
    """

    heading: str
    text: str
    figure: Callable[..., Any]
    tables: Sequence[Callable[..., str]] = (tables.comparison,)


SECTIONS = {
    "bars_1024": Section(
        "Against softmax attention at 1,024 tokens",
        "The claims are upper bounds of the ratio of held-out losses: 1.10 for p = 2 alone, 1.05 for p = 4 with "
        "at most 10 times the state of p = 2 (K = 24, or K = 32 with two key/value heads), 1.03 for p = 4 with K = 64, "
        "1.005 with one softmax layer in six, and 1.05 for layers of power attention and windows of 512 in turns. The "
        "gain from context of p = 2 should be at least 60% of that of softmax attention.",
        figures.differences),
    "bars_4096": Section(
        "Against softmax attention at 4,096 tokens",
        "The claims are upper bounds again: 1.01 with one softmax layer in six, and 1.06 for power attention and "
        "windows in turns.",
        figures.differences),
    "bar_65536": Section(
        "Against softmax attention at 65,536 tokens",
        "Every step holds eight documents, and a run 100 million tokens. The claims are a ratio of at most 0.99 "
        "for p = 2, and that p = 2 is below the final loss of softmax attention after a third of its time.",
        figures.by_cost),
    "tokens_4096": Section(
        "Longer runs at 4,096 tokens",
        "Does the ratio to softmax attention fall with the number of tokens in a run? The claims for 100 million "
        "tokens are 1.03 for p = 2 and 1.00 for p = 4.",
        partial(figures.by_number, field="tokens", ratio=True)),
    "tokens_16384": Section(
        "Longer runs at 16,384 tokens",
        "Does the lead over softmax attention last in longer runs? Runs have 8, 30 and 100 million tokens.",
        partial(figures.by_number, field="tokens", ratio=True)),
    "by_context": Section(
        "Loss and gain by the context of training",
        "[SCRA] claims that the ratio of power attention to softmax attention falls as the context grows. The second "
        "table compares p = 2 with softmax attention at equal tokens, FLOPs and time. Those at equal FLOPs and time "
        "are losses on four of the held-out documents, at the last point along the cheaper run, after seven eighths of "
        "it. There the loss of the other run is interpolated between its measured points, and its learning rate is "
        "still higher. The third table shows tokens per second of training steps.",
        partial(figures.by_number, field="context"),
        (tables.comparison, tables.budgets, tables.speeds)),
    "beyond": Section(
        "Beyond the context of training",
        "[CST, Figure 2] claims that the loss of power attention with a gate does not rise beyond the context of "
        "training, while that of power attention without a gate does. It says nothing of softmax attention, which is "
        "here for comparison. The table compares the mean losses at "
        "positions 2 N to 4 N and 8 N to 16 N with that at N/2 to N of the same run, where N is the context of "
        "training. The figure has a panel for each version of the corpus, because losses by position depend on the "
        "version.",
        figures.by_position, (tables.beyond,)),
    "controls": Section(
        "Controls",
        "Does a difference come from the power, the gate, the block, or the size of the state? This study changes one "
        "thing at a time between power attention and softmax attention, and adds two other recurrent mixers with "
        "blocks of their own. ALiBi is not among the controls, because it is a gate with a constant value (M18). "
        "`tests/layers/test_gated_softmax.py` checks this. A window with the state of p = 4, K = 24 would have 8,912 "
        "tokens, so at 4,096 tokens softmax attention is this window. The runs at 65,536 tokens have eight documents "
        "a step and 100 million tokens.",
        figures.differences),
    "scra_curves": Section(
        "Losses by position along training",
        "[SCRA, 5.3] claims that power attention learns in its context nearly as well as softmax attention, without "
        "a number, and better than the linear attention of RWKV-7. \"p = 1\" is linear attention with a gate.",
        figures.checkpoints),
    "scra_window": Section(
        "Windows with a state of the same size",
        "[SCRA] claims that power attention is ahead of a window whose state has the same size. The state of p = 2 has "
        "135,200 elements per head, and a window of 1,024 has 131,072. Linear attention has 4,160, and a window of 32 "
        "has 4,096. The source compares linear attention with a gate and a division by the sum of the weights, which "
        "is power attention with p = 1. \"Linear\" has neither, so its rows say nothing about the source's claim.",
        figures.differences),
    "scra_axes": Section(
        "Axes of scale",
        "[SCRA] varies updates, documents per batch, parameters and context. For the context, every step holds "
        "the same documents either whole or cut into rows of 1,024 and 4,096 tokens. The rows of 1,024 tokens have the "
        "learning rate of runs at 1,024 tokens, 4e-3, and the others 2e-3. Each model is evaluated on rows as long as "
        "those of its training.",
        figures.axes_of_scale),
    "scra_bodies": Section(
        "The body of RWKV-7",
        "[SCRA] trains in the body of RWKV-7: token shift, channel mixing and an output gate around the mixer.",
        figures.differences),
    "scra_ratio": Section(
        "Ratios of weight FLOPs to state FLOPs",
        "[SCRA Figure 2] claims that at equal FLOPs a ratio near 1 is better than either extreme. The models were "
        "chosen by the count of [SCRA], in which a window costs half of what it costs in our count. The paper "
        "prints the ratios 1:12, 4:1 and 99:1. They do not follow from the shapes that it lists: by the count that "
        "gives every entry of its Table 2 (`sympow.ops.cost.weight_state_flop_ratio`), these shapes have 1:10.2, "
        "2.57:1 and 206:1.",
        figures.by_cost),
    "scra_states": Section(
        "States of equal size",
        "[SCRA Table 4] compares softmax attention in rows of 1,024 tokens with a window of 1,024 and with p = 2 in "
        "rows of 4,096. All have states of about the same size, and equally many parameters, tokens a step and FLOPs. "
        "Their best-context losses are 1.631, 1.638 and 1.613, with models of 750 million parameters. Here they have "
        "17 million, and a run has 30 million tokens. The FLOPs are in the table and not equal.",
        figures.by_position, (tables.best_context,)),
    "scra_latency": Section(
        "Equal time of training",
        "No source compares at equal time. Here softmax attention gets 30 million tokens, without and with a gate. "
        "Power attention, a window and a hybrid of both get 100 million.",
        figures.by_cost),
    "conformal": Section(
        "Gate and rotation as published",
        "[CST] claims that without a gate the ratio to softmax attention rises with the context of training. With a "
        "gate it does not, and rotation by the data improves the loss further. The models have no block. Their eps, "
        "scores, biases, frequencies and positions are as published.",
        partial(figures.by_number, field="context", ratio=True)),
    "ablations": Section(
        "Effect of each default",
        "Every variant changes one option of the default, either to the value of a source or to none.",
        figures.differences),
    "powers": Section(
        "p = 2, 4 and 6 as published",
        "[SPT] reports losses of 1.03, 0.98 and 0.97 times that of softmax attention at 4,096 tokens, without gates. "
        "The models have no block. They have 17.8 million weights where [SPT] has 124 million, and a run of 100 "
        "million tokens is 0.2% of one of [SPT]. The learning rate was not swept for these variants. So \"refuted\" "
        "holds at this size, length and rate only.",
        figures.differences),
    "rates_1024": Section(
        "Learning rates at 1,024 tokens",
        "The table holds the loss of each variant at 2e-3, and the differences from it at the other rates, over pairs. "
        "\"(no pair)\" marks a difference of means instead, where no run at 2e-3 has the same seed and corpus. A cell "
        "is empty if the study has no such run. The best rate of each variant, by pairs, is in bold; the other "
        "studies at 1,024 tokens use rates from this sweep. If the best rate is the lowest or the highest of a sweep, "
        "more rates are needed.",
        figures.learning_rates, (tables.rates,)),
    "rates_4096": Section(
        "Learning rates at 4,096 tokens",
        "The controls use the best rate of Gated DeltaNet, 4e-3. All other runs at 4,096 tokens have a rate of 2e-3. "
        "The table is like that at 1,024 tokens.",
        figures.learning_rates, (tables.rates,)),
    "rates_16384": Section(
        "Learning rates at 16,384 tokens",
        "All other studies at 16,384 tokens use a rate of 2e-3. The table is like that at 1,024 tokens.",
        figures.learning_rates, (tables.rates,)),
    "rates_65536": Section(
        "Learning rates at 65,536 tokens",
        "A step holds eight documents, and a run 100 million tokens. All other studies at 65,536 tokens use a rate of "
        "2e-3. The table is like that at 1,024 tokens.",
        figures.learning_rates, (tables.rates,)),
}  # fmt: skip


def measured(found: Found, study: str) -> bool:
    """Returns whether a study has something to show: a verdict, or a comparison in two settings or of two rates."""
    compared = {setting_of(run) for run in runs_of(study) if baseline_of(run, study) != run
                and found.ratio(run, baseline_of(run, study)) is not None}  # fmt: skip
    return len(compared) > (0 if study in RATE_STUDIES else 1) or bool(told(found, study))


def told(found: Found, study: str) -> list[str]:
    """Returns the verdicts of a study for which there are rows."""
    return [sentence for sentence in _verdicts(found, study) if not verdicts.untold(sentence)]


def results(found: Found, figures_beside: str) -> str:
    """Returns the sections of all studies that have something to show, in Markdown."""
    parts = []
    for name, section in SECTIONS.items():
        if measured(found, name):
            list_ = "\n".join(f"- {sentence}" for sentence in told(found, name))
            done, runs = _counts(found, name)
            parts += [f"### {section.heading}", section.text, *([list_] if list_ else []),
                      picture(name, figures_beside),
                      *(table(found, study=name) for table in section.tables),
                      f"Study `{name}`: {done} of {runs} runs are finished.{_corpora(found, name)}"]  # fmt: skip
    return "\n\n".join(parts) or tables.MISSING.capitalize() + "."


def missing(found: Found) -> str:
    """Returns, in Markdown, the studies with unfinished runs or with claims for which there are no pairs."""
    parts = []
    for name, section in SECTIONS.items():
        done, runs = _counts(found, name)
        claims = [claim for sentence in _verdicts(found, name) if (claim := verdicts.untold(sentence))]
        if done < runs or claims:
            text = "" if measured(found, name) else f" {section.text}"
            parts.append(f"- **{section.heading}** (`{name}`, {done} of {runs} runs).{text}")
            parts += [f"    - {claim}" for claim in claims]
    return "\n".join(parts) or "All runs of all studies are finished."


def picture(name: str, figures_beside: str) -> str:
    """Returns the line that shows a study's figure."""
    return f"![{STUDIES[name].question}]({figures_beside}/{name}.png)"


def _verdicts(found: Found, study: str) -> list[str]:
    return verdicts.VERDICTS[study](found) if study in verdicts.VERDICTS else []


def _corpora(found: Found, name: str) -> str:
    """Names the versions of the corpus that a study's rows are of if the studies of the page have several."""
    if len(found.corpora(grid(list(SECTIONS)))) < 2:
        return ""
    here = [f"`{version(corpus)}`" for corpus in found.corpora(runs_of(name))]
    return f" Corpus: {' and '.join(here)}."


def _counts(found: Found, name: str) -> tuple[int, int]:
    """Returns how many runs of a study are finished, and how many it has."""
    runs = grid([name])
    return sum(map(found.finished, runs)), len(runs)
