"""Power attention by the Triton kernels, as PyTorch operators: `sympow::power_forward` and `sympow::power_backward`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sympow.ops.feature_map import spow_dim
from sympow.ops.triton import backward, config, forward, hopper_backward, hopper_output, hopper_quadratic
from sympow.ops.triton.call import GATE_BLOCK, WEIGH_BLOCK, Call, Shapes
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
    kept = gradient and _kept_shapes(q, k, v, cu_seqlens, p, chunk, normalize or final) is not None
    call = Call(q, k, v, log_g, cu_seqlens, p, scale, chunk, tf32, kept)
    layout = call.layout
    s = z = None
    ends: Sequence[Tensor] = ()
    if call.chunk:
        if s_init is not None:
            s_init, z_init = _from_public(call.rows, s_init, z_init)
        s, z, *ends = call.states(s_init, z_init, final, p == 2 and (normalize or final))
    out = torch.empty(*q.shape[:3], call.V, device=q.device, dtype=torch.float32 if wide else v.dtype)
    norm = torch.empty(call.H, layout.tokens, device=q.device, dtype=torch.float32)
    if not normalize:
        norm = norm[:0]
    launch, tables = call.config.output, call.tables()
    q, k, v = call.q, call.k, call.v
    if call.hopper or call.hopper_powers:
        launch, (lower, upper) = call.hopper_launches.output, call.counts()
        levels = call.levels if call.chunk and call.leveled else ()
        hopper_output.output_pass[(layout.blocks(launch.block), call.H)](
            q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2), call.sums,
            out if s is None else s, out if z is None else z, out, norm, *(tables[1:3] if levels else tables[:2]),
            *call.hopper_tables(launch, call.H), call.H, call.G, call.out_scale, eps, **call.hopper_dims(launch),
            P=p, LOWER=lower, UPPER=upper, LEVELS=levels, KEYS=launch.step, NORMALIZE=normalize, STATES=call.chunk > 0,
            INIT=s_init is not None, **call.early(after=call.gated),
        )  # fmt: skip
        return _outputs(call, out, norm, ends if final else None, (s, z) if kept else ())
    forward.output_pass[(layout.blocks(launch.block), call.H)](
        q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2), call.sums, s, z, out,
        norm, *tables[:2], *call.sequence_tables(launch.block), call.H, call.G, *call.counts(), call.score_scale,
        call.out_scale, eps, **call.dims(), BLOCK=launch.block, KEYS=launch.step, NORMALIZE=normalize,
        STATES=call.chunk > 0, INIT=s_init is not None, PACKED=layout.packed, **launch.options,
    )  # fmt: skip
    return _outputs(call, out, norm, ends if final else None, (s, z) if kept else ())


def _outputs(
    call: Call, out: Tensor, norm: Tensor, ends: Sequence[Tensor] | None, kept: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    s, z = (norm.new_empty(0), norm.new_empty(0)) if ends is None else _to_public(call.rows, *ends)
    s_kept, z_kept = (norm.new_empty(0) if x is None else x for x in kept or (None, None))
    return out, norm, s, z, s_kept, z_kept


def _kept_shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, p: int, chunk: int, z: bool
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of the states that the forward keeps for the backward, as a state pass costs a tenth of both; None where
    they are too large, and for p > 2, whose forward has rows of its own (`levels.py`)."""
    if not chunk or p > 2:
        return None
    s, z_shape = Shapes(q, k, v, cu_seqlens, p, chunk, gradient_rows=True).kept_shapes(z and p == 2)
    size = math.prod(s) * k.dtype.itemsize
    return (s, z_shape) if size <= config.most_kept(q.device) else None


@power_forward.register_fake
def _(q, k, v, log_g, s_init, z_init, cu_seqlens, p, scale, normalize, eps, chunk, final, tf32, wide, gradient):
    b, t, h, key_dim = q.shape
    out = q.new_empty(b, t, h, v.shape[3], dtype=torch.float32 if wide else v.dtype)
    norm = q.new_empty(h if normalize else 0, b * t, dtype=torch.float32)
    kept = _kept_shapes(q, k, v, cu_seqlens, p, chunk, normalize or final) if gradient else None
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
    eps: float,
    chunk: int,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dlog_g, and ds, dz of the initial state (empty where there was nothing)."""
    dout = dout.to(v.dtype).contiguous()
    call = Call(q, k, v, log_g, cu_seqlens, p, scale, chunk, tf32, gradient_rows=True)
    layout, device = call.layout, q.device
    factor, scales, near, delta, dsums_q = _row_factors(call, dout, out, norm, normalize, eps)
    q, k, v = call.q, call.k, call.v
    strides = (q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2))
    has_init, has_final = s_init is not None, ds_final is not None
    s = z = ds = dz = None
    init_gradient: Sequence[Tensor] = ()
    if s_kept.numel():
        s, z = s_kept, z_kept
    elif call.chunk:
        if s_init is not None:
            s_init, z_init = _from_public(call.rows, s_init, z_init)
        s, z, *_ = call.states(s_init, z_init, False, p == 2 and normalize)
    dq = torch.empty(q.shape, device=device, dtype=q.dtype)
    prefixes, weights, grad_weights, mirror = call.tables()
    if call.quadratic:
        launch = call.hopper_launches.query
        hopper_quadratic.query_pass[(layout.blocks(launch.block), call.H)](
            *(hopper_quadratic.tile_descriptor(x, launch.step) for x in (k, v)), *strides[:3], dout, call.sums, factor,
            delta, dq, dsums_q, layout.length, layout.tokens, call.spread(launch, call.H), call.H,
            call.grad_scale * call.out_scale, K=call.K, V=call.V, R=call.H // call.G, BLOCK=launch.block,
            KEYS=launch.step, GATED=call.gated, NORMALIZE=normalize, num_warps=launch.warps, **call.early(),
        )  # fmt: skip
    elif call.hopper:
        launch = call.hopper_launches.query
        hopper_backward.query_pass[(layout.blocks(launch.block), call.H)](
            *strides, dout, call.sums, dq if s is None else s, dq if z is None else z, factor, delta, dq, dsums_q,
            *call.hopper_tables(launch, call.H), call.H, call.G, call.grad_scale * call.out_scale,
            **call.hopper_dims(launch), KEYS=launch.step, NORMALIZE=normalize, STATES=call.chunk > 0, INIT=has_init,
            **call.early(),
        )  # fmt: skip
    else:
        launch = call.config.query
        backward.query_pass[(layout.blocks(launch.block), call.H)](
            *strides, dout, call.sums, s, z, factor, delta, dq, dsums_q, prefixes, grad_weights, mirror,
            *call.sequence_tables(launch.block), call.H, call.G, *call.counts(), call.score_scale,
            call.grad_scale * call.out_scale, **call.dims(), BLOCK=launch.block, KEYS=launch.step, NORMALIZE=normalize,
            STATES=call.chunk > 0, INIT=has_init, PACKED=layout.packed, **launch.options,
        )  # fmt: skip
    del s, z
    reads_z = p == 2 and (normalize or has_final)
    if call.chunk:
        s_end, z_end = (None, None) if ds_final is None else _from_public(call.rows, ds_final, dz_final)
        ds, dz, *init_gradient = call.states(s_end, z_end, has_init, reads_z, (dout, factor, delta))
    dk = torch.empty(k.shape, device=device, dtype=k.dtype)
    dv = torch.empty(v.shape, device=device, dtype=v.dtype)
    dsums_k = torch.empty(call.G if call.gated else 0, layout.tokens, device=device, dtype=torch.float32)
    if call.quadratic:
        launch = call.hopper_launches.key
        hopper_quadratic.key_pass[(layout.blocks(launch.block), call.G)](
            *strides, dout, call.sums, scales, near, delta, dk, dv, dsums_k, *call.hopper_tables(launch, call.G),
            call.H, call.G, call.grad_scale, K=call.K, V=call.V, R=call.H // call.G, BLOCK=launch.block,
            QUERIES=launch.step, GATED=call.gated, num_warps=launch.warps, **call.early(),
        )  # fmt: skip
    elif call.hopper:
        launch = call.hopper_launches.key
        hopper_backward.key_pass[(layout.blocks(launch.block), call.G)](
            *strides, dout, call.sums, dk if ds is None else ds, dk if dz is None else dz, factor, delta, dk, dv,
            dsums_k, *call.hopper_tables(launch, call.G), call.H, call.G, call.out_scale, call.grad_scale,
            **call.hopper_dims(launch), QUERIES=launch.step, STATES=call.chunk > 0, FINAL=has_final, Z=reads_z,
            **call.early(),
        )  # fmt: skip
    else:
        launch = call.config.key
        backward.key_pass[(layout.blocks(launch.block), call.G)](
            *strides, dout, call.sums, ds, dz, factor, delta, dk, dv, dsums_k, prefixes, weights, grad_weights, mirror,
            *call.sequence_tables(launch.block), call.H, call.G, *call.counts(), call.score_scale, call.out_scale,
            call.grad_scale, **call.dims(), BLOCK=launch.block, QUERIES=launch.step, STATES=call.chunk > 0,
            FINAL=has_final, Z=reads_z, PACKED=layout.packed, **launch.options,
        )  # fmt: skip
    dlog_g = dsums_k.new_empty(0)
    if log_g is not None:
        last = None if ds_final is None else _final_gate_gradient(s_final, z_final, ds_final, dz_final)
        dlog_g = _gate_gradient(call, dsums_q, dsums_k, last).view(log_g.shape).to(log_g.dtype)
    if not has_init:
        return dq, dk, dv, dlog_g, norm.new_empty(0), norm.new_empty(0)
    return dq, dk, dv, dlog_g, *_to_public(call.rows, *init_gradient)


@power_backward.register_fake
def _(dout, ds_final, dz_final, q, k, v, log_g, s_init, z_init, cu_seqlens, out, norm, *_):
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    others = [norm.new_empty(0) if x is None else torch.empty_like(x) for x in (log_g, s_init, z_init)]
    return *grads, *others


@torch.library.custom_op("sympow::power_own_state", mutates_args=())
def power_own_state(
    k: Tensor, v: Tensor, log_g: Tensor | None, p: int, scale: float, chunk: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    """The last s and z of `power_forward` from no initial state, without its outputs."""
    call = Call(k, k, v, log_g, None, p, scale, chunk, tf32)
    _, _, *ends = call.states(None, None, True, p == 2)
    return _to_public(call.rows, *ends)


@power_own_state.register_fake
def _(k, v, log_g, p, scale, chunk, tf32):
    b, _, g, key_dim = k.shape
    s = k.new_empty(b, g, spow_dim(key_dim, p), v.shape[3], dtype=torch.float32)
    return s, s.new_empty(*s.shape[:3] if p == 2 else (0,))


@torch.library.custom_op("sympow::power_own_gradient", mutates_args=())
def power_own_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    out: Tensor,
    norm: Tensor,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    chunk: int,
    tf32: bool,
) -> tuple[Tensor, Tensor]:
    """ds and dz of `power_backward` through the outputs alone, without its other gradients."""
    call = Call(q, k, v, log_g, None, p, scale, chunk, tf32)
    dout = dout.to(v.dtype).contiguous()
    factor, _, _, delta, _ = _row_factors(call, dout, out, norm, normalize, eps)
    _, _, *gradient = call.states(None, None, True, p == 2, (dout, factor, delta))
    return _to_public(call.rows, *gradient)


@power_own_gradient.register_fake
def _(dout, q, k, v, log_g, out, norm, p, scale, normalize, eps, chunk, tf32):
    b, _, g, key_dim = k.shape
    s = k.new_empty(b, g, spow_dim(key_dim, p), v.shape[3], dtype=torch.float32)
    return s, s.new_empty(*s.shape[:3] if p == 2 else (0,))


def _row_factors(
    call: Call, dout: Tensor, out: Tensor, norm: Tensor, normalize: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the output's gradient is multiplied with; that with scale and decay, as log2 and from the first token of a
    step of the key pass on (empty unless that reads them); its part in the normalizer's; all [H, B T]; and the queries'
    part in the gradient of the gate's sums (empty without a gate)."""
    layout = call.layout
    factor = torch.empty(call.H, layout.tokens, device=dout.device, dtype=torch.float32)
    scales, near = (torch.empty_like(factor if call.quadratic else factor[:0]) for _ in range(2))
    delta = torch.empty_like(factor)
    dsums_q = torch.empty(call.H if call.gated else 0, layout.tokens, device=dout.device, dtype=torch.float32)
    backward.row_factors[(layout.blocks(WEIGH_BLOCK), call.H)](
        out, dout, norm, call.sums, factor, scales, near, delta, dsums_q, layout.cu_seqlens, layout.table(WEIGH_BLOCK),
        layout.length, layout.tokens, call.H, call.out_scale, eps, V=call.V, P=call.p, COLUMNS=call.columns,
        R=call.H // call.G, BLOCK=WEIGH_BLOCK, GATED=call.gated, NORMALIZE=normalize,
        STEP=call.hopper_launches.key.step if call.quadratic else 0, PACKED=layout.packed, **call.early(call.gated),
    )  # fmt: skip
    return factor, scales, near, delta, dsums_q


def _gate_gradient(call: Call, dsums_q: Tensor, dsums_k: Tensor, last: Tensor | None) -> Tensor:
    """[B T, G]: of log_g, given that of its sums by queries [H, B T], by keys [G, B T], and by the last state [N, G].

    Two passes, as a row of many tokens has few heads: sums of blocks, and within each block the sums after each token.
    """
    layout = call.layout
    grid = (layout.blocks(GATE_BLOCK), call.G)
    totals = torch.empty(call.G, grid[0], device=dsums_k.device, dtype=torch.float64)
    dlog_g = torch.empty(layout.tokens, call.G, device=dsums_k.device, dtype=torch.float32)
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
    q, k, v, log_g, s_init, z_init, cu_seqlens, p, scale, normalize, eps, chunk, final, tf32, *_ = inputs
    ctx.save_for_backward(q, k, v, log_g, s_init, z_init, cu_seqlens, *output)
    ctx.p, ctx.final, ctx.options = p, final, (p, scale, normalize, eps, chunk, tf32)
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
