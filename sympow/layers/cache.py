"""The state of softmax attention: keys and values of the past, all of them or the last few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sympow.layers.base import MixerState

_LEAST = 16  # tokens a cache makes room for at first


def capacity(length: int, limit: int | None = None) -> int:
    """Tokens a cache of `length` tokens has room for: about an eighth more at most, so it is seldom copied.

    It depends on the length alone, not on the steps that led to it.
    """
    if length == 0:
        return 0
    granule = max(_LEAST, 1 << max(0, (length - 1).bit_length() - 4))
    room = -(-length // granule) * granule
    return room if limit is None else min(room, limit)


@dataclass
class KVCache(MixerState):
    """Rotated keys and values of `length` tokens; with a `limit`, of the last `limit` ones, as a ring.

    k is [B, G, room, K] and v [B, G, room, V], room = capacity(length, limit); token t lies at t, or at t %
    limit.
    """

    k: Tensor
    v: Tensor
    length: int = 0
    limit: int | None = None

    def extend(self, k: Tensor, v: Tensor) -> KVCache:
        """The cache with k [B, G, T', K] and v [B, G, T', V] added, cast to its dtype.

        Written in place where there is room; where gradients are on, into a copy, because autograd needs the
        old one.
        """
        length = self.length + k.shape[2]
        kept = k.shape[2] if self.limit is None else min(k.shape[2], self.limit)
        start = length - kept if self.limit is None else (length - kept) % self.limit
        return KVCache(
            self._write(self.k, k[:, :, -kept:], start, length),
            self._write(self.v, v[:, :, -kept:], start, length),
            length,
            self.limit,
        )

    def _write(self, held: Tensor, new: Tensor, start: int, length: int) -> Tensor:
        room = capacity(length, self.limit)
        if room > held.shape[2] or torch.is_grad_enabled():
            grown = held.new_empty(*held.shape[:2], room, held.shape[3])
            grown[:, :, : held.shape[2]] = held
            held = grown
        first = min(new.shape[2], room - start)
        held[:, :, start : start + first] = new[:, :, :first]
        if first < new.shape[2]:
            held[:, :, : new.shape[2] - first] = new[:, :, first:]
        return held

    def filled(self) -> tuple[Tensor, Tensor]:
        """k and v of the tokens held, in any order."""
        n = self.length if self.limit is None else min(self.length, self.limit)
        return self.k[:, :, :n], self.v[:, :, :n]

    def ordered(self) -> tuple[Tensor, Tensor]:
        """k and v of the tokens held, oldest first."""
        k, v = self.filled()
        if self.limit is None or self.length <= self.limit:
            return k, v
        turn = -(self.length % self.limit)
        return k.roll(turn, dims=2), v.roll(turn, dims=2)
