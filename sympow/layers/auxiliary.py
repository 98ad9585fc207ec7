"""Auxiliary losses: a mixer adds them to the loss of its task in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_collected: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)


@contextmanager
def auxiliary_losses() -> Iterator[list[Tensor]]:
    """Collects the auxiliary losses of all forward passes in a `with` block, each a scalar with a gradient.

    A training loop runs the model in this block and adds the sum of the auxiliary losses to its loss. Outside of such
    a block, mixers compute no auxiliary losses:

        with auxiliary_losses() as extra:
            loss = task_loss(model(tokens))
        (loss + sum(extra)).backward()
    """
    losses: list[Tensor] = []
    token = _collected.set(losses)
    try:
        yield losses
    finally:
        _collected.reset(token)


def collecting() -> bool:
    """Returns whether a forward pass runs inside `auxiliary_losses`."""
    return _collected.get() is not None


def add_auxiliary_loss(loss: Tensor) -> None:
    """Adds `loss` to the collected losses; does nothing outside of `auxiliary_losses`."""
    losses = _collected.get()
    if losses is not None:
        losses.append(loss)
