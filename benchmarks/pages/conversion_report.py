"""The page of converted models, docs/results/conversion.md, computed from the rows of `benchmarks.conversion`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.common.measure import read
from benchmarks.pages.prose import filled, table
from benchmarks.tables import with_stale_lines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results/conversion")
PAGE = ROOT / "docs" / "results" / "conversion.md"
# In the order of the page.
STUDENTS = ("hybrid_delta", "delta", "deltanet", "windows", "all_delta")
Row = dict[str, Any]


def write_report(page: Path = PAGE) -> Path:
    """Writes the page from all committed rows."""
    page.write_text(report(PAGE.read_text(), read_rows()))
    return page


def read_rows() -> list[Row]:
    """Returns the rows of all committed files, those of `sympow passkey` and `sympow needles` as kinds of their own."""
    files = sorted((ROOT / RESULTS).glob("*.csv"), key=lambda file: _order(file.stem.split("-")))
    return [{"kind": "needles" if "task" in row else "depths", **row} for file in files for row in read(file)]


def _order(words: list[str]) -> tuple[str, int, list[str]]:
    """Returns the key that sorts files by phase, and the students as the page lists them."""
    found = [STUDENTS.index(word) for word in words if word in STUDENTS]
    return words[-1], found[0] if found else len(STUDENTS), words


def report(page: str, rows: list[Row]) -> str:
    """Returns the text of the page with the summary and the tables of the rows."""

    def written(kind: str) -> str:
        own = [row for row in rows if row["kind"] == kind]
        return "\n".join(_summary(rows)) if kind == "summary" else _with_source(own) if own else "Not run yet."

    return with_stale_lines(filled(page, written))


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
        about = "32 rows, random weights; the teacher's rate is 1"
        yield f"- Decoding after 32,768 tokens ({about}): {'; '.join(ratios)}."


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
    if row["kind"] == "positions" and row["model"] == "teacher":
        return "teacher"
    return row.get("run") or row["model"]


def _curves(rows: list[Row]) -> dict[str, Row]:
    """Returns the losses by position of every model; the teacher has them once for each set of held-out rows."""
    found = {(row["rows"], _model(row)): row for row in rows if row["kind"] == "positions"}
    ordered = sorted(found.items(), key=lambda item: (item[0][0], item[0][1] == "teacher"))
    several = len({number for number, _ in found}) > 1
    return {f"{name}, {number} rows" if several and name == "teacher" else name: row for (number, name), row in ordered}


def _with_source(rows: list[Row]) -> str:
    sources = dict.fromkeys(
        f"{row['processor']}; torch {row['torch']}, commit {row['commit']}" for row in rows if row.get("processor")
    )
    return "\n".join([TABLES[rows[0]["kind"]](rows), *(["", f"{' / '.join(sources)}."] if sources else [])])


def _logits(rows: list[Row]) -> str:
    heading = "model | tokens | difference | with the same angles | largest logit | ours to float64 | theirs to float64"
    lines = []
    for row in rows:
        cells = [row["model"], f"{row['tokens']:,}", *(f"{row[name]:.1e}" for name in ("difference", "same_angles"))]
        cells += [f"{row['largest']:.1f}", *(f"{row[name]:.1e}" for name in ("ours_to_exact", "theirs_to_exact"))]
        lines.append(cells)
    return table(heading, lines)


def _gaps(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        cells = [row["run"], _layers(row["layers"]), f"{row['context']:,}", row["rows"], f"{row['converted']:.4f}"]
        lines.append([*cells, f"{row['teacher']:.4f}", f"{row['converted'] - row['teacher']:+.4f}"])
    return table("model | layers | context | rows | loss | teacher | gap", lines, left=(0, 1))


def _stages(rows: list[Row]) -> str:
    names = {1: "layers", 2: "predictions", 3: "text"}
    lines = []
    for row in {(row["run"], row["stage"]): row for row in rows}.values():  # the last of each stage
        cells = [row["run"], names[row["stage"]], f"{row['step']:,}", f"{row['tokens']:,}", f"{row['seconds']:,.0f}"]
        lines.append([*cells, f"{row['held_out_loss']:.4f}", f"{row['teacher_loss']:.4f}", f"{row['gap']:+.4f}"])
    return table("run | stage | steps | tokens | seconds | loss | teacher | gap", lines, left=(0, 1))


def _by_depth(rows: list[Row], names: Sequence[str]) -> str:
    """Returns a table of accuracies with a column for each depth."""
    depths = sorted({row["depth"] for row in rows})
    found: dict[tuple[Any, ...], dict[float, str]] = {}
    for row in rows:
        key = (*(row[name] for name in names), f"{row['context']:,}")
        found.setdefault(key, {})[row["depth"]] = f"{row['accuracy']:.0%}"
    heading = " | ".join([*names, "tokens", *(f"depth {depth:g}" for depth in depths)])
    lines = [[*about, *(cells.get(depth, "not run") for depth in depths)] for about, cells in found.items()]
    return table(heading, lines, left=range(len(names)))


def _positions(rows: list[Row]) -> str:
    curves = _curves(rows)
    bins = [each for row in curves.values() for each in row["bins"] if each["end"] > 512]
    edges = list(dict.fromkeys((each["start"], each["end"]) for each in bins))
    lines = []
    for name, row in curves.items():
        found = {(each["start"], each["end"]): f"{each['loss']:.4f}" for each in row["bins"]}
        lines.append([name, row["rows"], *(found.get(edge, "") for edge in edges)])
    return table(" | ".join(["run", "rows", *(f"to {end:,}" for _, end in edges)]), lines)


def _decoding(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        rate, peers = row["tokens_per_second"], [
            other["tokens_per_second"] or 0 for other in rows
            if other["context"] == row["context"] and other["model"].startswith("teacher")
        ]  # fmt: skip
        cells = [row["model"], f"{row['context']:,}", row["batch"]]
        if rate is None:
            cells += ["", "out of memory", "", ""]
        else:
            ratio = f"{rate / max(peers):.2f}x" if any(peers) else ""
            cells += ["graph" if row["graph"] else "kernels", f"{rate:,.0f}", ratio, f"{row['state_bytes'] / 1e6:,.0f}"]
        lines.append(cells)
    heading = "model | context | rows | a step | tokens/s | times the faster teacher | states, MB"
    return table(heading, lines, left=(0, 3))


def _harness(rows: list[Row]) -> str:
    names = ("run", "commit", "task", "samples", "metric")
    lines = [[*(row[name] for name in names), f"{row['value']:.4g}"] for row in rows]
    return table("model | commit | task | samples | metric | value", lines, left=(0, 1, 2, 4))


def _layers(text: str) -> str:
    names = text.split(",")
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


# By the kind of their rows.
TABLES: dict[str, Callable[[list[Row]], str]] = {
    "loss": _gaps,
    "stage": _stages,
    "depths": partial(_by_depth, names=("model",)),
    "needles": partial(_by_depth, names=("model", "task", "values")),
    "positions": _positions,
    "decoding": _decoding,
    "harness": _harness,
    "logits": _logits,
}
