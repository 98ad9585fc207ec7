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


def rates(**fields):
    config = TrainingConfig(steps=100, warmup_steps=10, learning_rate=2.0, min_lr_ratio=0.1, **fields)
    return [learning_rate(step, config) for step in range(100)]


def test_other_schedules():
    rising = [0.2 * (i + 1) for i in range(10)]
    assert rates(schedule="constant") == pytest.approx(rising + [2.0] * 90, abs=1e-15)
    assert set(rates(schedule="constant")[9:]) == {2.0}
    assert rates(schedule="linear") == pytest.approx(rising + [2.0 - 1.8 * (i + 1) / 90 for i in range(90)])
    for fields, decay in (({}, 10), ({"decay_steps": 30}, 30)):
        falling = [2.0 - 1.8 * (i + 1) / decay for i in range(decay)]
        assert rates(schedule="wsd", **fields) == pytest.approx(rising + [2.0] * (90 - decay) + falling)
        assert set(rates(schedule="wsd", **fields)[9 : 100 - decay]) == {2.0}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (3, 2), (5, 5), (9, 0)])
def test_schedules_of_few_steps(schedule, steps, warmup):
    config = TrainingConfig(steps=steps, warmup_steps=warmup, learning_rate=1.0, schedule=schedule)
    found = [learning_rate(step, config) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in found)
    assert found[-1] == pytest.approx(1.0 if schedule == "constant" or warmup == steps else 0.1)


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
