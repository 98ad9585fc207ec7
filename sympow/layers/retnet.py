"""Retention: linear attention with a fixed decay for each head, in parallel, chunked and recurrent form."""

from __future__ import annotations

from math import sqrt
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from sympow.layers.attention import AttentionMixer, HeadOptions, head_normed
from sympow.layers.base import any_weight, state_options
from sympow.layers.initial import draw_uniform
from sympow.layers.power import PowerAttentionState, check_form, continue_power, try_power
from sympow.layers.state import After, Device, DType
from sympow.ops import PowerState, power_attention
from sympow.ops.cost import least_power_flops


class RetNet(AttentionMixer):
    """Computes y = W_o (swish(W_g x) * norm(sum over j <= i of gamma**(i - j) (q_i . k_j / sqrt(K)) v_j)).

    Head h has gamma = 1 - 2**(-5 - h) (Sun et al., "Retentive Network", 2023, (5) to (8)). This is power attention with
    p = 1 and a constant gate.

    The division of the parallel form by the sum of scores is left out: the norm of every head undoes it. Queries, keys,
    values and gates are drawn as published, Xavier-uniform with gain 2**-2.5, without biases.

    Args:
        d_model, n_heads: as in `AttentionMixer`.
        chunk_size: chooses the form for a whole sequence: T or more is parallel, 1 is recurrent, others are chunked;
            None takes the cheapest. All give the same numbers, and so does `step`.
        rotation: "fixed" or "none".
        impl: as in `sympow.ops.power_attention`.
        **heads: options of `AttentionMixer`, with other defaults: value_dim 2 K, bias False.
    """

    own_output: ClassVar[bool] = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        chunk_size: int | None = None,
        rotation: str = "fixed",
        impl: str = "auto",
        **heads: Unpack[HeadOptions],
    ):
        if heads.get("value_dim") is None:
            heads["value_dim"] = 2 * (heads.get("head_dim") or d_model // max(n_heads, 1))
        heads.setdefault("bias", False)
        super().__init__(d_model, n_heads, rotation=rotation, **heads)
        check_form(chunk_size, impl)
        if self.value_dim < 2:
            raise ValueError(f"value_dim must be at least 2: the norm of one channel is constant; got {self.value_dim}")
        self.chunk_size, self.impl = chunk_size, impl
        inner = n_heads * self.value_dim
        self.gate = nn.Linear(d_model, inner, bias=False)
        self.out_norm = nn.GroupNorm(n_heads, inner, eps=1e-6)
        self.reset_parameters()

    @override
    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        for weight in (*self.qkv.weight.data.split(self._split), self.gate.weight):
            bound = 2**-2.5 * sqrt(6 / sum(weight.shape))
            draw_uniform(weight, -bound, bound, generator)

    @override
    def mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        q, k, v = self.rotated_heads(x)
        return power_attention(q, k, v, self._decay(k), cu_seqlens=cu_seqlens, **self._options()).out

    @override
    def mix_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> PowerAttentionState:
        options = state_options(any_weight(self, self.out), device, dtype, sums=True)
        memory = PowerState.zeros(batch_size, self.n_kv_heads, self.head_dim, self.value_dim, 1, **options)
        return PowerAttentionState(memory, 0)

    @override
    def mix_step(self, x: Tensor, state: PowerAttentionState) -> tuple[Tensor, PowerAttentionState]:
        q, k, v = self.rotated_heads(x, state.position)
        y, memory = continue_power(q, k, v, self._decay(k), state.memory, **self._options())
        return y, PowerAttentionState(memory, state.position + x.shape[1])

    @override
    def try_mix_step(self, x: Tensor, state: PowerAttentionState, **extras: Tensor | None) -> tuple[Tensor, After]:
        q, k, v = self.rotated_heads(x, state.position)
        y, memory = try_power(q, k, v, self._decay(k), state.memory, **self._options())
        return y, lambda n: PowerAttentionState(memory(n), state.position + n)

    @override
    def mix_state_size(self, context: int) -> int:
        return self.n_kv_heads * self.head_dim * (self.value_dim + 1)

    @override
    def training_flops(self, time: int) -> int:
        sizes = {"heads": self.n_heads, "kv_heads": self.n_kv_heads}
        return least_power_flops(time, self.head_dim, self.value_dim, 1, True, **sizes)

    def _decay(self, k: Tensor) -> Tensor:
        """Returns log gamma, [B, T, G]."""
        dtype = torch.promote_types(k.dtype, torch.float32)
        exponent = 5 + torch.arange(self.n_kv_heads, device=k.device, dtype=dtype)
        return torch.log1p(-torch.exp2(-exponent)).expand(k.shape[:3])

    def _options(self) -> dict[str, Any]:
        return {"p": 1, "normalize": False, "chunk_size": self.chunk_size, "impl": self.impl}

    def output_gates(self, x: Tensor) -> Tensor:
        """Returns the values of the gate, before their activation; see `AttentionMixer.output_gates`."""
        return self.gate(x)

    def gated_output(self, y: Tensor, gates: Tensor | None) -> Tensor:
        """Norms, gates and projects the heads' outputs; see `AttentionMixer.gated_output`."""
        if gates is None:
            raise TypeError("the outputs of retention need the values of its gate, got None")
        return self.out(F.silu(gates) * head_normed(self.out_norm, y))
