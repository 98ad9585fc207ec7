"""The program of AR hits: runs are trained, measured and kept once; the page follows from the tables."""

import itertools
import json
import re
import shutil
from functools import partial

import numpy as np
import pytest

from benchmarks.ar_hits import __main__ as program
from benchmarks.ar_hits import report, sources, work
from benchmarks.common import measure
from sympow.data import ByteTokenizer
from sympow.evaluation.ar_hits import PARTS
from sympow.recall.results import read_rows
from sympow.sweeps import run_jobs
from tests.benchmarks.corpora import write_split

DOCUMENT = 256


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of a quarter that comes four times."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, documents in (("train", 6), ("heldout", 5)):
        write_split(folder, name, np.tile(rng.integers(0, 99, (documents, DOCUMENT // 4), dtype=np.uint16), 4))
    return folder


@pytest.fixture
def small(monkeypatch):
    """Runs of an instant, one after another in this process."""

    more = ("training.context=128", "training.precision=float32")
    monkeypatch.setattr(work, "TOY", (*work.TOY, *more))
    monkeypatch.setattr(program, "run_jobs", partial(run_jobs, executor=None))
    monkeypatch.setattr(measure, "commit", lambda: "123456789012")  # git takes longer than a run


def run(call, corpus, out, *words):
    where = ("--corpus", corpus, "--out", out, "--vocab-size", 256, "--toy", "--device", "cpu")
    return call(program, "run", *where, *words)


def test_runs_are_measured_once_and_told_on_a_page(call, corpus, small, tmp_path, capsys):
    results = tmp_path / "results"
    out = results / "kernel_muon"
    recipes = "attention,base_conv"
    assert run(call, corpus, out, "--recipes", recipes, "--seeds", "1") == 0
    assert run(call, corpus, out, "--recipes", recipes, "--seeds", "2") == 0
    assert "2 of 4 runs to do" in capsys.readouterr().out
    tables = {name: read_rows(out / f"{name}.csv") for name in program.TABLES}
    assert [(row["recipe"], row["seed"]) for row in tables["run"]] == [
        (recipe, seed) for seed in range(2) for recipe in recipes.split(",")
    ]
    for row in tables["run"]:
        own = [each for each in tables["slices"] if (each["recipe"], each["seed"]) == (row["recipe"], row["seed"])]
        tokens, nats = (sum(each[name] for each in own) for name in ("tokens", "nats"))
        assert tokens == 5 * 2 * 127 and nats / tokens == pytest.approx(row["held_out_loss"], abs=1e-4)
        assert {each["document"] for each in own} == set(range(5)) and len(own) == 5 * len(PARTS)
    page = tmp_path / "page.md"
    shutil.copy(program.PAGE, page)
    assert call(program, "report", "--results", results, "--page", page) == 0
    text = page.read_text()
    assert "| softmax attention | " in text and re.search(r"\| BaseConv \| [+-]\d\.\d+ \[", text)
    assert re.search(r"\| kernel \| BaseConv \| \d\.\d+ ± \d\.\d+ \| [+-]\d\.\d+ \| ", text)
    assert "4 runs of 0.0M tokens, 2 steps, rows of 128 tokens" in text
    for name in ("curves", "shares"):
        assert (tmp_path / "page" / f"kernel_muon-{name}.png").stat().st_size > 10_000


def test_runs_with_changes_and_several_learning_rates(call, corpus, small, tmp_path, capsys):
    out = tmp_path / "results" / "kernel_muon"
    words = ("--recipes", "softmax_gate,power_delta", "--seeds", "1", "--rates", "1e-4,1e-2")
    assert run(call, corpus, out, *words, "training.optimizer=muon") == 0
    rows = read_rows(out / "run.csv")
    assert [(row["recipe"], row["learning_rate"]) for row in rows] == [
        (recipe, rate) for rate in (1e-4, 1e-2) for recipe in ("softmax_gate", "power_delta")
    ]
    assert {(row["optimizer"], row["changes"]) for row in rows} == {("muon", "training.optimizer=muon")}
    corpora, _ = program.read_results(out.parent)
    for name in program.TABLES:  # the better rate of each recipe, in all tables
        assert {(row["recipe"], row["learning_rate"]) for row in corpora["kernel_muon"][name]} == {
            min((row["held_out_loss"], recipe, row["learning_rate"]) for row in rows if row["recipe"] == recipe)[1:]
            for recipe in ("softmax_gate", "power_delta")
        }
    capsys.readouterr()
    assert run(call, corpus, out, *words) == 2
    assert "have the changes training.optimizer=muon; got none: choose another --out" in capsys.readouterr().err
    assert run(call, corpus, out, *words, "training.optimiser=muon") == 2
    assert capsys.readouterr().err.startswith("error: unknown field 'training.optimiser'")


def test_the_share_of_the_gap_by_distance():
    losses = {"base_conv": (5.0, 5.2), "attention": (2.0, 2.0), "softmax_gate": (3.0, 3.2), "power_delta": (3.8, 3.92)}
    key = {"part": "distance", "start": 512, "end": 1024, "tokens": 100}
    curves = [{"recipe": recipe, "seed": seed, "loss": loss, **key}
              for recipe, both in losses.items() for seed, loss in enumerate(both)]  # fmt: skip
    runs = [{"recipe": row["recipe"], "seed": row["seed"], "learning_rate": 2e-3, "held_out_loss": 4.0}
            for row in curves]  # fmt: skip
    tables = {"run": runs, "slices": [], "curves": curves}
    found = report.found_table({"kernel_muon": tables, "others": tables}).splitlines()
    assert len(found) == 2 + len(losses)
    assert "| kernel | delta rule, p = 2 | 4.000 ± 0.000 |  |  | 62% [60%, 64%] |" in found
    lines = report.distances_table(tables).splitlines()
    assert lines[0] == "| model | learning rate | 512 to 1,023 |"
    assert "| delta rule, p = 2 | 0.002 | 3.860 (62% [60%, 64%]) |" in lines
    assert "| softmax attention | 0.002 | 2.000 (155% [150%, 160%]) |" in lines
    without = [row for row in curves if row["recipe"] != "softmax_gate"]
    lines = report.distances_table({"run": runs[:4] + runs[6:], "slices": [], "curves": without}).splitlines()
    assert "| delta rule, p = 2 | 0.002 | 3.860 (40% [40%, 40%]) |" in lines
    assert report.distances_table({"run": runs, "slices": [], "curves": curves[2:]}) == report.MISSING


def test_many_models_are_drawn_in_several_figures(tmp_path):
    """Each has the attention, and six models at most beside it."""
    models = list(report.LABELS)[:9]
    runs = [{"recipe": name, "seed": 0, "learning_rate": 1e-3, "held_out_loss": 4.0, "tokens": 3e7, "frequent": 9}
            for name in models]  # fmt: skip
    curves = [{"recipe": name, "learning_rate": 1e-3, "part": part, "start": 2, "end": 4, "tokens": 100, "loss": 1.0,
               "rate": 0.5} for name in models for part in ("repeated", "new", "distance")]  # fmt: skip
    tables = {"run": runs, "slices": [], "curves": curves}
    files = report.draw({"kernel": tables}, tmp_path)
    assert [file.name for file in files] == ["kernel-curves.png", "kernel-curves-2.png"]
    drawn = report.curves(tables, [models[0], *models[7:]])
    assert [line.get_label() for line in drawn.axes[2].lines] == [report.LABELS[models[n]] for n in (0, 7, 8)]


def test_gaps_begin_at_gated_attention_if_there_is_one():
    slices = [{"recipe": recipe, "seed": 0, "document": 0, "part": part, "tokens": 10, "nats": nats * 10}
              for recipe, all_nats in (("attention", (3, 1, 2)), ("softmax_gate", (2, 1, 2)), ("power", (5, 1, 3)))
              for part, nats in zip(PARTS, all_nats, strict=True)]  # fmt: skip
    tables = {"run": [{"recipe": row["recipe"]} for row in slices], "slices": slices, "curves": []}
    lines = report.gaps_table(tables).splitlines()[2:]
    assert [line.split(" [")[0] for line in lines] == ["| softmax attention | +0.333", "| power, p = 2 | +1.333"]
    assert " 75% [75%, 75%] | 75% |" in lines[1]
    without = [row for row in slices if row["recipe"] != "softmax_gate"]
    runs = [{"recipe": row["recipe"]} for row in without]
    (line,) = report.gaps_table({"run": runs, "slices": without, "curves": []}).splitlines()[2:]
    assert line.startswith("| power, p = 2 | +1.000 [")


def test_the_share_of_the_gap_that_hybrids_close():
    """Three documents that are alike, so that the interval is Student's t over the seeds."""
    hits = {"control_base_conv": (40, 40), "control_attention": (20, 20), "control_full": (22, 20),
            "control_random": (40, 38), "control_learned": (30, 30)}  # fmt: skip
    slices = [{"recipe": recipe, "seed": seed, "document": document, "part": part, "tokens": 10,
               "nats": nats if part == "hits" else 30}
              for recipe, both in hits.items() for seed, nats in enumerate(both) for document in range(3)
              for part in PARTS]  # fmt: skip
    tables = {"run": [{"recipe": recipe} for recipe in hits], "slices": slices, "curves": []}
    assert report.closed_table(tables).splitlines() == [
        "| model | seeds | of all tokens | of AR hits |",
        "|---|---:|---:|---:|",
        "| BaseConv, random selection, control | 2 | 5% [-59%, 69%] | 5% [-59%, 69%] |",
        "| BaseConv, learned selection, control | 2 | 50% [50%, 50%] | 50% [50%, 50%] |",
        "| BaseConv, two softmax layers, control | 2 | 95% [31%, 159%] | 95% [31%, 159%] |",
    ]
    without = [row for row in slices if row["recipe"] != "control_attention"]
    assert report.closed_table(tables | {"slices": without}) == report.MISSING


def test_other_seeds_are_trained_at_the_best_rate_of_the_first(call, corpus, small, tmp_path, capsys):
    words = ("--recipes", "attention,base_conv", "--rates", "1e-5,3e-2", "--best-rate", "--rows", "4")
    assert run(call, corpus, tmp_path / "kernel", "--seeds", "2", *words) == 0
    rows = read_rows(tmp_path / "kernel" / "run.csv")
    best = {min((r["held_out_loss"], name, r["learning_rate"]) for r in rows if (r["recipe"], r["seed"]) == (name, 0))
            for name in ("attention", "base_conv")}  # fmt: skip
    assert [(row["recipe"], row["seed"]) for row in rows] == [
        ("attention", 0), ("base_conv", 0), ("attention", 0), ("base_conv", 0), ("attention", 1), ("base_conv", 1)
    ]  # fmt: skip
    assert {(row["recipe"], row["learning_rate"]) for row in rows[4:]} == {each[1:] for each in best}
    assert {(row["corpus"].split(",")[0], row["counted_tokens"]) for row in rows} == {("4 rows", 4 * DOCUMENT)}
    corpora, _ = program.read_results(tmp_path)
    assert len(corpora["kernel"]["run"]) == 4  # a rate with one seed does not count beside one with two
    assert run(call, corpus, tmp_path / "kernel", "--seeds", "2", *words) == 0
    assert capsys.readouterr().out.count("0 of ") == 2


def test_a_page_without_runs_says_so(call, tmp_path):
    page = tmp_path / "page.md"
    shutil.copy(program.PAGE, page)
    assert call(program, "report", "--results", tmp_path, "--page", page) == 0
    assert page.read_text().count(report.MISSING) == 21


def test_hits_by_source_are_those_of_a_scan(call, tmp_path, capsys):
    """Two sources of enough documents and one of too few; spaces and the word "a" do not count."""
    letters = np.frombuffer(b"a b c d x y", np.uint8)
    rng = np.random.default_rng(0)
    texts = rng.choice(letters, (25, 2 * sources.LENGTH + 5))
    texts[:12, 1::2] = rng.choice(letters[::2], texts[:12, 1::2].shape)
    write_split(tmp_path, "train", texts)
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    lines = [("fs/ext4", "train", 12), ("mm", "heldout", 3), ("net", "train", 10), ("lib", "train", 3)]
    documents = [json.dumps({"directory": each[0], "split": each[1], "rows": each[2]}) for each in lines]
    (tmp_path / "documents.jsonl").write_text("\n".join(documents))
    assert call(program, "sources", "--corpus", tmp_path, "--most", "7", "--out", tmp_path / "out") == 0
    rows = read_rows(tmp_path / "out" / "sources.csv")
    assert list(dict.fromkeys(row["source"] for row in rows)) == ["fs", "net"]
    counted = set(b"bcdxy")
    for name, chosen in (("fs", np.linspace(0, 11, 7)), ("net", 12 + np.linspace(0, 9, 7))):
        expected: dict[int, int] = {}
        for row, start in itertools.product(chosen.astype(int), (0, sources.LENGTH)):
            seen: dict[tuple[int, int], int] = {}
            text = texts[row, start : start + sources.LENGTH].tolist()
            for i, pair in enumerate(itertools.pairwise(text)):
                if pair in seen and counted.issuperset(pair):
                    cell = (i - seen[pair]).bit_length()
                    expected[cell] = expected.get(cell, 0) + 1
                seen[pair] = i
        own = [row for row in rows if row["source"] == name]
        assert {row["end"].bit_length() - 1: row["hits"] for row in own if row["hits"]} == expected
        assert {row["sequences"] for row in own} == {14}
    assert (
        f"| fs | 14 | {sum(row['hits'] for row in rows if row['source'] == 'fs') / 14:.0f} |" in capsys.readouterr().out
    )


def test_the_comparison_with_brute_force(call, monkeypatch, corpus, tmp_path, capsys):
    words = ("--corpus", corpus, "--tokens", "300", "--timed-tokens", "500", "--out", tmp_path)
    monkeypatch.setattr(program, "CONTEXT", 100)
    assert call(program, "exact", *words) == 0
    (row,) = read_rows(tmp_path / "exact.csv")
    assert row["tokens"] == 300 and row["hits"] > 0 and row["largest_difference_tokens"] == 0


def test_unknown_recipes_are_refused(call, corpus, tmp_path, capsys):
    assert run(call, corpus, tmp_path, "--recipes", "attention,hyaena") == 2
    assert capsys.readouterr().err.startswith("error: a recipe is one of attention, softmax_gate, power, power_delta, ")


def test_the_committed_comparison_is_exact():
    (row,) = read_rows(program.COMMITTED / "exact.csv", texts=("commit",))
    assert row["tokens"] >= 1_000_000 and (row["wrong_counts"], row["largest_difference_tokens"]) == (0, 0)
    assert row["slices_less_whole_nats"] <= 1e-6
    (timed,) = read_rows(program.COMMITTED / "timed.csv", texts=("commit",))
    assert timed["tokens"] >= 10_000_000 and timed["seconds"] < 60


def test_the_page_follows_from_the_committed_tables(tmp_path):
    page = tmp_path / "page.md"
    shutil.copy(program.PAGE, page)
    report.write(*program.read_results(program.COMMITTED), page)
    assert page.read_text() == program.PAGE.read_text()


def test_controls_are_compared_with_the_attention_of_the_control(call, corpus, small, tmp_path):
    assert run(call, corpus, tmp_path, "--recipes", "controls", "--seeds", "1") == 0
    tables = {name: read_rows(tmp_path / f"{name}.csv") for name in program.TABLES}
    assert [row["recipe"] for row in tables["run"]] == list(work.CONTROLS)
    lines = report.gaps_table(tables).splitlines()[2:]
    assert len(lines) == 6 and all(", control | " in line and re.search(r" [+-]\d\.\d+ \[", line) for line in lines)
