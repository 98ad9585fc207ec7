"""Calls of power attention in parts: packed documents one by one, and calls without tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sympow.ops.autocast import concatenated
from sympow.ops.types import PowerOutput, PowerState


def empty(q: Tensor, v: Tensor) -> Tensor:
    """Makes the output [B, T, H, V] where B or T is 0."""
    return v.new_empty(*q.shape[:3], v.shape[3])


def of_no_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    sequences: int,
    p: int,
    return_state: bool,
) -> PowerOutput[PowerState | None]:
    """Makes the results where B or T is 0.

    They depend on all inputs, with gradients of 0, as results with tokens do.
    """
    after = state
    if after is None:
        dtype = torch.promote_types(k.dtype, torch.float32)
        after = PowerState.zeros(sequences, k.shape[2], k.shape[3], v.shape[3], p, device=k.device, dtype=dtype)
    zero = after.s[:0].sum() + after.z[:0].sum()
    for x in (q, k, v, log_g):
        zero = zero if x is None else zero + x[:0].sum()
    s, z = (x + zero.to(x.dtype) for x in (after.s, after.z))
    return PowerOutput(empty(q, v) + zero.to(v.dtype), PowerState(s, z, p, k.shape[3]) if return_state else None)


def packed(run, q, k, v, log_g, state, ends: list[int], **options) -> PowerOutput:
    """Runs each document alone, (M11) from its own first token."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    outs, states = [], []
    for n, (start, stop) in enumerate(pairwise(ends)):
        before = state and PowerState(state.s[n : n + 1], state.z[n : n + 1], state.p, state.key_dim)
        span = slice(start, stop)
        if start == stop:
            zeros = (1, k.shape[2], k.shape[3], v.shape[3], options["p"])
            states.append(before or PowerState.zeros(*zeros, device=k.device, dtype=dtype))
            continue
        gate = None if log_g is None else log_g[:, span]
        out, after = run(q[:, span], k[:, span], v[:, span], gate, before, **options)
        outs.append(out)
        states.append(after)
    out = concatenated(outs, dim=1)
    if not options["return_state"]:
        return PowerOutput(out, None)
    s, z = torch.cat([x.s for x in states]), torch.cat([x.z for x in states])
    return PowerOutput(out, PowerState(s, z, options["p"], k.shape[3]))
