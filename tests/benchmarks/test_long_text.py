"""The benchmark of a million tokens of text, on documents of a few."""

import numpy as np
import pytest
import torch

from benchmarks import long_text
from benchmarks.common.measure import read
from benchmarks.long_text import by_position, losses_in_rows
from benchmarks.pages.result_tables import long_text_table
from sympow.data import Batches, TokenCorpus, ZarrCorpus, open_corpus
from sympow.models import LanguageModel, MixerConfig, preset
from sympow.recipes import load_recipe
from sympow.training import override, train
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
    return random_corpus(tmp_path, 4, 7, LENGTH // 2, vocab_size=64)


@pytest.fixture
def trained(corpus):
    """Returns a function that trains a run in a folder with the name of a run of `benchmarks.learning`."""

    def train_at(context):
        config = override(load_recipe("scaling:power"), [
            *TINY, f"data.path={corpus / 'train.zarr'}", f"data.held_out_path={corpus / 'heldout.zarr'}",
            f"training.context={context}", "training.batch_size=1", "training.micro_batch_size=1", "training.steps=2",
            "training.warmup_steps=1", "training.device=cpu",
        ])  # fmt: skip
        folder = corpus / f"power+p=2-{context}-2M-x1-lr0.008-seed0-muon"
        train(config, Batches(open_corpus(config.data).train, context, 1, 0, pack=False), folder, quiet=True)
        return folder

    return train_at


def measured(call, corpus, *words):
    where = ["--device", "cpu", "--corpus", str(corpus), "--csv", str(corpus / "found.csv"), "--length", "96"]
    return call(long_text, *where, *words)


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


def test_command_keeps_the_rows_of_other_runs(corpus, trained, call, capsys):
    short, long = (str(trained(context)) for context in (16, 32))
    measured(call, corpus, "--runs", short, "--documents", "2")
    measured(call, corpus, "--runs", long, long)  # its rows are replaced
    rows = read(corpus / "found.csv")
    assert [(row["trained_context"], row["documents"], row["start"]) for row in rows] == [
        (context, count, start) for context, count in ((16, 2), (32, 3)) for start in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert {(row["variant"], row["tokens"], row["optimizer"]) for row in rows} == {
        ("power+p=2", 32, "muon"), ("power+p=2", 64, "muon")}  # fmt: skip
    assert [row["end"] for row in rows[-2:]] == [64, LENGTH]
    assert [row["gain"] is None for row in rows] == [True] * 4 + [False] * 3 + [True] * 5 + [False] * 2
    assert (corpus / "found.png").stat().st_size > 1000
    assert "32 to 63: loss 4." in capsys.readouterr().out
    assert "3 held-out texts of 96 tokens" in long_text_table(rows[7:])


def test_documents_without_far_context_are_refused(corpus, trained, call, capsys):
    assert measured(call, corpus, "--runs", str(trained(40)), "--length", "72") == 2
    assert "at least 80 tokens, twice the context of power+p=2-40-2M" in capsys.readouterr().err
    assert measured(call, corpus, "--runs", str(trained(16)), "--length", "960") == 2
    assert "for a document of 960 tokens; got 7 rows of 48 tokens" in capsys.readouterr().err


def test_documents_are_rows_that_follow_one_another(corpus):
    rows = ZarrCorpus(str(corpus / "heldout.zarr"), 64)
    first, last = long_text.read_documents(corpus, 96, 2, 64)
    assert first.tolist() == [*rows[0], *rows[1]] and last.tolist() == [*rows[4], *rows[5]]
