"""Feature maps whose inner products are powers: <phi(x), phi(y)> = (x . y)**p.

(M6) tpow, the tensor power; (M7) spow, the symmetric power, the smallest; (M8) tspow, symmetric over tiles.
"""

from __future__ import annotations

from decimal import Decimal
from math import comb, factorial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sympow.ops.availability import constant_result, kept, static_shape

LARGEST_POWER = (1 << 63) - 1  # torch takes exponents as int64
MOST_OF_STATES = 20  # the largest power of states and chunks: int64 holds its factorial
_TRACED = 256  # the largest power for which a dimension is computed by a loop


def plain(number: Any) -> Any:
    """Returns an integer or a bool of NumPy, such as `numpy.int64(2)`, as one of Python, and others as they are."""
    if isinstance(number, np.bool_):
        return bool(number)
    return int(number) if isinstance(number, np.integer) else number


def shown(number: Any) -> str:
    """Returns a number as a message shows it: integers beyond int64 by their leading digits."""
    if isinstance(number, int) and abs(number) > LARGEST_POWER:
        return f"{Decimal(number):.1e}"
    return repr(number)


def power_error(p: Any) -> ValueError:
    """Returns the error for what is no power: no integer from 1 to LARGEST_POWER."""
    if isinstance(p, int) and p > LARGEST_POWER:
        return ValueError(f"the power p must be below 2**63, as torch takes exponents as int64; got {shown(p)}")
    return ValueError(f"the power p must be an integer >= 1; got {shown(p)}")


def tpow_dim(key_dim: int, p: int) -> int:
    """Returns the dimension of the tensor power: K**p."""
    _check_dims(key_dim, p)
    return key_dim**p


def spow_dim(key_dim: int, p: int) -> int:
    """Returns the dimension of the symmetric power: C(K + p - 1, p)."""
    _check_dims(key_dim, p)
    if p > _TRACED:
        return comb(key_dim + p - 1, p)
    dim = 1
    for i in range(p):  # not math.comb, which a compiler does not trace for a key dim that it takes as a symbol
        dim = dim * (key_dim + i) // (i + 1)
    return dim


def tspow_dim(key_dim: int, p: int, tile: int) -> int:
    """Returns the dimension of the tiled symmetric power: C(K/tile + p - 1, p) * tile**p."""
    _check_dims(key_dim, p)
    if tile < 1 or key_dim % tile:
        raise ValueError(f"the tile must divide key_dim={key_dim}; got tile={tile}")
    return comb(key_dim // tile + p - 1, p) * tile**p


@kept(32)
def spow_indices(key_dim: int, p: int) -> Tensor:
    """Returns the multi-indices i1 <= ... <= ip of (M7) in lexicographic order: int64 [D, p], CPU.

    Do not write to it. Raises ValueError for p > MOST_OF_STATES.
    """
    _check_dims(key_dim, p)
    if p > MOST_OF_STATES:
        raise ValueError(f"states, and chunks, are computed for p up to {MOST_OF_STATES}; got p = {p}")
    first = torch.arange(key_dim)
    if p == 1:
        return first[:, None]
    rest = spow_indices(key_dim, p - 1)
    # The (p-1)-tuples whose indices are all >= a are a suffix of the lexicographic list.
    suffixes = [rest[spow_offset(key_dim, p - 1, a) :] for a in range(key_dim)]
    heads = torch.cat([torch.full((len(s),), a) for a, s in enumerate(suffixes)])  # lengths a compiler knows
    return torch.cat([heads[:, None], torch.cat(suffixes)], dim=1)


def spow_offset(key_dim: int, p: int, a: int) -> int:
    """Returns the index of the first multi-index with i1 >= a in the lexicographic list."""
    return spow_dim(key_dim, p) - (spow_dim(key_dim - a, p) if a < key_dim else 0)


@kept(32)
def multinomials(key_dim: int, p: int) -> Tensor:
    """Returns p! / prod_k hist_k! of every multi-index, the weights of (M7) squared: float64 [D], CPU.

    Do not write to it. Raises ValueError for p > MOST_OF_STATES.
    """
    index = spow_indices(key_dim, p)
    run = torch.ones(len(index), dtype=torch.float64)
    hist = torch.ones_like(run)
    # prod_k hist_k! is the product, along the sorted tuple, of how often the current index has been seen so far.
    for m in range(1, p):
        run = torch.where(index[:, m] == index[:, m - 1], run + 1, torch.ones_like(run))
        hist *= run
    return factorial(p) / hist


def tpow(x: Tensor, p: int) -> Tensor:
    """Maps [..., K] to [..., K**p] (M6)."""
    _check_dims(x.shape[-1], p)
    out = x
    for _ in range(p - 1):
        out = (out[..., :, None] * x[..., None, :]).flatten(-2)
    return out


def spow(x: Tensor, p: int) -> Tensor:
    """Maps [..., K] to [..., C(K + p - 1, p)] (M7), in lexicographic order."""
    if p == 1:
        return x
    weight, first, *others = _spow_tables(x.shape[-1], p, x.device, x.dtype)
    out = x[..., first] * weight
    for index in others:
        out = out * x[..., index]
    return out


@constant_result
def _spow_tables(key_dim: int, p: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the weights and the p columns of indices of `spow` on a device, where a CUDA graph can read them.

    They are kept for later calls. For torch.compile they are constants.
    """
    return _kept_tables(key_dim, p, device, dtype)


@kept(32)
def _kept_tables(key_dim: int, p: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    with torch.inference_mode(False):  # tensors made in that mode could not be used with gradients later
        columns = [column.to(device, copy=True) for column in spow_indices(key_dim, p).T.contiguous()]
        tables = (multinomials(key_dim, p).sqrt().to(device, dtype), *columns)
    return tuple(static_shape(table) for table in tables)


def tspow(x: Tensor, p: int, tile: int) -> Tensor:
    """Maps [..., K] to [..., C(K/tile + p - 1, p) * tile**p] (M8).

    Tiles are in lexicographic order, with the tensor power inside a tile.
    """
    key_dim = x.shape[-1]
    tspow_dim(key_dim, p, tile)
    tiles = x.unflatten(-1, (key_dim // tile, tile))
    index = spow_indices(key_dim // tile, p).to(x.device)
    weight = multinomials(key_dim // tile, p).sqrt().to(x.device, x.dtype)
    out = tiles[..., index[:, 0], :] * weight[:, None]
    for m in range(1, p):
        out = (out[..., :, None] * tiles[..., index[:, m], None, :]).flatten(-2)
    return out.flatten(-2)


def _check_dims(key_dim: int, p: int) -> None:
    if isinstance(p, bool) or not isinstance(p, int) or not 0 < p <= LARGEST_POWER:
        raise power_error(p)
    if key_dim < 1:
        raise ValueError(f"key_dim must be >= 1; got {key_dim}")
