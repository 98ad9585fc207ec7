"""Checks of the arguments of power attention. Every check raises an error with a message of one line."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sympow.ops.availability import has_values
from sympow.ops.decoding_state import DecodingState
from sympow.ops.feature_map import spow_dim
from sympow.ops.types import OutOfRangeError, PowerState, Rotation

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None) -> None:
    """Refuses, with a TypeError or a ValueError, inputs whose shapes, dtypes, devices or gates do not fit."""
    device = q.device if isinstance(q, Tensor) else None
    for name, x, layout in (("q", q, "BTHK"), ("k", k, "BTGK"), ("v", v, "BTGV"), ("log_g", log_g, "BTG")):
        if x is None and name == "log_g":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
        if x.ndim != len(layout):
            raise ValueError(f"{name} must be [{', '.join(layout)}]; got {list(x.shape)}")
        if x.device != device:
            raise ValueError(f"q, k, v and log_g must be on one device; got q on {q.device}, {name} on {x.device}")
    check_float64(q.device)
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"q, k and v must share one dtype of {wanted}; got {q.dtype}, {k.dtype}, {v.dtype}")
    (b, t, h, key_dim), (_, _, g, value_dim) = q.shape, v.shape
    if 0 in (h, g, key_dim, value_dim):
        raise ValueError(f"heads and channels cannot be 0; got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    if k.shape != (b, t, g, key_dim) or v.shape != (b, t, g, value_dim):
        raise ValueError(
            "q [B, T, H, K], k [B, T, G, K] and v [B, T, G, V] must agree in B, T, G and K; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if h % g:
        raise ValueError(f"the query heads H must be a multiple of the key/value heads G; got H = {h}, G = {g}")
    if log_g is None:
        return
    if log_g.shape != (b, t, g):
        raise ValueError(f"log_g must be [B, T, G] = {[b, t, g]}, one gate a key/value head; got {list(log_g.shape)}")
    if log_g.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"log_g must be float32 (or float64), as decays multiply over the context; got {log_g.dtype}")
    if log_g.device.type == "cpu" and has_values(log_g) and log_g.numel():
        low, high = (x.item() for x in log_g.detach().aminmax())
        if not (math.isfinite(low) and high <= 0):
            raise OutOfRangeError(
                f"log_g must be finite and <= 0 (a gate decays, it does not grow); got values from {low} to {high}"
                + (": the weights or the input that it was computed from are not finite" if math.isnan(low) else "")
            )


# Also what a compiler takes as a symbol.
NUMBERS = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)


def plain(number: Any) -> Any:
    """Returns an integer of NumPy, such as `numpy.int64(2)`, as one of Python, and anything else as it is."""
    return int(number) if isinstance(number, np.integer) else number


def check_options(p: int, scale: float | None, normalize: bool, eps: float) -> None:
    """Refuses, with a TypeError or a ValueError, options that `power_attention` does not take."""
    if isinstance(p, bool) or not isinstance(p, int) or p < 1:
        raise ValueError(f"the power p must be an integer >= 1; got {p!r}")
    if normalize and p % 2:
        raise ValueError(
            f"normalize=True needs an even p: with p = {p} weights can be negative and their sum near zero; pass "
            "normalize=False and normalize the output instead"
        )
    for name, number in (("scale", scale), ("eps", eps)):
        if isinstance(number, Tensor):  # whose gradient would be lost
            raise TypeError(f"{name} must be a number; got a torch.Tensor (multiply q by a scale that is learned)")
        if number is not None and not isinstance(number, NUMBERS):
            raise TypeError(f"{name} must be a number; got {number!r}")
    # Comparisons, which a compiler traces for a number that it takes as a symbol, and it does not trace isfinite.
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite; got {scale}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite; got {eps}")


def check_state(state: PowerState | DecodingState | None, batch: int, k: Tensor, v: Tensor, p: int) -> None:
    """Refuses, with a TypeError or a ValueError, a state that does not fit the call, which has `batch` sequences."""
    if state is None:
        return
    if (state.p, state.key_dim) != (p, k.shape[3]):
        raise ValueError(f"the state is of p={state.p}, K={state.key_dim}; this call is of p={p}, K={k.shape[3]}")
    wanted = (batch, k.shape[2], spow_dim(k.shape[3], p), v.shape[3])
    has = tuple(state.s.shape) if isinstance(state, PowerState) else (state.batch, *state.s.shape[1:])
    if has != wanted:
        raise ValueError(f"the state's s must be [B, G, D, V] = {list(wanted)}; got {list(has)}")
    if state.z.dtype != torch.promote_types(k.dtype, torch.float32):
        raise TypeError(
            f"a state for {k.dtype} inputs is {torch.promote_types(k.dtype, torch.float32)}; got {state.z.dtype}"
        )
    if state.s.device != k.device:
        raise ValueError(f"the state must be on the device of the inputs, {k.device}; it is on {state.s.device}")
    if isinstance(state, DecodingState) and torch.promote_types(state.dtype, k.dtype) != state.dtype:
        raise TypeError(f"the state's tail is {state.dtype} and cannot hold keys and values of {k.dtype}")


def check_rotation(rotation: Rotation, q: Tensor, k: Tensor, in_parts: bool) -> None:
    """Refuses, with a TypeError or a ValueError, a rotation that does not fit q and k.

    in_parts: whether the call has packed documents, or rows split over ranks.
    """
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation must be a sympow.ops.Rotation; got {type(rotation).__name__}")
    if in_parts:
        raise ValueError("rotation is of whole rows; with cu_seqlens or context_group rotate with a gradient instead")
    positions, frequencies = rotation
    if positions.dtype != torch.float64 or frequencies.dtype != torch.float64:
        raise TypeError(f"a rotation is float64; got {positions.dtype} positions and {frequencies.dtype} frequencies")
    if tuple(frequencies.shape) != (q.shape[3] // 2,) or q.shape[3] % 2:
        raise ValueError(f"frequencies must be [K/2] for K = {q.shape[3]}; got {list(frequencies.shape)}")
    batch, time, groups = (*positions.shape, 1)[:3] if positions.ndim in (2, 3) else (0, 0, 0)
    if (batch, time) != tuple(q.shape[:2]) or not groups or k.shape[2] % groups:
        raise ValueError(
            f"the positions of a rotation are [B, T] or [B, T, n], n dividing G, for k {list(k.shape)}; got "
            f"{list(positions.shape)}"
        )


def check_context(
    impl: str, q: Tensor, state: PowerState | None, return_state: bool, cu_seqlens: Tensor | None
) -> None:
    """Refuses calls on rows split over ranks that `power_attention` does not take."""
    if cu_seqlens is not None:
        raise ValueError("packed documents (cu_seqlens) cannot be split over ranks (context_group); give whole rows")
    if state is not None or return_state:
        raise ValueError("initial_state and return_state are of whole rows; rows split by context_group have neither")
    if impl == "reference":
        raise ValueError("impl='reference' computes whole rows; it takes no context_group")
    if q.shape[1] == 0:
        raise ValueError(f"a rank's part of rows split by context_group has at least one token; got q {list(q.shape)}")


WITH_FLOAT64 = ("cpu", "cuda", "meta")


def check_float64(device: torch.device) -> None:
    """Raises ValueError for a device that is not there or has no float64, such as that of Apple's GPUs (MPS)."""
    if device.type not in WITH_FLOAT64 and not has_float64(device.type):
        raise ValueError(
            f"sympow computes positions and sums over the context in float64, which the device {str(device)!r} does "
            "not have: use the CPU or a CUDA device"
        )


@lru_cache(maxsize=8)
def has_float64(kind: str) -> bool:
    """Returns whether a tensor of float64 can be made on this kind of device."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        with unset_fake_temporarily():
            torch.zeros(1, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError, AssertionError, ImportError):  # each kind of device raises others
        return False
    return True
