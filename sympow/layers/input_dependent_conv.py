"""BaseConv with a filter that the sequence itself determines. It looks at the whole of it, so it is not causal."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from sympow.layers.base import Mixer, per_document
from sympow.layers.repeats import checked_tokens, distance_to_previous
from sympow.ops.convolution import causal_convolution


class _InputDependentConv(Mixer):
    """y = (x W + b_1) * (h(x) (*) x + b_2): `BaseConv` with a filter of zeros and ones, one a sequence.

    The filter is one for all positions, so the lags that a late token calls for act on early tokens too: the mixer is
    not causal, cannot be stepped, and serves tasks whose inputs are known at once.
    """

    causal = False

    def __init__(self, d_model: int, n_heads: int):
        super().__init__(d_model, n_heads)
        self.projection = nn.Linear(d_model, d_model)
        self.bias = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        nn.init.zeros_(self.bias)

    def init_state(
        self, batch_size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> NoReturn:
        self._refuse()

    def step(self, x: Tensor, state: None) -> NoReturn:
        self._refuse()

    def state_size(self, context: int) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no step form: its filter depends on the whole sequence")

    def _gated(self, x: Tensor, convolved: Tensor) -> Tensor:
        return self.projection(x) * (convolved + self.bias)


class ProgrammaticConv(_InputDependentConv):
    """Applies a BaseConv whose filter points behind earlier occurrences (Arora et al., "Zoology", 2023, (19)).

    h_l = 1 if some token stood last l + 1 tokens before: where a key stands again, lag l is the token behind its
    earlier occurrence, which in associative recall is its value. Found from the token ids in O(T log T).

    Args:
        filler: id of a token whose repeats set no tap; None: all tokens set theirs. Filler stands so often that it
            would set most of the filter.
    """

    reads_tokens = True

    def __init__(self, d_model: int, n_heads: int, *, filler: int | None = None):
        if filler is not None and (not isinstance(filler, int) or isinstance(filler, bool) or filler < 0):
            raise ValueError(f"filler must be the id of a token, an integer of at least 0, or None; got {filler!r}")
        super().__init__(d_model, n_heads)
        self.filler = filler

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        self.check_input(x, self.bias)
        return self._gated(x, per_document(self._convolved, cu_seqlens, x, checked_tokens(tokens, x)))

    def _convolved(self, x: Tensor, tokens: Tensor) -> Tensor:
        distance = distance_to_previous(tokens)
        if self.filler is not None:
            distance = distance.masked_fill(tokens == self.filler, 0)
        marks = torch.zeros_like(x[..., 0]).scatter_(1, distance, 1)
        # A token that is the first of its kind has put its mark at 0, which moving by one drops.
        return causal_convolution(x, torch.nn.functional.pad(marks[:, 1:], (0, 1))[..., None])


class AutocorrelationConv(_InputDependentConv):
    """BaseConv whose filter is 1 at the lags of the largest autocorrelation (Arora et al., "Zoology", 2023, section 5).

    h_l = 1 for the `top_k` lags l >= 1 where the sum over t of x_t . x_{t-l} is largest, by FFT in O(T log T). Which
    lags they are has no gradient.

    Args:
        top_k: lags kept.
    """

    def __init__(self, d_model: int, n_heads: int, *, top_k: int = 8):
        if not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"top_k must be an integer of at least 1; got {top_k!r}")
        super().__init__(d_model, n_heads)
        self.top_k = top_k

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, self.bias)
        return self._gated(x, per_document(self._convolved, cu_seqlens, x))

    def _convolved(self, x: Tensor) -> Tensor:
        lags = autocorrelation(x.detach())[:, 1:].topk(min(self.top_k, x.shape[1] - 1), dim=1).indices + 1
        return causal_convolution(x, torch.zeros_like(x[..., 0]).scatter_(1, lags, 1)[..., None])


def autocorrelation(x: Tensor) -> Tensor:
    """The sum over t of x_t . x_{t-l} for every lag l = 0 .. T - 1, of x [B, T, d]: [B, T], in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    spectrum = torch.fft.rfft(x.to(dtype), n=2 * x.shape[1], dim=1)
    return torch.fft.irfft(spectrum.abs().square().sum(-1), n=2 * x.shape[1], dim=1)[:, : x.shape[1]]
