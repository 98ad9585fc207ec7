"""The rotation of queries and keys by their positions (M15), and an RMSNorm before it.

On a GPU one kernel each way turns the output of a fused projection into queries, keys and values, separate tensors.
Angles are reduced to one rotation in float64. Everything else is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, pi, tau
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import check_float64, has_kernels
from sympow.ops.first_order import first_order
from sympow.ops.runtime.launcher import MOST_LAUNCHERS, Launcher, ceil_div, jit, next_power_of_2, operator
from sympow.ops.types import Rotation

if TYPE_CHECKING:
    import triton.language as tl

TILE, WARPS = 2048, 4  # elements of a tile of a program: tokens times channels of a head
SHARING = 4  # key/value heads of a program, at most, that share positions and therefore sines

_QUARTERS = 4 / tau  # full rotations in a radian
_QUARTER = pi / 2
_ROUND = 1.5 * 2**52  # a float64 of this size has no fraction: adding it rounds to the nearest integer


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotates the channel pairs (2m - 1, 2m) of x by the angles positions * theta_m (M15).

    Differentiable in x and positions.

    Args:
        x: [B, T, H, K].
        positions: float64 [T], or [B, T], or [B, T, G] with G dividing H (heads of a group have the same positions).
        frequencies: float64 [K/2], radians per unit of position.

    Returns:
        Like x; computed in float32 (float64 for float64 x).
    """
    return rotate_alike((x,), positions, frequencies)[0]


def rotate_alike(tensors: Sequence[Tensor], positions: Tensor, frequencies: Tensor) -> tuple[Tensor, ...]:
    """Rotates several tensors of one dtype, such as queries and keys, as `rotate` does.

    Sines are computed only once.
    """
    grouped = _grouped(positions)
    for x in tensors:
        if x.ndim != 4 or x.shape[-1] != 2 * frequencies.shape[-1]:
            wanted = f"[B, T, H, {2 * frequencies.shape[-1]}]"
            raise ValueError(f"x is {wanted} for these frequencies; got {list(x.shape)}")
        _check_positions(positions, grouped, x.shape)
    if has_kernels(tensors[0].device, tensors[0].dtype):
        rest = (0, None, None, 0.0)  # no keys, no norm
        return tuple(fused_rotate_heads(x.flatten(2), grouped, frequencies, x.shape[2], *rest)[0] for x in tensors)
    if not torch.is_grad_enabled():  # an autograd function costs a decoded token more than the rotation
        return _rotated(grouped, frequencies, tensors)
    return _Rotate.apply(grouped, frequencies, *tensors)


def rotate_heads(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the output of a fused projection into heads, and rotates queries and keys.

    On a GPU this is one kernel. With `norms`, queries and keys are first normed by an RMSNorm over their channels.

    Args:
        qkv: [B, T, H K + G K + G V], the queries of all heads, then the keys, then the values.
        positions: as in `rotate`, their last axis dividing G.
        frequencies: float64 [K/2], radians per unit of position.
        heads: H.
        kv_heads: G, which divides H.
        norms: the weights [K] of the norm of queries and of that of keys; None: no norm.
        norm_eps: the number that the norms add to the mean square.

    Returns:
        q [B, T, H, K] and k [B, T, G, K], rotated, and v [B, T, G, V]. If gradients are on, none of them is a view of
        qkv. So without `norms`, qkv need not stay in memory for the backward.
    """
    key_dim = 2 * frequencies.shape[-1]
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a positive multiple of kv_heads; got {heads=}, {kv_heads=}")
    values = qkv.shape[-1] - (heads + kv_heads) * key_dim
    if qkv.ndim != 3 or values < 1 or values % kv_heads:
        wanted = f"[B, T, ({heads} + {kv_heads}) {key_dim} + {kv_heads} V]"
        raise ValueError(f"qkv is {wanted} for these heads and frequencies; got {list(qkv.shape)}")
    if has_kernels(qkv.device, qkv.dtype):
        grouped = _grouped(positions)
        _check_positions(positions, grouped, (*qkv.shape[:2], kv_heads, key_dim))
        return fused_rotate_heads(qkv, grouped, frequencies, heads, kv_heads, *(norms or (None, None)), norm_eps)
    q, k, v = qkv.split([heads * key_dim, kv_heads * key_dim, values], dim=-1)
    q, k = q.unflatten(-1, (heads, -1)), k.unflatten(-1, (kv_heads, -1))
    if norms is not None:
        q, k = (_normed(x, weight, norm_eps) for x, weight in zip((q, k), norms, strict=True))
    q, k = rotate_alike((q, k), positions, frequencies)
    if torch.is_grad_enabled():
        v = v.contiguous()
    return q, k, v.unflatten(-1, (kv_heads, -1))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMSNorm over the last axis, computed in float32 at least and returned in the dtype of x."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), (x.shape[-1],), weight.to(dtype), eps).to(x.dtype)


def _grouped(positions: Tensor) -> Tensor:
    """Returns positions as [1, T, 1], [B, T, 1] or [B, T, G]. Their device needs float64."""
    check_float64(positions.device)
    shape = {1: (1, -1, 1), 2: (*positions.shape, 1)}.get(positions.ndim, positions.shape)
    return positions.reshape(shape)


def _check_positions(positions: Tensor, grouped: Tensor, shape: Sequence[int]) -> None:
    batch, time, groups = grouped.shape if grouped.ndim == 3 else (-1, -1, -1)
    if batch not in (1, shape[0]) or time != shape[1] or groups < 1 or shape[2] % groups:
        raise ValueError(
            f"positions are [T], [B, T] or [B, T, G], G dividing H, for x {list(shape)}; got {list(positions.shape)}"
        )


def _turns(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of theta c, [B, T, G, 1, K/2]: the angle is reduced to one turn while still in float64."""
    tau = 6.283185307179586  # math.tau as a literal: with dynamic=True a float of a module is an input of the graph
    turn = positions[..., None, None].to(torch.float64) * (frequencies / tau)
    angle = (turn - turn.round()).mul_(tau).to(dtype)
    return angle.cos(), angle.sin()


def _pairs(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Returns the first and the second channels of the pairs of [B, T, H, K], each [B, T, G, R, K/2]."""
    first, second = x.unflatten(-1, (-1, 2)).unflatten(2, (groups, -1)).unbind(-1)
    return first, second


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # No complex numbers: they are slower on a CPU, and torch.compile fuses only real arithmetic.
    a, b = _pairs(x, cos.shape[2])
    # `.to` is not the last call: if it changes nothing, torch.compile of torch 2.11 loses the gradient of the result.
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype).reshape(x.shape)


def _rotated(positions: Tensor, frequencies: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    cos, sin = _turns(positions, frequencies, torch.promote_types(tensors[0].dtype, torch.float32))
    return tuple(_turned(x, cos, sin) for x in tensors)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # not (ctx, positions, ...): where gradients are off torch.compile may then drop ctx
        positions, frequencies, *tensors = inputs
        turned = _rotated(positions, frequencies, tensors)
        # The results are saved and not the inputs, because attention saves the results in any case.
        ctx.save_for_backward(positions, frequencies, *(turned if ctx.needs_input_grad[0] else ()))
        return turned

    @staticmethod
    def backward(ctx, *grads):  # of operations that can be differentiated again
        positions, frequencies, *turned = ctx.saved_tensors
        cos, sin = _turns(positions, frequencies, torch.promote_types(grads[0].dtype, torch.float32))
        dposition = None
        if turned:
            dposition = _position_gradient(turned, grads, frequencies, positions.shape)
        return dposition, None, *(_turned(grad, cos, -sin) for grad in grads)


def _position_gradient(
    turned: Sequence[Tensor], grads: Sequence[Tensor], frequencies: Tensor, shape: Sequence[int]
) -> Tensor:
    """Returns the gradient of positions of `shape`, [B, T, G].

    A rotation by a small angle e moves the rotated pair (a, b) by e (-b, a).
    """
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    dangle = torch.zeros((), dtype=dtype, device=grads[0].device)
    for y, grad in zip(turned, grads, strict=True):
        (a, b), (da, db) = (_pairs(x.to(dtype), shape[2]) for x in (y, grad))
        dangle = dangle + (a * db - b * da).sum(3)
    return (dangle.to(torch.float64) * frequencies).sum(-1).sum_to_size(shape)


def with_positions(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Returns q and k, rotated without a gradient of the positions, such that their gradients reach the positions."""
    if not rotation.positions.requires_grad:
        return q, k
    q, k = _WithPositions.apply(_grouped(rotation.positions), rotation.frequencies, q, k)
    return q, k


def with_positions_twice(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Returns what `with_positions` does, by a rotation by angles of 0, which has derivatives of any order."""
    positions = _grouped(rotation.positions)
    q, k = _rotated(positions - positions.detach(), rotation.frequencies, (q, k))
    return q, k


class _WithPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        positions, frequencies, q, k = inputs
        ctx.save_for_backward(positions, frequencies, q, k)
        return q.view_as(q), k.view_as(k)

    @staticmethod
    @first_order("power_attention with a rotation")
    def backward(ctx, *grads):
        positions, frequencies, *turned = ctx.saved_tensors
        return _position_gradient(turned, grads, frequencies, positions.shape), None, *grads


@jit
def _cos_sin(angle):
    """Returns cosine and sine of a float64 angle as float32.

    The angle is reduced by whole quarters of a rotation in float64. For the rest, at most an eighth of a rotation, the
    Taylor series end with terms below 3e-10 and 2e-9.
    """
    quarters = angle * _QUARTERS
    rounded = quarters + _ROUND
    quarter = rounded.to(tl.int64, bitcast=True).to(tl.int32)  # quarters modulo 2**32
    x = (quarters - (rounded - _ROUND)).to(tl.float32) * _QUARTER
    s = x * x
    sin = x + x * s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880))))
    cos = 1 + s * (-1 / 2 + s * (1 / 24 + s * (-1 / 720 + s * (1 / 40320 + s * (-1 / 3628800)))))
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@jit
def pairs(x):
    """Returns the first and the second channels of the pairs of x [M, N], float32 [M, N / 2]."""
    return tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], x.shape[1] // 2, 2]))


@jit
def _turn(
    flat, flat_st, x, x_st, x_sh, turned, turned_st, raw, raw_st, weight, dweight, eps,
    cos, sin, moved, first, token, inside,
    HEADS: tl.constexpr, K: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rotates HEADS heads from `first` on of flat, which starts at the first head of their kind, into x, or back.

    With `turned`, the results of the forward, it adds the gradient of the angle to `moved` [TOKENS, pairs]. With
    `weight` [K], it norms every head before the rotation; the backward then reads the inputs of the forward from `raw`,
    in the layout of flat, and writes the gradient of the weight to `dweight` [K].
    """
    col = tl.arange(0, 2 * moved.shape[1])
    mask = inside[:, None] & (col < K)[None, :]
    w = tl.full([2 * moved.shape[1]], 1.0, tl.float32)
    total = tl.zeros([2 * moved.shape[1]], tl.float32)
    if weight is not None:
        w = tl.load(weight + col, mask=col < K, other=0.0).to(tl.float32)
    of_raw = token[:, None] * raw_st + col[None, :]
    of_flat = token[:, None] * flat_st + col[None, :]
    of_x = token[:, None] * x_st + col[None, :]
    of_turned = token[:, None] * turned_st + col[None, :]
    for h in range(first, first + HEADS):
        source, target = flat + h * K + of_flat, x + h * x_sh + of_x
        if BACKWARD:
            source, target = target, source
        value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        if weight is not None and not BACKWARD:
            value = value * (1.0 / tl.sqrt(tl.sum(value * value, 1) / K + eps))[:, None] * w[None, :]
        a, b = pairs(value)
        y = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), mask.shape)
        if weight is not None and BACKWARD:
            before = tl.load(raw + h * K + of_raw, mask=mask, other=0.0).to(tl.float32)
            scale = (1.0 / tl.sqrt(tl.sum(before * before, 1) / K + eps))[:, None]
            normed = before * scale
            total += tl.sum(y * normed, 0)
            y = y * w[None, :]
            y = (y - normed * (tl.sum(y * normed, 1) / K)[:, None]) * scale
        tl.store(target, y.to(target.dtype.element_ty), mask=mask)
        if turned is not None:  # a rotation by a small angle e moves the rotated pair (c, d) by e (-d, c)
            c, d = pairs(tl.load(turned + h * K + of_turned, mask=mask, other=0.0))
            moved += c * b - d * a
    if weight is not None and BACKWARD:
        tl.store(dweight + col, total, mask=col < K)
    return moved


@jit(do_not_specialize=["T"])
def turn_heads(
    flat, flat_sb, flat_st, q, q_sb, q_st, q_sh, k, k_sb, k_st, k_sh, v, v_sb, v_st, v_sh, positions, c_sb, c_st, c_sg,
    frequencies, turned_q, turned_k, dpositions, raw, raw_sb, raw_st, weight_q, weight_k, dweights, eps, T, H, G,
    K: tl.constexpr, V: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Computes rotated q and k, and v, from flat [B, T, H K + G K + G V]; with BACKWARD the gradient of flat.

    With turned_q and turned_k, the results of the forward, it also computes dpositions [B, groups, T]. With weight_q
    and weight_k [K], queries and keys are normed first; the backward then reads raw, the input of the forward, and
    writes dweights [programs, 2, K], the part of each program in the gradients of both weights.

    A program has TOKENS tokens, and QUERIES query and KEYS key/value heads that share positions; SPLITS programs have
    the same positions. WIDTH and COLUMNS are the next powers of two of K and V.
    """
    blocks = tl.cdiv(T, TOKENS)
    n = tl.cast(tl.program_id(0) // blocks, tl.int64)
    start = tl.cast(tl.program_id(0) % blocks * TOKENS, tl.int64)
    part = tl.cast(tl.program_id(1), tl.int64)
    group = part // SPLITS
    token = tl.arange(0, TOKENS)
    inside = start + token < T

    positions += n * c_sb + start * c_st + group * c_sg
    pair = tl.arange(0, WIDTH // 2)
    frequency = tl.load(frequencies + pair, mask=pair < K // 2, other=0.0)
    position = tl.load(positions + token * c_st, mask=inside, other=0.0).to(tl.float64)
    cos, sin = _cos_sin(position[:, None] * frequency[None, :])
    if BACKWARD:
        sin = -sin

    flat += n * flat_sb + start * flat_st
    if raw is not None:
        raw += n * raw_sb + start * raw_st
        dweights += (tl.program_id(0) * tl.num_programs(1) + part) * 2 * K
    q += n * q_sb + start * q_st
    moved = tl.zeros([TOKENS, WIDTH // 2], tl.float32)
    if turned_q is not None:
        turned_q += (n * T + start) * (H * K)
        turned_k += (n * T + start) * (G * K)
    moved = _turn(
        flat, flat_st, q, q_st, q_sh, turned_q, H * K, raw, raw_st, weight_q, dweights, eps,
        cos, sin, moved, part * QUERIES, token, inside, QUERIES, K, BACKWARD,
    )  # fmt: skip
    if KEYS > 0:
        flat += H * K
        if raw is not None:
            raw += H * K
            dweights += K
        k += n * k_sb + start * k_st
        moved = _turn(
            flat, flat_st, k, k_st, k_sh, turned_k, G * K, raw, raw_st, weight_k, dweights, eps,
            cos, sin, moved, part * KEYS, token, inside, KEYS, K, BACKWARD,
        )  # fmt: skip
        flat += G * K
        v += n * v_sb + start * v_st
        col = tl.arange(0, COLUMNS)
        mask = inside[:, None] & (col < V)[None, :]
        for g in range(part * KEYS, part * KEYS + KEYS):
            source = flat + g * V + token[:, None] * flat_st + col[None, :]
            target = v + g * v_sh + token[:, None] * v_st + col[None, :]
            if BACKWARD:
                source, target = target, source
            tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)
    if turned_q is not None:
        dposition = tl.sum(moved.to(tl.float64) * frequency[None, :], 1)
        groups = tl.num_programs(1) // SPLITS
        tl.store(dpositions + (n * groups + group) * T + start + token, dposition, mask=inside)


def _parts(qkv: Tensor, frequencies: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns uninitialized q, k and v."""
    (batch, time, width), key_dim = qkv.shape, 2 * frequencies.shape[0]
    value_dim = (width - (heads + kv_heads) * key_dim) // kv_heads if kv_heads else 0
    sizes = ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
    q, k, v = (qkv.new_empty(batch, time, *size) for size in sizes)
    return q, k, v


def _gradients(dq: Tensor, dk: Tensor, dv: Tensor, turned: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns uninitialized dqkv and dpositions."""
    batch, time = dq.shape[:2]
    width = sum(x.shape[2] * x.shape[3] for x in (dq, dk, dv))
    groups = 0 if turned is None else positions.shape[2]
    return dq.new_empty(batch, time, width), positions.new_empty(batch, groups, time)


def _weight_parts(
    dq: Tensor, dk: Tensor, dv: Tensor, raw: Tensor | None, turned: Tensor | None, positions: Tensor
) -> Tensor:
    """Returns an uninitialized tensor for all programs' parts in the gradients of the weights; empty without a norm."""
    if raw is None:
        return dq.new_empty(1, 0, dtype=torch.float32)
    blocks, programs, _ = _grid(dq.shape, dv.shape, positions.shape[2], turned is not None)
    return dq.new_empty(blocks * programs, 2, dq.shape[3], dtype=torch.float32)


def _grid(q: torch.Size, v: torch.Size, groups: int, turned: bool) -> tuple[int, int, int]:
    """Returns the blocks of tokens of all rows, the programs for each, and the tokens of a block.

    It takes the shapes of q and v.
    """
    (batch, time, heads, key_dim), (kv_heads, value_dim) = q, v[2:]
    shared = gcd(heads // groups, kv_heads // groups)
    most = shared if turned else SHARING  # one program computes the whole gradient of a position
    splits = shared // max(n for n in range(1, min(shared, most) + 1) if shared % n == 0)
    width = max(next_power_of_2(key_dim), next_power_of_2(value_dim))
    tokens = max(1, TILE // width)
    return batch * ceil_div(time, tokens), groups * splits, tokens


def _launch(
    flat: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    norm: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float],
    turned_q: Tensor | None = None,
    turned_k: Tensor | None = None,
    dpositions: Tensor | None = None,
    *,
    backward: bool = False,
) -> None:
    """Runs the kernel. `norm`: the input of the forward, weights of queries and keys, their gradients, eps."""
    if not q.numel():
        return
    raw, weight_q, weight_k, dweights, eps = norm
    weight_q, weight_k = (None if x is None else x.contiguous() for x in (weight_q, weight_k))
    strides = [x.stride() for x in (flat, q, k, v, positions)]
    of_raw = None if raw is None else raw.stride()
    kept = _launcher(
        q.shape, v.shape, positions.shape, *strides, of_raw, eps, turned_q is not None, backward, flat.dtype
    )
    with torch.cuda.device_of(flat):
        kept(
            flat=flat, q=q, k=k, v=v, positions=positions, frequencies=frequencies.contiguous(), turned_q=turned_q,
            turned_k=turned_k, dpositions=dpositions, raw=raw, weight_q=weight_q, weight_k=weight_k,
            dweights=None if raw is None else dweights,
        )  # fmt: skip


@lru_cache(maxsize=MOST_LAUNCHERS)
def _launcher(
    q: torch.Size, v: torch.Size, positions: torch.Size, flat_strides: tuple, q_strides: tuple, k_strides: tuple,
    v_strides: tuple, c_strides: tuple, raw_strides: tuple | None, eps: float, turned: bool, backward: bool,
    dtype: torch.dtype,
) -> Launcher:  # fmt: skip
    """Returns the launcher for tensors of these shapes and strides; the compiled code depends on the dtype."""
    (batch, time, heads, key_dim), (kv_heads, value_dim), groups = q, v[2:], positions[2]
    blocks, programs, tokens = _grid(q, v, groups, turned)
    numbers: dict[str, Any] = {"flat_sb": flat_strides[0], "flat_st": flat_strides[1]}
    for name, strides in (("q", q_strides), ("k", k_strides), ("v", v_strides)):
        numbers |= zip((f"{name}_sb", f"{name}_st", f"{name}_sh"), strides[:3], strict=True)
    by_row = c_strides[0] if positions[0] == batch else 0  # one row of positions serves all rows
    numbers |= {"c_sb": by_row, "c_st": c_strides[1], "c_sg": c_strides[2]}
    numbers |= zip(("raw_sb", "raw_st"), (0, 0) if raw_strides is None else raw_strides[:2], strict=True)
    numbers |= {"eps": eps, "T": time, "H": heads, "G": kv_heads}
    constants = {"K": key_dim, "V": value_dim, "QUERIES": heads // programs, "KEYS": kv_heads // programs}
    constants |= {"SPLITS": programs // groups, "TOKENS": tokens, "BACKWARD": backward}
    constants |= {"WIDTH": next_power_of_2(key_dim), "COLUMNS": next_power_of_2(value_dim)}
    return Launcher(turn_heads, (blocks, programs), numbers | constants | {"num_warps": WARPS})


def _like_gradients(dq, dk, dv, turned_q, turned_k, positions, frequencies, qkv, weight_q, weight_k, eps):
    weights = dq.new_empty((0,) if qkv is None else (2, dq.shape[3]), dtype=torch.float32)
    return *_gradients(dq, dk, dv, turned_q, positions), weights


@operator(_like_gradients)
def rotate_heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    turned_q: Tensor | None,
    turned_k: Tensor | None,
    positions: Tensor,
    frequencies: Tensor,
    qkv: Tensor | None,
    weight_q: Tensor | None,
    weight_k: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dqkv, dpositions and the gradients of the weights.

    dpositions is float64 [B, groups, T] if the rotated q and k are given, else empty. The gradients of the weights are
    float32 [2, K] if qkv and the weights are given, else empty.
    """
    dqkv, dpositions = _gradients(dq, dk, dv, turned_q, positions)
    dq, dk, dv = (x if x.stride(3) == 1 else x.contiguous() for x in (dq, dk, dv))
    turned_q, turned_k = (None if x is None else x.contiguous() for x in (turned_q, turned_k))
    raw = None if qkv is None else (qkv if qkv.stride(2) == 1 else qkv.contiguous())
    parts = _weight_parts(dq, dk, dv, raw, turned_q, positions)
    norm = (raw, weight_q, weight_k, parts, eps)
    _launch(dqkv, dq, dk, dv, positions, frequencies, norm, turned_q, turned_k, dpositions, backward=True)
    return dqkv, dpositions, parts.sum(0)


def _keep(ctx, inputs, output):
    qkv, positions, frequencies, _, _, weight_q, weight_k, ctx.eps = inputs
    # Without a norm the rotated queries and keys are kept rather than qkv: attention keeps them in any case.
    turned = output[:2] if ctx.needs_input_grad[1] else (None, None)
    normed = (None, None, None) if weight_q is None else (qkv, weight_q, weight_k)
    ctx.save_for_backward(positions, frequencies, *turned, *normed)


def _backward(ctx, dq, dk, dv):
    positions, frequencies, *turned_and_normed = ctx.saved_tensors
    turned, normed = turned_and_normed[:2], turned_and_normed[2:]
    dqkv, dpositions, dweights = rotate_heads_backward(dq, dk, dv, *turned, positions, frequencies, *normed, ctx.eps)
    dpositions = dpositions.transpose(1, 2).sum_to_size(positions.shape) if ctx.needs_input_grad[1] else None
    of_weights = (None, None)
    if normed[0] is not None:
        of_weights = (dweights[0].to(normed[1].dtype), dweights[1].to(normed[2].dtype))
    return dqkv, dpositions, None, None, None, *of_weights, None


def _like_heads(qkv, positions, frequencies, heads, kv_heads, weight_q, weight_k, eps):
    return _parts(qkv, frequencies, heads, kv_heads)


@operator(_like_heads, _keep, _backward)
def fused_rotate_heads(
    qkv: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    heads: int,
    kv_heads: int,
    weight_q: Tensor | None,
    weight_k: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotated q [B, T, H, K] and k [B, T, G, K], and v [B, T, G, V], from qkv [B, T, H K + G K + G V].

    Args:
        qkv: bfloat16, float16 or float32. With G = 0 there are only queries.
        positions: float64 [1 or B, T, groups], where groups divides H and G.
        frequencies: float64 [K/2].
        heads: H.
        kv_heads: G.
        weight_q: [K] of the RMSNorm of queries before the rotation; None: no norm.
        weight_k: the same for keys.
        eps: what the norm adds to the mean square.
    """
    q, k, v = _parts(qkv, frequencies, heads, kv_heads)
    norm = (None, weight_q, weight_k, None, eps)
    _launch(qkv if qkv.stride(2) == 1 else qkv.contiguous(), q, k, v, positions, frequencies, norm)
    return q, k, v
