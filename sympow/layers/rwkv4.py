"""RWKV-4's time mixing: a weighted mean of the past with weights exp(k) that decay channel by channel."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, log
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sympow.layers.base import Mixer, MixerState, draw_orthogonal, linear_float32, per_document, state_options


@dataclass
class RWKV4State(MixerState):
    """The last input [B, d]; and of the past, [B, d] each in float32 at least: the sums of exp(k) v and of exp(k), both
    divided by exp(largest), and the largest exponent."""

    last: Tensor
    numerator: Tensor
    denominator: Tensor
    largest: Tensor


class RWKV4(Mixer):
    """The time mixing of RWKV-4 (Peng et al., "RWKV", 2023, (11) to (17)), stable for any length and any k.

    A whole sequence is computed in chunks of sqrt(T) tokens: few passes over all tokens, each keeping the largest
    exponent seen, so that no exponential overflows.

    Args:
        depth: where in the model the layer stands, 0 the first and 1 the last: the published initialisation of decays
            and token shifts depends on it.
    """

    def __init__(self, d_model: int, n_heads: int, *, depth: float = 0.0):
        super().__init__(d_model, n_heads)
        if not 0 <= depth <= 1:
            raise ValueError(f"depth lies between 0 and 1; got {depth!r}")
        self.depth = depth
        self.mix = nn.Parameter(torch.empty(3, d_model))  # of k, v, r: the share of the token itself
        self.decay = nn.Parameter(torch.empty(d_model))  # log of the decay rate
        self.bonus = nn.Parameter(torch.empty(d_model))  # u, added to the token's own exponent
        self.key, self.value, self.receptance, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.reset_parameters()

    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """As published: keys, receptances and the output start at 0, values at an orthogonal matrix."""
        for linear in (self.key, self.receptance, self.out):
            nn.init.zeros_(linear.weight)
        draw_orthogonal(self.value.weight, 1.0, generator)
        d, depth = self.d_model, self.depth
        channel = torch.arange(d, device="cpu")
        with torch.no_grad():
            share = (channel / d) ** (1 - depth)
            self.mix.copy_(torch.stack([share, share + 0.3 * depth, share**0.5]))
            self.decay.copy_(-5 + 8 * (channel / max(d - 1, 1)) ** (0.7 + 1.3 * depth))
            self.bonus.copy_(log(0.3) + 0.5 * ((channel + 1) % 3 - 1))

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, self.mix)
        return per_document(lambda document: self._mixed(document, self._start(document))[0], cu_seqlens, x)

    def init_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> RWKV4State:
        shape = (batch_size, self.d_model)
        last = torch.zeros(shape, **state_options(self.mix, device, dtype))
        zeros = torch.zeros(shape, **state_options(self.mix, device, dtype, sums=True))
        return RWKV4State(last, zeros, zeros.clone(), torch.full_like(zeros, -torch.inf))

    def step(self, x: Tensor, state: RWKV4State) -> tuple[Tensor, RWKV4State]:
        self.check_input(x, self.mix)
        return self._mixed(x, state)

    def state_size(self, context: int) -> int:
        return 4 * self.d_model

    def _start(self, x: Tensor) -> RWKV4State:
        return self.init_state(x.shape[0], device=x.device)

    def _mixed(self, x: Tensor, state: RWKV4State) -> tuple[Tensor, RWKV4State]:
        before = shifted(x, state.last)
        x_k, x_v, x_r = (before + share * (x - before) for share in self.mix)
        k, v = linear_float32(self.key, x_k), linear_float32(self.value, x_v)
        rate = self.decay.to(k.dtype).exp()
        y, *past = decayed_mean(k, v, rate, self.bonus.to(k.dtype), state.numerator, state.denominator, state.largest)
        out = self.out(torch.sigmoid(self.receptance(x_r)) * y.to(x.dtype))
        return out, RWKV4State(x[:, -1].to(state.last.dtype, copy=True), *past)


def shifted(x: Tensor, last: Tensor) -> Tensor:
    """x [B, T, d] one token later, `last` [B, d] in front."""
    return torch.cat([last[:, None].to(x.dtype), x[:, :-1]], dim=1)


def decayed_mean(
    k: Tensor, v: Tensor, rate: Tensor, bonus: Tensor, numerator: Tensor, denominator: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y_t = (A_{t-1} + e^{u + k_t} v_t) / (B_{t-1} + e^{u + k_t}), A_t = e^-rate A_{t-1} + e^{k_t} v_t, B_t likewise.

    Args:
        k, v: [B, T, d].
        rate, bonus: [d], rate > 0; u is the bonus.
        numerator, denominator, largest: [B, d], A e^-largest, B e^-largest, and an exponent that bounds both.

    Returns:
        y [B, T, d], and numerator, denominator and largest after the last token.
    """
    # A scan in two levels: token after token in all chunks at once, then chunk after chunk. Sums are kept divided by
    # e^(largest exponent). The exponents are constants to autograd: the sums do not depend on them.
    time = k.shape[1]
    length = isqrt(time - 1) + 1
    padding = (0, 0, 0, -time % length)  # behind the end, where nothing is read
    chunks_k, chunks_v = (F.pad(x, padding).unflatten(1, (-1, length)) for x in (k, v))  # [B, chunks, length, d]
    nothing = torch.zeros_like(chunks_k[:, :, 0])
    local = [_Sums(nothing, nothing, torch.full_like(nothing, -torch.inf))]
    for k_i, v_i in zip(chunks_k.unbind(2), chunks_v.unbind(2), strict=True):
        weight = torch.exp(k_i - k_i.detach())  # 1, with the gradient of k
        local.append(_merged(local[-1], _Sums(weight * v_i, weight, k_i.detach()), rate))
    whole = zip(*(x.unbind(1) for x in local[-1]), strict=True)
    starts = [_Sums(numerator, denominator, largest)]
    for chunk in whole:
        starts.append(_merged(starts[-1], _Sums(*chunk), length * rate))
    used = 1 + (time - 1) % length  # tokens of the last chunk
    end = _merged(starts[-2], _Sums(*(x[:, -1] for x in local[used])), used * rate)

    before = _Sums(*(torch.stack(x, dim=2) for x in zip(*local[:-1], strict=True)))
    start = _Sums(*(torch.stack(x, dim=1)[:, :, None] for x in zip(*starts[:-1], strict=True)))
    sums = _merged(start, before, torch.arange(length, device=k.device)[:, None] * rate)
    a, b, exponent = (x.flatten(1, 2)[:, :time] for x in sums)
    own = bonus + k
    top = torch.maximum(exponent, own).detach()
    past, present = torch.exp(exponent - top), torch.exp(own - top)
    y = (past * a + present * v) / (past * b + present)
    return y, *end


class _Sums(NamedTuple):
    """Two sums divided by e^exponent, which has no gradient."""

    numerator: Tensor
    denominator: Tensor
    exponent: Tensor


def _merged(earlier: _Sums, later: _Sums, decay: Tensor) -> _Sums:
    """The sum of both, the earlier ones times e^-decay."""
    moved = earlier.exponent - decay
    top = torch.maximum(moved.detach(), later.exponent)
    # Where nothing was summed the exponent is -inf on both sides, and the difference is not a number.
    finite = top.clamp(min=torch.finfo(top.dtype).min)
    old, new = torch.exp(moved - finite), torch.exp(later.exponent - finite)
    return _Sums(
        old * earlier.numerator + new * later.numerator, old * earlier.denominator + new * later.denominator, top
    )
