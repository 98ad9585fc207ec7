"""States that hold past tokens, all of them or the last ones: keys and values, or the inputs of a convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from sympow.layers.state import MixerState
from sympow.ops.availability import concatenated

_LEAST = 16  # tokens a cache makes room for at first


def capacity(length: int, limit: int | None = None) -> int:
    """Returns the number of tokens that a cache of `length` tokens has room for: `length` plus at most about an eighth.

    With this spare room a cache is seldom copied. The room depends on the length only, not on the steps before.
    """
    if length == 0:
        return 0
    granule = max(_LEAST, 1 << max(0, (length - 1).bit_length() - 4))
    room = -(-length // granule) * granule
    return room if limit is None else min(room, limit)


def reads_rows(device: torch.device) -> bool:
    """Returns whether a step of caches of all tokens reads only those of each row, if rows differ in length.

    The host of a CPU knows the lengths. Other devices read the whole room, and a mask hides what is not filled.
    """
    return device.type == "cpu"


@dataclass
class KVCache(MixerState):
    """Holds rotated keys and values of `length` tokens; with a `limit`, those of the last `limit` tokens, as a ring.

    k is [B, G, room, K] and v [B, G, room, V], room = capacity(length, limit), or more where tokens were taken
    back. Token t has index t, or t % limit.

    In a cache with all its room, see `with_all_room`, rows may differ in length: `length` is then int64 [B], and token
    t of a row has index t % room.
    """

    constants: ClassVar[tuple[str, ...]] = ("limit",)
    counters: ClassVar[tuple[str, ...] | None] = ("length",)

    k: Tensor
    v: Tensor
    length: int | Tensor = 0
    limit: int | None = None

    @property
    @override
    def rows_may_differ(self) -> bool:
        return self.limit is not None or isinstance(self.length, Tensor)

    @override
    def with_all_room(self, most: int | None = None) -> Self:
        """Returns the cache with room for all tokens that it can hold, zeros where none is held yet.

        Without a limit these are `most` tokens, and the rows get lengths of their own. If `most` is None, the cache is
        returned as it is.
        """
        room = self.limit
        if room is None and most is not None:
            room = -(-most // _LEAST) * _LEAST  # kernels need aligned masks
        if room is None or isinstance(self.length, Tensor):
            return self
        k, v = (_with_room(x, room) for x in self.filled())
        rows = self.length if self.limit is not None else torch.full(k.shape[:1], self.length, device=k.device)
        return replace(self, k=k, v=v, length=rows)

    @override
    def within(self, tokens: int) -> Self:
        return self if self.limit is not None else replace(self, k=self.k[:, :, :tokens], v=self.v[:, :, :tokens])

    @override
    def counting(self, tokens: int | Tensor) -> Self:
        """Returns the cache of `tokens` tokens. If that is a number and there is no limit, the room is `capacity`."""
        k, v = self.k, self.v
        if self.limit is None and isinstance(tokens, int):
            room = capacity(tokens)
            k, v = (_with_room(x[:, :, :room], room) for x in (k, v))
        return replace(self, k=k, v=v, length=tokens)

    def extend(self, k: Tensor, v: Tensor) -> Self:
        """Returns the cache with k [B, G, T', K] and v [B, G, T', V] added, cast to its dtype.

        The tensors are changed in place if they have room. With gradients on, a copy is changed, because autograd needs
        the old tensors.
        """
        if isinstance(self.length, Tensor):
            return self._extended_rows(k, v, self.length)
        return replace(
            self,
            k=extended(self.k, k, self.length, self.limit, dim=2),
            v=extended(self.v, v, self.length, self.limit, dim=2),
            length=self.length + k.shape[2],
        )

    def _extended_rows(self, k: Tensor, v: Tensor, length: Tensor) -> Self:
        """Returns what `extend` does, for rows that have read different numbers of tokens, `length` [B]."""
        room, new = self.k.shape[2], k.shape[2]
        kept, place = min(new, room), length[:, None]
        if new > 1:
            place = place + torch.arange(new - kept, new, device=length.device)
        place = (place % room)[:, None, :, None]
        whole = []
        for held, more in ((self.k, k[:, :, new - kept :]), (self.v, v[:, :, new - kept :])):
            held = held.clone() if torch.is_grad_enabled() else held
            whole.append(held.scatter_(2, place.expand(more.shape), more.to(held.dtype)))
        return replace(self, k=whole[0], v=whole[1], length=length + new)

    def filled(self) -> tuple[Tensor, Tensor]:
        """Returns k and v of the tokens held, in any order; the whole room if rows differ in length."""
        if isinstance(self.length, Tensor):
            return self.k, self.v
        n = self.length if self.limit is None else min(self.length, self.limit)
        return self.k[:, :, :n], self.v[:, :, :n]

    def ordered(self) -> tuple[Tensor, Tensor]:
        """Returns k and v of the tokens held, oldest first. Raises RuntimeError if rows differ in length."""
        if isinstance(self.length, Tensor):
            raise RuntimeError("rows of different lengths are ordered by `ordered_rows`")
        k, v = self.filled()
        return in_order(k, self.length, self.limit, dim=2), in_order(v, self.length, self.limit, dim=2)

    def ordered_rows(self, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns k and v of the last tokens, oldest first, where rows have read `length` tokens, int64 [B].

        The third result, bool [B, room], tells which of them are tokens: rows that have read fewer begin with others.
        """
        room = self.k.shape[2]
        position = length[:, None] + torch.arange(-room, 0, device=length.device)
        place = (position % room)[:, None, :, None]
        k, v = (held.gather(2, place.expand(*held.shape[:2], -1, held.shape[3])) for held in (self.k, self.v))
        return k, v, position >= 0


@dataclass
class WindowCache(KVCache):
    """Holds the last tokens of a window: a `KVCache` with a limit."""


@dataclass
class InputCache(MixerState):
    """Holds the last `limit` inputs of `length` tokens: x is [B, room, C], token t at index t % limit."""

    constants: ClassVar[tuple[str, ...]] = ("limit",)
    counted: ClassVar[tuple[str, ...]] = ("length",)

    x: Tensor
    length: int
    limit: int

    @classmethod
    def empty(cls, batch_size: int, channels: int, limit: int, options: dict[str, Any]) -> InputCache:
        """Returns an empty cache; `options` are those of `base.state_options`."""
        return cls(torch.empty(batch_size, 0, channels, **options), 0, limit)

    def extend(self, x: Tensor) -> InputCache:
        """Returns the cache with x [B, T', C] added, see `KVCache.extend`."""
        return InputCache(extended(self.x, x, self.length, self.limit, dim=1), self.length + x.shape[1], self.limit)

    def ordered(self) -> Tensor:
        """Returns the inputs held [B, min(length, limit), C], oldest first."""
        held = self.x[:, : min(self.length, self.limit)]
        return in_order(held, self.length, self.limit, dim=1)


def _with_room(held: Tensor, room: int) -> Tensor:
    """Returns `held` [B, G, room now, C], filled up to `room` with zeros."""
    if held.shape[2] >= room:
        return held
    grown = held.new_zeros(*held.shape[:2], room, held.shape[3])
    grown[:, :, : held.shape[2]] = held
    return grown


def extended(held: Tensor, new: Tensor, length: int, limit: int | None, dim: int) -> Tensor:
    """Returns `held` of `length` tokens along `dim` with `new` ones added, cast to its dtype, see `KVCache.extend`."""
    length += new.shape[dim]
    kept = new.shape[dim] if limit is None else min(new.shape[dim], limit)
    start = length - kept if limit is None else (length - kept) % limit
    new = new.narrow(dim, new.shape[dim] - kept, kept)
    room = capacity(length, limit)
    if room > held.shape[dim] or torch.is_grad_enabled():
        grown = held.new_empty(*held.shape[:dim], room, *held.shape[dim + 1 :])
        grown.narrow(dim, 0, held.shape[dim]).copy_(held)
        held = grown
    first = min(kept, room - start)
    held.narrow(dim, start, first).copy_(new.narrow(dim, 0, first))
    if first < kept:
        held.narrow(dim, 0, kept - first).copy_(new.narrow(dim, first, kept - first))
    return held


def in_order(held: Tensor, length: int, limit: int | None, dim: int) -> Tensor:
    """Returns the tokens in `held`, the last `limit` of `length`, oldest first."""
    if limit is None or length <= limit:
        return held
    first = length % limit
    return concatenated([held.narrow(dim, first, held.shape[dim] - first), held.narrow(dim, 0, first)], dim)
