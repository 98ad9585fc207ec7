"""One run of associative recall: a plain function of its config, for any scheduler to call."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.data.mqar import mixture
from sympow.layers import auxiliary_losses
from sympow.models import RecallModel
from sympow.progress import Progress
from sympow.recall.config import AnyTask, RecallConfig
from sympow.training.config import TrainingConfig
from sympow.training.loop import autocast, resolve_device
from sympow.training.optimizer import learning_rate, parameter_groups

_Loss = Callable[[RecallModel, Tensor, Tensor, Tensor, str], Tensor]

_TRAIN, _VALIDATION, _TEST = 0, 1, 2  # streams of the data seed
_LOGIT_ELEMENTS = 1 << 25  # formed at once where accuracy is measured
_EAGER_STEPS = 3  # before a step is captured as a graph: they make the optimizer's state and warm up libraries


def run(
    config: RecallConfig,
    *,
    device: str = "auto",
    compiled: bool = True,
    cuda_graphs: bool = True,
    quiet: bool = True,
) -> list[dict[str, Any]]:
    """Trains, validates after every epoch or more often, and tests once, at the end; a row for every task tested on.

    The test decides nothing: learning rates are chosen by the validation accuracies of their rows. The column
    `validation_accuracies` holds those of all validations, in their order, as a list in JSON.

    Args:
        device: "auto" (CUDA where there is one, else the CPU) or a torch device. Data lives there, and nothing waits
            for it within an epoch.
        compiled: on CUDA, run the forward and backward pass of a training step through torch.compile, once a model
            and shape in a process. A mixer that cannot be compiled is trained as it is, with a warning.
        cuda_graphs: on CUDA, replay a training step as a graph, which takes launching it out of the time.
        quiet: no progress on stderr.

    Raises RuntimeError where a mixer's step cannot be captured as a graph.
    """
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
        trainer = _Trainer(config, model, where, compiled=compiled and on_cuda, graphs=cuda_graphs and on_cuda)
        validation = _load(config.train, config.validation_examples, (config.data_seed, _VALIDATION), str(where))
        validations = config.epochs * config.validations
        progress = stack.enter_context(Progress("training", "validation", total=validations, quiet=quiet))
        ended = "epochs over"
        history: list[float] = []
        for number in range(validations):
            train_loss = trainer.train(number)
            valid = _measure(model, validation, config)
            history.append(round(valid.accuracy, 6))
            progress.advance(note=f"loss {train_loss:.4f}")
            progress.say(f"validation {number + 1}: loss {train_loss:.4f}, validation accuracy {valid.accuracy:.4f}")
            if not math.isfinite(train_loss):
                ended = "diverged"
                break
            if config.stop_at is not None and valid.accuracy >= config.stop_at:
                ended = "solved"
                break
        rows = []
        for stream, task in enumerate(config.tests):
            key = (config.data_seed, _TEST, stream)
            tested = _measure(model, _load((task,), config.test_examples, key, str(where)), config)
            result = {
                "steps": trainer.steps_done,
                "epochs_run": (number + 1) / config.validations,
                "ended": ended,
                "train_loss": train_loss,
                "validation_loss": valid.loss,
                "validation_accuracy": valid.accuracy,
                "validation_accuracies": json.dumps(history),
                "test_loss": tested.loss,
                "test_accuracy": tested.accuracy,
                "seconds": round(time.perf_counter() - began, 2),
                "device": torch.cuda.get_device_name(where) if on_cuda else where.type,
                "torch": torch.__version__,
            }
            rows.append(_described(config, task, model) | result)
    return rows


def describe_tasks(tasks: Sequence[AnyTask]) -> str:
    """Tasks in short, "mqar 64:4 + mqar 128:8"."""
    return " + ".join(map(str, tasks))


def _described(config: RecallConfig, task: AnyTask, model: RecallModel) -> dict[str, Any]:
    """What the run was, and the size of the model and of its state after the task's rows."""
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
        "weight_decay": config.weight_decay,
        "warmup": config.warmup,
        "stop_at": config.stop_at,
        "validations": config.validations,
        "precision": config.precision,
        "parameters": model.num_parameters(),
        "state_elements": state,
        "state_bytes": None if state is None else 4 * state,
    }


class _Part(NamedTuple):
    """The rows of one task on the device, int32: tokens [n, N], places and labels of their queries [n, D]."""

    tokens: Tensor
    places: Tensor
    labels: Tensor

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows at index [B], as int64."""
        tokens, places, labels = (tensor.index_select(0, index).long() for tensor in self)
        return tokens, places, labels


@lru_cache(maxsize=9)  # so that the runs of a sweep share what three tasks need
def _load(tasks: tuple[AnyTask, ...], examples: int, seed: tuple[int, ...], device: str) -> list[_Part]:
    parts = []
    for drawn in mixture(tasks, examples, seed):
        places, labels = drawn.queries()
        tensors = (torch.from_numpy(array.astype("int32", copy=False)) for array in (drawn.tokens, places, labels))
        parts.append(_Part(*(tensor.to(device) for tensor in tensors)))
    return parts


class _Trainer:
    """A model, its optimizer and its data. Everything a step reads or counts is on the device, so no step waits."""

    def __init__(
        self, config: RecallConfig, model: RecallModel, device: torch.device, *, compiled: bool, graphs: bool
    ):
        self.config, self.model, self.device, self.graphs = config, model, device, graphs
        self.loss: _Loss = _loss
        if compiled:
            self.loss = _compiled_loss(shape_key(config))
        self.parts = _load(config.train, config.examples, (config.data_seed, _TRAIN), str(device))
        batches = [len(part.tokens) // config.batch for part in self.parts]
        self.schedule = torch.repeat_interleave(torch.arange(len(batches)), torch.tensor(batches))
        self.orders = [torch.zeros(len(part.tokens), dtype=torch.int64, device=device) for part in self.parts]
        self.cursors = [torch.arange(config.batch, device=device) for _ in self.parts]
        self.captured: list[torch.cuda.CUDAGraph | None] = [None for _ in self.parts]
        self.eager_left = [_EAGER_STEPS for _ in self.parts]
        self.generator = torch.Generator("cpu").manual_seed(config.seed)
        self.steps_done = 0
        steps = config.epochs * len(self.schedule)
        settings = TrainingConfig(
            steps=steps, warmup_steps=round(config.warmup * steps), learning_rate=config.learning_rate, min_lr_ratio=0.0
        )
        self.rates = torch.tensor([learning_rate(step, settings) for step in range(steps)], device=device)
        self.rate = torch.zeros((), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), device=device)
        groups = parameter_groups(model, config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, fused=True, capturable=graphs)

    def train(self, number: int) -> float:
        """Trains up to validation `number`, from 0; the mean loss of the steps."""
        pieces = self.config.validations
        if number % pieces == 0:
            self._shuffle()
        piece = self.schedule.tensor_split(pieces)[number % pieces].tolist()
        self.model.train()
        self.loss_sum.zero_()
        for part in piece:
            self._advance(part)
        self.steps_done += len(piece)
        return self.loss_sum.item() / max(1, len(piece))

    def _shuffle(self) -> None:
        """A new order of the rows and of the parts that batches come from; drawn on the CPU: alike on all devices."""
        for order, cursor in zip(self.orders, self.cursors, strict=True):
            order.copy_(torch.randperm(len(order), generator=self.generator))
            cursor.copy_(torch.arange(len(cursor)))
        self.schedule = self.schedule[torch.randperm(len(self.schedule), generator=self.generator)]

    def _advance(self, part: int) -> None:
        """One step on a batch of a part: as it is, or by replaying its graph."""
        graph = self.captured[part]
        if graph is not None:
            graph.replay()
        elif not self.graphs:
            self._train_step(part)
        elif self.eager_left[part] > 0:
            self.eager_left[part] -= 1
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*capturable=True")  # it will be captured soon
                self._train_step(part)
            torch.cuda.current_stream(self.device).wait_stream(stream)
        else:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self._train_step(part)
            except RuntimeError as error:
                label, why = self.config.architecture.label, str(error).splitlines()[0]
                raise RuntimeError(f"a step of {label} cannot be a CUDA graph, switch graphs off: {why}") from error
            self.captured[part] = graph
            graph.replay()

    def _train_step(self, part: int) -> None:
        cursor = self.cursors[part]
        tokens, places, labels = self.parts[part].rows(self.orders[part].index_select(0, cursor))
        try:
            loss = self._backward(tokens, places, labels)
        except Exception as error:
            if self.loss is _loss:
                raise
            label, why = self.config.architecture.label, str(error).splitlines()[0]
            warnings.warn(f"{label} cannot be compiled and is trained as it is: {why}", stacklevel=2)
            self.loss = _loss
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._backward(tokens, places, labels)
        self.rate.copy_(self.rates.index_select(0, self.step).squeeze(0))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss
        self.step += 1
        cursor += len(cursor)

    def _backward(self, tokens: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        """The loss, whose gradients are then on the parameters."""
        with auxiliary_losses() as extra:
            loss = self.loss(self.model, tokens, places, labels, self.config.precision)
        (loss + sum(extra)).backward()
        return loss.detach()


def _loss(model: RecallModel, tokens: Tensor, places: Tensor, labels: Tensor, precision: str) -> Tensor:
    """The mean loss of the queries."""
    with autocast(precision, tokens.device):
        logits = model.query_logits(tokens, places)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def shape_key(config: RecallConfig) -> str:
    """Equal for runs that share what is compiled: all rates and seeds of a model on a task."""
    return repr((config.model, config.train, config.batch, config.precision))


@lru_cache(maxsize=1)
def _compiled_loss(key: str) -> _Loss:
    """`_loss` compiled whole, for the shapes of a key.

    What was compiled before is dropped: a function keeps few variants, and a sweep needs many.
    """
    torch.compiler.reset()
    return torch.compile(_loss, dynamic=False, fullgraph=True)


class _Measured(NamedTuple):
    loss: float
    accuracy: float


@torch.no_grad()
def _measure(model: RecallModel, parts: Sequence[_Part], config: RecallConfig) -> _Measured:
    """Mean loss in nats and share of queries answered right, over all queries of all parts."""
    model.eval()
    device = parts[0].tokens.device
    loss, right, asked = torch.zeros((), device=device), torch.zeros((), device=device), 0
    for part in parts:
        pairs = part.labels.shape[1]
        rows = max(1, _LOGIT_ELEMENTS // (pairs * model.config.vocab_size))
        for index in torch.arange(len(part.tokens), device=device).split(rows):
            tokens, places, labels = part.rows(index)
            with autocast(config.precision, device):
                logits = model.query_logits(tokens, places).float().flatten(0, 1)
            loss += F.cross_entropy(logits, labels.flatten(), reduction="sum")
            right += (logits.argmax(1) == labels.flatten()).sum()
        asked += part.labels.numel()
    return _Measured(loss.item() / asked, right.item() / asked)
