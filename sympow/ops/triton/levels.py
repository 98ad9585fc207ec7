"""The rows of the state of p = 3 and 4 as the forward pass on Hopper keeps them: close to the fewest, in the order in
which the tensor cores take them.

A row is again a prefix (u, k), k its largest index, times a last index j. u, the p - 2 indices below, is numbered with
its largest index outermost, so that those of any k are the first ones. A level of width w = K, K/2 ... 4 holds the
prefixes with K - w <= k < K - w/2, the last one all the rest: they meet the last w indices alone. A product is 16 rows
deep, so where w < 16 it takes a group of 16 / w consecutive u of one k: its rows are the two halves of the last
indices, in each half the prefixes, and for each of them its last indices.

A K that is no power of two is filled up with zeros in front: `skip` channels, which are in no prefix. Where they are
last indices of the first level, its rows hold zeros.

What makes (x . y)**p of the rows is a weight for each prefix and half. A last index of the upper half is beyond the
level, and no other row has that monomial: all its orderings count, p times those of the prefix. One within the level
stands for p / (c + 1) of them if c indices of the prefix are of the level too, as each of the c + 1 may be the last.
Prefixes that only fill a group or a tile have weight 0.

Gradients of queries and keys take these rows in steps (`Slopes`). A step is one u with a block of consecutive k and
every last index: the entries of u times the other factor of the gradient are the left operand of a product, and its
result, summed over all u of the block, is multiplied with x_k once. Within a block no order of u and k is kept: of a
prefix with c indices in the block each may be k, so that a step's weight is (p - 1) / c times the orderings of u.
"""

from __future__ import annotations

from functools import lru_cache
from math import factorial

import torch
from torch import Tensor

from sympow.ops.feature_map import spow_indices
from sympow.ops.triton.rows import Basis, public_rows

TILE = 128  # rows of a state that are read at once: every level has a multiple
_LEAST = 4  # the width of the last level


class Levels(Basis):
    """The rows for one K (16 or more, a multiple of 8) and p = 3 or 4. Tensors are on the CPU; `on` brings tables to a
    device."""

    def __init__(self, key_dim: int, p: int):
        self.width = padded_key_dim(key_dim)  # that of tiles; indices below are of channels with those in front
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
            # For p = 3 programs find u among all channels, for p = 4 among the products that they have made.
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
        self.shape = tuple(shape)  # of each level, groups and width
        self.prefixes = torch.tensor(prefixes)
        self.entries = torch.tensor(entries)  # of each group, the number of its first u by groups, and k
        self.weights = torch.tensor(weights).view(-1, 2)  # of each prefix, by half
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._slopes: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """prefixes int32 [n, p - 1], entries int32 [groups], weights bfloat16 [n, 2], in which they are exact."""
        if device not in self._tables:
            weights = self.weights.to(device, torch.bfloat16)
            self._tables[device] = self.prefixes.int().to(device), self.entries.int().to(device), weights
        return self._tables[device]

    def slopes_on(self, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`Slopes` of blocks of `block` k, on a device: rows int32 [steps, block K], entries int32 [steps]."""
        if (block, device) not in self._slopes:
            slopes = Slopes(self, block)
            self._slopes[block, device] = slopes.rows.int().to(device), slopes.entries.to(device)
        return self._slopes[block, device]


class Slopes:
    """The steps in which gradients take the rows. Tensors are on the CPU.

    Of each step, in the order of blocks: `inner` [steps, p - 2] is u, `first` [steps] the first k of its block,
    `weights` [steps] float32, exact in bfloat16, and `rows` [steps, block K] where the monomials (u, k, j) are, j the
    innermost; where j is one of the zeros in front, others. `entries` int32 [steps] are, from the lowest bits on, a
    byte for each index of u, two in all, and the upper half of the weight as a float32.
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


def padded_key_dim(key_dim: int) -> int:
    """What tiles hold: a power of two, 16 at least."""
    return max(16, 1 << (key_dim - 1).bit_length())


def _groups(key_dim: int, p: int, width: int) -> list[tuple[int, int]]:
    """Of a level, the number of the first u and the k of each group that is not there to fill a tile."""
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
    """`Levels.count`, without the tables."""
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
