"""RWKV-4's time mixing: a weighted mean of the past with weights exp(k) that decay channel by channel."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor, nn

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

    A whole sequence is computed in log2(T) passes over all tokens, each keeping the largest exponent seen, so that no
    exponential overflows.

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
    # A scan over the state and the tokens: before pass s, row t holds the sums over the last s rows up to t. The
    # exponents are constants to autograd: the sums they scale do not depend on them.
    exponent = torch.cat([largest[:, None], k], dim=1).detach()
    weight = torch.exp(k - exponent[:, 1:])
    a = torch.cat([numerator[:, None], weight * v], dim=1)
    b = torch.cat([denominator[:, None], weight], dim=1)
    reach = 1
    while reach < a.shape[1]:
        earlier = exponent[:, :-reach] - reach * rate.detach()
        top = torch.maximum(earlier, exponent[:, reach:])
        old = torch.exp(exponent[:, :-reach] - reach * rate - top)
        new = torch.exp(exponent[:, reach:] - top)
        a = torch.cat([a[:, :reach], old * a[:, :-reach] + new * a[:, reach:]], dim=1)
        b = torch.cat([b[:, :reach], old * b[:, :-reach] + new * b[:, reach:]], dim=1)
        exponent = torch.cat([exponent[:, :reach], top], dim=1)
        reach *= 2
    own = bonus + k
    top = torch.maximum(exponent[:, :-1], own).detach()
    past, present = torch.exp(exponent[:, :-1] - top), torch.exp(own - top)
    y = (past * a[:, :-1] + present * v) / (past * b[:, :-1] + present)
    return y, a[:, -1].clone(), b[:, -1].clone(), exponent[:, -1].clone()
