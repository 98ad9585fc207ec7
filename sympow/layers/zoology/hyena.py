"""Hyena: a gate, a long implicit convolution, a gate; with one filter a channel, or in heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import torch
from torch import Tensor, nn
from typing_extensions import override

from sympow.fields import is_integer
from sympow.layers.base import Mixer, any_weight, own_weight, state_options
from sympow.layers.cache import InputCache, capacity
from sympow.layers.documents import per_document
from sympow.layers.short_convolution import DepthwiseConvolution
from sympow.layers.state import Device, DType, MixerState
from sympow.layers.zoology.filters import ImplicitFilter, last_outputs
from sympow.ops.availability import concatenated
from sympow.ops.cost import convolution_flops, softmax_flops
from sympow.ops.types import check_flags

_SHORT = 3  # taps of the convolution of the projections


@dataclass
class HyenaState(MixerState):
    """Holds the last two projections [B, 2, (R + 2) d], and the inputs of the long convolutions, see `Hyena`."""

    short: Tensor
    long: InputCache


class Hyena(Mixer):
    """Computes W_o (q * (h (*) (k * v))); q, k, v are short convolutions of projections (Poli et al., "Hyena", 2023).

    With `multi_head`, as in MultiHyena (Massaroli et al., "Laughing Hyena Distillery", 2023, section 4): a head of
    width d / n_heads has one filter, k v^T replaces k * v, and y = q^T (h (*) k v^T). With R `recurrences`, z_R takes
    the place of q * (h (*) (k * v)), where z_0 = k * v and z_r = q_r * (h_r (*) z_{r-1}). A step keeps the inputs of
    the convolutions and costs O(max_length) a token.

    Args:
        d_model, n_heads: as in `Mixer`.
        max_length: taps of the filter; tokens further back are not seen.
        multi_head: whether there are n_heads heads with one filter each; otherwise each channel has a filter.
        recurrences: R, the number of long convolutions one after another; Poli's order less one.
        order: width of the filter's network.
        bands: of the filter, see `ImplicitFilter`. Zoology's code has 1 band by default.
        frequency, decays: of the filter, see `ImplicitFilter`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        max_length: int,
        multi_head: bool = False,
        recurrences: int = 1,
        order: int = 64,
        bands: int = 16,
        frequency: float = 1.0,
        decays: Sequence[float] = (0.3, 1.5),
    ):
        super().__init__(d_model, n_heads)
        check_flags(multi_head=multi_head)
        if multi_head and d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads; got {d_model=}, {n_heads=}")
        if not is_integer(recurrences) or recurrences < 1:
            raise ValueError(f"recurrences must be an integer of at least 1; got {recurrences!r}")
        if multi_head and recurrences > 1:
            raise ValueError(f"multi_head has one recurrence; got recurrences {recurrences}")
        self.heads, self.recurrences = n_heads if multi_head else d_model, recurrences
        # Elements of the cache for each token.
        self.held = recurrences * d_model if self.heads == d_model else 2 * d_model
        self.projections = nn.Linear(d_model, (recurrences + 2) * d_model)
        self.short = DepthwiseConvolution((recurrences + 2) * d_model, _SHORT)
        self.filter = ImplicitFilter(recurrences * self.heads, max_length, order, bands, frequency, decays)
        self.out = nn.Linear(d_model, d_model)
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        self.short.reset_parameters(generator)
        self.filter.reset_parameters(generator)

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, own_weight(self.out))
        return self.out(per_document(self._mixed, cu_seqlens, self.projections(x)))

    @override
    def training_flops(self, time: int) -> int:
        short = convolution_flops(time, _SHORT, (self.recurrences + 2) * self.d_model)
        if self.heads == self.d_model:
            return short + convolution_flops(time, self.filter.max_length, self.recurrences * self.d_model)
        width = self.d_model // self.heads
        # By states, which queries read, or by scores.
        states = convolution_flops(time, self.filter.max_length, self.d_model * width) + 6 * time * self.d_model * width
        scores = sum(softmax_flops(time, width, width, heads=self.heads, backward=b) for b in (False, True))
        return short + min(states, scores)

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> HyenaState:
        options = state_options(any_weight(self, self.out), device, dtype)
        long = InputCache.empty(batch_size, self.held, self.filter.max_length, options)
        return HyenaState(self.short.init_state(batch_size, device, dtype), long)

    @override
    def step(self, x: Tensor, state: HyenaState) -> tuple[Tensor, HyenaState]:
        self.check_step(x, state, own_weight(self.out))
        projected, short = self.short.step(self.projections(x), state.short)
        y, new = self._long(projected, state.long.ordered().to(projected.dtype))
        return self.out(y), HyenaState(short, state.long.extend(new))

    @override
    def state_size(self, context: int) -> int:
        return self.held * capacity(context, self.filter.max_length) + self.short.state_size()

    def fused(self) -> dict[str, list[int]]:
        """Names `projections`, which holds the projections to q_R, ..., q_1, k and v; see `Mixer.fused`."""
        return {"projections": [self.d_model] * (self.recurrences + 2)}

    def _mixed(self, projected: Tensor) -> Tensor:
        return self._long(self.short(projected))[0]

    def _long(self, projected: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes the gates and the long convolutions of T' tokens.

        Args:
            projected: [B, T', (R + 2) d].
            past: the inputs of the convolutions before these tokens, [B, T, held]; None: there are none.

        Returns:
            the outputs [B, T', d], and the inputs of these tokens [B, T', held].
        """
        *gates, k, v = projected.chunk(self.recurrences + 2, dim=-1)
        h = self.filter(projected.shape[1] + (0 if past is None else past.shape[1]))
        if self.heads < self.d_model:
            new = concatenated([k, v], dim=-1)
            seen = _joined(past, new).chunk(2, dim=-1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (*gates, *seen))
            return filtered_attention(q, k, v, h).flatten(2), new
        z, inputs = k * v, []
        count = self.recurrences
        pasts = [None] * count if past is None else past.chunk(count, -1)
        for gate, before, taps in zip(reversed(gates), pasts, h.chunk(count, -1), strict=True):
            inputs.append(z)
            z = gate * last_outputs(_joined(before, z), taps, z.shape[1])
        return z, inputs[0] if count == 1 else concatenated(inputs, dim=-1)


def _joined(past: Tensor | None, new: Tensor) -> Tensor:
    """Returns the tokens of the past and the new ones, [B, T + T', C]."""
    return new if past is None else concatenated([past, new], dim=1)


def filtered_attention(q: Tensor, k: Tensor, v: Tensor, h: Tensor) -> Tensor:
    """Returns y_t = sum over s <= t of h_{t-s} (q_t . k_s) v_s.

    It is computed by scores or as a convolution of k v^T, whichever costs less.

    Args:
        q: [B, T', H, K], of the last T' of T tokens.
        k: [B, T, H, K].
        v: [B, T, H, K].
        h: [S, H], the filter's taps; missing ones are zero.
    """
    new, total, width = q.shape[1], k.shape[1], q.shape[3]
    # Products: 4 K a pair of tokens, against three transforms of length 2 T for each of K K channels.
    if new > 1 and total > 7.5 * width * log2(2 * total):
        past = last_outputs(k[..., :, None] * v[..., None, :], h[..., None, None], new)  # [B, T', H, K, K]
        return (q[..., None] * past).sum(-2)
    position = torch.arange(total, device=q.device)
    lag = position[total - new :, None] - position
    weight = h[lag.clamp(0, h.shape[0] - 1)].permute(2, 0, 1) * ((lag >= 0) & (lag < h.shape[0]))
    return torch.einsum("bhts,bshv->bthv", torch.einsum("bthk,bshk->bhts", q, k) * weight.to(q.dtype), v)
