"""What rounding a context costs: the same rows for all dtypes, and no difference where nothing is rounded."""

import random

import numpy as np
import pytest
import torch

from benchmarks.context_files import loss_behind, measure, rows_of
from sympow.cli import main
from sympow.models import Context, LanguageModel, ModelConfig

RECIPE = """
from sympow.data import DataConfig
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig

def tiny():
    return RunConfig(
        "tiny",
        ModelConfig(vocab_size=256, d_model=32, n_layers=2, n_heads=2,
                    mixers=(MixerConfig("power"), MixerConfig("softmax"))),
        DataConfig(kind="text", path={corpus!r}, tokenizer="bytes"),
        TrainingConfig(context=32, batch_size=2, steps=4, warmup_steps=1, evaluation_batches=1),
    )
"""


def test_losses_behind_a_context_are_those_of_the_whole():
    model = LanguageModel(ModelConfig(50, 16, 2, 2), seed=0)
    x = torch.randint(50, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model.token_losses(x[:, :-1], x[:, 1:])[:, 19:].double().mean()
    behind = loss_behind(model, Context.begin(model).read(model, x[:, :20]), x[:, 20:])
    assert behind == pytest.approx(float(whole), rel=1e-5)
    with pytest.raises(ValueError, match="the context is empty"):
        loss_behind(model, Context.begin(model), x)


def test_rows_are_of_documents_that_are_long_enough():
    class Documents(list):
        lengths = np.array([3, 9, 5])

    documents = Documents(np.arange(length) for length in Documents.lengths)
    assert [row.tolist() for row in rows_of(documents, 4, 2)] == [[[0, 1, 2, 3]]] * 2
    with pytest.raises(ValueError, match="3 documents of 4 tokens are needed; there are 2"):
        rows_of(documents, 4, 3)


def test_float32_costs_nothing_and_int8_little(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw = random.Random(0)
    (tmp_path / "corpus").mkdir()
    for i in range(40):
        words = " ".join(draw.choice(["power", "state", "of", "the", "key"]) for _ in range(60))
        (tmp_path / "corpus" / f"{i}.txt").write_text(words)
    (tmp_path / "tiny.py").write_text(RECIPE.format(corpus=str(tmp_path / "corpus")))
    assert main(["train", f"{tmp_path}/tiny.py:tiny", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    exact, bfloat16, int8 = measure(str(tmp_path / "run"), 100, 20, 1)
    assert exact["bit_equal"] and exact["more_loss_percent"] == 0
    assert not int8["bit_equal"] and abs(int8["more_loss_percent"]) < 0.5
    assert exact["bytes"] > bfloat16["bytes"] > int8["bytes"]
