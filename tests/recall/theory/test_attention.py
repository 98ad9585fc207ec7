"""Recall by attention with explicit weights is exact for every power of the scores."""

import pytest
import torch

from sympow.data.mqar import RecallTask, generate
from sympow.recall.theory.attention import recall_by_attention, recall_layer
from sympow.recall.theory.instances import NONE, Instances, draw, draw_with_lags


@pytest.mark.parametrize("p", [None, 1, 2, 3, 4, 6])
def test_attention_answers_every_query(p, scanned):
    instances = draw(10_000, 8, 10, seed=0)
    answers = scanned(instances)
    assert 0.3 < (answers != NONE).double().mean() < 0.6  # the others ask for what comes later or never
    assert torch.equal(recall_by_attention(instances, p), answers)


@pytest.mark.parametrize("p", [None, 2])
def test_keys_to_come_and_the_own_key_are_not_seen(p):
    keys = torch.tensor([[0, 1, 2]])
    instances = Instances(keys, torch.tensor([[3, 4, 3]]), torch.tensor([[0, 2, 0]]), 5)
    assert recall_by_attention(instances, p).tolist() == [[NONE, NONE, 3]]


@pytest.mark.parametrize("fill", ["zero", "random"])
@pytest.mark.parametrize("p", [2, 4])
def test_a_power_layer_with_explicit_weights_solves_mqar(p, fill):
    task = RecallTask(length=16, pairs=3, vocab_size=14, filler=fill)
    rows = generate(task, 10_000, seed=p)
    tokens = torch.from_numpy(rows.tokens).long()
    x = torch.nn.functional.one_hot(tokens, 14).double()
    x[..., 0] = 0  # filler
    with torch.no_grad():
        out = recall_layer(14, p)(torch.cat([x, x], dim=2))
    places, labels = (torch.from_numpy(array).long() for array in rows.queries())
    assert torch.equal(out.argmax(-1).gather(1, places), labels)


def test_rows_that_cannot_be_drawn():
    with pytest.raises(ValueError, match="the 5 keys of a row are different tokens; the vocabulary has 4"):
        draw(1, 5, 4, seed=0)
    with pytest.raises(ValueError, match=r"5 triples need more than 5 tokens and 1 to 4 lags; got vocab_size=5, l"):
        draw_with_lags(1, 5, 5, 2, seed=0)
