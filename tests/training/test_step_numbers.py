"""The numbers of a step are read after the next step is launched, and before anything depends on them."""

import dataclasses
import itertools
import math
import os
import signal
from functools import partial
from unittest import mock

import pytest
import torch

from sympow.layers.auxiliary import add_auxiliary_loss
from sympow.models import LanguageModel
from sympow.training import NonFiniteError, latest, load_checkpoint, read_metrics, train, trainer
from sympow.training.checkpoint import list_checkpoints
from sympow.training.optimizer import learning_rate, make_optimizer
from sympow.training.step import make_pass, train_step
from tests.ops.contract import DEVICE
from tests.ranks import run_ranks

NEVER = 100  # steps, more than a run has


def as_on_a_gpu(launching=lambda step: None, reading=lambda: None):
    """Within this, a step has an event that the loop awaits to read it, although the CPU computes it at its launch.

    `launching(n)` is called before the n-th step is launched, counted from 1, and `reading()` before a step is read.
    """
    event, steps = mock.Mock(synchronize=reading), itertools.count(1)

    def launch(*arguments):
        launching(next(steps))
        return dataclasses.replace(train_step(*arguments), copied=event)

    return mock.patch.object(trainer, "train_step", launch)


def change_losses(change):
    """Within this, the loss of the n-th pass of training is `change(loss, n)`, counted from 1."""
    real, passes = LanguageModel.loss_sum, itertools.count(1)

    def loss_sum(*arguments, **options):
        loss = real(*arguments, **options)
        return change(loss, next(passes)) if torch.is_grad_enabled() else loss

    return mock.patch.object(LanguageModel, "loss_sum", loss_sum)


def poison(bad: int):
    return change_losses(lambda loss, step: loss * (math.inf if step == bad else 1))


@pytest.fixture
def make_config(make_config):
    """As elsewhere, but nothing is due unless it is asked for, and on the CPU, whose numbers need no event."""
    never = dict.fromkeys(("log_every", "checkpoint_every", "evaluate_every"), NEVER)
    return partial(make_config, **never, device="cpu")


@pytest.mark.parametrize(
    ("due", "expected"),
    [
        ({}, "L LR LR LR LR LR LRR"),
        ({"log_every": 3}, "L LR LRR L LR LRR LR"),
        ({"checkpoint_every": 5}, "L LR LR LR LRR L LRR"),
        ({"evaluate_every": 4}, "L LR LR LRRO L LR LRRO"),
        ({"log_every": 1, "evaluate_every": 6}, "LR LR LR LR LR LRO LRO"),
    ],
    ids=str,
)
def test_a_step_is_read_when_the_next_is_launched_or_something_is_due(
    tmp_path, make_config, make_batches, due, expected
):
    """L: a launch, R: a read, O: an observer, before which all steps are read."""
    config, order = make_config(steps=7, **due), []
    observe = (lambda model, step: order.append("O")) if "evaluate_every" in due else None
    with as_on_a_gpu(lambda step: order.append("L"), lambda: order.append("R")):
        train(config, make_batches(config), tmp_path / "run", observe=observe, quiet=True)
    assert "".join(order) == expected.replace(" ", "")


def test_rows_and_checkpoints_hold_the_numbers_of_their_own_step(tmp_path, make_config, make_batches):
    """However many steps pass between them."""

    def rows(every: int) -> dict[int, dict]:
        config = make_config(steps=12, log_every=every, checkpoint_every=4, evaluate_every=6)
        run = tmp_path / str(every)
        held_out = make_batches(config, corpus_seed=1)
        result = train(config, make_batches(config), run, held_out=held_out, quiet=True)
        found = {row["step"]: {k: v for k, v in row.items() if "second" not in k} for row in read_metrics(run)}
        assert result.loss == found[12]["loss"] and load_checkpoint(latest(run)).tokens == found[12]["tokens"]
        assert [row["lr"] for row in found.values()] == [learning_rate(step - 1, config.training) for step in found]
        return found

    at_once = rows(1)
    with as_on_a_gpu():
        late = rows(5)
    assert list(late) == [5, 6, 10, 12] and late == {step: at_once[step] for step in late}
    batches = make_batches(make_config())
    targets = [int((batches[index].targets != -100).sum()) for index in range(12)]
    assert [row["tokens"] for row in at_once.values()] == list(itertools.accumulate(targets))


def test_a_stopped_run_saves_the_step_that_was_launched_last_and_continues(tmp_path, make_config, make_batches):
    config = make_config(steps=8, log_every=3)
    batches = make_batches(config)

    def stop(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    train(config, batches, tmp_path / "whole", quiet=True)
    with as_on_a_gpu(stop):
        result = train(config, batches, tmp_path / "parts", quiet=True)
        assert (result.step, result.stopped_by) == (4, "SIGINT") and result.loss is not None
        assert load_checkpoint(latest(tmp_path / "parts")).step == 4
        assert train(config, batches, tmp_path / "parts", quiet=True).step == 8
    ends = [load_checkpoint(latest(tmp_path / name)) for name in ("parts", "whole")]
    parts, whole = ((end.model, end.optimizer, end.tokens, end.rng) for end in ends)
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    parts, whole = (
        [(row["step"], row["loss"], row["lr"], row["tokens"]) for row in read_metrics(tmp_path / name)]
        for name in ("parts", "whole")
    )
    assert parts == whole and len(whole) == 3


def test_the_time_is_that_of_steps_alone(tmp_path, make_config, make_batches, monkeypatch):
    """On a clock: launches take 1 s and reads 2 s, and an observer and a checkpoint far more."""
    now = [0.0]

    def passes(seconds: float, *_):
        now[0] += seconds

    def save(*arguments):
        passes(1000)
        real(*arguments)

    real = trainer.save_checkpoint
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trainer, "save_checkpoint", save)
    config = make_config(steps=9, log_every=4, checkpoint_every=3, evaluate_every=5)
    with as_on_a_gpu(partial(passes, 1), partial(passes, 2)):
        train(config, make_batches(config), tmp_path / "run", observe=partial(passes, 1000), quiet=True)
    rows = read_metrics(tmp_path / "run")
    assert [(row["step"], row["seconds"]) for row in rows] == [(4, 12), (8, 24), (9, 27)]
    tokens = [row["tokens"] for row in rows]
    speeds = [tokens[0] / 12, (tokens[1] - tokens[0]) / 12, (tokens[2] - tokens[1]) / 3]
    assert [row["tokens_per_second"] for row in rows] == pytest.approx(speeds)
    assert load_checkpoint(latest(tmp_path / "run")).seconds == 27


@pytest.mark.parametrize(
    ("bad", "launched", "due"),
    [
        (5, 6, {}),  # the next step would be saved
        (6, 6, {}),  # it would be saved itself
        (7, 8, {}),
        (5, 5, {"log_every": 5}),
        (5, 5, {"evaluate_every": 5}),
        (12, 12, {}),  # the last step
    ],
)
def test_a_step_that_is_not_finite_is_named_and_not_saved(tmp_path, make_config, make_batches, bad, launched, due):
    config = make_config("softmax", steps=12, checkpoint_every=3, **due)
    launches, observe = [], mock.Mock()
    with poison(bad), as_on_a_gpu(launches.append), pytest.raises(NonFiniteError) as caught:
        train(config, make_batches(config), tmp_path / "run", observe=observe, quiet=True)
    assert f" at step {bad} (learning rate {learning_rate(bad - 1, config.training):.3g}); " in str(caught.value)
    saved = list_checkpoints(tmp_path / "run")
    kept = f"the last checkpoint: {saved[-1]}"
    if bad == 7:  # no loss was computed with the weights of step 6 before
        kept = f"the last good checkpoint: {saved[0]}, because the step began with the weights of {saved[1]}"
    assert str(caught.value).endswith(f"; {kept}")
    assert len(launches) == launched and load_checkpoint(latest(tmp_path / "run")).step == (bad - 1) // 3 * 3
    observe.assert_not_called()
    assert read_metrics(tmp_path / "run") == []


def test_the_cpu_launches_no_step_after_one_that_is_not_finite(tmp_path, make_config, make_batches):
    """Power attention on the CPU refuses a gate that is not finite, with an error of its own."""
    config = make_config("power", steps=4)
    with poison(2), pytest.raises(NonFiniteError, match=" at step 2 "):
        train(config, make_batches(config), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("rate", "step", "due", "found"),
    [
        (1e30, 2, {}, r"\(the input of PowerAttention is not finite\)"),
        (1e6, 2, {}, r"\(the sums of .* leave the range of torch.float32: .*\)"),
        (1e39, 1, {}, r"\(value cannot be converted to type float without overflow\)"),  # by the optimizer
        (1e30, 1, {"evaluate_every": 1}, r"\(the input of PowerAttention is not finite\)"),
    ],
)
def test_a_component_that_refuses_numbers_out_of_range_reports_divergence(
    tmp_path, make_config, make_batches, rate, step, due, found
):
    config = make_config("power", steps=4, warmup_steps=1, learning_rate=rate, **due)
    message = (
        rf"^numbers of the model are out of range {found} at step {step} \(learning rate .*the last checkpoint: none$"
    )
    with pytest.raises(NonFiniteError, match=message):
        train(config, make_batches(config), tmp_path / "run", held_out=make_batches(config), quiet=True)


@pytest.mark.parametrize("message", ["no rows of packed documents", "an option must be finite; got nan"])
def test_other_errors_of_components_stay_what_they_are(tmp_path, make_config, make_batches, message):
    def refuse(loss, step):
        raise ValueError(message)

    config = make_config("softmax")
    with change_losses(refuse), pytest.raises(ValueError, match=f"^{message}$"):
        train(config, make_batches(config), tmp_path / "run", quiet=True)


def unbounded_gradient(loss: torch.Tensor) -> torch.Tensor:
    add_auxiliary_loss(loss * math.inf)  # which is not part of the loss
    return loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unbounded_gradient, r"^the loss is \d\S* and the norm of its gradient (inf|nan) at step 2 "),
        (lambda loss: loss + math.inf, r"^the loss is inf and the norm of its gradient \d\S* at step 2 "),
    ],
)
def test_a_loss_or_a_gradient_alone_can_be_what_is_not_finite(tmp_path, make_config, make_batches, change, message):
    config = make_config("softmax", steps=4)
    changing = change_losses(lambda loss, step: change(loss) if step == 2 else loss)
    with changing, as_on_a_gpu(), pytest.raises(NonFiniteError, match=message):
        train(config, make_batches(config), tmp_path / "run", quiet=True)


@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
def test_numbers_stay_those_of_their_step(make_config, make_batches, device):
    """Also when later steps are launched before they are read."""
    config, device = make_config(), torch.device(device)
    batches = make_batches(config)

    def start():
        model = LanguageModel(config.model, seed=0).to(device)
        optimizer = make_optimizer(model, config.training)

        def launch(step):
            passes = [make_pass(batches[step], model, device)]
            return train_step(model, optimizer, passes, 0.1, config.training, device)

        return launch

    at_once, late = start(), start()
    expected = [at_once(step).read() for step in range(3)]
    found = [numbers.read() for numbers in [late(step) for step in range(3)]]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=0)
    assert len({loss for loss, _, _ in expected}) == 3


def refused(config, batches, folder) -> str:
    bad = 5 if torch.distributed.get_rank() == 1 else NEVER
    with poison(bad), as_on_a_gpu(), pytest.raises(NonFiniteError) as caught:
        train(config, batches, folder, quiet=True)
    return str(caught.value)


def test_ranks_find_the_bad_step_of_one_of_them(tmp_path, make_config, make_batches):
    config = make_config("softmax", batch_size=2, micro_batch_size=1, steps=12, checkpoint_every=3)
    messages = run_ranks(refused, 2, config, make_batches(config), tmp_path / "run")
    assert len(set(messages)) == 1 and " at step 5 (learning rate " in messages[0]
    assert latest(tmp_path / "run").name == "step-00000003.shards"
