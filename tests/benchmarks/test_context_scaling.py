"""The evidence suite: what runs are, that they are trained and measured, and what a bigram model and times are."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from benchmarks import bigram, subset
from benchmarks.common import measure
from benchmarks.common.measure import read
from benchmarks.context_scaling import __main__ as program
from benchmarks.context_scaling import cost, speed, work
from benchmarks.context_scaling.grid import DOCUMENT, LONG, MIDDLE, SCALES, SHORT, Run
from benchmarks.context_scaling.measures import contexts_of, gain
from benchmarks.context_scaling.studies import STUDIES, grid
from sympow.data.zarr_corpus import ZarrCorpus
from sympow.training import NonFiniteError
from tests.benchmarks.corpora import write_split

TOY = SCALES["toy"]
LENGTH = DOCUMENT // TOY.shrink


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents each half of which is said twice."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, documents in (("train", 6), ("heldout", 5)):
        write_split(folder, name, rng.integers(0, 256, (documents, LENGTH // 2), dtype=np.uint16).repeat(2, axis=1))
    return folder


def records(corpus, runs, **options):
    """Trains runs one after another in this process."""
    train = work.Trainer("toy", corpus, "cpu", **options).prepare(0)
    return [train(run) for run in runs]


def test_every_run_of_every_study_is_one_of_a_kind_and_can_be_made():
    runs = grid(list(STUDIES))
    assert len(runs) == len({each.name for each in runs}) > 100
    for each in {replace(each, seed=0) for each in runs}:
        config = each.config(SCALES["full"], Path("corpus"))
        settings = config.training
        assert settings.context * settings.rows_per_pass == DOCUMENT
        assert settings.passes_per_step == each.documents
        assert settings.steps * settings.context * settings.batch_size == each.tokens
        assert settings.precision == "bf16" and not config.data.pack
        assert (settings.optimizer, settings.learning_rate) == ("adamw", each.learning_rate)
        assert cost.guess(each) > 0


def test_the_bars_are_what_was_asked_for():
    assert (SHORT, MIDDLE, LONG) == (460 * DOCUMENT, 100_139_008, 3 * MIDDLE)
    bars = grid(["bars_1024"])
    assert {(each.context, each.tokens, each.documents) for each in bars} == {(1024, SHORT, 1)}
    assert {each.learning_rate for each in bars if each.variant in ("softmax", "power")} == {4e-3}
    assert {each.learning_rate for each in grid(["bars_4096"])} == {2e-3}
    assert [each.seed for each in bars] == [0] * 9 + [1] * 9 + [2] * 9
    (of_long,) = {(each.context, each.tokens, each.documents) for each in grid(["bar_65536"])}
    assert of_long == (65_536, MIDDLE, 8) and bars[1].config(SCALES["full"], Path("corpus")).training.warmup_steps == 46
    assert {each.seed for each in grid(["bar_65536"], seeds=[4])} == {4}
    with pytest.raises(ValueError, match=r"a study is one of bars_1024, .*; got 'bars'"):
        grid(["bars"])


def test_the_reshape_control_cuts_the_same_rows_in_all_steps(corpus):
    long = Run("power", 65_536, documents=2)
    whole, cut = (run.config(TOY, corpus).training for run in (long, replace(long, row_tokens=16_384)))
    assert (cut.short_context, cut.short_share) == (LENGTH // 4, 1.0)
    assert replace(cut, short_context=None, short_share=0.0) == whole
    assert cut.context_of(cut.steps - 1) == LENGTH // 4


def test_a_run_is_trained_and_measured(corpus, monkeypatch):
    monkeypatch.setattr(measure, "commit", lambda: "123456789012")  # git takes longer than a run
    long, short = records(corpus, [Run("power", DOCUMENT), Run("power", 4096)])
    row, positions = long["row"], long["positions"]
    assert (row["variant"], row["context"], row["status"], row["steps"]) == ("power", DOCUMENT, "done", 2)
    assert row["flops"] > 0 and row["parameters"] > 0 and row["commit"] == "123456789012" and long["use"] == []
    last = positions[-1]
    assert (last["step"], last["evaluated_context"], last["documents"]) == (2, LENGTH, 5)
    ends = [1 << n for n in range(11)]
    counts = [1, *(end // 2 for end in ends[1:-1]), LENGTH // 2 - 1]  # the last position has no target
    assert row["held_out_loss"] == pytest.approx(
        sum(last[str(end)] * count for end, count in zip(ends, counts, strict=True)) / sum(counts), abs=1e-4
    )
    assert row["gain"] == pytest.approx(last["128"] - last["1024"], abs=1e-4)
    assert row["best_loss"] == pytest.approx(min(last[str(end)] for end in ends if end > 64), abs=1e-4)
    assert [(each["step"], each["evaluated_context"], each["documents"]) for each in short["positions"]] == [
        (1, 64, 4), (2, 64, 4), (2, 64, 5), (2, LENGTH, 5)]  # fmt: skip


def test_what_diverges_is_a_row_and_what_is_stopped_is_an_error(corpus, monkeypatch):
    def train(config, *_, observe, **__):
        if config.name.startswith("softmax"):
            raise NonFiniteError("the loss is nan")  # else it returns before the last step, as after a signal

    monkeypatch.setattr(work, "train", train)
    (record,) = records(corpus, [Run("softmax", 1024)])
    assert (record["row"]["status"], record["row"]["error"]) == ("not finite", "the loss is nan")
    with pytest.raises(InterruptedError, match=r"power4-1024-.* was stopped before step 2, its last one"):
        records(corpus, [Run("power4", 1024)])


def test_gain_and_what_is_evaluated():
    row = {"64": 4.0, "128": 3.0, "256": 2.5, "512": 2.25}
    assert gain(row, 512) == 0.75 and gain(row, 256) == 0.5 and gain(row, 128) is None
    assert contexts_of(1024, DOCUMENT) == [1024, 16_384] and contexts_of(16_384, DOCUMENT) == [16_384, DOCUMENT]
    assert contexts_of(DOCUMENT, DOCUMENT) == [DOCUMENT]


def test_a_subset_holds_documents_of_the_whole(corpus, tmp_path, call, capsys):
    words = ("--corpus", corpus, "--out", tmp_path / "some", "--rows", 3)
    assert call(subset, *words) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "some"))
    some, whole = (ZarrCorpus(str(folder / "train.zarr"), 256) for folder in (tmp_path / "some", corpus))
    assert [some[i].tolist() for i in range(len(some))] == [whole[i].tolist() for i in (0, 2, 5)]
    assert len(ZarrCorpus(str(tmp_path / "some" / "heldout.zarr"), 256)) == 5
    assert call(subset, *words) == 2
    assert "is there already" in capsys.readouterr().err


def test_bigrams_and_the_last_tokens_have_a_known_loss(tmp_path, call, capsys):
    """Held out are random tokens, and then texts of which each window of 32 has every token once."""
    rng = np.random.default_rng(0)
    for name, texts in (("train", [[0, 1] * (LENGTH // 2)]), ("heldout", rng.integers(0, 256, (4, LENGTH)))):
        write_split(tmp_path, name, texts)
    words = ("--corpus", tmp_path, "--scale", "toy", "--csv", tmp_path / "bigram.csv")
    assert call(bigram, *words) == 0 == call(bigram, *words)
    (row,) = read(tmp_path / "bigram.csv")
    assert row["loss"] == pytest.approx(math.log(256), abs=0.02) and row["weights"][3] > 0.95
    (tmp_path / "heldout.zarr").rename(tmp_path / "random.zarr")
    write_split(tmp_path, "heldout", np.tile(rng.integers(2, 256, (4, 20)), LENGTH // 20 + 1)[:, :LENGTH])
    assert call(bigram, *words) == 0
    assert read(tmp_path / "bigram.csv")[-1]["loss"] == pytest.approx(math.log(bigram.WINDOW), abs=0.05)
    assert call(bigram, "--corpus", tmp_path / "none") == 2 and "error: " in capsys.readouterr().err


def test_times_are_kept_once(tmp_path, call, monkeypatch, capsys):
    monkeypatch.setattr(speed, "TIMED", 1)
    monkeypatch.setattr(speed, "WARM_UP", 1)
    monkeypatch.setattr(speed, "STEPS", 1)
    words = ("speed", "--variants", "power,softmax", "--contexts", 4096, "--modes", "eager,decoding", "--scale", "toy",
             "--device", "cpu", "--csv", tmp_path / "speed.csv")  # fmt: skip
    assert call(program, *words) == 0
    with open(tmp_path / "speed.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["context"], row["mode"]) for row in rows] == [
        (variant, "4096", mode) for variant in ("power", "softmax") for mode in ("decoding", "eager")]  # fmt: skip
    assert mean(float(row["tokens_per_second"]) for row in rows) > 0 and all(row["code"] for row in rows)
    capsys.readouterr()
    assert call(program, *words) == 0
    assert capsys.readouterr().out == "0 cases to time\n"
    assert call(program, *words[:2], "none", *words[3:]) == 2
    assert "error: " in capsys.readouterr().err
