"""The entrance of a call of power attention in Triton, and the call as operators of PyTorch.

The kernels are for NVIDIA GPUs from Ampere on and AMD GPUs; docs/kernels.md explains them. `attention` pads head dims
with zeros to sizes that the kernels have, which changes no product. Values wider than 128 are computed in parts. For p
other than 2, two more value channels of ones compute the normalizer.

`attend` computes each part, by `forward` and `backward`. torch.compile and other functions that need PyTorch's
dispatcher see these two as the operators `sympow::power_forward` and `sympow::power_backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from sympow.ops.availability import unsupported_tensors
from sympow.ops.decoding import StepOptions
from sympow.ops.decoding_state import DecodingState
from sympow.ops.feature_map import spow_dim, spow_indices
from sympow.ops.first_order import refuse_tangents
from sympow.ops.runtime.launcher import cast, differentiable, is_followed, operator, padded_key_dim
from sympow.ops.triton import launch, position_gradient
from sympow.ops.triton.context_parallel import PowerInContext
from sympow.ops.triton.decode import power_decode
from sympow.ops.triton.plan import (
    KEPT_CHUNKS,
    Call,
    Gate,
    Options,
    Plan,
    Shapes,
    chunk_size,
    leveled_key_dim,
    packed_chunk,
    position_chunk,
)
from sympow.ops.triton.rows import Basis
from sympow.ops.types import PowerState, Rotation

MAX_KEY_DIM = 128
CHUNKED = {1: 128, 2: 128, 3: 64, 4: 32}  # the largest K for each p that has a chunked form
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
        state.scales, state.folds, state.slots, options["p"], options["scale"], options["normalize"], options["eps"],
    )  # fmt: skip


def again(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, *, p: int, scale: float, normalize: bool, eps: float,
    chunk_size: int | None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None:  # fmt: skip
    """Returns what computes the outputs of calls that differ from this one in the values and strides of tensors alone.

    None for calls in which `attention` changes tensors, which float16, padded channels and columns of ones do, and for
    products whose rounding a global option of torch decides.
    """
    (_, time, _, key_dim), columns = q.shape, v.shape[3]
    if q.dtype != torch.bfloat16 or (p != 2 and normalize):
        return None
    level_dim = leveled_key_dim(key_dim, p, q.dtype, q.device)
    gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, log_g))
    if chunk_size is None:
        chunk_size = automatic_chunk_size(q, k, v, log_g, None, p, gradient)
    chunk = chunk_size if chunk_size < time else 0
    width = level_dim if chunk and level_dim is not None else padded_key_dim(key_dim)
    if key_dim != width or columns != padded_key_dim(columns) or columns > widest_values(level_dim is not None):
        return None
    options = Options(p, scale, normalize, eps, chunk, False, False, False, gradient)
    return partial(_attend_again, options)


def _attend_again(options: Options, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None) -> Tensor:
    return attend(q, k, v, log_g, None, None, None, None, options)[0]


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


class Forward(NamedTuple):
    """Holds the results of `power_forward`, None in place of empty ones, and what else the backward may use."""

    out: Tensor
    norm: Tensor
    s: Tensor | None
    z: Tensor | None
    s_kept: Tensor | None
    z_kept: Tensor | None
    gate: Gate | None
    plan: Plan | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, s_init: Tensor | None, z_init: Tensor | None,
    cu_seqlens: Tensor | None, options: Options,
) -> Forward:  # fmt: skip
    """Computes `power_forward`, on the device of q. Autograd and compiled code call the backward on that device."""
    if is_elsewhere(q):
        with torch.cuda.device_of(q):
            return forward(q, k, v, log_g, s_init, z_init, cu_seqlens, options)
    p, scale, normalize, eps, chunk, final, tf32, wide, gradient = options
    kept = gradient and chunk > 0 and Shapes(q, k, v, cu_seqlens, p, chunk, True).keeps(normalize or final)
    call = Call(q, k, v, log_g, cu_seqlens, p, scale, chunk, tf32, kept)
    s = z = s_end = z_end = None
    if chunk:
        rows, reads_z = call.plan.rows, p == 2 and (normalize or final)
        if s_init is not None:
            s_init, z_init = from_public(rows, s_init, z_init)
        ends = launch.new_ends(call, reads_z) if final else None
        s, z = launch.states(call, s_init, z_init, ends, reads_z)
        if ends is not None:
            s_end, z_end = _to_public(rows, *ends)
    out, norm = launch.output(call, s, z, s_init is not None, normalize, eps, wide)
    plan = call.plan if kept or not chunk else None
    return Forward(out, norm, s_end, z_end, s if kept else None, z if kept else None, call.gate, plan)


def is_elsewhere(x: Tensor) -> bool:
    """Returns whether x is on a GPU that is not the current one, on which kernels are launched."""
    return x.is_cuda and x.get_device() != torch.cuda.current_device()


def backward(
    dout: Tensor, ds_final: Tensor | None, dz_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    log_g: Tensor | None, s_init: Tensor | None, z_init: Tensor | None, cu_seqlens: Tensor | None,
    frequencies: Tensor | None, result: Forward, options: Options, spare: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes `power_backward`; results that do not exist are None. With `spare`, their gradients are written over the
    states of `result`, which are those of `states_again`."""
    p, scale, normalize, _, chunk, _, tf32, *_ = options
    dout = cast(dout, v.dtype).contiguous()
    call = Call(q, k, v, log_g, cu_seqlens, p, scale, chunk, tf32, True, result.gate, result.plan)
    plan = call.plan
    factors = launch.row_factors(call, dout, result.out, result.norm, normalize, early=result.gate is None)
    has_init, has_final = s_init is not None, ds_final is not None
    reads_z = p == 2 and (normalize or has_final)
    s, z = result.s_kept, result.z_kept
    turns = frequencies is not None and plan.turns and not has_final
    room = after = ds = dz = starts = through = turned = dlog_g = dpositions = None
    if chunk and s is None:
        s, z = states_again(call, s_init, z_init, reads_z)
        spare = not turns  # for the gradient of positions, states and gradients are kept
    if spare and s is not None and z is not None:
        room = (s[int(plan.restarts) :], z[int(plan.restarts) :])
    dq, dsums_q = launch.query_gradient(call, dout, factors, s, z, has_init, normalize)
    if chunk:
        s_end, z_end = (None, None) if ds_final is None else from_public(plan.rows, ds_final, dz_final)
        starts = launch.new_ends(call, reads_z) if has_init else None
        if plan.restarts and s is not None and z is not None:
            through = launch.new_products(call, reads_z)
            after = launch.ForwardStates(s[1:], z[1:], through)
        gradient = (dout, factors.factor, factors.delta)
        ds, dz = launch.states(call, s_end, z_end, starts, reads_z, gradient, room, after)
        if turns and s is not None and z is not None and frequencies is not None:
            turned = position_gradient.products_with_states(call, s, z, ds, dz, frequencies, reads_z)
    dk, dv, dsums_k = launch.key_gradient(call, dout, factors, ds, dz, has_final, reads_z)
    if frequencies is not None:
        dpositions = position_gradient.position_gradient(q, k, dq, dk, frequencies, plan.chunk, turned)
    del s, z, room, after, ds, dz  # states are large
    if log_g is not None:
        last = _final_gate_gradient(result.s, result.z, ds_final, dz_final)
        dlog_g = cast(launch.gate_gradient(call, log_g, dsums_q, dsums_k, last, through), log_g.dtype)
    initial = (None, None) if starts is None else _to_public(plan.rows, *starts)
    return dq, dk, dv, dlog_g, *initial, dpositions


def states_again(call: Call, s_init: Tensor | None, z_init: Tensor | None, reads_z: bool) -> tuple[Tensor, Tensor]:
    """Returns the states before each chunk for the backward, from a public incoming state.

    If the states are multiplied with their gradients, there is room for one more at the end: the gradient of the state
    after a chunk is then written over the state before the next chunk.
    """
    if s_init is not None:
        s_init, z_init = from_public(call.plan.rows, s_init, z_init)
    room = launch.new_states(call, reads_z, int(call.plan.restarts))
    return launch.states(call, s_init, z_init, None, reads_z, room=room)


def _final_gate_gradient(s: Tensor | None, z: Tensor | None, ds: Tensor | None, dz: Tensor | None) -> Tensor | None:
    """Returns the gradient of L at the last token that comes through the last state, which L decays as a whole, [N, G];
    None without a last state."""
    if s is None or ds is None:
        return None
    last = (s * ds).sum((2, 3))
    return last if z is None or dz is None else last + (z * dz).sum(2)


def from_public(rows: Basis, s: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor | None]:
    matrix = rows.matrix_from_public(z).contiguous() if z is not None else None
    return rows.from_public(s).contiguous(), matrix


def _to_public(rows: Basis, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
    return rows.to_public(s), rows.matrix_to_public(z) if z.numel() else None


def _like_backward(dout, ds_final, dz_final, q, k, v, log_g, s_init, z_init, cu_seqlens, frequencies, out, norm, *_):
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    others = [norm.new_empty(0) if x is None else torch.empty_like(x) for x in (log_g, s_init, z_init)]
    positions = norm.new_empty(0 if frequencies is None else k.shape[:3], dtype=torch.float64)
    return *grads, *others, positions


@operator(_like_backward)
def power_backward(
    dout: Tensor,
    ds_final: Tensor | None,
    dz_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s_init: Tensor | None,
    z_init: Tensor | None,
    cu_seqlens: Tensor | None,
    frequencies: Tensor | None,
    out: Tensor,
    norm: Tensor,
    s_final: Tensor,
    z_final: Tensor,
    s_kept: Tensor,
    z_kept: Tensor,
    p: int,
    scale: float,
    normalize: bool,
    chunk: int,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes dq, dk, dv, dlog_g, ds and dz of the initial state, and the gradient of positions [B, T, G], float64.

    Results that do not exist are empty.
    """
    kept = s_kept.numel() > 0
    result = Forward(out, norm, s_final, z_final, s_kept if kept else None, z_kept if kept else None, None, None)
    options = Options(p, scale, normalize, 0.0, chunk, ds_final is not None, tf32, False, True)
    dq, dk, dv, *others, dpositions = backward(
        dout, ds_final, dz_final, q, k, v, log_g, s_init, z_init, cu_seqlens, frequencies, result, options
    )
    dlog_g, ds, dz = (norm.new_empty(0) if x is None else x for x in others)
    if dpositions is None:
        dpositions = norm.new_empty(0, dtype=torch.float64)
    return dq, dk, dv, dlog_g, ds, dz, dpositions


def _keep(ctx, inputs, output):
    *tensors, positions, frequencies = inputs[:9]
    ctx.save_for_backward(*tensors, frequencies, *output)
    ctx.options, ctx.positions = Options(*inputs[9:]), None if positions is None else positions.shape
    ctx.set_materialize_grads(False)  # kept states have no gradients: zeros of their size would be made


def _backward(ctx, dout, _, ds_final, dz_final, *__):
    q, k, v, log_g, s_init, z_init, cu_seqlens, frequencies, *output = ctx.saved_tensors
    dout, ds_final, dz_final = _gradients(ctx.options, dout, ds_final, dz_final, *output[:1], *output[2:4])
    dq, dk, dv, dlog_g, ds_init, dz_init, dpositions = power_backward(
        dout, ds_final, dz_final, q, k, v, log_g, s_init, z_init, cu_seqlens, frequencies, *output,
        ctx.options.p, ctx.options.scale, ctx.options.normalize, ctx.options.chunk, ctx.options.tf32,
    )  # fmt: skip
    present = [g if x is not None else None for g, x in ((dlog_g, log_g), (ds_init, s_init), (dz_init, z_init))]
    return dq, dk, dv, *present, None, _of_groups(dpositions, ctx.positions), *[None] * 10


def _of_groups(dpositions: Tensor | None, shape: torch.Size | None) -> Tensor | None:
    """Returns the gradient of positions [B, T, n], where n divides G, from that of every group, [B, T, G]; None
    without."""
    if dpositions is None or shape is None:
        return None
    return dpositions.unflatten(2, (shape[2], -1)).sum(3)


def _gradients(
    options: Options, dout: Tensor | None, ds: Tensor | None, dz: Tensor | None, out: Tensor, s: Tensor | None,
    z: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradients of the output and the last state: zeros if only one of them has a gradient, None without a
    last state."""
    if dout is None:
        dout = torch.zeros_like(out)
    if not options.final or (ds is None and dz is None):
        return dout, None, None
    if ds is None and s is not None:
        ds = torch.zeros_like(s)
    if dz is None and z is not None:
        dz = torch.zeros_like(z)
    return dout, ds, dz if options.p == 2 else None


def _like_forward(
    q, k, v, log_g, s_init, z_init, cu_seqlens, positions, frequencies, p, scale, normalize, eps, chunk, final, tf32,
    wide, gradient,
):  # fmt: skip
    b, t, h, key_dim = q.shape
    out = q.new_empty(b, t, h, v.shape[3], dtype=torch.float32 if wide else v.dtype)
    norm = q.new_empty(h if normalize else 0, b * t, dtype=torch.float32)
    shapes = Shapes(q, k, v, cu_seqlens, p, chunk, gradient_rows=True)
    reads_z = p == 2 and (normalize or final)
    kept = shapes.state_shapes(reads_z) if gradient and shapes.keeps(reads_z) else ((0,), (0,))
    states = [k.new_empty(shape) for shape in kept]
    if not final:
        return out, norm, norm.new_empty(0), norm.new_empty(0), *states
    n = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    s = norm.new_empty(n, k.shape[2], spow_dim(key_dim, p), v.shape[3])
    return out, norm, s, norm.new_empty(*s.shape[:3] if p == 2 else (0,)), *states


@operator(_like_forward, _keep, _backward)
def power_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s_init: Tensor | None,
    z_init: Tensor | None,
    cu_seqlens: Tensor | None,
    positions: Tensor | None,
    frequencies: Tensor | None,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    chunk: int,
    final: bool,
    tf32: bool,
    wide: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes out [B, T, H, V], the normalizer [H, B T], and the last state s [N, G, D, V], z [N, G, D], which are
    empty unless `final`. The last results are the states at the boundaries of chunks in the basis of the kernels, which
    are empty unless they are kept for the backward.

    chunk 0 is the quadratic form, without states. z exists for p = 2. `tf32`: float32 products may round their factors
    to tf32. `wide`: out is float32 for all inputs. `gradient`: the backward will be called. It computes the gradient of
    `positions` [B, T, n], by which q and k were rotated with `frequencies`; nothing else depends on them.
    """
    options = Options(p, scale, normalize, eps, chunk, final, tf32, wide, gradient)
    result = forward(q, k, v, log_g, s_init, z_init, cu_seqlens, options)
    norm = result.norm
    s, z, s_kept, z_kept = (norm.new_empty(0) if x is None else x for x in result[2:6])
    return result.out, norm, s, z, s_kept, z_kept


def _keep_call(
    ctx, options, q, k, v, log_g, s_init=None, z_init=None, cu_seqlens=None, positions=None, frequencies=None
):
    out, norm, s, z, s_kept, z_kept, gate, ctx.plan = forward(q, k, v, log_g, s_init, z_init, cu_seqlens, options)
    most = (q, k, v, log_g, out, norm, gate.sums)
    others = (s_init, z_init, cu_seqlens, frequencies, s, z, s_kept, z_kept, gate.begins, gate.ends)
    ctx.others = any(x is not None for x in others)  # autograd takes time for every argument, also for None
    ctx.save_for_backward(*most, *(others if ctx.others else ()))
    ctx.options, ctx.positions = options, None if positions is None else positions.shape
    ctx.set_materialize_grads(False)
    return out, s, z


def _backward_of_call(ctx, dout, ds_final, dz_final):
    q, k, v, log_g, out, norm, sums, *others = ctx.saved_tensors
    s_init, z_init, cu_seqlens, frequencies, s, z, s_kept, z_kept, begins, ends = others if ctx.others else [None] * 10
    result = Forward(out, norm, s, z, s_kept, z_kept, Gate(sums, begins, ends), ctx.plan)
    gradients = _gradients(ctx.options, dout, ds_final, dz_final, out, s, z)
    *grads, ds, dz, dpositions = backward(
        *gradients, q, k, v, log_g, s_init, z_init, cu_seqlens, frequencies, result, ctx.options
    )
    dpositions = _of_groups(dpositions, ctx.positions)
    return None, *grads, ds, None if z_init is None else dz, None, dpositions, None


# `forward` with its gradients, without PyTorch's dispatcher, which takes longer than the launches.
_power = differentiable("Power", _keep_call, _backward_of_call)


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, s_init: Tensor | None, z_init: Tensor | None,
    cu_seqlens: Tensor | None, rotation: Rotation | None, options: Options,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns out, and s and z of the last state (None or empty unless `final`), as `power_forward` does. If something
    besides autograd follows the call, such as torch.compile, it is called as an operator, otherwise directly."""
    positions = frequencies = None
    if rotation is not None and rotation.positions.requires_grad:
        positions, frequencies = rotation
        positions = positions if positions.ndim == 3 else positions[..., None]
    others = (s_init, z_init, cu_seqlens, positions, frequencies)
    if torch.compiler.is_compiling() or is_followed(q):
        out, _, s, z, *_ = power_forward(q, k, v, log_g, *others, *options)
        return out, s, z
    if any(x is not None for x in others):
        if torch.is_grad_enabled():
            return _power(options, q, k, v, log_g, *others)
    elif options.gradient:
        return _power(options, q, k, v, log_g)
    refuse_tangents("power_attention", (q, k, v, log_g, *others))
    result = forward(q, k, v, log_g, s_init, z_init, cu_seqlens, options)
    return result.out, result.s, result.z
