"""Compares rows measured anew with committed ones: `python -m benchmarks.repeat NAME NEW.csv`.

NAME is a file of benchmarks/results that was measured with earlier code, NEW.csv a file of the same program. Each value
that is compared becomes a line of benchmarks/results/repeated.csv, whether it agrees or not. The file is confirmed for
the code of the new rows if it has a line of this code, and if all of them agree. `python -m benchmarks.tables` calls a
file of earlier code stale unless it is confirmed for the present code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import median, stdev
from typing import Any, NamedTuple

from benchmarks.common.code_hash import Part, code_hash, is_present, part_of
from benchmarks.common.measure import known, read, refuses, write

RESULTS = Path(__file__).resolve().parent / "results"
REPEATED = "repeated.csv"
TIME, RATE, RATIO, SEEDS = "time", "rate", "ratio", "seeds"
SLOWER = 0.05  # of a time, a rate or a ratio
GAP = 0.01  # nats, of models that were trained once: the median of the standard deviations over seeds in learning.csv
POINT = 0.01  # of an accuracy: one question in a hundred
# Columns of a case that `rows_named` leaves out: other columns say the same, or say it shorter.
NOT_NAMED = ("mixers", "options", "train", "length", "pairs", "corpus", "impl", "form", "row_tokens", "micro_batch")


class Rule(NamedTuple):
    """Says how the rows of some files are compared.

    Attributes:
        keys: the columns that describe a case. They name one row of a file. Columns that a file lacks do not count.
        values: columns that are compared, and how far a value may lie from the committed one. TIME: 5% longer. RATE:
            5% lower. RATIO to a peer: 5% lower. SEEDS: two standard deviations over seeds, of the case or, if that is
            more, the median of all cases in the file. A number: so much in both directions. On another processor a row
            with a time or a rate is compared only if it has a ratio, and then without the time or the rate.
    """

    keys: str
    values: dict[str, str | float]


_SHAPE = "B T H G K V p gated mode dtype"
_RUN = "variant context tokens documents row_tokens size learning_rate seed"
_MODEL = "mixer options dtype d_model layers heads vocabulary context"
_STEP = "preset vocabulary context rows micro_batch mixer mode ranks precision optimizer"
_PAIR = "run against first_step steps"
_SERVED = "measure model streams new_tokens behind_tokens kind prompt_tokens requests clients"
_SAME = ("equal_to_alone", "equal", "all_4xx", "other_answers_equal", "answers_wrong_or_lost", "bytes_of_all_slots")
_RECALL = "label mixers width heads layers mlp_ratio positions train test length pairs vocab_size"
_LOSS = {"held_out_loss": SEEDS}
RULES = {  # the first that matches
    "ops_*": Rule(f"{_SHAPE} peer", {"ms": TIME, "ratio": RATIO}),
    "delta_steps_*": Rule(_SHAPE, {"us": TIME}),
    "delta_*": Rule(f"{_SHAPE} peer", {"ms": TIME, "ratio": RATIO}),
    "chunks_*": Rule(f"{_SHAPE} impl chunk", {"ms": TIME}),
    "powers_*": Rule(f"{_SHAPE} form chunk", {"ms": TIME}),
    "host_*": Rule(f"{_SHAPE} what peer", {"us": TIME, "ratio": RATIO}),
    "positions_*": Rule("T steps form", {"step_ms": TIME}),
    "decoding_sweep_*": Rule(f"{_SHAPE} state_dtype elements programs tail warps registers stages", {"us": TIME}),
    "decoding_models_*": Rule("mixer dtype preset vocabulary context rows", {"ms_per_token": TIME}),
    "decoding_cpu*": Rule(_MODEL, {"ms_per_token": TIME}),
    "decoding_*": Rule(f"{_SHAPE} state_dtype slotted peer context", {"ms_per_token": TIME, "ratio": RATIO}),
    "brumby_*": Rule("dtype d_model layers what rows tokens", {"ms_per_token": TIME}),
    "hf_generate_*": Rule("model dtype batch new_tokens", {"tokens_per_second": RATE, "equal": 0}),
    "serving_*": Rule(_SERVED, {"tokens_per_second": RATE, "seconds_to_first_token": TIME, **dict.fromkeys(_SAME, 0)}),
    "speculation_*": Rule("text temperature drafts model prompts", {"ratio": RATIO, "same_tokens": 0}),
    "state_dtype_*": Rule("state_dtype tokens model", {"more": 1e-4, "state_bytes": 0}),
    "context_damage_*": Rule("measure", {"whole_files": 0, "refused": 0}),
    "context_restore_*": Rule("tokens_read", {"restore_seconds": TIME, "same_continuation": 0, "bytes": 0}),
    "context_rounding_*": Rule("dtype tokens_read rows", {"more_loss_percent": 0.01, "bit_equal": 0, "bytes": 0}),
    "training_ranks_learning_*": Rule(_PAIR, {"difference": 0.1, "first_loss": GAP}),  # where roundings grow
    "training_ranks_*": Rule(_PAIR, {"difference": 1e-3, "first_loss": GAP}),
    "training_*": Rule(_STEP, {"tokens_per_second": RATE}),
    "long_row_*": Rule("preset mixer p length trained_steps", {"seconds": TIME, "finite": 0, "flat_or_falling": 0}),
    "long_text_*": Rule(
        "variant trained_context tokens optimizer learning_rate seed start end", {"loss": GAP, "gain": GAP}
    ),
    "mqar_*": Rule(f"{_RECALL} learning_rate seed examples epochs batch_size", {"test_accuracy": POINT}),
    "zoology_trainer_*": Rule("mixer vocab_size length pairs steps learning_rate", {"test_accuracy": POINT}),
    "learning.csv": Rule(f"{_RUN} optimizer muon_rate scale corpus", _LOSS),
    "context_scaling/runs.csv": Rule(f"{_RUN} scale corpus", _LOSS),
    "context_scaling/speed.csv": Rule("variant context mode", {"tokens_per_second": RATE}),
    "ar_hits/*/run.csv": Rule("recipe seed learning_rate optimizer changes steps", _LOSS),
    "ar_hits/exact.csv": Rule("tokens context frequent", {"wrong_counts": 0, "largest_difference_tokens": 0}),
    "ar_hits/timed.csv": Rule("tokens context", {"hits": 0}),
    "conversion/decoding.csv": Rule("shape model context batch", {"tokens_per_second": RATE, "state_bytes": 0}),
    "conversion/*-logits.csv": Rule("model text tokens", {"difference": 1e-3}),
    "conversion/*-harness*.csv": Rule("run task metric", {"value": GAP}),
    "conversion/*.csv": Rule(
        "run kind step stage context rows model length task values depth", {"gap": GAP, "accuracy": POINT}
    ),
}


def rule_of(name: str) -> Rule:
    """Returns the rule of a file; ValueError if there is none."""
    rule = next((rule for pattern, rule in RULES.items() if fnmatch(name, pattern)), None)
    if rule is None:
        raise ValueError(f"expected a file that RULES describes; got {name}")
    return rule


def key_of(rule: Rule, row: dict[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """Returns the case of a row, by those keys that are among some columns."""
    return {name: row[name] for name in rule.keys.split() if name in columns and row.get(name) is not None}


def compare(name: str, old: Sequence[dict[str, Any]], new: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a line of the record for each value of a new row that the rule of its file compares.

    Args:
        name: of the file.
        old: its committed rows.
        new: a row.

    Raises:
        ValueError: if the file has no rule, if it has not one row of this case, or if the code is not known.
    """
    rule = rule_of(name)
    key = key_of(rule, new, old[0])
    same = [row for row in old if key_of(rule, row, row) == key]
    if len(same) != 1:
        raise ValueError(f"expected one row of {name} with {key}; got {len(same)}")
    processor, commit = new.get("processor"), new.get("commit")
    code = new.get("code") or code_hash(part_of(name, new).name, commit)
    if code is None:
        raise ValueError(f"expected the hash of the code, or a commit that git knows; got {commit}")
    values = {column: allowed for column, allowed in rule.values.items() if same[0].get(column) is not None}
    if same[0].get("processor") != processor and {TIME, RATE} & {*values.values()}:
        if RATIO not in values.values():
            return
        values = {column: allowed for column, allowed in values.items() if allowed not in (TIME, RATE)}
    for column, allowed in values.items():
        before, now = same[0][column], new.get(column)
        limit = _spread(rule, old, same[0], column) if allowed == SEEDS else allowed
        agrees = now is not None and _agrees(before, now, limit)
        yield {"file": name, "key": key, "column": column, "before": before, "now": now, "allowed": limit,
               "agrees": agrees, "processor": processor, "commit": commit, "code": code}  # fmt: skip


def _agrees(before: float, now: float, allowed: str | float) -> bool:
    if isinstance(allowed, str):
        return now <= before * (1 + SLOWER) if allowed == TIME else now >= before * (1 - SLOWER)
    return abs(now - before) <= allowed


def _spread(rule: Rule, rows: Sequence[dict[str, Any]], row: dict[str, Any], column: str) -> float:
    """Returns two standard deviations over seeds: of the case of a row or, if that is more, the median of all cases."""
    cases: dict[str, list[float]] = {}
    for each in rows:
        if each[column] is not None:
            cases.setdefault(str(key_of(rule, each | {"seed": None}, each)), []).append(each[column])
    found = {case: stdev(values) for case, values in cases.items() if len(values) > 1}
    return round(2 * max(found.get(str(key_of(rule, row | {"seed": None}, row)), 0.0), median(found.values())), 5)


def confirmed(table: Path, name: str, parts: Collection[Part]) -> list[dict[str, Any]]:
    """Returns the rows of a file that were repeated with the present code, by their keys.

    Returns none if a value of one does not agree, and if a part is not repeated: by no row that runs as much of it. The
    repetition of a row that is not in the file any more, because another measurement took its place, does not count.
    """
    lines = [line for line in known(table) if line["file"] == name]
    if not lines:
        return []
    rule = rule_of(name)
    there = {(str(key_of(rule, row, row)), column, row.get(column)) for row in read(table.parent / name)
             for column in rule.values}  # fmt: skip
    lines = [line for line in lines if (str(line["key"]), line["column"], line["before"]) in there]
    lines = [line for line in lines if is_present(part_of(name, line), line["commit"], line["code"])]
    repeated = {part_of(name, line) for line in lines}
    whole = all(any(own.name == part.name and {*own.not_run} <= {*part.not_run} for own in repeated) for part in parts)
    if not whole or not all(line["agrees"] for line in lines):
        return []
    return list({str(line["key"]): line["key"] for line in lines}.values())


def rows_named(path: Path, keys: Sequence[dict[str, Any]]) -> str:
    """Returns a line that says which rows of a file some keys mean: "model power, window; seed 0".

    Columns that all rows of the file share are left out.
    """
    rows, parts = read(path), []
    for column in keys[0]:
        if column not in NOT_NAMED and len({str(row.get(column)) for row in rows}) > 1:
            found = dict.fromkeys(_shown(key[column]) for key in keys if key.get(column) is not None)
            parts.append(f"{column.replace('_', ' ')} {', '.join(found)}")
    return "; ".join(parts)


def _shown(value: Any) -> str:
    """Returns a value of a key as a page shows it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return str(value)


@refuses
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repeat", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="a file of benchmarks/results")
    parser.add_argument("new", type=Path, nargs="+", help="files of rows measured anew")
    args = parser.parse_args()
    table = RESULTS / REPEATED
    old, before = read(RESULTS / args.name), known(table)
    lines = [line for path in args.new for row in read(path) for line in compare(args.name, old, row)]
    if not lines:
        raise ValueError("expected a row of the same processor, or a value that does not depend on it; got none")
    write(table, before + [line for line in lines if line not in before])
    for line in lines:
        print(f"{'agrees' if line['agrees'] else 'DOES NOT AGREE'}: {line['column']} {line['before']} -> {line['now']} "
              f"({line['allowed']}), {line['key']}")  # fmt: skip
    return int(not all(line["agrees"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
