"""A mixer and a task in files beside a recipe are found, also by the workers of a sweep."""

import sys

import pytest

from sympow.cli import main
from tests.test_documents import python_of

TRAIN = """
from sympow.data import DataConfig
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig
import beside_words

def run():
    mixer = MixerConfig("beside_mixers:Average", {{"horizon": 8.0}})
    return RunConfig(beside_words.NAME, ModelConfig(256, 16, 1, 2, (mixer,)),
                     DataConfig(kind="text", path={texts!r}, tokenizer="bytes"),
                     TrainingConfig(context=16, batch_size=2, steps=2, warmup_steps=0, evaluation_batches=1))
"""
TASK = """
import numpy as np

def copied(rng, examples, length, vocab_size):
    tokens = rng.integers(1, vocab_size, (examples, length))
    targets = np.full((examples, length), -100)
    targets[:, -1] = tokens[:, 0]
    return tokens, targets
"""
RECALL = """
from sympow.models import MixerConfig
from sympow.recall import Architecture, OwnTask, RecallConfig

def run():
    task = OwnTask("beside_tasks:copied", 8, 16)
    return RecallConfig(Architecture("mine", (MixerConfig("softmax"),)), width=16, train=(task,), test=(task,),
                        examples=8, validation_examples=4, test_examples=4, batch_size=4, epochs=1, validations=1)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Recipes with their parts, beside the current folder."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "beside_mixers.py").write_text(python_of("docs/guides/mixer.md")[0])
    (folder / "beside_words.py").write_text("NAME = 'named-beside'\n")
    (tmp_path / "texts.txt").write_text("a line of text\n" * 99)
    (folder / "beside_tasks.py").write_text(TASK)
    (folder / "recall.py").write_text(RECALL)
    (folder / "own.py").write_text(TRAIN.format(texts=str(tmp_path / "texts.txt")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in ("beside_mixers", "beside_words", "beside_tasks"):
        sys.modules.pop(name, None)


def test_parts_beside_a_recipe_are_found(folder, capsys):
    assert main(["train", "recipes/own.py:run", "--out", "run", "--quiet"]) == 0
    assert "finished at step 2 of 2" in capsys.readouterr().out
    assert sys.path[-1] == str(folder)


def test_parts_beside_a_recipe_do_not_take_the_place_of_packages(folder, capsys):
    (folder / "numpy.py").write_text("raise RuntimeError('not this one')\n")
    assert main(["train", "recipes/own.py:run", "--out", "run", "--quiet"]) == 0


@pytest.mark.parametrize("executor", ["process", "submitit"])
def test_workers_find_a_task_beside_a_recipe(folder, executor, capsys):
    if executor == "submitit":
        pytest.importorskip("submitit")
    (folder / "numpy.py").write_text("raise RuntimeError('not this one')\n")
    words = ["--executor", executor, "--device", "cpu", "--out", "sweep", "--quiet"]
    assert main(["mqar", "recipes/recall.py:run", *words]) == 0
    assert "1 run: sweep/results.csv" in capsys.readouterr().out
