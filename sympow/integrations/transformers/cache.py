"""The states of a model as a cache of transformers, whose rows may have read different numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sympow.layers import MixerState
from sympow.layers.linear import LinearAttentionState
from sympow.layers.power import PowerAttentionState
from sympow.models import ModelState
from sympow.models.context_file import NO_TOKENS
from sympow.models.slots import Slots, Steps

Value = TypeVar("Value")


class SympowCacheLayer(CacheLayerMixin):
    """Holds the state of one block, as many as the cache has groups of rows (`SympowCache`).

    Attributes:
        states: the state of each group; None where no token has been read yet.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: SympowCache):
        super().__init__()
        self._cache = cache
        self._states: list[MixerState | None] = []

    @property
    def states(self) -> list[MixerState | None]:
        """Returns the state of each group."""
        self._cache.settle()
        return self._states

    @states.setter
    def states(self, states: list[MixerState | None]) -> None:
        self._states = states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raises NotImplementedError: the block makes its state."""
        raise NotImplementedError("a block's state is made by the block, not from keys and values")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raises NotImplementedError: a state takes no keys and values."""
        raise NotImplementedError("a block continues its state itself; there are no keys and values to add")

    def get_seq_length(self) -> int:
        """Returns the number of columns seen, including those that the attention mask leaves out."""
        return self._cache.columns

    def get_max_length(self) -> int:
        """Returns -1, which means in transformers that the cache has no largest length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Returns -1, which means in transformers that the cache has no largest length."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and the offset of the mask's columns, for a forward of `query_length` columns."""
        return self._cache.columns + query_length, 0

    def offload(self) -> None:
        """Raises NotImplementedError: a state is not moved to another device."""
        raise NotImplementedError("states of sympow stay on the device of their block")

    prefetch = offload

    @property
    def nbytes(self) -> int:
        """Returns bytes of the states, over the whole batch."""
        return sum(state.nbytes for state in self.states if state is not None)


# The rows of a group, in the order of their states, and the state of each block; None where no token has
# been read.
Part = tuple[list[int], list[MixerState | None]]


class SympowCache(Cache):
    """What a model of sympow carries from step to step: `past_key_values` of `SympowModel`.

    Tokens that the attention mask leaves out are not read: they leave no trace in keys, values, gates,
    convolutions, or the distances of rotations. Rows that have therefore read different numbers of tokens
    are stepped in groups, one for each number. Groups whose states can stand in the same tensors are joined
    again behind every forward. That is so for states of a constant size, as those of power attention, whose
    rows then go on as one batch. Rows with key/value caches of different lengths stay apart, which is right
    but slower.

    As with all caches of transformers, a forward changes the cache that it is given.

    On a GPU, single tokens without padding go through CUDA graphs (`stepped`). The states stand in
    the slots of these graphs then, until somebody asks for them.

    Args:
        config: a `SympowConfig`, or the number of blocks.

    Attributes:
        groups: the rows of each group.
        columns: tokens seen, those left out included.
        before: how many tokens were read before those, and their hash, if the cache comes from a context file.
    """

    def __init__(self, config: Any):
        layers = config if isinstance(config, int) else config.num_hidden_layers
        self.groups: list[list[int]] = []
        self.columns = 0
        self.before = (0, NO_TOKENS)
        self._padded = False  # whether a row has left out a token
        self._slots: Slots | None = None
        super().__init__(layers=[SympowCacheLayer(self) for _ in range(layers)])

    def __deepcopy__(self, memo: dict[int, Any]) -> SympowCache:
        self.settle()
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copy

    def stepped(self, tokens: Tensor, steps: Steps) -> Tensor | None:
        """Reads one more token in every row by a CUDA graph, where that is possible.

        Args:
            tokens: int64 [B, 1].
            steps: of the model.

        Returns logits [B, vocab_size]; None where nothing was read, and the model is to be stepped as usual.
        """
        if self._slots is None:
            whole = self.groups == [list(range(tokens.shape[0]))] and not self._padded
            if not whole:
                return None
            state = ModelState(cast(list[MixerState], self.states(0)))
            self._slots = Slots.with_graphs(steps, state, self.before[0] + self.columns)
            if self._slots is None:
                return None
            for layer in self.layers:
                layer.states = []
        logits = self._slots.step(tokens[:, 0]).clone()
        self.columns += 1
        return logits

    def settle(self) -> None:
        """Takes the states out of the slots of CUDA graphs, if they stand there."""
        if self._slots is None:
            return
        slots, self._slots = self._slots, None
        for layer, state in zip(self.layers, slots.equal().clone().layers, strict=True):
            layer.states = [state]

    @property
    def nbytes(self) -> int:
        """Returns bytes of all states, over the whole batch."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def batch_size(self) -> int:
        """Returns the number of sequences, or -1 before the first forward."""
        return sum(len(group) for group in self.groups) or -1

    @property
    def is_initialized(self) -> bool:
        """Returns whether a forward has filled the cache."""
        return bool(self.groups)

    def states(self, group: int) -> list[MixerState | None]:
        """Returns the states of a group, one a block."""
        return [layer.states[group] for layer in self.layers]

    def parts(self, rows: int, counts: Sequence[int] | None, time: int) -> list[Part]:
        """Gives the groups that a forward of `time` columns steps, with their states before it.

        Args:
            rows: rows of the batch.
            counts: tokens that each row reads; None if each reads all.
            time: columns of the forward.

        Raises ValueError where the cache holds another number of rows.
        """
        self.settle()
        self._padded |= counts is not None
        if not self.groups:
            self.groups = [list(range(rows))]
            for layer in self.layers:
                layer.states = [None]
        if self.batch_size != rows:
            raise ValueError(f"past_key_values holds {self.batch_size} rows; the batch has {rows}")
        found: list[Part] = []
        for number, group in enumerate(self.groups):
            states = self.states(number)
            reads = [time if counts is None else counts[row] for row in group]
            for count in sorted(set(reads)):
                places = [place for place, other in enumerate(reads) if other == count]
                index = [group[place] for place in places]
                kept = states if len(places) == len(reads) else [_selected(state, places) for state in states]
                found.append((index, kept))
        return found

    def fill(self, parts: Sequence[Part], time: int) -> None:
        """Takes the groups and states after a forward of `time` columns."""
        self.columns += time
        if len(parts) > 1:
            parts = _joined(parts)
        self.groups = [rows for rows, _ in parts]
        for number, layer in enumerate(self.layers):
            layer.states = [states[number] for _, states in parts]
            layer.is_initialized = True

    def select(self, index: Sequence[int]) -> None:
        """Makes row i of the cache what row index[i] was; rows may occur many times, or not at all."""
        at = {row: (g, place) for g, group in enumerate(self.groups) for place, row in enumerate(group)}
        picked: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        for new, old in enumerate(index):
            group, place = at[int(old)]
            picked[group].append((new, place))
        parts = []
        for number, chosen in enumerate(picked):
            if chosen:
                places = [place for _, place in chosen]
                parts.append(
                    ([new for new, _ in chosen], [_selected(s, places) for s in self.states(number)])
                )
        if self.groups:
            self.fill(parts, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects sequences for the next step of beam search, as `select`; `beam_idx` is int64 [B]."""
        index = beam_idx.tolist()
        if index != list(range(self.batch_size)):
            self.select(index)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Selects sequences by their indices, int64, or by a mask, bool [B]."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Copies every sequence, so that it occurs `repeats` times in a row."""
        self.select([row for row in range(max(0, self.batch_size)) for _ in range(repeats)])

    def reset(self) -> None:
        """Forgets all tokens: the cache is as new."""
        self.groups, self.columns, self.before = [], 0, (0, NO_TOKENS)
        self._slots, self._padded = None, False
        for layer in self.layers:
            layer.states, layer.is_initialized = [], False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raises NotImplementedError: a state cannot remove tokens."""
        raise NotImplementedError("a state cannot forget its last tokens: copy the cache before reading them")

    def activate_past_recording(self) -> None:
        """Raises NotImplementedError: a state cannot remove tokens."""
        raise NotImplementedError("assisted generation takes tokens back, which a state cannot")


def moved(state: Value, offset: int) -> Value:
    """Returns `state` with its rotation `offset` positions later, where nothing but differences of positions matters.

    Rows of a batch that begin at different columns then stand at the same position, so that their states
    join.
    """
    if isinstance(state, PowerAttentionState | LinearAttentionState) and isinstance(state.position, int):
        return replace(state, position=state.position + offset)
    if not is_dataclass(state):
        return state
    inner = {field.name: getattr(state, field.name) for field in fields(state)}
    inner = {name: moved(value, offset) for name, value in inner.items() if isinstance(value, MixerState)}
    return replace(state, **inner) if inner else state  # type: ignore[type-var]


def _selected(state: MixerState | None, places: Sequence[int]) -> MixerState | None:
    if state is None:
        return None
    return _mapped(lambda x: x.index_select(0, torch.tensor(places, device=x.device)), state)


def _mapped(function: Callable[..., Tensor], value: Any, *others: Any) -> Any:
    """Returns `value` with function(tensor, the tensors in its place in the others) for every tensor in it."""
    if isinstance(value, Tensor):
        return function(value, *others)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, *items) for items in zip(value, *others, strict=True)])
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        inner = {n: _mapped(function, getattr(value, n), *(getattr(o, n) for o in others)) for n in names}
        return replace(value, **inner)
    return value


def _form(value: Any) -> Any:
    """Returns what has to be equal for two states to be held in the same tensors."""
    if isinstance(value, Tensor):
        return value.shape[1:], value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(_form(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_form(getattr(value, field.name)) for field in fields(value))
    return value


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Joins the groups of one form, their rows in rising order."""
    alike: dict[Any, list[Part]] = {}
    for part in parts:
        alike.setdefault(tuple(_form(state) for state in part[1]), []).append(part)
    result = []
    for group in alike.values():
        if len(group) == 1:
            result.append(group[0])
            continue
        index = [row for rows, _ in group for row in rows]
        order = sorted(range(len(index)), key=index.__getitem__)
        states = [
            None if of[0] is None else _mapped(_cat, *of) for of in zip(*(s for _, s in group), strict=True)
        ]
        if order != list(range(len(index))):
            states = [_selected(state, order) for state in states]
        result.append(([index[place] for place in order], states))
    return result


def _cat(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)
