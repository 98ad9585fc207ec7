"""The evidence suite: what runs are, that each is trained, measured and kept once, and that time limits hold."""

import csv
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
import zarr

from benchmarks.context_scaling import __main__ as program
from benchmarks.context_scaling import cost, results, speed, work
from benchmarks.context_scaling.data import make_batches, read_documents
from benchmarks.context_scaling.grid import DOCUMENT, LONG, MIDDLE, SCALES, SHORT, Run
from benchmarks.context_scaling.measures import contexts_of, gain
from benchmarks.context_scaling.studies import STUDIES, grid
from sympow.data.zarr_corpus import ZarrCorpus
from sympow.sweeps import run_jobs
from sympow.training import NonFiniteError

TOY = SCALES["toy"]
LENGTH = DOCUMENT // TOY.shrink


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents each half of which is said twice."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, documents in (("train", 6), ("heldout", 5)):
        tokens = rng.integers(0, 256, (documents, LENGTH // 2), dtype=np.uint16).repeat(2, axis=1)
        zarr.create_array(str(folder / f"{name}.zarr"), data=tokens, chunks=(1, LENGTH), zarr_format=2)
    return folder


@pytest.fixture
def without_processes(monkeypatch):
    """Jobs one after another in this process."""

    monkeypatch.setattr(program, "run_jobs", partial(run_jobs, executor=None))
    monkeypatch.setattr(work, "commit", lambda: "123456789012")  # git takes longer than a run


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["context_scaling", *map(str, words)])
    return program.main()


def run(monkeypatch, corpus, out, *words):
    where = ("--corpus", corpus, "--out", out, "--known", out / "known", "--scale", "toy", "--device", "cpu")
    return call(monkeypatch, "run", *where, *words)


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
    assert [each.learning_rate for each in grid(["bar_65536"], seeds=[4], rates=[1e-3, 4e-3])] == [1e-3] * 2 + [
        4e-3
    ] * 2
    with pytest.raises(ValueError, match=r"a study is one of bars_1024, .*; got 'bars'"):
        grid(["bars"])


def test_the_reshape_control_sees_the_same_documents_in_the_same_steps(corpus):
    documents = read_documents(TOY, corpus).train
    long = Run("power", 65_536, documents=2)
    cut = replace(long, row_tokens=16_384)
    whole, rows = (make_batches(each, TOY, documents, n)[3] for each, n in ((long, 1), (cut, 4)))
    assert rows.tokens.shape == (4, LENGTH // 4) and whole.tokens.shape == (1, LENGTH)
    assert torch.equal(rows.tokens.flatten(), whole.tokens.flatten())
    assert torch.equal(rows.targets.flatten(), whole.targets.flatten())
    assert cut.config(TOY, corpus).training.context == LENGTH // 4


def test_runs_are_trained_measured_and_kept_once(corpus, tmp_path, monkeypatch, without_processes, capsys):
    words = ("--studies", "scra_latency,bars_4096", "--variants", "softmax,power", "--seeds", "0")
    assert run(monkeypatch, corpus, tmp_path, *words) == 0
    assert "4 of 4 runs done" in capsys.readouterr().out
    found = results.read(tmp_path)
    assert [(row["variant"], row["context"], row["status"]) for row in found.runs] == [
        (variant, context, "done") for context in (65_536, 4096) for variant in ("softmax", "power")
    ]
    row = found.runs[1]
    assert row["steps"] == 2 and row["flops"] > 0 and row["parameters"] > 0 and row["commit"] == "123456789012"
    last = [each for each in found.positions if each["run"] == results.run_of(row).name][-1]
    assert (last["step"], last["evaluated_context"], last["documents"]) == (2, LENGTH, 5)
    ends = [1 << n for n in range(11)]
    counts = [1, *(end // 2 for end in ends[1:-1]), LENGTH // 2 - 1]  # the last position has no target
    assert row["held_out_loss"] == pytest.approx(
        sum(last[str(end)] * count for end, count in zip(ends, counts, strict=True)) / sum(counts), abs=1e-4
    )
    assert row["gain"] == pytest.approx(last["128"] - last["1024"], abs=1e-4)
    assert row["best_loss"] == pytest.approx(min(last[str(end)] for end in ends if end > 64), abs=1e-4)
    short = [(each["step"], each["evaluated_context"], each["documents"])
             for each in found.positions if each["run"] == results.run_of(found.runs[3]).name]  # fmt: skip
    assert short == [(1, 64, 4), (2, 64, 4), (2, 64, 5), (2, LENGTH, 5)]

    assert run(monkeypatch, corpus, tmp_path, *words) == 0
    assert capsys.readouterr().out == "0 of 4 runs to do\n"
    assert call(monkeypatch, "merge", "--from", tmp_path, "--into", tmp_path / "known") == 0
    merged = results.read(tmp_path / "known")
    assert sorted(map(str, merged.runs)) == sorted(map(str, found.runs)) and len(merged.positions) == 14
    assert call(monkeypatch, "merge", "--from", tmp_path, "--into", tmp_path / "known") == 2
    assert "has 4 of these runs already" in capsys.readouterr().err
    assert run(monkeypatch, corpus, tmp_path / "later", "--known", tmp_path / "known", *words) == 0
    assert capsys.readouterr().out.endswith("0 of 4 runs to do\n")


def test_what_fails_or_diverges_is_a_row_and_does_not_stop_the_others(corpus, tmp_path, monkeypatch, without_processes):
    raised = {"softmax": NonFiniteError("the loss is nan"), "power": RuntimeError("out of luck")}
    trained = []

    def train(config, *_, observe, **__):
        variant = config.name.split("-")[0]
        trained.append(variant)
        if variant in raised:
            raise raised[variant]  # else it returns before the last step, as after a signal

    monkeypatch.setattr(work, "train", train)
    words = ("--studies", "bars_1024", "--variants", "softmax,power,power4", "--seeds", "0")
    assert run(monkeypatch, corpus, tmp_path, *words) == 0
    statuses = {row["variant"]: (row["status"], row["error"]) for row in results.read(tmp_path).runs}
    stopped = "InterruptedError: power4-1024-30.1466M-x1-lr0.004-seed0 was stopped before step 2, its last one"
    assert statuses == {"softmax": ("not finite", "the loss is nan"), "power": ("failed", "RuntimeError: out of luck"),
                        "power4": ("failed", stopped)}  # fmt: skip
    assert run(monkeypatch, corpus, tmp_path, *words) == 0
    assert trained == ["softmax", "power", "power4", "power", "power4"]
    assert len(results.read(tmp_path).runs) == 3
    assert results.merge(tmp_path, tmp_path / "known") == 1


def test_a_run_is_known_by_its_corpus_too(corpus, tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        row = {**{key: None for key in results.COLUMNS}, **vars(Run("softmax", 1024, learning_rate=4e-3)),
               "scale": "full", "status": "done", "corpus": f"900 rows, {name}"}  # fmt: skip
        results.Results([row]).write(tmp_path / name)
    assert results.merge(tmp_path / "a", tmp_path / "b") == 1
    assert [row["corpus"] for row in results.read(tmp_path / "b").runs] == ["900 rows, a", "900 rows, b"]
    with pytest.raises(ValueError, match="has 1 of these runs already"):
        results.merge(tmp_path / "a", tmp_path / "b")
    words = ("--studies", "bars_1024", "--variants", "softmax", "--seeds", "0", "--known", tmp_path / "b")
    assert run(monkeypatch, corpus, tmp_path, *words, "--minutes", "0") == 0
    assert capsys.readouterr().out.startswith("1 of 1 runs to do\n")


def test_gain_and_what_is_evaluated():
    row = {"64": 4.0, "128": 3.0, "256": 2.5, "512": 2.25}
    assert gain(row, 512) == 0.75 and gain(row, 256) == 0.5 and gain(row, 128) is None
    assert contexts_of(1024, DOCUMENT) == [1024, 16_384] and contexts_of(16_384, DOCUMENT) == [16_384, DOCUMENT]
    assert contexts_of(DOCUMENT, DOCUMENT) == [DOCUMENT]


def test_a_subset_holds_documents_of_the_whole(corpus, tmp_path, monkeypatch, capsys):
    words = ("subset", "--corpus", corpus, "--out", tmp_path / "some", "--rows", 3)
    assert call(monkeypatch, *words) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "some"))
    some, whole = (ZarrCorpus(str(folder / "train.zarr"), 256) for folder in (tmp_path / "some", corpus))
    assert [some[i].tolist() for i in range(len(some))] == [whole[i].tolist() for i in (0, 2, 5)]
    assert len(ZarrCorpus(str(tmp_path / "some" / "heldout.zarr"), 256)) == 5
    assert call(monkeypatch, *words) == 2
    assert "is there already" in capsys.readouterr().err


def test_times_are_kept_once(tmp_path, monkeypatch, without_processes, capsys):
    monkeypatch.setattr(speed, "TIMED", 1)
    monkeypatch.setattr(speed, "WARM_UP", 1)
    words = ("speed", "--variants", "power,softmax", "--contexts", 4096, "--modes", "eager", "--out", tmp_path / "out",
             "--known", tmp_path / "known", "--scale", "toy", "--device", "cpu")  # fmt: skip
    assert call(monkeypatch, *words) == 0
    with open(tmp_path / "out" / "speed.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["context"], row["mode"]) for row in rows] == [
        ("power", "4096", "eager"), ("softmax", "4096", "eager")]  # fmt: skip
    assert mean(float(row["tokens_per_second"]) for row in rows) > 0
    assert call(monkeypatch, "merge", "--from", tmp_path / "out", "--into", tmp_path / "known") == 0
    assert call(monkeypatch, *words) == 0
    assert capsys.readouterr().out.endswith("2 times added\n0 of 2 to time\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--studies", "a"], "a study is one of bars_1024, "),
        (["--studies", "bars_1024", "--rates", "fast"], "--rates takes values with commas between; got 'fast'"),
        (["--studies", "bars_1024", "--seeds", "0.5"], "--seeds takes values with commas between; got '0.5'"),
        (["--studies", "bars_1024", "--workers", "0"], "it takes a worker at least; got 0"),
        (["--studies", "bars_1024", "--corpus", "nowhere"], "zarr corpus does not exist: nowhere/train.zarr"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(corpus, tmp_path, monkeypatch, capsys, options, message):
    assert run(monkeypatch, corpus, tmp_path, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
