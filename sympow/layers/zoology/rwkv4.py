"""RWKV-4's time mixing: a weighted mean of the past with weights exp(k) that decay channel by channel."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from sympow.layers.base import Mixer, state_options
from sympow.layers.documents import per_document
from sympow.layers.float32_linear import linear_float32
from sympow.layers.initial import draw_orthogonal
from sympow.layers.state import Device, DType, MixerState
from sympow.ops.availability import concatenated, has_symbols
from sympow.ops.recomputed import recomputed

_FEW = 8  # sums that a scan takes all at once


@dataclass
class RWKV4State(MixerState):
    """Holds the last input [B, d], and sums over the past, [B, d] each in float32 at least.

    The sums are those of exp(k) v and of exp(k), both divided by exp(largest), and the largest exponent.
    """

    counters: ClassVar[tuple[str, ...] | None] = ()

    last: Tensor
    numerator: Tensor
    denominator: Tensor
    largest: Tensor


class RWKV4(Mixer):
    """Computes the time mixing of RWKV-4 (Peng et al., "RWKV", 2023, (11) to (17)), stable for any length and any k.

    A whole sequence is computed by a parallel scan, which merges neighbours, then pairs of neighbours, and so on. Each
    sum keeps its largest exponent, so that no exponential overflows.

    Args:
        d_model, n_heads: as in `Mixer`.
        depth: the depth of the layer in the model, layer / (layers - 1): 0 for the first, 1 for the last. The published
            initialisation of decays, and of the token shift of values, depends on it.
        shift_depth: layer / layers, which is never 1. All token shifts depend on it, so the last layer keeps a part of
            the token before. None: `depth`, with which a layer of depth 1 starts without a shift.
    """

    shifts_tokens = True

    def __init__(self, d_model: int, n_heads: int, *, depth: float = 0.0, shift_depth: float | None = None):
        super().__init__(d_model, n_heads)
        self.depth, self.shift_depth = depth, depth if shift_depth is None else shift_depth
        for name in ("depth", "shift_depth"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} lies between 0 and 1; got {getattr(self, name)!r}")
        self.mix = nn.Parameter(torch.empty(3, d_model))  # of k, v, r: the share of the token itself
        self.decay = nn.Parameter(torch.empty(d_model))  # log of the decay rate
        self.bonus = nn.Parameter(torch.empty(d_model))  # u, added to the token's own exponent
        self.key, self.value, self.receptance, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.reset_parameters()

    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Sets weights as published: keys, receptances and output at 0, values at an orthogonal matrix."""
        for linear in (self.key, self.receptance, self.out):
            nn.init.zeros_(linear.weight)
        draw_orthogonal(self.value.weight, 1.0, generator)
        d, depth = self.d_model, self.depth
        channel = torch.arange(d, device="cpu")
        with torch.no_grad():
            share = (channel / d) ** (1 - self.shift_depth)
            self.mix.copy_(torch.stack([share, share + 0.3 * depth, share**0.5]))
            self.decay.copy_(-5 + 8 * (channel / max(d - 1, 1)) ** (0.7 + 1.3 * depth))
            self.bonus.copy_(log(0.3) + 0.5 * ((channel + 1) % 3 - 1))

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, self.mix)
        return per_document(lambda document: self._mixed(document, self._start(document))[0], cu_seqlens, x)

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> RWKV4State:
        shape = (batch_size, self.d_model)
        last = torch.zeros(shape, **state_options(self.mix, device, dtype))
        zeros = torch.zeros(shape, **state_options(self.mix, device, dtype, sums=True))
        return RWKV4State(last, zeros, zeros.clone(), torch.full_like(zeros, -torch.inf))

    def training_flops(self, time: int) -> int:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`.

        Each channel has two sums that decay, 4 a token forward and twice as many backward.
        """
        return 12 * time * self.d_model

    @override
    def step(self, x: Tensor, state: RWKV4State) -> tuple[Tensor, RWKV4State]:
        self.check_step(x, state, self.mix)
        return self._mixed(x, state)

    @override
    def state_size(self, context: int) -> int:
        return 4 * self.d_model

    def _start(self, x: Tensor) -> RWKV4State:
        return self.init_state(x.shape[0], device=x.device)

    def _mixed(self, x: Tensor, state: RWKV4State) -> tuple[Tensor, RWKV4State]:
        before = shifted(x, state.last)
        x_k, x_v, x_r = (before + share * (x - before) for share in self.mix)
        k, v = linear_float32(self.key, x_k), linear_float32(self.value, x_v)
        rate = self.decay.to(k.dtype).exp()
        mean = graph_decayed_mean if has_symbols(x.shape[1]) else decayed_mean
        y, *past = mean(k, v, rate, self.bonus.to(k.dtype), state.numerator, state.denominator, state.largest)
        out = self.out(torch.sigmoid(self.receptance(x_r)) * y.to(x.dtype))
        return out, RWKV4State(x[:, -1].to(state.last.dtype, copy=True), *past)


def shifted(x: Tensor, last: Tensor) -> Tensor:
    """Returns x [B, T, d] one token later, `last` [B, d] in front."""
    return concatenated([last[:, None].to(x.dtype), x[:, :-1]], dim=1)


def decayed_mean(
    k: Tensor, v: Tensor, rate: Tensor, bonus: Tensor, numerator: Tensor, denominator: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns y_t = (A_{t-1} + e^{u + k_t} v_t) / (B_{t-1} + e^{u + k_t}).

    A_t = e^-rate A_{t-1} + e^{k_t} v_t, and B_t is the same without v.

    Args:
        k: [B, T, d].
        v: [B, T, d].
        rate: [d], above 0.
        bonus: [d], u.
        numerator: [B, d], A e^-largest.
        denominator: [B, d], B e^-largest.
        largest: [B, d], an exponent that bounds both.

    Returns:
        y [B, T, d], and numerator, denominator and largest after the last token.
    """
    # Sums are kept divided by e^(largest exponent). The exponents are constants to autograd: the sums do not depend on
    # them, and the weight of a token, which is 1 so divided, has the gradient of k.
    exponents = k.detach()
    weight = torch.exp(k - exponents)
    start = _Sums(*(x[:, None] for x in (numerator, denominator, largest)))
    (a, b, exponent), end = _scan(_Sums(weight * v, weight, exponents), start, rate)
    own = bonus + k
    top = torch.maximum(exponent, own).detach()
    past, present = torch.exp(exponent - top), torch.exp(own - top)
    y = (past * a + present * v) / (past * b + present)
    numerator, denominator, largest = (x[:, 0].clone() for x in end)  # views would hold what they are cut from
    return y, numerator, denominator, largest


def _like_mean(k: Tensor, v: Tensor, rate: Tensor, bonus: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (v, *past))


@recomputed(_like_mean, outputs=4)
def graph_decayed_mean(
    k: Tensor, v: Tensor, rate: Tensor, bonus: Tensor, numerator: Tensor, denominator: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `decayed_mean`, whose scan a graph of torch.compile would have for one length only."""
    return decayed_mean(k, v, rate, bonus, numerator, denominator, largest)


class _Sums(NamedTuple):
    """Holds two sums divided by e^exponent; the exponent has no gradient."""

    numerator: Tensor
    denominator: Tensor
    exponent: Tensor


def _scan(items: _Sums, start: _Sums, decay: Tensor) -> tuple[_Sums, _Sums]:
    """Returns the sums before each of the items [B, n, d], and the sum after the last [B, 1, d], as `start` is.

    Every item multiplies the sum before it by e^-decay. Neighbours are merged, and then the half as many sums are
    scanned in the same way, until they are few: 2 n merges in 2 log n steps of whole tensors.
    """
    count = items.exponent.shape[1]
    if count <= _FEW:
        return _all_pairs(items, start, decay)
    if count % 2:
        rest, last = (_Sums(*x) for x in zip(*(x.split([count - 1, 1], dim=1) for x in items), strict=True))
        before, end = _scan(rest, start, decay)
        joined = _Sums(*(torch.cat(x, dim=1) for x in zip(before, end, strict=True)))
        return joined, _merged(end, last, decay)
    first, second = (_Sums(*x) for x in zip(*(x.unflatten(1, (-1, 2)).unbind(2) for x in items), strict=True))
    before, end = _scan(_merged(first, second, decay), start, 2 * decay)
    between = _merged(before, first, decay)
    return _Sums(*(torch.stack(x, dim=2).flatten(1, 2) for x in zip(before, between, strict=True))), end


def _all_pairs(items: _Sums, start: _Sums, decay: Tensor) -> tuple[_Sums, _Sums]:
    """Computes `_scan` for few items, every sum by itself: n * n products, but as many steps as one merge."""
    a, b, exponent = (torch.cat(x, dim=1) for x in zip(start, items, strict=True))
    index = torch.arange(exponent.shape[1], device=exponent.device)
    lag = (index[:, None] - index)[..., None]
    moved = (exponent[:, None] - lag * decay).masked_fill(lag < 0, -torch.inf)  # [B, n + 1, n + 1, d]
    # Where nothing was summed all exponents are -inf, and differences are not numbers.
    top = moved.detach().amax(2).clamp(min=torch.finfo(moved.dtype).min)
    weight = torch.exp(moved - top[:, :, None])
    sums = ((weight * a[:, None]).sum(2), (weight * b[:, None]).sum(2), top)
    before, end = zip(*(x.split([len(index) - 1, 1], dim=1) for x in sums), strict=True)
    return _Sums(*before), _Sums(*end)


def _merged(earlier: _Sums, later: _Sums, decay: Tensor) -> _Sums:
    """Returns the sum of both, the earlier ones times e^-decay. One of the exponents must be finite."""
    moved = earlier.exponent - decay
    top = torch.maximum(moved.detach(), later.exponent)
    old, new = torch.exp(moved - top), torch.exp(later.exponent - top)
    return _Sums(
        old * earlier.numerator + new * later.numerator, old * earlier.denominator + new * later.denominator, top
    )
