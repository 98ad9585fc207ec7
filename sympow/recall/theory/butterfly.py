"""Butterfly and kaleidoscope matrices, and BaseConv layers that multiply with them (H.14 to H.18)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sympow.recall.theory.base_conv import Layer, convolution, linear


@dataclass(frozen=True)
class Factor:
    """Describes a butterfly factor matrix of size n with blocks of size k, a power of two (H.14).

    It maps x to y_i = own_i x_i + other_i x_j, where j is the place k / 2 further in the same block, or k / 2 before.

    Attributes:
        block: k.
        own: the diagonals of D_1 and D_4 of all blocks, [n].
        other: the diagonals of D_2 and D_3 of all blocks, [n].
    """

    block: int
    own: Tensor
    other: Tensor

    @property
    def size(self) -> int:
        """Returns n."""
        return len(self.own)

    @property
    def partner(self) -> Tensor:
        """Returns the place j of every place, int64 [n]."""
        return torch.arange(self.size) ^ (self.block // 2)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies with x [..., n]."""
        return self.own * x + self.other * x[..., self.partner]

    def transposed(self) -> Factor:
        """Returns the factor of the transposed matrix."""
        return Factor(self.block, self.own, self.other[self.partner])


def random_butterfly(size: int, generator: torch.Generator) -> list[Factor]:
    """Draws the factors of a butterfly matrix, blocks of 2, 4, ... n, in the order in which they are applied."""
    blocks = [2 << i for i in range(size.bit_length() - 1)]
    return [Factor(block, *torch.randn(2, size, generator=generator, dtype=torch.float64)) for block in blocks]


def transposed(factors: Sequence[Factor]) -> list[Factor]:
    """Returns the factors of the transposed product."""
    return [factor.transposed() for factor in reversed(factors)]


def kaleidoscope(pairs: Sequence[tuple[Sequence[Factor], Sequence[Factor]]]) -> list[Factor]:
    """Returns the factors of E_w ... E_1 with E_i = B_i C_i*, for butterfly matrices (B_i, C_i) of one size (H.17).

    With x followed by zeros, and the start of the result alone, this is a matrix with expansion.
    """
    return [factor for outer, inner in pairs for factor in (*transposed(inner), *outer)]


def factors_as_base_conv(factors: Sequence[Factor], width: int) -> Iterator[Layer]:
    """Makes BaseConv layers that multiply with factors of one size n, one after another (H.16, H.18).

    x [n] is written row by row into the first `width` channels of a tape of n / width rows and 3 `width` channels, the
    others are 0, and so is the result. A factor takes one layer if its partners are in the same row, otherwise two: one
    copies x into all three groups of channels, and one moves two of them, by k / 2 places up and down, and multiplies
    with the diagonals (H.15). The source adds the three by the primitive of H.9, which takes more layers.

    Raises ValueError if n and `width` are not powers of two, or n is less than `width`.
    """
    size = factors[0].size
    if size & (size - 1) or width & (width - 1) or not 0 < width <= size:
        raise ValueError(f"the size and the width must be powers of two, the width not the larger; got {size}, {width}")
    for factor in factors:
        yield from _factor_layers(factor, size // width, width)
    yield linear(size // width, _grouped(torch.eye(width, dtype=factors[0].own.dtype)))


def _factor_layers(factor: Factor, rows: int, width: int) -> list[Layer]:
    """Returns the layers of one factor. Each sums the three groups of channels of its input first."""
    distance = factor.block // 2
    place = torch.arange(factor.size)
    before = place & distance == 0  # the partner is further down the tape
    diagonals = (factor.own, factor.other * before, factor.other * ~before)
    mask = torch.cat([diagonal.view(rows, width) for diagonal in diagonals], dim=1)
    identity = torch.eye(width, dtype=mask.dtype)
    if distance < width:
        up = torch.diag(torch.ones(width - distance, dtype=mask.dtype), -distance)
        return [linear(rows, _grouped(identity, up, up.T), mask=mask)]
    moved = distance // width
    kernel = torch.zeros_like(mask)
    for group, tap in enumerate((0, rows - moved, moved)):
        kernel[tap, group * width : (group + 1) * width] = 1
    return [linear(rows, _grouped(identity, identity, identity)), convolution(rows, kernel, mask, circular=True)]


def _grouped(*groups: Tensor) -> Tensor:
    """Returns the weight [3 d, 3 d] that multiplies the sum of the three groups of channels with each of `groups`."""
    width = groups[0].shape[0]
    weight = groups[0].new_zeros(3 * width, 3 * width)
    weight[:, : len(groups) * width] = torch.cat(groups, dim=1).repeat(3, 1)
    return weight
