"""One run of associative recall, as a function of its config that any scheduler can call."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from sympow.fields import unknown
from sympow.models import RecallModel
from sympow.progress import Progress
from sympow.recall.config import AnyTask, RecallConfig
from sympow.recall.rows import TEST, load, measure
from sympow.recall.steps import RecallTraining
from sympow.training.config import TRACKERS
from sympow.training.devices import resolve_device
from sympow.training.loop import run_steps
from sympow.training.trackers import open_tracker


def run(
    config: RecallConfig,
    *,
    device: str = "auto",
    compiled: bool = True,
    cuda_graphs: bool = True,
    quiet: bool = True,
    tracker: str | None = None,
) -> list[dict[str, Any]]:
    """Trains, validates after every epoch or more often, and tests once at the end. Returns a row for every test task.

    The test affects no choice: learning rates are chosen by validation accuracy. The column `validation_accuracies`
    contains the accuracies of all validations, in their order, as a JSON list.

    Args:
        config: the run.
        device: "auto" (CUDA if it is available, otherwise the CPU) or a torch device. The data is on this device, and
            the host does not wait for the device within an epoch.
        compiled: whether to compile the forward and backward pass of a training step with torch.compile on CUDA, once
            for each model and shape in a process. A mixer that cannot be compiled is trained without, with a warning.
        cuda_graphs: whether to replay training steps as CUDA graphs, which saves the time of kernel launches.
        quiet: show no progress on stderr.
        tracker: "wandb", "mlflow" or "comet_ml": send every validation and the results to that service.

    Raises RuntimeError where a mixer's step cannot be captured as a graph, ImportError where the tracker is not
    installed, and ValueError for an unknown one.
    """
    if tracker is not None and tracker not in TRACKERS:
        raise ValueError(unknown("tracker", tracker, TRACKERS))
    where = resolve_device(device)
    on_cuda = where.type == "cuda"
    began = time.perf_counter()
    with ExitStack() as stack:
        if on_cuda:
            stack.enter_context(torch.cuda.device(where))  # graphs and kernels go to the current one
        stack.enter_context(torch.random.fork_rng(devices=[where] if on_cuda else []))
        torch.manual_seed(config.seed)
        longest = max(task.length for task in config.train)
        positions = longest if config.architecture.positions else 0
        model = RecallModel(config.model, positions=positions, seed=config.seed).to(where)
        validations = config.epochs * config.validations
        progress = stack.enter_context(Progress("training", "validation", total=validations, quiet=quiet))
        tracked = open_tracker(tracker, config.id, asdict(config)) if tracker else None
        training = RecallTraining(
            config, model, where, compiled=compiled and on_cuda, graphs=cuda_graphs and on_cuda, progress=progress,
            tracker=tracked,
        )  # fmt: skip
        steps, ended = run_steps(training, 0, training.steps)
        rows = []
        for stream, task in enumerate(config.tests):
            key = (config.data_seed, TEST, stream)
            tested = measure(model, load((task,), config.test_examples, key, str(where)), config)
            result = {
                "steps": steps,
                "epochs_run": len(training.history) / config.validations,
                "ended": ended or "epochs over",
                "train_loss": training.train_loss,
                "validation_loss": training.validated.loss,
                "validation_accuracy": training.validated.accuracy,
                "validation_accuracies": json.dumps(training.history),
                "test_loss": tested.loss,
                "test_accuracy": tested.accuracy,
                "seconds": round(time.perf_counter() - began, 2),
                "device": torch.cuda.get_device_name(where) if on_cuda else where.type,
                "torch": torch.__version__,
            }
            rows.append(_described(config, task, model) | result)
            if tracked is not None:
                tracked.log({f"test_accuracy {task}": tested.accuracy}, step=steps)
        if tracked is not None:
            tracked.finish()
    return rows


def describe_tasks(tasks: Sequence[AnyTask]) -> str:
    """Describes tasks in short, "mqar 64:4 + mqar 128:8"."""
    return " + ".join(map(str, tasks))


def _described(config: RecallConfig, task: AnyTask, model: RecallModel) -> dict[str, Any]:
    """Returns what the run was, and the size of the model and of its state after the task's rows."""
    shape, architecture = config.model, config.architecture
    causal = all(block.mixer.causal for block in model.blocks)  # the others have no state
    state = model.state_size(task.length) if causal else None
    return {
        "run": config.id,
        "label": architecture.label,
        "mixers": " + ".join(f"{m.name} {m.options}" if m.options else m.name for m in shape.mixers),
        "width": config.width,
        "heads": shape.n_heads,
        "layers": shape.n_layers,
        "mlp_ratio": shape.mlp_ratio,
        "positions": architecture.positions,
        "train": describe_tasks(config.train),
        "test": describe_tasks([task]),
        "length": task.length,
        "pairs": task.pairs,
        "vocab_size": task.vocab_size,
        "learning_rate": config.learning_rate,
        "seed": config.seed,
        "data_seed": config.data_seed,
        "examples": config.examples,
        "epochs": config.epochs,
        "batch_size": config.batch,
        "optimizer": config.optimizer,
        "muon_rate": config.muon_rate,
        "weight_decay": config.weight_decay,
        "warmup": config.warmup,
        "stop_at": config.stop_at,
        "validations": config.validations,
        "precision": config.precision,
        "parameters": model.num_parameters(),
        "state_elements": state,
        "state_bytes": None if state is None else 4 * state,
    }
