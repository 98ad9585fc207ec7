"""The benchmark of a million tokens of text, on documents of a few."""

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import long_text
from benchmarks.common.measure import read
from benchmarks.long_text import by_position, losses_in_rows
from benchmarks.tables import long_text_table
from sympow.data import TokenCorpus
from sympow.models import LanguageModel, MixerConfig, preset
from sympow.recipes import load_recipe
from sympow.training import override
from tests.benchmarks.corpora import random_corpus

LENGTH = 96
TINY = ["model.d_model=32", "model.n_layers=1", "model.n_heads=2", "model.vocab_size=64", "data.vocab_size=64",
        "training.precision=float32"]  # fmt: skip


@pytest.fixture
def documents():
    rng = np.random.default_rng(0)
    return TokenCorpus.from_documents([rng.integers(0, 64, LENGTH) for _ in range(2)], 64)


@pytest.fixture
def corpus(tmp_path):
    return random_corpus(tmp_path, 4, 3, LENGTH, vocab_size=64)


def call(monkeypatch, corpus, *words):
    monkeypatch.setattr(long_text, "load_recipe", lambda name: override(load_recipe(name), TINY))
    where = ["--device", "cpu", "--corpus", str(corpus), "--out", str(corpus / "out"), "--tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["long_text", *where, *words])
    return long_text.main()


def test_losses_in_rows_are_those_of_the_model_that_starts_anew(documents):
    model = LanguageModel(preset("nano", 64, MixerConfig("power")), seed=0)
    found = losses_in_rows(model, documents, 40)
    assert found.shape == (2, LENGTH)
    tokens = torch.from_numpy(documents[1].astype(np.int64))[None]
    with torch.no_grad():
        second = model.token_losses(tokens[:, 40:79], tokens[:, 41:80])[0].double().numpy()
    assert found[1, 41:80] == pytest.approx(second, abs=1e-5)
    assert np.flatnonzero(np.isnan(found[1])).tolist() == [0, 40, *range(80, LENGTH)]


def test_the_gain_is_of_the_second_half_of_rows_behind_the_first():
    whole, in_rows = np.full((3, 64), 2.0), np.full((3, 64), 2.5)
    whole[:, 0] = in_rows[:, ::16] = np.nan
    for row in range(0, 64, 16):
        in_rows[:, row + 1 : row + 8] = 9.0  # where the row has just begun: not compared
    in_rows[:, :16] = 7.0  # both readings know the same there
    in_rows[1, 32:] += 0.3
    rows = by_position(whole, in_rows, 16)
    assert [(row["start"], row["end"]) for row in rows] == [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    assert [row["gain"] for row in rows] == [None] * 4 + [0.5, 0.6]
    assert rows[4]["gain_half"] == 0.0
    assert rows[5]["gain_half"] == pytest.approx(4.303 * 0.3 / 3, abs=1e-4)  # Student's t, of 0.5, 0.8 and 0.5
    assert rows[5]["loss_in_rows"] == pytest.approx(2.6) and rows[5]["loss_late"] == rows[0]["loss"] == 2.0


def test_command_keeps_the_rows_of_other_contexts(corpus, monkeypatch, capsys):
    assert call(monkeypatch, corpus, "--context", "16") == 0
    assert call(monkeypatch, corpus, "--context", "32") == 0
    assert call(monkeypatch, corpus, "--context", "32") == 0  # the training is finished; its rows are replaced
    rows = read(corpus / "out" / "long_text.csv")
    assert [(row["trained_context"], row["start"]) for row in rows] == [
        (context, start) for context in (16, 32) for start in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert [row["end"] for row in rows[-2:]] == [64, LENGTH]
    config = json.loads((corpus / "out" / "context-32-seed-0" / "config.json").read_text())
    assert config["training"]["optimizer"] == "adamw"  # its rate is one of AdamW, as are the rows of the page
    assert [row["gain"] is None for row in rows] == [True] * 4 + [False] * 3 + [True] * 5 + [False] * 2
    assert (corpus / "out" / "long_text.png").stat().st_size > 1000
    assert "gain from the far context" in capsys.readouterr().out
    table = long_text_table(rows)
    assert "| 32 | 0 | 64 to 95 | " in table and "3 held-out documents of 96 tokens" in table


def test_documents_without_far_context_are_refused(corpus, monkeypatch):
    with pytest.raises(SystemExit, match="at least twice the context of 64; got 96 to 96 tokens"):
        call(monkeypatch, corpus, "--context", "64")


def test_a_training_that_was_stopped_is_not_measured(corpus, monkeypatch, capsys):
    from sympow.training.trainer import TrainingResult

    monkeypatch.setattr(long_text, "train", lambda *_, **__: TrainingResult(3, 9, 1.0, "SIGTERM"))
    assert call(monkeypatch, corpus, "--context", "16") == 1
    assert capsys.readouterr().out == "stopped by SIGTERM at step 3: the same command goes on\n"
