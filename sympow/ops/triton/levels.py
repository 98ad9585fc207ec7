"""The rows of the state of p = 3 and 4 as the forward pass on Hopper keeps them: close to the fewest, in the order in
which the tensor cores take them.

A row is again a prefix (u, k), k its largest index, times a last index j. u, the p - 2 indices below, is numbered with
its largest index outermost, so that those of any k are the first ones. A level of width w = K, K/2 ... 4 holds the
prefixes with K - w <= k < K - w/2, the last one all the rest: they meet the last w indices alone. A product is 16 rows
deep, so where w < 16 it takes a group of 16 / w consecutive u of one k: its rows are the two halves of the last
indices, in each half the prefixes, and for each of them its last indices.

What makes (x . y)**p of the rows is a weight for each prefix and half. A last index of the upper half is beyond the
level, and no other row has that monomial: all its orderings count, p times those of the prefix. One within the level
stands for p / (c + 1) of them if c indices of the prefix are of the level too, as each of the c + 1 may be the last.
Prefixes that only fill a group or a tile have weight 0.
"""

from __future__ import annotations

from functools import lru_cache
from math import factorial

import torch
from torch import Tensor

from sympow.ops.triton.rows import Basis

TILE = 128  # rows of a state that are read at once: every level has a multiple
_LEAST = 4  # the width of the last level


class Levels(Basis):
    """The rows for one K (a power of two, 16 or more) and p = 3 or 4. Tensors are on the CPU; `on` brings tables to a
    device."""

    def __init__(self, key_dim: int, p: int):
        inner = [(i,) for i in range(key_dim)] if p == 3 else [(i, j) for j in range(key_dim) for i in range(j + 1)]
        shape, prefixes, entries, weights, tuples = [], [], [], [], []
        width = key_dim
        while width >= _LEAST:
            last = width == _LEAST
            group, depth = max(1, 16 // width), max(16, width)
            bound = key_dim - width
            groups = _groups(key_dim, p, width)
            filled = len(groups)
            groups += [(0, key_dim - 1)] * (-filled % (TILE // depth))
            shape.append((len(groups), width))
            entries += [u // group | k << 16 for u, k in groups]
            run = depth // 2 // group
            for n, (u, k) in enumerate(groups):
                members = [(*inner[u + g], k) for g in range(group)]
                prefixes += members
                for member in members:
                    same = 0.0
                    if n < filled and max(member) == k:
                        same = _orderings(member) * p / (1 + sum(i >= bound for i in member))
                    weights += [same, same if last else p * _orderings(member) * (same > 0)]
                halves = ((bound, bound + run), (bound + run, key_dim))
                tuples += [(*member, j) for a, b in halves for member in members for j in range(a, b)]
            width //= 2
        super().__init__(key_dim, p, torch.tensor(tuples))
        self.shape = tuple(shape)  # of each level, groups and width
        self.prefixes = torch.tensor(prefixes)
        self.entries = torch.tensor(entries)  # of each group, the number of its first u by groups, and k
        self.weights = torch.tensor(weights).view(-1, 2)  # of each prefix, by half
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """prefixes int32 [n, p - 1], entries int32 [groups], weights bfloat16 [n, 2], in which they are exact."""
        if device not in self._tables:
            weights = self.weights.to(device, torch.bfloat16)
            self._tables[device] = self.prefixes.int().to(device), self.entries.int().to(device), weights
        return self._tables[device]


def _groups(key_dim: int, p: int, width: int) -> list[tuple[int, int]]:
    """Of a level, the number of the first u and the k of each group that is not there to fill a tile."""
    last = width == _LEAST
    return [
        (u, k)
        for k in range(key_dim - width, key_dim if last else key_dim - width // 2)
        for u in range(0, k + 1 if p == 3 else (k + 1) * (k + 2) // 2, max(1, 16 // width))
    ]


@lru_cache(maxsize=32)
def level_count(key_dim: int, p: int) -> int:
    """`Levels.count`, without the tables."""
    count, width = 0, key_dim
    while width >= _LEAST:
        rows = len(_groups(key_dim, p, width)) * max(16, width)
        count += rows + -rows % TILE
        width //= 2
    return count


def _orderings(indices: tuple[int, ...]) -> int:
    count = factorial(len(indices))
    for i in set(indices):
        count //= factorial(indices.count(i))
    return count


@lru_cache(maxsize=32)
def levels_of(key_dim: int, p: int) -> Levels:
    return Levels(key_dim, p)
