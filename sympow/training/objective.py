"""What a model is trained for, where that is not the loss of the next token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sympow.models import LanguageModel
from sympow.training.ranks import Rows


class Objective(Protocol):
    """Gives a loss in stages, and the model whose held-out loss is told beside that of the trained one."""

    @property
    def reference(self) -> LanguageModel:
        """Returns the model whose held-out loss is reported beside that of the trained model."""
        ...

    def stage(self, step: int) -> tuple[int, int]:
        """Returns the stage of an optimizer step (0-based), numbered from 1, and the step with which it begins."""
        ...

    def loss_sum(self, model: LanguageModel, rows: Rows, step: int) -> Tensor:
        """Returns the loss of a step over all targets of `rows` that are not -100, summed up: a scalar."""
        ...
