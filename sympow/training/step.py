"""One optimizer step: the gradients of its passes, and the update of the weights. Also the held-out loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from sympow.layers import auxiliary_losses
from sympow.models import LanguageModel
from sympow.training.config import TrainingConfig
from sympow.training.devices import autocast
from sympow.training.optimizer import set_learning_rate
from sympow.training.ranks import ALONE, Part, Ranks, TokenRows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

LossSum = Callable[[LanguageModel, TokenRows], Tensor]


class RowSource(Protocol):
    """Gives an endless sequence of batches by index, such as `sympow.data.Batches`. An index always gives one batch."""

    def __getitem__(self, index: int) -> TokenRows: ...

    def state(self) -> dict[str, Any]:
        """Returns JSON values that determine the batches, except for the index."""
        ...

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError if `state` is of other batches."""
        ...


class Pass(NamedTuple):
    """Holds the checked rows of one forward and backward pass, and the number of their targets, see `make_pass`."""

    rows: TokenRows
    targets: int


@dataclass(frozen=True)
class StepNumbers:
    """Holds the loss and the gradient norm of a step. The device may still be computing them.

    Args:
        numbers: the loss summed over the targets of this rank, and the gradient norm over all ranks, float64 [2].
        copied: the event after which the host may look at `numbers`, if a GPU copies them to the host; otherwise None.
        targets: the number of targets over all ranks.
        ranks: the ranks that took the step.
    """

    numbers: Tensor
    copied: torch.cuda.Event | None
    targets: int
    ranks: Ranks

    def read(self) -> tuple[float, float, int]:
        """Returns (mean loss in nats, gradient norm before clipping, targets), over all ranks.

        The host waits until a GPU has done this step. It does not wait for work that was launched later. All ranks read
        the same steps in the same order, because they wait for each other.
        """
        if self.copied is not None:
            self.copied.synchronize()
        loss, norm = self.numbers.tolist()
        return self.ranks.sum(loss) / self.targets, norm, self.targets


def backward(losses: Sequence[Callable[[], Tensor]], weigh: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Adds the gradients of a step's passes to the parameters. It does not wait for the device.

    Args:
        losses: one function for each pass, which returns the loss of the pass, a scalar.
        weigh: maps the loss of a pass to the value whose gradient is computed; None: the loss itself. Auxiliary losses
            of layers are added to this value, as their mean over the passes.

    Returns the losses of the passes, without gradients.
    """
    found = []
    for loss_of in losses:
        with auxiliary_losses() as extra:
            loss = loss_of()
        ((weigh(loss) if weigh else loss) + sum(extra) / len(losses)).backward()
        found.append(loss.detach())
    return found


def move(optimizer: torch.optim.Optimizer) -> None:
    """Applies the gradients to the weights, and clears the gradients. It does not wait for the device."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def cut_rows(rows: TokenRows, length: int) -> TokenRows:
    """Returns rows [B, T] as rows of `length` tokens, which divides T, and packed documents in such pieces at most."""
    if rows.cu_seqlens is None:
        return _each(rows, lambda x: x.reshape(-1, length))
    ends = torch.arange(0, rows.tokens.shape[1] + 1, length, dtype=rows.cu_seqlens.dtype)
    return Part(rows.tokens, rows.targets, torch.cat([rows.cu_seqlens, ends]).unique())


def make_pass(rows: TokenRows, model: LanguageModel, device: torch.device) -> Pass:
    """Makes an argument of `train_step`. This is work of the host, which is done before the step needs the result.

    A model on a GPU does not check the tokens that it is trained on. Therefore tokens for a GPU are checked here, with
    the errors of `LanguageModel.check_tokens`, and their memory is pinned. On the CPU the model checks them.
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
) -> StepNumbers:
    """Launches one optimizer step, and returns its numbers without waiting for the device; see `StepNumbers.read`.

    `loss_sum` computes the loss of rows, summed over their targets; None: `LanguageModel.loss_sum`. Raises ValueError
    if no rank has a target.
    """
    targets = int(ranks.sum(sum(each.targets for each in passes)))
    if targets == 0:
        raise ValueError("a training step needs at least one target; every target of this one is -100")
    model.train()
    moved = [_moved(each.rows, device) for each in passes]  # all before the first, whose end a copy would await
    losses = backward(
        [partial(_loss_sum, model, rows, settings, device, loss_sum) for rows in moved],
        lambda loss: loss * ranks.size / targets,  # FSDP takes the mean of the ranks' gradients
    )
    total = torch.zeros((), dtype=torch.float64, device=device)
    for loss in losses:
        total += loss
    norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    if ranks.size > 1:
        norm = cast("DTensor", norm).full_tensor()
    set_learning_rate(optimizer, rate)
    move(optimizer)
    return StepNumbers(*_to_host(torch.stack([total, norm.to(total)])), targets, ranks)


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, rows: RowSource, settings: TrainingConfig, device: torch.device, ranks: Ranks = ALONE
) -> float:
    """Computes the mean loss in nats a target over the first `settings.evaluation_batches` batches of `rows`."""
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


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Returns a copy on the host of a GPU's tensor, and the event after which the copy is complete.

    The memory of the copy is pinned, so that the host does not wait here. A tensor of another device is not copied.
    """
    if not numbers.is_cuda:
        return numbers, None
    copy = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    return copy, torch.cuda.current_stream(numbers.device).record_event()


def _moved(rows: TokenRows, device: torch.device) -> TokenRows:
    return _each(rows, lambda tensor: tensor.to(device, non_blocking=True))


def _each(rows: TokenRows, change: Callable[[Tensor], Tensor]) -> TokenRows:
    """Returns the rows with every tensor changed."""
    cu_seqlens = None if rows.cu_seqlens is None else change(rows.cu_seqlens)
    return Part(change(rows.tokens), change(rows.targets), cu_seqlens)


def _loss_sum(
    model: LanguageModel,
    rows: TokenRows,
    settings: TrainingConfig,
    device: torch.device,
    loss_sum: LossSum | None = None,
) -> Tensor:
    with autocast(settings.precision, device):
        if loss_sum is not None:
            return loss_sum(model, rows)
        return model.loss_sum(rows.tokens, rows.targets, cu_seqlens=rows.cu_seqlens)
