"""Makes the tables of docs/guides/serving.md from the rows of `benchmarks.serving`. Rows may be missing."""

from __future__ import annotations

from collections.abc import Iterator

_FROM = {"new": "new", "memory": "again, from memory", "disk": "after a restart, from the disk"}


def serving_table(rows: list[dict]) -> str:
    """Returns a row for each measurement."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(row["measure"], []).append(row)
    lines = [line for measure, make in _LINES.items() if measure in found for line in make(found[measure])]
    about = f"Preset {rows[0]['model']!r}, float32; {rows[0]['processor']}"
    return "\n".join(
        ["| | |", "|---|---|", *lines, "", f"{about}; torch {rows[0]['torch']}, commit {rows[0]['commit']}."]
    )


def load_table(rows: list[dict]) -> str:
    """Returns only the row of clients that close their connections."""
    return serving_table([row for row in rows if row["measure"] == "vanishing"])


def _streams(rows: list[dict]) -> Iterator[str]:
    for row in rows:
        share = row["tokens_per_second"] / row["tokens_per_second_generate"]
        rate = f"{row['tokens_per_second']:,.0f} tokens/s"
        if rows[0]["streams"] == 1:
            rate += f", {row['tokens_per_second'] / rows[0]['tokens_per_second']:.1f}x one stream"
        equal = "equal to" if row["equal_to_alone"] else "DIFFERENT from"
        name = f"{row['streams']} stream{'s' * (row['streams'] > 1)} of {row['new_tokens']:,} tokens"
        yield f"| {name} | {rate}, {share:.0%} of `generate`; answers {equal} those alone |"


def _first_token(rows: list[dict]) -> Iterator[str]:
    idle = rows[0]["seconds_to_first_token"]
    yield f"| first token, idle server | {idle * 1e3:,.0f} ms, median of {rows[0]['repeats']} |"
    for row in rows[1:]:
        after = f"{row['seconds_to_first_token'] * 1e3:,.0f} ms, {row['seconds_to_first_token'] / idle:.1f}x"
        yield f"| first token while {row['behind_tokens']:,} tokens of another prompt are read | {after} |"


def _memory(rows: list[dict]) -> Iterator[str]:
    for row in rows:
        more, slots = (f"{row[name] / 1e6:,.1f} MB" for name in ("peak_extra_bytes", "bytes_of_all_slots"))
        gpu = f"; on the GPU {row['gpu_bytes'] / 1e9:,.2f} GB at most, in all" if row.get("gpu_bytes") else ""
        prompt = f"memory for a prompt of {row['prompt_tokens']:,} tokens"
        yield f"| {prompt} | {more} more than before, beside {slots} of slots{gpu} |"


def _prefix(rows: list[dict]) -> Iterator[str]:
    for row in rows:
        sooner = rows[0]["seconds_to_first_token"] / row["seconds_to_first_token"]
        first = f"first token after {row['seconds_to_first_token'] * 1e3:,.0f} ms"
        first += "" if row is rows[0] else f", {sooner:,.0f}x sooner"
        yield f"| a prompt of {row['prompt_tokens']:,} tokens, {_FROM[row['kind']]} | {first} |"


def _hostile(rows: list[dict]) -> Iterator[str]:
    for row in rows:
        statuses = ", ".join(f"{number} with {status}" for status, number in row["statuses"].items())
        kept = "unchanged" if row["other_answers_equal"] else "CHANGED"
        yield f"| {row['requests']:,} hostile requests | answered {statuses}; the answer beside them {kept} |"


def _vanishing(rows: list[dict]) -> Iterator[str]:
    for row in rows:
        load = f"{row['clients']} clients for {row['seconds']:.0f} s, {row['clients_that_left']:,} answers left early"
        more = row["bytes_at_the_end"] / row["bytes_after_a_tenth"] - 1
        rest = f"{row['answers']:,} others, {row['answers_wrong_or_lost']} wrong or lost; memory {more:+.1%}"
        yield f"| {load} | {rest}; exit code {row['exit_code']} |"


_LINES = {
    "throughput": _streams,
    "first token": _first_token,
    "memory": _memory,
    "prefix": _prefix,
    "hostile": _hostile,
    "vanishing": _vanishing,
}
