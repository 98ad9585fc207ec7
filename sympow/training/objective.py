"""The interface of training objectives other than the loss of the next token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sympow.models import LanguageModel
from sympow.training.ranks import Rows


class Objective(Protocol):
    """Gives a loss in stages, and a reference model to compare held-out losses with."""

    @property
    def reference(self) -> LanguageModel:
        """Returns the model whose held-out loss is reported beside that of the trained model."""
        ...

    def stage(self, step: int) -> tuple[int, int]:
        """Returns the stage of an optimizer step (counted from 0) as a number from 1, and the stage's first step."""
        ...

    def loss_sum(self, model: LanguageModel, rows: Rows, step: int) -> Tensor:
        """Returns the loss of a step, summed over all targets of `rows` that are not -100, as a scalar."""
        ...
