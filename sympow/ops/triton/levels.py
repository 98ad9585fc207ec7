"""The rows of the state for p = 3 and 4 in the forward pass on Hopper: close to the smallest number of rows, in the
order that the tensor cores need.

As in `rows.py`, a row is a prefix (u, k), where k is its largest index, times a last index j. u has the other p - 2
indices. The numbers of u are ordered by its largest index first, so the u that belong to any k are the first ones. A
level of width w = K, K/2 ... 4 has the prefixes with K - w <= k < K - w/2; the last level has all the rest. The
prefixes of a level are multiplied with the last w indices only. A product has 16 rows. Where w < 16, it has a group of
16 / w consecutive u of one k. Its rows are the two halves of the last indices; each half has the prefixes, and each
prefix its last indices.

A K that is no power of two is filled up with zeros in front: `skip` channels, which are in no prefix. Rows of the first
level with such a last index are zero.

A weight for each prefix and half makes (x . y)**p of the rows. A last index of the upper half is larger than all
indices of the level's prefixes, and no other row has that monomial. So all its orderings count: p times those of the
prefix. A monomial whose last index is within the level is in several rows. If c indices of the prefix are within the
level too, each of the c + 1 indices may be the last, so the row counts for p / (c + 1) times the orderings of the
prefix. Prefixes that only fill a group or a tile have weight 0.

The gradients of queries and keys process these rows in steps (`Slopes`). A step is one u with a block of consecutive k
and every last index. The entries of u times the other factor of the gradient are the left operand of a product. Its
result, summed over all u of the block, is multiplied with x_k once. Within a block u and k have no order: of a prefix
with c indices in the block each may be k, so the weight of a step is (p - 1) / c times the orderings of u.
"""

from __future__ import annotations

from functools import lru_cache
from math import factorial

import torch
from torch import Tensor

from sympow.ops.feature_map import spow_indices
from sympow.ops.runtime.launcher import padded_key_dim
from sympow.ops.triton.rows import Basis, public_rows

TILE = 128  # rows of a state that are read at once; every level has a multiple of them
_LEAST = 4  # the width of the last level


class Levels(Basis):
    """Holds the rows for one K (16 or more, a multiple of 8) and p = 3 or 4.

    Tensors are on the CPU; `on` copies the tables to a device.
    """

    def __init__(self, key_dim: int, p: int):
        self.width = padded_key_dim(key_dim)  # the K of tiles; indices below count the channels in front
        self.skip = self.width - key_dim
        own = range(self.skip, self.width)
        inner = [(i,) for i in own] if p == 3 else [(i, j) for j in own for i in range(self.skip, j + 1)]
        shape, prefixes, entries, weights, tuples = [], [], [], [], []
        width = self.width
        while width >= _LEAST:
            last = width == _LEAST
            group, depth = max(1, 16 // width), max(16, width)
            bound = self.width - width
            groups = _groups(key_dim, p, width)
            filled = len(groups)
            groups += [(0, self.width - 1)] * (-filled % (TILE // depth))
            shape.append((len(groups), width))
            # For p = 3 programs find u among all channels, for p = 4 among the products that they have computed.
            entries += [(u + (self.skip if p == 3 else 0)) // group | k << 16 for u, k in groups]
            run = depth // 2 // group
            for n, (u, k) in enumerate(groups):
                members = [(*inner[u + g], k) for g in range(group)]
                prefixes += members
                for member in members:
                    same = 0.0
                    if n < filled and max(member) == k:
                        same = _orderings(member) * p / (1 + sum(i >= bound for i in member))
                    weights += [same, same if last else p * _orderings(member) * (same > 0)]
                halves = ((bound, bound + run), (bound + run, self.width))
                tuples += [(*member, j) for a, b in halves for member in members for j in range(a, b)]
            width //= 2
        super().__init__(key_dim, p, torch.tensor(tuples) - self.skip)
        self.shape = tuple(shape)  # groups and width of each level
        self.prefixes = torch.tensor(prefixes)
        self.entries = torch.tensor(entries)  # of each group: the number of its first u, in groups, and k
        self.weights = torch.tensor(weights).view(-1, 2)  # of each prefix, for each half
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._slopes: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Returns prefixes int32 [n, p - 1], entries int32 [groups], and weights bfloat16 [n, 2], which are exact."""
        if device not in self._tables:
            weights = self.weights.to(device, torch.bfloat16)
            self._tables[device] = self.prefixes.int().to(device), self.entries.int().to(device), weights
        return self._tables[device]

    def slopes_on(self, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns `Slopes` of blocks of `block` k on a device: rows int32 [steps, block K], entries int32 [steps]."""
        if (block, device) not in self._slopes:
            slopes = Slopes(self, block)
            self._slopes[block, device] = slopes.rows.int().to(device), slopes.entries.to(device)
        return self._slopes[block, device]


class Slopes:
    """Holds the steps in which the gradients process the rows. Tensors are on the CPU.

    The steps are in the order of blocks. `inner` [steps, p - 2] is u, and `first` [steps] the first k of the block.
    `weights` [steps] are float32, exact in bfloat16. `rows` [steps, block K] are the indices of the monomials (u, k,
    j), with j innermost; where j is one of the zeros in front, they are arbitrary. `entries` int32 [steps] have, from
    the lowest bits on, a byte for each index of u, two in all, and the upper half of the weight as a float32.
    """

    def __init__(self, levels: Levels, block: int):
        p, skip = levels.p, levels.skip
        inner = spow_indices(levels.key_dim, p - 2) + skip
        steps = []
        for first in range(skip, levels.width, block):
            below = inner[inner[:, -1] < first + block]
            same = 1 + (below >= first).sum(1)
            orderings = torch.tensor([_orderings(tuple(u)) for u in below.tolist()])
            steps.append((below, torch.full_like(same, first), (p - 1) * orderings / same))
        self.inner, self.first, weights = (torch.cat(parts) for parts in zip(*steps, strict=True))
        self.weights = weights.float()
        k = (self.first[:, None] + torch.arange(block)).repeat_interleave(levels.width, 1)
        j = torch.arange(levels.width).repeat(block).expand_as(k)
        u = self.inner[:, None].expand(-1, k.shape[1], -1)
        tuples = torch.cat([u, k[..., None], j.clamp(min=skip)[..., None]], -1) - skip
        self.rows = levels.representative[public_rows(tuples.flatten(0, 1), levels.key_dim)].view_as(k)
        self.entries = self.weights.view(torch.int32) | self.inner[:, 0].int() | self.inner[:, -1].int() << 8


def _groups(key_dim: int, p: int, width: int) -> list[tuple[int, int]]:
    """Returns the number of the first u and the k of each group of a level that does not only fill a tile."""
    last = width == _LEAST
    full = padded_key_dim(key_dim)
    skip = full - key_dim
    return [
        (u, k)
        for k in range(max(skip, full - width), full if last else full - width // 2)
        for u in range(0, k - skip + 1 if p == 3 else (k - skip + 1) * (k - skip + 2) // 2, max(1, 16 // width))
    ]


@lru_cache(maxsize=32)
def level_count(key_dim: int, p: int) -> int:
    """Returns `Levels.count` without making the tables."""
    count, width = 0, padded_key_dim(key_dim)
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
