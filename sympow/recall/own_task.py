"""Tasks of recall that users write: a function draws the rows, and its import path names it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sympow.data.batches import IGNORED
from sympow.data.mqar import RecallExamples
from sympow.fields import check_integer
from sympow.layers.registry import imported, is_import_path


@dataclass(frozen=True)
class OwnTask:
    """Names a task whose rows a function draws.

    The function is called as `function(rng, examples, length, vocab_size, **options)`. It returns two integer arrays
    [examples, length]: the tokens, 0 to vocab_size - 1, and the targets, which are tokens, or -100 for no target. Every
    row has the same number of targets, at least one. All random numbers come from `rng`, a `numpy.random.Generator`.

    Attributes:
        function: its import path, "package.module:name", which every worker can import.
        length: N, tokens in a row.
        vocab_size: C.
        pairs: D, the number of values that a guess chooses from; figures show 1/D as guessing. None for no such line.
        options: keyword arguments of the function, JSON values.

    Raises TypeError and ValueError in one line for sizes out of range and for a path that names no function;
    ImportError where its module cannot be imported.
    """

    function: str
    length: int
    vocab_size: int = 8192
    pairs: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("length", self.length, 1)
        check_integer("vocab_size", self.vocab_size, 2)
        if self.pairs is not None:
            check_integer("pairs", self.pairs, 1)
        if not is_import_path(self.function):
            raise ValueError(f"the function of a task is written package.module:name; got {self.function!r}")
        if not callable(found := imported(self.function, "task")):
            raise ValueError(f"the task {self.function!r} must name a function; got {found!r}")

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        """Gives the task in short, "package.module:name 64:4": length and pairs, and the options."""
        sizes = str(self.length) if self.pairs is None else f"{self.length}:{self.pairs}"
        return " ".join([self.function, sizes, *([json.dumps(self.options, sort_keys=True)] if self.options else [])])

    def draw(self, examples: int, seed: int | Sequence[int]) -> RecallExamples:
        """Draws rows, int32; ValueError in one line where the function returns something else than it must."""
        rng = np.random.default_rng(seed)
        drawn = imported(self.function, "task")(rng, examples, self.length, self.vocab_size, **self.options)
        if not isinstance(drawn, tuple) or len(drawn) != 2:
            raise self._error(f"a tuple of tokens and targets; got {type(drawn).__name__}")
        tokens, targets = (np.asarray(part) for part in drawn)
        for name, array, low in (("tokens", tokens, 0), ("targets", targets, IGNORED)):
            if array.shape != (examples, self.length) or not np.issubdtype(array.dtype, np.integer):
                shape = [examples, self.length]
                raise self._error(f"{name} as integers {shape}; got {array.dtype} {list(array.shape)}")
            asked = array if low == 0 else array[array != IGNORED]
            if asked.size and not (asked.min() >= 0 and asked.max() < self.vocab_size):
                raise self._error(f"{name} of 0 to {self.vocab_size - 1}; got {asked.min()} to {asked.max()}")
        counts = (targets != IGNORED).sum(1)
        if counts.min() < 1 or counts.min() != counts.max():
            raise self._error(f"as many targets in every row; got {counts.min()} to {counts.max()}")
        return RecallExamples(tokens.astype(np.int32), targets.astype(np.int32))

    def _error(self, what: str) -> ValueError:
        return ValueError(f"the task {self.function!r} must return {what}")
