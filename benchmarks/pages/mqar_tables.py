"""Makes the tables of docs/results/mqar.md from rows of associative recall, and judges Claim 1 of Zoology by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from benchmarks.pages.prose import table
from sympow.recall.figures import SOLVED
from sympow.recall.results import Row, chosen, group

BASE = "attention"
CONVOLVED = "attention after convolution"
CONVOLUTIONS = ("BaseConv", "Hyena", "H3", "RWKV-4")
ALL = 0.99  # a cell is solved
RECALLED = 0.9  # an accuracy at which a convolution recalls
NOISE = 0.02  # an accuracy above 1/D by less is guessing: a test has 12,000 queries and more


def widths_table(rows: Sequence[Row]) -> str:
    """Returns test accuracies: a row for each model and width, a column for each length.

    The learning rate is the one that is best on the validation set.
    """
    best = {(row["label"], row["width"], row["length"]): row for row in chosen(rows)}
    lengths = sorted({row["length"] for row in rows})
    pairs = {row["length"]: row["pairs"] for row in rows}
    lines = []
    for label in dict.fromkeys(row["label"] for row in rows):
        for width in sorted({row["width"] for row in rows if row["label"] == label}):
            found = [best[label, width, n] for n in lengths]
            cells = [f"{row['test_accuracy']:.1%} ({row['learning_rate']:.2g})" for row in found]
            lines.append([label, width, *cells])
    heading = " | ".join(["model | d", *(f"N {n}, D {pairs[n]}" for n in lengths)])
    return f"{table(heading, lines)}\n\n{_about(rows)}"


def seeds_table(rows: Sequence[Row]) -> str:
    """Returns mean test accuracy, lowest and highest seed, and excess over 1/D: a row for each model and width."""
    cells = _cells(rows)
    lengths = sorted({(row["length"], row["pairs"]) for row in rows})
    lines = [["guessing, 1/D", "", *(f"{1 / d:.1%}" for _, d in lengths)]]
    for label, width in dict.fromkeys((row["label"], row["width"]) for row in rows):
        lines.append([label, width, *(_cell(cells.get((label, width, n, d), []), d) for n, d in lengths)])
    heading = " | ".join(["model | d", *(f"N {n}, D {d}" for n, d in lengths)])
    return f"{table(heading, lines)}\n\n{_about(rows)}"


def steps_table(rows: Sequence[Row]) -> str:
    """Returns the steps after which each run was solved, and its test accuracy: a row for each run."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["label"], row["seed"])):
        steps = f"{row['steps']:,}" if row["ended"] == "solved" else "not reached"
        lines.append([row["label"], row["seed"], steps, f"{row['test_accuracy']:.1%}"])
    return f"{table('model | seed | steps until 99% | test', lines)}\n\n{_about(rows)}"


def deep_table(rows: Sequence[Row]) -> str:
    """Returns `seeds_table`, and the judgement of Claim 1 for each depth. Labels end with the depth.

    A depth is left out as long as a cell lacks a run at some rate. The baseline of the judgement is attention after a
    short convolution, because attention with learned positions may need more steps than the runs have.
    """
    claims, shown, cells, rates = [], [], 0, len({row["learning_rate"] for row in rows})
    for (layers,), same in sorted(group(rows, "layers").items()):
        tried = group(same, "label", "width", "length")
        cells = max(cells, len(tried))
        done = sum(len({row["learning_rate"] for row in each}) for each in tried.values())
        if done < rates * cells:
            claims.append(f"With {layers} layers, {done} of {rates * cells} runs of the first seed are done.")
            continue
        shown += same
        labels = [row["label"].partition(",")[0] for row in same]
        found = claim_1([{**row, "label": label} for row, label in zip(same, labels, strict=True)], CONVOLVED)
        claims.append(f"With {layers} layers: {found}")
    return "\n\n".join([seeds_table(shown), *claims])


def convolutions_table(rows: Sequence[Row]) -> str:
    """Returns `seeds_table`, and the judgement of Claim 1."""
    return f"{seeds_table(rows)}\n\n{claim_1(rows)}"


def heads_table(rows: Sequence[Row]) -> str:
    """Returns mean test accuracy, lowest and highest seed, and excess over 1/D: a row for each model and heads."""
    lines = []
    for (label, heads, width, test), same in group(chosen(rows), "label", "heads", "width", "test").items():
        cell = _cell([row["test_accuracy"] for row in same], same[0]["pairs"])
        lines.append([label, heads, width, test, cell])
    return f"{table('model | heads | d | task | test', lines, left=(0, 3))}\n\n{_about(rows)}"


def tasks_table(rows: Sequence[Row]) -> str:
    """Returns mean test accuracy, lowest and highest seed: a row for each model, a column for each own task."""
    names = {row["test"]: row["test"].partition(":")[2].partition(" ")[0] for row in rows}
    found = group(chosen(rows), "label", "test")
    lines = []
    for label in dict.fromkeys(row["label"] for row in rows):
        seeds = [[row["test_accuracy"] for row in found[label, test]] for test in names]
        lines.append([label, *(f"{mean(own):.1%} [{min(own):.1%}, {max(own):.1%}]" for own in seeds)])
    return f"{table(' | '.join(['model', *names.values()]), lines)}\n\n{_about(rows)}"


def claim_1(rows: Sequence[Row], name: str = BASE) -> str:
    """Says whether Claim 1 is reproduced: attention solves every cell, convolutions need widths that grow with N.

    Lengths beyond those trained on are no part of it. Where the baseline `name` does not solve a length, there is no
    verdict, and that length is left out.
    """
    trained = {int(task.split()[1].partition(":")[0]) for row in rows for task in row["train"].split(" + ")}
    cells = {key: found for key, found in _cells(rows).items() if key[2] in trained}
    base = {key[1:3]: mean(found) for key, found in cells.items() if key[0] == name}
    below = [f"N {length}, d {width}" for (width, length), found in sorted(base.items()) if found < ALL]
    said = [f"Claim 1: {name} is at {ALL:.0%} or more in all {len(base)} cells."]
    if below:
        said = [f"Claim 1: {name} is below {ALL:.0%} at {'; '.join(below)}. A baseline that failed to train allows no "
                "comparison, so the claim is open."]  # fmt: skip
        trained -= {length for (_, length), found in base.items() if found < ALL}
        cells = {key: found for key, found in cells.items() if key[2] in trained}
        if not trained:
            return said[0]
        said.append(f"At N {', '.join(map(str, sorted(trained)))} it is at {ALL:.0%} or more.")
    pairs = {row["length"]: row["pairs"] for row in rows}
    grows = []
    for label in [each for each in CONVOLUTIONS if any(key[0] == each for key in cells)]:
        own = {key[1:3]: mean(found) for key, found in cells.items() if key[0] == label}
        widths = sorted({width for width, _ in own})
        need = {n: next((w for w in widths if own.get((w, n), 0) >= RECALLED), None) for n in sorted(trained)}
        above = [(w, n) for (w, n), found in sorted(own.items()) if found > 1 / pairs[n] + NOISE]
        if any(need.values()) and len(widths) == 1:
            reached, missed = ([str(n) for n, w in need.items() if (w is None) == none] for none in (False, True))
            but = f", not at N {', '.join(missed)}" if missed else ""
            said.append(f"At d {widths[0]} {label} reaches {RECALLED:.0%} at N "
                        f"{', '.join(reached)}{but}.")  # fmt: skip
        elif any(need.values()):
            needs = ", ".join(f"d {w} at N {n}" if w else f"more than d {widths[-1]} at N {n}" for n, w in need.items())
            said.append(f"{label} reaches {RECALLED:.0%} from {needs} on.")
            known = [w or 2 * widths[-1] for w in need.values()]
            grows += [label] if known == sorted(known) and known[0] < known[-1] else []
        elif above:
            where = "; ".join(f"N {n}, d {w}" for w, n in above)
            said.append(f"{label} reaches {RECALLED:.0%} in no cell and is above guessing at {where}.")
        else:
            said.append(f"{label} is in no cell more than {NOISE * 100:.0f} points above guessing.")
    if below:
        return " ".join(said)
    said.append("So the part of the claim about attention is reproduced: its width need not grow with N.")
    if grows:
        named = " and ".join(grows)
        said.append(f"The claim that a convolution needs a width that grows with N is reproduced for {named}.")
    else:
        said.append(
            "The claim that a convolution needs a width that grows with N is not reproduced. No convolution here "
            "recalls short rows at a width at which it fails at long ones, so the width that it needs is not known."
        )
    return " ".join(said)


def equal_state_table(rows: Sequence[Row]) -> str:
    """Returns the most pairs recalled: a row for each model, a column for each size of the state."""
    best = chosen(rows)
    most = max(row["pairs"] for row in rows)
    sizes: dict[int, dict[str, list[Row]]] = {}
    for row in best:
        sizes.setdefault(_kib(row), {}).setdefault(row["label"], []).append(row)
    labels = list(dict.fromkeys(row["label"] for row in rows))
    lines = []
    held: dict[int, dict[str, tuple[int, float]]] = {}
    for label in labels:
        cells = [label]
        for kib in sorted(sizes):
            if label not in sizes[kib]:
                cells.append("not measured")
                continue
            at = {d: mean(row["test_accuracy"] for row in same)
                  for (d,), same in sorted(group(sizes[kib][label], "pairs").items())}  # fmt: skip
            pairs = max((d for d, found in at.items() if found >= SOLVED), default=0)
            held.setdefault(kib, {})[label] = (pairs, at[most])
            size = round(sizes[kib][label][0]["state_bytes"] / 1024)
            cells.append(f"{pairs or 'fewer than ' + str(min(at))} ({at[most]:.1%}), {size} KiB")
        lines.append(cells)
    ahead = "; ".join(f"{kib} KiB: {max(found, key=found.__getitem__)}" for kib, found in sorted(held.items()))
    asked = ", ".join(str(d) for d in sorted({row["pairs"] for row in rows}))
    said = (f"A cell shows the largest number of pairs, among {asked}, that is recalled with an accuracy of "
            f"{SOLVED:.0%}; in brackets the accuracy at {most} pairs; and the size of the state. The best model by "
            f"pairs, and then by that accuracy: {ahead}.")  # fmt: skip
    return "\n\n".join(
        [table(" | ".join(["model", *(f"{kib} KiB" for kib in sorted(sizes))]), lines), said, _about(rows)]
    )


def _kib(row: Row) -> int:
    """Returns the power of two in KiB that is nearest to the size of the state of a row's model."""
    return 1 << round(math.log2(row["state_bytes"] / 1024))


def _cells(rows: Sequence[Row]) -> dict[tuple[str, int, int, int], list[float]]:
    """Returns the test accuracies of the seeds at the best learning rate in validation.

    Keys are the label, the width, the length and the number of pairs.
    """
    columns = ("label", "width", "length", "pairs")
    return {key: [row["test_accuracy"] for row in same]  # type: ignore[misc]
            for key, same in group(chosen(rows), *columns).items()}  # fmt: skip


def _cell(seeds: Sequence[float], pairs: int) -> str:
    if not seeds:
        return "not measured"
    excess = f"{100 * (mean(seeds) - 1 / pairs):+.1f}"
    if len(seeds) == 1:
        return f"{seeds[0]:.1%} (one seed), {excess}"
    few = ", two seeds" if len(seeds) == 2 else ""
    return f"{mean(seeds):.1%} [{min(seeds):.1%}, {max(seeds):.1%}{few}], {excess}"


def _about(rows: Sequence[Row]) -> str:
    """Returns what the runs have in common, and where they ran."""
    runs = {row["run"]: row for row in rows}.values()
    row, solved = rows[0], sum(row["ended"] == "solved" for row in runs)
    seeds = len({row["seed"] for row in runs})
    most = f"{len(runs)} runs of at most {max(row['steps'] for row in runs):,} steps, {solved} of which stopped at"
    commits = ", ".join(sorted({row["commit"] for row in runs}))
    several = f", at most {seeds} seeds" if seeds > 1 else ""
    processors = ", ".join(sorted({each["processor"] for each in runs}))
    return f"{most} {100 * row['stop_at']:.3g}%{several}; {processors}; torch {row['torch']}, commit {commits}."
