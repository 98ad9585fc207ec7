"""The loop: what a step computes, what a run leaves behind, and that going on equals never having stopped."""

import dataclasses
import json
import math
import os
import signal

import pytest
import torch
from torch import nn

from sympow.data import DataConfig
from sympow.layers.auxiliary import add_auxiliary_loss
from sympow.models import LanguageModel
from sympow.training import (
    CheckpointError,
    ExecutionConfig,
    RunConfig,
    latest,
    load_checkpoint,
    load_model,
    read_metrics,
    train,
    trainer,
)
from sympow.training.checkpoint import list_checkpoints
from sympow.training.ranks import Part
from sympow.training.run_folder import clear_run_folder, open_run_folder
from sympow.training.step import held_out_loss, make_pass, train_step
from sympow.training.throughput import token_flops
from tests.ops.contract import DEVICE

CPU = torch.device("cpu")


def equal(a, b) -> bool:
    """Bitwise equality of nested tensors."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same_end(first, second) -> bool:
    """Whether two run folders end with the same weights, optimizer, position, generators and metrics."""
    a, b = load_checkpoint(latest(first)), load_checkpoint(latest(second))
    times = {"seconds", "tokens_per_second"}
    rows = [[{k: v for k, v in row.items() if k not in times} for row in read_metrics(run)] for run in (first, second)]
    names = [field.name for field in dataclasses.fields(a) if field.name != "seconds"]
    return rows[0] == rows[1] and all(equal(getattr(a, name), getattr(b, name)) for name in names)


class StopAfter:
    """Batches of which reading one past the end of step `step` sends this process a signal."""

    def __init__(self, batches, step, number=signal.SIGINT):
        self.batches, self.step, self.number = batches, step, number

    def __getitem__(self, index):
        if index == self.step:
            os.kill(os.getpid(), self.number)
        return self.batches[index]

    def __getattr__(self, name):
        return getattr(self.batches, name)


def test_a_run_learns_and_leaves_its_folder(tmp_path, make_config, make_batches):
    config = make_config(steps=60, checkpoint_every=20, keep_checkpoints=2, evaluate_every=25, log_every=10)
    held_out = make_batches(config, corpus_seed=1)
    result = train(config, make_batches(config), tmp_path / "run", held_out=held_out, quiet=True)
    assert (result.step, result.steps, result.stopped_by) == (60, 60, None)
    run = tmp_path / "run"
    assert json.loads((run / "config.json").read_text()) == config.to_dict()
    assert [path.name for path in list_checkpoints(run)] == ["step-00000040.pt", "step-00000060.pt"]
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [10, 20, 25, 30, 40, 50, 60]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [25, 50, 60]
    assert set(rows[0]) == {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds"}
    assert rows[-1]["loss"] == result.loss < rows[0]["loss"] - 0.3
    assert rows[-1]["held_out_loss"] < rows[2]["held_out_loss"] < math.log(17) + 0.2
    loaded = load_model(run)
    assert not loaded.model.training and loaded.step == 60 and loaded.config == config and loaded.run_dir == run
    assert held_out_loss(loaded.model, held_out, config.training, CPU) == rows[-1]["held_out_loss"]
    assert torch.equal(load_model(latest(run)).model.embedding.weight, loaded.model.embedding.weight)


def test_observers_see_the_model_where_it_is_evaluated(tmp_path, make_config, make_batches):
    config = make_config(steps=6, evaluate_every=4, checkpoint_every=6)
    held_out, seen = make_batches(config, corpus_seed=1), []

    def observe(model, step):
        seen.append((step, held_out_loss(model, held_out, config.training, CPU)))

    train(config, make_batches(config), tmp_path / "run", held_out=held_out, observe=observe, quiet=True)
    rows = read_metrics(tmp_path / "run")
    assert seen == [(row["step"], row["held_out_loss"]) for row in rows if "held_out_loss" in row] and len(seen) == 2


@pytest.mark.parametrize(
    ("mixer", "options", "model"),
    [
        ("power", {}, {}),
        ("softmax", {}, {}),
        ("selection", {"selection": "learned", "top_k": 4}, {}),
        ("power", {}, {"body": "llama", "n_kv_heads": 1, "tie_embeddings": False}),
        ("power", {}, {"body": "rwkv7"}),
    ],
)
def test_stopped_and_continued_equals_uninterrupted(tmp_path, make_config, make_batches, mixer, options, model):
    config = make_config(mixer, options, model, steps=12, checkpoint_every=5, evaluate_every=3)
    batches, held_out = make_batches(config), make_batches(config, corpus_seed=1)
    train(config, batches, tmp_path / "whole", held_out=held_out, quiet=True)
    stops = [(3, signal.SIGINT, "SIGINT"), (8, signal.SIGTERM, "SIGTERM")]
    for step, number, name in stops:
        stopping = StopAfter(batches, step, number)
        result = train(config, stopping, tmp_path / "parts", held_out=held_out, quiet=True)
        assert result.stopped_by == name and result.step in (step, step + 1)  # batches are read ahead
        assert load_checkpoint(latest(tmp_path / "parts")).step == result.step
    assert train(config, batches, tmp_path / "parts", held_out=held_out, quiet=True).step == 12
    assert same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("pack", [True, False])
def test_short_rows_come_first(tmp_path, make_config, make_batches, monkeypatch, pack):
    """The first half of the steps has the tokens of whole rows in pieces of 4; a run that continues has them, too."""
    config = make_config(steps=12, short_context=4, short_share=0.5)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, pack=pack))
    batches, seen = make_batches(config), []
    real = LanguageModel.loss_sum

    def loss_sum(model, tokens, targets, *, cu_seqlens=None, **more):
        seen.append((tokens, cu_seqlens))
        return real(model, tokens, targets, cu_seqlens=cu_seqlens, **more)

    monkeypatch.setattr(LanguageModel, "loss_sum", loss_sum)
    train(config, batches, tmp_path / "whole", quiet=True)
    assert len(seen) == 12
    for step, (tokens, borders) in enumerate(seen):
        whole, _, before = batches[step]
        assert torch.equal(tokens.flatten(), whole.flatten())
        if before is None:
            assert borders is None and tokens.shape == ((8, 4) if step < 6 else (2, 16))
        else:
            pieces = set(range(0, 33, 4)) if step < 6 else set()
            assert set(borders.tolist()) == pieces | set(before.tolist()) and borders.dtype == before.dtype
            assert borders.tolist() == sorted(borders.tolist())
    train(config, StopAfter(batches, 3), tmp_path / "parts", quiet=True)
    train(config, batches, tmp_path / "parts", quiet=True)
    assert same_end(tmp_path / "whole", tmp_path / "parts")


def test_the_seed_decides_everything_and_nothing_else_is_touched(tmp_path, make_config, make_batches):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = make_config(steps=3, seed=seed)
        train(config, make_batches(config), tmp_path / name, quiet=True)
        torch.rand(1)
    assert same_end(tmp_path / "a", tmp_path / "b")
    weights = [load_model(tmp_path / name).model.embedding.weight for name in "ac"]
    assert not torch.equal(*weights)
    before = torch.manual_seed(1234).get_state()
    train(make_config(steps=1, warmup_steps=1), make_batches(make_config()), tmp_path / "d", quiet=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_auxiliary_losses_are_trained_on_and_not_reported(tmp_path, make_config, make_batches, monkeypatch):
    config = make_config(steps=1, warmup_steps=1)
    train(config, make_batches(config), tmp_path / "plain", quiet=True)
    real = LanguageModel.loss_sum

    def loss_sum(model, *arguments, **options):
        add_auxiliary_loss(100 * model.embedding.weight.sum())
        return real(model, *arguments, **options)

    monkeypatch.setattr(LanguageModel, "loss_sum", loss_sum)
    train(config, make_batches(config), tmp_path / "extra", quiet=True)
    (plain,), (extra,) = read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "extra")
    assert extra["loss"] == plain["loss"]
    assert extra["grad_norm"] == pytest.approx(100 * math.sqrt(17 * 16), rel=0.05)


def test_generators_continue(tmp_path, make_config, make_batches, monkeypatch):
    """A model with dropout would draw from torch's generator: here every loss does."""
    real = LanguageModel.loss_sum

    def noisy(*arguments, **options):
        return real(*arguments, **options) * (1 + 0.1 * torch.rand(()))

    monkeypatch.setattr(LanguageModel, "loss_sum", noisy)
    config = make_config(steps=8, checkpoint_every=3)
    batches = make_batches(config)
    train(config, batches, tmp_path / "whole", quiet=True)
    train(config, StopAfter(batches, 4), tmp_path / "parts", quiet=True)
    train(config, batches, tmp_path / "parts", quiet=True)
    assert same_end(tmp_path / "whole", tmp_path / "parts")


def gradient(config, batches, monkeypatch) -> tuple[float, torch.Tensor]:
    """Loss of one step over the given batches, and the gradient of the embedding before clipping."""
    model = LanguageModel(config.model, seed=0)
    seen = []

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(model.embedding.weight.grad.clone())

    optimizer = Recorder(model.parameters(), lr=0.1)
    passes = [make_pass(batch, model, CPU) for batch in batches]
    loss, _, targets = train_step(model, optimizer, passes, 0.1, config.training, CPU).read()
    assert targets == sum(int((batch.targets != -100).sum()) for batch in batches)
    assert all(parameter.grad is None for parameter in model.parameters())
    return loss, seen[0]


def test_the_loss_of_a_step_is_the_mean_over_its_targets(make_config, make_batches, monkeypatch):
    """However they fall into passes, also where some rows have fewer targets than others."""
    config = make_config(clip=1e9)
    batch = next(batch for batch in map(make_batches(config).__getitem__, range(50)) if batch.cu_seqlens is None)
    targets = batch.targets.clone()
    targets[0, 3:] = -100
    whole = batch._replace(targets=targets)
    rows = [whole._replace(tokens=whole.tokens[i : i + 1], targets=targets[i : i + 1]) for i in range(2)]
    loss, grad = gradient(config, [whole], monkeypatch)
    split_loss, split_grad = gradient(config, rows, monkeypatch)
    assert split_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(split_grad, grad, rtol=1e-4, atol=1e-7)
    model = LanguageModel(config.model, seed=0)
    assert loss == pytest.approx(float(model.token_losses(whole.tokens, targets).sum().detach()) / 19, rel=1e-6)


@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"tokens": torch.full((2, 16), 17)}, ValueError, "tokens must lie in a vocabulary of 17 tokens; got 17"),
        ({"targets": torch.full((2, 16), -7)}, ValueError, "targets must lie in a vocabulary of 17 tokens; got -7"),
        ({"tokens": torch.zeros(2, 16)}, TypeError, "tokens must be int64; got torch.float32"),
        ({"targets": torch.full((2, 16), -100)}, ValueError, "every target of this one is -100"),
    ],
)
def test_bad_batches_are_refused(tmp_path, make_config, bad, error, message, device):
    good = Part(torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64))

    class Third:
        def __getitem__(self, index):
            return good._replace(**bad) if index == 2 else good

    with pytest.raises(error, match=message):
        train(make_config(device=device), Third(), tmp_path / "run", quiet=True)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]


def test_passes_for_a_gpu_are_checked_and_pinned_on_the_host(make_config):
    model = LanguageModel(make_config().model, seed=0)
    rows = Part(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[1, -100, 17]]), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="targets must lie in a vocabulary of 17 tokens; got 17"):
        make_pass(rows, model, torch.device("meta"))
    assert make_pass(rows, model, CPU) == (rows, 2)  # a model on the CPU looks at them itself
    if DEVICE == "cuda":
        rows.targets[0, 2] = 16
        made = make_pass(rows, model, torch.device("cuda"))
        assert made.targets == 2 and all(tensor.is_pinned() for tensor in made.rows)


def test_the_held_out_loss_is_taken_in_evaluation_mode(tmp_path, make_config, make_batches, monkeypatch):
    real, modes = LanguageModel.loss_sum, []

    def observed(model, *rest, **options):
        modes.append((model.training, torch.is_grad_enabled()))
        return real(model, *rest, **options)

    monkeypatch.setattr(LanguageModel, "loss_sum", observed)
    config = make_config(steps=3, evaluate_every=2, evaluation_batches=1)
    train(config, make_batches(config), tmp_path / "run", held_out=make_batches(config), quiet=True)
    training, evaluating = (True, True), (False, False)
    assert modes == [training, training, evaluating, training, evaluating]


def test_gradients_are_clipped(tmp_path, make_config, make_batches, monkeypatch):
    norms = []
    real = torch.nn.utils.clip_grad_norm_

    def clip(parameters, largest):
        parameters = list(parameters)
        norm = real(parameters, largest)
        norms.append(float(torch.sqrt(sum((p.grad**2).sum() for p in parameters))))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    config = make_config(steps=3, clip=0.01)
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    assert norms == pytest.approx([0.01] * 3, rel=1e-3)
    assert all(row["grad_norm"] > 0.1 for row in read_metrics(tmp_path / "run"))


def test_micro_batches_give_their_rows_in_order(tmp_path, make_config, make_batches):
    config = make_config(steps=4, batch_size=6, micro_batch_size=2, checkpoint_every=2)
    batches, read = make_batches(config), []

    class Listed(StopAfter):
        def __getitem__(self, index):
            read.append(index)
            return self.batches[index]

    train(config, Listed(batches, -1), tmp_path / "run", quiet=True)
    assert read == list(range(12))
    checkpoint = load_checkpoint(latest(tmp_path / "run"))
    assert checkpoint.data == {"batches": batches.state(), "position": 12}


def test_bf16_keeps_weights_in_float32(tmp_path, make_config, make_batches):
    config = make_config(steps=3, precision="bf16")
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    checkpoint = load_checkpoint(latest(tmp_path / "run"))
    assert {tensor.dtype for tensor in checkpoint.model.values()} == {torch.float32}
    full = make_config(steps=3)
    train(full, make_batches(full), tmp_path / "full", quiet=True)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("run", "full")]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]


def test_a_step_without_targets_is_refused(make_config, make_batches):
    config = make_config()
    batch = make_batches(config)[0]
    with pytest.raises(ValueError, match="a training step needs at least one target"):
        gradient(config, [batch._replace(targets=torch.full_like(batch.targets, -100))], None)


def test_another_config_is_refused_by_its_first_field(tmp_path, make_config, make_batches):
    config = make_config(steps=4)
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    for field, value in (("steps", 8), ("learning_rate", 0.5), ("seed", 3)):
        other = make_config(**{"steps": 4, field: value})
        with pytest.raises(ValueError, match=rf"holds a run with training.{field} = .*, not {value}: ") as caught:
            train(other, make_batches(other), tmp_path / "run", quiet=True)
        assert "\n" not in str(caught.value)


def test_a_run_goes_on_without_the_fraction_that_has_no_effect(tmp_path, make_config, make_batches):
    """Of held-out documents, beside their path: commands refuse it now, and older runs were started with it."""
    data = DataConfig(kind="text", path="a", held_out_path="b", tokenizer="bytes")
    config = dataclasses.replace(make_config(steps=8, checkpoint_every=4), data=data)
    older = dataclasses.replace(config, data=dataclasses.replace(data, held_out=0.3, seed=4))
    assert train(older, StopAfter(make_batches(older), 5), tmp_path / "run", quiet=True).step < 8
    assert train(config, make_batches(config), tmp_path / "run", quiet=True).step == 8
    assert load_model(tmp_path / "run").config == config
    other = dataclasses.replace(config, data=dataclasses.replace(data, held_out_path="c", held_out=0.3))
    with pytest.raises(ValueError, match=r"holds a run with data\.held_out_path = 'b', not 'c'"):
        train(other, make_batches(other), tmp_path / "run", quiet=True)


def test_an_older_run_goes_on(tmp_path, make_config, make_batches):
    """One whose config has no fields of bodies, in its folder and in its checkpoints."""
    old = make_config(steps=4, checkpoint_every=2).to_dict()
    for name in ("body", "n_kv_heads", "tie_embeddings"):
        del old["model"][name]
    config, run = RunConfig.from_dict(old), tmp_path / "run"
    train(config, make_batches(config), run, quiet=True)
    list_checkpoints(run)[-1].unlink()
    (run / "config.json").write_text(json.dumps(old))
    checkpoint = torch.load(latest(run), weights_only=False)
    torch.save(checkpoint | {"config": old}, latest(run))
    assert train(config, make_batches(config), run, quiet=True).step == 4
    assert load_model(run).config == config
    other = make_config(model={"body": "llama"}, steps=4, checkpoint_every=2)
    with pytest.raises(ValueError, match=r"with model.body = 'gpt2', not 'llama': "):
        train(other, make_batches(other), run, quiet=True)


def test_a_run_goes_on_however_it_is_executed(tmp_path, make_config, make_batches):
    config, run = make_config(steps=4, checkpoint_every=2), tmp_path / "run"
    train(config, make_batches(config), tmp_path / "whole", quiet=True)
    train(config, make_batches(config), run, quiet=True)
    list_checkpoints(run)[-1].unlink()
    other = dataclasses.replace(config, execution=ExecutionConfig(checkpoint_activations=True))
    assert train(other, make_batches(config), run, quiet=True).step == 4
    assert json.loads((run / "config.json").read_text()) == other.to_dict() == load_checkpoint(latest(run)).config
    assert read_metrics(run)[-1]["loss"] == pytest.approx(read_metrics(tmp_path / "whole")[-1]["loss"], rel=1e-6)


def test_steps_are_traced(tmp_path, make_config, make_batches):
    config = dataclasses.replace(make_config(steps=6), execution=ExecutionConfig(profile_steps=2))
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    events = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    clear_run_folder(tmp_path / "run")
    assert list((tmp_path / "run").glob("[!.]*")) == []


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
def test_parts_are_compiled(tmp_path, make_config, make_batches, monkeypatch):
    compiled = []

    def compile_part(self, **options):  # with a backend that needs no compiler
        compiled.append(type(self).__name__)
        real(self, backend="eager", **options)

    real = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", compile_part)
    config = make_config("softmax", steps=3)
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    fast = dataclasses.replace(config, execution=ExecutionConfig(compile=True))
    train(fast, make_batches(config), tmp_path / "compiled", quiet=True)
    assert compiled == ["GPT2Block", "LayerNorm", "LayerNorm", "CrossEntropy", "Divergence"]
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("run", "compiled")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert load_model(tmp_path / "compiled").step == 3


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
@pytest.mark.parametrize(("pack", "dynamic"), [(False, False), (True, None)])
def test_rows_of_two_lengths_have_graphs_of_their_own(tmp_path, make_config, make_batches, monkeypatch, pack, dynamic):
    """Not where documents are packed: the number of their borders changes at every step."""
    given = set()

    def compile_part(self, **options):  # with a backend that needs no compiler
        given.add(options["dynamic"])
        real(self, backend="eager", **options)

    real = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", compile_part)
    config = make_config("softmax", steps=4, short_context=4, short_share=0.5)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, pack=pack))
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    fast = dataclasses.replace(config, execution=ExecutionConfig(compile=True))
    train(fast, make_batches(config), tmp_path / "compiled", quiet=True)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("run", "compiled")]
    assert given == {dynamic} and losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_utilization_is_logged_where_the_peak_is_known(tmp_path, make_config, make_batches, monkeypatch):
    config = make_config(steps=2)
    monkeypatch.setattr(trainer, "peak_flops", lambda device, precision: 1e9)
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    flops = token_flops(LanguageModel(config.model, seed=0), config.training.context)
    for row in read_metrics(tmp_path / "run"):
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 1e9)


def test_a_folder_without_a_checkpoint_takes_another_config(tmp_path, make_config, make_batches):
    stopped = make_config(steps=4, batch_size=0 + 1)
    with open_run_folder(tmp_path / "run", stopped):
        pass
    (tmp_path / "run" / "tokenizer.json").write_text("of the other config")
    config = make_config(steps=4)
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    assert load_model(tmp_path / "run").config == config
    assert not (tmp_path / "run" / "tokenizer.json").exists()


def test_other_data_are_refused(tmp_path, make_config, make_batches):
    config = make_config()
    train(config, StopAfter(make_batches(config), 5), tmp_path / "run", quiet=True)
    message = r"^documents: the data are not those of the checkpoint: corpus was .*; give the earlier ones, remove the"
    with pytest.raises(ValueError, match=message):
        train(config, make_batches(config, corpus_seed=1), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(("width", "told"), [(16, True), (64, False)])
def test_muon_that_moves_nothing_is_told(tmp_path, make_config, make_batches, capsys, width, told):
    config = make_config(steps=2, optimizer="muon", model={"d_model": width})
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    assert ("and the model trains none; AdamW moves all" in capsys.readouterr().err) == told


def test_other_held_out_data_are_refused(tmp_path, make_config, make_batches):
    config = make_config(steps=8)
    batches, other = make_batches(config), make_batches(config, corpus_seed=1)
    train(config, StopAfter(batches, 5), tmp_path / "run", held_out=batches, quiet=True)
    with pytest.raises(ValueError, match=r"^held-out documents: the data are not those of the"):
        train(config, batches, tmp_path / "run", held_out=other, quiet=True)
    path = latest(tmp_path / "run")
    older = torch.load(path, weights_only=True)
    del older["data"]["held_out"]
    torch.save(older, path)
    assert train(config, batches, tmp_path / "run", held_out=other, quiet=True).step == 8


def test_a_checkpoint_of_another_run_is_refused(tmp_path, make_config, make_batches):
    config, other = make_config(), make_config("softmax")
    train(config, StopAfter(make_batches(config), 5), tmp_path / "run", quiet=True)
    train(other, StopAfter(make_batches(other), 7), tmp_path / "other", quiet=True)
    foreign = latest(tmp_path / "other")
    moved = tmp_path / "run" / "checkpoints" / foreign.name
    foreign.rename(moved)
    with pytest.raises(ValueError, match=r"step-.*pt holds a run with model.mixers.0.name = 'softmax', not 'power'"):
        train(config, make_batches(config), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("optimizer", "holds no state of this run's optimizer and generators"),
        ("rng", "holds no state of this run's optimizer and generators"),
        ("data", "the data are not those of the checkpoint"),
    ],
)
def test_a_checkpoint_with_an_empty_part_is_refused(tmp_path, make_config, make_batches, part, message):
    config = make_config()
    train(config, StopAfter(make_batches(config), 5), tmp_path / "run", quiet=True)
    path = latest(tmp_path / "run")
    torch.save({**torch.load(path, weights_only=True), part: {}}, path)
    with pytest.raises((CheckpointError, ValueError), match=message):
        train(config, make_batches(config), tmp_path / "run", quiet=True)


def test_a_truncated_checkpoint_is_refused_not_skipped(tmp_path, make_config, make_batches):
    config = make_config(steps=12)
    train(config, StopAfter(make_batches(config), 9), tmp_path / "run", quiet=True)
    *_, older, newest = list_checkpoints(tmp_path / "run")
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.raises(CheckpointError) as caught:
        train(config, make_batches(config), tmp_path / "run", quiet=True)
    assert str(caught.value) == f"{newest} is truncated; remove it to continue from {older}"
    newest.unlink()
    assert train(config, make_batches(config), tmp_path / "run", quiet=True).step == 12


def test_a_folder_of_something_else_is_refused(tmp_path, make_config, make_batches):
    config = make_config()
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FileExistsError, match="holds other things than a run"):
        train(config, make_batches(config), tmp_path, quiet=True)
    with pytest.raises(FileExistsError, match=r"thesis.tex is a file; a run needs a folder"):
        train(config, make_batches(config), tmp_path / "thesis.tex", quiet=True)
    with pytest.raises(FileNotFoundError, match=r"no run at .* nothing in it is removed"):
        clear_run_folder(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_clearing_removes_only_what_a_run_wrote(tmp_path, make_config, make_batches):
    config = make_config(steps=4)
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    held = sorted((tmp_path / "run").iterdir())
    notes = tmp_path / "run" / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"other files than those of a run, notes.txt: move them first"):
        clear_run_folder(tmp_path / "run")
    assert sorted((tmp_path / "run").iterdir()) == sorted([*held, notes])
    notes.unlink()
    clear_run_folder(tmp_path / "run")
    assert list((tmp_path / "run").glob("[!.]*")) == []
    clear_run_folder(tmp_path / "nothing here")


def test_loading_what_is_no_run(tmp_path, make_config, make_batches):
    with pytest.raises(FileNotFoundError, match=r"it has no config.json"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_model(tmp_path / "nothing")
    with open_run_folder(tmp_path / "run", make_config()):
        pass
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        load_model(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"name": ')
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        load_model(tmp_path / "run")
