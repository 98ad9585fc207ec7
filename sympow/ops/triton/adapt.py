"""Power attention in Triton, for NVIDIA GPUs from Ampere on and AMD GPUs. docs/kernels.md explains the kernels.

Head dims are padded with zeros to sizes that the kernels have, which changes no product. Values wider than 128 are
computed in parts. For p other than 2, two more value channels of ones compute the normalizer.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.availability import unsupported_tensors
from sympow.ops.decoding import StepOptions
from sympow.ops.decoding_state import DecodingState
from sympow.ops.feature_map import spow_dim, spow_indices
from sympow.ops.runtime.launcher import cast, padded_key_dim
from sympow.ops.triton.context_parallel import PowerInContext
from sympow.ops.triton.decode import power_decode
from sympow.ops.triton.operators import CHUNKED, MAX_KEY_DIM, Options, attend
from sympow.ops.triton.plan import KEPT_CHUNKS, Shapes, chunk_size, leveled_key_dim, packed_chunk, position_chunk
from sympow.ops.types import PowerState, Rotation

_MAX_VALUE_DIM = 128
_MAX_LEVEL_VALUE_DIM = 64  # of the chunked form of p = 3 and 4 on Hopper


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    *,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int | None,
    return_state: bool,
    cu_seqlens: Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
    rotation: Rotation | None = None,
) -> tuple[Tensor, PowerState | None]:
    """Computes what `power_attention` promises, for inputs that it has checked and `unsupported` does not refuse.

    A chunk_size of at least T is the quadratic form, which computes a state from one chunk. Sizes are rounded up to a
    multiple of the kernels' block.
    """
    dtype, (_, time, _, key_dim), value_dim = v.dtype, q.shape, v.shape[3]
    has_state = state is not None or return_state or context_group is not None
    gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, log_g))
    tf32 = dtype == torch.float16 or (dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)
    if dtype == torch.float16:  # tf32 has the mantissa of float16, and a range that powers do not exceed
        q, k, v = q.float(), k.float(), v.float()
    level_dim = leveled_key_dim(key_dim, p, q.dtype, q.device)
    q, k = padded(q, level_dim), padded(k, level_dim)
    if chunk_size is None:
        learned = rotation is not None and rotation.positions.requires_grad
        chunk_size = automatic_chunk_size(q, k, v, log_g, cu_seqlens, p, gradient, has_state, learned)
    chunk = chunk_size if chunk_size < time else time if has_state else 0
    if chunk and not has_state:
        refusal = _without_states(p, key_dim)
        if refusal:
            raise ValueError(f"impl='triton' {refusal}; chunk_size >= T is the quadratic form")
    if not chunk and level_dim is not None:  # the quadratic form has no levels
        q, k = padded(q), padded(k)
    if rotation is not None:
        rotation = rotation._replace(frequencies=padded(rotation.frequencies, q.shape[3] // 2))
    width, widest = q.shape[3], widest_values(level_dim is not None and chunk > 0)
    s = z = None
    if state is not None:
        s, z = (widened(x, key_dim, width, p) for x in (state.s, state.z))
    ones = p != 2 and (normalize or has_state)
    if ones:
        v = torch.cat([v, torch.ones_like(v[..., :1]).expand(*v.shape[:3], 2)], -1)
        s = None if s is None or z is None else torch.cat([s, z[..., None], z[..., None]], -1)
    options = Options(p, scale, normalize and p == 2, eps, chunk, return_state, tf32, ones, gradient)
    outs: list[Tensor] = []
    ends: list[tuple[Any, Any]] = []
    columns = v.shape[3]
    for first in range(0, columns, widest):
        last = min(first + widest, columns)
        v_part = padded(_channels(v, first, last))
        if context_group is not None:
            out = PowerInContext.apply(q, k, v_part, log_g, options, context_group)
            outs.append(_channels(out, 0, last - first))
            continue
        s_part = None if s is None else padded(_channels(s, first, last)).contiguous()
        out, s_end, z_end = attend(q, k, v_part, log_g, s_part, z if p == 2 else None, cu_seqlens, rotation, options)
        outs.append(_channels(out, 0, last - first))
        ends.append((s_end, z_end))
    out = torch.cat(outs, -1) if len(outs) > 1 else outs[0]
    if ones and normalize:
        total = _Total.apply(out[..., value_dim:], v.dtype)
        out = out[..., :value_dim] / (total + eps)
    out = cast(_channels(out, 0, value_dim), dtype)
    if not return_state:
        return out, None
    (s, z), *more = ends
    s = _channels(torch.cat([s, *(x for x, _ in more)], -1) if more else s, 0, columns)
    if ones:
        s, z = s[..., :value_dim], s[..., value_dim]
    s, z = (narrowed(x, key_dim, width, p) for x in (s, z))
    return out, PowerState(s.contiguous(), z.contiguous(), p, key_dim)


def automatic_chunk_size(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, cu_seqlens: Tensor | None, p: int, gradient: bool,
    has_state: bool = False, positions: bool = False,
) -> int:  # fmt: skip
    """Returns the chunk size for chunk_size=None.

    The key dim of q and k must be one that the kernels have. `gradient` tells whether the call is part of training,
    `positions` whether the gradient of data-dependent positions is computed.
    """
    (time, key_dim), wider = (q.shape[1], q.shape[3]), KEPT_CHUNKS.get((p, q.shape[3]), 0)
    # Query heads that share a state make the chunked form faster. The table of gated rows is of heads of their own.
    reach = log_g is not None and cu_seqlens is None and not has_state and q.shape[2] == k.shape[2]
    chunk = chunk_size(key_dim, p, time, gradient, reach, has_state)
    if has_state and cu_seqlens is not None:
        return min(chunk, packed_chunk(time, max(1, cu_seqlens.shape[0] - 1)))
    if positions and p <= 2 and chunk < time:
        return min(chunk, position_chunk(key_dim))
    if gradient and chunk < min(wider, time):
        kept = [Shapes(q, k, v, cu_seqlens, p, size, gradient_rows=True).keeps(True) for size in (chunk, wider)]
        return wider if kept == [False, True] else chunk
    return chunk


def step_with_tail(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: DecodingState, **options: Unpack[StepOptions]
) -> Tensor:
    """Computes the same as `sympow.ops.decoding.step_with_tail`, with one launch for each token."""
    if not q.shape[0]:
        return torch.empty_like(q[..., :1].expand(-1, -1, -1, v.shape[3]))
    return power_decode(
        q, k, v, log_g, state.s, state.z, state.tail_k, state.tail_v, state.tail_g, state.count, state.arrived,
        state.slots, options["p"], options["scale"], options["normalize"], options["eps"],
    )  # fmt: skip


class _Total(torch.autograd.Function):
    """Selects the normalizer from its two columns, which are equal. The gradient of the normalizer cancels with that of
    the values, so rounding it to the kernels' dtype would lose too much. Therefore one column gets the rounded
    gradient, and the other column gets the rounding error."""

    @staticmethod
    def forward(ctx, columns: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return columns[..., :1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        rounded = grad.to(ctx.dtype).to(grad.dtype)
        return torch.cat([rounded, grad - rounded], -1), None


def unsupported(q: Tensor, p: int, chunked: bool) -> str | None:
    """Returns why the kernels cannot do this call, as the end of a sentence; None if they can."""
    key_dim = q.shape[3]
    refusal = unsupported_tensors(q.device, q.dtype)
    if refusal:
        return refusal
    if key_dim > MAX_KEY_DIM:
        return f"takes key dims up to {MAX_KEY_DIM}; got K = {key_dim}"
    return _without_states(p, key_dim) if chunked else None


def _without_states(p: int, key_dim: int) -> str | None:
    if padded_key_dim(key_dim) <= CHUNKED.get(p, 0):
        return None
    limits = ", ".join(f"p = {power}: K <= {most}" for power, most in CHUNKED.items())
    return f"has a chunked form, and with it states, for {limits}; got p = {p}, K = {key_dim}"


def padded(x: Tensor, width: int | None = None) -> Tensor:
    """Pads x with zero channels up to `width`. None: up to a power of two, at least 16, as tiles and aligned copies
    need."""
    missing = (padded_key_dim(x.shape[-1]) if width is None else width) - x.shape[-1]
    return pad(x, (0, missing)) if missing else x


def widest_values(leveled: bool) -> int:
    """Returns the most value channels of a call of the kernels; `leveled`: of the chunked form by levels."""
    return _MAX_LEVEL_VALUE_DIM if leveled else _MAX_VALUE_DIM


def has_states(p: int, key_dim: int) -> bool:
    """Returns whether there is a chunked form for this power and key dim."""
    return _without_states(p, key_dim) is None


def _channels(x: Tensor, first: int, last: int) -> Tensor:
    """Returns x[..., first:last], and x itself if that is all of it, because the gradient of a slice is two more
    kernels."""
    return x if first == 0 and last == x.shape[-1] else x[..., first:last]


def _inner(key_dim: int, width: int, p: int) -> Tensor:
    """Returns which of the rows of (M7) for `width` channels contain only the first `key_dim` channels."""
    return (spow_indices(width, p)[:, -1] < key_dim).nonzero()[:, 0]


def widened(x: Tensor, key_dim: int, width: int, p: int) -> Tensor:
    """Returns a state of key dim `key_dim` in the basis (M7) of the key dim `width`, with zeros in the new rows."""
    if width == key_dim:
        return x
    rows = _inner(key_dim, width, p).to(x.device)
    return x.new_zeros(*x.shape[:2], spow_dim(width, p), *x.shape[3:]).index_copy(2, rows, x)


def narrowed(x: Tensor, key_dim: int, width: int, p: int) -> Tensor:
    """Returns the rows of a state of key dim `width` that a state of `key_dim` has."""
    return x if width == key_dim else x.index_select(2, _inner(key_dim, width, p).to(x.device))
