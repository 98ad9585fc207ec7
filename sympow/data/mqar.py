"""Multi-query associative recall (MQAR) and two related tasks: which value followed this key?

A row starts with its context, which consists of pairs of a key and a value. After the context every key occurs once
more as a query, and the target there is its value. Source of MQAR: Zoology (Arora et al., 2023, arXiv 2312.04927),
Algorithm 1. The related tasks are those of its code (github.com/HazyResearch/zoology, data/forgetting_mqar.py and
data/compositional_ar.py).

With length N = 12, D = 2 pairs, a vocabulary of C = 10 and zeros as filler ("." stands for "no target"):

    mqar             3 7 1 9|0 0 1 0 0 0 3 0      keys 1 to 4, values 5 to 9
      targets        . . . . . . 9 . . . 7 .
    forgetting       3 7 1 9 3 6|1 0 0 0 3 0      one update: 3 is given 6 in place of 7
      targets        . . . . . . 9 . . . 6 .

and with N = 24, D = 4 (a grid of 2 first and 2 second keys), C = 12:

    compositional    1 5 8 2 4 9 2 5 11 1 4 10|2 5 0 1 5 0 2 4 0 1 4 0      first keys 1 to 3, second keys 4 to 7,
      targets        . . . . . . . . .  . . . |. 11 . . 8 . . 9 . . 10 .    values 8 to 11

Each query is in a slot of 2 tokens (compositional: 3) after the context. The slot of distance s = 1, 2, ... is drawn
with probability proportional to s**(alpha - 1), without replacement; alpha = 1 is uniform. With `min_distance` the
first slot is so far behind the last key of the context, and filler is between them.

Rows differ from those of the published code on purpose:

- Keys are assigned to the drawn slots at random. The published code assigns the slots in the order in which they are
  drawn. Near slots tend to be drawn first, so the queries of the first keys are nearest to the context.
  `deal="drawn"` does the same.
- alpha is 0.1, as in the paper. The published code has 0.01.
- Filler is 0, or with filler="random" tokens that are neither 0 nor a key or value of the row. In the published code
  filler is random by default and from the whole vocabulary, so a key of the row may occur outside the slots.
- The values of a row are all different, those of updates too. In the published code an update may repeat the value.
- The task has a generator of its own. The published code draws by the global generators of numpy and torch, so the
  same seed gives other rows.
- The pairs occur in the context once. The published code can repeat them (`num_passes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sympow.data.batches import IGNORED
from sympow.fields import check_integer

KINDS = ("mqar", "forgetting", "compositional")
FILLERS = ("zero", "random")
DEALS = ("random", "drawn")

# Elements worked on at once, of rows and of the table of random filler: a few megabytes beside the result.
BLOCK_ELEMENTS, TABLE_ELEMENTS = 1 << 18, 1 << 19


@dataclass(frozen=True)
class RecallTask:
    """Describes rows of associative recall.

    Attributes:
        kind: "mqar"; "forgetting", where `updates` of the keys are given another value behind the D pairs, and the
            last one counts; "compositional", where a key is two tokens, and every pair of sqrt(D) first and sqrt(D)
            second keys has its value, so that neither token alone tells it.
        length: N, tokens in a row; even.
        pairs: D, the number of keys, each of which is queried once. 4 D <= N; forgetting: 4 D + 2 updates <= N;
            compositional: D is a square, and 6 D <= N. `min_distance` needs longer rows.
        vocab_size: C. Token 0 is filler. Keys are 1 to C // 2 - 1 and values C // 2 to C - 1; compositional: first
            keys from 1, second keys from C // 3, values from 2 (C // 3). Those of a row are all different.
        alpha: the parameter of the power law of distances; the published runs have 0.1, the published code 0.01.
        filler: the tokens at other positions: "zero", or "random" tokens that are not 0 and no key or value of the row.
        updates: the number of updates of "forgetting", 1 to D; 0 for other kinds.
        deal: how drawn slots are assigned to keys: "random", or "drawn" for the order in which slots are drawn, as in
            the published code.
        min_distance: the least number of tokens from any key of the context to its query.

    Raises TypeError and ValueError in one line for a task that cannot be drawn.
    """

    kind: str = "mqar"
    length: int = 64
    pairs: int = 4
    vocab_size: int = 8192
    alpha: float = 0.1
    filler: str = "zero"
    updates: int = 0
    deal: str = "random"
    min_distance: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("kind", KINDS), ("filler", FILLERS), ("deal", DEALS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}; got {getattr(self, name)!r}")
        for name, least in (("length", 2), ("pairs", 1), ("vocab_size", 2), ("updates", 0), ("min_distance", 0)):
            check_integer(name, getattr(self, name), least)
        if not isinstance(self.alpha, int | float) or not math.isfinite(self.alpha):
            raise ValueError(f"alpha must be a finite number; got {self.alpha!r}")
        if self.length % 2:
            raise ValueError(f"length must be even; got {self.length}")
        if self.kind == "compositional" and math.isqrt(self.pairs) ** 2 != self.pairs:
            raise ValueError(f"pairs of a compositional task must be a square, 1, 4, 9, ...; got {self.pairs}")
        if self.kind == "forgetting" and not 1 <= self.updates <= self.pairs:
            raise ValueError(f"a forgetting task has 1 to {self.pairs} updates, as many as pairs; got {self.updates}")
        if self.kind != "forgetting" and self.updates:
            raise ValueError(f"updates are of the forgetting task alone; got {self.updates} for {self.kind}")
        needed = self.first_slot + self.width * self.pairs
        if self.length < needed:
            needs = f"{self.pairs} pairs" + (f" and {self.updates} updates" if self.updates else "")
            needs += f" with a min_distance of {self.min_distance}" if self.min_distance else ""
            raise ValueError(f"{needs} need a length of at least {needed + needed % 2}; got {self.length}")
        self._check_vocabulary()

    @property
    def width(self) -> int:
        """Returns the tokens of a pair in the context, and of a slot behind it."""
        return 3 if self.kind == "compositional" else 2

    @property
    def context(self) -> int:
        """Returns the number of tokens before the first slot."""
        return self.width * (self.pairs + self.updates)

    @property
    def first_slot(self) -> int:
        """Returns the token at which the first slot starts. The last key of the context starts at context - width."""
        return self.context + max(0, self.min_distance - self.width)

    @property
    def slots(self) -> int:
        """Returns the number of slots for queries, S; slot s starts at token first_slot + width (s - 1), s = 1..S."""
        return (self.length - self.first_slot) // self.width

    @property
    def bounds(self) -> tuple[int, ...]:
        """Returns where the ranges of keys (of first and second keys) and of values start, and where they end."""
        c = self.vocab_size
        return (1, c // 3, 2 * (c // 3), c) if self.kind == "compositional" else (1, c // 2, c)

    @property
    def drawn(self) -> tuple[int, ...]:
        """Returns how many tokens of each range a row uses."""
        side = math.isqrt(self.pairs)
        return (side, side, self.pairs) if self.kind == "compositional" else (self.pairs, self.pairs + self.updates)

    def draw(self, examples: int, seed: int | Sequence[int]) -> RecallExamples:
        """Draws rows, as `generate` does."""
        return generate(self, examples, seed)

    def __str__(self) -> str:
        """Gives the task in short, "mqar 64:4": kind, length and pairs, and whatever is not the default."""
        more = [f"{self.updates} updates"] if self.updates else []
        rare = ("filler", "alpha", "deal", "min_distance")
        more += [f"{name} {getattr(self, name)}" for name in rare if getattr(self, name) != getattr(RecallTask, name)]
        return " ".join([self.kind, f"{self.length}:{self.pairs}", *more])

    def _check_vocabulary(self) -> None:
        names = ("first keys", "second keys", "values") if self.kind == "compositional" else ("keys", "values")
        for name, low, high, drawn in zip(names, self.bounds, self.bounds[1:], self.drawn, strict=False):
            if high - low < drawn:
                raise ValueError(
                    f"vocab_size is too small: {drawn} {name} are needed, {self.vocab_size} tokens hold {high - low}"
                )
        if self.filler == "random" and self.vocab_size - 1 <= sum(self.drawn):
            raise ValueError(
                f"vocab_size is too small for random filler: keys and values take {sum(self.drawn)} of "
                f"{self.vocab_size - 1} tokens"
            )


class RecallExamples(NamedTuple):
    """Holds rows: tokens and targets, int32 [n, N].

    Targets are -100 (IGNORED) except at the D queries of a row.
    """

    tokens: np.ndarray
    targets: np.ndarray

    def queries(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions of the queries, from left to right, and their targets: int64 and int32, [n, D]."""
        rows, columns = np.nonzero(self.targets != IGNORED)
        return columns.reshape(len(self.targets), -1), self.targets[rows, columns].reshape(len(self.targets), -1)


def generate(task: RecallTask, examples: int, seed: int | Sequence[int]) -> RecallExamples:
    """Draws `examples` rows of `task`.

    They depend on the arguments alone.

    `seed` is a non-negative integer or several, as numpy's generators take it. Raises ValueError for a number of
    examples below 1.
    """
    if examples < 1:
        raise ValueError(f"examples must be at least 1; got {examples}")
    rng = np.random.default_rng(seed)
    tokens = np.zeros((examples, task.length), np.int32)
    targets = np.full((examples, task.length), IGNORED, np.int32)
    fill = _RandomFiller(task) if task.filler == "random" else None
    rows = BLOCK_ELEMENTS // task.length
    if fill is not None:
        rows = min(rows, TABLE_ELEMENTS // task.vocab_size)
    rows = max(1, rows)
    for start in range(0, examples, rows):
        block = slice(start, start + rows)
        _compose(task, rng, fill, tokens[block], targets[block])
    return RecallExamples(tokens, targets)


class Task(Protocol):
    """Draws examples. `RecallTask` is such a task, and users can write others."""

    def draw(self, examples: int, seed: int | Sequence[int]) -> RecallExamples:
        """Returns `examples` examples that depend on `seed` alone."""
        ...


def mixture(tasks: Sequence[Task], examples: int, seed: int | Sequence[int]) -> list[RecallExamples]:
    """Draws `examples` rows in equal parts from several tasks, for example with different lengths or numbers of pairs.

    The rows of a task also depend on its index in `tasks`, so equal tasks give different rows.
    """
    if not tasks or examples < len(tasks):
        raise ValueError(f"a mixture needs tasks and an example for each; got {len(tasks)} tasks, {examples} examples")
    key = [seed] if isinstance(seed, int) else list(seed)
    counts = [examples // len(tasks) + (i < examples % len(tasks)) for i in range(len(tasks))]
    return [task.draw(count, [*key, i]) for i, (task, count) in enumerate(zip(tasks, counts, strict=True))]


def solve(task: RecallTask, tokens: np.ndarray) -> np.ndarray:
    """Returns the targets of tokens [n, N] by scanning every row with a dictionary: the oracle; int32 [n, N]."""
    targets = np.full(tokens.shape, IGNORED, np.int32)
    keys = task.width - 1
    for row, row_targets in zip(tokens.tolist(), targets, strict=True):
        values = {}
        for i in range(0, task.context, task.width):
            values[tuple(row[i : i + keys])] = row[i + keys]
        for i in range(task.context, task.length - keys + 1):
            value = values.get(tuple(row[i : i + keys]))
            if value is not None:
                row_targets[i + keys - 1] = value
    return targets


def _compose(
    task: RecallTask, rng: np.random.Generator, fill: _RandomFiller | None, tokens: np.ndarray, targets: np.ndarray
) -> None:
    """Writes contexts, filler, queries and their targets into rows of zeros and of -100."""
    n, pairs, width = len(tokens), task.pairs, task.width
    ranges = zip(task.bounds, task.bounds[1:], task.drawn, strict=False)
    used = [draw_distinct(rng, n, low, high, count) for low, high, count in ranges]
    values = used[-1]
    if task.kind == "compositional":
        side = task.drawn[0]
        cell = rng.permuted(np.tile(np.arange(pairs), (n, 1)), axis=1)
        keys = [np.take_along_axis(used[0], cell // side, 1), np.take_along_axis(used[1], cell % side, 1)]
    else:
        keys = [used[0]]
    last = values[:, :pairs]
    in_context = keys
    if task.updates:
        updated = draw_distinct(rng, n, 0, pairs, task.updates)
        in_context = [np.concatenate([key, np.take_along_axis(key, updated, 1)], axis=1) for key in keys]
        last = last.copy()
        np.put_along_axis(last, updated, values[:, pairs:], 1)
    for i, part in enumerate([*in_context, values]):
        tokens[:, i : task.context : width] = part
    if fill is not None:
        fill(rng, tokens[:, task.context :], np.concatenate(used, axis=1))
    place = task.first_slot + width * _draw_slots(rng, n, task)
    for i, key in enumerate(keys):
        np.put_along_axis(tokens, place + i, key, 1)
    np.put_along_axis(targets, place + len(keys) - 1, last, 1)


def _draw_slots(rng: np.random.Generator, n: int, task: RecallTask) -> np.ndarray:
    """Draws D different slots for each of n rows, [n, D], from 0, and assigns them to the keys as `deal` says.

    Slots are drawn without replacement with weights s**(alpha - 1). For this, every slot gets an exponential random
    variable whose rate is its weight, and the slots with the smallest variables are taken in ascending order
    (Efraimidis and Spirakis, 2006). If slots are assigned in this order, the queries of early keys are near.
    """
    clocks = rng.standard_exponential((n, task.slots))
    clocks *= np.arange(1, task.slots + 1, dtype=np.float64) ** (1 - task.alpha)
    first = np.argpartition(clocks, task.pairs - 1, axis=1)[:, : task.pairs]
    if task.deal == "drawn":
        return np.take_along_axis(first, np.take_along_axis(clocks, first, 1).argsort(1), 1)
    return rng.permuted(first, axis=1)


def draw_distinct(rng: np.random.Generator, n: int, low: int, high: int, count: int) -> np.ndarray:
    """Draws int32 [n, count]: a row is `count` different numbers of [low, high), each ordered choice equally likely."""
    if 4 * count > high - low:
        return rng.permuted(np.tile(np.arange(low, high, dtype=np.int32), (n, 1)), axis=1)[:, :count]
    drawn = rng.integers(low, high, (n, count), dtype=np.int32)
    # A number that occurs further left in its row is drawn again. The rejected numbers of a position are always among
    # the final numbers on its left, so the result is the same as if positions were filled one after another.
    bits = count.bit_length()
    rows = np.arange(n)
    while len(rows):
        ordered = np.sort((drawn[rows].astype(np.int64) << bits) | np.arange(count), axis=1)
        which, column = np.nonzero((ordered[:, 1:] >> bits) == (ordered[:, :-1] >> bits))
        places = ordered[which, column + 1] & ((1 << bits) - 1)
        drawn[rows[which], places] = rng.integers(low, high, len(which), dtype=np.int32)
        rows = rows[np.unique(which)]
    return drawn


class _RandomFiller:
    """Fills rows with tokens of 1..C-1 that the rows do not use, all with equal probability.

    A row uses F tokens, so C - 1 - F tokens are allowed, and a number of 1..C-1-F is drawn. A number that is allowed
    means itself. The other numbers mean the allowed tokens above C-1-F, of which there are as many.
    """

    def __init__(self, task: RecallTask):
        self.allowed = task.vocab_size - 1 - sum(task.drawn)
        self._meaning = np.empty((0, 0), np.int32)

    def __call__(self, rng: np.random.Generator, tokens: np.ndarray, used: np.ndarray) -> None:
        """Fills tokens [n, T] of rows that use `used` [n, F], all different."""
        n, meant = len(tokens), self.allowed + 1
        if len(self._meaning) < n:
            self._meaning = np.tile(np.arange(meant, dtype=np.int32), (n, 1))
        meaning = self._meaning[:n]
        beyond = np.ones(used.shape, bool)
        row, column = np.nonzero(used > self.allowed)
        beyond[row, used[row, column] - meant] = False
        row, column = np.nonzero(used <= self.allowed)
        refused = used[row, column]
        meaning[row, refused] = meant + np.nonzero(beyond)[1]
        drawn = rng.integers(1, meant, tokens.shape)
        drawn += np.arange(0, n * meant, meant)[:, None]  # places in the flattened table
        tokens[:] = meaning.ravel().take(drawn, mode="clip")
        meaning[row, refused] = refused
