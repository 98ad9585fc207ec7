"""Packed documents, N of them along the time of one row with borders in cu_seqlens, and calls without tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sympow.ops.availability import concatenated, has_values, is_exporting
from sympow.ops.runtime.launcher import ALL_DEVICES, operator
from sympow.ops.types import PowerOutput, PowerState, check_dense


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
    if after is None and return_state:
        dtype = torch.promote_types(k.dtype, torch.float32)
        after = PowerState.zeros(sequences, k.shape[2], k.shape[3], v.shape[3], p, device=k.device, dtype=dtype)
    zero = q[:0].sum()
    for x in (k, v, log_g) if after is None else (k, v, log_g, after.s, after.z):
        zero = zero if x is None else zero + x[:0].sum()
    out = empty(q, v) + zero.to(v.dtype)
    if after is None or not return_state:
        return PowerOutput(out, None)
    s, z = (x + zero.to(x.dtype) for x in (after.s, after.z))
    return PowerOutput(out, PowerState(s, z, p, k.shape[3]))


def packed(run, q, k, v, log_g, state, ends: list[int], **options) -> PowerOutput:
    """Runs each document alone, (M11) from its own first token."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    outs, states = [], []
    for n, (start, stop) in enumerate(pairwise(ends)):
        before = state and PowerState(state.s[n : n + 1], state.z[n : n + 1], state.p, state.key_dim)
        span = slice(start, stop)
        if start == stop:
            zeros = (1, k.shape[2], k.shape[3], v.shape[3], options["p"])
            if options["return_state"]:
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


def check_borders(cu_seqlens: Tensor, batch: int) -> None:
    """Raises TypeError or ValueError unless cu_seqlens is an integer tensor [N + 1] and the batch is 1.

    Its values are not checked, because the host would have to wait for a GPU.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor; got {type(cu_seqlens).__name__}")
    if check_dense("cu_seqlens", cu_seqlens).dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor; got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] for N >= 1 documents; got {list(cu_seqlens.shape)}")
    if batch != 1:
        raise ValueError(f"packed documents (cu_seqlens) lie along T of a batch of 1; got B = {batch}")


def borders(cu_seqlens: Tensor, time: int) -> list[int]:
    """Returns the values of cu_seqlens.

    Raises ValueError unless they rise from 0 to `time`, and for a tensor without values.

    For a tensor on a GPU the host waits.
    """
    if is_exporting() or (not torch.compiler.is_dynamo_compiling() and not has_values(cu_seqlens)):
        raise ValueError("cu_seqlens must have values here; got a fake or a meta tensor, as in torch.export")
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != time or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {time} without falling; got {_shown(ends)}")
    return ends


def _shown(ends: list[int]) -> str:
    """Returns the borders as a message shows them: of many the first and the last, and where they fall."""
    few = ends if len(ends) <= 8 else [*ends[:6], "...", ends[-1]]
    fall = next((n for n, (a, b) in enumerate(pairwise(ends)) if a > b), None)
    where = "" if fall is None else f", with {ends[fall + 1]} after {ends[fall]}"
    return f"[{', '.join(map(str, few))}]{where}"


@operator(lambda cu_seqlens, time: torch.empty_like(cu_seqlens), devices=ALL_DEVICES)
def checked_copy(cu_seqlens: Tensor, time: int) -> Tensor:
    """Copies cu_seqlens [N + 1], whose values `borders` checks. A compiler keeps the check where the copy is used."""
    borders(cu_seqlens, time)
    return cu_seqlens.clone()


def checked_on_cpu(cu_seqlens: Tensor, time: int) -> Tensor:
    """Returns cu_seqlens [N + 1], or a copy in compiled code; raises as `borders` for a tensor on a CPU.

    Values on a GPU are not checked, because the host would have to wait.
    """
    if cu_seqlens.device.type != "cpu":
        return cu_seqlens
    if torch.compiler.is_dynamo_compiling() and not is_exporting():  # a trace has no values
        return checked_copy(cu_seqlens, time)
    borders(cu_seqlens, time)
    return cu_seqlens


def document_starts(cu_seqlens: Tensor, time: int) -> Tensor:
    """Returns the first token of the document of every token: int32 [T], from cu_seqlens [N + 1]."""
    token = torch.arange(time, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return cu_seqlens[document].to(torch.int32)
