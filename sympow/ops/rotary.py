"""Rotary positions, fixed or data-dependent (conformal): (M13)-(M15).

A position is a float64 number, the sum of the steps beta taken so far; fixed rotary takes steps of 1. Precision
matters: at 1,000,000 tokens an angle computed in float32 is wrong by a tenth of a radian. Positions are
accumulated in float64 and reduced to a fraction of a turn before sine and cosine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, pi, tau
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import has_kernels
from sympow.ops.first_order import first_order
from sympow.ops.rope_scaling import check_scaling, scaled
from sympow.ops.running_sums import blocked_sums
from sympow.ops.types import Rotation

RULES = ("standard", "conformal")


def rotary_frequencies(
    key_dim: int,
    rule: str = "standard",
    max_length: float | None = None,
    base: float | None = None,
    rotary_dim: int | None = None,
    scaling: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns theta_m = theta_1 / N**(2 (m - 1) / K), in radians per unit of position: float64 [K/2], (M13).

    Args:
        key_dim: K, even.
        rule: "standard": theta_1 = 1, N = base (Su et al., 2021). "conformal": theta_1 = 2 pi, N = max_length, the
            longest document (Kumar et al., 2025).
        max_length: N of the conformal rule; only for this rule.
        base: N of the standard rule, 10,000 if None; only for this rule.
        rotary_dim: the number of channels that are rotated, even and at most K. The first rotary_dim / 2 pairs have the
            frequencies of a key of rotary_dim channels, the others 0. None: all channels are rotated.
        scaling: changes the frequencies of the standard rule for a longer context; see
            `sympow.ops.rope_scaling.check_scaling`. None: they are not changed.
        device: of the result.
    """
    if key_dim < 2 or key_dim % 2:
        raise ValueError(f"rotary positions turn pairs of channels: key_dim must be even; got {key_dim}")
    if rule not in RULES:
        raise ValueError(f"the rotation's frequency rule is one of {', '.join(RULES)}; got {rule!r}")
    if (rule == "conformal") != (max_length is not None):
        raise ValueError(f"max_length belongs to the conformal rule and to it alone; got rule={rule!r}, {max_length=}")
    if rule == "conformal" and base is not None:
        raise ValueError(f"the rotation's base belongs to the standard rule; got {rule=}, {base=}")
    first, n = (1.0, 10_000.0 if base is None else float(base)) if max_length is None else (2 * pi, float(max_length))
    if not 1 < n < inf:
        name = "the rotation's base" if max_length is None else "max_length"
        raise ValueError(f"{name} must be greater than 1; got {n:g}")
    turning = key_dim if rotary_dim is None else rotary_dim
    if not 2 <= turning <= key_dim or turning % 2:
        raise ValueError(f"rotary_dim must be even, from 2 to {key_dim}; got {rotary_dim}")
    exponent = torch.arange(turning // 2, dtype=torch.float64, device=device) * (2 / turning)
    frequencies = first * n**-exponent
    if scaling is not None:
        if rule != "standard":
            raise ValueError(f"a scaled rotation is of the standard rule; got {rule=}")
        check_scaling(scaling, turning // 2)
        frequencies = scaled(frequencies, scaling, n)
    return F.pad(frequencies, (0, (key_dim - turning) // 2))


def rotary_positions(beta: Tensor, start: Tensor | None = None) -> Tensor:
    """Computes positions (M14): c_i = start + beta_1 + ... + beta_i, accumulated in float64.

    Args:
        beta: [B, T, G], the steps.
        start: [B, G] float64, the position of the token before the first; zero if None.

    Returns:
        float64 [B, T, G]. Its last row, [:, -1], is the `start` of what follows.
    """
    # Time is the last axis, because a GPU sums along another axis with only one thread for each row.
    positions = blocked_sums(beta.to(torch.float64).transpose(1, 2)).transpose(1, 2)
    return positions if start is None else positions + start[:, None]


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
        from sympow.ops.fused.rotation_kernels import rotate_heads as kernel

        without_norm = (None, None, 0.0)
        return tuple(kernel(x.flatten(2), grouped, frequencies, x.shape[2], 0, *without_norm)[0] for x in tensors)
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
        from sympow.ops.fused.rotation_kernels import rotate_heads as kernel

        grouped = _grouped(positions)
        _check_positions(positions, grouped, (*qkv.shape[:2], kv_heads, key_dim))
        return kernel(qkv, grouped, frequencies, heads, kv_heads, *(norms or (None, None)), norm_eps)
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
    """Returns positions as [1, T, 1], [B, T, 1] or [B, T, G]."""
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
