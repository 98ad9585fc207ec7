"""The features phi(x) as the eager path forms them: monomials x_i1 ... x_ip, in few and large operations.

Time runs along the last axis. The multinomial weights of (M7) are left out here; they multiply the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.ops.availability import constant_result, kept
from sympow.ops.feature_map import multinomials, spow_dim, spow_indices, spow_offset

# First indices of monomials form at most this many groups. Few groups need few calls, but some rows occur twice.
_GROUPS = 8
# Elements of phi formed at once, over all heads: small enough to stay in a cache.
_TILE_ELEMENTS = 1 << 19


class Group(NamedTuple):
    """Holds rows [start, stop): x_first .. x_(last-1), each times the monomials of one degree less from `rest` on.

    Its fields are read by name, because torch.compile of torch 2.11 cannot unpack it.
    """

    first: int
    last: int
    rest: int
    start: int
    stop: int


class Basis:
    """Holds the rows that the state has during computation, for one K and p.

    Row (a, t) is the monomial x_a x_t1 ... x_t(p-1), for t sorted. First indices form groups [first, last). All rows of
    a group share the tuples t from x_first on, so a group is one product of a few rows with many. The price is that a
    monomial with several factors in one group has a row for each of them. Such rows share the monomial's weight.

    Args:
        key_dim: K.
        p: the power.
    """

    def __init__(self, key_dim: int, p: int):
        self.groups: list[Group] = []
        public = multinomials(key_dim, p)
        if p == 1:
            index = torch.arange(key_dim)
        else:
            lower, tuples, start = spow_indices(key_dim, p - 1), [], 0
            width = -(-key_dim // _GROUPS)
            for first in range(0, key_dim, width):
                last, rest = min(first + width, key_dim), spow_offset(key_dim, p - 1, first)
                tail = lower[rest:]
                heads = torch.arange(first, last).repeat_interleave(len(tail))
                tuples.append(torch.cat([heads[:, None], tail.repeat(last - first, 1)], dim=1))
                self.groups.append(Group(first, last, rest, start, start + len(heads)))
                start += len(heads)
            # A sorted tuple is a number in base K, and lexicographic order is the order of those numbers.
            base = key_dim ** torch.arange(p - 1, -1, -1)
            numbers = (torch.cat(tuples).sort(dim=1).values * base).sum(1)
            index = torch.searchsorted((spow_indices(key_dim, p) * base).sum(1), numbers)
        self.index = index  # for each row, the row of the public state (M7) that holds its monomial
        self.representative = torch.empty(spow_dim(key_dim, p), dtype=torch.int64)  # and the other way round
        self.representative[index] = torch.arange(len(index))
        self.roots = public.sqrt()
        rows = torch.zeros(len(public), dtype=torch.int64).index_add_(0, index, torch.ones_like(index))
        self.weights = (public / rows)[index]


@kept(64)
def _basis(key_dim: int, p: int) -> Basis:
    return Basis(key_dim, p)


@constant_result
def basis(key_dim: int, p: int) -> Basis:
    """Returns the basis for one K and p, kept for later calls. For torch.compile it is a constant."""
    return _basis(key_dim, p)


class Features:
    """Forms the monomials of x [N, K, C] (heads, channels, time), a tile of rows at a time.

    They have three uses, for a state [N, V', D] and values [N, V', C]: `read`, `accumulate`, and the gradient of `read`
    with respect to x.

    Args:
        x: [N, K, C].
        p: the power.
    """

    def __init__(self, x: Tensor, p: int):
        self.x, self.p = x, p
        self.heads, self.key_dim, self.time = x.shape
        self.groups = basis(self.key_dim, p).groups
        # levels[m] holds the monomials of degree m + 1 in the order of (M7); those of degree p are formed in tiles.
        self.levels = [x]
        for degree in range(2, p):
            level = x.new_empty(self.heads, spow_dim(self.key_dim, degree), self.time)
            for a, rows, rest in self._blocks(degree):
                _multiply(x[:, a : a + 1], self.levels[-1][:, rest:], level[:, rows])
            self.levels.append(level)

    def read(self, state: Tensor) -> Tensor:
        """Returns state phi(x): [N, V', C]."""
        out = state.new_zeros(self.heads, state.shape[1], self.time)
        for rows, phi in self._tiles():
            out += state[:, :, rows] @ phi
        return out

    def accumulate(self, state: Tensor, values: Tensor) -> None:
        """Adds values phi(x)^T to the state."""
        for rows, phi in self._tiles():
            state[:, :, rows] += values @ phi.transpose(1, 2)

    def read_gradient(self, state: Tensor, dout: Tensor) -> Tensor:
        """Returns the gradient [N, K, C] of `read` with respect to x."""
        if self.p == 1:
            return state.transpose(1, 2) @ dout
        dlevels = [torch.zeros_like(level) for level in self.levels]
        for group in self.groups:
            span = slice(group.first, group.last)
            dphi = state[:, :, group.start : group.stop].transpose(1, 2) @ dout
            dphi = dphi.unflatten(1, (group.last - group.first, -1))
            dlevels[-1][:, group.rest :] += (self.x[:, span, None] * dphi).sum(1)
            dlevels[0][:, span] += dphi.mul_(self.levels[-1][:, None, group.rest :]).sum(2)
        for degree in range(self.p - 1, 1, -1):
            lower, dlower, dlevel = self.levels[degree - 2], dlevels[degree - 2], dlevels[degree - 1]
            for a, rows, rest in self._blocks(degree):
                dlower[:, rest:].addcmul_(self.x[:, a : a + 1], dlevel[:, rows])
                dlevels[0][:, a] += (lower[:, rest:] * dlevel[:, rows]).sum(1)
        return dlevels[0]

    def _tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows of the state and their features [N, rows, C].

        The features of a tile are overwritten by the next tile.
        """
        if self.p == 1:
            yield slice(0, self.key_dim), self.x
            return
        most = max(1, _TILE_ELEMENTS // max(1, self.heads * self.time))
        tiles: list[list[Group]] = []
        for group in self.groups:
            if tiles and group.stop - tiles[-1][0].start <= most:
                tiles[-1].append(group)
            else:
                tiles.append([group])
        rows = [tile[-1].stop - tile[0].start for tile in tiles]
        buffer = self.x.new_empty(self.heads * max(rows) * self.time)
        for tile, count in zip(tiles, rows, strict=True):
            phi = buffer[: self.heads * count * self.time].view(self.heads, count, self.time)
            origin = tile[0].start
            for group in tile:
                firsts = group.last - group.first
                out = phi[:, group.start - origin : group.stop - origin].unflatten(1, (firsts, -1))
                _multiply(self.x[:, group.first : group.last, None], self.levels[-1][:, None, group.rest :], out)
            yield slice(origin, origin + count), phi

    def _blocks(self, degree: int) -> Iterator[tuple[int, slice, int]]:
        """Yields, for a level below p, each first index a, its rows, and the start of a suffix of the level below.

        x_a multiplies the monomials in the channels from a on, which are a suffix of the lexicographic list.
        """
        row, end = 0, spow_dim(self.key_dim, degree - 1)
        for a in range(self.key_dim):
            rest = spow_offset(self.key_dim, degree - 1, a)
            yield a, slice(row, row + end - rest), rest
            row += end - rest


def _multiply(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Writes x y to `out`, a view."""
    if torch.compiler.is_compiling():  # which does not trace products into a view
        out.copy_(x * y)
    else:
        torch.mul(x, y, out=out)
