"""`sympow ar-hits` and `sympow recall-probe` on small runs."""

import csv
from html.parser import HTMLParser

import numpy as np
import pytest
import zarr

from sympow.cli import main, recall_tables
from tests.tiny_runs import RECIPE, finished_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a corpus and two finished runs on it."""
    documents = [f"<{i}> ± the quick & brown fox jumps over it. " * 12 for i in range(6)]
    with finished_runs(tmp_path_factory.mktemp("recall"), documents) as folder:
        yield folder


class Page(HTMLParser):
    """The text inside <pre>, and whether every tag that was opened was closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text = [], [""]
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)
        if tag == "pre":
            self.text.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "pre" in self.open:
            self.text[-1] += data


def test_ar_hits(folder, tmp_path, capsys):
    files = [tmp_path / name for name in ("hits.csv", "hits.png", "hits.html")]
    words = ["ar-hits", f"{folder}/power", f"{folder}/softmax", "--rows", "8", "--frequent", "70", "--quiet"]
    words += ["--csv", str(files[0]), "--plot", str(files[1]), "--html", str(files[2])]
    words += ["--context", "64", "--examples", "2", "--show", "9"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "AR hits: repeated in a row of 64 tokens, at most 70 times in training" in out
    assert "softmax less power, nats a token, with 95% intervals:" in out and "\x1b[30;48;2;" in out
    rows = list(csv.DictReader(files[0].open()))
    for run in ("power", "softmax"):
        own = {row["part"]: row for row in rows if row["run"] == run}
        parts = [own[part] for part in ("hits", "frequent", "new") if part in own]
        whole = own["all"]
        assert sum(int(part["tokens"]) for part in parts) == int(whole["tokens"]) == 8 * 64
        mean = sum(int(part["tokens"]) * float(part["loss"]) for part in parts) / int(whole["tokens"])
        assert mean == pytest.approx(float(whole["loss"]), abs=2e-6)
        for kinds, expected in (
            (["count, repeated", "count, new"], whole),
            (["distance, hits"], own["hits"]),
            (["document, all"], whole),
            (["document, hits"], own["hits"]),
        ):
            cells = [row for row in rows if row["run"] == run and row["part"] in kinds]
            assert sum(int(cell["tokens"]) for cell in cells) == int(expected["tokens"])
    gap = {row["part"]: row["gap_nats"] for row in rows if row["run"] == "softmax" and row["gap_nats"]}
    losses = {row["run"]: float(row["loss"]) for row in rows if row["part"] == "all"}
    assert float(gap["all"]) == pytest.approx(losses["softmax"] - losses["power"], abs=2e-6)
    assert files[1].stat().st_size > 10_000
    page = Page(files[2].read_text())
    assert not page.open and len(page.text) == 1 + 2 * 2
    assert page.text[1] == page.text[2] and page.text[3] == page.text[4]
    assert "quick & brown" in page.text[1]


def test_one_run_on_other_text(folder, tmp_path, capsys):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("to be or not to be, that is the question " * 3)
    words = ["ar-hits", f"{folder}/power", "--data", f"path={tmp_path}", "--context", "20", "--rows", "3", "--quiet"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "a row of 20 tokens" in out and "less" not in out


def test_text_is_needed_before_anything_is_measured(folder, tmp_path, capsys, monkeypatch):
    zarr.create_array(str(tmp_path / "tokens.zarr"), data=np.ones((3, 99), np.uint8), zarr_format=2)
    recipe = RECIPE.replace('kind="text"', 'kind="zarr"').replace('"bytes"', '"none", vocab_size=256')
    (tmp_path / "tiny.py").write_text(recipe.format(corpus=str(tmp_path / "tokens.zarr")))
    assert main(["train", f"{tmp_path}/tiny.py:power", "--out", f"{tmp_path}/run", "--quiet"]) == 0
    monkeypatch.setattr(recall_tables, "count_bigrams", None)
    capsys.readouterr()
    assert main(["ar-hits", f"{tmp_path}/run", "--show", "9", "--quiet"]) == 2
    assert "examples need the text of tokens" in capsys.readouterr().err


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of a mean of nothing
def test_recall_probe_of_one_length(folder, capsys):
    words = ["--pairs", "4", "16", "--queries", "16", "--length", "128", "--filler", "zero"]
    assert main(["recall-probe", f"{folder}/power", *words]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1:3] for row in rows] == [["4", "128"], ["16", "128"]]
    assert main(["recall-probe", f"{folder}/power", "--pairs", "4", "--queries", "16", "--length", "16"]) == 0
    assert capsys.readouterr().out.split()[-3:-1] == ["none", "none"]  # no filler
    assert main(["recall-probe", f"{folder}/power", "--length", "60"]) == 2
    assert "holds no passage of 16 pairs in 60 tokens" in capsys.readouterr().err


def test_recall_probe(folder, capsys, tmp_path):
    table = tmp_path / "probe.csv"
    words = [f"{folder}/power", f"{folder}/softmax", "--queries", "64", "--csv", str(table)]
    assert main(["recall-probe", *words]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    with table.open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [(row["model"], row["pairs"], row["length"], f"{float(row['asked_loss']):.3f}") for row in kept] == [
        tuple(row[:4]) for row in rows
    ]
    assert {row["queries"] for row in kept} == {"64"} and {row["filler"] for row in kept} == {"random"}
    assert [row[:3] for row in rows] == [
        [run, str(pairs), str(8 * pairs)] for run in ("power", "softmax") for pairs in (16, 32, 64)
    ]
    assert rows[0][-1] == "6.2%"


@pytest.mark.parametrize(
    "words, message",
    [
        (["ar-hits", "{}/power", "{}/power/"], "a run is given twice"),
        (["ar-hits", "{}/power", "--csv", "{}/no/such.csv"], "cannot be written"),
        (["ar-hits", "{}/power", "--context", "5000", "--quiet"], "a context of 5,000 needs a document of"),
        (["recall-probe", "{}/power", "--pairs", "256"], "vocab_size is too small"),
        (["recall-probe", "{}/nothing"], "nothing"),
        (
            ["recall-probe", "{}/power", "--length", str(2**62)],
            "length = 4,611,686,018,427,387,904 with queries in 128 passages needs",
        ),
        (
            ["recall-probe", "{}/power", "--queries", str(2**62)],
            "with queries in 288,230,376,151,711,744 passages need",
        ),
        (["ar-hits", "{}/power", "--examples", "2"], "--examples is of the page that --html names; got no --html"),
        (["ar-hits", "{}/power", "--plot", "{}/x.xyz"], "x.xyz: an image is one of "),
    ],
)
def test_errors_are_one_line(folder, capsys, words, message):
    assert main([word.format(folder) for word in words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and message in err[0], err
