"""The rows of the state in the kernels, and the conversion from and to the public basis (M7).

The rows of p = 3 and 4 in the forward pass on Hopper are in `levels`.

A row is a monomial x_i1 ... x_i(p-1) x_j: a sorted prefix, and a last index j. Prefixes whose largest index is in the
lower half of the key dim come first. They are multiplied with every j, K rows each. The other prefixes are multiplied
with the upper half of j only, K/2 rows each. Every monomial has at least one row, and a tile of rows is one factor for
each token times a contiguous slice of x. Rows are plain decayed sums of the monomial times v. The weights in (x . y)**p
= sum of weight(row) row(x) row(y) depend only on the prefix, with one exception: a row with a lower prefix and an upper
j counts for p times as many orderings, so x is multiplied by p there (`base` in the kernels).

For p = 2 the triangle can be cut into more parts, quarters (5/8 K^2 rows instead of 3/4) or eighths (9/16 K^2). A
prefix is multiplied with every j of its own part and of later parts. These parts are covered by ranges whose widths are
powers of two (`bands`), because tiles have such widths. Rows whose prefix is in a lower part than j count for two
orderings.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from sympow.ops.feature_map import multinomials, spow_dim, spow_indices


def public_rows(tuples: Tensor, key_dim: int) -> Tensor:
    """Returns the rows of (M7) of multi-indices [n, p] in any order."""
    p = tuples.shape[1]
    # A sorted tuple is a number in base K, and lexicographic order is the order of those numbers.
    base = key_dim ** torch.arange(p - 1, -1, -1)
    public = (spow_indices(key_dim, p) * base).sum(1)
    return torch.searchsorted(public, (tuples.sort(1).values * base).sum(1))


def split(key_dim: int, p: int) -> int:
    """Returns the end of the lower half of the key dim; below 32 a half is too narrow for a tile."""
    return key_dim // 2 if key_dim >= 32 and p > 1 else key_dim


def bands(parts: int) -> list[tuple[int, int, int]]:
    """Returns (i, s, w) of each band of rows of p = 2, in order: prefixes in part i, and last indices in the w parts
    from s on.

    The parts from i on are covered by ranges whose widths are the binary digits of their number, the smallest first.
    The widest bands come first.
    """
    widths = [parts >> n for n in range(parts.bit_length())]
    return [(i, parts - (parts - i) // w * w, w) for w in widths for i in range(parts) if (parts - i) & w]


def row_count(key_dim: int, p: int, parts: int) -> int:
    """Returns `Rows.count` without making the tables."""
    if parts > 2:
        return (parts + 1) * key_dim**2 // (2 * parts)
    half = split(key_dim, p)
    lower, prefixes = (spow_dim(dim, p - 1) if p > 1 else 1 for dim in (half, key_dim))
    return lower * key_dim + (prefixes - lower) * (key_dim - half)


class Basis:
    """Holds rows of a state with the monomials `tuples` [rows, p], every monomial at least once, on the CPU.

    A row with a negative index is zero.
    """

    def __init__(self, key_dim: int, p: int, tuples: Tensor):
        self.key_dim, self.p, self.count = key_dim, p, len(tuples)
        self.present = (tuples >= 0).all(1)
        self.index = public_rows(tuples.clamp(min=0), key_dim)  # of each row, the row of (M7) with its monomial
        self.representative = torch.empty(spow_dim(key_dim, p), dtype=torch.int64)  # and the other way round
        self.representative[self.index[self.present]] = torch.arange(self.count)[self.present]
        self.roots = multinomials(key_dim, p).sqrt()
        # The share of each row in an inner product: the orderings of its monomial, divided among the rows that have it.
        shares = (self.roots.square() / self.index[self.present].bincount())[self.index]
        self.shares = (shares * self.present).float()
        self._public: dict[torch.device, tuple[Tensor, ...]] = {}

    def from_public(self, s: Tensor) -> Tensor:
        """Converts [..., D, V] of (M7) to [..., rows, V]."""
        index, _, roots, *_ = self._public_on(s.device)
        rows = s.index_select(-2, index) / roots.to(s.dtype)[index, None]
        return rows if self.present.all() else rows * (self.shares_on(s.device) > 0)[:, None]

    def to_public(self, rows: Tensor) -> Tensor:
        """Converts [..., rows, V] to [..., D, V] of (M7)."""
        _, representative, roots, *_ = self._public_on(rows.device)
        return rows.index_select(-2, representative) * roots.to(rows.dtype)[:, None]

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the sum over (M7) of the product of two states with these rows, [..., rows, V]: [...]."""
        return (a * b).sum(-1) @ self.shares_on(a.device).to(a.dtype)

    def shares_on(self, device: torch.device) -> Tensor:
        """Returns `shares`, float32 [rows], on a device."""
        return self._public_on(device)[-1]

    def matrix_from_public(self, z: Tensor) -> Tensor:
        """Converts [..., D] of (M7) to the sum of k k^T, [..., K, K]; for p = 2."""
        _, _, roots, a, b, _ = self._public_on(z.device)
        half = z / roots.to(z.dtype)
        full = z.new_zeros(*z.shape[:-1], self.key_dim, self.key_dim)
        full[..., a, b] = half
        full[..., b, a] = half
        return full

    def matrix_to_public(self, matrix: Tensor) -> Tensor:
        """Converts the sum of k k^T, [..., K, K], to [..., D] of (M7); for p = 2."""
        _, _, roots, a, b, _ = self._public_on(matrix.device)
        return matrix[..., a, b] * roots.to(matrix.dtype)

    def _public_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns index, representative, roots, the row and column of each of (M7) for p = 2, and shares, on a device.
        They are copied once, because the host waits for the device when it copies."""
        if device not in self._public:
            a, b = torch.triu_indices(self.key_dim, self.key_dim)
            tables = (self.index, self.representative, self.roots, a, b, self.shares)
            self._public[device] = tuple(table.to(device) for table in tables)
        return self._public[device]


class Rows(Basis):
    """Holds the rows for one K (a power of two, 16 or more) and p. Tensors are on the CPU; `on` copies the tables to a
    device.

    Args:
        parts: the number of parts of K that make a triangle, 2, or for p = 2 also those with 16 channels or more each.
    """

    def __init__(self, key_dim: int, p: int, parts: int = 2):
        if parts != 2 and (parts not in (4, 8) or p != 2 or key_dim < 16 * parts):
            allowed = "2, or for p = 2 also 4 (K >= 64) or 8 (K >= 128)"
            raise ValueError(f"parts is {allowed}; got parts={parts}, p={p}, K={key_dim}")
        self.half = split(key_dim, p)
        first = self.half if parts == 2 else key_dim // parts
        prefixes = spow_indices(key_dim, p - 1) if p > 1 else torch.zeros(1, 0, dtype=torch.int64)
        upper = prefixes[:, -1] >= first if p > 1 else torch.zeros(1, dtype=torch.bool)
        self.prefixes = torch.cat([prefixes[~upper], prefixes[upper]])
        # Of each band of rows: its prefixes, and the range of their last indices.
        self.bands = [(prefixes[~upper], 0, key_dim), (prefixes[upper], self.half, key_dim)]
        if parts > 2:
            by_part = prefixes.split(first)
            self.bands = [(by_part[i], s * first, (s + w) * first) for i, s, w in bands(parts)]
        self.lower, self.upper = (len(band[0]) for band in self.bands[:2])
        j = torch.arange(key_dim)
        super().__init__(key_dim, p, torch.cat([self._tuples(prefix, j[a:b]) for prefix, a, b in self.bands]))

        # The number of orderings that a prefix counts for, alone (in a gradient with respect to x_j) and in its rows.
        orderings = multinomials(key_dim, p - 1) if p > 1 else torch.ones(1, dtype=torch.float64)
        orderings = torch.cat([orderings[~upper], orderings[upper]])
        above = (self.prefixes >= self.half).sum(1)
        self.gradient_weights = orderings.float()
        self.weights = torch.where(above > 0, orderings * p / (above + 1), orderings).float()

        self._pairs: dict[torch.device, tuple[Tensor, Tensor]] = {}
        # The rows (upper prefix, lower j) are those of the prefix that has j in place of its largest index.
        self.mirror = torch.empty(self.upper, self.half, dtype=torch.int64)
        if self.upper and parts == 2:
            others = public_rows(self._tuples(self.prefixes[self.lower :], j[: self.half]), key_dim)
            self.mirror = self.representative[others].view(self.upper, self.half)
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def pairs_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the channels of each row, and the rows with the other channel of a pair (2m, 2m + 1) instead, int32
        [p, rows] both."""
        if device not in self._pairs:
            channels = spow_indices(self.key_dim, self.p)[self.index]
            others = []
            for j in range(self.p):
                tuples = channels.clone()
                tuples[:, j] ^= 1
                others.append(self.representative[public_rows(tuples, self.key_dim)])
            self._pairs[device] = channels.t().contiguous().int().to(device), torch.stack(others).int().to(device)
        return self._pairs[device]

    @staticmethod
    def _tuples(prefixes: Tensor, last: Tensor) -> Tensor:
        return torch.cat([prefixes.repeat_interleave(len(last), 0), last.repeat(len(prefixes))[:, None]], 1)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns prefixes int32 [n, p - 1], weights and gradient weights float32 [n], mirror int32 [upper, K/2]."""
        if device not in self._tables:
            a, b = self.prefixes.int().to(device), self.weights.to(device)
            self._tables[device] = a, b, self.gradient_weights.to(device), self.mirror.int().to(device)
        return self._tables[device]


@lru_cache(maxsize=32)
def rows_of(key_dim: int, p: int, parts: int = 2) -> Rows:
    return Rows(key_dim, p, parts)
