"""The page of the four papers: a row for every number, and every file, recipe, study and grid that it names exists."""

import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.context_scaling.studies import STUDIES
from benchmarks.learning import GRIDS
from benchmarks.training import MIXERS
from sympow.recipes import load_recipe, load_sweep

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
STATES = ("reproduced", "refuted", "open", "not built")


def numbered(kind: str, first: int, last: int) -> set[str]:
    return {f"{kind} {number}" for number in range(first, last + 1)}


# What a row must be about: papers share numbers, so a row can get into the table of another paper.
ABOUT = {
    "[CST]": {"Figure 1": "context of training", "Figure 2": "beyond", "Figure 3": "p = 4", "Figure 4": "p = 2"},
    "[SCRA]": {"Figure 1": "linear", "Figure 2": "FLOPs", "Figure 3": "window of 32", "Figure 4": "in-context",
               "Figure 5": "tiled", "Figure 6": "throughput", "Figure 7": "by position", "Figure 8": "parameters",
               "Figure 9": "65,536", "Figure 10": "documents"},
    "[ZOO]": {"Figure 1": "bigrams", "Figure 2": "width", "Figure 3": "power law", "Figure 4": "RedPajama",
              "Figure 5": "distances", "Figure 6": "pairs", "Figure 7": "heads", "Figure 8": "7 billion",
              "Figure 9": "arithmetic", "Figure 10": "Algorithm 10", "Figure 11": "Algorithm 11"},
}  # fmt: skip
NUMBERS = {
    "[SPT]": {"1, derivation", "1, table", "2, first listing", "2, second listing", "2, figure", "3, result 1",
              "3, listing", "3, table", "4, listing", "4.1, count", "4.2, listings", "4.2, first table",
              "4.2, second table"},
    "[CST]": numbered("Proposition", 1, 3) | numbered("Figure", 1, 4)
    | {f"Appendix A.{number}" for number in (2, 3, 5)},
    "[SCRA]": numbered("Figure", 1, 10) | numbered("Table", 1, 5) | numbered("Algorithm", 1, 2)
    | {"Lemma 4.1", "Lemma 4.2"} | {f"Appendix {letter}" for letter in "ABCDE"}
    | {f"Appendix F.{number}" for number in range(1, 5)},
    "[ZOO]": numbered("Figure", 1, 11) | numbered("Table", 1, 16) | numbered("Algorithm", 1, 11)
    | numbered("Listing", 1, 2) | numbered("Claim", 1, 2) | {f"H.{number}" for number in range(1, 39)}
    | {"Examples D.1 to D.8, Proposition D.1"}
    | {"Definition 3.1", "Definition 4.1", "Theorem 4.2", "Proposition 4.3", "Theorem 4.4", "Theorem 4.5"},
}  # fmt: skip


def rows() -> dict[str, list[list[str]]]:
    """Returns the rows of the tables by paper: number, what it is, where it is here, and state."""
    found: dict[str, list[list[str]]] = {}
    for section in PAGE.split("\n## ")[1:]:
        lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
        found.setdefault(section.split()[0], []).extend([cell.strip() for cell in line] for line in lines[1:])
    return found


ROWS = [pytest.param(row, id=f"{paper} {row[0]}") for paper, of_paper in rows().items() for row in of_paper]


@pytest.mark.parametrize("paper", NUMBERS)
def test_every_number_has_one_row(paper):
    listed = [row[0] for row in rows()[paper]]
    assert len(set(listed)) == len(listed) and set(listed) >= NUMBERS[paper]


@pytest.mark.parametrize("paper", ABOUT)
def test_the_row_of_a_figure_is_about_it(paper):
    about = {row[0]: row[1] for row in rows()[paper]}
    assert [number for number, word in ABOUT[paper].items() if word not in about[number]] == []


# What a paper says, where it is easily told as more than that.
CLAIMS = [("[CST]", "Figure 2", "The figure has no softmax attention"),
          ("[SCRA]", "Figure 9", "section 5.3 claims nearly equal learning in context")]  # fmt: skip


@pytest.mark.parametrize(("paper", "number", "words"), CLAIMS)
def test_a_row_does_not_tell_more_than_the_paper(paper, number, words):
    state = next(row[3] for row in rows()[paper] if row[0] == number)
    assert words in state


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_where_and_what_became_of_it(row):
    _, about, here, state = row
    assert about and state.startswith(STATES)
    assert here or state.startswith("not built: ")
    assert "recipe ready" not in state or re.search(r"`(hybrids|longcrawl64|mqar|scaling):\w+`", here)


sweep = cache(load_sweep)  # several rows name the same one


@pytest.mark.parametrize("row", ROWS)
def test_files_recipes_and_studies_exist(row):
    _, _, here, state = row
    for name in re.findall(r"`([^`]+)`", f"{here} {state}"):
        if "/" in name:
            assert (ROOT / name).is_file(), name
        elif name.startswith("mqar:"):
            assert sweep(name).runs
        elif ":" in name:
            assert load_recipe(name).model
    for words, known in ((r"stud(?:y|ies)", STUDIES), (r"grids?", GRIDS)):
        for named in re.findall(rf"\b{words} ((?:`\w+`(?:, | and )?)+)", f"{here} {state}"):
            assert set(re.findall(r"`(\w+)`", named)) <= set(known)
    for named in re.findall(r"`[^`]*--mixers ([^`]*)`", f"{here} {state}"):
        assert set(named.split()) <= set(MIXERS)
    for link in re.findall(r"\]\(([^)#]+)", f"{here} {state}"):
        assert (ROOT / "docs" / link).is_file(), link


def test_what_the_list_behind_the_tables_names_exists():
    test_files_recipes_and_studies_exist(["", "", PAGE[PAGE.index("\n- *Based*") :], ""])


def test_a_missing_file_or_recipe_would_be_found():
    unknown = ("`sympow/none.py`", "`scaling:none`", "study `none`", "[none](none.md)", "grid `none`",
               "`--mixers power-none`")  # fmt: skip
    for missing in unknown:
        with pytest.raises((AssertionError, ValueError, KeyError)):
            test_files_recipes_and_studies_exist(["", "", missing, "reproduced"])
