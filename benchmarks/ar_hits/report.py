"""Writes the tables and figures of the page of AR hits, from the results of `python -m benchmarks.ar_hits`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common.intervals import interval
from benchmarks.pages.prose import filled, table
from sympow.evaluation.ar_hits import PARTS, Share, bootstrap_shares, published_share
from sympow.evaluation.plot import COLOURS, curve_style, panels, set_grid, shared_legend
from sympow.recall.results import group

Row = dict[str, Any]
Tables = dict[str, list[Row]]

# The models that gaps begin at: that of the controls, and of all others the first that has runs.
CONTROL, BASES = "control_attention", ("softmax_gate", "attention")
LEAST_RECALL = "base_conv"  # the other end of the gap by distance
FOUND = {"kernel_muon": "kernel", "prose_muon": "prose"}  # runs in the table of what was found
LABELS = {
    "attention": "softmax attention",
    "softmax_gate": "softmax attention, gate",
    "power": "power, p = 2",
    "power_delta": "delta rule, p = 2",
    "power_delta_offset": "delta rule, p = 2, offset",
    "hyena": "Hyena",
    "base_conv": "BaseConv",
    "base_conv_published": "BaseConv, frequency 14",
    "long_convolution": "long convolution",
    "h3": "H3",
    "rwkv4": "RWKV-4",
    "retnet": "RetNet",
    "liquid_s4": "Liquid S4",
    "hyena_window64": "Hyena, windows of 64",
    "hyena_window256": "Hyena, windows of 256",
    "hyena_w2": "Hyena, frequency 2",
    "hyena_w14": "Hyena, frequency 14",
    "hyena_heads": "Hyena in heads, frequency 2",
    "control_attention": "softmax attention, control",
    "control_base_conv": "BaseConv, control",
    "control_random": "BaseConv, random selection, control",
    "control_programmatic": "BaseConv, programmatic selection, control",
    "control_learned": "BaseConv, learned selection, control",
    "control_learned_row": "BaseConv, learned selection of the row, control",
    "control_full": "BaseConv, two softmax layers, control",
}
CLOSED = "control_base_conv", CONTROL  # the ends of the gap that hybrids close
LEAST = 100  # tokens of a point of a curve
BESIDE = 6  # models of a figure of curves beside the first; more are in another figure
MISSING = "Not measured yet."
_NO_ROWS: Tables = {"run": [], "slices": [], "curves": []}


def write(corpora: Mapping[str, Tables], compared: Tables, page: Path) -> None:
    """Writes the parts between the marks of the page.

    Args:
        corpora: the tables of the runs on each corpus, by the name that marks and figures use.
        compared: the tables of the comparison with brute force, and the hits by source.
    """
    makers = {"losses": losses_table, "gaps": gaps_table, "about": about, "examples": slices_of,
              "distances": distances_table, "closed": closed_table}  # fmt: skip

    def written(mark: str) -> str:
        name, _, corpus = mark.partition(" ")
        if mark == "found":
            return found_table(corpora)
        alone = {"exact": exact_table, "sources": sources_table}
        return makers[name](corpora.get(corpus, _NO_ROWS)) if corpus else alone[name](compared)

    page.write_text(filled(page.read_text(encoding="utf-8"), written), encoding="utf-8")


def draw(corpora: Mapping[str, Tables], folder: Path) -> list[Path]:
    """Draws the figures of the runs on each corpus; returns their files."""
    files = []
    for corpus, tables in corpora.items():
        folder.mkdir(parents=True, exist_ok=True)
        base, *others = _recipes(tables)
        parts = [[base, *others[start : start + BESIDE]] for start in range(0, len(others), BESIDE)]
        figures = {"curves" if n == 1 else f"curves-{n}": curves(tables, part) for n, part in enumerate(parts, 1)}
        if _behind(tables):
            figures["shares"] = shares_figure(tables)
        for name, figure in figures.items():
            files.append(folder / f"{corpus}-{name}.png")
            figure.savefig(files[-1])
    return files


def at_best_rates(tables: Tables) -> Tables:
    """Returns the rows of the learning rate with the lowest mean held-out loss over the seeds, of every recipe.

    Only the rates with the most seeds are compared.
    """
    best = {}
    for (recipe,), same in group(tables["run"], "recipe").items():
        rates = group(same, "learning_rate")
        best[recipe] = min(rates, key=lambda rate: (-len(rates[rate]), mean(r["held_out_loss"] for r in rates[rate])))[
            0
        ]
    return {name: [row for row in rows if row["learning_rate"] == best.get(row["recipe"])]
            for name, rows in tables.items()}  # fmt: skip


def found_table(corpora: Mapping[str, Tables]) -> str:
    """Returns a row for each corpus and recipe: its loss, its gap, and how much of a gap it closes farthest back."""
    lines = []
    for name, text in FOUND.items():
        tables = corpora.get(name, _NO_ROWS)
        closed = _by_distance(tables)[1]
        for recipe in _recipes(tables):
            losses = [row["held_out_loss"] for row in tables["run"] if row["recipe"] == recipe]
            found = shares(tables, recipe)
            gap = [f"{found['all'].nats:+.3f}", _share_of_hits(found)] if found else ["", ""]
            farthest = closed[recipe][-1][1] if closed else MISSING
            lines.append([text, LABELS[recipe], interval(losses).text(), *gap, farthest])
    heading = "text | model | loss, nats | gap, nats | share of AR hits in the gap | closed at the largest distance"
    return table(heading, lines, left=(0, 1)) if lines else MISSING


def distances_table(tables: Tables) -> str:
    """Returns a row for each recipe: the loss on AR hits by distance, and the share of a gap that it closes.

    The gap is that between BaseConv and softmax attention, with the gate where such runs exist. The share is that of
    the means over the seeds, with the lowest and the highest share of a seed in brackets.
    """
    starts, closed = _by_distance(tables)
    if not closed:
        return MISSING
    lines = []
    for recipe, cells in closed.items():
        rate = next(row["learning_rate"] for row in tables["run"] if row["recipe"] == recipe)
        lines.append([LABELS[recipe], f"{rate:g}", *(f"{loss} ({share})" if loss else share for loss, share in cells)])
    return table(" | ".join(["model | learning rate", *(f"{start:,} to {end - 1:,}" for start, end in starts)]), lines)


def _by_distance(tables: Tables) -> tuple[list[tuple[int, int]], dict[str, list[tuple[str, str]]]]:
    """Returns the distances from 64 on, and for every recipe its loss and its share of the gap at each of them."""
    cells = {(row["recipe"], row["seed"], row["start"]): row for row in tables["curves"]
             if row["part"] == "distance" and row["start"] >= 64}  # fmt: skip
    starts = sorted({(row["start"], row["end"]) for row in cells.values()})
    top = _base(tables, LEAST_RECALL)
    seeds = sorted(seed for recipe, seed, start in cells
                   if recipe == top and start == starts[0][0] and (LEAST_RECALL, seed, start) in cells)  # fmt: skip
    found: dict[str, list[tuple[str, str]]] = {}
    for recipe in _recipes(tables) if seeds else ():
        for start, _ in starts:
            own = [seed for seed in seeds if (recipe, seed, start) in cells]
            ends = [[cells[name, seed, start]["loss"] for seed in own] for name in (LEAST_RECALL, top, recipe)]
            found.setdefault(recipe, []).append(_closed(*ends) if own else ("", "not measured"))
    return starts, found


def _closed(least: list[float], most: list[float], own: list[float]) -> tuple[str, str]:
    """Writes the mean loss, and the share of the gap from `least` to `most` that is closed; all by seed."""
    if any(low <= high for low, high in zip(least, most, strict=True)):
        return f"{mean(own):.3f}", "no gap"
    shares = [(low - loss) / (low - high) for low, high, loss in zip(least, most, own, strict=True)]
    whole = (mean(least) - mean(own)) / (mean(least) - mean(most))
    said, low, high = (f"{round(100 * share)}%" for share in (whole, min(shares), max(shares)))
    return f"{mean(own):.3f}", f"{said} [{low}, {high}]" if len(own) > 1 else said


def closed_table(tables: Tables) -> str:
    """Returns a row for each hybrid of the controls: the share of the gap from BaseConv to attention that it closes.

    The 95% interval is the wider one of the bootstrap over seeds and documents and of Student's t over seeds.
    """
    arrays = {recipe: _arrays(tables, recipe) for recipe in _recipes(tables)}
    hybrids = [name for name in arrays if name.startswith("control_") and name not in CLOSED]
    lines = []
    for name in hybrids:
        seeds = sorted(seed for seed in arrays[name] if all(seed in arrays.get(end, {}) for end in CLOSED))
        if seeds:
            nats = [np.stack([arrays[each][seed][1] for seed in seeds]) for each in (*CLOSED, name)]
            closed = [_closed_share(*(losses.sum(-1) for losses in nats))]
            closed.append(_closed_share(*(losses[..., PARTS.index("hits")] for losses in nats)))
            lines.append([LABELS[name], len(seeds), *closed])
    return table("model | seeds | of all tokens | of AR hits", lines) if lines else MISSING


def _closed_share(least: np.ndarray, most: np.ndarray, own: np.ndarray) -> str:
    """Writes the share of the gap from `least` to `most` that `own` closes, all summed losses [seeds, documents]."""
    rng, draws = np.random.default_rng(0), 2000
    seeds, documents = (rng.multinomial(n, [1 / n] * n, draws).astype(float) for n in own.shape)

    def share(by_seed: np.ndarray, by_document: np.ndarray) -> np.ndarray:
        gaps = [np.einsum("br,bn,rn->b", by_seed, by_document, least - other) for other in (own, most)]
        return gaps[0] / gaps[1]

    if least.sum() <= most.sum():
        return "no gap"
    (whole,) = share(np.ones((1, own.shape[0])), np.ones((1, own.shape[1])))
    low, high = np.quantile(share(seeds, documents), (0.025, 0.975))
    by_seed = interval(share(np.eye(own.shape[0]), np.ones((own.shape[0], own.shape[1]))).tolist())
    if by_seed and by_seed.half and 2 * by_seed.half > high - low:
        low, high = by_seed.low, by_seed.high
    return f"{whole:.0%} [{low:.0%}, {high:.0%}]"


def losses_table(tables: Tables) -> str:
    """Returns a row for each recipe: mean loss of every slice over the seeds, with perplexity."""
    lines = []
    for recipe in _recipes(tables):
        runs = [row for row in tables["run"] if row["recipe"] == recipe]
        cells = [LABELS[recipe], f"{runs[0]['parameters'] / 1e6:.1f}M", str(len(runs))]
        for parts in (PARTS, ("hits",), ("frequent", "new"), ("frequent",), ("new",)):
            losses = [_loss(tables, recipe, row["seed"], parts) for row in runs]
            found = interval([loss for loss in losses if loss is not None])
            cells.append("no tokens" if found is None else f"{found.text()} ({math.exp(found.mean):,.1f})")
        lines.append(cells)
    heading = "model | weights | seeds | all tokens | AR hits | other tokens | repeated, frequent | new in the row"
    return table(heading, lines) if lines else MISSING


def gaps_table(tables: Tables) -> str:
    """Returns a row for each recipe: its gap to attention, the contribution of AR hits to the gap, and their share."""
    lines = []
    for recipe, found in _behind(tables).items():
        whole, hits = found["all"], found["hits"]
        published = published_share(hits.nats, whole.nats)
        said = "" if math.isnan(published) else f"{published:.0%}"
        lines.append([LABELS[recipe], _nats(whole), _nats(hits), _share_of_hits(found), said])
    heading = "model | gap, nats | of AR hits, nats | share of AR hits | by the rule of the source"
    return table(heading, lines) if lines else MISSING


def _share_of_hits(found: Mapping[str, Share]) -> str:
    whole, hits = found["all"], found["hits"]
    clear = whole.nats_low > 0 or whole.nats_high < 0
    return f"{hits.share:.0%} [{hits.share_low:.0%}, {hits.share_high:.0%}]" if clear else "no clear gap"


def slices_of(tables: Tables) -> str:
    """Returns how many tokens each slice has, and the power law of distances."""
    if not tables["run"]:
        return MISSING
    first = tables["run"][0]
    rows = [row for row in tables["slices"] if (row["recipe"], row["seed"]) == (first["recipe"], first["seed"])]
    counts = {part: sum(row["tokens"] for row in rows if row["part"] == part) for part in PARTS}
    whole = sum(counts.values())
    names = {"hits": "AR hits", "frequent": "repeated but frequent", "new": "new in their row"}
    said = ", ".join(f"{names[part]} {counts[part] / whole:.1%}" for part in PARTS)
    law = f"The power of the distance that fits the number of AR hits best is {-first['distance_exponent']:.2f}"
    return f"Of {whole:,} held-out tokens in {len(rows) // len(PARTS)} documents: {said}. {law}."


def exact_table(tables: Tables) -> str:
    """Returns the comparison with brute force, and the time of counting."""
    if not (tables["exact"] and tables["timed"]):
        return MISSING
    row, timed = tables["exact"][0], tables["timed"][0]
    difference = (f"{row['wrong_counts']} counts, {row['largest_difference_tokens']} tokens, "
                  f"{row['largest_difference_nats']:.1e} nats of a cell's sum; slices less whole "
                  f"{row['slices_less_whole_nats']:.1e} nats a token")  # fmt: skip
    lines = [["against brute force", f"{row['tokens']:,}", f"{row['counted_tokens']:,}", row["cells"], difference,
              f"{row['seconds']}, brute force {row['brute_force_seconds']}"],
             ["timed", f"{timed['tokens']:,}", f"{timed['counted_tokens']:,}", "", "", timed["seconds"]]]  # fmt: skip
    shown = table(" | tokens | bigrams counted in | cells | largest difference | seconds", lines, left=(0, 4))
    return f"{shown}\n\n{timed['processor']}, shared with other programs; commit {timed['commit']}."


def sources_table(tables: Tables) -> str:
    """Returns a row for each source of a corpus: its repeated bigrams in a sequence, and their power law."""
    lines = []
    for (source,), same in group(tables.get("sources", []), "source").items():
        hits = sum(row["hits"] for row in same) / same[0]["sequences"]
        lines.append([source, f"{same[0]['sequences']:,}", f"{hits:.0f}", f"{-same[0]['exponent']:.2f}"])
    heading = "source | sequences | repeated bigrams in a sequence | power of the distance"
    return table(heading, lines) if lines else MISSING


def about(tables: Tables) -> str:
    """Returns what the runs have in common."""
    if not tables["run"]:
        return MISSING
    row = tables["run"][0]
    commits = ", ".join(dict.fromkeys(each["commit"] for each in tables["run"]))
    return (
        f"{len(tables['run'])} runs of {row['tokens'] / 1e6:.1f}M tokens, {row['steps']} steps, "
        f"rows of {row['context'] + 1:,} tokens; bigrams counted in {row['counted_tokens']:,} tokens of training "
        f"({row['corpus']}); "
        f"{row['processor']}; torch {row['torch']}, commit {commits}."
    )


def shares(tables: Tables, recipe: str) -> dict[str, Share] | None:
    """Returns the parts of slices in the gap of a recipe to attention, over the seeds that both have; None without such
    seeds, and for the attention that gaps begin at."""
    name = _base(tables, recipe)
    ours, base = _arrays(tables, recipe), _arrays(tables, name)
    seeds = [seed for seed in ours if seed in base]
    if not seeds or recipe == name:
        return None
    tokens = np.stack([ours[seed][0] for seed in seeds])
    differences = np.stack([ours[seed][1] - base[seed][1] for seed in seeds])
    both = [np.concatenate([values.sum(-1, keepdims=True), values], axis=-1) for values in (tokens, differences)]
    return dict(zip(("all", *PARTS), bootstrap_shares(*both), strict=True))


def curves(tables: Tables, recipes: Sequence[str]) -> Any:
    """Draws loss against the count in training, of repeats and of what is new, and against the distance of AR hits."""
    figure, axes = panels(4, (4, 3.6))
    titles = ("repeated in the row", "new in the row", "AR hits: loss", "AR hits: how many")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
    for n, recipe in enumerate(recipes):
        style = curve_style(n) | {"label": LABELS[recipe], "markersize": 6 - n / 3}  # so that equal curves are seen
        for axis, part in zip(axes, ("repeated", "new", "distance"), strict=False):
            axis.plot(*_curve(tables, recipe, part, "loss"), **style)
    axes[3].plot(*_curve(tables, recipes[0], "distance", "rate"), "o", color="black", markersize=4)
    bounds = [axis.get_ylim() for axis in axes[:2]]
    for axis in axes[:2]:
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlabel("times that the bigram occurs in training")
        axis.axvline(tables["run"][0]["frequent"], color="0.35", linestyle=":", linewidth=1)
        axis.set_xlim(left=-0.2)
        axis.set_ylim(min(low for low, _ in bounds), max(high for _, high in bounds))
    for axis in axes[2:]:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens since the bigram ended last")
    axes[3].set_yscale("log")
    axes[3].set_ylabel("AR hits a token and distance")
    for axis in axes[:3]:
        axis.set_ylabel("held-out loss (nats a token)")
    figure.suptitle(_of_runs(tables), fontsize=10)
    set_grid(axes)
    shared_legend(figure, axes)
    return figure


def _of_runs(tables: Tables) -> str:
    """Returns the tokens of training and the number of seeds of the models."""
    rows = at_best_rates(tables)["run"]
    tokens = sorted({f"{row['tokens'] / 1e6:.0f}M" for row in rows})
    seeds = len({row["seed"] for row in rows})
    return f"{', '.join(tokens)} tokens of training, {'one run each' if seeds == 1 else f'{seeds} seeds'}"


def _base(tables: Tables, recipe: str) -> str:
    """Returns the model that the gap of a recipe begins at."""
    there = _recipes(tables)
    return CONTROL if recipe.startswith("control_") else next((name for name in BASES if name in there), BASES[-1])


def _behind(tables: Tables) -> dict[str, dict[str, Share]]:
    """Returns `shares` of the recipes that have a gap."""
    found = {recipe: shares(tables, recipe) for recipe in _recipes(tables)}
    return {recipe: each for recipe, each in found.items() if each}


def shares_figure(tables: Tables) -> Any:
    """Draws what every slice adds to the gap of each model to attention, with 95% intervals."""
    behind = _behind(tables)
    figure, axes = panels(1, (8, 1.5 + 0.5 * len(behind)))
    (axis,) = axes
    for n, (part, name) in enumerate((("hits", "AR hits"), ("frequent", "repeated, frequent"), ("new", "new"))):
        found = [each[part] for each in behind.values()]
        places = [place + (n - 1) * 0.26 for place in range(len(behind))]
        values = [each.nats for each in found]
        low = [each.nats - each.nats_low for each in found]
        high = [each.nats_high - each.nats for each in found]
        colour = (COLOURS[1], COLOURS[0], "0.6")[n]
        axis.barh(places, values, 0.24, xerr=[low, high], color=colour, label=name, capsize=2)
    axis.set_yticks(range(len(behind)), [LABELS[recipe] for recipe in behind])
    axis.invert_yaxis()
    axis.axvline(0, color="0.35", linewidth=1)
    base = LABELS[_base(tables, next(iter(behind)))]
    axis.set_xlabel("nats a token")
    figure.suptitle(f"what the tokens add to the gap to {base}; {_of_runs(tables)}", fontsize=10)
    set_grid(axes)
    shared_legend(figure, axes)
    return figure


def _recipes(tables: Tables) -> list[str]:
    there = {row["recipe"] for row in tables["run"]}
    return [recipe for recipe in LABELS if recipe in there]


def _loss(tables: Tables, recipe: str, seed: int, parts: Sequence[str]) -> float | None:
    """Returns the mean loss of the tokens of some parts; None where there are none."""
    rows = [row for row in tables["slices"] if (row["recipe"], row["seed"]) == (recipe, seed) and row["part"] in parts]
    tokens = sum(row["tokens"] for row in rows)
    return sum(row["nats"] for row in rows) / tokens if tokens else None


def _arrays(tables: Tables, recipe: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Returns tokens and summed losses [documents, parts] of every seed."""
    rows = [row for row in tables["slices"] if row["recipe"] == recipe]
    found = {}
    for (seed,), same in group(rows, "seed").items():
        ordered = sorted(same, key=lambda row: (row["document"], PARTS.index(row["part"])))
        found[seed] = tuple(
            np.array([row[name] for row in ordered], float).reshape(-1, len(PARTS)) for name in ("tokens", "nats")
        )
    return found  # type: ignore[return-value]


def _curve(tables: Tables, recipe: str, part: str, column: str) -> tuple[list[float], list[float]]:
    """Returns geometric middles of the cells, and the mean of a column over the seeds."""
    rows = [
        row for row in tables["curves"] if (row["recipe"], row["part"]) == (recipe, part) and row["tokens"] >= LEAST
    ]
    cells = sorted(group(rows, "start", "end").items())
    middles = [math.sqrt(start * (end - 1)) for (start, end), _ in cells]
    return middles, [mean(row[column] for row in same) for _, same in cells]


def _nats(share: Share) -> str:
    return f"{share.nats:+.3f} [{share.nats_low:+.3f}, {share.nats_high:+.3f}]"
