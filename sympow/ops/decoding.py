"""Decoding with a tail: the state is read for every token, but written only once for several tokens.

A state is large, and adding a token changes all of it. New tokens are therefore first stored in a tail with room for a
fixed number of tokens, and attended to by scores. When a step finds no room, all tokens of the tail are added to the
state together (M12). This is called folding. The output is

    y = [exp(L) phi(q)^T S + sum_tail b_j (scale q . k_j)**p v_j] / [the same with Z and 1],

where L is the log decay since the state was written, and b_j is the decay since token j. The number of tokens in the
tail is kept on the device, so a step never waits for it and can be captured in a CUDA graph. The state is in
`decoding_state.py`. This file has the step in plain torch; that of the kernels is in `triton/decode.py`.

Tokens in the tail can be taken back (`DecodingState.rollback`); tokens in the state cannot. So a step of several tokens
folds only before its first token, if it has at most as many tokens as the tail has room for. All its tokens are then in
the tail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from sympow.ops.availability import has_values, without_autocast
from sympow.ops.decoding_state import DecodingState, decays, folded_state, in_int8
from sympow.ops.feature_map import spow
from sympow.ops.types import PowerState


class StepOptions(TypedDict):
    """Holds the options of a step, which `power_attention_step` has checked."""

    p: int
    scale: float
    normalize: bool
    eps: float


def step_with_tail(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: DecodingState,
    *,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
) -> Tensor:
    """Reads new tokens on `state`, in place, and returns out [B, T, H, V] in the dtype of v.

    The tokens are read in parts, each with as many tokens as an empty tail has room for. There are no gradients.
    """
    if state.slots is not None:
        part = state.taken()
        out = step_with_tail(q, k, v, log_g, part, p=p, scale=scale, normalize=normalize, eps=eps)
        state.put(part)
        return out
    z, tail_k, tail_v, tail_g = state.z, state.tail_k, state.tail_v, state.tail_g
    spots = torch.arange(state.capacity, device=q.device)
    q = q.to(z.dtype).unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4) * scale  # [B, G, R, T, K]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    gates = k.new_zeros(k.shape[:3], dtype=z.dtype) if log_g is None else log_g.transpose(1, 2).to(z.dtype)
    outs = []
    for start in range(0, k.shape[2], state.capacity):
        now = slice(start, start + state.capacity)
        new = k[:, :, now].shape[2]
        full = state.count + new > state.capacity
        # A count on a GPU is not known to the host, and the host would have to wait to read it.
        if full.device.type != "cpu" or not has_values(full) or full.any():
            after = state.folded()
            s = after.s
            if state.scales is not None and state.folds is not None:
                state.folds.add_(full)
                s, scales = in_int8(s, state.folds)
                state.scales.copy_(torch.where(full[..., None], scales, state.scales))
            state.s.copy_(torch.where(full[..., None, None], s, state.s))
            z.copy_(torch.where(full[..., None], after.z, z))
            state.count.masked_fill_(full, 0)
        spot = state.count[..., None].long() + spots[:new]  # [B, G, T]
        state.count.add_(new)
        tail_k.scatter_(2, spot[..., None].expand(*spot.shape, k.shape[3]), k[:, :, now].to(tail_k.dtype))
        tail_v.scatter_(2, spot[..., None].expand(*spot.shape, v.shape[3]), v[:, :, now].to(tail_v.dtype))
        tail_g.scatter_(2, spot, gates[:, :, now])

        held = spots <= spot[..., None]  # [B, G, T, C]
        query = q[:, :, :, now]
        sums = state.sums()
        outs.append(_attended(query, sums, z, tail_k, tail_v, tail_g, held, p=p, normalize=normalize, eps=eps))
    return torch.cat(outs, 3).permute(0, 3, 1, 2, 4).flatten(2, 3).to(v.dtype)


def try_on_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState,
    *,
    p: int,
    scale: float | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, Callable[[int], PowerState]]:
    """Reads new tokens behind `state`, which stays as it is.

    Returns out [B, T, H, V] in the dtype of v, and a function of n that gives the state after the first n tokens,
    n >= 1. There are no gradients.
    """
    time, dtype = k.shape[1], state.s.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.to(dtype).unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4) * scale  # [B, G, R, T, K]
    k, v_wide = k.transpose(1, 2).to(dtype), v.transpose(1, 2).to(dtype)
    gates = k.new_zeros(k.shape[:3]) if log_g is None else log_g.transpose(1, 2).to(dtype)
    held = torch.ones(time, time, dtype=torch.bool, device=k.device).tril()
    with without_autocast(q):
        out = _attended(q, state.s, state.z, k, v_wide, gates, held, p=p, normalize=normalize, eps=eps)

    def after(n: int) -> PowerState:
        return folded_state(state, k[:, :, :n], v_wide[:, :, :n], gates[:, :, :n], None, dtype)

    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(v.dtype), after


def _attended(
    q: Tensor,
    s: Tensor,
    z: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    tail_g: Tensor,
    held: Tensor,
    *,
    p: int,
    normalize: bool,
    eps: float,
) -> Tensor:
    """Returns the outputs [B, G, R, T, V] of T tokens from a state and a tail; q [B, G, R, T, K] is scaled.

    `held` [..., T, C] tells which tokens of the tail each token sees: the tokens up to itself.
    """
    left, kept = decays(tail_g[:, :, None].masked_fill(~held, 0))  # [B, G, T], [B, G, T, C]
    kept = kept.masked_fill(~held, 0)
    shape, q = q.shape[2:4], q.flatten(2, 3)  # [B, G, R T, K]
    score = (q @ tail_k.to(s.dtype).transpose(2, 3)).unflatten(2, shape)
    weight = (score**p * kept[:, :, None]).flatten(2, 3)
    phi = (spow(q, p).unflatten(2, shape) * left[:, :, None, :, None]).flatten(2, 3)
    out = weight @ tail_v.to(s.dtype) + phi @ s
    if normalize:
        out = out / (weight.sum(3, keepdim=True) + phi @ z[..., None] + eps)
    return out.unflatten(2, shape)
