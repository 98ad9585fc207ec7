"""The training loop: optimizer steps, and evaluations and checkpoints between them; what it trains, and on what.

Training may diverge where a component refuses the numbers first. On a CPU, power attention refuses gates that are not
finite and states that leave their range. AdamW refuses a learning rate beyond float32. All other components pass on
numbers that are not finite, up to the loss.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from sympow.models import LanguageModel
from sympow.ops import OutOfRangeError
from sympow.training.ranks import TokenRows

_OVERFLOW = "without overflow"  # words of PyTorch's error, which has no class of its own


class Trainee(Protocol):
    """Describes what the loop trains: a model with its optimizer and its data."""

    def take(self, step: int) -> None:
        """Takes optimizer step `step`, counted from 0. The device may still be at work when this returns."""

    def end(self, done: int) -> str | None:
        """Does what is due after `done` steps, such as an evaluation or a checkpoint.

        Returns the reason if training ends here, or None if it continues.
        """


def run_steps(trainee: Trainee, first: int, steps: int) -> tuple[int, str | None]:
    """Takes the optimizer steps `first` to `steps` - 1, or fewer if the trainee ends its training.

    This loop trains language models, distillations and associative recall. `sympow.training.step.backward` computes the
    gradients of a step, and `sympow.training.step.move` updates the weights.

    Returns the number of steps done, and the reason if training ended before the last step, otherwise None.
    """
    for step in range(first, steps):
        trainee.take(step)
        reason = trainee.end(step + 1)
        if reason is not None:
            return step + 1, reason
    return steps, None


class Objective(Protocol):
    """Gives a loss in stages, and a reference model to compare held-out losses with."""

    @property
    def reference(self) -> LanguageModel:
        """Returns the model whose held-out loss is reported beside that of the trained model."""
        ...

    @property
    def identity(self) -> str:
        """Returns a hash of the reference, which is another one for other weights. A run goes on with the same."""
        ...

    def stage(self, step: int) -> tuple[int, int]:
        """Returns the stage of an optimizer step (counted from 0) as a number from 1, and the stage's first step."""
        ...

    def during(self, model: LanguageModel, step: int) -> AbstractContextManager[object]:
        """Returns the context in which the passes of a step run, forward and backward."""
        ...

    def loss_sum(self, model: LanguageModel, rows: TokenRows, step: int) -> Tensor:
        """Returns the loss of a step, summed over all targets of `rows` that are not -100, as a scalar."""
        ...


def shows_divergence(error: Exception) -> bool:
    """Returns whether an error is that of a component which refuses numbers out of range."""
    return isinstance(error, OutOfRangeError) or (isinstance(error, RuntimeError) and _OVERFLOW in str(error))
