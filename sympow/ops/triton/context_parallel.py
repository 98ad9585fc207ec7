"""The kernels on rows split over ranks: states are exchanged before the output pass, their gradients before the key
pass.

A rank computes its states once, without an incoming state, and sends the last one. Then it adds the state that it
receives from the ranks before, times the decay up to each chunk (`carried`). The gradients of the states are exchanged
in the same way, with the ranks after. The message has states in the basis of the kernels, so all ranks of a group need
GPUs of one kind. The message is one buffer that the state pass writes to: S of all rows and key/value heads, and Z of
them. After these, which are sent, the buffer has the logarithms of the decays, if there is a gate.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from sympow.ops.context_parallel import exclusive_scan_of_message
from sympow.ops.first_order import first_order
from sympow.ops.runtime.launcher import ceil_div, next_power_of_2
from sympow.ops.triton import launch
from sympow.ops.triton.plan import Call, Gate, Options, Shapes
from sympow.ops.triton.primitives import rounded


class PowerInContext(torch.autograd.Function):
    """Computes out [B, T, H, V] of `power_forward` for this rank's part of every row."""

    @staticmethod
    def forward(ctx, q, k, v, log_g, options: Options, group: dist.ProcessGroup):
        p, scale, normalize, eps, chunk, _, tf32, wide, _ = options
        gradient = any(ctx.needs_input_grad)
        s, z, sums, decays, message = context_states(k, v, log_g, p, scale, chunk, tf32, gradient)
        incoming = _exchange(message, s, z, k, group)
        out, norm, s, z, last = context_output(
            q, k, v, log_g, s, z, sums, decays, message, incoming, p, scale, normalize, eps, chunk, tf32, wide, gradient
        )
        if s.numel():  # the states are kept, and need not be computed again
            incoming = incoming.new_empty(0)
        ctx.save_for_backward(q, k, v, log_g, out, norm, s, z, incoming, last)
        ctx.options, ctx.group = options, group
        return out

    @staticmethod
    @first_order("power_attention")
    def backward(ctx, dout):
        q, k, v, log_g, out, norm, s, z, incoming, last = ctx.saved_tensors
        p, scale, normalize, _, chunk, _, tf32, *_ = ctx.options
        dout = dout.to(v.dtype).contiguous()
        dq, *factors, s_made, z_made, ds, dz, sums, decays, message = context_query_gradient(
            dout, q, k, v, log_g, out, norm, s, z, incoming, p, scale, normalize, chunk, tf32
        )
        if not s.numel():
            s, z = s_made, z_made
        incoming = _exchange(message, ds, dz, k, ctx.group, reverse=True)
        dk, dv, dlog_g = context_key_gradient(
            dout, q, k, v, log_g, *factors, s, z, ds, dz, sums, decays, incoming, last, p, scale, chunk, tf32
        )
        return dq, dk, dv, None if log_g is None else dlog_g, None, None


def _exchange(
    message: Tensor, s: Tensor, z: Tensor, k: Tensor, group: dist.ProcessGroup, reverse: bool = False
) -> Tensor:
    """Returns the incoming S and Z, in the layout of this rank's own message."""
    widths = [x.shape[2] * x.shape[3] for x in (s, z) if x.numel()]
    rows = k.shape[0] * k.shape[2]
    own, log_decay = message.split([rows * sum(widths), message.numel() - rows * sum(widths)])
    return exclusive_scan_of_message(own, log_decay if log_decay.numel() else None, widths, group, reverse=reverse)


def _message_length(shapes: Shapes, gated: bool) -> int:
    """Returns the numbers of elements of S and Z at the end of every row, and of its decay."""
    return sum(math.prod(x) for x in shapes.end_shapes(shapes.p == 2)) + gated * shapes.layout.sequences * shapes.G


def _ends(shapes: Shapes, message: Tensor) -> tuple[Tensor, Tensor]:
    """Returns S [B, G, rows, V] and Z [B, G, K, K], views into a message."""
    s, z = shapes.end_shapes(shapes.p == 2)
    first = math.prod(s)
    return message[:first].view(s), message[first : first + math.prod(z)].view(z)


def own_states(call: Call, gradient: tuple | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns S and Z without an incoming state, the decays to the chunks (empty without a gate), and the message."""
    plan = call.plan
    message = call.gate.sums.new_empty(_message_length(plan, plan.gated))
    s, z = launch.states(call, None, None, _ends(plan, message), plan.p == 2, gradient)
    decays = message.new_empty(0)
    if plan.gated:
        log_decay = message[message.numel() - plan.layout.sequences * plan.G :]
        decays = chunk_decays(call, log_decay, reverse=gradient is not None)
    return s, z, decays, message


def all_states(call: Call, s: Tensor, z: Tensor, decays: Tensor, incoming: Tensor) -> tuple[Tensor, Tensor]:
    """Returns S and Z from those without an incoming state, and the incoming ones."""
    came = _ends(call.plan, incoming)
    gates = decays if call.plan.gated else None
    s, z = (carried(x, y, gates, call.plan.precision) for x, y in zip((s, z), came, strict=True))
    return s, z


@torch.library.custom_op("sympow::context_states", mutates_args=())
def context_states(
    k: Tensor, v: Tensor, log_g: Tensor | None, p: int, scale: float, chunk: int, tf32: bool, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns S and Z before each chunk without an incoming state, the sums of the gate, the decays to the chunks, and
    the message.

    The sums are empty without a gate.
    """
    call = Call(k, k, v, log_g, None, p, scale, chunk, tf32, gradient)
    s, z, decays, message = own_states(call)
    return s, z, call.gate.sums, decays, message


def _fakes_of_own_states(k: Tensor, shapes: Shapes, gated: bool) -> tuple[Tensor, ...]:
    s, z = (k.new_empty(shape) for shape in shapes.state_shapes(shapes.p == 2))
    b, heads = shapes.layout.sequences, shapes.G
    chunks = ceil_div(shapes.layout.length, shapes.chunk)
    sums = k.new_empty((shapes.sums, heads, shapes.layout.tokens) if gated else (0,), dtype=torch.float32)
    decays = k.new_empty((b, heads, chunks) if gated else (0,), dtype=torch.float32)
    return s, z, sums, decays, k.new_empty(_message_length(shapes, gated), dtype=torch.float32)


@context_states.register_fake
def _(k, v, log_g, p, scale, chunk, tf32, gradient):
    shapes = Shapes(k, k, v, None, p, chunk, gradient)
    return _fakes_of_own_states(k, shapes, log_g is not None)


@torch.library.custom_op("sympow::context_output", mutates_args=())
def context_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s: Tensor,
    z: Tensor,
    sums: Tensor,
    decays: Tensor,
    message: Tensor,
    incoming: Tensor,
    p: int,
    scale: float,
    normalize: bool,
    eps: float,
    chunk: int,
    tf32: bool,
    wide: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns out [B, T, H, V], the normalizer [H, B T], and the states that the backward needs.

    These are S and Z with the incoming state, at the boundaries of chunks, if `Shapes.keeps` allows it, and the last
    ones, flat. Each is empty if the backward does not need it.
    """
    call = Call(q, k, v, log_g, None, p, scale, chunk, tf32, gradient, Gate(sums, None, None))
    s, z = all_states(call, s, z, decays, incoming)
    out, norm = launch.output(call, s, z, True, normalize, eps, wide)
    if not gradient or not Shapes(q, k, v, None, p, chunk, True).keeps(True):
        s, z = s.new_empty(0), z.new_empty(0)
    last = message.new_empty(0)
    if gradient and call.plan.gated:
        decay = message[incoming.numel() :].exp().view(q.shape[0], -1, 1, 1)
        last = torch.empty_like(incoming)
        parts = zip(*(_ends(call.plan, x) for x in (message, incoming, last)), strict=True)
        for own, came, total in parts:
            if own.numel():
                torch.addcmul(own, came, decay, out=total)
    return out, norm, s, z, last


@context_output.register_fake
def _(q, k, v, log_g, s, z, sums, decays, message, incoming, p, scale, normalize, eps, chunk, tf32, wide, gradient):
    b, t, h, _ = q.shape
    out = q.new_empty(b, t, h, v.shape[3], dtype=torch.float32 if wide else v.dtype)
    norm = q.new_empty(h if normalize else 0, b * t, dtype=torch.float32)
    shapes = Shapes(q, k, v, None, p, chunk, True)
    kept = gradient and shapes.keeps(True)
    states = [k.new_empty(shape) for shape in (shapes.state_shapes(p == 2) if kept else ((0,), (0,)))]
    return out, norm, *states, incoming.new_empty(incoming.shape if gradient and log_g is not None else 0)


@torch.library.custom_op("sympow::context_query_gradient", mutates_args=())
def context_query_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    out: Tensor,
    norm: Tensor,
    s_kept: Tensor,
    z_kept: Tensor,
    incoming: Tensor,
    p: int,
    scale: float,
    normalize: bool,
    chunk: int,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dq; factor and delta of `RowFactors`; the queries' part in the gradient of the gate's sums; the states
    before each chunk, which are empty if they were kept or are not needed any more; and, as `context_states` does, the
    gradients of the states after each chunk that come through the outputs of this rank alone. `incoming`: the states of
    the forward, if its states were not kept."""
    call = Call(q, k, v, log_g, None, p, scale, chunk, tf32, gradient_rows=True)
    factors = launch.row_factors(call, dout, out, norm, normalize)
    s, z = s_kept, z_kept
    if not s_kept.numel():
        s, z = launch.states(call, *_ends(call.plan, incoming), None, p == 2)
    dq, dsums = launch.query_gradient(call, dout, factors, s, z, True, normalize)
    if s_kept.numel() or not call.plan.restarts:
        s, z = s_kept.new_empty(0), z_kept.new_empty(0)
    ds, dz, decays, message = own_states(call, (dout, factors.factor, factors.delta))
    return dq, factors.factor, factors.delta, dsums, s, z, ds, dz, call.gate.sums, decays, message


@context_query_gradient.register_fake
def _(dout, q, k, v, log_g, out, norm, s_kept, z_kept, incoming, p, scale, normalize, chunk, tf32):
    b, t, h, _ = q.shape
    shapes = Shapes(q, k, v, None, p, chunk, gradient_rows=True)
    rows = [norm.new_empty(n, b * t) for n in (h, h, h if log_g is not None else 0)]
    made = not s_kept.numel() and log_g is not None and p <= 2
    states = [k.new_empty(shape if made else (0,)) for shape in shapes.state_shapes(p == 2)]
    return q.new_empty(q.shape), *rows, *states, *_fakes_of_own_states(k, shapes, log_g is not None)


@torch.library.custom_op("sympow::context_key_gradient", mutates_args=())
def context_key_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    factor: Tensor,
    delta: Tensor,
    dsums: Tensor,
    s: Tensor,
    z: Tensor,
    ds: Tensor,
    dz: Tensor,
    sums: Tensor,
    decays: Tensor,
    incoming: Tensor,
    last: Tensor,
    p: int,
    scale: float,
    chunk: int,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dk, dv and dlog_g (empty without a gate).

    s, z: the states before each chunk, where `Plan.restarts`; `last`: the last states of the forward.
    """
    call = Call(q, k, v, log_g, None, p, scale, chunk, tf32, gradient_rows=True, gate=Gate(sums, None, None))
    ds, dz = all_states(call, ds, dz, decays, incoming)
    none = factor.new_empty(0)
    factors = launch.RowFactors(factor, none, none, delta)
    dk, dv, dsums_k = launch.key_gradient(call, dout, factors, ds, dz, True, p == 2)
    if log_g is None:
        return dk, dv, none
    # The part that comes through the last state, which the decay of the row multiplies as a whole.
    (s_end, z_end), (ds_end, dz_end) = _ends(call.plan, last), _ends(call.plan, incoming)
    end = call.plan.rows.inner(s_end, ds_end)
    if z_end.numel():
        end = end + (z_end * dz_end).sum((2, 3))
    through = launch.through_states(call, s, z, ds, dz, p == 2) if call.plan.restarts else None
    dlog_g = launch.gate_gradient(call, log_g, dsums, dsums_k, end, through)
    return dk, dv, dlog_g.to(log_g.dtype)


@context_key_gradient.register_fake
def _(dout, q, k, v, log_g, factor, *_):
    return k.new_empty(k.shape), v.new_empty(v.shape), factor.new_empty(0) if log_g is None else torch.empty_like(log_g)


_LN_2 = tl.constexpr(0.6931471805599453)
_CHUNKS, _BLOCK = 8, 512  # of a program's tile


def chunk_decays(call: Call, log_decay: Tensor, reverse: bool = False) -> Tensor:
    """Returns log2 of the decay from the row's start to each chunk's start, [B, G, chunks], float32.

    In reverse it is the decay from each chunk's end to the row's end. Rows have a gate. The decay of the whole row
    goes to log_decay [B G], as a natural logarithm.
    """
    plan, sums = call.plan, call.gate.sums
    rows = plan.layout.sequences
    chunks = plan.layout.blocks(plan.chunk) // max(rows, 1)
    decays = sums.new_empty(rows, plan.G, chunks)
    sum_decays[(rows, plan.G)](
        sums, decays, log_decay, plan.layout.length, plan.layout.tokens, plan.G, chunks,
        CHUNK=plan.chunk, COUNT=next_power_of_2(max(chunks, 1)), REVERSE=reverse,
    )  # fmt: skip
    return decays


def carried(states: Tensor, incoming: Tensor, decays: Tensor | None, precision: str) -> Tensor:
    """Returns states [B chunks, G, m, n] + incoming [B G m n] times 2**decays [B, G, chunks].

    The sum is in float32, and rounded once, as a factor of products with the input_precision `precision`.
    """
    if not states.numel():
        return torch.empty_like(states)
    total, G, width = states.shape[0], states.shape[1], states.shape[2] * states.shape[3]
    rows = incoming.numel() // (G * width)
    chunks = total // rows
    out = torch.empty_like(states)
    carry_states[(rows * G, ceil_div(width, _BLOCK), ceil_div(chunks, _CHUNKS))](
        states, incoming, decays, out, G, chunks, width, CHUNKS=_CHUNKS, BLOCK=_BLOCK, GATED=decays is not None,
        PRECISION=precision,
    )  # fmt: skip
    return out


@triton.jit
def sum_decays(
    sums, decays, log_decay, T, tokens, G, chunks, CHUNK: tl.constexpr, COUNT: tl.constexpr, REVERSE: tl.constexpr
):
    """Sums the decays of chunks. Grid: rows, key/value heads. `sums` [G, tokens] start again at every chunk, so the
    last sum of a chunk is the decay of the chunk."""
    n = tl.program_id(0)
    g = tl.program_id(1)
    row = sums + tl.cast(g, tl.int64) * tokens + tl.cast(n, tl.int64) * T
    c = tl.arange(0, COUNT)
    before = c + 1 if REVERSE else c - 1
    between = tl.load(row + tl.minimum((before + 1) * CHUNK, T) - 1, mask=(before >= 0) & (before < chunks), other=0.0)
    # Summed from the side of the incoming state: a difference of sums would lose the precision of small ones.
    decay = tl.cumsum(between, 0, reverse=REVERSE)
    tl.store(decays + (n * G + g) * chunks + c, decay, mask=c < chunks)
    own = tl.load(row + tl.minimum((c + 1) * CHUNK, T) - 1, mask=c < chunks, other=0.0)
    tl.store(log_decay + n * G + g, tl.sum(own, 0) * _LN_2)


@triton.jit
def carry_states(
    states, incoming, decays, out, G, chunks, width,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the incoming state. Grid: pairs of rows and key/value heads, blocks of the width, chunks."""
    pair = tl.cast(tl.program_id(0), tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * CHUNKS + tl.arange(0, CHUNKS)
    here = (c < chunks)[:, None] & (i < width)[None, :]
    offsets = ((pair // G * chunks + c) * G + pair % G)[:, None] * width + i[None, :]
    came = tl.load(incoming + pair * width + i, mask=i < width, other=0.0)[None, :]
    if GATED:
        decay = tl.load(decays + pair * chunks + c, mask=c < chunks, other=0.0)
        came = came * tl.exp2(decay)[:, None]
    state = tl.load(states + offsets, mask=here, other=0.0).to(tl.float32)
    total = rounded((state + came).to(out.dtype.element_ty), PRECISION)
    tl.store(out + offsets, total, mask=here)
