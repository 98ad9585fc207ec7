"""Rows of results: in a file, and the learning rate that validation chooses."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from io import StringIO
from statistics import mean, median
from typing import Any

from sympow.files import naming, write_text

Row = Mapping[str, Any]

# Rows with equal values in these columns differ in learning rate and seed only.
SETTING = ("label", "mixers", "width", "heads", "layers", "mlp_ratio", "positions", "train", "test", "vocab_size",
           "data_seed", "examples", "epochs", "batch_size", "weight_decay", "warmup",
           "stop_at", "validations", "precision")  # fmt: skip
# More such columns, and their values in files of versions that had no others and do not name them.
_LATER: Row = {"optimizer": "adamw", "muon_rate": 1.0}


def write_results(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Writes rows as CSV, a column for every name in any of them, None as an empty cell; whole or not at all."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the rows of a file of `write_results`; ValueError where it is none."""
    rows = read_rows(path)
    check_rows(rows, path)
    return rows


def check_rows(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless `rows`, of the file `path`, have the columns of runs of recall."""
    needed = (*SETTING, "learning_rate", "seed", "validation_accuracy", "test_accuracy")
    missing = [name for row in rows for name in needed if name not in row]
    if not rows or missing:
        raise ValueError(f"{path} holds no results of recall: " + (f"no column {missing[0]!r}" if rows else "no rows"))


def read_rows(path: str | os.PathLike[str], texts: Collection[str] = ()) -> list[dict[str, Any]]:
    """Returns the rows of any file of `write_results`.

    Columns named in `texts` are not read as numbers where they look so. Raises ValueError for a file that is no table.
    """
    return [
        {name: text if name in texts and text else cell_value(text) for name, text in row.items()}
        for row in read_cells(path)
    ]


def read_cells(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Returns the rows of a CSV file as text, by the names of its columns; ValueError for a file that is no table."""
    try:
        with naming(path, reading=True), open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no table of results: {error}") from error
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():  # as csv tells cells without a column, and columns without a cell
            raise ValueError(f"{path} is no table of results: row {number} has not as many cells as there are columns")
    return rows


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Chooses the rows of every setting, one a seed, of the learning rate with the highest mean validation accuracy.

    Only the learning rates with the most seeds are compared, because a mean over fewer seeds says less. Of equal
    learning rates, the one with the lower mean validation loss is chosen. The choice does not use the test.
    """
    best: list[Row] = []
    for setting in group(rows, *SETTING, *_LATER).values():
        rates = list(group(setting, "learning_rate").values())
        seeds = [len({row["seed"] for row in rate}) for rate in rates]
        best += max((r for r, n in zip(rates, seeds, strict=True) if n == max(seeds)), key=_validation)
    return best


def group(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Returns rows by their values of these columns, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(_LATER[name] if name in _LATER and name not in row else row[name] for name in names)
        groups.setdefault(key, []).append(row)
    return groups


def summary(rows: Sequence[Row]) -> str:
    """Returns a table in Markdown: every setting's chosen learning rate and median test accuracy over its seeds."""
    lines = ["| model | heads | d | task | state, bytes | learning rate | seeds | validation | test | lowest test |"]
    lines.append("|---|" + "---:|" * 2 + "---|" + "---:|" * 6)
    for same in group(chosen(rows), *SETTING, *_LATER).values():
        row = same[0]
        label = f"{row['label']}, Muon" if row.get("optimizer") == "muon" else row["label"]
        task = row["test"] if row["test"] == row["train"] else f"{row['test']}, trained on {row['train']}"
        state = "" if row["state_bytes"] is None else f"{row['state_bytes']:,}"
        tests = [r["test_accuracy"] for r in same]
        cells = [label, row["heads"], row["width"], task, state, f"{row['learning_rate']:.2g}", len(same)]
        cells += [f"{median(r['validation_accuracy'] for r in same):.4f}", f"{median(tests):.4f}", f"{min(tests):.4f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _validation(rows: Iterable[Row]) -> tuple[float, float]:
    """Returns the key to maximize: the mean accuracy, then the negated mean loss, where NaN counts as the worst."""
    rows = list(rows)
    loss = mean(row["validation_loss"] for row in rows)
    return mean(row["validation_accuracy"] for row in rows), -loss if loss == loss else float("-inf")


def cell_value(text: str) -> Any:
    """Returns what the text of a cell stands for: None, a truth value, a number, or the text itself."""
    if text == "":
        return None
    if text in ("True", "False"):
        return text == "True"
    kinds: tuple[Callable[[str], Any], ...] = (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text
