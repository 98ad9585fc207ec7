"""Verdicts on each claim, in sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from benchmarks.context_scaling.found import Found, pick, runs_of
from benchmarks.context_scaling.grid import DOCUMENT, LONG, MIDDLE, SHORT, Run
from benchmarks.context_scaling.labels import label
from benchmarks.context_scaling.labels import setting as in_words
from benchmarks.context_scaling.paired import Interval, interval
from benchmarks.context_scaling.studies import ABLATIONS
from benchmarks.context_scaling.tables import MISSING

REPRODUCED, REFUTED, OPEN = "Reproduced", "Refuted", "Left open"
NO_ROWS = f"**{OPEN}**, {MISSING}: "
LEAST = 3  # the least number of pairs, or of runs where none are compared, for a verdict on a claim


def judged(value: Interval | None, most: float, what: str, least: bool = False, of: str = "pair") -> str:
    """Returns a sentence: is a number at most (`least`: at least) as large as claimed?

    A claim is reproduced or refuted if the number is a mean of three values or more and the 95% interval lies on one
    side of the bound. `of` says what each value is of, a pair of runs or a run."""
    claim = f"claimed at {'least' if least else 'most'} {most:.4g}"
    if value is None:
        return f"{NO_ROWS}{what}, {claim}."
    low, high, limit = (-value.high, -value.low, -most) if least else (value.low, value.high, most)
    word = REPRODUCED if high <= limit else REFUTED if low > limit else OPEN
    if value.count < LEAST:
        word = OPEN
    return f"**{word}**: {what} is {value.text()} ({counted(value, of)}; {claim})."


def counted(value: Interval, of: str = "pair") -> str:
    """Returns "3 pairs": how many values a mean is of."""
    return f"{value.count} {of}{'s' if value.count > 1 else ''}"


def listed(parts: Sequence[str]) -> str:
    """Returns "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def untold(sentence: str) -> str:
    """Returns the claim of a verdict for which there are no rows; "" for other verdicts."""
    return sentence.removeprefix(NO_ROWS) if sentence.startswith(NO_ROWS) else ""


def loss_of(variant: str) -> str:
    """Names the loss of a variant. The name of the variant is quoted, because it can contain commas."""
    return f'the loss of "{label(variant)}"'


def over_softmax(found: Found, study: str, bounds: dict[str, float], **setting: Any) -> list[str]:
    """Judges losses over that of softmax attention in the same block."""
    base = pick(study, "softmax", **setting)
    ratios = {variant: found.ratio(pick(study, variant, **setting), base) for variant in bounds}
    after = f" in runs of {base.tokens / 1e6:.0f} million tokens" if "tokens" in setting else ""
    where = f"over that of softmax attention at {base.context:,} tokens{after}"
    return [judged(ratios[each], most, f"{loss_of(each)} {where}")
            for each, most in bounds.items()]  # fmt: skip


def bars_1024(found: Found) -> list[str]:
    bounds = {"power": 1.10, "power_p4_k24": 1.05, "power_p4_k32": 1.05, "power4": 1.03, "hybrid_softmax": 1.005,
              "hybrid_softmax_gate": 1.005, "hybrid_softmax_window": 1.005, "hybrid_window": 1.05}  # fmt: skip
    run, base = (pick("bars_1024", variant) for variant in ("power", "softmax"))
    what = "the gain from context of p = 2 over that of softmax attention"
    share = judged(found.ratio(run, base, "gain"), 0.6, what, least=True)
    return [*over_softmax(found, "bars_1024", bounds), share]


def bars_4096(found: Found) -> list[str]:
    bounds = {"hybrid_softmax": 1.01, "hybrid_softmax_gate": 1.01, "hybrid_softmax_window": 1.01,
              "hybrid_window": 1.06}  # fmt: skip
    return over_softmax(found, "bars_4096", bounds)


def bar_65536(found: Found) -> list[str]:
    run, base = (pick("bar_65536", variant) for variant in ("power", "softmax"))
    what = "the time after which p = 2 ends below the final loss of softmax attention, over that of softmax attention,"
    timed = judged(time_to_end_below(found, run, base), 1 / 3, what)
    return [*over_softmax(found, "bar_65536", {"power": 0.99}), timed, *lead_by_position(found, run, base)]


def time_to_end_below(found: Found, run: Run, base: Run) -> Interval | None:
    """Returns the time of a run over that of the baseline, infinite unless all pairs end below the baseline's loss.

    The times are those of single runs on a GPU. None if losses or times are missing. The time to reach the loss may be
    shorter, but losses before the end are of fewer documents."""
    ours, theirs, difference = found.speed(run), found.speed(base), found.difference(run, base)
    if ours is None or theirs is None or difference is None:
        return None
    rows, of_base = found.rows(run), found.rows(base)
    below = all(rows[each]["held_out_loss"] <= of_base[each]["held_out_loss"] for each in rows.keys() & of_base.keys())
    return Interval(run.tokens / ours / (base.tokens / theirs) if below else inf, None, difference.count)


def lead_by_position(found: Found, run: Run, base: Run) -> list[str]:
    """Says by how much a run is ahead early and late in the context. An early lead is no use of context."""
    ours, theirs = found.last(run), found.last(base)
    places = {"at positions 32 to 63": "64", "at positions 64 to 127": "128",
              "in the last half of the rows": str(run.trained_at)}  # fmt: skip
    leads = {place: interval([theirs[sample][end] - ours[sample][end] for sample in ours if sample in theirs])
             for place, end in places.items()}  # fmt: skip
    told = [f"{lead.text()} nats {place}" for place, lead in leads.items() if lead is not None]
    if not told:
        return []
    lead = f'"{label(run.variant)}" is ahead by {listed(told)}.'
    return [f"{lead} A lead at the first positions does not come from the context."]


def tokens_4096(found: Found) -> list[str]:
    bounds = {"power": 1.03, "power4": 1.00}
    sentences = over_softmax(found, "tokens_4096", bounds, tokens=MIDDLE)
    for variant, most in bounds.items():
        ratios = [found.ratio(*(pick("tokens_4096", each, tokens=tokens) for each in (variant, "softmax")))
                  for tokens in (SHORT, MIDDLE, LONG)]  # fmt: skip
        known = [value for value in ratios if value is not None]
        if len(known) == len(ratios):
            trend = listed([value.text() for value in known])
            reached = sum(value.mean <= most for value in known)
            sentences.append(f'After 30, 100 and 300 million tokens, the ratio of "{label(variant)}" is {trend}. '
                             f"It is at most {most:.2f} at {reached or 'none'} of these three points.")  # fmt: skip
    return sentences


def by_context(found: Found) -> list[str]:
    """Judges whether the ratio to softmax attention falls as the context grows."""
    return [_change(found, "by_context", "power", "softmax")]


def beyond(found: Found) -> list[str]:
    """Judges [CST]: beyond the context of training, the loss rises without a gate, and not with one."""
    sentences = []
    for context in (1024, 4096):
        for variant, rises in (("power", False), ("power_ungated", True)):
            run = pick("beyond", variant, context=context)
            rows = found.last(run, 16 * context).values()
            value = interval([row[str(16 * context)] - row[str(context)] for row in rows])
            what = f"for N = {context:,}, {loss_of(variant)} at positions 8 N to 16 N minus that at N/2 to N"
            sentences.append(judged(value, 0.0, what, least=rises, of="run"))
    return sentences


def controls(found: Found) -> list[str]:
    of_all = ("softmax_gate", "linear_gated", "window", "rwkv7", "gated_delta_net")
    compared = [(4096, "power", (*of_all, "power_data", "power_ungated")), (4096, "power_p4_k24", of_all),
                (DOCUMENT, "power", ("softmax_gate", "window"))]  # fmt: skip
    return [judged(found.difference(*(pick("controls", each, context=context) for each in (variant, other))), 0.0,
                   f'at {context:,} tokens, {loss_of(variant)} minus that of "{label(other)}"')
            for context, variant, others in compared for other in others]  # fmt: skip


def conformal(found: Found) -> list[str]:
    """Judges [CST]: the ratio to softmax attention rises with the context without a gate, and not with one."""
    ungated = _change(found, "conformal", "published_p2", "softmax_plain", grows=True)
    gated = [_change(found, "conformal", each, "softmax_plain") for each in ("published_p2_gated", "conformal_p2")]
    rotated = [
        judged(found.difference(pick("conformal", f"conformal_p{p}", context=context),
                                pick("conformal", f"published_p{p}_gated", context=context)), 0.0,
               f"at {context:,} tokens, the loss of p = {p} with data-dependent rotation minus that with a fixed one")
        for p in (2, 4) for context in (4096, 16_384)
    ]  # fmt: skip
    return [ungated, *gated, *rotated]


def powers(found: Found) -> list[str]:
    """Judges [SPT]: loss over that of softmax attention without gates at 4,096 tokens.

    A verdict says how much smaller the models and the runs are."""
    base = pick("powers", "softmax_plain")
    said = [judged(found.ratio(pick("powers", f"published_p{p}"), base), most,
                   f"as published, at 4,096 tokens, the loss of p = {p} over that of softmax attention")
            for p, most in ((2, 1.03), (4, 0.98), (6, 0.97))]  # fmt: skip
    scale = " It is of models with 17.8M weights and 0.2% of the tokens of the source."
    return [sentence if untold(sentence) else sentence + scale for sentence in said]


def ablations(found: Found) -> list[str]:
    """Sorts changes of the default by their effect on the loss, with 95% intervals."""
    base = pick("ablations", "power")
    groups: dict[str, list[str]] = {"worse": [], "better": [], "the same": []}
    for variant in ABLATIONS:
        value = found.difference(pick("ablations", variant), base)
        if value is not None and value.half is not None:
            word = "worse" if value.low > 0 else "better" if value.high < 0 else "the same"
            groups[word].append(f'"{label(variant)}"')
    said = []
    for word, names in groups.items():
        if names:
            compared = "not significantly different from" if word == "the same" else f"{word} than"
            said.append(f"{', '.join(names)}: {compared} the default.")
    return said or [f"{NO_ROWS}which changes raise or lower the loss, with several pairs."]


def scra_window(found: Found) -> list[str]:
    return [judged(found.difference(*(pick("scra_window", each, context=context) for each in pair)), 0.0,
                   f'at {context:,} tokens, {loss_of(pair[0])} minus that of "{label(pair[1])}"')
            for context in (16_384, DOCUMENT) for pair in (("power", "window"), ("linear_gated", "window32"))
            ]  # fmt: skip


def scra_curves(found: Found) -> list[str]:
    """Judges [SCRA] 5.3 where it says what is larger, and tells how near softmax attention is."""
    run, softmax, linear = (pick("scra_curves", each) for each in ("power", "softmax", "linear_gated"))
    what = f'at the end of training, the gain from context of "{label("power")}"'
    near = found.ratio(run, softmax, "gain")
    told = f"{what[0].upper()}{what[1:]} over that of softmax attention is"
    return [*([f"{told} {near.text()} ({counted(near)})."] if near else []),
            judged(found.difference(run, linear, "gain"), 0.0, f'{what} minus that of "{label("linear_gated")}"',
                   least=True)]  # fmt: skip


def scra_states(found: Found) -> list[str]:
    """Judges [SCRA Table 4]: p = 2 is ahead of softmax attention of an equal state, and a window is not."""
    softmax, window, power = (pick("scra_states", each) for each in ("softmax", "window", "power"))
    return [judged(found.difference(run, base, "best_loss"), 0.0,
                   f'the best-context loss of "{label(run.variant)}" at {run.context:,} tokens minus that of '
                   f'"{label(base.variant)}" at {base.context:,}', least=behind)
            for run, base, behind in ((power, softmax, False), (window, softmax, True), (power, window, False))
            ]  # fmt: skip


def scra_axes(found: Found) -> list[str]:
    """Judges what models gain from longer rows of the same documents, and tells how the ratio changes along axes."""
    sentences = ratios_along_axes(found)
    for variant in ("power", "softmax"):
        whole, cut = (pick("scra_axes", variant, context=DOCUMENT, row_tokens=rows) for rows in (None, 1024))
        what = f"{loss_of(variant)} on whole documents minus that on cut ones"
        sentences.append(judged(found.difference(whole, cut), 0.0, what))
    return sentences


def ratios_along_axes(found: Found) -> list[str]:
    """Tells the ratio of p = 2 to softmax attention at 16,384 tokens by updates, and by weights of the blocks.

    A sentence is left out if fewer than two of its ratios are known.
    """
    by_updates = [pick("scra_axes", "power", tokens=tokens, documents=1, size=None)
                  for tokens in (SHORT // 4, SHORT, MIDDLE)]  # fmt: skip
    by_size = [pick("scra_axes", "power", context=16_384, tokens=SHORT, documents=1, size=size)
               for size in ("tiny", None, "small")]  # fmt: skip
    sentences = []
    for runs, where, point in (
        (by_updates, "one document a step", lambda run: f"after {run.steps:,} updates"),
        (by_size, f"after {by_size[0].steps} updates of one document", lambda run: f"with {in_words(run, ['size'])}"),
    ):
        ratios = {point(run): found.ratio(run, replace(run, variant="softmax")) for run in runs}
        parts = [f"{value.text()} {name} ({counted(value)})" for name, value in ratios.items() if value is not None]
        what = f"At 16,384 tokens, {where}, {loss_of('power')} over that of softmax attention is"
        sentences += [f"{what} {listed(parts)}."] if len(parts) > 1 else []
    return sentences


def behind_gated(found: Found) -> list[str]:
    """Tells how far variants are behind softmax attention that has the same gate; [] if unknown."""
    runs = [pick("controls", "power", context=4096), pick("controls", "power", context=DOCUMENT),
            pick("bars_4096", "hybrid_softmax_gate")]  # fmt: skip
    parts = _behind(found, runs, "softmax_gate", lambda run: f'for "{label(run.variant)}" at {run.context:,} tokens')
    what = f'The loss minus that of softmax attention with the same gate ("{label("softmax_gate")}") is'
    return [f"{what} {listed(parts)}."] if parts else []


def behind_window(found: Found) -> list[str]:
    """Tells how far p = 2 is behind a window whose state is as large, at long contexts; [] if unknown."""

    def place(run: Run) -> str:
        documents = "one document" if run.documents == 1 else f"{run.documents} documents"
        return f"at {run.context:,} tokens after {run.steps:,} updates of {documents}"

    runs = [
        pick(study, "power", context=context)
        for study, context in (
            ("scra_window", 16_384),
            ("scra_window", DOCUMENT),
            ("controls", DOCUMENT),
            ("scra_latency", DOCUMENT),
        )
    ]
    parts = _behind(found, runs, "window", place)
    return [f'{loss_of("power").capitalize()} minus that of "{label("window")}" is {listed(parts)}.'] if parts else []


def _behind(found: Found, runs: Sequence[Run], base: str, place: Callable[[Run], str]) -> list[str]:
    """Tells the difference of each run to the baseline in the same setting, where there are pairs."""
    values = {run: found.difference(run, replace(run, variant=base)) for run in runs}
    return [f"{value.text(sign=True)} {place(run)} ({counted(value)})" for run, value in values.items() if value]


def scra_bodies(found: Found) -> list[str]:
    run = pick("scra_bodies", "body_power")
    return [judged(found.difference(run, pick("scra_bodies", other)), 0.0,
                   f'{loss_of("body_power")} minus that of "{label(other)}"')
            for other in ("body_softmax", "body_linear", "body_rwkv7")]  # fmt: skip


def scra_ratio(found: Found) -> list[str]:
    """Judges [SCRA Figure 2]: neither extreme of the ratio is best."""
    said = [judged(found.difference(pick("scra_ratio", balanced), pick("scra_ratio", extreme)), 0.0,
                   f'{loss_of(balanced)} minus that of "{label(extreme)}"')
            for balanced in ("ratio_2_1", "ratio_4_1") for extreme in ("ratio_1_12", "ratio_99_1")]  # fmt: skip
    totals = {label(run.variant): flops.mean / run.tokens for run in runs_of("scra_ratio")
              if (flops := found.mean(run, "flops"))}  # fmt: skip
    counts = ", ".join(f'{total / 1e6:.0f} million of "{name}"' for name, total in totals.items())
    return [*said, *([f"FLOPs per token: {counts}."] if totals else [])]


def scra_latency(found: Found) -> list[str]:
    sentences = []
    for variant, other in (("power", "softmax"), ("window", "softmax"), ("hybrid_window", "softmax"),
                           ("power", "softmax_gate"), ("power", "window"), ("hybrid_window", "window")):  # fmt: skip
        run, base = pick("scra_latency", variant), pick("scra_latency", other)
        times = [speed and each.tokens / speed for each in (run, base) for speed in (found.speed(each),)]
        longer = "" if None in times else f", trained for {times[0] / times[1]:.2f} times as long,"  # type: ignore[operator]
        what = f'{loss_of(variant)}{longer} minus that of "{label(other)}"'
        sentences.append(judged(found.difference(run, base), 0.0, what))
    return sentences


def page(found: Found) -> list[str]:
    """Returns the report's first sentences: what was compared, the ratios, and how many claims hold."""
    names = {"bars_1024": "1,024", "bars_4096": "4,096", "bar_65536": "65,536"}
    sentences = [
        "Models of 16 to 18 million parameters that differ in the mixer alone were trained on the same documents in "
        "the same order, and compared by their held-out loss. Runs at 1,024 and 4,096 tokens of context have 30 "
        "million tokens, those at 65,536 have 100 million."
    ]
    for start, variant, column in (
        ("The loss of power attention with p = 2 over that of softmax attention in the same block is", "power",
         "held_out_loss"),
        ("The gain from context of power attention over that of softmax attention is", "power", "gain"),
        ("With a window of 512 tokens in every second layer, the loss over that of softmax attention is",
         "hybrid_window", "held_out_loss"),
    ):  # fmt: skip
        ratios = {study: found.ratio(pick(study, variant), pick(study, "softmax"), column)
                  for study in names if variant in {run.variant for run in runs_of(study)}}  # fmt: skip
        parts = [f"{value.text()} at {names[study]} tokens" for study, value in ratios.items() if value]
        sentences.append(f"{start} {listed(parts) or MISSING}.")
    sentences += [*behind_gated(found), *behind_window(found), *ratios_along_axes(found)]
    judgements = [sentence for study, judge in VERDICTS.items() for sentence in judge(found)]
    reproduced, refuted = ([each for each in judgements if each.startswith(f"**{word}**")]
                           for word in (REPRODUCED, REFUTED))  # fmt: skip
    counts = f"Of the claims below, {len(reproduced)} are reproduced and {len(refuted)} refuted."
    named = "".join(f"\n    - {each.removeprefix(f'**{REFUTED}**: ').removesuffix('.')}" for each in refuted)
    these = f" These claims are refuted:{named}" if refuted else ""
    return [*sentences, f"{counts} The others are left open.{these}"]


def _change(found: Found, study: str, variant: str, base: str, grows: bool = False) -> str:
    """Judges the change of a ratio of losses from 1,024 to 65,536 tokens."""
    ends = [
        found.ratio(*(pick(study, each, context=context) for each in (variant, base))) for context in (1024, DOCUMENT)
    ]
    what = f'the change of the ratio of "{label(variant)}" to "{label(base)}" from 1,024 to 65,536 tokens'
    first, last = ends
    if first is None or last is None:
        return judged(None, 0.0, what, least=grows)
    halves = [end.half for end in ends if end and end.half is not None]
    half = sum(half**2 for half in halves) ** 0.5 if len(halves) == 2 else None
    return judged(Interval(last.mean - first.mean, half, min(first.count, last.count)), 0.0, what, least=grows)


VERDICTS: dict[str, Callable[[Found], list[str]]] = {
    function.__name__: function
    for function in (bars_1024, bars_4096, bar_65536, tokens_4096, by_context, beyond, controls, conformal, powers,
                     ablations, scra_window, scra_curves, scra_axes, scra_bodies, scra_ratio, scra_states,
                     scra_latency)
}  # fmt: skip
