"""The tables of associative recall, and what they say about Claim 1, follow from the rows."""

import pytest

from benchmarks.pages.mqar_tables import (
    CONVOLVED,
    claim_1,
    convolutions_table,
    deep_table,
    equal_state_table,
    heads_table,
    seeds_table,
)
from sympow.recall.results import SETTING

ABOUT = {"processor": "H200", "torch": "2", "commit": "abc", "ended": "solved", "steps": 10, "learning_rate": 0.1,
         "validation_loss": 0.0}  # fmt: skip


def row(label, width, length, accuracy, seed=0, **more):
    setting = dict.fromkeys(SETTING, 1) | {"label": label, "width": width, "stop_at": 0.996}
    setting |= {"train": "mqar 64:4 + mqar 256:16"}
    own = {"test": f"mqar {length}:{length // 16}", "length": length, "pairs": length // 16, "seed": seed}
    measured = {"run": f"{label}{width}{seed}", "validation_accuracy": accuracy, "test_accuracy": accuracy}
    return setting | ABOUT | own | measured | more


def grid(accuracies):
    """Rows of two widths and lengths from {label: (N 64 at d 8, N 256 at d 8, N 64 at d 16, N 256 at d 16)}."""
    places = [(8, 64), (8, 256), (16, 64), (16, 256)]
    rows = [row(label, *place, accuracy) for label, found in accuracies.items()
            for place, accuracy in zip(places, found, strict=True)]  # fmt: skip
    return [*rows, row("attention", 8, 512, 0.1)]  # untrained length: no part of the claim


SOLVED = (1.0, 0.99, 1.0, 1.0)


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ({"attention": (1.0, 0.98, 1.0, 1.0)}, "below 99% at N 256, d 8. A baseline that failed"),
        ({"attention": (1.0, 0.98, 1.0, 1.0), "H3": (0.3, 0.9, 0.1, 0.9)}, "At N 64 it is at 99% or more."),
        (
            {"attention": (1.0, 0.98, 1.0, 1.0), "H3": (0.3, 0.9, 0.1, 0.9)},
            "is above guessing at N 64, d 8.",
        ),
        ({"attention": SOLVED, "Hyena": (0.95, 0.1, 0.99, 0.92)}, "reproduced for Hyena."),
        ({"attention": SOLVED, "Hyena": (0.95, 0.1, 0.99, 0.92)}, "90% from d 8 at N 64, d 16 at N 256 on."),
        ({"attention": SOLVED, "H3": (0.95, 0.1, 0.99, 0.1)}, "90% from d 8 at N 64, more than d 16 at N 256"),
        ({"attention": SOLVED, "BaseConv": (0.26, 0.06, 0.26, 0.07)}, "BaseConv is in no cell more than 2 points"),
        ({"attention": SOLVED, "BaseConv": (0.26, 0.06, 0.35, 0.07)}, "is above guessing at N 64, d 16."),
        ({"attention": SOLVED, "BaseConv": (0.26, 0.06, 0.35, 0.07)}, "grows with N is not reproduced"),
        ({"attention": SOLVED, "BaseConv": (0.99, 0.99, 0.99, 0.99)}, "grows with N is not reproduced"),
    ],
)
def test_claim_1_follows_from_the_rows(accuracies, said):
    assert said in claim_1(grid(accuracies))


def test_an_unsolved_length_allows_no_verdict():
    assert "reproduced" not in claim_1(grid({"attention": (1.0, 0.98, 1.0, 1.0), "Hyena": (0.95, 0.1, 0.99, 0.92)}))


def test_one_width_tells_nothing_of_the_width_that_a_row_needs():
    rows = grid({"attention": SOLVED, "Hyena": (0.95, 0.1, 0.99, 0.92)})
    said = claim_1([each for each in rows if each["width"] == 8])
    assert "At d 8 Hyena reaches 90% at N 64, not at N 256." in said and "more than" not in said


def test_a_cell_tells_seeds_and_the_excess_over_guessing():
    rows = [row("attention", 8, 64, accuracy, seed) for seed, accuracy in enumerate((0.99, 1.0, 0.995))]
    table = convolutions_table(rows)
    assert "| attention | 8 | 99.5% [99.0%, 100.0%], +74.5 |" in table and "| guessing, 1/D |  | 25.0% |" in table
    assert "3 runs of at most 10 steps, 3 of which stopped at 99.6%, at most 3 seeds; H200" in table
    two = convolutions_table(rows[:2])
    assert "| attention | 8 | 99.5% [99.0%, 100.0%, two seeds], +74.5 |" in two


def test_depths_are_judged_apart():
    rows = [{**each, "label": f"{each['label']}, {layers} layers", "layers": layers}
            for layers, found in ((4, (0.95, 0.1, 0.99, 0.92)), (2, (0.2, 0.05, 0.2, 0.05)))
            for each in grid({CONVOLVED: SOLVED, "attention": found, "Hyena": found})]  # fmt: skip
    table, two, four = deep_table(rows).rsplit("\n\n", 2)
    assert "| Hyena, 2 layers | 8 | 20.0% (one seed), -5.0 |" in table and "| Hyena, 4 layers | 8 | 95.0%" in table
    assert two.startswith("With 2 layers: Claim 1: ") and "no cell more than 2 points" in two
    assert four.startswith("With 4 layers: Claim 1: ") and "is reproduced for Hyena." in four


def test_a_depth_without_all_its_runs_is_left_out():
    rows = [{**each, "label": f"{each['label']}, {layers} layers", "layers": layers, "learning_rate": rate}
            for layers in (2, 4) for rate in (1e-3, 1e-2) for each in grid({CONVOLVED: SOLVED})]  # fmt: skip
    table, two, four = deep_table(rows[:-1]).rsplit("\n\n", 2)
    assert "4 layers" not in table and two.startswith("With 2 layers: Claim 1: ")
    assert four == "With 4 layers, 9 of 10 runs of the first seed are done."
    assert "4 layers: Claim 1: " in deep_table(rows)


def test_numbers_of_pairs_are_told_apart():
    rows = [row("RetNet", 8, 256, accuracy, pairs=pairs, test=f"mqar 256:{pairs}")
            for pairs, accuracy in ((8, 0.75), (64, 0.25))]  # fmt: skip
    lines = seeds_table(rows).splitlines()
    assert lines[0] == "| model | d | N 256, D 8 | N 256, D 64 |"
    assert lines[3] == "| RetNet | 8 | 75.0% (one seed), +62.5 | 25.0% (one seed), +23.4 |"


def test_heads_are_told_apart():
    rows = [row("Hyena", 8, 64, accuracy, heads=heads) for heads, accuracy in ((2, 0.5), (4, 0.75))]
    table = heads_table(rows)
    assert "| Hyena | 2 | 8 | mqar 64:4 | 50.0% (one seed), +25.0 |" in table and "| Hyena | 4 | 8 |" in table


def test_models_of_equal_state_are_told_by_their_most_pairs():
    def rows(label, kib, accuracies):
        size = {"state_bytes": kib * 1024 - 8, "mixers": f"{kib}"}
        return [row(label, 8, 256, accuracy, **size, pairs=pairs, test=f"mqar 256:{pairs}")
                for pairs, accuracy in zip((8, 16), accuracies, strict=True)]  # fmt: skip

    windows = [*rows("window", 64, (0.92, 0.3)), *rows("window", 128, (0.5, 0.4))]
    table = equal_state_table([*rows("power", 64, (0.95, 0.9)), *windows])
    assert "| model | 64 KiB | 128 KiB |" in table
    assert "| power | 16 (90.0%), 64 KiB | not measured |" in table
    assert "| window | 8 (30.0%), 64 KiB | fewer than 8 (40.0%), 128 KiB |" in table
    assert "64 KiB: power; 128 KiB: window." in table
