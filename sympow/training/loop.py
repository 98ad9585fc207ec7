"""The one loop that trains: optimizer steps, and what is due between them."""

from typing import Protocol


class Trainee(Protocol):
    """What the loop trains: a model with its optimizer and its data."""

    def take(self, step: int) -> None:
        """Takes optimizer step `step`, counted from 0. The device may still be at work when this returns."""

    def end(self, done: int) -> str | None:
        """Ends what `done` steps began: does what is due, such as an evaluation or a checkpoint.

        Returns why training ends here, or None where it goes on.
        """


def run_steps(trainee: Trainee, first: int, steps: int) -> tuple[int, str | None]:
    """Takes the optimizer steps `first` to `steps` - 1, or fewer where the trainee ends its training.

    Language models, their distillation and associative recall are all trained by this loop. The gradients of a step
    and the move of the weights are `sympow.training.step.backward` and `move`.

    Returns the number of steps done, and why training ended before the last of them, or None.
    """
    for step in range(first, steps):
        trainee.take(step)
        reason = trainee.end(step + 1)
        if reason is not None:
            return step + 1, reason
    return steps, None
