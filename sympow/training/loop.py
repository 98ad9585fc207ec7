"""The training loop: optimizer steps, and evaluations and checkpoints between them."""

from typing import Protocol


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
