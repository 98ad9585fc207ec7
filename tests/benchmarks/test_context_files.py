"""What rounding a context costs: the same rows for all dtypes, and no difference where nothing is rounded."""

import random

import numpy as np
import pytest
import torch

from benchmarks.context_files import loss_behind, measure, rows_of
from sympow.models import Context, LanguageModel, ModelConfig
from tests.tiny_runs import finished_runs


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


def test_float32_costs_nothing_and_int8_little(tmp_path):
    draw = random.Random(0)
    documents = [" ".join(draw.choice(["power", "state", "of", "the", "key"]) for _ in range(60)) for _ in range(40)]
    with finished_runs(tmp_path, documents, ("hybrid",)) as folder:
        exact, bfloat16, int8 = measure(str(folder / "hybrid"), 100, 20, 1)
    assert exact["bit_equal"] and exact["more_loss_percent"] == 0
    assert not int8["bit_equal"] and abs(int8["more_loss_percent"]) < 0.5
    assert exact["bytes"] > bfloat16["bytes"] > int8["bytes"]
