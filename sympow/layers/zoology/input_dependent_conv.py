"""BaseConv with a filter that depends on the sequence. The filter depends on all tokens, so the mixer is not causal.

The source has one filter for all tokens of a row: a lag that one token needs is applied to all tokens, and the lags of
all tokens are added up. With `matching`, every lag is applied alone, and only to the tokens that match at that distance
(the blocks of Zoology's H.38). Tokens that do not match get exactly zero, or a small weight. Recall needs this: with
one filter a query gets the rows at the lags of all other queries too, added up in the same channels. The filters of the
source stay the default, so that its results can be repeated.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import override

from sympow.fields import is_integer
from sympow.layers.base import Mixer
from sympow.layers.documents import per_document
from sympow.layers.initial import draw_normal
from sympow.layers.repeats import checked_tokens, distance_to_previous
from sympow.layers.state import Device, DType
from sympow.ops.convolution import causal_convolution
from sympow.ops.cost import convolution_flops
from sympow.ops.types import check_flags


class _InputDependentConv(Mixer):
    """Computes (x W + b_1) * (h(x) (*) x + b_2): `BaseConv` with a filter of zeros and ones for each row.

    The lags that a late token needs are applied to early tokens too. So the mixer is not causal and cannot be stepped.
    It is for tasks whose inputs are known as a whole.
    """

    causal = False

    def __init__(self, d_model: int, n_heads: int, matching: bool, filler: int | None):
        super().__init__(d_model, n_heads)
        check_flags(matching=matching)
        if filler is not None and not (is_integer(filler) and filler >= 0):
            raise ValueError(f"filler must be the id of a token, an integer of at least 0, or None; got {filler!r}")
        self.matching, self.filler = matching, filler
        self.projection = nn.Linear(d_model, d_model)
        self.bias = nn.Parameter(torch.empty(d_model))

    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        nn.init.zeros_(self.bias)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> NoReturn:
        self._refuse()

    def step(self, x: Tensor, state: None) -> NoReturn:
        self._refuse()

    def state_size(self, context: int) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no step form: its filter depends on the whole sequence")

    def training_flops(self, time: int) -> int:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`.

        With `matching`, tokens are looked up by their distance and nothing is convolved.
        """
        return 0 if self.matching else convolution_flops(time, time, self.d_model)

    def _gated(self, x: Tensor, convolved: Tensor) -> Tensor:
        return self.projection(x) * (convolved + self.bias)


class ProgrammaticConv(_InputDependentConv):
    """Applies a BaseConv whose filter selects what followed earlier occurrences (Arora et al., "Zoology", 2023, (19)).

    h_l = 1 if the last occurrence of some token was l + 1 tokens before it. When a key occurs again, lag l leads to the
    token after its earlier occurrence, which in associative recall is its value. The lags are found from the token ids
    in O(T log T).

    Args:
        d_model, n_heads: as in `Mixer`.
        matching: applies a lag only to the tokens that set it. A token then gets the token after its own last
            occurrence, or zero if it has not occurred before. False: applies it to all tokens, as in the source.
        filler: id of a token whose repeats set no tap; None: all tokens set theirs. Filler occurs so often that it
            would set most taps of the filter.
    """

    reads_tokens = True

    def __init__(self, d_model: int, n_heads: int, *, matching: bool = False, filler: int | None = None):
        super().__init__(d_model, n_heads, matching, filler)
        self.reset_parameters()

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Mixes whole sequences [B, T, d] with the token ids `tokens`, int64 [B, T]; see `Mixer.forward`."""
        self.check_input(x, self.bias)
        return self._gated(x, per_document(self._convolved, cu_seqlens, x, checked_tokens(tokens, x)))

    def _convolved(self, x: Tensor, tokens: Tensor) -> Tensor:
        distance = distance_to_previous(tokens)
        if self.filler is not None:
            distance = distance.masked_fill(tokens == self.filler, 0)
        if self.matching:
            lag = (distance - 1).clamp(min=0)[..., None]
            return at_lags(x, lag)[:, :, 0] * (distance > 0)[..., None]
        marks = torch.zeros_like(x[..., 0]).scatter_(1, distance, 1)
        # A token that is the first of its kind has put its mark at 0, which moving by one drops.
        return causal_convolution(x, pad(marks[:, 1:], (0, 1))[..., None])


class AutocorrelationConv(_InputDependentConv):
    """Applies a BaseConv whose filter is 1 at the lags of the largest autocorrelation ("Zoology", 2023, section 5).

    h_l = 1 for the `top_k` lags l >= 1 where the sum over t of x_t . x_{t-l} is largest, by FFT in O(T log T). The
    choice of the lags has no gradient.

    With `matching`, the correlation is that of queries x W_q with keys, x W_k of the token before. A lag then leads to
    the token after a similar earlier token. Token t weighs its lags l by softmax(q_t . k_{t-l} / sqrt(d)) over them, in
    O(T top_k d). Queries and keys learn by these weights. They start as the same projection.

    Args:
        d_model, n_heads: as in `Mixer`.
        top_k: lags kept.
        matching: as described above. False: x is correlated with itself, and one filter serves all tokens, as in the
            source.
        filler: id of a token that is neither query nor key; None for none. All filler tokens are alike, so the largest
            correlations would be theirs where they fill most of a row. Needs `matching`; the mixer then reads tokens.
    """

    def __init__(
        self, d_model: int, n_heads: int, *, top_k: int = 8, matching: bool = False, filler: int | None = None
    ):
        if not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"top_k must be an integer of at least 1; got {top_k!r}")
        if filler is not None and not matching:
            raise ValueError(f"filler needs matching: without it inputs are correlated as they are; got {filler!r}")
        super().__init__(d_model, n_heads, matching, filler)
        self.top_k, self.reads_tokens = top_k, filler is not None
        self.query = nn.Linear(d_model, d_model, bias=False) if matching else None
        self.key = nn.Linear(d_model, d_model, bias=False) if matching else None
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        super().reset_own_parameters(generator)
        if self.query is not None and self.key is not None:
            draw_normal(self.query.weight, self.d_model**-0.5, generator)
            with torch.no_grad():
                self.key.weight.copy_(self.query.weight)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Mixes whole sequences [B, T, d]; `tokens` are needed with `filler`. See `Mixer.forward`."""
        self.check_input(x, self.bias)
        ids = [checked_tokens(tokens, x)] if self.reads_tokens else []
        return self._gated(x, per_document(self._convolved, cu_seqlens, x, *ids))

    def training_flops(self, time: int) -> int:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`.

        The correlation is half of a convolution, because it has no gradient. With `matching`, each token has a product
        and a sum for each lag.
        """
        correlation = convolution_flops(time, time, self.d_model) // 2
        by_lag = 12 * time * min(self.top_k, time) * self.d_model
        return correlation + (by_lag if self.matching else super().training_flops(time))

    def _convolved(self, x: Tensor, *tokens: Tensor) -> Tensor:
        if self.query is None or self.key is None:
            lags = self._largest(cross_correlation(x, x))
            return causal_convolution(x, torch.zeros_like(x[..., 0]).scatter_(1, lags, 1)[..., None])
        q, k = self.query(x), self.key(x)
        if self.filler is not None:
            asks = tokens[0].ne(self.filler)[..., None]
            q, k = q * asks, k * asks
        k = pad(k[:, :-1], (0, 0, 1, 0))
        lags = self._largest(cross_correlation(q, k))[:, None].expand(-1, x.shape[1], -1)
        scores = (q[:, :, None] * at_lags(k, lags)).sum(-1) * self.d_model**-0.5
        seen = lags <= torch.arange(x.shape[1], device=x.device)[:, None]
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        return (weights[..., None] * at_lags(x, lags)).sum(2)

    def _largest(self, correlation: Tensor) -> Tensor:
        """Returns the `top_k` lags above 0 of the largest correlation [B, T]: int64 [B, top_k], fewer if T is."""
        return correlation[:, 1:].topk(min(self.top_k, correlation.shape[1] - 1), dim=1).indices + 1


@torch.no_grad()
def cross_correlation(q: Tensor, k: Tensor) -> Tensor:
    """Returns the sum over t of q_t . k_{t-l} for every lag l below T: [B, T], in float32 at least.

    q and k are [B, T, d]. It has no gradient.
    """
    dtype, length = torch.promote_types(q.dtype, torch.float32), 2 * q.shape[1]
    if not q.numel():  # which the FFT refuses
        return q.new_zeros(q.shape[:2], dtype=dtype)
    spectrum = torch.fft.rfft(q.to(dtype), n=length, dim=1) * torch.fft.rfft(k.to(dtype), n=length, dim=1).conj()
    return torch.fft.irfft(spectrum.sum(-1), n=length, dim=1)[:, : q.shape[1]]


def at_lags(x: Tensor, lags: Tensor) -> Tensor:
    """Returns x_{t-l} for the lags l of token t, [B, T, L, d].

    x is [B, T, d], lags are int64 [B, T, L]. Lags beyond the start give x_0.
    """
    at = (torch.arange(x.shape[1], device=x.device)[:, None] - lags).clamp(min=0)
    return x.gather(1, at.flatten(1)[..., None].expand(-1, -1, x.shape[2])).unflatten(1, lags.shape[1:])
