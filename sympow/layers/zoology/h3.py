"""H3: linear attention whose sums are state-space models, one that shifts and one that remembers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from sympow.layers.base import Mixer, own_weight
from sympow.layers.documents import per_document
from sympow.layers.initial import draw_normal
from sympow.layers.short_convolution import DepthwiseConvolution
from sympow.layers.state import Device, DType, MixerState
from sympow.layers.zoology.state_space import DiagonalSSM
from sympow.ops.cost import convolution_flops


@dataclass
class H3State(MixerState):
    """Holds the shift model's last N - 1 keys [B, N - 1, d] and the diagonal model's state [B, H, K K, N / 2, 2]."""

    shift: Tensor
    diagonal: Tensor


class H3(Mixer):
    """Computes W_o (q^T SSM_diag(SSM_shift(k) v^T)) in heads (Fu et al., "Hungry Hungry Hippos", 2022, Algorithm 1).

    A shift model with B = e_1 is a convolution whose N taps are its C, and whose state is the last inputs. So it is
    computed as a convolution, without a bias. Both models have a skip weight from N(0, 1). For the shift model this
    weight is the first tap.
    Every channel of the diagonal model has an A and a B of its own, as in the published code (`n_ssm=None`).

    Args:
        d_model, n_heads: as in `Mixer`.
        state_dim: N, of both models, even.
        head_dim: K, channels of a head; 1 multiplies keys and values channel by channel.
    """

    def __init__(self, d_model: int, n_heads: int, *, state_dim: int = 64, head_dim: int = 1):
        super().__init__(d_model, n_heads)
        if head_dim < 1 or d_model % head_dim:
            raise ValueError(f"d_model must be a multiple of head_dim; got {d_model=}, {head_dim=}")
        self.head_dim = head_dim
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.shift = DepthwiseConvolution(d_model, state_dim, bias=False)
        self.diagonal = DiagonalSSM(d_model // head_dim, state_dim, shared=False)
        self.skip = nn.Parameter(torch.empty(d_model // head_dim))
        self.out = nn.Linear(d_model, d_model)
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        self.shift.reset_parameters(generator)
        draw_normal(self.shift.weight.data[:, -1], 1.0, generator)
        self.diagonal.reset_parameters(generator)
        draw_normal(self.skip, 1.0, generator)

    @override
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        self.check_input(x, own_weight(self.out))
        return self.out(per_document(self._mixed, cu_seqlens, self.qkv(x)))

    @override
    def training_flops(self, time: int) -> int:
        states = self.d_model * self.head_dim
        shift = convolution_flops(time, self.shift.weight.shape[1], self.d_model)
        return shift + convolution_flops(time, time, states) + 6 * time * states

    @override
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> H3State:
        return H3State(
            self.shift.init_state(batch_size, device, dtype),
            self.diagonal.init_state(batch_size, self.head_dim**2, device, dtype),
        )

    @override
    def step(self, x: Tensor, state: H3State) -> tuple[Tensor, H3State]:
        self.check_step(x, state, own_weight(self.out))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, shift = self.shift.step(k, state.shift)
        kv = self._outer(k, v)
        past, diagonal = self.diagonal.step(kv, state.diagonal)
        return self.out(self._read(q, kv, past)), H3State(shift, diagonal)

    @override
    def state_size(self, context: int) -> int:
        return self.shift.state_size() + self.diagonal.state_size(self.head_dim**2)

    def fused(self) -> dict[str, list[int]]:
        """Names `qkv`, which holds the projections to q, k and v; see `Mixer.fused`."""
        return {"qkv": [self.d_model] * 3}

    def _mixed(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.chunk(3, dim=-1)
        kv = self._outer(self.shift(k), v)
        return self._read(q, kv, self.diagonal(kv))

    def _outer(self, k: Tensor, v: Tensor) -> Tensor:
        """Returns k v^T in heads, [B, T, H, K K], of k and v [B, T, d]."""
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))
        return (k[..., :, None] * v[..., None, :]).flatten(-2)

    def _read(self, q: Tensor, kv: Tensor, past: Tensor) -> Tensor:
        """Returns q^T (past + skip * kv) in heads, [B, T, d]."""
        memory = (past + self.skip[:, None] * kv).unflatten(-1, (self.head_dim, self.head_dim))
        return (q.unflatten(-1, (-1, self.head_dim, 1)) * memory).sum(-2).flatten(2)
