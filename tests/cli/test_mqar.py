"""The commands of associative recall, and its errors in one line."""

import re

import pytest

from sympow.cli import main
from sympow.progress import Progress
from sympow.recall import read_results

RECIPE = """
from sympow.data.mqar import RecallTask
from sympow.models import MixerConfig
from sympow.recall import Architecture, RecallConfig, Sweep, grid

def one():
    model = Architecture("attention", (MixerConfig("softmax"),))
    return RecallConfig(model, width=16, train=(RecallTask(length=8, pairs=1, vocab_size=16),), examples=64,
                        validation_examples=8, test_examples=8, epochs=1, batch_size=32)

def several():
    return Sweep("several", grid(one(), widths=(16, 32), learning_rates=(1e-3, 1e-2)))

def two():
    return Sweep("two", grid(one(), widths=(16, 32)))

def odd():
    return RecallTask(length=7)
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    return str(tmp_path / "mine.py")


def test_one_run(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(["mqar", f"{recipe}:one", "seed=3", "architecture.mlp_ratio=0", "--out", str(out), "--device", "cpu"]) == 0
    )
    said = capsys.readouterr()
    (row,) = read_results(out / "results.csv")
    assert row["seed"] == 3 and row["mlp_ratio"] == 0 and row["width"] == 16
    assert said.out.splitlines()[-1] == f"1 run: {out}/results.csv" and "| attention | 1 | 16 | mqar 8:1 |" in said.out
    assert "validation 1: loss" in said.err


def test_a_sweep_and_its_figures(recipe, tmp_path, capsys):
    words = ["mqar", f"{recipe}:several", "--out", str(tmp_path / "out"), "--executor", "process", "--device", "cpu"]
    assert main([*words, "--quiet"]) == 0
    rows = read_results(tmp_path / "out" / "results.csv")
    assert [(row["width"], row["learning_rate"]) for row in rows] == [(16, 1e-3), (16, 1e-2), (32, 1e-3), (32, 1e-2)]
    before = (tmp_path / "out" / "results.csv").read_bytes()
    assert main(words) == 0 and (tmp_path / "out" / "results.csv").read_bytes() == before
    capsys.readouterr()
    images = tmp_path / "images"
    assert main(["mqar-figures", str(tmp_path / "out" / "results.csv"), "--out", str(images)]) == 0
    names = [f"{images}/{name}.png" for name in ("accuracy_width", "frontier", "learning_rates", "learning_curves")]
    assert capsys.readouterr().out.splitlines() == names


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sweep_tells_how_far_it_is(every_count_is_told, recipe, tmp_path, capsys, jobs):
    """Where stderr is no terminal."""
    words = ["mqar", f"{recipe}:two", "--executor", "process", "--device", "cpu", "--jobs", jobs]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("sweep: 2 of 2 runs, 0:0") and all(line.startswith("sweep: ") for line in lines)


def test_the_validation_is_shown(recipe, tmp_path, monkeypatch):
    phases, phase = [], Progress.phase
    monkeypatch.setattr(Progress, "phase", lambda self, name: phases.append(name) or phase(self, name))
    assert main(["mqar", f"{recipe}:one", "--out", str(tmp_path / "out"), "--device", "cpu", "--quiet"]) == 0
    assert phases and set(phases) == {"validating"}


def test_ctrl_c_says_that_the_same_command_continues(recipe, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sympow.recall.run_sweep", interrupted)
    assert main(["mqar", f"{recipe}:one", "--out", str(tmp_path / "out"), "--device", "cpu", "--quiet"]) == 130
    assert capsys.readouterr().err == "stopped; finished runs are kept, and the same command does the others\n"


def test_errors_are_one_line(recipe, fails, tmp_path):
    out = ["--out", str(tmp_path / "out")]
    assert fails("mqar", f"{recipe}:one", "train.0.length=9", *out) == "length must be even; got 9"
    assert fails("mqar", f"{recipe}:one", "train.0.pairs=3", *out) == "3 pairs need a length of at least 12; got 8"
    assert fails("mqar", f"{recipe}:one", "architecture.mixers.0.name=attn", *out).startswith(
        "a mixer is one of power, softmax"
    )
    assert fails("mqar", f"{recipe}:one", "architecture.heads=3", *out).startswith(
        "d_model must be a multiple of n_heads"
    )
    assert fails("mqar", f"{recipe}:one", "lr=1", *out).startswith("unknown field 'lr'")
    assert fails("mqar", f"{recipe}:odd", *out).endswith("ValueError: length must be even; got 7")
    assert fails("mqar", "demo:power", *out).endswith("sympow mqar: it returned RunConfig, not RecallConfig or Sweep")
    assert fails("train", f"{recipe}:one", *out).endswith(
        "no recipe of sympow train: it returned RecallConfig, not RunConfig"
    )
    assert fails("mqar", f"{recipe}:one", *out, "--executor", "slurm", "--slurm", "gpus") == (
        "a parameter of Slurm is written key=value, got 'gpus'"
    )
    assert fails("mqar", f"{recipe}:one", *out, "--slurm", "timeout_min=5").startswith("parameters of Slurm are for")
    assert fails("mqar", f"{recipe}:one", *out, "--device", "tpu").startswith("device 'tpu' cannot be used here")
    assert not (tmp_path / "out").exists()
    (tmp_path / "other.csv").write_text("a\n1\n")
    assert "holds no results of recall" in fails("mqar-figures", str(tmp_path / "other.csv"), *out)


@pytest.mark.parametrize("field", ["examples", "validation_examples", "test_examples", "train.0.length"])
@pytest.mark.parametrize("number", [10**13, 2**62])
def test_data_that_no_memory_holds(recipe, tmp_path, capsys, field, number):
    """NumPy would name an array, or ask for memory until the system ends the process."""
    words = ["mqar", f"{recipe}:one", f"{field}={number}", "--out", str(tmp_path / "out"), "--executor", "process"]
    assert main([*words, "--device", "cpu", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"ValueError: data of [\d,]+ examples with a length of [\d,]+ needs .* of memory; this ", error)
