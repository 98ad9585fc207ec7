"""A run learns, is a function of its config, and keeps its splits apart."""

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager, eager

from sympow.data.mqar import RecallTask, generate
from sympow.layers import MIXERS
from sympow.models import MixerConfig, RecallModel
from sympow.progress import Progress
from sympow.recall import Architecture, read_results, run, write_results
from sympow.recall.rows import load, measure
from sympow.recall.run import describe_tasks
from sympow.recall.steps import RecallTraining, compiled_loss
from sympow.recipes.mqar import widths
from sympow.training.config import TrainingConfig
from sympow.training.loop import run_steps
from sympow.training.optimizer import learning_rate

# Where there is a GPU, steps are replayed as graphs there too.
PLACES = [("cpu", False)] + [("cuda", graphs) for graphs in (False, True) if torch.cuda.is_available()]
VARIES = ("seconds",)
SILENT = Progress("training", quiet=True)


def without_times(rows):
    return [{name: value for name, value in row.items() if name not in VARIES} for row in rows]


@pytest.mark.parametrize(("device", "graphs"), PLACES)
def test_a_run_learns_and_reports(small, device, graphs):
    (row,) = run(small, device=device, cuda_graphs=graphs)
    assert row["test_accuracy"] > 0.95 and row["validation_accuracy"] > 0.95
    assert row["steps"] == 124 and row["epochs_run"] == 2 and row["ended"] == "epochs over"
    assert row["run"] == small.id and row["label"] == "attention" and row["test"] == row["train"] == "mqar 8:1"
    assert row["parameters"] == RecallModel(small.model, seed=0).num_parameters()
    assert row["state_bytes"] == 4 * row["state_elements"] == 4 * RecallModel(small.model).state_size(8)


def test_a_tracker_gets_every_validation_and_the_result(small, monkeypatch):
    opened, calls = [], []
    tracker = SimpleNamespace(log=lambda row, step: calls.append((step, row)), finish=lambda: calls.append("finished"))
    wandb = SimpleNamespace(init=lambda **options: opened.append(options) or tracker)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (row,) = run(replace(small, examples=320, validations=2), device="cpu", tracker="wandb")
    (options,) = opened
    assert options["name"] == row["run"] and options["config"]["width"] == row["width"]
    assert [call[0] for call in calls[:-1]] == [5, 10, 15, 20, 20] and calls[-1] == "finished"
    assert [call[1]["validation_accuracy"] for call in calls[:4]] == json.loads(row["validation_accuracies"])
    assert calls[4][1] == {"test_accuracy mqar 8:1": row["test_accuracy"]}
    with pytest.raises(ValueError, match="unknown tracker 'wandbb'; did you mean 'wandb'"):
        run(small, tracker="wandbb")


def test_a_run_is_a_function_of_its_config(small):
    short = replace(small, examples=320, epochs=1)
    before = torch.get_rng_state()
    one, same = run(short, device="cpu"), run(short, device="cpu")
    assert without_times(one) == without_times(same)
    assert torch.equal(torch.get_rng_state(), before)
    other = run(replace(short, seed=1), device="cpu")
    assert other[0]["train_loss"] != one[0]["train_loss"]


@pytest.mark.parametrize("device", sorted({device for device, _ in PLACES}))
def test_training_stops_where_validation_is_good_enough(small, device):
    (row,) = run(replace(small, stop_at=0.5, validations=4), device=device)
    assert row["ended"] == "solved" and row["validation_accuracy"] >= 0.5
    assert row["epochs_run"] < 2 and row["steps"] == pytest.approx(row["epochs_run"] * 62, abs=1)


@pytest.mark.parametrize("mixer", ["attention", "power"])
def test_a_run_that_diverges_says_so(small, mixer):
    """Also where a component refuses the numbers, as the gate of power attention does on a CPU."""
    if mixer == "power":
        small = replace(small, architecture=Architecture("power", (MixerConfig("power"),), mlp_ratio=0))
    (row,) = run(replace(small, examples=640, learning_rate=1e30), device="cpu")
    assert row["ended"] == "diverged" and not math.isfinite(row["train_loss"]) and row["test_accuracy"] < 0.5
    assert row["validation_accuracy"] < 0.5 and row["steps"] <= 20


def test_an_error_is_not_taken_for_divergence(small, monkeypatch):
    def broken(*_, **__):
        raise ValueError("x must be [B, T]")

    monkeypatch.setattr(RecallModel, "query_logits", broken)
    with pytest.raises(ValueError, match="x must be"):
        run(small, device="cpu")


def test_splits_and_seeds_are_different_rows(small):
    drawn = [generate(small.train[0], 200, [small.data_seed, split, 0]).tokens.tobytes() for split in (0, 1, 2)]
    assert len(set(drawn)) == 3
    (part,) = load(small.train, 200, (small.data_seed, 0), "cpu")
    assert part.tokens.numpy().tobytes() == drawn[0]


def test_mixtures_are_trained_together_and_tested_apart(small):
    tasks = (RecallTask(length=8, pairs=1, vocab_size=16), RecallTask(length=16, pairs=2, vocab_size=16))
    mixed = replace(small, train=tasks, test=(*tasks, RecallTask(length=24, pairs=1, vocab_size=16)), epochs=1)
    rows = run(mixed, device="cpu")
    assert [row["test"] for row in rows] == ["mqar 8:1", "mqar 16:2", "mqar 24:1"]
    assert {row["train"] for row in rows} == {"mqar 8:1 + mqar 16:2"}
    assert [row["length"] for row in rows] == [8, 16, 24]
    assert len({row["validation_accuracy"] for row in rows}) == 1 and rows[0]["steps"] == 62
    assert rows[0]["test_loss"] != rows[1]["test_loss"]


def trainer(config, compiled=False):
    model = RecallModel(config.model, seed=config.seed)
    return RecallTraining(config, model, torch.device("cpu"), compiled=compiled, graphs=False, progress=SILENT)


def test_an_epoch_takes_every_row_once_in_a_new_order(small, monkeypatch):
    config = replace(small, examples=320, train=small.train * 2, batch_size=32, validations=3)
    made = trainer(config)
    seen = []

    answer = made.model.query_logits

    def observed(tokens, places):
        seen.append(tokens)
        return answer(tokens, places)

    monkeypatch.setattr(made.model, "query_logits", observed)
    borders = []
    for step in range(20):
        made.take(step)
        before = len(made.history)
        batches = len(seen)
        made.end(step + 1)
        borders += [step + 1] * (len(made.history) - before)
        del seen[batches:]  # of the validation
    assert borders == [4, 7, 10, 14, 17, 20] and made.steps == 20
    drawn = sorted(row for part in made.parts for row in part.tokens.tolist())
    epochs = [[row for tokens in taken for row in tokens.tolist()] for taken in (seen[:10], seen[10:])]
    assert all(sorted(epoch) == drawn for epoch in epochs) and epochs[0] != epochs[1]


def test_the_learning_rate_rises_and_falls_to_zero(small):
    made = trainer(replace(small, warmup=0.1, epochs=1, examples=3200))
    settings = TrainingConfig(steps=100, warmup_steps=10, learning_rate=small.learning_rate, min_lr_ratio=0.0)
    assert made.rates.tolist() == pytest.approx([learning_rate(step, settings) for step in range(100)])
    assert made.rates.max() == pytest.approx(small.learning_rate) and made.rates[-1] == 0
    made.take(0)
    assert made.rate == made.rates[0] and all(group["lr"] == made.rate for group in made.optimizer.param_groups)
    assert [group["weight_decay"] for group in made.optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(("device", "graphs"), PLACES)
def test_muon_moves_the_matrices(small, device, graphs):
    """By the same rates as the other weights, which are on the device."""
    config = replace(small, width=64, optimizer="muon", muon_rate=2.0, epochs=1)
    model = RecallModel(config.model, seed=0).to(device)
    made = RecallTraining(config, model, torch.device(device), compiled=False, graphs=graphs, progress=SILENT)
    assert [group["weight_decay"] for group in made.optimizer.param_groups] == [0.1, 0.1, 0.0]
    matrices = made.optimizer.param_groups[0]
    assert len(matrices["params"]) == 4 and matrices["rows"] == [[64, 64, 64], [64]] * 2
    for step in range(6):
        before = [p.detach().clone() for p in matrices["params"]]
        made.take(step)
        rate = 2 * float(made.rate)
        for weight, start in zip(matrices["params"], before, strict=True):
            change = (weight.detach() - start * (1 - 0.1 * rate)).square().mean().sqrt() / rate
            assert 0.05 < change < 0.25  # 0.2 if all singular values of the average have become 1
    (row,) = run(config, device=device, cuda_graphs=graphs)
    assert (row["optimizer"], row["muon_rate"]) == ("muon", 2.0) and row["validation_accuracy"] > 0.5


def test_accuracy_counts_queries(small):
    """A model that answers one token always."""
    config = replace(small, train=(RecallTask(length=8, pairs=2, vocab_size=12),))
    model = RecallModel(config.model, seed=0)
    model.query_logits = lambda tokens, places: torch.eye(12)[8].expand(*places.shape, 12)
    parts = load(config.train, 500, (0, 1), "cpu")
    measured = measure(model, parts, config)
    assert measured.accuracy == pytest.approx((parts[0].labels == 8).float().mean().item())
    assert 0 < measured.accuracy < 0.5
    probability = math.e / (math.e + 11)
    expected = -measured.accuracy * math.log(probability) - (1 - measured.accuracy) * math.log((1 - probability) / 11)
    assert measured.loss == pytest.approx(expected, rel=1e-5)


def test_tasks_are_described_by_what_is_not_the_default():
    tasks = [RecallTask(), RecallTask("forgetting", updates=2, alpha=1.0), RecallTask(length=128, filler="random")]
    assert describe_tasks(tasks) == "mqar 64:4 + forgetting 64:4 2 updates alpha 1.0 + mqar 128:4 filler random"


def test_learned_positions_and_precision_take_part(small):
    plain = Architecture("attention", (MixerConfig("softmax", {"rotation": "none"}),), positions=True)
    (row,) = run(replace(small, architecture=plain, precision="bf16", examples=64, epochs=1), device="cpu")
    assert row["positions"] is True and row["precision"] == "bf16" and math.isfinite(row["train_loss"])


NEEDED = {"window": {"window": 4}, "hybrid_heads": {"window": 4}, "blocked_window": {"window": 4},
          "selection": {"selection": "learned", "top_k": 2}}  # fmt: skip


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_is_trained_and_measured(small, name):
    """What a mixer needs beside its options reaches it: lengths, tokens, auxiliary losses."""
    model = Architecture(name, (MixerConfig(name, NEEDED.get(name, {})),), mlp_ratio=0, heads=2)
    (row,) = run(replace(small, architecture=model, width=16, examples=64, epochs=1), device="cpu")
    assert row["steps"] == 2 and math.isfinite(row["train_loss"]) and math.isfinite(row["test_loss"])
    assert (row["state_bytes"] is None) == (name in ("programmatic_conv", "autocorrelation_conv"))


@pytest.fixture
def compilations(monkeypatch, request):
    """Traces what `run` compiles, forward alone or with the backward (aot_eager), and runs the graphs as they are:
    making machine code takes long. Returns the graphs."""
    graphs, then = [], getattr(request, "param", eager)

    def backend(graph, inputs):
        graphs.append(graph)
        return then(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled_loss.cache_clear()
    yield graphs
    compiled_loss.cache_clear()
    torch.compiler.reset()


ARCHITECTURES = {run.architecture.label: run.architecture for run in widths().runs}


@pytest.mark.parametrize(
    ("architecture", "compilations"),
    [(model, aot_eager if label in ("power p=2", "H3") else eager) for label, model in ARCHITECTURES.items()],
    ids=ARCHITECTURES,
    indirect=["compilations"],
)
def test_compiled_steps_are_the_same_and_compiled_once(small, compilations, architecture):
    """Whole, without a graph break; shared by seeds and rates, and not disturbed by validation between steps."""
    head_dim = architecture.head_dim and 8
    architecture = replace(architecture, head_dim=head_dim, layers=len(architecture.mixers))
    config = replace(small, architecture=architecture, width=8, examples=64)
    for changed in (config, replace(config, seed=1, learning_rate=1e-3)):
        plain, compiled = trainer(changed), trainer(changed, compiled=True)
        for made in (compiled, plain):
            assert run_steps(made, 0, made.steps) == (made.steps, None) and len(made.history) == 2
        assert compiled.train_loss == pytest.approx(plain.train_loss, rel=1e-4)
    assert len(compilations) == 1


def test_auxiliary_losses_are_not_lost_in_compiled_steps(small, compilations):
    learned = Architecture("learned", (MixerConfig("selection", NEEDED["selection"]),), mlp_ratio=0)
    config = replace(small, architecture=learned, examples=64, epochs=1)
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)  # of the noise that explores
        made = trainer(config, compiled)
        with pytest.warns(UserWarning, match="learned cannot be compiled") if compiled else nullcontext():
            run_steps(made, 0, made.steps)
        weights.append([p.detach() for p in made.model.parameters()])
    torch.testing.assert_close(*weights)


def test_models_and_shapes_are_compiled_apart(small, compilations):
    """More of them than a function may have variants."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (1, 2):
            trainer(replace(small, width=width, examples=32, epochs=1), compiled=True).take(0)
    assert len(compilations) == 2


def test_what_cannot_be_compiled_is_trained_as_it_is(small, monkeypatch):
    def refuse(function, **options):
        def fail(*arguments):
            raise RuntimeError("graph break\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", refuse)
    compiled_loss.cache_clear()
    config = replace(small, examples=64, epochs=1)
    made = trainer(config, compiled=True)
    with pytest.warns(UserWarning, match="^attention cannot be compiled and is trained as it is: graph break$") as told:
        run_steps(made, 0, made.steps)
    plain = trainer(config)
    run_steps(plain, 0, plain.steps)
    assert len(told) == 1 and made.train_loss == plain.train_loss
    compiled_loss.cache_clear()


def test_every_validation_accuracy_is_kept(small, tmp_path):
    (row,) = run(replace(small, examples=64, validations=2), device="cpu")
    history = json.loads(row["validation_accuracies"])
    assert len(history) == 4 and history[-1] == pytest.approx(row["validation_accuracy"], abs=1e-6)
    write_results(tmp_path / "results.csv", [row])
    assert read_results(tmp_path / "results.csv")[0]["validation_accuracies"] == row["validation_accuracies"]
