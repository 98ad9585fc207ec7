"""A training that diverges: it ends with one line, and its last good checkpoint stays."""

import math

import pytest

from sympow.models import LanguageModel
from sympow.training import NonFiniteError, latest, load_checkpoint, train, trainer
from sympow.training.checkpoint import checkpoint_path, list_checkpoints


def test_non_finite_loss_stops_and_keeps_the_last_checkpoint(tmp_path, make_config, make_batches, monkeypatch):
    config = make_config(steps=12, checkpoint_every=2)
    real, calls = LanguageModel.loss_sum, []

    def poisoned(*arguments, **options):
        calls.append(1)
        return real(*arguments, **options) * (math.inf if len(calls) == 6 else 1)

    monkeypatch.setattr(LanguageModel, "loss_sum", poisoned)
    with pytest.raises(NonFiniteError) as caught:
        train(config, make_batches(config), tmp_path / "run", quiet=True)
    assert str(caught.value).startswith("the loss is inf and the norm of its gradient ")
    assert str(caught.value).endswith(f"the last checkpoint: {latest(tmp_path / 'run')}")
    assert latest(tmp_path / "run").name == "step-00000004.pt"
    weights = load_checkpoint(latest(tmp_path / "run")).model
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_checkpoint_that_a_step_has_ruined_does_not_replace_the_good_one(
    tmp_path, make_config, make_batches, monkeypatch
):
    """The loss of step 3 is finite, and the weights after it too, but they are so large that step 4 has no loss."""
    config = make_config("softmax", checkpoint_every=1, keep_checkpoints=1)
    real = trainer.learning_rate
    monkeypatch.setattr(trainer, "learning_rate", lambda step, *rest: 1e30 if step == 2 else real(step, *rest))
    for _ in range(2):  # also where the same command is repeated
        with pytest.raises(NonFiniteError) as caught:
            train(config, make_batches(config), tmp_path / "run", quiet=True)
        good, ruined = list_checkpoints(tmp_path / "run")
        assert (good.name, ruined.name) == ("step-00000002.pt", "step-00000003.pt")
        line = f"; the last good checkpoint: {good}, because the step began with the weights of {ruined}"
        assert "at step 4 " in str(caught.value) and str(caught.value).endswith(line)


def test_weights_that_are_not_finite_are_not_saved(tmp_path, make_config, make_batches, monkeypatch):
    config = make_config("softmax", steps=4, checkpoint_every=2, keep_checkpoints=1)
    real, calls = trainer.train_step, []

    def ruining(model, *arguments):
        numbers = real(model, *arguments)
        calls.append(1)
        if len(calls) == 4:
            model.embedding.weight.data[0, 0] = math.inf
        return numbers

    monkeypatch.setattr(trainer, "train_step", ruining)
    with pytest.raises(NonFiniteError) as caught:
        train(config, make_batches(config), tmp_path / "run", quiet=True)
    good = checkpoint_path(tmp_path / "run", 2)
    assert list_checkpoints(tmp_path / "run") == [good]
    assert str(caught.value).startswith("weights are not finite at step 4 ")
    assert str(caught.value).endswith(f"; the last checkpoint: {good}")


def test_checkpoints_are_as_many_as_asked_for_once_the_newest_has_a_loss(tmp_path, make_config, make_batches):
    """Which it has after the step that follows, or at once where the held-out loss is due too."""
    config = make_config(steps=7, checkpoint_every=2, evaluate_every=3, keep_checkpoints=1)
    batches, kept = make_batches(config), {}

    def saved(model, step):
        kept[step] = [int(path.name[5:13]) for path in list_checkpoints(tmp_path / "run")]

    train(config, batches, tmp_path / "run", held_out=batches, quiet=True, observe=saved)
    assert kept == {3: [2], 6: [4], 7: [6]}
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000007.pt"]
