"""A diagonal state-space model for every channel (S4D), as a convolution and as a recurrence."""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor, nn

from sympow.layers.base import state_options
from sympow.layers.initial import draw_normal, draw_uniform
from sympow.ops.convolution import causal_convolution

_DT_MIN, _DT_MAX = 1e-3, 1e-1


class DiagonalSSM(nn.Module):
    """Computes x' = A x + B u, y = 2 Re(C x), A complex and diagonal, discretized by the bilinear rule.

    a = (1 + dt A / 2) / (1 - dt A / 2), b = dt B / (1 - dt A / 2), x_t = a x_{t-1} + b u_t. Source: Gu et al., "On the
    Parameterization and Initialization of Diagonal State Space Models", 2022.

    Drawn as S4D-Lin: A_n = -1/2 + i pi n, B = 1, C from a complex N(0, 1), dt log-uniform in 0.001 .. 0.1.

    Args:
        channels: C.
        state_dim: N, even: N / 2 complex numbers stand for N states in conjugate pairs.
        shared: whether all channels have one A and one B; otherwise each channel has its own, equal at first.
    """

    def __init__(self, channels: int, state_dim: int, *, shared: bool = True):
        super().__init__()
        if not isinstance(state_dim, int) or state_dim < 2 or state_dim % 2:
            raise ValueError(f"state_dim must be an even integer of at least 2; got {state_dim!r}")
        self.channels, self.state_dim = channels, state_dim
        half = state_dim // 2
        own = () if shared else (channels,)
        self.log_decay = nn.Parameter(torch.empty(*own, half))  # log(-Re A)
        self.frequency = nn.Parameter(torch.empty(*own, half))  # Im A
        self.b = nn.Parameter(torch.empty(*own, half, 2))
        self.c = nn.Parameter(torch.empty(channels, half, 2))
        self.log_dt = nn.Parameter(torch.empty(channels))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws A, B, C and dt as S4D-Lin does."""
        if self.c.is_meta:  # N may be larger than the memory
            return
        half = self.state_dim // 2
        with torch.no_grad():
            nn.init.constant_(self.log_decay, log(0.5))
            self.frequency.copy_((pi * torch.arange(half, device="cpu")).expand_as(self.frequency))
            self.b.copy_(torch.tensor([1.0, 0.0], device="cpu").expand_as(self.b))
        draw_normal(self.c, 0.5**0.5, generator)
        draw_uniform(self.log_dt, log(_DT_MIN), log(_DT_MAX), generator)

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a, b and 2 c, complex [C, N / 2], in float32 at least."""
        dtype = torch.promote_types(self.c.dtype, torch.float32)
        dt = self.log_dt.to(dtype).exp()[:, None]
        half = dt / 2 * torch.complex(-self.log_decay.to(dtype).exp(), self.frequency.to(dtype))
        b, c = (torch.view_as_complex(p.to(dtype)) for p in (self.b, self.c))
        return (1 + half) / (1 - half), dt * b / (1 - half), 2 * c

    def forward(self, u: Tensor) -> Tensor:
        """Maps u [B, T, C, E] to y [B, T, C, E], E signals through each channel, as a convolution."""
        a, b, c = self.coefficients()
        return causal_convolution(u, kernel(a, c * b, u.shape[1])[..., None])

    def init_state(
        self, batch_size: int, signals: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> Tensor:
        """Returns zeros [B, C, E, N / 2, 2], real and imaginary parts, in float32 at least."""
        shape = (batch_size, self.channels, signals, self.state_dim // 2, 2)
        return torch.zeros(shape, **state_options(self.c, device, dtype, sums=True))

    def step(self, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Continues by u [B, T', C, E]: (y [B, T', C, E], the state after it)."""
        a, b, c = self.coefficients()
        new = u.shape[1]
        x = torch.view_as_complex(state)
        signal = u.to(a.real.dtype)
        if new == 1:
            x = a[:, None] * x + b[:, None] * signal[:, 0, ..., None]
            return (c[:, None] * x).sum(-1).real[:, None].to(u.dtype), torch.view_as_real(x)
        powers = powers_of(a, new + 1)
        y = causal_convolution(signal, kernel(a, c * b, new)[..., None])
        y = y + torch.einsum("bcen,cnt->btce", x, c[..., None] * powers[..., 1:]).real
        entered = torch.einsum("btce,cnt->bcen", signal.to(a.dtype), b[..., None] * powers[..., :-1].flip(-1))
        return y.to(u.dtype), torch.view_as_real(powers[:, None, :, -1] * x + entered)

    def state_size(self, signals: int) -> int:
        """Returns the number of elements of the state of one sequence with `signals` inputs a channel."""
        return self.channels * signals * self.state_dim

    def extra_repr(self) -> str:
        """Returns the options that `repr` of the module shows."""
        return f"channels={self.channels}, state_dim={self.state_dim}"


def powers_of(a: Tensor, count: int) -> Tensor:
    """Returns a**0 .. a**(count - 1): complex [C, N / 2] -> [C, N / 2, count]."""
    return torch.exp(a.log()[..., None] * torch.arange(count, device=a.device))


def kernel(a: Tensor, weight: Tensor, taps: int) -> Tensor:
    """Returns the filter Re(sum over n of weight_n a_n**t), [taps, C], of complex a and weight [C, N / 2]."""
    return torch.einsum("cn,cnt->tc", weight, powers_of(a, taps)).real
