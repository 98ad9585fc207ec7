"""The tables and the figure of docs/results/context-scaling.md, and of trend and use of context in learning.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.bigram import not_learned
from benchmarks.common.intervals import interval
from benchmarks.common.measure import known, read
from benchmarks.context_scaling.found import Found, along
from benchmarks.context_scaling.grid import BILLION, DOCUMENT, LONG, MIDDLE, SHORT, LearningRun, Run, recipe
from benchmarks.context_scaling.speed import SEQUENCES
from benchmarks.context_scaling.tables import claims_table, studies_table
from benchmarks.context_use import LENGTHS as READ_LENGTHS
from benchmarks.context_use import compared
from benchmarks.pages.learning_tables import LABELS, best_rows, by_corpus, of_most_runs
from benchmarks.pages.prose import table
from sympow.evaluation.plot import empty_figure, move, panels, set_grid, shared_legend, told_seeds
from sympow.recall.results import group

Row = dict[str, Any]

# By the names of `benchmarks.learning`: the kinds of models, with hybrids and a window.
MODELS = {
    "softmax_gate": "softmax, gate",
    "hybrid_heads_delta": "hybrid, windows and delta rule",
    "hybrid_delta_gate": "hybrid, delta rule",
    "hybrid_power_gate": "hybrid, power",
    "heads_delta": "windows and delta rule",
    "window": "window of 1,024",
    "window+window=2112": "window of 2,112",
    "power_delta": "delta rule, p = 2",
    "power": "power, p = 2",
}
MISSING = "Not measured yet."
CONTROL = "window32"  # sees next to no context
TREND = (SHORT, MIDDLE, LONG, BILLION)  # tokens of training
# The models of the short table.
SHOWN = ("softmax_gate", "hybrid_heads_delta", "window", "window+window=2112", "power_delta", "power")
TRAINED_AT = 4096  # tokens of context, of the models that read whole documents
LENGTHS = (4096, DOCUMENT, 1 << 20)
BESIDE = 3  # points between the marks of two models in the figure of the trend


class Evidence:
    """Holds the rows that the table and the figure are of, by model.

    Args:
        results: the folder of all results. Of the versions of the corpus, that of most runs counts.
    """

    def __init__(self, results: Path):
        rows = [row for row in known(results / "learning.csv")
                if row["status"] == "done" and row["optimizer"] == "muon" and row["size"] is None]  # fmt: skip
        rows = of_most_runs(rows)
        self._rows = [row for row in rows if row["variant"] in MODELS]
        corpora = {row["corpus"] for row in rows}
        positions = [row for row in known(results / "learning_positions.csv") if row["corpus"] in corpora]
        self._positions = {(row["run"], row["evaluated_context"]): row["held_out_loss"]
                           for row in positions if row["documents"] == 16}  # fmt: skip
        self._along = {name: rows for (name,), rows in group(positions, "run").items()}
        self._found = Found(results / "context_scaling")

    def settings(self) -> list[tuple[int, int]]:
        """Returns context and tokens of the runs, sorted; those of 1,024 tokens are for short texts."""
        return sorted({(row["context"], row["tokens"]) for row in self._rows if row["context"] >= TRAINED_AT})

    def losses(self, variant: str, context: int, tokens: int, read_at: int | None = None) -> list[float]:
        """Returns the loss of every seed at the best rate, in rows as trained, or of whole documents."""
        rows = [row for row in self._rows
                if (row["variant"], row["context"], row["tokens"]) == (variant, context, tokens)]  # fmt: skip
        best = best_rows(rows) if rows else []
        if read_at is None:
            return [row["held_out_loss"] for row in best]
        return [self._positions[name, read_at] for name in map(run_name, best) if (name, read_at) in self._positions]

    def ratios(self, variant: str, context: int, tokens: int) -> list[float]:
        """Returns the losses at the best rate, times that of gated softmax attention at its best rate, by seed."""
        found = []
        for name in (variant, "softmax_gate"):
            rows = [row for row in self._rows
                    if (row["variant"], row["context"], row["tokens"]) == (name, context, tokens)]  # fmt: skip
            found.append({row["seed"]: row["held_out_loss"] for row in best_rows(rows)} if rows else {})
        own, control = found
        return [own[seed] / control[seed] for seed in own.keys() & control.keys()]

    def far(self) -> int | None:
        """Returns the tokens of training that most models have in common at 4,096 tokens; None if no two have.

        Of several numbers it is the largest one.
        """
        counts = {tokens: sum(bool(self.losses(each, context, tokens, DOCUMENT)) for each in MODELS)
                  for context, tokens in self.settings() if context == TRAINED_AT}  # fmt: skip
        best = max(counts, key=lambda tokens: (counts[tokens], tokens), default=0)
        return best if counts.get(best, 0) > 1 else None

    def speed(self, variant: str, context: int, mode: str = "compiled") -> int | None:
        """Returns tokens a second of training or decoding, alone on a GPU; None where they were not timed."""
        return self._found.speed(variant, context, mode)

    def along(self, variant: str, context: int) -> dict[int, Row]:
        """Returns the losses along training, by tokens, of the run of a study with AdamW, 30M tokens and seed 0."""
        return self._found.along(Run(variant, context))

    def along_muon(self, variant: str, context: int, rate: float, seed: int = 0) -> dict[int, Row]:
        """Returns the losses along training, by tokens, of the run with Muon and 30 million tokens."""
        run = LearningRun(variant, context, SHORT, learning_rate=rate, seed=seed, optimizer="muon")
        return along(run, self._along.get(run.name, []))

    def timed_on(self) -> str:
        """Returns the processors on which speeds were measured."""
        return self._found.timed_on()


def run_name(row: Row) -> str:
    """Returns the name that a row of learning.csv has in the other tables."""
    return LearningRun(**{field.name: row[field.name] for field in fields(LearningRun)}).name


def layers(variant: str) -> list[Any]:
    """Returns the mixer of each layer of a model."""
    model = recipe(variant).model
    return [model.mixer(layer) for layer in range(model.n_layers)]


def sequence_bytes(variant: str, tokens: int) -> int:
    """Returns the bytes that one sequence takes after `tokens` tokens, by formula.

    A cache has keys and values in bfloat16, a state is float32. With K = V = 64, a state of power attention has
    K(K + 1)/2 rows of V + 1 numbers, and that of the delta rule has V. Half of the heads of "hybrid_heads" have a
    window, and the others the delta rule.

    Raises KeyError for another mixer.
    """
    model = recipe(variant).model
    width = model.d_model // model.n_heads
    rows = width * (width + 1) // 2
    sizes = {
        "softmax": lambda options: 4 * width * tokens,
        "window": lambda options: 4 * width * min(tokens, options["window"]),
        "power": lambda options: 4 * rows * (width + 1),
        "power_delta": lambda options: 4 * rows * width,
    }
    sizes["hybrid_heads"] = lambda options: (sizes["window"](options) + sizes["power_delta"](options)) // 2
    return sum(model.n_heads * sizes[mixer.name](mixer.options) for mixer in layers(variant))


def choice_table(evidence: Evidence) -> str:
    """Returns a row for each model: losses by context and tokens of training, speeds, and bytes."""
    settings, far = evidence.settings(), evidence.far()
    heading = ["model", *(f"{context:,}, {_millions(tokens)}" for context, tokens in settings)]
    heading += [] if far is None else [f"{TRAINED_AT:,}, {_millions(far)}, read at {DOCUMENT:,}"]
    heading += ["training, tokens/s at 4,096 and 65,536", "MB at 4,096, 65,536, 1,048,576"]
    heading += [f"decoding, tokens/s of {SEQUENCES} sequences after 4,096 and 65,536"]
    lines = []
    for variant, name in MODELS.items():
        cells = [name, *(_losses(evidence.losses(variant, *setting)) for setting in settings)]
        cells += [] if far is None else [_losses(evidence.losses(variant, TRAINED_AT, far, DOCUMENT))]
        cells += _costs(evidence, variant)
        lines.append([*cells, _speeds(evidence, variant, "decoding")])
    return table(" | ".join(heading), lines)


def short_table(evidence: Evidence) -> str:
    """Returns a row for each model: losses in rows as trained and in whole documents, speeds, and bytes."""
    tokens = evidence.far()
    heading = (f"trained on {_millions(tokens or 0)} tokens in rows of {TRAINED_AT:,} | loss, nats (95%, three runs) | "
               f"loss in rows of {DOCUMENT:,} | training in rows of {TRAINED_AT:,}; {DOCUMENT:,}, tokens/s on an "
               f"{evidence.timed_on()} (one run) | MB of a sequence of 4,096; 65,536; 1,048,576 tokens")  # fmt: skip
    lines = []
    for variant in SHOWN:
        losses = [_losses(evidence.losses(variant, TRAINED_AT, tokens or 0, at)) for at in (None, DOCUMENT)]
        lines.append([MODELS[variant], *losses, *_costs(evidence, variant)])
    return table(heading, lines)


def _costs(evidence: Evidence, variant: str) -> list[str]:
    """Returns the tokens a second of training in short rows and in whole documents, and the MB of a sequence."""
    sizes = "; ".join(f"{sequence_bytes(variant, tokens) / 1e6:,.0f}" for tokens in LENGTHS)
    return [_speeds(evidence, variant, "compiled"), sizes]


def _speeds(evidence: Evidence, variant: str, mode: str) -> str:
    """Returns the tokens a second in rows, or after a text, of the first two lengths."""
    speeds = [evidence.speed(variant, context, mode) for context in LENGTHS[:2]]
    if not any(speeds):
        return "not timed"
    return "; ".join("not timed" if speed is None else _rate(speed) for speed in speeds)


def _rate(speed: float) -> str:
    return f"{speed / 1e6:.2f}M" if speed >= 1e5 else f"{speed / 1e3:,.1f}k"


def _losses(losses: Sequence[float]) -> str:
    found = interval(losses)
    if found is None:
        return ""
    few = {1: ", one run", 2: ", two runs"}.get(found.count)
    shown = f"{found.mean:.3f}{few}" if few else found.text()
    return shown + ("" if found.mean <= not_learned() else ", not learned")


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:,.0f}M" if tokens < BILLION else f"{tokens / 1e9:,.0f}B"


def model_look(variant: str) -> dict[str, str]:
    """Returns the colour and the marker of a model, the same in all figures."""
    place = list(MODELS).index(variant)
    return {"color": f"C{place}", "marker": "osD^vPXh<"[place]}


def draw(evidence: Evidence) -> Any:
    """Returns the figure: the loss in whole documents against the bytes of a sequence, and the time of training."""
    tokens = evidence.far()
    if tokens is None:
        raise ValueError("there are no two models to draw")
    figure = empty_figure("figures", (7.6, 4))
    left, right = figure.subplots(1, 2, sharey=True)
    seeds = set()
    for variant, name in MODELS.items():
        losses, speed = evidence.losses(variant, TRAINED_AT, tokens, DOCUMENT), evidence.speed(variant, TRAINED_AT)
        points = [(left, sequence_bytes(variant, DOCUMENT) / 1e6)]
        points += [] if speed is None else [(right, tokens / speed)]
        for axis, x in points if losses else []:
            seeds.add(len(losses))
            look = model_look(variant) | {"linestyle": "none", "alpha": 0.6}
            told = name + (", not timed" if speed is None else "")
            axis.plot([x] * len(losses), losses, **look, label=told if axis is left else None)
    left.set_xscale("log")
    left.set_xticks([10, 100, 1000], ["10", "100", "1,000"])
    left.set_xlabel(f"MB of one sequence of {DOCUMENT:,} tokens")
    left.set_ylabel(f"loss in rows of {DOCUMENT:,} tokens (nats)")
    right.set_xlabel("seconds of training on one H200: tokens / rate")
    for axis in (left, right):
        axis.margins(x=0.15, y=0.15)
    set_grid((left, right))
    shared_legend(figure, (left,))
    about = f"17.8M weights, trained on {_millions(tokens)} tokens in rows of {TRAINED_AT:,}"
    figure.suptitle(f"{about}, {told_seeds(seeds)}: a mark is a run", fontsize=10)
    return figure


def draw_trend(evidence: Evidence) -> Any:
    """Returns the figure: the loss of each model, times that of gated softmax attention, against tokens of training."""
    figure, (axis,) = panels(1, (7.6, 4.6))
    seeds = set()
    for place, (variant, name) in enumerate(MODELS.items()):
        ratios = {tokens: found for tokens in TREND if (found := evidence.ratios(variant, TRAINED_AT, tokens))}
        runs = [(tokens, ratio) for tokens, found in ratios.items() for ratio in found]
        if runs:
            seeds |= {len(found) for found in ratios.values()}
            look = model_look(variant)
            drawn = axis.plot(*zip(*runs, strict=True), **look, linestyle="none", markersize=4)
            drawn += axis.plot(list(ratios), [mean(found) for found in ratios.values()], **look, label=name)
            move(axis, drawn, BESIDE * (place - (len(MODELS) - 1) / 2))
    axis.set_xscale("log")
    axis.set_xticks(TREND, [_millions(tokens) for tokens in TREND], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_xlabel("tokens of training")
    axis.set_ylabel("loss, times that of gated softmax attention")
    set_grid([axis])
    shared_legend(figure, [axis])
    title = f"17.8M weights, {TRAINED_AT:,} tokens of context, Muon, {told_seeds(seeds)}"
    figure.suptitle(f"{title}: small marks are runs, lines join means", fontsize=10)
    return figure


def use_table(results: Path) -> str:
    """Returns a row for each model that was measured, by context and tokens of training; a sentence without rows.

    The numbers are the loss that a context cut to 256, 1,024, ... tokens costs, the lead over a window of 32 tokens at
    some positions, and the share of the tokens of repeated passages that are recalled, by distance.
    """
    file = results / "learning_context.csv"
    if not file.is_file():
        return MISSING
    measured = group(read(file), "run", "corpus")
    rows = [row for row in read(results / "learning.csv") if (run_name(row), row["corpus"]) in measured]
    heading = ["model", "trained at", "tokens", "seeds"]
    heading += [f"cut to {length:,}" for length in READ_LENGTHS[:-1]]
    ahead = READ_LENGTHS[1::3] if any(row["variant"] == CONTROL for row in rows) else ()
    heading += [f"loss of a window of 32 less its own at {length // 4:,} to {length - 1:,}" for length in ahead]
    heading.append("recalled, not repeated; at " + ", ".join(f"{length * 3 // 4:,}" for length in READ_LENGTHS))
    return by_corpus(rows, lambda same: table(" | ".join(heading), _use_lines(same, measured, ahead)))


def _use_lines(rows: list[Row], measured: dict[Any, list[Row]], ahead: Sequence[int]) -> list[list[str]]:
    """Returns the lines of `use_table` of one corpus."""
    lines = []
    for (context, tokens, size), same in sorted(group(rows, "context", "tokens", "size").items(), key=str):
        variants = {name: best_rows(own) for (name,), own in group(same, "variant").items()}
        values = {
            name: [_values(measured[run_name(row), row["corpus"]]) | {"seed": row["seed"]} for row in own]
            for name, own in variants.items()
        }
        for name in (name for name in LABELS if name in values):
            own, control = values[name], values.get(CONTROL, [])
            cells = [LABELS[name] + (f", {size}" if size else ""), f"{context:,}", f"{tokens / 1e6:,.0f}M"]
            cells.append(str(len(own)))
            cells += [_less(own, own, ("cut", length), ("cut", READ_LENGTHS[-1])) for length in READ_LENGTHS[:-1]]
            cells += [_less(control, own, *[("position", length)] * 2) for length in ahead]
            shares = [f"{mean(run['recalled', at]['value'] for run in own):.0%}" for at in (0, *READ_LENGTHS)]
            cells.append(f"{shares[0]}; {', '.join(shares[1:])}")
            lines.append(cells)
    return lines


def _values(rows: list[Row]) -> dict[Any, Any]:
    return {(row["measure"], row["length"]): row for row in rows}


def _less(ours: list[Any], base: list[Any], measure: tuple[str, int], of_base: tuple[str, int]) -> str:
    """Returns the difference of a measure over the seeds that both have, with half of an interval.

    The interval is the wider one of that over documents and that over seeds.
    """
    by_seed = {run["seed"]: run[of_base]["documents"] for run in base}
    pairs = [(run[measure]["documents"], by_seed[run["seed"]]) for run in ours if run["seed"] in by_seed]
    found = compared([one for one, _ in pairs], [other for _, other in pairs])
    return "" if found is None else max(found, key=lambda value: value.half or 0.0).text(sign=True)


FOLDER = "context_scaling"
# In the folders of the pages.
FIGURES: dict[str, Callable[[Evidence], Any]] = {
    "context-scaling/choice.png": draw,
    "learning/trend.png": draw_trend,
}


# By their names; each gets the folder of results.
TABLES: dict[str, Callable[[Path], str]] = {
    f"{FOLDER}/choice": lambda results: choice_table(Evidence(results)),
    f"{FOLDER}/short": lambda results: short_table(Evidence(results)),
    f"{FOLDER}/claims": lambda results: claims_table(Found(results / FOLDER), not_learned()),
    f"{FOLDER}/studies": lambda results: studies_table(Found(results / FOLDER)),
    "learning_context.csv": use_table,
}
# The files that the tables are of.
SOURCES = {
    f"{FOLDER}/choice": ("learning.csv", f"{FOLDER}/speed.csv"),
    f"{FOLDER}/short": ("learning.csv", f"{FOLDER}/speed.csv"),
    f"{FOLDER}/claims": (f"{FOLDER}/runs.csv",),
    f"{FOLDER}/studies": (),
    "learning_context.csv": ("learning.csv",),
}
