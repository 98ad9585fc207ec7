"""The rows of the state as the kernels keep them, and the way to and from the public basis (M7).

A row is a monomial x_i1 ... x_i(p-1) x_j: a prefix, sorted, and a last index j. Prefixes whose largest index lies in
the lower half of the key dim come first and meet every j, K rows each; the others meet the upper half of j only, K/2
rows each. Every monomial has at least one row, and a tile of rows is one factor a token times a slice of x as it lies
in memory. Rows hold plain decayed sums of the monomial times v. The weights that make
(x . y)**p = sum of weight(row) row(x) row(y) depend on the prefix alone, but for one case: a lower prefix with an upper
j stands for p times as many orderings, so x is multiplied by p there (`base` in the kernels).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from sympow.ops.feature_map import multinomials, spow_dim, spow_indices


class Rows:
    """The rows for one K (a power of two, 16 or more) and p. Tensors are on the CPU; `on` brings tables to a device."""

    def __init__(self, key_dim: int, p: int):
        self.key_dim, self.p = key_dim, p
        self.half = key_dim // 2 if key_dim >= 32 and p > 1 else key_dim  # below 32 a half is too narrow for a tile
        prefixes = spow_indices(key_dim, p - 1) if p > 1 else torch.zeros(1, 0, dtype=torch.int64)
        upper = prefixes[:, -1] >= self.half if p > 1 else torch.zeros(1, dtype=torch.bool)
        self.prefixes = torch.cat([prefixes[~upper], prefixes[upper]])
        self.lower, self.upper = int((~upper).sum()), int(upper.sum())
        self.count = self.lower * key_dim + self.upper * (key_dim - self.half)

        j = torch.arange(key_dim)
        low = self._tuples(self.prefixes[: self.lower], j)
        high = self._tuples(self.prefixes[self.lower :], j[self.half :])
        # A sorted tuple is a number in base K, and lexicographic order is the order of those numbers.
        base = key_dim ** torch.arange(p - 1, -1, -1)
        public = (spow_indices(key_dim, p) * base).sum(1)
        numbers = (torch.cat([low, high]).sort(1).values * base).sum(1)
        self.index = torch.searchsorted(public, numbers)  # of each row, the row of (M7) with its monomial
        self.representative = torch.empty(spow_dim(key_dim, p), dtype=torch.int64)  # and the other way round
        self.representative[self.index] = torch.arange(self.count)
        self.roots = multinomials(key_dim, p).sqrt()

        # How many orderings a prefix stands for, alone (in a gradient with respect to x_j) and in its rows.
        orderings = multinomials(key_dim, p - 1) if p > 1 else torch.ones(1, dtype=torch.float64)
        orderings = torch.cat([orderings[~upper], orderings[upper]])
        above = (self.prefixes >= self.half).sum(1)
        self.gradient_weights = orderings.float()
        self.weights = torch.where(above > 0, orderings * p / (above + 1), orderings).float()

        # Where the rows (upper prefix, lower j) are to be found: under the prefix that has j in place of its largest.
        self.mirror = torch.empty(self.upper, self.half, dtype=torch.int64)
        if self.upper:
            numbers = (self._tuples(self.prefixes[self.lower :], j[: self.half]).sort(1).values * base).sum(1)
            self.mirror = self.representative[torch.searchsorted(public, numbers)].view(self.upper, self.half)
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._public: dict[torch.device, tuple[Tensor, ...]] = {}

    @staticmethod
    def _tuples(prefixes: Tensor, last: Tensor) -> Tensor:
        return torch.cat([prefixes.repeat_interleave(len(last), 0), last.repeat(len(prefixes))[:, None]], 1)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """prefixes int32 [n, p - 1], weights and gradient weights float32 [n], mirror int32 [upper, K/2]."""
        if device not in self._tables:
            a, b = self.prefixes.int().to(device), self.weights.to(device)
            self._tables[device] = a, b, self.gradient_weights.to(device), self.mirror.int().to(device)
        return self._tables[device]

    def from_public(self, s: Tensor) -> Tensor:
        """[..., D, V] of (M7) to [..., rows, V]."""
        index, _, roots, _, _ = self._public_on(s.device)
        return s.index_select(-2, index) / roots.to(s.dtype)[index, None]

    def to_public(self, rows: Tensor) -> Tensor:
        """[..., rows, V] to [..., D, V] of (M7)."""
        _, representative, roots, _, _ = self._public_on(rows.device)
        return rows.index_select(-2, representative) * roots.to(rows.dtype)[:, None]

    def matrix_from_public(self, z: Tensor) -> Tensor:
        """p = 2: [..., D] of (M7) to the [..., K, K] sum of k k^T."""
        _, _, roots, a, b = self._public_on(z.device)
        half = z / roots.to(z.dtype)
        full = z.new_zeros(*z.shape[:-1], self.key_dim, self.key_dim)
        full[..., a, b] = half
        full[..., b, a] = half
        return full

    def matrix_to_public(self, matrix: Tensor) -> Tensor:
        """p = 2: the [..., K, K] sum of k k^T to [..., D] of (M7)."""
        _, _, roots, a, b = self._public_on(matrix.device)
        return matrix[..., a, b] * roots.to(matrix.dtype)

    def _public_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """index, representative, roots, and the row and column of each of (M7) for p = 2, on a device. Copied once: the
        host waits for the device where it copies."""
        if device not in self._public:
            a, b = torch.triu_indices(self.key_dim, self.key_dim)
            tables = (self.index, self.representative, self.roots, a, b)
            self._public[device] = tuple(table.to(device) for table in tables)
        return self._public[device]


@lru_cache(maxsize=32)
def rows_of(key_dim: int, p: int) -> Rows:
    return Rows(key_dim, p)
