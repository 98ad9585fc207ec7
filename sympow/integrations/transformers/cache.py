"""The states of a model as a cache of transformers. Its sequences may have read different numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from sympow.layers import MixerState
from sympow.layers.linear import LinearAttentionState
from sympow.layers.power import PowerAttentionState
from sympow.models import ModelState
from sympow.models.context import NO_TOKENS
from sympow.models.slots import Slots, Steps

Value = TypeVar("Value")

# What transformers calls the cache in arguments and outputs: "cache" from version 5.24 on.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class SympowCacheLayer(CacheLayerMixin):
    """Holds the states of one block, one state for each group of sequences (`SympowCache`).

    Args:
        cache: the cache that the layer belongs to.

    Attributes:
        states: the state of each group; None if the group has read no token.
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

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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


# The sequences of a group, in the order of their states, and the state of each block; None if the group has read no
# token.
Part = tuple[list[int], list[MixerState | None]]


class SympowCache(Cache):
    """Holds the states of a model between forward passes: `past_key_values` of `SympowModel`.

    Tokens that the attention mask leaves out are not read. They have no effect on keys, values, gates, convolutions,
    or the distances of rotations. Sequences may therefore have read different numbers of tokens. The model steps them
    in groups, one for each number of tokens. After every forward pass, groups are joined if their states fit into the
    same tensors. States of a constant size, such as those of power attention, always fit, and their sequences continue
    as one batch. Sequences with key/value caches of different lengths remain separate groups, which is slower.

    As with all caches of transformers, a forward pass changes the cache that it is given.

    On a GPU, CUDA graphs read single tokens without padding (`stepped`). The states are then in the slots of these
    graphs until they are accessed.

    Args:
        config: a `SympowConfig`, or the number of blocks.

    Attributes:
        groups: the indices of the sequences in each group.
        columns: the number of tokens seen, including tokens that the mask leaves out.
        before: the number of tokens read before these, and their hash, if the cache comes from a context file.
        most: the number of tokens that `generate` reads at most, those before included; None: any number.
        read: bool [B, columns], false for tokens that the mask has left out; None: it has left out none.
    """

    def __init__(self, config: Any):
        layers = config if isinstance(config, int) else config.num_hidden_layers
        self.groups: list[list[int]] = []
        self.columns = 0
        self.before = (0, NO_TOKENS)
        self.most: int | None = None
        self.read: Tensor | None = None
        self._slots: Slots | None = None
        super().__init__(layers=[SympowCacheLayer(self) for _ in range(layers)])

    def __deepcopy__(self, memo: dict[int, Any]) -> SympowCache:
        self.settle()
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copy

    def stepped(self, tokens: Tensor, steps: Steps) -> Tensor | None:
        """Reads one more token of every sequence with a CUDA graph, if that is possible.

        Args:
            tokens: int64 [B, 1].
            steps: steps the model.

        Returns logits [B, vocab_size], or None if no graph can be used. Then nothing was read.
        """
        read = self.before[0] + self.columns
        if read == self.most:  # the slots, if there are any, are full
            self.settle()
        if self._slots is None:
            whole = self.groups == [list(range(tokens.shape[0]))] and not self.padded
            if not whole:
                return None
            state = ModelState(cast(list[MixerState], self.states(0)))
            self._slots = Slots.with_graphs(steps, state, read, self.most if read < (self.most or 0) else None)
            if self._slots is None:
                return None
            for layer in self.layers:
                layer.states = []
            del state  # the slots have copies
        logits = self._slots.step(tokens[:, 0]).clone()
        self.columns += 1
        return logits

    def settle(self) -> None:
        """Moves the states from the slots of CUDA graphs into the layers, if they are in slots."""
        if self._slots is None:
            return
        for layer, state in zip(self.layers, self._slots.equal().clone().layers, strict=True):
            layer.states = [state]
        self._slots = None

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

    @property
    def padded(self) -> bool:
        """Returns whether the mask has left out a token of a sequence."""
        return self.read is not None

    def takes_a_token(self, mask: Tensor) -> bool:
        """Returns whether no token was left out so far, and an attention mask [B, S] leaves out none."""
        if self.padded or mask.ndim != 2 or len(mask) != self.batch_size or not mask.shape[1]:
            return False
        return bool((mask[:, -self.columns - 1 :] == 1).all())  # one wait for the device

    def check_mask(self, mask: Tensor | None, time: int) -> None:
        """Raises ValueError for an attention mask that leaves out a token that the cache has read.

        A state cannot take a token back, and it has read the padding that `generate` writes after the end of a row.
        Tokens that were left out stay left out: without a mask, `generate` makes one of ones.

        Args:
            mask: [B, S]; the last `time` columns are new, and those before them are what the cache has seen. A mask of
                fewer columns is not checked. None: it leaves out no new token.
            time: the number of new columns.
        """
        first = 0 if mask is None else mask.shape[1] - time - self.columns
        if mask is None or first < 0 or mask.shape[0] != self.batch_size:
            return
        given = mask[:, first : first + self.columns].bool()
        taken = ~given if self.read is None else ~given & self.read.to(given.device)
        if bool(taken.any()):
            row, column = taken.nonzero()[0].tolist()
            raise ValueError(
                f"past_key_values has read token {column} of row {row}, and attention_mask leaves it out: a state "
                "cannot take tokens back"
            )

    def states(self, group: int) -> list[MixerState | None]:
        """Returns the states of a group, one for each block."""
        return [layer.states[group] for layer in self.layers]

    def parts(self, rows: int, counts: Sequence[int] | None, time: int) -> list[Part]:
        """Returns the groups that a forward pass over `time` columns steps, with their incoming states.

        Args:
            rows: the number of sequences in the batch.
            counts: the number of tokens that each sequence reads; None if each reads all.
            time: the number of columns of the forward pass.

        Raises ValueError if the cache has another number of sequences.
        """
        self.settle()
        if not self.groups:
            self.groups = [list(range(rows))]
            for layer in self.layers:
                layer.states = [None]
        if sum(map(len, self.groups)) != rows:
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

    def fill(self, parts: Sequence[Part], time: int, keep: Tensor | None = None) -> None:
        """Stores the groups and states after a forward pass over `time` columns.

        keep: bool [B, time], false for tokens that were left out; None: none was.
        """
        if keep is not None or self.read is not None:
            like = cast(Tensor, self.read if keep is None else keep)
            past = like.new_ones(len(like), self.columns) if self.read is None else self.read.to(like.device)
            self.read = torch.cat([past, like.new_ones(len(like), time) if keep is None else keep], dim=1)
        self.columns += time
        if len(parts) > 1:
            parts = _joined(parts)
        self.groups = [rows for rows, _ in parts]
        for number, layer in enumerate(self.layers):
            layer.states = [states[number] for _, states in parts]
            layer.is_initialized = True

    def select(self, index: Sequence[int]) -> None:
        """Copies sequence index[i] to sequence i of the cache; an index may occur several times, or not at all."""
        at = {row: (g, place) for g, group in enumerate(self.groups) for place, row in enumerate(group)}
        picked: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        for new, old in enumerate(index):
            group, place = at[int(old)]
            picked[group].append((new, place))
        parts = []
        for number, chosen in enumerate(picked):
            if chosen:
                places = [place for _, place in chosen]
                parts.append(([new for new, _ in chosen], [_selected(s, places) for s in self.states(number)]))
        if self.groups:
            if self.read is not None:
                read = self.read[[int(old) for old in index]]
                self.read = None if bool(read.all()) else read
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
        self._slots, self.read, self.most = None, None, None
        for layer in self.layers:
            layer.states, layer.is_initialized = [], False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raises NotImplementedError: a state cannot remove tokens."""
        raise NotImplementedError("a state cannot forget its last tokens: copy the cache before reading them")

    def activate_past_recording(self) -> None:
        """Raises NotImplementedError: a state cannot remove tokens."""
        raise NotImplementedError("assisted generation takes tokens back, which a state cannot")


def moved(state: Value, offset: int) -> Value:
    """Returns `state` with the position of its rotation increased by `offset`.

    This is correct for states in which only differences of positions matter. Sequences that start at different columns
    get the same position in this way, so that their states can be joined.
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
    return state.mapped(lambda x: x.index_select(0, torch.tensor(places, device=x.device)))


def _form(value: Any) -> Any:
    """Returns a key that is equal for two states if and only if they can be joined in the same tensors."""
    if isinstance(value, Tensor):
        return value.shape[1:], value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(_form(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_form(getattr(value, field.name)) for field in fields(value))
    return value


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Joins groups whose states have the same form, with their sequences in ascending order."""
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
        states = [_cat(of) for of in zip(*(states for _, states in group), strict=True)]
        if order != list(range(len(index))):
            states = [_selected(state, order) for state in states]
        result.append(([index[place] for place in order], states))
    return result


def _cat(states: Sequence[MixerState | None]) -> MixerState | None:
    held = [state for state in states if state is not None]
    tensors = zip(*(state.tensors() for state in held), strict=True)
    return held[0].mapped(lambda _: torch.cat(next(tensors))) if held else None


def one_cache(past_key_values: SympowCache | None, cache: SympowCache | None) -> SympowCache | None:
    """Returns the cache under either name. Raises ValueError for two caches."""
    if past_key_values is not None and cache is not None:
        raise ValueError("give one of past_key_values and cache, which are two names of one argument")
    return past_key_values if cache is None else cache
