"""Tiny runs, of power attention, of softmax attention and of both, trained by the command line on text of bytes."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sympow.cli import main
from sympow.training.checkpoint import list_checkpoints

RECIPE = """
from sympow.data import DataConfig
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig

def power():
    return _config("tiny-power", "power")

def softmax():
    return _config("tiny-softmax", "softmax")

def hybrid():
    return _config("tiny-hybrid", "power", "softmax")

def nothing():
    return 3

def needy(argument):
    return argument

def _config(name, *mixers):
    return RunConfig(
        name,
        ModelConfig(256, 16, len(mixers), 2, tuple(map(MixerConfig, mixers))),
        DataConfig(kind="text", path={corpus!r}, tokenizer="bytes"),
        TrainingConfig(context=32, batch_size=2, steps=4, warmup_steps=1, log_every=1, checkpoint_every=2,
                       evaluate_every=4, evaluation_batches=1),
    )
"""


@contextmanager
def finished_runs(
    folder: Path, documents: Sequence[str], names: Sequence[str] = ("power", "softmax"), recipe: str = RECIPE
) -> Iterator[Path]:
    """The folder, with the documents in corpus/, the recipe in tiny.py, and the runs of its functions by their names.

    Until it is left, what is cached goes to the folder too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "corpus").mkdir()
        for i, document in enumerate(documents):
            (folder / "corpus" / f"{i}.txt").write_text(document, encoding="utf-8")
        (folder / "tiny.py").write_text(recipe.format(corpus=str(folder / "corpus")))
        for name in names:
            assert main(["train", f"{folder}/tiny.py:{name}", "--out", f"{folder}/{name}", "--quiet"]) == 0
        yield folder


def forget_last_checkpoint(run, name: str):
    """A copy of a run that stands at its checkpoint before the last."""
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    last = list_checkpoints(copy)[-1]
    shutil.rmtree(last) if last.is_dir() else last.unlink()
    return copy
