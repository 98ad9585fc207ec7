"""A task of a user's own: drawn by its import path, in workers too, and refused in one line."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sympow.cli import main
from sympow.data.mqar import RecallTask, mixture
from sympow.models import MixerConfig
from sympow.recall import Architecture, OwnTask, RecallConfig, read_results, run

RECIPE = """
from sympow.models import MixerConfig
from sympow.recall import Architecture, OwnTask, RecallConfig, Sweep, grid

def own():
    model = Architecture("mine", (MixerConfig("own_mixer:Own", {"scale": 0.5}),), mlp_ratio=0)
    task = OwnTask("own_task:copying", length=8, vocab_size=16, options={"back": 2})
    base = RecallConfig(model, width=16, train=(task,), examples=64, validation_examples=8, test_examples=8, epochs=2,
                        batch_size=32, stop_at=None)
    return Sweep("own", grid(base, learning_rates=(1e-3, 1e-2)))
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_rows_are_those_of_the_function_and_a_seed():
    task = OwnTask("own_task:copying", 8, 16, options={"back": 3})
    rows, same, other = task.draw(50, 1), task.draw(50, [1]), task.draw(50, 2)
    assert rows.tokens.dtype == rows.targets.dtype == np.int32 and rows.tokens.shape == (50, 8)
    places, labels = rows.queries()
    assert (places == 7).all() and (labels[:, 0] == rows.tokens[:, 4]).all()
    assert (rows.tokens == same.tokens).all() and (rows.tokens != other.tokens).any()
    mixed = mixture((task, RecallTask(length=8, pairs=1, vocab_size=16)), 9, 0)
    assert [len(part.tokens) for part in mixed] == [5, 4]


def test_a_sweep_of_ones_own_mixer_and_task_in_two_workers(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(RECIPE)
    words = ["mqar", f"{tmp_path / 'mine.py'}:own", "train.0.options.back=1", "--executor", "process", "--jobs", "2"]
    assert main([*words, "--out", str(tmp_path / "out"), "--device", "cpu", "--quiet"]) == 0
    rows = read_results(tmp_path / "out" / "results.csv")
    assert [row["learning_rate"] for row in rows] == [1e-3, 1e-2] and [row["steps"] for row in rows] == [4, 4]
    assert {row["train"] for row in rows} == {'own_task:copying 8 {"back": 1}'} and rows[0]["pairs"] is None
    assert "own_mixer:Own" in rows[0]["mixers"] and "-n8-w16-" in rows[0]["run"]
    capsys.readouterr()
    assert main(["mqar-figures", str(tmp_path / "out" / "results.csv"), "--out", str(tmp_path)]) == 0
    assert f"{tmp_path / 'learning_curves.png'}" in capsys.readouterr().out.splitlines()


def test_it_is_learned(small):
    """A convolution shows every token the one before."""
    copying = OwnTask("own_task:copying", 8, 16, pairs=2)
    convolution = Architecture("convolution", (MixerConfig("short_convolution"),), layers=1)
    (row,) = run(replace(small, train=(copying,), architecture=convolution, epochs=1), device="cpu")
    assert row["test_accuracy"] > 0.95 and row["test"] == "own_task:copying 8:2" and row["pairs"] == 2


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"function": "copying"}, ValueError, "the function of a task is written package.module:name; got 'copying'"),
        ({"function": "own_task:other"}, ValueError, "the task 'own_task:other' must name a function; got None"),
        ({"function": "no_such:f"}, ImportError, "the module of the task 'no_such:f' cannot be imported: No module"),
        ({"length": 0}, ValueError, "length must be at least 1; got 0"),
        ({"pairs": 1.5}, TypeError, "pairs must be an integer; got 1.5"),
    ],
)
def test_what_is_no_task(fields, error, message):
    with pytest.raises(error, match=message):
        OwnTask(**{"function": "own_task:copying", "length": 8} | fields)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokens_alone", "a tuple of tokens and targets; got ndarray"),
        ("too_short", r"tokens as integers \[4, 8\]; got int64 \[4, 7\]"),
        ("other_tokens", "tokens of 0 to 15; got 1[67] to [23]"),
        ("uneven", "as many targets in every row; got 0 to 1"),
        ("floats", r"targets as integers \[4, 8\]; got float64 \[4, 8\]"),
    ],
)
def test_what_a_function_must_return(name, message):
    with pytest.raises(ValueError, match=f"the task 'own_task:{name}' must return {message}"):
        OwnTask(f"own_task:{name}", 8, 16).draw(4, 0)


def test_ids_tell_tasks_apart(small):
    configs = [replace(small, train=(OwnTask("own_task:copying", 8, 16, options={"back": b}),)) for b in (1, 2)]
    assert isinstance(configs[0], RecallConfig) and configs[0].id != configs[1].id
    assert hash(configs[0].train) != hash(configs[1].train)
