"""Power attention in operations of torch alone, on all chunks at once, for torch.export.

The number of chunks is an axis of the tensors, and no loop: one graph is right for all lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops import reference
from sympow.ops.gate_sums import gate_sums, joined
from sympow.ops.types import PowerState


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    *,
    chunk_size: int,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, PowerState]:
    """Computes (M11) and (M12), in the dtype of the inputs. Shapes are those of `reference`.

    Chunk n reads the sum of the states that the chunks m < n have by themselves, each decayed by the chunks between.
    """
    batch, time, groups, key_dim = k.shape
    chunks = (time + 2 * chunk_size - 1) // chunk_size  # one is empty: torch.export takes an axis of 1 for a constant

    def cut(x: Tensor) -> Tensor:
        """Returns x [B, T, ...] as chunks [B N, C, ...], filled up with zeros."""
        x = pad(x, (*[0, 0] * (x.ndim - 2), 0, chunks * chunk_size - time))
        return x.unflatten(1, (chunks, chunk_size)).flatten(0, 1)

    q, k, v, log_g = cut(q), cut(k), cut(v), None if log_g is None else cut(log_g)
    options: dict[str, Any] = {"p": p, "scale": scale, "normalize": normalize, "eps": eps}
    _, own = reference.quadratic(q[:, :, :0], k, v, log_g, **options)  # [B N, ...]: no queries, only states
    zeros = PowerState.zeros(batch, groups, key_dim, v.shape[3], p, device=k.device, dtype=k.dtype)
    first = zeros if state is None else state
    s, z = (
        torch.cat([x[:, None], y.unflatten(0, (batch, chunks))], 1) for x, y in ((first.s, own.s), (first.z, own.z))
    )
    # Row 0 has the incoming state, row n + 1 that of chunk n. Row n of the decayed sums is the state before chunk n.
    gates = k.new_zeros(batch, chunks, groups) if log_g is None else log_g.sum(1, dtype=torch.float64)
    sums = gate_sums(pad(gates.view(batch, chunks, groups), (0, 0, 1, 0)), 1)
    decays = joined(sums[:, :, :, None] - sums[:, :, None])  # [B, N + 1, N + 1, G]
    later = torch.ones(chunks + 1, chunks + 1, dtype=torch.bool, device=k.device).triu(1)
    decays = decays.masked_fill(later[:, :, None], -torch.inf).exp().to(k.dtype)
    s = torch.einsum("bnmg,bmgdv->bngdv", decays, s)
    z = torch.einsum("bnmg,bmgd->bngd", decays, z)
    before = PowerState(s[:, :-1].flatten(0, 1), z[:, :-1].flatten(0, 1), p, key_dim)
    out, _ = reference.quadratic(q, k, v, log_g, before, **options)
    # Not [:, :time], from which torch.export would conclude how long rows are.
    out = out.unflatten(0, (batch, chunks)).flatten(1, 2).index_select(1, torch.arange(time, device=out.device))
    return out, PowerState(s[:, -1].contiguous(), z[:, -1].contiguous(), p, key_dim)
