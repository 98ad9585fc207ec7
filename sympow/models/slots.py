"""Steps many sequences of different lengths as one batch, for continuous batching.

A slot holds the state of one sequence. Constant states make all slots equally large, so a new sequence fits if a slot
is free. Sequences are the first rows of one batch, without gaps. A step takes views of these rows, so tensors that a
layer updates in place are not copied.

States of power attention with a tail (on GPUs) are larger than all the rest, and their step takes slots by index. There
a row names a slot, and when a row moves, its state stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sympow.layers import MixerState
from sympow.layers.cache import reads_rows
from sympow.layers.state import RowStates, mapped, narrowed
from sympow.models.bodies.rwkv7 import RWKV7BlockState
from sympow.models.lm import ModelState
from sympow.models.step_graphs import StepGraphs
from sympow.ops import DecodingState
from sympow.ops.memory import check_memory, memory_of

_COUNTERS = 20  # bytes of a slot's length, position and number
_MOST = 1 << 40  # tokens: more than any memory holds, and few enough for sizes of 64 bits
_SHARE = 10  # of the free memory, a tenth, because each step of a GPU reads all of the room
_MARGIN = 1.25  # of the bytes of a copy: a step needs memory of its own beside the copy

Leaf = Tensor | RowStates | DecodingState


class Steps(Protocol):
    """Lists the methods of a model that slots need. They are methods of `LanguageModel`."""

    embedding: nn.Embedding

    def init_state(self, batch_size: int) -> ModelState:
        """Returns the state before the first token; see `LanguageModel.init_state`."""
        ...

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Continues sequences by tokens; see `LanguageModel.step`."""
        ...


class Slots:
    """Holds the states of up to `capacity` sequences of one model.

    Rows 0 to `count - 1` are in use.

    States whose rows may differ in length (`MixerState.counters`) are stored as one batch. So are key/value caches of
    softmax attention if it is known how many tokens a sequence reads at most. For other states every sequence keeps its
    own state, and the mixer is stepped row by row. The results are the same, but steps are slower.

    On a GPU a step of a model that has only states of the first two kinds is a CUDA graph. There is one graph for each
    number of rows (rounded up). Without graphs, most of the time would go into launching small kernels.

    Args:
        model: the model.
        capacity: sequences held at most, at least 1. Their states are allocated now.
        most: the number of tokens that a sequence reads at most. Key/value caches of softmax attention then have room
            for as many. None: any number.
        state_dtype: of the sums of power attention, torch.bfloat16 or torch.int8 (`narrowed`). None keeps the
            dtype that the model gives them.

    Raises ValueError for numbers below 1, for slots for which there is not enough memory, for another `state_dtype`,
    and for a `state_dtype` if the model has no sums of power attention.
    """

    def __init__(self, model: Steps, capacity: int, most: int | None = None, state_dtype: torch.dtype | None = None):
        if not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"the capacity of slots must be an integer of at least 1; got {capacity!r}")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ValueError(f"the tokens of a slot must be an integer of at least 1; got {most!r}")
        needed = capacity * slot_bytes(model, most, state_dtype)
        check_memory(f"a state for {capacity:,} slots", needed, model.embedding.weight.device)
        if state_dtype is None:
            state = model.init_state(capacity)
        else:  # of one sequence, repeated: the wide sums of all may not fit into memory
            state = narrowed(model.init_state(1), state_dtype)
            if not any(isinstance(leaf, DecodingState) for leaf, _ in _leaves(state, state)):
                raise ValueError(f"a state dtype of {state_dtype} needs sums of power attention; this model has none")
            state = state.mapped(lambda tensor: tensor.repeat_interleave(capacity, 0))
        self._begin(model, capacity, _with_all_room(state, most), most)

    @classmethod
    def holding(cls, model: Steps, state: ModelState, tokens: int, most: int | None = None) -> Slots | None:
        """Returns slots that the sequences of a batch fill.

        The result is None if a mixer would be stepped row by row, and if there is not enough memory for the slots.

        Args:
            model: the model.
            state: of sequences of equal length. The slots take over its decoding states, so that these are in memory
                only once, and copy the rest. Steps overwrite the decoding states.
            tokens: the number of tokens that each sequence has read.
            most: the number of tokens that a sequence reads at most, these included. Key/value caches of softmax
                attention then have room for as many. None: any number. Then a model with such caches has no slots.
        """
        counters = torch.empty(0, dtype=torch.int64, device="meta")
        planned = _slotted(_with_all_room(state.mapped(lambda tensor: tensor.to("meta")), most), counters)
        leaves = [leaf for leaf, _ in _leaves(planned, planned)]
        if any(isinstance(leaf, RowStates) for leaf in leaves):
            return None
        copied = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        memory = memory_of(model.embedding.weight.device)
        if memory is not None and _MARGIN * copied > memory.free:
            return None
        slots, batch = cls.__new__(cls), next((tensor.shape[0] for tensor in state.tensors()), 1)
        given = {tensor.data_ptr() for tensor in state.tensors()}

        def owned(leaf: Leaf) -> Leaf:
            return leaf.clone() if isinstance(leaf, Tensor) and leaf.data_ptr() in given else leaf

        try:
            slots._begin(model, batch, mapped(_with_all_room(state, most), owned, Leaf), most)
        except torch.OutOfMemoryError:  # `state` is as it was
            return None
        for row in range(slots.capacity):
            slots._set_length(row, tokens)
        slots._set_count(slots.capacity)
        return slots

    @classmethod
    def with_graphs(cls, model: Steps, state: ModelState, tokens: int, most: int | None = None) -> Slots | None:
        """Returns the result of `holding` if steps are CUDA graphs, otherwise None."""
        return cls.holding(model, state, tokens, most) if model.embedding.weight.device.type == "cuda" else None

    def _begin(self, model: Steps, capacity: int, state: ModelState, most: int | None = None) -> None:
        """Sets up slots without sequences.

        Args:
            model: the model.
            capacity: sequences held at most.
            state: of so many sequences, with all room. Its tensors become the slots.
            most: the number of tokens that a sequence reads at most.
        """
        self.capacity, self.count = capacity, 0
        self._model, self._most = model, most
        self._lengths = [0] * capacity
        self._position = torch.zeros(capacity, dtype=torch.int64, device=model.embedding.weight.device)
        # The slot of every row in the pools of decoding states: first of those in use, then of those that are free.
        self._slots = torch.arange(capacity, dtype=torch.int32, device=self._position.device)
        self._in_order = True  # whether the slot of every row has the number of the row
        self._held = _slotted(state, self._position)
        self._view: ModelState | None = None  # of the rows in use, made when it is needed
        self._graphs = StepGraphs(capacity, self._advance) if self._position.is_cuda and self.as_one_batch else None

    @property
    def as_one_batch(self) -> bool:
        """Returns whether every mixer is stepped for all rows at once, none row by row."""
        return not any(isinstance(held, RowStates) for held, _ in _leaves(self._held, self._held))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all slots, including unused ones."""
        return sum(tensor.nbytes for tensor in self._held.tensors())

    @torch.no_grad()
    def prepare(self) -> None:
        """Makes the CUDA graphs of all numbers of rows. Without it each is made when it is first needed.

        Raises RuntimeError if a row is in use, because its state would be lost.
        """
        if self.count:
            raise RuntimeError(f"slots are prepared before they are used; got {self.count} rows in use")
        if self._graphs is not None:
            self._graphs.prepare(self._rows)

    def put(self, state: ModelState, tokens: int) -> int:
        """Copies the state of one sequence, after so many tokens, into a free slot, and returns its row.

        The state of several sequences of equal length is put into as many rows, where all mixers are stepped
        `as_one_batch`. Raises RuntimeError where there are too few free slots, or no room for so many tokens.
        """
        self._check_room(tokens)
        row = self.count
        batch = next((tensor.shape[0] for tensor in state.tensors()), 1)
        if row + batch > self.capacity:
            raise RuntimeError(f"{self.capacity - row} of {self.capacity} slots are free; got {batch} sequences")
        whole = _with_all_room(state, None if self._most is None else tokens)
        for held, given in _leaves(self._held, whole):
            if isinstance(held, RowStates):
                if batch > 1:
                    raise RuntimeError("the caches of several sequences cannot be put into slots at once")
                held.rows.append(given.clone())
            elif isinstance(held, DecodingState):
                held.at(self._slots[row : row + batch]).put(given)
            else:
                own = held[row : row + batch]
                if own.shape != given.shape:  # the room of a cache that is not full
                    if not reads_rows(own.device):
                        own.zero_()  # a mask does not hide what an earlier row left there and is not finite
                    own = own[:, :, : given.shape[2]]
                own.copy_(given)
        for each in range(row, row + batch):
            self._set_length(each, tokens)
        self._set_count(row + batch)
        return row

    def take(self, row: int) -> ModelState:
        """Returns a copy of a row, as the state of one sequence."""
        self._check(row)
        return self._cut(slice(row, row + 1), self._lengths[row]).clone()

    def release(self, row: int) -> None:
        """Frees a row. The last row in use moves to the freed row."""
        self._check(row)
        last, moved = self.count - 1, self._held
        if reads_rows(self._position.device):  # the room behind the tokens is never read
            moved = _of_mixers(moved, lambda mixer: mixer.within(self._lengths[last]))
        for held, _ in _leaves(moved, moved):
            if isinstance(held, RowStates):
                held.rows[row] = held.rows[last]
                held.rows.pop()
            elif row != last and not isinstance(held, DecodingState):
                held[row].copy_(held[last])
        self._in_order &= row == last
        freed = self._slots[row].clone()
        self._slots[row].copy_(self._slots[last])
        self._slots[last].copy_(freed)
        self._set_length(row, self._lengths[last])
        self._set_count(last)

    def equal(self) -> ModelState:
        """Returns the state of all rows in use, which are equally long, as one batch. The next step overwrites it.

        Raises RuntimeError where rows differ in length, or a mixer is stepped row by row.
        """
        lengths = set(self._lengths[: self.count])
        if len(lengths) != 1 or not self.as_one_batch:
            raise RuntimeError("only rows of equal length that are stepped as one batch have one state")
        return self._cut(slice(0, self.count), lengths.pop())

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Reads one more token in every row in use: maps int64 [count] to logits [count, vocab_size].

        The next step may overwrite the logits. Raises RuntimeError where a row has no room for the token.
        """
        self._check_room(max(self._lengths[: self.count], default=0) + 1)
        graphs = self._graphs
        if graphs is not None:
            logits = graphs.step(tokens, self._rows)
        else:
            self._view = self._rows(self.count) if self._view is None else self._view
            logits = self._advance(tokens, self._view)
        self._lengths[: self.count] = [length + 1 for length in self._lengths[: self.count]]
        return logits

    def _advance(self, tokens: Tensor, view: ModelState) -> Tensor:
        """Steps the rows of `view`, without waiting for the device."""
        logits, after = self._model.step(tokens[:, None], view)
        for held, stepped in _leaves(view, after):
            if isinstance(held, RowStates):
                held.rows[:] = stepped.rows
            elif isinstance(held, DecodingState):
                if held is not stepped:
                    held.put(stepped)
            elif held.data_ptr() != stepped.data_ptr():
                held.copy_(stepped)
        self._position[: tokens.shape[0]] += 1
        return logits

    def _rows(self, count: int) -> ModelState:
        """Returns a view of the first rows."""

        def first(leaf: Leaf) -> Leaf:
            if isinstance(leaf, DecodingState):
                return leaf.at(self._slots[:count])
            return leaf if isinstance(leaf, RowStates) else leaf[:count]

        return mapped(self._held, first, Leaf)

    def _cut(self, rows: slice, tokens: int) -> ModelState:
        """Returns the state of some rows, all after so many tokens: it may be a view, or a copy."""

        def cut(leaf: Leaf) -> Any:
            if isinstance(leaf, RowStates):
                return leaf.rows[rows.start]
            if isinstance(leaf, DecodingState):
                whole = self._in_order and rows == slice(0, self.capacity)
                return leaf if whole else leaf.at(self._slots[rows]).taken()
            return leaf[rows]

        cut_rows = mapped(self._held, cut, Leaf)
        return _of_mixers(cut_rows, lambda mixer: mixer.counting(tokens) if mixer.rows_may_differ else mixer)

    def _check(self, row: int) -> None:
        if not 0 <= row < self.count:
            raise IndexError(f"{self.count} rows are in use, from 0 on; got {row}")

    def _check_room(self, tokens: int) -> None:
        if self._most is not None and tokens > self._most:
            raise RuntimeError(f"these slots have room for sequences of {self._most:,} tokens; got one of {tokens:,}")

    def _set_length(self, row: int, tokens: int) -> None:
        self._lengths[row] = tokens
        self._position[row] = tokens

    def _set_count(self, count: int) -> None:
        self.count = count
        self._view = None


def slot_bytes(model: Steps, most: int | None, state_dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of one slot, with room for `most` tokens in key/value caches of softmax attention.

    With `most` None, the caches have no room. `state_dtype` is as in `Slots`.
    """
    planned = model.init_state(1).mapped(lambda tensor: tensor.to("meta"))
    if state_dtype is not None:
        planned = narrowed(planned, state_dtype)
    return _with_all_room(planned, most).nbytes + _COUNTERS


class CacheRoom(NamedTuple):
    """Says whether key/value caches of softmax attention have room for the longest request in every slot.

    Then steps read all rows as one batch. Otherwise caches grow, and softmax attention is stepped row by row.

    Attributes:
        tokens: of the longest request, prompt and answer.
        nbytes: of that room in all slots; 0 for a model without such caches.
        allowed: bytes that it may take: a tenth of the memory that is free beside the other states; None if the free
            memory is not known, which allows nothing.
    """

    tokens: int
    nbytes: int
    allowed: int | None

    @property
    def fixed(self) -> bool:
        """Returns whether the caches have the room from the start."""
        return 0 < self.nbytes <= (self.allowed or 0)

    @classmethod
    def of(cls, model: Steps, slots: int, tokens: int, state_dtype: torch.dtype | None = None) -> CacheRoom:
        """Computes the room of so many slots, `state_dtype` as in `Slots`."""
        states = slots * slot_bytes(model, None, state_dtype)
        memory = memory_of(model.embedding.weight.device)
        allowed = None if memory is None else max(0, memory.free - states) // _SHARE
        return cls(tokens, slots * slot_bytes(model, tokens, state_dtype) - states, allowed)


def _of_mixers(state: Any, function: Callable[[MixerState], MixerState]) -> Any:
    """Returns the state of a model with function(state) in place of the state of every mixer."""
    if isinstance(state, list):
        return [_of_mixers(item, function) for item in state]
    if isinstance(state, ModelState | RWKV7BlockState):  # which hold the states of mixers
        return replace(state, **{name: _of_mixers(item, function) for name, item in vars(state).items()})
    return function(state) if isinstance(state, MixerState) else state


def _slotted(state: ModelState, position: Tensor) -> ModelState:
    """Returns the state of a batch with `position` in place of counters, and `RowStates` for mixers that need them."""
    return _of_mixers(state, lambda mixer: mixer.counting(position) if mixer.rows_may_differ else RowStates([]))


def _with_all_room(state: ModelState, most: int | None) -> ModelState:
    """Returns the state of a model with the states of mixers as they are held, see `MixerState.with_all_room`."""

    def grown(mixer: MixerState) -> MixerState:
        whole = mixer.with_all_room(None if most is None else min(most, _MOST))
        return whole if whole.rows_may_differ else mixer

    return _of_mixers(state, grown)


def _leaves(held: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every leaf in `held` except counters, each with its counterpart in `other`."""
    if isinstance(held, Leaf):
        yield held, other
    elif isinstance(held, list):
        for pair in zip(held, other, strict=True):
            yield from _leaves(*pair)
    elif is_dataclass(held):
        counters = getattr(held, "counters", None) or ()
        for field in fields(held):
            mine, its = getattr(held, field.name), getattr(other, field.name)
            counts = field.name in counters and isinstance(mine, Tensor) and not mine.is_floating_point()
            if not counts:
                yield from _leaves(mine, its)
