"""Power attention by the Triton kernels, as PyTorch operators: `sympow::power_forward` and `sympow::power_backward`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.ops.feature_map import spow_dim
from sympow.ops.triton import (
    backward,
    config,
    forward,
    hopper_backward,
    hopper_output,
    hopper_power_gradients,
    hopper_quadratic,
)
from sympow.ops.triton.call import (
    GATE_BLOCK,
    SHORT_GATE_BLOCK,
    STATE_BLOCK,
    STATE_PARTS,
    WEIGH_BLOCK,
    Call,
    Shapes,
)
from sympow.ops.triton.levels import TILE
from sympow.ops.triton.rows import Basis

MAX_KEY_DIM = 128
CHUNKED = {1: 128, 2: 128, 3: 64, 4: 32}  # of each p that has a chunked form, the largest K


@torch.library.custom_op("sympow::power_forward", mutates_args=())
def power_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s_init: Tensor | None,
    z_init: Tensor | None,
    cu_seqlens: Tensor | None,
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
    """out [B, T, H, V], normalizer [H, B T], of the last state s [N, G, D, V], z [N, G, D]: empty unless `final`; and
    the states at the boundaries of chunks, as the kernels hold them: empty unless they are kept for the backward.

    chunk 0 is the quadratic form, without states. z is kept for p = 2. `tf32`: float32 products may round their factors
    to tf32. `wide`: out is float32, whatever the inputs are. `gradient`: the backward will be called.
    """
    kept = gradient and kept_shapes(q, k, v, cu_seqlens, p, chunk, normalize or final) is not None
    call = Call(q, k, v, log_g, cu_seqlens, p, scale, chunk, tf32, kept)
    s = z = ends = None
    if call.chunk:
        reads_z = p == 2 and (normalize or final)
        if s_init is not None:
            s_init, z_init = _from_public(call.rows, s_init, z_init)
        ends = call.new_ends(reads_z) if final else None
        s, z = call.states(s_init, z_init, ends, reads_z)
    out, norm = output(call, s, z, s_init is not None, normalize, eps, wide)
    s_end, z_end = (norm.new_empty(0), norm.new_empty(0)) if ends is None else _to_public(call.rows, *ends)
    s_kept, z_kept = (norm.new_empty(0) if x is None or not kept else x for x in (s, z))
    return out, norm, s_end, z_end, s_kept, z_kept


def output(
    call: Call, s: Tensor | None, z: Tensor | None, init: bool, normalize: bool, eps: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """out and normalizer of `power_forward`, given the states before each chunk. `init`: that before the first is not
    zero."""
    q, k, v, layout, p = call.q, call.k, call.v, call.layout, call.p
    out = torch.empty(*q.shape[:3], call.V, device=q.device, dtype=torch.float32 if wide else v.dtype)
    norm = torch.empty(call.H, layout.tokens, device=q.device, dtype=torch.float32)
    if not normalize:
        norm = norm[:0]
    launch, tables = call.config.output, call.tables()
    if call.hopper or call.leveled:
        launch, (lower, upper) = call.hopper_launches.output, call.counts()
        levels = call.levels.shape if call.chunk and call.leveled else ()
        hopper_output.output_pass[(layout.blocks(launch.block), call.H)](
            q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2), call.sums,
            out if s is None else s, out if z is None else z, out, norm, *(tables[1:3] if levels else tables[:2]),
            call.begins, *call.hopper_tables(launch, call.H), call.H, call.G, call.out_scale, eps,
            **call.hopper_dims(launch), P=p, LOWER=lower, UPPER=upper, LEVELS=levels, SKIP=call.skip, KEYS=launch.step,
            NORMALIZE=normalize, STATES=call.chunk > 0, INIT=init, **call.early(after=call.gated),
        )  # fmt: skip
        return out, norm
    forward.output_pass[(layout.blocks(launch.block), call.H)](
        q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2), call.sums, s, z, out,
        norm, *tables[:2], call.begins, *call.sequence_tables(launch.block), call.H, call.G, *call.counts(),
        call.score_scale, call.out_scale, eps, **call.dims(), BLOCK=launch.block, KEYS=launch.step, NORMALIZE=normalize,
        STATES=call.chunk > 0, INIT=init, PACKED=layout.packed, **launch.options,
    )  # fmt: skip
    return out, norm


def kept_shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, p: int, chunk: int, z: bool
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of the states that the forward keeps for the backward, as a state pass costs a tenth of both; None where
    they are too large, and for p > 2 unless rows are by levels."""
    if not chunk:
        return None
    call = Shapes(q, k, v, cu_seqlens, p, chunk, gradient_rows=True)
    if p > 2 and not call.leveled:
        return None
    shapes = call.state_shapes(z and p == 2)
    return shapes if math.prod(shapes[0]) * k.dtype.itemsize <= config.most_kept(q.device) else None


@power_forward.register_fake
def _(q, k, v, log_g, s_init, z_init, cu_seqlens, p, scale, normalize, eps, chunk, final, tf32, wide, gradient):
    b, t, h, key_dim = q.shape
    out = q.new_empty(b, t, h, v.shape[3], dtype=torch.float32 if wide else v.dtype)
    norm = q.new_empty(h if normalize else 0, b * t, dtype=torch.float32)
    kept = kept_shapes(q, k, v, cu_seqlens, p, chunk, normalize or final) if gradient else None
    states = [k.new_empty(shape) for shape in kept or ((0,), (0,))]
    if not final:
        return out, norm, norm.new_empty(0), norm.new_empty(0), *states
    n = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    s = norm.new_empty(n, k.shape[2], spow_dim(key_dim, p), v.shape[3])
    return out, norm, s, norm.new_empty(*s.shape[:3] if p == 2 else (0,)), *states


@torch.library.custom_op("sympow::power_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dlog_g, and ds, dz of the initial state (empty where there was nothing)."""
    dout = dout.to(v.dtype).contiguous()
    call = Call(q, k, v, log_g, cu_seqlens, p, scale, chunk, tf32, gradient_rows=True)
    factors = row_factors(call, dout, out, norm, normalize)
    has_init, has_final = s_init is not None, ds_final is not None
    reads_z = p == 2 and (normalize or has_final)
    s = z = ds = dz = starts = through = None
    if s_kept.numel():
        s, z = s_kept, z_kept
    elif call.chunk:
        if s_init is not None:
            s_init, z_init = _from_public(call.rows, s_init, z_init)
        s, z = call.states(s_init, z_init, None, reads_z)
    dq, dsums_q = query_gradient(call, dout, factors, s, z, has_init, normalize)
    if not call.restarts:
        s = z = None  # they may be large
    if call.chunk:
        s_end, z_end = (None, None) if ds_final is None else _from_public(call.rows, ds_final, dz_final)
        starts = call.new_ends(reads_z) if has_init else None
        ds, dz = call.states(s_end, z_end, starts, reads_z, (dout, factors.factor, factors.delta))
        if s is not None:
            through = through_states(call, s, z, ds, dz, reads_z)
            del s, z
    dk, dv, dsums_k = key_gradient(call, dout, factors, ds, dz, has_final, reads_z)
    dlog_g = norm.new_empty(0)
    if log_g is not None:
        last = None if ds_final is None else _final_gate_gradient(s_final, z_final, ds_final, dz_final)
        dlog_g = gate_gradient(call, dsums_q, dsums_k, last, through).view(log_g.shape).to(log_g.dtype)
    if starts is None:
        return dq, dk, dv, dlog_g, norm.new_empty(0), norm.new_empty(0)
    return dq, dk, dv, dlog_g, *_to_public(call.rows, *starts)


def query_gradient(
    call: Call, dout: Tensor, factors: RowFactors, s: Tensor | None, z: Tensor | None, init: bool, normalize: bool
) -> tuple[Tensor, Tensor]:
    """dq and the queries' part in the gradient of the gate's sums, [H, B T] (empty without a gate), given the states
    before each chunk. `init`: that before the first is not zero."""
    q, k, v, layout = call.q, call.k, call.v, call.layout
    strides = _strided(q, k, v)
    factor, _, _, delta = factors
    dq = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    dsums_q = torch.empty(call.H if call.gated else 0, layout.tokens, device=q.device, dtype=torch.float32)
    if call.quadratic:
        launch = call.hopper_launches.query
        hopper_quadratic.query_pass[(layout.blocks(launch.block), call.H)](
            *(hopper_quadratic.tile_descriptor(x, launch.step) for x in (k, v)), *strides[:3], dout, call.sums, factor,
            delta, dq, dsums_q, call.begins, layout.length, layout.tokens, call.spread(launch, call.H), call.H,
            call.grad_scale * call.out_scale, K=call.K, V=call.V, R=call.H // call.G, BLOCK=launch.block,
            KEYS=launch.step, GATED=call.gated, num_warps=launch.warps, **call.early(),
        )  # fmt: skip
    elif call.hopper:
        launch = call.hopper_launches.query
        hopper_backward.query_pass[(layout.blocks(launch.block), call.H)](
            *strides, dout, call.sums, dq if s is None else s, dq if z is None else z, factor, delta, dq, dsums_q,
            call.begins, *call.hopper_tables(launch, call.H), call.H, call.G, call.grad_scale * call.out_scale,
            **call.hopper_dims(launch), KEYS=launch.step, NORMALIZE=normalize, STATES=call.chunk > 0, INIT=init,
            **call.early(),
        )  # fmt: skip
    elif call.chunk and call.leveled:
        launch = call.hopper_launches.query
        hopper_power_gradients.query_pass[(layout.blocks(launch.block), call.H)](
            *strides, dout, call.sums, s, *call.slopes(), dq, dsums_q, *call.sequence_tables(launch.block),
            call.H, call.G, call.grad_scale * call.out_scale, KEYS=launch.step, INIT=init,
            **call.leveled_dims(launch),
        )  # fmt: skip
    else:
        launch = call.config.query
        prefixes, _, grad_weights, mirror = call.tables()
        backward.query_pass[(layout.blocks(launch.block), call.H)](
            *strides, dout, call.sums, s, z, factor, delta, dq, dsums_q, prefixes, grad_weights, mirror, call.begins,
            *call.sequence_tables(launch.block), call.H, call.G, *call.counts(), call.score_scale,
            call.grad_scale * call.out_scale, **call.dims(), BLOCK=launch.block, KEYS=launch.step, NORMALIZE=normalize,
            STATES=call.chunk > 0, INIT=init, PACKED=layout.packed, **launch.options,
        )  # fmt: skip
    return call.own_channels(dq), dsums_q


def key_gradient(
    call: Call, dout: Tensor, factors: RowFactors, ds: Tensor | None, dz: Tensor | None, final: bool, z: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dk, dv and the keys' part in the gradient of the gate's sums, [G, B T] (empty without a gate), given the
    gradients of the states after each chunk. `final`: the one after the last is not zero; `z`: dz is read."""
    q, k, v, layout = call.q, call.k, call.v, call.layout
    strides = _strided(q, k, v)
    factor, scales, near, delta = factors
    dk = torch.empty(k.shape, device=k.device, dtype=k.dtype)
    dv = torch.empty(v.shape, device=k.device, dtype=v.dtype)
    dsums_k = torch.empty(call.G if call.gated else 0, layout.tokens, device=k.device, dtype=torch.float32)
    if call.quadratic:
        launch = call.hopper_launches.key
        hopper_quadratic.key_pass[(layout.blocks(launch.block), call.G)](
            *strides, dout, call.sums, scales, near, delta, dk, dv, dsums_k, call.ends,
            *call.hopper_tables(launch, call.G), call.H, call.G, call.grad_scale, K=call.K, V=call.V,
            R=call.H // call.G, BLOCK=launch.block, QUERIES=launch.step, GATED=call.gated, num_warps=launch.warps,
            **call.early(),
        )  # fmt: skip
    elif call.hopper:
        launch = call.hopper_launches.key
        hopper_backward.key_pass[(layout.blocks(launch.block), call.G)](
            *strides, dout, call.sums, dk if ds is None else ds, dk if dz is None else dz, factor, delta, dk, dv,
            dsums_k, call.ends, *call.hopper_tables(launch, call.G), call.H, call.G, call.out_scale, call.grad_scale,
            **call.hopper_dims(launch), QUERIES=launch.step, STATES=call.chunk > 0, FINAL=final, Z=z,
            **call.early(),
        )  # fmt: skip
    elif call.chunk and call.leveled:
        launch = call.hopper_launches.key
        hopper_power_gradients.key_pass[(layout.blocks(launch.block), call.G)](
            *strides, dout, call.sums, ds, *call.slopes(), *call.tables()[1:], dk, dv, dsums_k,
            *call.sequence_tables(launch.block), call.H, call.G, call.out_scale, call.grad_scale,
            LEVELS=call.levels.shape, TILE=TILE, QUERIES=launch.step, FINAL=final, **call.leveled_dims(launch),
        )  # fmt: skip
    else:
        launch = call.config.key
        prefixes, weights, grad_weights, mirror = call.tables()
        backward.key_pass[(layout.blocks(launch.block), call.G)](
            *strides, dout, call.sums, ds, dz, factor, delta, dk, dv, dsums_k, prefixes, weights, grad_weights, mirror,
            call.ends, *call.sequence_tables(launch.block), call.H, call.G, *call.counts(), call.score_scale,
            call.out_scale, call.grad_scale, **call.dims(), BLOCK=launch.block, QUERIES=launch.step,
            STATES=call.chunk > 0, FINAL=final, Z=z, PACKED=layout.packed, **launch.options,
        )  # fmt: skip
    return call.own_channels(dk), dv, dsums_k


def _strided(*tensors: Tensor) -> tuple:
    return tuple(y for x in tensors for y in (x, x.stride(1), x.stride(2)))


@power_backward.register_fake
def _(dout, ds_final, dz_final, q, k, v, log_g, s_init, z_init, cu_seqlens, out, norm, *_):
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    others = [norm.new_empty(0) if x is None else torch.empty_like(x) for x in (log_g, s_init, z_init)]
    return *grads, *others


class RowFactors(NamedTuple):
    """Of every query, as `row_factors` of `backward.py` makes them; float32 [H, B T]."""

    factor: Tensor  # what the output's gradient is multiplied with
    scales: Tensor  # that with scale and decay, as log2 and from the first token of a step of the key pass on:
    near: Tensor  # empty unless that reads them
    delta: Tensor  # its part in the normalizer's gradient


def row_factors(call: Call, dout: Tensor, out: Tensor, norm: Tensor, normalize: bool) -> RowFactors:
    """What all passes of the backward read of the outputs and their gradients [B, T, H, V]."""
    layout = call.layout
    factor = torch.empty(call.H, layout.tokens, device=dout.device, dtype=torch.float32)
    scales, near = (torch.empty_like(factor if call.quadratic else factor[:0]) for _ in range(2))
    delta = torch.empty_like(factor)
    backward.row_factors[(layout.blocks(WEIGH_BLOCK), call.H)](
        out, dout, norm, call.sums, factor, scales, near, delta, layout.cu_seqlens, layout.table(WEIGH_BLOCK),
        layout.length, layout.tokens, call.H, call.out_scale, V=call.V, COLUMNS=call.columns,
        R=call.H // call.G, BLOCK=WEIGH_BLOCK, GATED=call.gated, NORMALIZE=normalize,
        STEP=call.hopper_launches.key.step if call.quadratic else 0, PACKED=layout.packed, **call.early(call.gated),
    )  # fmt: skip
    return RowFactors(factor, scales, near, delta)


def through_states(
    call: Call, s: Tensor, z: Tensor | None, ds: Tensor, dz: Tensor | None, reads_z: bool
) -> Tensor:
    """[chunks, G, STATE_PARTS], float64: the gradient of the gate's sums at the end of every chunk that another
    follows, in parts, given the states before each chunk and the gradients of those after."""
    layout = call.layout
    through = torch.empty(s.shape[0], call.G, STATE_PARTS, device=s.device, dtype=torch.float64)
    backward.through_states[through.shape](
        s, ds, z, dz, call.rows.shares_on(s.device), through, layout.cu_seqlens, layout.table(call.chunk),
        layout.length, call.G, call.row_count, K=call.K, V=call.V, CHUNK=call.chunk, BLOCK=STATE_BLOCK, Z=reads_z,
        PACKED=layout.packed,
    )  # fmt: skip
    return through


def gate_gradient(
    call: Call, dsums_q: Tensor, dsums_k: Tensor, last: Tensor | None, through: Tensor | None = None
) -> Tensor:
    """[B T, G]: of log_g, given that of its sums by queries [H, B T], by keys [G, B T], by the last state [N, G], and
    `through_states`.

    Without these, two passes, as a row of many tokens has few heads: sums of blocks, and within each block the sums
    after each token.
    """
    layout = call.layout
    dlog_g = torch.empty(layout.tokens, call.G, device=dsums_k.device, dtype=torch.float32)
    if through is not None:
        backward.gate_gradient_by_chunk[through.shape[:2]](
            dsums_q, dsums_k, through, last, dlog_g, layout.cu_seqlens, layout.table(call.chunk), layout.length,
            layout.tokens, call.G, R=call.H // call.G, P=call.p, CHUNK=call.chunk, PARTS=STATE_PARTS,
            BLOCK=SHORT_GATE_BLOCK, FINAL=last is not None, PACKED=layout.packed,
        )  # fmt: skip
        return dlog_g
    grid = (layout.blocks(GATE_BLOCK), call.G)
    totals = torch.empty(call.G, grid[0], device=dsums_k.device, dtype=torch.float64)
    sequences = (layout.cu_seqlens, layout.table(GATE_BLOCK), layout.length, layout.tokens)
    options = {"R": call.H // call.G, "P": call.p, "BLOCK": GATE_BLOCK, "PACKED": layout.packed} | call.early()
    backward.gate_totals[grid](dsums_q, dsums_k, totals, *sequences, **options)
    backward.gate_gradient[grid](
        dsums_q, dsums_k, totals, last, dlog_g, *sequences, call.G, FINAL=last is not None, **options
    )
    return dlog_g


def _final_gate_gradient(s: Tensor, z: Tensor, ds: Tensor, dz: Tensor | None) -> Tensor:
    """[N, G]: the gradient of L at the last token through the last state, all of which it decays."""
    last = (s * ds).sum((2, 3))
    return last if dz is None else last + (z * dz).sum(2)


def _from_public(rows: Basis, s: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor | None]:
    matrix = rows.matrix_from_public(z).contiguous() if z is not None else None
    return rows.from_public(s).contiguous(), matrix


def _to_public(rows: Basis, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return rows.to_public(s), rows.matrix_to_public(z) if z.numel() else s.new_empty(0)


def _setup(ctx, inputs, output):
    q, k, v, log_g, s_init, z_init, cu_seqlens, p, scale, normalize, _, chunk, final, tf32, *_ = inputs
    ctx.save_for_backward(q, k, v, log_g, s_init, z_init, cu_seqlens, *output)
    ctx.p, ctx.final, ctx.options = p, final, (p, scale, normalize, chunk, tf32)
    ctx.set_materialize_grads(False)  # kept states have none: zeros as large as they are would be made


def _backward(ctx, dout, _, ds_final, dz_final, *__):
    q, k, v, log_g, s_init, z_init, cu_seqlens, *output = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(output[0])
    if not ctx.final or (ds_final is None and dz_final is None):
        ds_final = dz_final = None
    else:
        ds_final = torch.zeros_like(output[2]) if ds_final is None else ds_final
        dz_final = None if ctx.p != 2 else torch.zeros_like(output[3]) if dz_final is None else dz_final
    dq, dk, dv, dlog_g, ds_init, dz_init = power_backward(
        dout, ds_final, dz_final, q, k, v, log_g, s_init, z_init, cu_seqlens, *output,
        *ctx.options,
    )  # fmt: skip
    present = [g if x is not None else None for g, x in ((dlog_g, log_g), (ds_init, s_init), (dz_init, z_init))]
    return dq, dk, dv, *present, *[None] * 10


power_forward.register_autograd(_backward, setup_context=_setup)
