"""Associative recall in training, for the loop of `sympow.training`: steps that never wait for the device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.models import RecallModel
from sympow.models.step_graphs import capturing
from sympow.progress import Progress
from sympow.recall.config import RecallConfig
from sympow.recall.rows import TRAIN, VALIDATION, RecallScore, load, measure
from sympow.training.config import TrainingConfig
from sympow.training.devices import autocast
from sympow.training.loop import shows_divergence
from sympow.training.optimizer import learning_rate, make_optimizer
from sympow.training.step import backward, move

_Loss = Callable[[RecallModel, Tensor, Tensor, Tensor, str], Tensor]

_EAGER_STEPS = 3  # steps before one is captured as a graph; they make the optimizer's state and warm up libraries


class RecallTraining:
    """Trains a model of recall on its data, for `sympow.training.loop.run_steps`.

    All data and counters of a step are on the device, so the host does not wait in a step.

    Args:
        config: the run.
        model: the model, on `device`.
        device: the device of the data.
        compiled: whether to run the forward and backward pass of a step through torch.compile.
        graphs: whether to replay steps as CUDA graphs.
        progress: counts validations.
        tracker: an open run of a service, which gets every validation; None: no tracker.

    Attributes:
        steps: of the whole run.
        train_loss: mean loss of the steps between the last two validations.
        validated: the last validation.
        history: accuracies of all validations, in their order.
    """

    def __init__(
        self,
        config: RecallConfig,
        model: RecallModel,
        device: torch.device,
        *,
        compiled: bool,
        graphs: bool,
        progress: Progress,
        tracker: Any = None,
    ):
        self.progress, self.tracker = progress, tracker
        self.config, self.model, self.device, self.graphs = config, model, device, graphs
        self.loss: _Loss = _loss
        if compiled:
            self.loss = compiled_loss(shape_key(config))
        self.parts = load(config.train, config.examples, (config.data_seed, TRAIN), str(device))
        batches = [len(part.tokens) // config.batch for part in self.parts]
        self.schedule = torch.repeat_interleave(torch.arange(len(batches)), torch.tensor(batches))
        self.orders = [torch.zeros(len(part.tokens), dtype=torch.int64, device=device) for part in self.parts]
        self.cursors = [torch.arange(config.batch, device=device) for _ in self.parts]
        self.captured: list[torch.cuda.CUDAGraph | None] = [None for _ in self.parts]
        self.eager_left = [_EAGER_STEPS for _ in self.parts]
        self.generator = torch.Generator("cpu").manual_seed(config.seed)
        batches_of_pieces = [len(piece) for piece in self.schedule.tensor_split(config.validations)]
        self.borders = list(accumulate(batches_of_pieces * config.epochs))
        self.steps = steps = self.borders[-1]
        settings = TrainingConfig(
            steps=steps,
            optimizer=config.optimizer,
            muon_rate=config.muon_rate,
            learning_rate=config.learning_rate,
            warmup_steps=round(config.warmup * steps),
            min_lr_ratio=0.0,
            betas=(0.9, 0.999),
            weight_decay=config.weight_decay,
        )
        self.rates = torch.tensor([learning_rate(step, settings) for step in range(steps)], device=device)
        self.rate = torch.zeros((), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.steps_summed = 0
        self.optimizer = make_optimizer(model, settings, lr=self.rate, fused=True, capturable=graphs)

        self.validation = load(config.train, config.validation_examples, (config.data_seed, VALIDATION), str(device))
        self.diverged = False  # a component has refused numbers out of range
        self.train_loss = math.nan
        self.validated = RecallScore(math.nan, math.nan)
        self.history: list[float] = []

    def take(self, step: int) -> None:
        """Takes optimizer step `step`, which is in a new order of the data where an epoch begins."""
        if step % len(self.schedule) == 0:
            self._shuffle()
        if self.steps_summed == 0:
            self.model.train()
            self.loss_sum.zero_()
        try:
            self._advance(int(self.schedule[step % len(self.schedule)]))
        except Exception as error:
            if not shows_divergence(error):
                raise
            self.loss_sum += math.nan
            self.diverged = True
        self.steps_summed += 1

    def end(self, done: int) -> str | None:
        """Measures the validation where that is due, and returns "diverged" or "solved" where the run ends early."""
        while len(self.history) < len(self.borders) and (self.diverged or self.borders[len(self.history)] == done):
            self.train_loss = self.loss_sum.item() / max(1, self.steps_summed)
            self.loss_sum.zero_()
            self.steps_summed = 0
            with self.progress.phase("validating"):
                self.validated = measure(self.model, self.validation, self.config)
            self.history.append(round(self.validated.accuracy, 6))
            self._tell(done)
            if not math.isfinite(self.train_loss):
                return "diverged"
            if self.config.stop_at is not None and self.validated.accuracy >= self.config.stop_at:
                return "solved"
        return None

    def _tell(self, step: int) -> None:
        loss, accuracy = self.train_loss, self.validated.accuracy
        if self.tracker is not None:
            row = {"train_loss": loss, "validation_loss": self.validated.loss, "validation_accuracy": accuracy}
            self.tracker.log(row, step=step)
        self.progress.advance(note=f"loss {loss:.4f}")
        self.progress.say(f"validation {len(self.history)}: loss {loss:.4f}, validation accuracy {accuracy:.4f}")

    def _shuffle(self) -> None:
        """Draws a new order of rows and of the parts of batches. It is drawn on the CPU, so that devices agree."""
        for order, cursor in zip(self.orders, self.cursors, strict=True):
            order.copy_(torch.randperm(len(order), generator=self.generator))
            cursor.copy_(torch.arange(len(cursor)))
        self.schedule = self.schedule[torch.randperm(len(self.schedule), generator=self.generator)]

    def _advance(self, part: int) -> None:
        """Takes one step on a batch of a part, directly or by replaying its graph."""
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
                with capturing(graph):
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
        move(self.optimizer)
        self.loss_sum += loss
        self.step += 1
        cursor += len(cursor)

    def _backward(self, tokens: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss, after its gradients were added to the parameters."""
        (loss,) = backward([partial(self.loss, self.model, tokens, places, labels, self.config.precision)])
        return loss


def _loss(model: RecallModel, tokens: Tensor, places: Tensor, labels: Tensor, precision: str) -> Tensor:
    """Returns the mean loss of the queries."""
    with autocast(precision, tokens.device):
        logits = model.query_logits(tokens, places)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def shape_key(config: RecallConfig) -> str:
    """Returns a key of compiled code. It is equal for runs of one model on one task with any learning rate and seed."""
    return repr((config.model, config.train, config.batch, config.precision))


@lru_cache(maxsize=1)
def compiled_loss(key: str) -> _Loss:
    """Returns `_loss` compiled as one graph for the shapes of a key.

    Code that was compiled before is dropped, because torch keeps few variants of a function and a sweep needs many.
    """
    torch.compiler.reset()
    return torch.compile(_loss, dynamic=False, fullgraph=True)
