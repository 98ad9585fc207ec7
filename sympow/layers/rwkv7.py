"""RWKV-7's time mixing: a state that is decayed, partly erased along a key, and written, at every token."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, sqrt
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import head_normed
from sympow.layers.base import Mixer, state_options
from sympow.layers.documents import per_document
from sympow.layers.initial import draw_orthogonal, draw_uniform
from sympow.layers.state import Device, DType, MixerState
from sympow.layers.zoology.rwkv4 import shifted
from sympow.ops.availability import dtype_in_products, without_autocast
from sympow.ops.recomputed import recomputed
from sympow.packages import from_extra

IMPLEMENTATIONS = ("auto", "plain", "fla")

_SLOWEST = -exp(-0.5)  # the least logarithm of a decay, so a channel keeps more than 54% a token


@dataclass
class RWKV7State(MixerState):
    """Holds the last input [B, d], and the memory [B, H, V, K] in float32 at least."""

    counters: ClassVar[tuple[str, ...] | None] = ()

    last: Tensor
    memory: Tensor


class LowRank(nn.Module):
    """Maps x to f(x A) B + c, with A at 0, B orthogonal times 0.1 and c given.

    Args:
        d_model: d, the width of input and output.
        rank_factor: the factor of `low_rank`, which gives the number of columns of A.
        activation: f; None: the identity.
        bias: whether there is a c.
    """

    def __init__(self, d_model: int, rank_factor: float, activation: nn.Module | None = None, bias: bool = True):
        super().__init__()
        rank = low_rank(d_model, rank_factor)
        self.a, self.b = nn.Parameter(torch.empty(d_model, rank)), nn.Parameter(torch.empty(rank, d_model))
        self.c = nn.Parameter(torch.empty(d_model)) if bias else None
        self.activation = nn.Identity() if activation is None else activation

    def reset_parameters(self, c: Tensor | None, generator: torch.Generator | None) -> None:
        """Fills A with 0, draws an orthogonal B, and sets c [d] where the module has one."""
        nn.init.zeros_(self.a)
        rank, d = self.b.shape
        draw_orthogonal(self.b, 0.1 * max(1, sqrt(rank / d)), generator)
        if self.c is not None and c is not None:
            with torch.no_grad():
                self.c.copy_(c)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., d] to f(x A) B + c [..., d]."""
        y = self.activation(x @ self.a) @ self.b
        return y if self.c is None else y + self.c


def low_rank(d_model: int, factor: float) -> int:
    """Returns the rank of a `LowRank`: about factor sqrt(d), a multiple of 32."""
    return max(32, round(factor * sqrt(d_model) / 32) * 32)


class RWKV7(Mixer):
    """Mixes as RWKV-7 does in time (Peng et al., "RWKV-7 Goose", 2025, section 4), in its recurrent form, in heads.

    S_t = S_{t-1} (diag(w_t) - kappa_t (a_t * kappa_t)^T) + v_t k_t^T, y_t = S_t r_t. Low-rank maps of the token,
    mixed with the token before it, give the decay w, the rate a and the gate g. The residual of the first layer's
    values is left out, because it would tie layers together.

    Args:
        d_model, n_heads: as in `Mixer`.
        depth: the depth of the layer in the model: 0 for the first, 1 for the last. The published initialisation of
            decays and token shifts depends on it.
        impl: how several tokens are computed (one always is "plain"). "plain": token by token in float32 at least.
            "fla": by the chunked kernel of flash-linear-attention, in the dtype of x or autocast. "auto": "fla" in
            half precision on CUDA devices if the package is installed, otherwise "plain".
    """

    shifts_tokens = True

    def __init__(self, d_model: int, n_heads: int, *, depth: float = 0.0, impl: str = "auto"):
        super().__init__(d_model, n_heads)
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads; got {d_model=}, {n_heads=}")
        if d_model == n_heads:
            raise ValueError(f"heads have at least 2 channels: the norm of one is constant; got {d_model=}, {n_heads=}")
        if not 0 <= depth <= 1:
            raise ValueError(f"depth lies between 0 and 1; got {depth!r}")
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl is one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")
        # Loaded now: torch.compile cannot trace the import.
        self.chunk_kernel = _chunk_kernel(impl)
        self.depth, self.head_dim, self.impl = depth, d_model // n_heads, impl
        self.mix = nn.Parameter(torch.empty(6, d_model))  # of r, w, k, v, a, g: the share of the token before
        self.receptance, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.decay = LowRank(d_model, 2.5, nn.Tanh())
        self.rate = LowRank(d_model, 2.5)
        self.gate = LowRank(d_model, 5.0, nn.Sigmoid(), bias=False)
        self.erased = nn.Parameter(torch.empty(d_model))  # scales k into kappa
        self.written = nn.Parameter(torch.empty(d_model))  # how far the rate scales what is written
        self.bonus = nn.Parameter(torch.empty(n_heads, self.head_dim))
        self.out_norm = nn.GroupNorm(n_heads, d_model, eps=64e-5)
        self.reset_parameters()

    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draws weights as published: the output at 0, keys ten times smaller than values and receptances."""
        self.out_norm.reset_parameters()
        nn.init.zeros_(self.out.weight)
        d, k, depth = self.d_model, self.head_dim, self.depth
        for linear, factor in ((self.receptance, 0.5), (self.key, 0.05), (self.value, 0.5)):
            draw_uniform(linear.weight, -factor / sqrt(d), factor / sqrt(d), generator)
        channel = torch.arange(d, device="cpu")
        line = channel / max(d - 1, 1)
        zigzag = (channel % k - (k - 1) / 2) / max((k - 1) / 2, 0.5)
        zigzag = zigzag * zigzag.abs()
        self.decay.reset_parameters(-6 + 6 * line ** (1 + depth**0.3) + 0.5 + 2.5 * zigzag, generator)
        self.rate.reset_parameters(-0.19 + 0.3 * zigzag + 0.4 * (line - 0.5), generator)
        self.gate.reset_parameters(None, generator)
        with torch.no_grad():
            powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2], device="cpu") * (1 - depth)
            self.mix.copy_(1 - (channel / d) ** powers[:, None])
            self.erased.copy_(0.71 - 0.1 * (line - 0.5))
            nn.init.constant_(self.written, 1.02)
            nn.init.constant_(self.bonus, -0.04)

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, self.mix)
        return per_document(lambda document: self._mixed(document, self._start(document))[0], cu_seqlens, x)

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> RWKV7State:
        last = torch.zeros(batch_size, self.d_model, **state_options(self.mix, device, dtype))
        shape = (batch_size, self.n_heads, self.head_dim, self.head_dim)
        return RWKV7State(last, torch.zeros(shape, **state_options(self.mix, device, dtype, sums=True)))

    def training_flops(self, time: int) -> int:
        """Counts the FLOPs of mixing one row, forward and backward; see `Mixer.training_flops`.

        A token and a state [K, V] of a head are in four products (erased, written twice, read) and a decay, 9 an
        element forward, and twice as many backward.
        """
        return 27 * time * self.d_model * self.head_dim

    @override
    def step(self, x: Tensor, state: RWKV7State) -> tuple[Tensor, RWKV7State]:
        self.check_step(x, state, self.mix)
        return self._mixed(x, state)

    @override
    def state_size(self, context: int) -> int:
        return self.d_model * (1 + self.head_dim)

    def _start(self, x: Tensor) -> RWKV7State:
        return self.init_state(x.shape[0], device=x.device)

    def _mixed(self, x: Tensor, state: RWKV7State) -> tuple[Tensor, RWKV7State]:
        before = shifted(x, state.last)
        x_r, x_w, x_k, x_v, x_a, x_g = (x + share * (before - x) for share in self.mix)
        dtype = state.memory.dtype
        r, k, v = self.receptance(x_r).to(dtype), self.key(x_k).to(dtype), self.value(x_v).to(dtype)
        rate = torch.sigmoid(self.rate(x_a).to(dtype))
        log_decay = _SLOWEST * torch.sigmoid(self.decay(x_w).to(dtype))
        kappa = F.normalize(self._heads(k * self.erased), dim=-1)
        r, k, v, rate, log_decay = map(self._heads, (r, k * (1 + (rate - 1) * self.written), v, rate, log_decay))
        y, memory = self._remembered(x, r, log_decay, k, v, kappa, rate, state.memory)
        y = head_normed(self.out_norm, y) + ((r * k * self.bonus).sum(-1, keepdim=True) * v).flatten(2)
        out = self.out(y.to(x.dtype) * self.gate(x_g))
        return out, RWKV7State(x[:, -1].to(state.last.dtype, copy=True), memory)

    def _remembered(self, x: Tensor, r: Tensor, log_decay: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `delta_rule` in the form that suits x; the results have its dtypes."""
        half = dtype_in_products(x)
        suits = self.impl == "fla" or (x.is_cuda and half in (torch.bfloat16, torch.float16))
        with without_autocast(x):
            if self.chunk_kernel is None or x.shape[1] < 2 or not suits:
                rule = delta_rule if x.shape[1] < 2 else graph_delta_rule
                return rule(r, log_decay.exp(), *rest)
            return chunked_delta_rule(self.chunk_kernel, half, r, log_decay, *rest)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.head_dim))


def delta_rule(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, kappa: Tensor, rate: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns s_t = S_{t-1} (diag(w_t) - kappa_t (a_t * kappa_t)^T) + v_t k_t^T, y_t = S_t r_t, token by token.

    Args:
        r: [B, T, H, K].
        decay: w, [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        kappa: [B, T, H, K].
        rate: a, [B, T, H, K].
        memory: S before the first token, [B, H, V, K].

    Returns:
        y [B, T, H, V], and S after the last token.
    """
    outs = []
    removed = rate * kappa
    for t in range(r.shape[1]):
        old = (memory * kappa[:, t, :, None]).sum(-1, keepdim=True)
        memory = memory * decay[:, t, :, None] - old * removed[:, t, :, None]
        memory = memory + v[:, t, :, :, None] * k[:, t, :, None]
        outs.append((memory * r[:, t, :, None]).sum(-1))
    return torch.stack(outs, dim=1), memory


def _like_rule(r: Tensor, decay: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), rest[-1].new_empty(rest[-1].shape)


@recomputed(_like_rule, outputs=2)
def graph_delta_rule(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, kappa: Tensor, rate: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `delta_rule`. A graph of torch.compile would otherwise have the operations of every token."""
    return delta_rule(r, decay, k, v, kappa, rate, memory)


def chunked_delta_rule(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    kappa: Tensor,
    rate: Tensor,
    memory: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes `delta_rule` by `kernel`, the function chunk_rwkv7 of flash-linear-attention.

    It takes logarithms of the decays.

    All but decays and memory are rounded to `dtype`. The kernel keeps S transposed, reads it along a and writes b.
    """
    names = ("r", "k", "v", "a", "b")
    inputs = dict(zip(names, (x.to(dtype) for x in (r, k, v, -kappa, rate * kappa)), strict=True))
    # The kernel may take chunks of 64 tokens, because decays are bounded.
    bounded = {"safe_gate": True, "lower_bound": _SLOWEST, "chunk_size": 64}
    start = memory.mT.contiguous()
    y, after = kernel(**inputs, w=log_decay, scale=1.0, initial_state=start, output_final_state=True, **bounded)
    return y.to(r.dtype), after.mT.to(memory.dtype)


def _chunk_kernel(impl: str) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Returns the kernel that `impl` may take, None for "plain", and for "auto" without the package or without CUDA."""
    if impl == "plain" or (impl == "auto" and not torch.backends.cuda.is_built()):
        return None
    try:
        with from_extra("fla", "impl='fla' of RWKV7 needs flash-linear-attention"):
            return importlib.import_module("fla.ops.rwkv7").chunk_rwkv7
    except ImportError:
        if impl == "auto":
            return None
        raise
