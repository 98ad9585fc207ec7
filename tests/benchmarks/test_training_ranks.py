"""The benchmark that holds several ranks to one: three calls, of which each trains what is missing."""

import argparse
import sys

import pytest
import torch

from benchmarks import training_ranks
from benchmarks.common.measure import read
from sympow.training import latest
from tests.ranks import run_ranks

WORDS = ["--device", "cpu", "--preset", "nano", "--vocabulary", "8", "--context", "16", "--rows", "2", "--steps", "4",
         "--warmup", "3"]  # fmt: skip


def call(out) -> int:
    sys.argv = ["training_ranks", *WORDS, "--out", str(out)]
    return training_ranks.main()


def test_rows_that_have_no_halves_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training_ranks", "--device", "cpu", "--rows", "3", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        training_ranks.main()
    assert "--rows must be even, as they also pass in two halves; got 3" in capsys.readouterr().err


def test_text_comes_in_the_same_rows_whatever_their_number(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = argparse.Namespace(text=True, context=300)
    whole, halves = training_ranks.batches(args, 4), training_ranks.batches(args, 2)
    assert torch.equal(whole[3].tokens, torch.cat([halves[6].tokens, halves[7].tokens]))
    assert (whole[3].tokens == ord(" ")).any()


def test_three_calls(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])  # and back
    assert call(tmp_path) == 0 and "start this with torchrun" in capsys.readouterr().out
    assert run_ranks(call, 2, tmp_path) == [0, 0]
    assert not (tmp_path / "continued").exists()
    assert call(tmp_path) == 0
    rows = read(tmp_path / "ranks.csv")
    assert {row["training"]["warmup_steps"] for row in rows} == {3}
    assert [(row["run"], row["against"], row["first_step"]) for row in rows] == [
        ("several", "one", 1),
        ("halves", "one", 1),
        ("continued", "several", 3),
    ]
    assert all(row["difference"] < row["allowed"] for row in rows) and rows[0]["difference"] > 0
    assert latest(tmp_path / "several").is_dir() and latest(tmp_path / "continued").is_file()

    losses = training_ranks.losses
    monkeypatch.setattr(
        training_ranks, "losses", lambda run: {k: v * (1 + (run.name == "one") / 100) for k, v in losses(run).items()}
    )
    assert call(tmp_path) == 1
    assert read(tmp_path / "ranks.csv")[0]["difference"] == pytest.approx(0.01, rel=0.1)
