"""The recall model: logits where they are asked for, learned positions, blocks without an MLP."""

import pytest
import torch
from torch.nn import functional as F

from sympow.models import LanguageModel, MixerConfig, ModelConfig, RecallModel

CONFIG = ModelConfig(50, 16, 2, 2, (MixerConfig("softmax", {"rotation": "none"}),), mlp_ratio=0)


def data(batch=3, time=10, queries=4):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (batch, time), generator=generator)
    places = torch.stack([torch.randperm(time, generator=generator)[:queries] for _ in range(batch)])
    return tokens, places


@pytest.mark.parametrize("positions", [0, 12])
def test_logits_at_queries_are_those_of_the_whole_sequence(positions):
    model = RecallModel(CONFIG, positions=positions, seed=1).double()
    tokens, places = data()
    whole = model(tokens)
    expected = torch.stack([row[at] for row, at in zip(whole, places, strict=True)])
    torch.testing.assert_close(model.query_logits(tokens, places), expected, rtol=1e-12, atol=1e-12)


def test_the_loss_at_queries_and_its_gradients_are_those_of_all_targets():
    model = RecallModel(CONFIG, seed=1).double()
    tokens, places = data()
    labels = torch.randint(50, places.shape, generator=torch.Generator().manual_seed(2))
    targets = torch.full_like(tokens, -100).scatter(1, places, labels)
    weights = list(model.parameters())
    few = F.cross_entropy(model.query_logits(tokens, places).flatten(0, 1), labels.flatten())
    full = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(few, full, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(few, weights), torch.autograd.grad(full, weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_without_positions_it_is_the_language_model():
    tokens, _ = data()
    assert torch.equal(RecallModel(CONFIG, seed=3)(tokens), LanguageModel(CONFIG, seed=3)(tokens))


def test_positions_tell_tokens_apart_and_are_trained():
    model = RecallModel(CONFIG, positions=12, seed=3)
    tokens = torch.full((1, 12), 7)
    logits = model(tokens)
    assert not torch.allclose(logits[:, 3], logits[:, 4])
    logits.square().sum().backward()
    assert (model.positions.grad.abs().sum(1) > 0).all()
    assert not torch.equal(model.positions.data, model.embedding.weight.data[:12])
    assert torch.equal(model.positions, RecallModel(CONFIG, positions=12, seed=3).positions)
    without = RecallModel(CONFIG, seed=3)(tokens)
    torch.testing.assert_close(without[:, 3], without[:, 4])


def test_positions_end_and_cannot_be_stepped():
    model = RecallModel(CONFIG, positions=8, seed=0)
    with pytest.raises(ValueError, match="the model has 8 positions; got 9 tokens"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    for step in (model.step, model.try_step):
        with pytest.raises(ValueError, match="learned positions has no step"):
            step(torch.zeros(1, 1, dtype=torch.int64), model.init_state(1))
    with pytest.raises(TypeError, match=r"tokens must be int64; got torch\.int32"):
        model(torch.zeros(1, 4, dtype=torch.int32))


@pytest.mark.parametrize(
    ("places", "error", "message"),
    [
        ([[1, 2]], ValueError, r"places must be \[B, Q\] with B = 3 as in tokens; got \[1, 2\]"),
        ([1, 2, 3], ValueError, r"got \[3\]"),
        ([[0], [1], [10]], ValueError, "places must be from 0 to 9; got 0 to 10"),
        ([[0.0], [1.0], [2.0]], TypeError, "places must be int64; got torch.float32"),
    ],
)
def test_wrong_places_are_refused(places, error, message):
    with pytest.raises(error, match=message):
        RecallModel(CONFIG, seed=1).query_logits(data()[0], torch.tensor(places))


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="tokens must lie in a vocabulary of 50 tokens; got 50"):
        RecallModel(CONFIG, seed=1)(torch.full((1, 2), 50))


def test_a_block_without_mlp_steps_as_its_sequence():
    model = RecallModel(CONFIG, seed=4).double()
    assert not any("mlp" in name for name, _ in model.named_parameters())
    tokens, _ = data(batch=2)
    state = model.init_state(2)
    for token in tokens.split(1, dim=1):
        logits, state = model.step(token, state)
    torch.testing.assert_close(logits, model(tokens)[:, -1], rtol=1e-9, atol=1e-9)
