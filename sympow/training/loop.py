"""The training loop: batches in, a run folder with metrics and checkpoints out; it goes on where it was stopped."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import nn

from sympow.layers import auxiliary_losses
from sympow.models import LanguageModel
from sympow.progress import Progress
from sympow.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    latest,
    load_checkpoint_into,
    load_header,
    restore_model,
    save_checkpoint,
)
from sympow.training.config import RunConfig, TrainingConfig
from sympow.training.interrupt import StopRequest
from sympow.training.metrics import MetricsWriter
from sympow.training.objective import Objective
from sympow.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from sympow.training.ranks import ALONE, Part, Ranks, Rows, join, prepare
from sympow.training.run_folder import check_config, open_run_folder
from sympow.training.throughput import peak_flops, token_flops, trace

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
LossSum = Callable[[LanguageModel, Rows], torch.Tensor]


class NonFiniteError(RuntimeError):
    """The loss or its gradient is no longer a number."""


class RowSource(Protocol):
    """Batches by index, endless and always the same, as `sympow.data.Batches`.

    `state()` says which they are, in JSON values; `check_state` raises ValueError for the state of others.
    """

    def __getitem__(self, index: int) -> Rows: ...

    def state(self) -> dict[str, Any]: ...

    def check_state(self, state: dict[str, Any]) -> None: ...


class Pass(NamedTuple):
    """Rows that pass at once, checked, and how many real targets they have: see `make_pass`."""

    rows: Rows
    targets: int


class TrainingResult(NamedTuple):
    """Where training stands: steps done, of how many, the last step's loss, the signal that stopped it."""

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

    With a default process group, which must take tensors on the CPU as well, all its ranks call this, with one
    `run_dir`, on a disk that they share. `ranks` is what `join` gives; None calls it. Rank 0 writes the metrics, and
    to the terminal.

    `batches[i]` holds `config.training.rows_per_pass` rows; step s takes `passes_per_step` of them, in turns on
    several ranks, so that position in the data is a function of the step alone. The loss of a step is the mean over
    all its real targets, however they fall into passes. `held_out` gives the first `evaluation_batches` of its
    batches to the held-out loss; without it there is none. `observe(model, step)` is called every `evaluate_every`
    steps and after the last, on every rank; its time does not count.

    `start` are the weights to begin with, by name; without it they are drawn from the seed. `objective` gives the
    loss of the steps; without it that is `LanguageModel.loss_sum`. With it the metrics hold the stage, and beside a
    held-out loss that of the objective's reference and the gap between them.

    On the CPU a continued run equals an uninterrupted one bit for bit; on another number of ranks, to rounding.
    SIGINT and SIGTERM end it after the current step with a checkpoint; a second one ends it at once (on several
    ranks it does nothing: torchrun passes on what a scheduler may have sent to every process).

    Raises ValueError where `run_dir` belongs to another config or other data, NonFiniteError where the loss
    or its gradient is not finite (that step is not saved), CheckpointError where a checkpoint
    cannot be read or written.
    """
    settings = config.training
    device = resolve_device(settings.device)
    ranks = join(config, device) if ranks is None else ranks
    run_dir = open_run_folder(run_dir, config, ranks)
    with ExitStack() as stack:
        cuda = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))  # the caller's generators stay as they are
        torch.manual_seed(settings.seed)
        model = LanguageModel(config.model, seed=settings.seed)
        if start is not None:
            restore_model(model, start, "the start")
        model.to(device)
        flops, peak = token_flops(model, settings.context), peak_flops(device, settings.precision)
        prepare(model, config, ranks)
        optimizer = make_optimizer(model, settings)
        resumed = _restore(run_dir, config, batches, model, optimizer, device, ranks)
        step, tokens, seconds = (resumed.step, resumed.tokens, resumed.seconds) if resumed else (0, 0, 0.0)
        logged_tokens, logged_seconds = tokens, seconds
        loss: float | None = None
        reference_loss: float | None = None

        def load(index: int) -> list[Pass]:
            first = index * settings.passes_per_step
            own = range(ranks.data_rank, settings.passes_per_step, ranks.data_size)
            return [make_pass(ranks.part(batches[first + i]), model, device) for i in own]

        metrics = MetricsWriter(run_dir, step, config if config.execution.tracker else None) if ranks.main else None
        if metrics:
            stack.callback(metrics.close)
        silent = quiet or not ranks.main
        progress = stack.enter_context(Progress("training", "step", total=settings.steps, done=step, quiet=silent))
        if resumed:
            progress.say(f"continuing from step {step} of {settings.steps}")
        stop = stack.enter_context(StopRequest(patient=ranks.size > 1))
        tracing = stack.enter_context(trace(run_dir, config.execution.profile_steps if ranks.main else 0))
        for passes in _ahead(load, range(step, settings.steps)):
            began = time.perf_counter()
            stage, stage_start = (0, 0) if objective is None else objective.stage(step)
            rate = learning_rate(step, settings, stage_start)
            loss_sum = None if objective is None else partial(objective.loss_sum, step=step)
            loss, norm, targets = train_step(model, optimizer, passes, rate, settings, device, ranks, loss_sum)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NonFiniteError(
                    f"the loss is {loss} and the norm of its gradient {norm} at step {step + 1} "
                    f"(learning rate {rate:.3g}); the last checkpoint: {latest(run_dir) or 'none'}"
                )
            step += 1
            tokens += targets
            seconds += time.perf_counter() - began
            progress.advance(note=f"loss {loss:.4f}")
            tracing()

            last = step == settings.steps
            ends_stage = objective is not None and not last and objective.stage(step)[0] != stage
            evaluates = last or ends_stage or step % settings.evaluate_every == 0
            if observe and evaluates:
                observe(model, step)
            evaluates = evaluates and held_out is not None
            number = int(ranks.max(stop.signal or 0))
            stopped_by = signal.Signals(number).name if number else None
            if last or evaluates or step % settings.log_every == 0:
                speed = (tokens - logged_tokens) / max(seconds - logged_seconds, 1e-9)
                logged_tokens, logged_seconds = tokens, seconds
                row = {"step": step, "loss": loss, "lr": rate, "grad_norm": norm, "tokens": tokens,
                       "tokens_per_second": speed, "seconds": seconds}  # fmt: skip
                if flops and peak:
                    row["mfu"] = speed * flops / (peak * ranks.size)
                if objective is not None:
                    row["stage"] = stage
                if held_out is not None and evaluates:
                    row["held_out_loss"] = held_out_loss(model, held_out, settings, device, ranks)
                    if objective is not None:
                        if reference_loss is None:
                            reference_loss = held_out_loss(objective.reference, held_out, settings, device, ranks)
                        row |= {"teacher_loss": reference_loss, "gap": row["held_out_loss"] - reference_loss}
                    progress.say(_summary(row, settings.steps))
                if metrics:
                    metrics.write(row)
            if last or stopped_by or step % settings.checkpoint_every == 0:
                if metrics:
                    metrics.sync()  # no checkpoint without the metrics that led to it
                checkpoint = Checkpoint(
                    config=config.to_dict(),
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                    step=step,
                    tokens=tokens,
                    seconds=seconds,
                    data={"batches": batches.state(), "position": step * settings.passes_per_step},
                    rng=_rng_states(device),
                )
                save_checkpoint(checkpoint, run_dir, settings.keep_checkpoints, ranks)
            if stopped_by:
                return TrainingResult(step, settings.steps, loss, stopped_by)
        return TrainingResult(step, settings.steps, loss, None)


def make_pass(rows: Rows, model: LanguageModel, device: torch.device) -> Pass:
    """What `train_step` takes: work of the host that no step should wait for, done ahead.

    A GPU's model does not look at the tokens it is trained on, so they are checked here, with the errors of
    `LanguageModel.check_tokens`, and their memory is pinned; on the CPU the model checks them itself.
    """
    if device.type != "cpu":
        model.check_tokens(rows.tokens, rows.targets)
    if device.type == "cuda" and rows.tokens.is_cpu:
        rows = _each(rows, torch.Tensor.pin_memory)
    return Pass(rows, int((rows.targets != -100).sum()))


def train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    passes: list[Pass],
    rate: float,
    settings: TrainingConfig,
    device: torch.device,
    ranks: Ranks = ALONE,
    loss_sum: LossSum | None = None,
) -> tuple[float, float, int]:
    """One optimizer step; returns (mean loss in nats, gradient norm before clipping, targets), over all ranks.

    `loss_sum` gives the loss of rows, summed up over their targets; None: `LanguageModel.loss_sum`. The device is
    waited for once, at the end.
    """
    targets = int(ranks.sum(sum(each.targets for each in passes)))
    if targets == 0:
        raise ValueError("a training step needs at least one target; every target of this one is -100")
    model.train()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for rows in [_moved(each.rows, device) for each in passes]:  # all before the first, whose end a copy would await
        with auxiliary_losses() as extra:
            loss = _loss_sum(model, rows, settings, device, loss_sum)
        # FSDP takes the mean of the ranks' gradients.
        (loss * ranks.size / targets + sum(extra) / len(passes)).backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    if ranks.size > 1:
        norm = cast("DTensor", norm).full_tensor()
    set_learning_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return ranks.sum(float(total)) / targets, float(norm), targets


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, rows: RowSource, settings: TrainingConfig, device: torch.device, ranks: Ranks = ALONE
) -> float:
    """Mean loss in nats a target over the first `settings.evaluation_batches` batches of `rows`."""
    model.eval()
    total, targets = 0.0, 0
    for first in range(0, settings.evaluation_batches, ranks.data_size):
        index = first + ranks.data_rank
        batch = make_pass(ranks.part(rows[min(index, settings.evaluation_batches - 1)]), model, device)
        # On all ranks or on none: they gather weights together.
        loss = float(_loss_sum(model, _moved(batch.rows, device), settings, device))
        if index < settings.evaluation_batches:
            total += loss
            targets += batch.targets
    total, targets = ranks.sum(total), int(ranks.sum(targets))
    return total / targets if targets else math.nan


def resolve_device(name: str) -> torch.device:
    """The torch device of a name, "auto" being CUDA where there is one, else the CPU; ValueError if it is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """The context in which a model of `TrainingConfig.precision` runs."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def _moved(rows: Rows, device: torch.device) -> Rows:
    return _each(rows, lambda tensor: tensor.to(device, non_blocking=True))


def _each(rows: Rows, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    """The rows with every tensor changed."""
    cu_seqlens = None if rows.cu_seqlens is None else change(rows.cu_seqlens)
    return Part(change(rows.tokens), change(rows.targets), cu_seqlens)


def _loss_sum(
    model: LanguageModel, rows: Rows, settings: TrainingConfig, device: torch.device, loss_sum: LossSum | None = None
) -> torch.Tensor:
    with autocast(settings.precision, device):
        if loss_sum is not None:
            return loss_sum(model, rows)
        return model.loss_sum(rows.tokens, rows.targets, cu_seqlens=rows.cu_seqlens)


def _restore(
    run_dir: Path,
    config: RunConfig,
    batches: RowSource,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    ranks: Ranks,
) -> Checkpoint | None:
    """Brings model, optimizer and generators to the newest checkpoint and returns it; None where there is none."""
    path = latest(run_dir)
    if path is None:
        return None
    checkpoint = load_header(path)
    check_config(checkpoint.config, config, path)
    batches.check_state(checkpoint.data.get("batches", {}))
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
