"""Queries and keys of norm 1, for the delta rule.

On a GPU one kernel divides both by their norms, and one kernel computes both gradients. The backward reads the results
of the forward, which the delta rule keeps as well, and the norms. So the vectors before the division are not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sympow.ops.availability import has_kernels
from sympow.ops.runtime.launcher import ceil_div, jit, launch, next_power_of_2, operator

if TYPE_CHECKING:
    import triton.language as tl

EPS = 1e-6  # the least norm by which a vector is divided
ELEMENTS, WARPS = 4096, 4  # elements of a tile of vectors
_LARGE = 2.0**60  # squares of larger numbers can leave the range of float32
_SMALLER = 2.0**-70


def unit_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns every query and every key divided by its norm, or by 1e-6 if that is larger.

    Norms are computed in float32 at least. Gradients of kernels are of first order; those of `unit` have derivatives.

    Args:
        q: [B, T, H, K].
        k: [B, T, G, K], in the dtype of q.

    Returns:
        q and k, [B, T, H, K] and [B, T, G, K], in their dtype.
    """
    if has_kernels(q.device, q.dtype):
        q, k, _ = fused_unit_heads(q, k, EPS)
        return q, k
    return unit(q), unit(k)


def unit(x: Tensor) -> Tensor:
    """Returns x [..., K] divided by its norm, or by 1e-6 if that is larger, computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # Squares of the largest numbers of a dtype leave its range, so vectors with such numbers are made smaller first.
    size = wide.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    return normalize(wide / size, dim=-1, eps=EPS).to(x.dtype)


@jit
def _place(tile, rows, heads, stride, K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Returns the indices of a tile of TILE vectors, the places of their elements, and which of the elements exist.

    There are two tensors of places: for a tensor whose tokens are `stride` apart, and for a contiguous one.
    """
    row = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (col < K)[None, :]
    source = (row // heads * stride + row % heads * K)[:, None] + col[None, :]
    return row, source, row[:, None] * K + col[None, :], mask


@jit
def _unit(x, out, norms, eps, tile, rows, heads, stride, K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Divides a tile of vectors of x by their norms, or by eps if that is larger."""
    row, source, target, mask = _place(tile, rows, heads, stride, K, WIDTH, TILE)
    value = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    large = tl.max(tl.abs(value), 1) > _LARGE
    value = tl.where(large[:, None], value * _SMALLER, value)
    norm = tl.sqrt(tl.sum(value * value, 1))
    value *= (1.0 / tl.maximum(norm, tl.where(large, 0.0, eps)))[:, None]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=mask)
    tl.store(norms + row, tl.where(large, norm / _SMALLER, norm), mask=row < rows)


@jit(do_not_specialize=["QUERIES", "KEYS"])
def unit_vectors(
    q, k, unit_q, unit_k, norms, eps, H, G, q_stride, k_stride, QUERIES, KEYS,
    K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes unit_q [QUERIES, K], unit_k [KEYS, K] and norms, float32 [QUERIES + KEYS].

    The H queries of a token are in sequence, and tokens are q_stride elements apart; so are the G keys. WIDTH is the
    next power of two of K. Grid: tiles of TILE queries, then tiles of TILE keys.
    """
    tile, tiles = tl.program_id(0), tl.cdiv(QUERIES, TILE)
    if tile < tiles:
        _unit(q, unit_q, norms, eps, tile, QUERIES, H, q_stride, K, WIDTH, TILE)
    else:
        _unit(k, unit_k, norms + QUERIES, eps, tile - tiles, KEYS, G, k_stride, K, WIDTH, TILE)


@jit
def _unit_gradient(dout, unit, norms, dx, eps, tile, rows, K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Computes the gradient of a tile of vectors from that of their results, the results and the norms."""
    row, _, place, mask = _place(tile, rows, 1, K, K, WIDTH, TILE)
    y = tl.load(unit + place, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dout + place, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norms + row, mask=row < rows, other=0.0)
    divided = norm >= eps  # by the norm, and not by eps
    square = tl.where(divided, tl.sum(y * y, 1), 1.0)  # of a rounded result, not quite 1
    along = tl.where(divided, tl.sum(y * grad, 1) / square, 0.0)
    grad = (grad - y * along[:, None]) * (1.0 / tl.maximum(norm, eps))[:, None]
    tl.store(dx + place, grad.to(dx.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["QUERIES", "KEYS"])
def unit_vectors_backward(
    dunit_q, dunit_k, unit_q, unit_k, norms, dq, dk, eps, QUERIES, KEYS,
    K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes dq [QUERIES, K] and dk [KEYS, K] of `unit_vectors`. Grid: as there."""
    tile, tiles = tl.program_id(0), tl.cdiv(QUERIES, TILE)
    if tile < tiles:
        _unit_gradient(dunit_q, unit_q, norms, dq, eps, tile, QUERIES, K, WIDTH, TILE)
    else:
        _unit_gradient(dunit_k, unit_k, norms + QUERIES, dk, eps, tile - tiles, KEYS, K, WIDTH, TILE)


def _tiles(q: Tensor, k: Tensor) -> tuple[int, dict[str, int]]:
    """Returns the number of programs, and the arguments of both kernels that are numbers."""
    key_dim = q.shape[3]
    width = next_power_of_2(key_dim)
    tile = max(1, ELEMENTS // width)
    queries, keys = q.numel() // key_dim, k.numel() // key_dim
    numbers = {"QUERIES": queries, "KEYS": keys, "K": key_dim, "WIDTH": width, "TILE": tile, "num_warps": WARPS}
    return ceil_div(queries, tile) + ceil_div(keys, tile), numbers


def _by_token(x: Tensor) -> Tensor:
    """Returns x [B, T, heads, K] such that the vectors of a token are in sequence, and tokens equally far apart.

    A view of the output of a fused projection needs no copy.
    """
    (batch, time, heads, key_dim), strides = x.shape, x.stride()
    together = strides[3] == 1 and (heads == 1 or strides[2] == key_dim)
    return x if together and (batch == 1 or strides[0] == time * strides[1]) else x.contiguous()


def _like_gradients(dunit_q, dunit_k, unit_q, unit_k, norms, eps):
    return unit_q.new_empty(unit_q.shape), unit_k.new_empty(unit_k.shape)


@operator(_like_gradients)
def unit_heads_backward(
    dunit_q: Tensor, dunit_k: Tensor, unit_q: Tensor, unit_k: Tensor, norms: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of q and k."""
    tensors = {"dunit_q": dunit_q, "dunit_k": dunit_k, "unit_q": unit_q, "unit_k": unit_k, "norms": norms}
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    dq, dk = (torch.empty_like(tensors[name]) for name in ("unit_q", "unit_k"))
    programs, numbers = _tiles(dq, dk)
    if programs:
        with torch.cuda.device_of(dq):
            launch(unit_vectors_backward, (programs,), {"eps": eps} | numbers, **tensors, dq=dq, dk=dk)
    return dq, dk


def _keep(ctx, inputs, output):
    ctx.eps = inputs[2]
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _backward(ctx, dunit_q, dunit_k, _):
    unit_q, unit_k, norms = ctx.saved_tensors
    dunit_q = torch.zeros_like(unit_q) if dunit_q is None else dunit_q
    dunit_k = torch.zeros_like(unit_k) if dunit_k is None else dunit_k
    return *unit_heads_backward(dunit_q, dunit_k, unit_q, unit_k, norms, ctx.eps), None


def _like_units(q, k, eps):
    vectors = (q.numel() + k.numel()) // q.shape[3]
    return q.new_empty(q.shape), k.new_empty(k.shape), q.new_empty(vectors, dtype=torch.float32)


@operator(_like_units, _keep, _backward)
def fused_unit_heads(q: Tensor, k: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Divides q [B, T, H, K] and k [B, T, G, K] by their norms, or by eps if that is larger.

    Returns:
        q and k after the division, and the norms, float32 [B T H + B T G].
    """
    q, k = _by_token(q), _by_token(k)
    unit_q, unit_k, norms = _like_units(q, k, eps)
    programs, numbers = _tiles(q, k)
    if programs:
        numbers |= {"H": q.shape[2], "G": k.shape[2], "q_stride": q.stride(1), "k_stride": k.stride(1)}
        with torch.cuda.device_of(q):
            launch(
                unit_vectors, (programs,), {"eps": eps} | numbers,
                q=q, k=k, unit_q=unit_q, unit_k=unit_k, norms=norms,
            )  # fmt: skip
    return unit_q, unit_k, norms
