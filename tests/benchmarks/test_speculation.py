"""The benchmarks of drafts and of restored contexts on a very small run: what is compared, and what the rows hold."""

import numpy as np
import pytest
import torch

from benchmarks import context_restore, speculation
from benchmarks.common.measure import read
from sympow.models.speculation import Pace
from tests.tiny_runs import finished_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    documents = [f"{i} the power of the state of the key " * 3 for i in range(60)]
    with finished_runs(tmp_path_factory.mktemp("drafts"), documents, ("power",)) as folder:
        yield str(folder / "power")


def test_rows_of_drafts(run, tmp_path, call, monkeypatch, capsys):
    monkeypatch.setattr(Pace, "length", lambda self: 5)
    file = tmp_path / "rows.csv"
    words = [run, "--draft", run, "--prompts", "4", "--prompt", "20", "--tokens", "12"]
    words += ["--csv", str(file)]
    call(speculation, *words, "--threads", str(torch.get_num_threads()))
    rows = read(file)
    assert [(row["text"], row["temperature"], row["drafts"]) for row in rows] == [
        (text, temperature, drafts)
        for drafts in ("n-grams", "tiny-power")
        for text in ("documents", "random")
        for temperature in (0, 1)
    ]
    for row in rows:
        expected = 4 if (row["text"], row["temperature"]) == ("documents", 0) else 1
        assert row["same_tokens"] == row["prompts"] == expected
        assert row["ratio"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
        assert 0 < row["distinct"] <= 1 and row["accepted"] <= row["proposed"]
    itself = next(row for row in rows if row["drafts"] == "tiny-power" and row["temperature"] == 0)
    assert itself["accepted"] == itself["proposed"] > 0
    assert "same tokens for 4 of 4" in capsys.readouterr().out


def test_parts_of_documents_are_taken_once():
    class Documents(list):
        lengths = np.array([3, 9, 5])

    documents = Documents(np.arange(length) for length in Documents.lengths)
    assert [part.tolist() for part in speculation.parts(documents, 4, 3)] == [[[0, 1, 2, 3]]] * 2 + [[[4, 5, 6, 7]]]
    with pytest.raises(ValueError, match="4 parts of 4 tokens are needed; the held-out documents have 3"):
        speculation.parts(documents, 4, 4)


def test_random_prompts_are_those_of_a_seed(run):
    loaded = speculation.load(run)
    first, second = (speculation.prompts(loaded, "random", 9, 3) for _ in range(2))
    assert [x.shape for x in first] == [(1, 9)] * 3 and all(map(torch.equal, first, second))


def test_a_restored_context_is_as_large_and_continues_alike(run):
    rows = context_restore.measure(run, [300, 40, 1000], chunk=64, repeats=2)
    assert [row["tokens_read"] for row in rows] == [40, 300, 1000]
    assert len({row["bytes"] for row in rows}) == 1 and all(row["same_continuation"] for row in rows)
    assert all(row["restore_seconds"] <= row["slowest_restore_seconds"] for row in rows)


def test_pieces_end_where_they_should():
    tokens = torch.arange(1000)[None]
    cut = list(context_restore.pieces(iter(tokens.split(7, dim=1)), [5, 20, 21], 8))
    assert [piece.shape[1] for piece in cut] == [5, 8, 7, 1] and torch.equal(torch.cat(cut, 1), tokens[:, :21])
