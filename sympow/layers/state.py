"""The states of mixers, which decoding passes from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from numbers import Integral
from types import UnionType
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from sympow.ops import DecodingState, PowerState
from sympow.ops.availability import concatenated
from sympow.ops.decoding_state import NARROW
from sympow.ops.memory import check_memory

S = TypeVar("S")
# Where and in which dtype a state is made; None: those of the weights.
Device = torch.device | str | None
DType = torch.dtype | None

# What all states of a mixer share, by fields: the forms of nested states, shapes of tensors without the batch (0: a
# size that grows), and constants.
Form = tuple[type, tuple[tuple[str, Any], ...]]
# after(n) is the state after the first n of the tokens that a `try_step` has read. The other tokens are taken back, as
# if they had never been read. It can be called only once, because it may overwrite the tensors from which it is made.
After = Callable[[int], Any]


@dataclass
class MixerState:
    """Holds what a mixer carries from step to step: a dataclass of tensors, nested states and plain numbers.

    If gradients are off, `step` may update the tensors in place. Use the state that `step` returns, not the state that
    it was given.

    Attributes:
        counters: fields that count the tokens read. `step` also takes them as int64 [B], for rows of different
            lengths. None: the rows of a batch must be equally long.
        counted: further fields that count the tokens read, of rows that must be equally long.
        constants: fields that are equal in all states of a mixer.
    """

    counters: ClassVar[tuple[str, ...] | None] = None
    counted: ClassVar[tuple[str, ...]] = ()
    constants: ClassVar[tuple[str, ...]] = ()

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor that the state holds."""
        return _tensors(self)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all tensors held, over the whole batch."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def with_all_room(self, most: int | None = None) -> Self:
        """Returns the state with tensors of their largest size, where `counters` can be tensors.

        Args:
            most: the number of tokens that a sequence reads at most; None: any number. Then caches of all tokens stay
                as they are.
        """
        nested = {name: item for name, item in vars(self).items() if isinstance(item, MixerState)}
        return replace(self, **{name: item.with_all_room(most) for name, item in nested.items()}) if nested else self

    def within(self, tokens: int) -> Self:
        """Returns the state with views of the first `tokens` tokens of caches of all tokens."""
        nested = {name: item for name, item in vars(self).items() if isinstance(item, MixerState)}
        return replace(self, **{name: item.within(tokens) for name, item in nested.items()}) if nested else self

    def clone(self) -> Self:
        """Copies the state and its tensors, so that both can be continued."""
        return self.mapped(Tensor.clone)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Returns the state with function(tensor) in place of every tensor, in the order of `tensors`."""
        return mapped(self, function)

    @property
    def rows_may_differ(self) -> bool:
        """Tells whether rows of a batch may have read different numbers of tokens. Then all states are of one size."""
        nested = (getattr(self, field.name) for field in fields(self))
        return self.counters is not None and all(x.rows_may_differ for x in nested if isinstance(x, MixerState))

    def counting(self, tokens: int | Tensor) -> Self:
        """Returns the state with `tokens` in place of its counters, those of nested states too."""

        def counted(name: str, item: Any) -> Any:
            if isinstance(item, MixerState):
                return item.counting(tokens)
            measured = isinstance(item, Tensor) and item.is_floating_point()  # from the data, and not counted
            return tokens if name in (self.counters or ()) and not measured else item

        return replace(self, **{field.name: counted(field.name, getattr(self, field.name)) for field in fields(self)})


@dataclass
class RowStates(MixerState):
    """Holds one state for each row, for a mixer that cannot step rows of different lengths as one batch."""

    rows: list[MixerState]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def check_room(what: str, batch: int, size: int, weight: Tensor, device: Device) -> None:
    """Raises ValueError for a state before the first token that is larger than the free memory.

    Args:
        what: the layers, for the error.
        batch: the number of sequences.
        size: the elements of the state for a sequence, which have at least 4 bytes each.
        weight: of the layers.
        device: of the state; None: that of `weight`.
    """
    sequences = f"{batch:,} sequence{'s' * (batch != 1)}"
    held = batch * size * max(4, weight.element_size())
    check_memory(f"a state of {what} for {sequences}", held, weight.device if device is None else device)


def checking_batch(init_state: Callable[..., MixerState]) -> Callable[..., MixerState]:
    """Returns the method `init_state` of a mixer with an error for a `batch_size` that is no number of sequences.

    It raises TypeError for what is no integer, and ValueError for a negative one.
    """

    @wraps(init_state)
    def checked(self: Any, batch_size: int, *rest: Any, **options: Any) -> MixerState:
        _check_count("batch_size", batch_size)
        return init_state(self, batch_size, *rest, **options)

    return checked


def of_tried(after: After, tokens: int) -> After:
    """Returns `after` of a `try_step` of so many tokens, which accepts only 0 to `tokens`.

    It raises TypeError for what is no integer, and ValueError for another number, because slicing would return a wrong
    state.
    """

    def state_after(n: int) -> Any:
        _check_count("the number of tokens that are kept", n)
        if n > tokens:
            raise ValueError(f"of {tokens} tokens that were tried 0 to all can be kept; got {n}")
        return after(n)

    return state_after


def _check_count(name: str, value: object) -> None:
    """Raises TypeError for what is no integer, also of NumPy or of a compiler, and ValueError for a negative one."""
    if isinstance(value, bool) or not isinstance(value, Integral | torch.SymInt):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0; got {value}")


def check_batch(state: object, batch: int) -> None:
    """Raises an error for a state of another number of sequences than `batch`, which a step could broadcast."""
    if not isinstance(state, MixerState):
        raise TypeError(f"state must be what init_state or an earlier step returned; got {type(state).__name__}")
    held = _batch(state)
    if held not in (None, batch):
        raise ValueError(f"the state must be of as many sequences as the input, {batch}; got a state of {held}")


def form_of(state: MixerState) -> Form:
    """Returns what all states of a mixer share, from its state before the first token."""
    items: list[tuple[str, Any]] = []
    for field in fields(state):
        item = getattr(state, field.name)
        if isinstance(item, MixerState):
            items.append((field.name, form_of(item)))
        elif (sizes := _sizes(item)) is not None:
            items.append((field.name, sizes))
        elif field.name in state.constants:
            items.append((field.name, item))
    return type(state), tuple(items)


def check_form(state: MixerState, expected: Form) -> None:
    """Refuses, with a TypeError or a ValueError, the state of a mixer of another class or with other options."""
    own, items = expected
    if type(state) is not own:
        raise TypeError(f"state must be that of this mixer, {own.__name__}; got {type(state).__name__}")
    for name, form in items:
        item = getattr(state, name)
        if isinstance(form, tuple):
            if type(item) is not form[0]:
                wanted, got = form[0].__name__, type(item).__name__
                raise TypeError(f"state must be that of this mixer, with {name} of {wanted}; got {got}")
            check_form(item, form)
        elif isinstance(form, list):
            shape = _sizes(item)
            if shape is None or not _fits(shape, form):
                sizes = ", ".join(str(size) if size else "*" for size in ["B", *form])
                got = type(item).__name__ if shape is None else f"[{', '.join(map(str, ['B', *shape]))}]"
                raise ValueError(f"state must be that of this mixer, with {name} of [{sizes}]; got {got}")
        elif item != form:
            raise ValueError(f"state must be that of this mixer, with {name} = {form}; got {item}")


def check_read(state: MixerState, tokens: int) -> None:
    """Raises ValueError for a state, of rows of one length, that counts another number of tokens than `tokens`."""
    own = (*(state.counters or ()), *state.counted)
    for field in fields(state):
        item = getattr(state, field.name)
        if field.name in own and type(item) is int and item != tokens:
            raise ValueError(f"{type(state).__name__} must have {field.name} = {tokens}, the tokens read; got {item}")
        if isinstance(item, MixerState) and not own:  # else it may count only a part of them
            check_read(item, tokens)


def _sizes(item: Any) -> list[int] | None:
    """Returns the shape of a tensor, or of the sums of the op's state, without the batch; None for anything else."""
    tensor = item.s if isinstance(item, PowerState | DecodingState) else item
    return list(tensor.shape[1:]) if isinstance(tensor, Tensor) else None


def _fits(shape: list[int], form: list[int]) -> bool:
    """Tells whether sizes are those of a form. A loop, because torch.compile cannot compare lists of growing sizes."""
    if len(shape) != len(form):
        return False
    return all([wanted == 0 or size == wanted for size, wanted in zip(shape, form, strict=True)])


def _batch(value: Any) -> int | None:
    """Returns the number of sequences of a state, read from its first tensor; None for a state without tensors."""
    if isinstance(value, Tensor):
        return value.shape[0]
    if isinstance(value, DecodingState):  # its tensors can be a pool of more sequences
        return value.batch
    if isinstance(value, RowStates):
        return len(value.rows)
    items = (getattr(value, field.name) for field in fields(value)) if is_dataclass(value) else value
    if isinstance(value, list | tuple) or is_dataclass(value):
        return next((held for held in map(_batch, items) if held is not None), None)
    return None


def narrowed(state: S, dtype: torch.dtype = torch.bfloat16) -> S:
    """Returns a state with the sums of power attention in bfloat16 or int8: half or a quarter of their bytes.

    All other tensors are shared with `state`, and steps overwrite them: clone `state` before, if it is used afterwards.
    Steps continue the state in this form. On every device the sums then have a
    tail (`DecodingState`), so that they are rounded once for several tokens, and not at every token. The delta rule
    changes its sums at every token, so they stay as they are.

    Args:
        state: of a mixer, a block or a model, in float32.
        dtype: torch.bfloat16, or torch.int8 with a float32 scale for each row of the sums.

    Raises TypeError for a float64 state, and ValueError for another `dtype`.
    """
    if dtype not in NARROW:
        raise ValueError(f"sums are narrowed to torch.bfloat16 or torch.int8; got {dtype}")

    def kept(state: PowerState | DecodingState) -> DecodingState:
        if isinstance(state, PowerState):
            return DecodingState.from_state(state, state_dtype=dtype)
        return state.kept_in(dtype)

    return mapped(state, kept, PowerState | DecodingState)


def mapped(value: Any, function: Callable[[Any], Any], leaf: type | UnionType = Tensor) -> Any:
    """Returns `value` with function(item) in place of every item of the type `leaf`."""
    if isinstance(value, leaf):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, function, leaf) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: mapped(item, function, leaf) for name, item in held.items()})


def try_by_copies(
    step: Callable[..., tuple[Tensor, Any]], x: Tensor, state: MixerState, extras: Mapping[str, Tensor | None]
) -> tuple[Tensor, After]:
    """Tries a step of x [B, T', d] token by token on copies of the state. This works for every mixer, but is slow.

    `extras` are keywords of the step, [B, T'] each or None.
    """
    states, outs = [state], []
    for i in range(x.shape[1]):
        now = {name: value if value is None else value[:, i : i + 1] for name, value in extras.items()}
        y, after = step(x[:, i : i + 1], states[-1].clone(), **now)
        outs.append(y)
        states.append(after)
    return concatenated(outs, dim=1), of_tried(states.__getitem__, x.shape[1])
