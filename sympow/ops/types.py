"""The types every implementation of power attention shares.

Axes, in this order and with these letters in code and docstrings: B batch, T time, H query heads, G key/value heads
(H is a multiple of G), K key dim, V value dim, D state dim, p power, N packed documents.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sympow.ops.availability import has_values, makes_fakes
from sympow.ops.feature_map import plain, shown, spow_dim
from sympow.ops.memory import check_memory

LARGE = 1 << 30  # bytes, from which on a state is compared with the free memory
_FILE_FORMAT = "sympow.PowerState/1"
State = TypeVar("State")


class OutOfRangeError(ValueError):
    """Says that numbers have left their range: a gate that is not finite and <= 0, or sums too large for their dtype.

    On a CPU, training that diverges ends with this error. On a GPU numbers are not checked, and results contain inf,
    NaN or 0.
    """


def check_state_memory(
    sequences: int, groups: int, key_dim: int, value_dim: int, p: int, device: torch.device | str | None,
    dtype: torch.dtype = torch.float32, copies: int = 1,
) -> None:  # fmt: skip
    """Raises ValueError if `copies` of a state do not fit into the free memory of the device, by default torch's own.

    Compilers and fake tensors need no memory.
    """
    if torch.compiler.is_compiling() or makes_fakes():
        return
    nbytes = dtype.itemsize * copies * sequences * groups * spow_dim(key_dim, p) * (value_dim + 1)
    if nbytes > LARGE:  # a GPU is not asked for its free memory at every call
        check_memory(f"a state of p = {p} and K = {key_dim}", nbytes, device or torch.get_default_device())


def check_states(sequences: int, k: Tensor, v: Tensor, p: int, dtype: torch.dtype | None = None) -> None:
    """Raises ValueError if states of `sequences` sequences with keys k and values v do not fit into the free memory.

    dtype: of the states; None: float32, or float64 for float64 inputs.
    """
    dtype = torch.promote_types(k.dtype, torch.float32) if dtype is None else dtype
    copies = 1 if k.is_cuda else 2  # plain torch multiplies a state with the weights of its rows
    check_state_memory(sequences, k.shape[2], k.shape[3], v.shape[3], p, k.device, dtype, copies)


def narrowed(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts numbers of a float64 state. Raises OutOfRangeError on a CPU for those that `dtype` cannot hold."""
    narrow = state.to(dtype)
    if state.device.type == "cpu" and has_values(state) and not narrow.isfinite().all() and state.isfinite().all():
        raise OutOfRangeError(f"the state leaves the range of {dtype}; use smaller k and v, or float64")
    return narrow


def check_flags(**flags: Any) -> None:
    """Refuses, with a TypeError, options that are neither True nor False: the string "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False; got {value!r}")


def checked_chunk_size(chunk_size: Any) -> int | None:
    """Returns a chunk size as an integer of Python, or None. Raises ValueError unless it is one, of at least 1."""
    if chunk_size is None:
        return None
    chunk_size = plain(chunk_size)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer >= 1, or None; got {shown(chunk_size)}")
    return chunk_size


def check_dense(name: str, x: object) -> Tensor:
    """Returns x. Raises TypeError unless x is a tensor, neither sparse nor nested."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got {'a nested one' if x.is_nested else x.layout}")
    return x


def check_writable(*tensors: Tensor) -> None:
    """Raises ValueError for tensors of a state that a step cannot write into."""
    compiling = torch.compiler.is_compiling()  # a compiler does not trace is_inference
    for x in tensors:
        if not x.is_contiguous() and _overlaps(x):
            raise ValueError(
                "a step that writes into its state needs memory for every number of it; got an expanded or "
                "overlapping one: clone() it"
            )
        if not compiling and x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("a step cannot write into a state that was made in inference mode: clone() it")


def _overlaps(x: Tensor) -> bool:
    """Returns whether numbers of x share memory, or may; a compiler sees only expanded axes."""
    axes = [(step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    if torch.compiler.is_compiling():
        return any(step == 0 for step, _ in axes)
    last = 0  # the offset of the last number, along the axes so far
    for step, size in sorted(axes):
        if step <= last:
            return True
        last += step * (size - 1)
    return False


@dataclass(frozen=True)
class PowerState:
    """Holds what power attention remembers of the past: (M9), in the symmetric-power basis (M7).

    The basis is lexicographic and defined by the mathematics alone, so a state made by one implementation can be
    continued by any other. `scale` is not part of the state, because queries are multiplied by it.

    Attributes:
        s: [B, G, D, V], the decayed sum of phi(k) v^T; float32, or float64 when the inputs were float64.
        z: [B, G, D], the decayed sum of phi(k); same dtype. Kept for every p, also without normalization.
        p: the power; D = spow_dim(K, p).
        key_dim: K.
    """

    s: Tensor
    z: Tensor
    p: int
    key_dim: int

    def __post_init__(self) -> None:
        for name, x in (("s", self.s), ("z", self.z)):
            check_dense(f"{name} of a PowerState", x)
        if self.s.device != self.z.device:
            raise ValueError(f"a PowerState is on one device; got s on {self.s.device}, z on {self.z.device}")
        if isinstance(self.key_dim, bool) or not isinstance(plain(self.key_dim), (int, torch.SymInt)):
            raise TypeError(f"key_dim of a PowerState must be an integer; got {self.key_dim!r}")
        d = spow_dim(self.key_dim, self.p)
        if self.s.ndim != 4 or self.s.shape[2] != d or tuple(self.z.shape) != tuple(self.s.shape[:3]):
            raise ValueError(
                f"a PowerState of p={self.p}, key_dim={self.key_dim} holds s [B, G, {d}, V] and z [B, G, {d}]; "
                f"got s {list(self.s.shape)} and z {list(self.z.shape)}"
            )
        if self.s.dtype != self.z.dtype or self.s.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"a PowerState is float32 (or float64), s and z alike; got s {self.s.dtype} and z {self.z.dtype}"
            )

    @classmethod
    def zeros(
        cls,
        batch: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        p: int = 2,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> PowerState:
        """Returns the state before the first token.

        Raises TypeError or ValueError for sizes that are no integers or negative, and ValueError if there is not enough
        memory for it (compiled code does not compare it).
        """
        batch, kv_heads, key_dim, value_dim, p = map(plain, (batch, kv_heads, key_dim, value_dim, p))
        for name, size in (("batch", batch), ("kv_heads", kv_heads), ("key_dim", key_dim), ("value_dim", value_dim)):
            if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
                raise TypeError(f"{name} must be an integer; got {size!r}")
            if size < 0:
                raise ValueError(f"{name} must not be negative; got {size}")
        d = spow_dim(key_dim, p)
        check_state_memory(batch, kv_heads, key_dim, value_dim, p, device, dtype)
        return cls(
            s=torch.zeros(batch, kv_heads, d, value_dim, device=device, dtype=dtype),
            z=torch.zeros(batch, kv_heads, d, device=device, dtype=dtype),
            p=p,
            key_dim=key_dim,
        )

    @property
    def nbytes(self) -> int:
        """Returns the bytes the state holds; it does not grow with the context."""
        return self.s.nbytes + self.z.nbytes

    @property
    def value_dim(self) -> int:
        """Returns V, the width of the values."""
        return self.s.shape[3]

    def to(self, *args, **kwargs) -> PowerState:
        """Moves or casts, with the arguments of `torch.Tensor.to`."""
        return PowerState(self.s.to(*args, **kwargs), self.z.to(*args, **kwargs), self.p, self.key_dim)

    def detach(self) -> PowerState:
        """Returns the state cut off from the graph of gradients; it shares its tensors."""
        return PowerState(self.s.detach(), self.z.detach(), self.p, self.key_dim)

    def clone(self) -> PowerState:
        """Returns a copy with tensors of its own."""
        return PowerState(self.s.clone(), self.z.clone(), self.p, self.key_dim)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state to a file that `PowerState.load` reads."""
        tensors = {"s": self.s.detach(), "z": self.z.detach()}
        numbers = {"p": self.p, "key_dim": plain(self.key_dim)}
        torch.save({"format": _FILE_FORMAT, **numbers, **tensors}, path)

    @classmethod
    def load(cls, path: str | os.PathLike, *, map_location: torch.device | str | None = None) -> PowerState:
        """Reads a state written by `save`; raises ValueError if the file is truncated or something else."""
        if not os.path.exists(path):
            raise FileNotFoundError(f"no PowerState file at {os.fspath(path)!r}")
        try:
            saved = torch.load(path, map_location=map_location, weights_only=True)
        except Exception as error:
            raise ValueError(f"{os.fspath(path)!r} is not a readable PowerState file (truncated or foreign)") from error
        if not isinstance(saved, dict) or saved.get("format") != _FILE_FORMAT:
            raise ValueError(f"{os.fspath(path)!r} is not a PowerState file: expected format {_FILE_FORMAT!r}")
        try:
            return cls(saved["s"], saved["z"], saved["p"], saved["key_dim"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{os.fspath(path)!r} holds no PowerState: {what}") from error


class PowerOutput(NamedTuple, Generic[State]):
    """Holds what `power_attention` and `power_attention_step` return, whatever the options."""

    out: Tensor
    """[B, T, H, V] in the dtype of v."""
    state: State
    """After the last token: a PowerState, or None if none was asked for; of a step, of the kind that was given."""


class Rotation(NamedTuple):
    """Describes how queries and keys were rotated. `power_attention` then computes the gradient of the positions.

    Attributes:
        positions: float64 [B, T], or [B, T, n] with n dividing G, as in `rotate`. Queries and keys are rotated by
            `positions.detach()`.
        frequencies: float64 [K/2], radians per unit of position.
    """

    positions: Tensor
    frequencies: Tensor
