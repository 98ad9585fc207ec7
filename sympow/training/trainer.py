"""Training of a language model on batches into a run folder. A stopped run continues from its last checkpoint."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from sympow.models import LanguageModel
from sympow.progress import Forecast, Progress
from sympow.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    keep_newest,
    latest,
    list_checkpoints,
    load_checkpoint_into,
    load_header,
    restore_model,
    save_checkpoint,
)
from sympow.training.config import RunConfig
from sympow.training.devices import resolve_device
from sympow.training.interrupt import StopRequest
from sympow.training.loop import Objective, run_steps, shows_divergence
from sympow.training.metrics import MetricsWriter
from sympow.training.optimizer import LEAST_SIDE, learning_rate, make_optimizer, muon_weights
from sympow.training.ranks import Ranks, join, prepare
from sympow.training.run_folder import check_config, open_run_folder
from sympow.training.step import Pass, RowSource, StepNumbers, cut_rows, held_out_loss, make_pass, train_step
from sympow.training.throughput import peak_flops, token_flops, trace

T = TypeVar("T")


class NonFiniteError(RuntimeError):
    """Says that training has diverged: the loss, its gradient or a number in the model is no longer finite."""


class TrainingResult(NamedTuple):
    """Holds the steps done, the steps of the whole run, the last step's loss, and the signal that stopped training."""

    step: int
    steps: int
    loss: float | None
    stopped_by: str | None


def train(
    config: RunConfig,
    batches: RowSource,
    run_dir: str | os.PathLike[str],
    *,
    held_out: RowSource | None = None,
    observe: Callable[[LanguageModel, int], object] | None = None,
    start: Mapping[str, torch.Tensor] | None = None,
    objective: Objective | None = None,
    quiet: bool = False,
    ranks: Ranks | None = None,
) -> TrainingResult:
    """Trains a language model, or continues from the newest checkpoint in `run_dir`.

    If there is a default process group, all its ranks call this function with the same `run_dir` on a shared disk. The
    group must support tensors on the CPU as well. Rank 0 writes the metrics and prints to the terminal.

    `batches[i]` has `config.training.rows_per_pass` rows. A step takes `passes_per_step` consecutive batches, which the
    ranks share, so the position in the data depends on the step only. The loss of a step is the mean over all its
    targets that are not -100.

    On the CPU a continued run equals an uninterrupted one bit for bit. If the number of ranks changes, the two runs are
    equal up to rounding. SIGINT and SIGTERM end the run after the current step with a checkpoint. A second signal ends
    it at once. On several ranks a second signal has no effect, because torchrun forwards a signal that a scheduler may
    already have sent to every process.

    Args:
        config: the config of the run.
        batches: the training batches.
        run_dir: the folder of the run.
        held_out: batches of held-out documents; the first `evaluation_batches` of them give the held-out loss. None:
            there is no held-out loss.
        observe: called as `observe(model, step)` on every rank, every `evaluate_every` steps and after the last. Its
            time is not counted.
        start: the initial weights by name; None: they are drawn from the seed.
        objective: gives the loss of the steps. The metrics then also contain the stage, the held-out loss of the
            objective's reference, and the gap between the held-out losses. None: the loss is `LanguageModel.loss_sum`.
        quiet: show no progress on stderr.
        ranks: the result of `join` in a caller that has opened `run_dir` (`open_run_folder`); None: both are done here.

    Raises RuntimeError if another process trains in `run_dir`, ValueError if `run_dir` belongs to another config or
    other data, NonFiniteError if the loss or its gradient is not finite (that step is not saved) or if a component
    refuses numbers that are out of range, and CheckpointError if a checkpoint cannot be read or written.
    """
    settings = config.training
    device = resolve_device(settings.device)
    with ExitStack() as stack:
        if ranks is None:
            ranks = join(config, device)
            stack.enter_context(open_run_folder(run_dir, config, ranks))
        cuda = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))  # the caller's generators stay as they are
        torch.manual_seed(settings.seed)
        model = LanguageModel(config.model, seed=settings.seed)
        if start is not None:
            restore_model(model, start, "the start")
        model.to(device)
        trained = _Training(config, model, batches, Path(run_dir), held_out, observe, objective, device, ranks)
        trained.open(stack, quiet)
        step, stopped_by = run_steps(trained, trained.resumed, settings.steps)
        return TrainingResult(step, settings.steps, trained.loss, stopped_by)


class _Launched(NamedTuple):
    """Holds an optimizer step whose numbers are not read yet."""

    step: int
    rate: float
    numbers: StepNumbers


class _Training:
    """Trains a language model, for `run_steps`: holds the arguments of `train` and the progress of the run.

    The numbers of a step that a GPU computes are read after the next step is launched, so that the GPU has work while
    the host reads. Before anything is made from the model or the numbers, the step that was launched last is read too.

    Attributes:
        launched: the step that was launched last, if it is not read; None: all are read.
        untested: whether no loss was computed yet with the weights of the newest checkpoint. Until then one more
            checkpoint is kept, because the step before may have ruined the weights.
        began: when the first step began that was launched after all were read.
        loss, norm, rate: of the step that was read last.
        tokens: targets of all steps that are read.
        seconds: the time of the steps, with the waits for their batches. The time of observers, evaluations and
            checkpoints is not part of it.
    """

    def __init__(
        self,
        config: RunConfig,
        model: LanguageModel,
        batches: RowSource,
        run_dir: Path,
        held_out: RowSource | None,
        observe: Callable[[LanguageModel, int], object] | None,
        objective: Objective | None,
        device: torch.device,
        ranks: Ranks,
    ):
        self.config, self.settings, self.model, self.batches, self.run_dir = (
            config, config.training, model, batches, run_dir
        )  # fmt: skip
        self.held_out, self.observe, self.objective = held_out, observe, objective
        self.device, self.ranks = device, ranks
        contexts = {self.settings.context_of(step) for step in (0, self.settings.steps - 1)}
        self.flops = {context: token_flops(model, context) for context in contexts}
        self.peak = peak_flops(device, self.settings.precision)
        prepare(model, config, ranks)
        self.optimizer = make_optimizer(model, self.settings)
        if self.settings.optimizer == "muon" and ranks.main and not muon_weights(model):
            least = f"at least {LEAST_SIDE} rows and columns"
            print(f"Muon moves matrices of {least}, and the model trains none; AdamW moves all", file=sys.stderr)
        checkpoint = _restore(run_dir, config, batches, held_out, model, self.optimizer, objective, device, ranks)
        self.continues, self.resumed = checkpoint is not None, checkpoint.step if checkpoint else 0
        self.tokens, self.seconds = (checkpoint.tokens, checkpoint.seconds) if checkpoint else (0, 0.0)
        self.logged_tokens, self.logged_seconds = self.tokens, self.seconds
        self.launched: _Launched | None = None
        self.untested = self.continues
        self.began = 0.0
        self.loss: float | None = None
        self.norm = self.rate = 0.0
        self.stage = 0
        self.reference_loss: float | None = None

    def open(self, stack: ExitStack, quiet: bool) -> None:
        """Opens the metrics, the progress, the trace, and the reading of batches; `stack` closes them."""
        ranks, settings, step = self.ranks, self.settings, self.resumed
        self.metrics = MetricsWriter(self.run_dir, step, self.config) if ranks.main else None
        if self.metrics:
            stack.callback(self.metrics.close)
        silent = quiet or not ranks.main
        self.progress = stack.enter_context(Progress("training", "step", total=settings.steps, done=step, quiet=silent))
        if self.continues:
            self.progress.say(f"continuing from step {step} of {settings.steps}")
        doing = "stopping after this step" if ranks.main else None
        self.stop = stack.enter_context(StopRequest(patient=ranks.size > 1, doing=doing))
        profiled = self.config.execution.profile_steps if ranks.main else 0
        self.tracing = stack.enter_context(trace(self.run_dir, profiled))
        self.forecast = Forecast(step, settings.steps)
        self.passes = _ahead(self._load, range(step, settings.steps))

    def take(self, step: int) -> None:
        """Launches optimizer step `step`, then reads the step before; on the CPU reads `step` itself.

        Raises NonFiniteError if the loss of a step that is read, or its gradient, is not finite, and if a component
        refuses numbers of `step` that are out of range.
        """
        if self.launched is None:
            self.began = time.perf_counter()
        passes = next(self.passes)
        objective = self.objective
        self.stage, stage_start = (0, 0) if objective is None else objective.stage(step)
        rate = learning_rate(step, self.settings, stage_start)
        loss_sum = None if objective is None else partial(objective.loss_sum, step=step)
        during = nullcontext() if objective is None else objective.during(self.model, step)
        with self._divergence(step + 1, rate), during:
            numbers = train_step(
                self.model, self.optimizer, passes, rate, self.settings, self.device, self.ranks, loss_sum
            )
        before, self.launched = self.launched, _Launched(step, rate, numbers)
        if before is not None:
            self._read(before)
        if numbers.copied is None:  # nothing to wait for; a launch on weights that are not finite can fail on the CPU
            self._settle()
        self.tracing()

    def end(self, done: int) -> str | None:
        """Evaluates, writes metrics and saves a checkpoint if they are due. Returns the signal that ends the run."""
        settings, objective = self.settings, self.objective
        last = done == settings.steps
        ends_stage = objective is not None and not last and objective.stage(done)[0] != self.stage
        evaluates = last or ends_stage or done % settings.evaluate_every == 0
        if evaluates:
            self._settle()
            if self.observe:
                with self._divergence(done, self.rate), self.progress.phase("evaluating"):
                    self.observe(self.model, done)
        evaluates = evaluates and self.held_out is not None
        number = int(self.ranks.max(self.stop.signal or 0))
        stopped_by = signal.Signals(number).name if number else None
        logs = last or evaluates or done % settings.log_every == 0
        saves = last or stopped_by or done % settings.checkpoint_every == 0
        if logs or saves:
            self._settle()
        tested = last
        if logs:
            with self._divergence(done, self.rate):
                row = self._row(done, evaluates)
            tested = math.isfinite(row["held_out_loss"]) if evaluates else last
            if self.metrics:
                self.metrics.write(row)
        if saves:
            if self.metrics:
                self.metrics.sync()  # no checkpoint without the metrics that led to it
            with self.progress.phase("saving a checkpoint"):
                self._save(done, tested)
        return stopped_by

    def _settle(self) -> None:
        """Reads the step that was launched last, if it is not read, and counts the time since `began`."""
        if self.launched is not None:
            self._read(self.launched)
            self.launched = None
            self.seconds += time.perf_counter() - self.began

    def _read(self, launched: _Launched) -> None:
        """Waits for the numbers of a step, and counts the step. Raises NonFiniteError if they are not finite."""
        self.loss, self.norm, targets = launched.numbers.read()
        self.rate = launched.rate
        if not (math.isfinite(self.loss) and math.isfinite(self.norm)):
            found = f"the loss is {self.loss} and the norm of its gradient {self.norm}"
            raise self._diverged(found, launched.step + 1, self.rate)
        if self.untested:
            self.untested = False
            if self.ranks.main:
                keep_newest(self.run_dir, self.settings.keep_checkpoints)
        self.tokens += targets
        self.progress.advance(note=f"loss {self.loss:.4f}")
        left = self.forecast.after(launched.step + 1, self.stage)
        if left is not None:
            self.progress.say(left)

    @contextmanager
    def _divergence(self, step: int, rate: float) -> Iterator[None]:
        """Raises NonFiniteError if a component refuses numbers in the block that are out of range."""
        try:
            yield
        except Exception as error:
            if not shows_divergence(error):
                raise
            line = str(error).split("\n")[0]
            raise self._diverged(f"numbers of the model are out of range ({line})", step, rate) from error

    def _diverged(self, found: str, step: int, rate: float) -> NonFiniteError:
        kept = f"the last checkpoint: {latest(self.run_dir) or 'none'}"
        if self.untested and len(saved := list_checkpoints(self.run_dir)) > 1:
            kept = f"the last good checkpoint: {saved[-2]}, because the step began with the weights of {saved[-1]}"
        return NonFiniteError(f"{found} at step {step} (learning rate {rate:.3g}); {kept}")

    def _check_weights(self, done: int) -> None:
        """Raises NonFiniteError on all ranks if a weight is not finite on one."""
        weights = self.model.state_dict().values()
        own = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
        if self.ranks.sum(not all(bool(weight.isfinite().all()) for weight in own)):
            raise self._diverged("weights are not finite", done, self.rate)

    def _load(self, index: int) -> list[Pass]:
        first = index * self.settings.passes_per_step
        own = range(self.ranks.data_rank, self.settings.passes_per_step, self.ranks.data_size)
        rows = (self.batches[first + i] for i in own)
        context = self.settings.context_of(index)
        if context < self.settings.context:
            rows = (cut_rows(each, context) for each in rows)
        return [make_pass(self.ranks.part(each), self.model, self.device) for each in rows]

    def _row(self, done: int, evaluates: bool) -> dict[str, Any]:
        """Returns the metrics after `done` steps, with the held-out loss if asked for."""
        settings, objective = self.settings, self.objective
        speed = (self.tokens - self.logged_tokens) / max(self.seconds - self.logged_seconds, 1e-9)
        self.logged_tokens, self.logged_seconds = self.tokens, self.seconds
        row: dict[str, Any] = {
            "step": done, "loss": self.loss, "lr": self.rate, "grad_norm": self.norm, "tokens": self.tokens,
            "tokens_per_second": speed, "seconds": self.seconds,
        }  # fmt: skip
        flops = self.flops[settings.context_of(done - 1)]
        if flops and self.peak:
            row["mfu"] = speed * flops / (self.peak * self.ranks.size)
        if objective is not None:
            row["stage"] = self.stage
        if self.held_out is not None and evaluates:
            with self.progress.phase("computing the held-out loss"):
                row["held_out_loss"] = held_out_loss(self.model, self.held_out, settings, self.device, self.ranks)
            if objective is not None:
                if self.reference_loss is None:
                    with self.progress.phase("computing the held-out loss of the teacher"):
                        self.reference_loss = held_out_loss(
                            objective.reference, self.held_out, settings, self.device, self.ranks
                        )
                row |= {"teacher_loss": self.reference_loss, "gap": row["held_out_loss"] - self.reference_loss}
            self.progress.say(_summary(row, settings.steps))
        return row

    def _save(self, done: int, tested: bool) -> None:
        """Saves a checkpoint. `tested` tells whether a loss that was computed with its weights is finite."""
        self._check_weights(done)
        data = {"batches": self.batches.state(), "position": done * self.settings.passes_per_step}
        if self.held_out is not None:
            data["held_out"] = self.held_out.state()
        if self.objective is not None:
            data["reference"] = self.objective.identity
        checkpoint = Checkpoint(
            config=self.config.to_dict(),
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            step=done,
            tokens=self.tokens,
            seconds=self.seconds,
            data=data,
            rng=_rng_states(self.device),
        )
        save_checkpoint(checkpoint, self.run_dir, self.settings.keep_checkpoints + (not tested), self.ranks)
        self.untested = not tested


def _restore(
    run_dir: Path,
    config: RunConfig,
    batches: RowSource,
    held_out: RowSource | None,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    objective: Objective | None,
    device: torch.device,
    ranks: Ranks,
) -> Checkpoint | None:
    """Loads the newest checkpoint into model, optimizer and generators. Returns it, or None if there is none."""
    path = latest(run_dir)
    if path is None:
        return None
    checkpoint = load_header(path)
    check_config(checkpoint.config, config, path)
    checked = [("documents", batches, checkpoint.data.get("batches", {}))]
    if held_out is not None and "held_out" in checkpoint.data:  # older checkpoints do not tell
        checked.append(("held-out documents", held_out, checkpoint.data["held_out"]))
    for what, rows, stored in checked:
        try:
            rows.check_state(stored)
        except ValueError as error:
            raise ValueError(
                f"{what}: {error}; give the earlier ones, remove the run (--restart), or give another folder (--out)"
            ) from None
    reference = checkpoint.data.get("reference")  # older checkpoints do not tell
    if objective is not None and reference not in (None, objective.identity):
        raise ValueError(
            f"the weights of the teacher have changed since step {checkpoint.step:,}; restore them, remove the run "
            "(--restart), or give another folder (--out)"
        )
    position = checkpoint.step * config.training.passes_per_step
    if checkpoint.data.get("position") != position:
        raise CheckpointError(f"{path} is at position {checkpoint.data.get('position')} of the data, not {position}")
    checkpoint = load_checkpoint_into(checkpoint, path, model, optimizer, ranks)
    restore_model(model, checkpoint.model, path)
    try:
        optimizer.load_state_dict(checkpoint.optimizer)
        torch.set_rng_state(checkpoint.rng["cpu"])
        if device.type == "cuda" and "cuda" in checkpoint.rng:
            torch.cuda.set_rng_state(checkpoint.rng["cuda"], device)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no state of this run's optimizer and generators") from error
    return checkpoint


def _rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _ahead(load: Callable[[int], T], indices: Iterable[int]) -> Iterator[T]:
    """Yields load(i) for each index, reading one in a thread while the caller works on the one before."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        pending = None
        for index in indices:
            coming = pool.submit(load, index)
            if pending is not None:
                yield pending.result()
            pending = coming
        if pending is not None:
            yield pending.result()


def _summary(row: dict[str, Any], steps: int) -> str:
    gap = f" ({row['gap']:+.4f} to the teacher)" if "gap" in row else ""
    return (
        f"step {row['step']} of {steps}: loss {row['loss']:.4f}, held out {row['held_out_loss']:.4f}{gap}, "
        f"{row['tokens_per_second']:,.0f} tokens/s"
    )
