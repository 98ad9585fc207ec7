"""The benchmark of a long row, at a length that is none."""

import pytest
import torch

from benchmarks import long_row
from benchmarks.common.measure import read
from sympow.training.trainer import TrainingResult


def test_command(tmp_path, call, capsys):
    words = ["--device", "cpu", "--preset", "nano", "--vocabulary", "8", "--length", "101", "--context", "16"]
    words += ["--rows", "2", "--steps", "3", "--out", str(tmp_path)]
    code = call(long_row, *words)
    (result,) = read(tmp_path / "long_row.csv")
    assert code == int(not result["flat_or_falling"]) and result["finite"] and result["trained_steps"] == 3
    spans = result["curve"]
    assert [span["start"] for span in spans[1:]] == [span["stop"] for span in spans[:-1]]
    assert (spans[0]["start"], spans[-1]["stop"], result["length"]) == (0, 101, 101)
    assert (tmp_path / "long_row.png").stat().st_size > 1000
    assert "101 tokens, forward and backward" in capsys.readouterr().out


def test_a_training_that_was_stopped_is_not_measured(tmp_path, call, monkeypatch, capsys):
    monkeypatch.setattr(long_row, "train", lambda *_, **__: TrainingResult(3, 9, 1.0, "SIGTERM"))
    assert call(long_row, "--device", "cpu", "--out", tmp_path) == 1
    assert capsys.readouterr().out == "stopped by SIGTERM at step 3: the same command goes on\n"


@pytest.mark.parametrize(("last", "flat"), [(0.9, True), (1.0, True), (1.1, False)])
def test_what_rises_at_the_end_is_told(last, flat):
    noise = torch.randn(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10
    losses = 1 + noise
    losses[-1000:] = last + noise[-1000:]
    told = long_row.summary(losses)
    assert told["flat_or_falling"] == flat and told["finite"]
    assert told["rise_at_the_end"] == pytest.approx(last - 1, abs=0.02)
    losses[3] = torch.nan
    assert not long_row.summary(losses)["finite"]
