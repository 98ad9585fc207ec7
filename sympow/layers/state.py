"""What every mixer carries from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor


@dataclass
class MixerState:
    """What a mixer carries from step to step: a dataclass of tensors, nested states and plain numbers.

    `step` may update the tensors in place where gradients are off: use the state it returns, not the one it
    was given.
    """

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor the state holds."""
        return _tensors(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, over the whole batch."""
        return sum(tensor.nbytes for tensor in self.tensors())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
