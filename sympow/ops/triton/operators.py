"""Power attention by the Triton kernels, as PyTorch operators: `sympow::power_forward` and `sympow::power_backward`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sympow.ops.feature_map import spow_dim
from sympow.ops.runtime.launcher import cast, differentiable, is_followed, operator
from sympow.ops.triton import launch, position_gradient
from sympow.ops.triton.plan import Call, Gate, Plan, Shapes
from sympow.ops.triton.rows import Basis
from sympow.ops.types import Rotation

MAX_KEY_DIM = 128
CHUNKED = {1: 128, 2: 128, 3: 64, 4: 32}  # the largest K for each p that has a chunked form


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


class Options(NamedTuple):
    """Holds the arguments of `power_forward` after its tensors."""

    p: int
    scale: float
    normalize: bool
    eps: float
    chunk: int
    final: bool
    tf32: bool
    wide: bool
    gradient: bool


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
    frequencies: Tensor | None, result: Forward, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes `power_backward`; results that do not exist are None."""
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
        if s_init is not None:
            s_init, z_init = from_public(plan.rows, s_init, z_init)
        # If the states are multiplied with their gradients, the gradient of the state after a chunk is written over the
        # state before the next chunk. For the gradient of positions, both are kept.
        shift = int(plan.restarts)
        s, z = launch.states(call, s_init, z_init, None, reads_z, room=launch.new_states(call, reads_z, shift))
        room = None if turns else (s[shift:], z[shift:])
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
    result = forward(q, k, v, log_g, s_init, z_init, cu_seqlens, options)
    return result.out, result.s, result.z
