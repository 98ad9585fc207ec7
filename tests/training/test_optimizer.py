"""Which weights decay, and the learning rate of every step."""

from itertools import pairwise

import pytest
import torch

from sympow.models import LanguageModel
from sympow.training import TrainingConfig
from sympow.training.optimizer import learning_rate, make_optimizer, parameter_groups, set_learning_rate


def test_learning_rate_rises_then_falls_to_its_floor():
    config = TrainingConfig(steps=100, warmup_steps=10, learning_rate=2.0, min_lr_ratio=0.1)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == 2.0
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half of the cosine
    assert rates[-1] == pytest.approx(0.2)


def test_learning_rate_at_the_edges():
    assert learning_rate(0, TrainingConfig(steps=1, warmup_steps=0, learning_rate=1.0)) == pytest.approx(0.1)
    assert learning_rate(4, TrainingConfig(steps=5, warmup_steps=5, learning_rate=1.0)) == 1.0


@pytest.mark.parametrize("start", [4, 10, 40])
def test_learning_rate_of_a_later_stage_rises_from_near_0_to_that_of_the_run(start):
    """Also of a stage that starts while the rate of the run still rises."""
    config = TrainingConfig(steps=100, warmup_steps=10, learning_rate=2.0)
    rates = [learning_rate(step, config, start) for step in range(start, 100)]
    reached = learning_rate(start + 10, config)
    assert rates[:10] == pytest.approx([reached * (i + 1) / 10 for i in range(10)])
    assert rates[10:] == [learning_rate(step, config) for step in range(start + 10, 100)]


def test_only_matrices_decay_and_every_weight_stands_once(make_config):
    model = LanguageModel(make_config().model, seed=0)
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    plain = {names[id(parameter)] for parameter in others["params"]}
    assert all(name.endswith("bias") or "norm" in name for name in plain)
    assert any("gate.bias" in name for name in plain)
    given = [id(parameter) for group in (decayed, others) for parameter in group["params"]]
    assert len(given) == len(set(given)) == len(names)


def test_optimizer_is_as_configured(make_config):
    model = LanguageModel(make_config().model, seed=0)
    optimizer = make_optimizer(model, TrainingConfig(betas=(0.5, 0.6), weight_decay=0.2))
    assert optimizer.defaults["betas"] == (0.5, 0.6)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    norm = model.final_norm.weight
    before = norm.detach().clone()
    norm.grad = torch.zeros_like(norm)
    optimizer.step()
    assert torch.equal(norm, before)  # no gradient and no decay
