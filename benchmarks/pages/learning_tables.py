"""The tables of docs/results/learning.md, from benchmarks/results/learning.csv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from benchmarks.bigram import KERNEL, not_learned
from benchmarks.context_scaling.grid import SHORT
from benchmarks.pages.prose import table
from sympow.recall.results import group

Row = dict[str, Any]

CONTROL = "softmax_gate"
# By the names of `benchmarks.learning`, in the order of the table.
LABELS = {
    "softmax_gate": "softmax attention, gate",
    "softmax": "softmax attention",
    "power_delta": "delta rule, p = 2",
    "power_delta+offset=0.09": "delta rule, p = 2, offset 0.09",
    "power_delta+beta=0.5": "delta rule, p = 2, beta 0.5",
    "power": "power attention, p = 2",
    "window": "window of 1,024 tokens",
    "based": "Based: Taylor map and windows of 64 in turn",
    "hybrid_delta_gate": "five layers delta rule, one softmax, gate",
    "hybrid_power_gate": "five layers power, one softmax, gate",
    "hybrid_window_gate": "five layers window, one softmax, gate",
    "hybrid_delta_gate+softmax.rotation=fixed": "five layers delta rule, one softmax, gate, rotation",
    "hybrid_window_delta+window=1024": "three layers delta rule, two windows of 1,024, one softmax, gate",
    "hybrid_window_delta": "three layers delta rule, two windows of 128, one softmax, gate",
    "heads_delta": "window of 1,024 and delta rule, half of the heads each",
    'heads_delta+options={"offset":0.09}': "window of 1,024 and delta rule with offset 0.09, half of the heads each",
    'hybrid_heads_delta+hybrid_heads.options={"offset":0.09}': "five layers window of 1,024 and delta rule with offset "
    "0.09, half of the heads each; one softmax, gate",
    "heads_delta+window=512": "window of 512 and delta rule, half of the heads each",
    "hybrid_heads_delta": "five layers window of 1,024 and delta rule, half of the heads each; one softmax, gate",
    "gated_heads_delta": "window of 1,024, gate, and delta rule, half of the heads each",
    "hybrid_gated_heads_delta": "five layers gated window of 1,024 and delta rule, half of heads; one softmax, gate",
    "window+gate=true": "window of 1,024 tokens, gate",
    "window_delta+window=1024": "window of 1,024 and delta rule, in turns",
    "window_delta+window=512": "window of 512 and delta rule, in turns",
    "window_delta": "window of 128 and delta rule, in turns",
    "window_delta+window=64": "window of 64 and delta rule, in turns",
    "softmax_gate+rotation=none": "softmax attention, gate, no rotation",
    "window+window=2112": "window of 2,112 tokens",
    "window+window=512": "window of 512 tokens",
    "window32": "window of 32 tokens",
    "hybrid_window+p=1": "p = 1 and window of 512, in turns",
    "power+p=1": "power attention, p = 1",
    "gated_delta_net": "Gated DeltaNet",
    "rwkv7": "RWKV-7",
}
# Models of the papers' claims, whose tables have the lowest loss over positions too: the "best-context loss" of [SCRA].
PAPERS = {
    "softmax": "softmax attention",
    "window": "window of 1,024 tokens",
    "power": "power attention, p = 2",
    "body_softmax": "softmax attention, body of RWKV-7",
    "body_linear": "linear attention, gate, body of RWKV-7",
    "body_power": "power attention, p = 2, body of RWKV-7",
    "body_window": "window of 1,024 tokens, body of RWKV-7",
    "body_window32": "window of 32 tokens, body of RWKV-7",
    "body_softmax+head_norm=true": "softmax attention, body of RWKV-7, norm of heads",
    "body_power+head_norm=true": "power attention, p = 2, body of RWKV-7, norm of heads",
    "body_window+head_norm=true": "window of 1,024 tokens, body of RWKV-7, norm of heads",
    "body_window32+head_norm=true": "window of 32 tokens, body of RWKV-7, norm of heads",
    "body_rwkv7": "RWKV-7 in its body",
    "softmax_plain": "softmax attention, without the block",
    "published_p2": "p = 2, no gate",
    "published_p4": "p = 4, no gate",
    "published_p6": "p = 6, no gate",
    "published_p2_gated": "p = 2, gate",
    "conformal_p2": "p = 2, gate and learned rotation",
}
POWERS = ("softmax_plain", "published_p2", "published_p4", "published_p6")  # of [SPT], as published

CORPORA = {KERNEL: "the kernel's source", "574 rows, 2ae8c335a818": "prose"}
SIZES = {None: "", "tiny": ", tiny", "small": ", 85M block"}  # of the shape, behind the label
ALONE = ("power_delta", "power", "softmax_gate", "window")  # mixers of all layers whose options were searched


def learning_table(rows: Sequence[Row]) -> str:
    """Returns a row for each setting, variant and optimizer: the best rate, its loss, and the ratio to the control.

    The best rate is the one with the lowest mean loss among those with the most seeds. The ratio is the mean over the
    seeds that the control has at its best rate, too, with the lowest and the highest. There is a table for each corpus.
    Then follow, of the corpus of most runs, `search_table`, `papers_table` and `powers_table`.
    """
    every, rows = rows, [row for row in rows if row["status"] == "done" and row["variant"] in LABELS]
    parts = [by_corpus(rows, _of_corpus), _about(rows)]
    every = of_most_runs(every)
    return "\n\n".join([*parts, search_table(every), papers_table(every), powers_table(every)])


def by_corpus(rows: Sequence[Row], table_of: Callable[[list[Row]], str]) -> str:
    """Returns the table of the rows of each corpus, below its name if there are several."""
    corpora = group(rows, "corpus")
    parts = []
    for (name,), same in sorted(corpora.items()):
        told = f"{CORPORA[name]} ({name})" if name in CORPORA else name
        parts += [f"Corpus: {told}."] if len(corpora) > 1 else []
        parts.append(table_of(same))
    return "\n\n".join(parts)


def of_most_runs(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the corpus with the most rows."""
    return max(group(rows, "corpus").values(), key=len, default=[])


def _of_corpus(rows: Sequence[Row]) -> str:
    lines = []
    settings = group(rows, "size", "context", "tokens", "optimizer")
    for (size, context, tokens, optimizer), same in sorted(
        settings.items(), key=lambda item: (item[0][0] or "", *item[0][1:])
    ):
        best = {variant: best_rows(own) for (variant,), own in group(same, "variant").items()}
        for variant, label in LABELS.items():
            if variant not in best:
                continue
            own = best[variant]
            rates = sorted({row["learning_rate"] for row in same if row["variant"] == variant})
            gains = [row["gain"] for row in own if row["gain"] is not None]
            cells = [f"{context:,}", f"{tokens / 1e6:,.0f}M", label + SIZES[size], optimizer,
                     f"{own[0]['learning_rate']:g}", str(len(own)),
                     marked(mean(row['held_out_loss'] for row in own), rows[0]['corpus']),
                     _ratio(own, best.get(CONTROL, [])), f"{mean(gains):.2f}" if len(gains) == len(own) else "",
                     ", ".join(f"{rate:g}" for rate in rates)]  # fmt: skip
            lines.append(cells)
    heading = "context | tokens | model | optimizer | rate | seeds | loss | times gated softmax | gain | rates tried"
    return table(heading, lines, left=(2, 3, 9))


def papers_table(rows: Sequence[Row]) -> str:
    """Returns a row for each setting and model of the papers trained with Muon: the mean over the seeds, and the range.

    A setting with a single model of the papers is left out.
    """
    rows = [row for row in rows if row["status"] == "done" and row["optimizer"] == "muon" and row["variant"] in PAPERS]
    lines = []
    for (tokens, context), same in sorted(group(rows, "tokens", "context").items()):
        found = group(same, "variant")
        for variant, label in PAPERS.items():
            if (variant,) in found and (len(found) > 1 or variant == "softmax"):
                own = best_rows(found[variant,])
                cells = [f"{context:,}", f"{tokens / 1e6:.0f}M", label, f"{own[0]['learning_rate']:g}", str(len(own))]
                cells += [_range([row[name] for row in own]) for name in ("held_out_loss", "best_loss", "gain")]
                lines.append(cells)
    return table("context | tokens | model | rate | seeds | loss | best-context loss | gain", lines, left=(2,))


def powers_table(rows: Sequence[Row]) -> str:
    """Returns a row for each power of [SPT]: the loss of seed 0 at every rate, and the lowest one, divided by that of
    softmax attention.

    The runs are those with Muon on SHORT tokens, in rows of 4,096.
    """
    rows = [row for row in rows if row["status"] == "done" and row["optimizer"] == "muon" and row["seed"] == 0
            and row["variant"] in POWERS and (row["context"], row["tokens"]) == (4096, SHORT)]  # fmt: skip
    if not rows:
        return ""
    losses = {(row["variant"], row["learning_rate"]): row["held_out_loss"] for row in rows}
    rates = sorted({rate for _, rate in losses})
    lowest = {name: min(loss for (variant, _), loss in losses.items() if variant == name) for name, _ in losses}
    lines = []
    for name in POWERS:
        if name in lowest:
            cells = [f"{losses[name, rate]:.3f}" if (name, rate) in losses else "" for rate in rates]
            times = f"{lowest[name] / lowest[POWERS[0]]:.2f}" if POWERS[0] in lowest else ""
            lines.append([PAPERS[name], *cells, times])
    return table(" | ".join(["model", *(f"rate {rate:g}" for rate in rates), "lowest, times softmax"]), lines)


def _range(values: Sequence[float | None]) -> str:
    """Writes the mean, the least and the largest value."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{mean(known):.3f}" + (f" [{min(known):.3f}, {max(known):.3f}]" if len(known) > 1 else "")


def search_table(rows: Sequence[Row]) -> str:
    """Returns a row for each option that was tried on a mixer alone: its loss, less that without it."""
    rows = [row for row in rows if row["status"] == "done" and not row["size"] and row["optimizer"] == "muon"]
    setting = ("context", "tokens", "learning_rate", "seed")
    base = {key: own["held_out_loss"] for key, (own, *_) in group(rows, "variant", *setting).items()}
    lines = []
    for row in rows:
        without, _, change = row["variant"].partition("+")
        key = (without, *(row[name] for name in setting))
        if change and key in base and without in ALONE:
            cells = [without, change, f"{row['context']:,}", f"{row['tokens'] / 1e6:.0f}M", f"{row['learning_rate']:g}"]
            loss = row["held_out_loss"]
            lines.append([*cells, row["seed"], f"{loss:.3f}", f"{loss - base[key]:+.3f}"])
    heading = "mixer | change | context | tokens | rate | seed | loss | less that without"
    return table(heading, lines, left=(0, 1))


def marked(loss: float, corpus: str = KERNEL) -> str:
    """Returns a loss, with a mark if a model of bigrams has a lower one."""
    return f"{loss:.3f}" + (" (not learned)" if loss > not_learned(corpus) else "")


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the best rate."""
    by_rate = list(group(rows, "learning_rate").values())
    most = max(len(each) for each in by_rate)
    return min((each for each in by_rate if len(each) == most), key=lambda each: mean(x["held_out_loss"] for x in each))


def _ratio(own: Sequence[Row], control: Sequence[Row]) -> str:
    losses = {row["seed"]: row["held_out_loss"] for row in control}
    ratios = [row["held_out_loss"] / losses[row["seed"]] for row in own if row["seed"] in losses]
    if not ratios:
        return "no pair"
    if len(ratios) == 1:
        return f"{ratios[0]:.3f} (one run)"
    return f"{mean(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"


def _about(rows: Sequence[Row]) -> str:
    processors = ", ".join(sorted({row["processor"] for row in rows}))
    return f"{len(rows)} runs; {processors}. The last column lists all rates of the model in the setting."
