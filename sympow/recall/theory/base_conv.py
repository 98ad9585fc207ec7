"""BaseConv as in the theory (Algorithm 7), with biases for every row, and the primitives made of it (H.7 to H.11)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.convolution import causal_convolution

_FEW = 8  # taps that are applied as shifts, one by one


@dataclass(frozen=True)
class Layer:
    """Computes (u W + b_1) * (h (*) u + b_2) on a tape of N rows and d channels, * channel by channel.

    Attributes:
        weight: W, [d, d].
        gate_bias: b_1, [N, d].
        kernel: h, [S, d] with S <= N, or [n, S, d] where it depends on the input; missing taps are 0.
        bias: b_2, [N, d].
        circular: whether the convolution is circular, of period N; else it is causal.
    """

    weight: Tensor
    gate_bias: Tensor
    kernel: Tensor
    bias: Tensor
    circular: bool = False

    def __call__(self, u: Tensor) -> Tensor:
        """Applies the layer to u [n, N, d].

        A kernel with few taps is applied by shifts. So integers stay exact, as long as they fit the dtype.
        """
        gate = u @ self.weight + self.gate_bias if self._projects else self.gate_bias
        return gate * (self._convolved(u) + self.bias)

    def _convolved(self, u: Tensor) -> Tensor | float:
        if self._taps is None:
            return (circular_convolution if self.circular else causal_convolution)(u, self.kernel)
        if not self._taps:
            return 0.0
        out = torch.zeros_like(u)
        for tap, channels in self._taps:
            part = u[..., channels]
            moved = part.roll(tap, 1) if self.circular else pad(part, (0, 0, tap, 0))[:, : u.shape[1]]
            out[..., channels] += self.kernel[tap, channels] * moved
        return out

    @cached_property
    def _projects(self) -> bool:
        return bool(self.weight.any())

    @cached_property
    def _taps(self) -> list[tuple[int, slice]] | None:
        """Returns the taps that are not 0, and channels outside of which they are 0.

        None if the taps are many or depend on the input.
        """
        if self.kernel.ndim == 3:
            return None
        found = self.kernel.any(1).nonzero()[:, 0].tolist()
        if len(found) > _FEW:
            return None
        used = {tap: self.kernel[tap].nonzero()[:, 0] for tap in found}
        return [(tap, slice(int(channels[0]), int(channels[-1]) + 1)) for tap, channels in used.items()]


def circular_convolution(u: Tensor, h: Tensor) -> Tensor:
    """Returns y_t = sum over s of h_s u_{(t - s) mod N}: u [n, N, d], h [S, d] or [n, S, d] with S <= N."""
    rows = u.shape[1]
    return causal_convolution(torch.cat([u, u], dim=1), pad(h, (0, 0, 0, rows - h.shape[-2])))[:, rows:]


def apply(layers: Iterable[Layer], u: Tensor) -> Tensor:
    """Applies layers one after another to u [n, N, d] (H.11)."""
    for layer in layers:
        u = layer(u)
    return u


def linear(rows: int, weight: Tensor, bias: Tensor | float = 0.0, mask: Tensor | float = 1.0) -> Layer:
    """Returns the layer (u W + bias) * mask (H.7); bias and mask broadcast to [N, d]."""
    like = weight.new_zeros(rows, weight.shape[1])
    return Layer(weight, like + bias, like[:1], like + mask)


def convolution(rows: int, kernel: Tensor, mask: Tensor | float = 1.0, *, circular: bool = False) -> Layer:
    """Returns the layer mask * (h (*) u) for a kernel [S, d] or [n, S, d] (H.7); the mask broadcasts to [N, d]."""
    width = kernel.shape[-1]
    like = kernel.new_zeros(rows, width)
    return Layer(kernel.new_zeros(width, width), like + mask, kernel, like, circular)


def taps(width: int, *places: int) -> Tensor:
    """Returns a kernel [S, d] that is 1 at the given taps in every channel, and 0 elsewhere."""
    kernel = torch.zeros(max(places) + 1, width, dtype=torch.float64)
    kernel[list(places)] = 1
    return kernel


def shift_down(rows: int, width: int, by: int) -> Layer:
    """Moves every row down by `by` rows, zeros in front (H.8): the kernel is 1 at tap `by`."""
    return convolution(rows, taps(width, by))


def shift_up(rows: int, width: int, by: int) -> Layer:
    """Moves every row up by `by` rows, zeros behind (H.8).

    A causal convolution cannot move a row up. The circular one with tap N - by can. The rows that it moves from the
    start to the end of the tape are masked.
    """
    mask = (torch.arange(rows) < rows - by).double()[:, None]
    return convolution(rows, taps(width, (rows - by) % rows), mask, circular=True)


def add(rows: int, width: int, count: int) -> list[Layer]:
    """Adds the first `count` rows to the `count` rows after them, and sets the first ones to 1 (H.9).

    The first layer adds a copy of the tape that is moved down by `count` rows, and keeps only the sum. The second layer
    writes the ones. All rows after the sum must be 0 before.

    Raises ValueError if the tape has fewer than 2 `count` rows.
    """
    if not 0 < 2 * count <= rows:
        raise ValueError(f"a tape of {rows} rows holds x and S of 1 to {rows // 2} rows each; got {count}")
    place = torch.arange(rows)[:, None]
    summed, ones = ((place >= count) & (place < 2 * count)).double(), (place < count).double()
    none = torch.zeros(width, width).double()
    like = torch.zeros(rows, width).double()
    return [convolution(rows, taps(width, 0, count), summed),
            Layer(none, like + summed + ones, taps(width, 0), like + ones)]  # fmt: skip


def running_sum(rows: int, width: int) -> Layer:
    """Sums all rows up to each row: a kernel of ones. The appendix has no such primitive."""
    return convolution(rows, taps(width, *range(rows)))


def remember(head: int, inner: Sequence[Layer]) -> list[Layer]:
    """Makes the layers that apply `inner` to the rows after the first `head` rows, which they do not change (H.10).

    The tape has head + N rows, where `inner` has N rows, and 2 d channels. The last d channels are 0 before and after
    these layers, and contain the first rows while `inner` is applied. In the channels of `inner`, its filters would
    spread the first rows over the rows after them.
    """
    length, width = inner[0].gate_bias.shape
    rows = head + length
    none, identity = torch.zeros(width, width).double(), torch.eye(width).double()
    first = (torch.arange(rows) < head).double()[:, None].expand(-1, width)
    apart = linear(rows, torch.cat([torch.cat([identity, identity], 1), torch.cat([none, none], 1)]),
                   mask=torch.cat([1 - first, first], dim=1))  # fmt: skip
    together = linear(rows, torch.cat([torch.cat([identity, none], 1), torch.cat([identity, none], 1)]))
    return [apart, *(_beside(layer, head) for layer in inner), together]


def _beside(layer: Layer, head: int) -> Layer:
    """Returns `layer` on the rows behind the first `head` of the first d channels; the last d channels pass."""
    if layer.circular:
        raise ValueError("a circular layer has the period of its own tape and cannot be applied on a longer tape")
    rows, width = head + layer.gate_bias.shape[0], layer.weight.shape[0]
    ones = torch.ones(rows, width).double()
    behind = (0, 0, head, 0)
    return Layer(
        torch.block_diag(layer.weight, torch.zeros(width, width).double()),
        torch.cat([pad(layer.gate_bias, behind), ones], dim=1),
        torch.cat([layer.kernel, pad(taps(width, 0), (0, 0, 0, layer.kernel.shape[0] - 1))], dim=1),
        torch.cat([pad(layer.bias, behind), 0 * ones], dim=1),
    )
