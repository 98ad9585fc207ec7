"""Power attention by the Triton kernels, as PyTorch operators: `sympow::power_forward` and `sympow::power_backward`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from sympow.ops.feature_map import spow_dim
from sympow.ops.triton import backward, config, forward, hopper_backward, hopper_fused, hopper_output, hopper_quadratic
from sympow.ops.triton.call import SUM_BLOCK, WEIGH_BLOCK, Call
from sympow.ops.triton.rows import Basis

MAX_KEY_DIM = 128
QUADRATIC_OUTPUT = False
QUADRATIC = ""  # of p = 2 on Hopper, the gradients of the quadratic form: "two" passes, "fused" in one
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out [B, T, H, V], normalizer [H, B T], and of the last state s [N, G, D, V], z [N, G, D]: empty unless `final`.

    chunk 0 is the quadratic form, without states. z is kept for p = 2. `tf32`: float32 products may round their factors
    to tf32. `wide`: out is float32, whatever the inputs are.
    """
    call = Call(q, k, v, log_g, cu_seqlens, p, scale, chunk, tf32)
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
    if call.hopper and not call.chunk and QUADRATIC_OUTPUT:
        tuned = config.QUADRATIC_OUTPUT[call.K]
        hopper_quadratic.output_pass[(layout.blocks(tuned.block), call.H)](
            q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2), call.sums, out, norm,
            *call.hopper_tables(tuned, call.H), call.H, call.G, call.out_scale, eps, K=call.K, V=call.V,
            R=call.H // call.G, GATED=call.gated, PACKED=layout.packed, BLOCK=tuned.block, KEYS=tuned.step,
            NORMALIZE=normalize, HOLD=tuned.hold, num_warps=tuned.warps, maxnreg=tuned.registers,
            **call.early(after=call.gated),
        )  # fmt: skip
        return _outputs(call, out, norm, None)
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
        return _outputs(call, out, norm, ends if final else None)
    forward.output_pass[(layout.blocks(launch.block), call.H)](
        q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2), call.sums, s, z, out,
        norm, *tables[:2], *call.sequence_tables(launch.block), call.H, call.G, *call.counts(), call.score_scale,
        call.out_scale, eps, **call.dims(), BLOCK=launch.block, KEYS=launch.step, NORMALIZE=normalize,
        STATES=call.chunk > 0, INIT=s_init is not None, PACKED=layout.packed, **launch.options,
    )  # fmt: skip
    return _outputs(call, out, norm, ends if final else None)


def _outputs(
    call: Call, out: Tensor, norm: Tensor, ends: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if ends is None:
        return out, norm, norm.new_empty(0), norm.new_empty(0)
    s, z = _to_public(call.rows, *ends)
    return out, norm, s, z


@power_forward.register_fake
def _(q, k, v, log_g, s_init, z_init, cu_seqlens, p, scale, normalize, eps, chunk, final, tf32, wide):
    b, t, h, key_dim = q.shape
    out = q.new_empty(b, t, h, v.shape[3], dtype=torch.float32 if wide else v.dtype)
    norm = q.new_empty(h if normalize else 0, b * t, dtype=torch.float32)
    if not final:
        return out, norm, norm.new_empty(0), norm.new_empty(0)
    n = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    s = norm.new_empty(n, k.shape[2], spow_dim(key_dim, p), v.shape[3])
    return out, norm, s, norm.new_empty(*s.shape[:3] if p == 2 else (0,))


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
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    chunk: int,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dlog_g, and ds, dz of the initial state (empty where there was nothing)."""
    dout = dout.to(v.dtype).contiguous()
    call = Call(q, k, v, log_g, cu_seqlens, p, scale, chunk, tf32, backward=True)
    layout, device = call.layout, q.device
    factor, delta, dsums_q = _row_factors(call, dout, out, norm, normalize, eps)
    q, k, v = call.q, call.k, call.v
    strides = (q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2))
    has_init, has_final = s_init is not None, ds_final is not None
    s = z = ds = dz = None
    init_gradient: Sequence[Tensor] = ()
    if call.chunk:
        if s_init is not None:
            s_init, z_init = _from_public(call.rows, s_init, z_init)
        s, z, *_ = call.states(s_init, z_init, False, p == 2 and normalize)
    dq = torch.empty(q.shape, device=device, dtype=q.dtype)
    prefixes, weights, grad_weights, mirror = call.tables()
    if call.hopper and not call.chunk and QUADRATIC:
        dq, dk, dv, dsums_k = _quadratic_gradients(call, dout, factor, delta, dsums_q, normalize)
        dlog_g = _gate_gradient(call, log_g, dsums_q, dsums_k, None)
        return dq, dk, dv, dlog_g, norm.new_empty(0), norm.new_empty(0)
    if call.hopper:
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
    if call.hopper:
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
    last = None if ds_final is None else _final_gate_gradient(s_final, z_final, ds_final, dz_final)
    dlog_g = _gate_gradient(call, log_g, dsums_q, dsums_k, last)
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
    factor, delta, _ = _row_factors(call, dout, out, norm, normalize, eps)
    _, _, *gradient = call.states(None, None, True, p == 2, (dout, factor, delta))
    return _to_public(call.rows, *gradient)


@power_own_gradient.register_fake
def _(dout, q, k, v, log_g, out, norm, p, scale, normalize, eps, chunk, tf32):
    b, _, g, key_dim = k.shape
    s = k.new_empty(b, g, spow_dim(key_dim, p), v.shape[3], dtype=torch.float32)
    return s, s.new_empty(*s.shape[:3] if p == 2 else (0,))


def _row_factors(
    call: Call, dout: Tensor, out: Tensor, norm: Tensor, normalize: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What the output's gradient is multiplied with, its part in the normalizer's, both [H, B T], and the queries' part
    in the gradient of the gate's sums (empty without a gate)."""
    layout = call.layout
    factor = torch.empty(call.H, layout.tokens, device=dout.device, dtype=torch.float32)
    delta = torch.empty_like(factor)
    dsums_q = torch.empty(call.H if call.gated else 0, layout.tokens, device=dout.device, dtype=torch.float32)
    backward.row_factors[(layout.blocks(WEIGH_BLOCK), call.H)](
        out, dout, norm, call.sums, factor, delta, dsums_q, layout.cu_seqlens, layout.table(WEIGH_BLOCK),
        layout.length, layout.tokens, call.H, call.out_scale, eps, V=call.V, P=call.p, COLUMNS=call.columns,
        R=call.H // call.G, BLOCK=WEIGH_BLOCK, GATED=call.gated, NORMALIZE=normalize,
        SCALES=call.hopper and not call.chunk and bool(QUADRATIC), PACKED=layout.packed, **call.early(call.gated),
    )  # fmt: skip
    return factor, delta, dsums_q


def _quadratic_gradients(
    call: Call, dout: Tensor, scales: Tensor, delta: Tensor, dsums_q: Tensor, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the keys' part in the gradient of the gate's sums; without a normalizer fills `dsums_q`."""
    q, k, v = call.q, call.k, call.v
    strides = (q, q.stride(1), q.stride(2), k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2))
    dq, dk, dv = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v))
    dsums_k = torch.empty(call.G if call.gated else 0, call.layout.tokens, device=q.device, dtype=torch.float32)
    dims = {"K": call.K, "V": call.V, "R": call.H // call.G, "GATED": call.gated, "PACKED": call.layout.packed}
    if QUADRATIC == "fused" and call.K in config.QUADRATIC_FUSED and not call.layout.packed:
        if normalize or not call.gated:
            _fused_pass(call, strides, (dout, call.sums, scales, delta), (dq, dk, dv, dsums_k))
            return dq, dk, dv, dsums_k
    query = config.QUADRATIC_QUERY[call.K]
    hopper_quadratic.query_pass[(call.layout.blocks(query.block), call.H)](
        *strides, dout, call.sums, scales, delta, dq, dsums_q, *call.hopper_tables(query, call.H), call.H, call.G,
        call.grad_scale, **dims, BLOCK=query.block, KEYS=query.step, NORMALIZE=normalize, HOLD=query.hold,
        num_warps=query.warps, maxnreg=query.registers, **call.early(),
    )  # fmt: skip
    key = config.QUADRATIC_KEY[call.K]
    hopper_quadratic.key_pass[(call.layout.blocks(key.block), call.G)](
        *strides, dout, call.sums, scales, delta, dk, dv, dsums_k, *call.hopper_tables(key, call.G), call.H, call.G,
        call.grad_scale, **dims, BLOCK=key.block, QUERIES=key.step, HOLD=key.hold,
        num_warps=key.warps, maxnreg=key.registers, **call.early(),
    )  # fmt: skip
    return dq, dk, dv, dsums_k


def _fused_pass(call: Call, strides: tuple, given: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Fills `gradients`, of queries, keys, values and, through keys, of the gate's sums."""
    launch, layout, device = config.QUADRATIC_FUSED[call.K], call.layout, call.q.device
    padded = triton.cdiv(layout.length, launch.block) * launch.block
    turns = torch.zeros(layout.sequences, call.H, padded // launch.step, device=device, dtype=torch.int32)
    acc = torch.empty(layout.sequences, call.H, padded, call.K, device=device, dtype=torch.float32)
    hopper_fused.fused_pass[(layout.blocks(launch.block) * call.G,)](
        *strides, *given, turns, acc, *gradients, layout.length, padded, layout.tokens, call.H, call.G,
        call.grad_scale, K=call.K, V=call.V, R=call.H // call.G, GATED=call.gated, BLOCK=launch.block,
        QUERIES=launch.step, STAGES=launch.stages, ROWS=launch.rows, READ=launch.read, REGISTERS=launch.registers,
        num_warps=launch.warps, maxnreg=launch.limit, OVERLAP=False,
    )  # fmt: skip


def _gate_gradient(call: Call, log_g: Tensor | None, dsums_q: Tensor, dsums_k: Tensor, last: Tensor | None) -> Tensor:
    """dlog_g, empty without a gate. `last` [N, G] reaches each sequence's last token through the last state."""
    if log_g is None:
        return dsums_k.new_empty(0)
    dlog_g = torch.empty(log_g.shape, device=log_g.device, dtype=torch.float32)
    layout, source = call.layout, dsums_k if last is None else last
    backward.gate_gradient[(layout.sequences, call.G)](
        dsums_q, dsums_k, source, dlog_g, layout.cu_seqlens, layout.length, layout.tokens, call.G, R=call.H // call.G,
        P=call.p, BLOCK=SUM_BLOCK, FINAL=last is not None, PACKED=layout.packed, **call.early(),
    )  # fmt: skip
    return dlog_g.to(log_g.dtype)


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
    q, k, v, log_g, s_init, z_init, cu_seqlens, p, scale, normalize, eps, chunk, final, tf32, _ = inputs
    ctx.save_for_backward(q, k, v, log_g, s_init, z_init, cu_seqlens, *output)
    ctx.p, ctx.final, ctx.options = p, final, (p, scale, normalize, eps, chunk, tf32)


def _backward(ctx, dout, _, ds_final, dz_final):
    q, k, v, log_g, s_init, z_init, cu_seqlens, *output = ctx.saved_tensors
    if not ctx.final:
        ds_final = dz_final = None
    elif ctx.p != 2:
        dz_final = None
    dq, dk, dv, dlog_g, ds_init, dz_init = power_backward(
        dout, ds_final, dz_final, q, k, v, log_g, s_init, z_init, cu_seqlens, *output,
        *ctx.options,
    )  # fmt: skip
    present = [g if x is not None else None for g, x in ((dlog_g, log_g), (ds_init, s_init), (dz_init, z_init))]
    return dq, dk, dv, *present, *[None] * 9


power_forward.register_autograd(_backward, setup_context=_setup)
