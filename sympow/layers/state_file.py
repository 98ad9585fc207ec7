"""Converts states to named tensors and plain values, and back. A file of these contains no code.

A tree of plain values says how a state is built, and names its tensors. It contains the names of types. A name can
only stand for a dataclass of a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from sympow.layers.cache import InputCache, KVCache, capacity
from sympow.layers.registry import FLA_MIXERS, MIXERS
from sympow.layers.state import MixerState
from sympow.ops import DecodingState, PowerState
from sympow.ops.decoding_state import default_capacity

STATE_DTYPES = ("float32", "bfloat16", "int8")

# (type, field): never rounded. These are sums that others are divided by, the keys of a gated cache, which include
# sums of gates, and the inputs of a few tokens, which are small.
_KEPT = {
    ("PowerState", "z"),
    ("LinearAttentionState", "feature_sum"),
    ("GatedCache", "cache"),
    ("GatedWindowCache", "cache"),
    ("ShortConvolutionState", "past"),
}
_LEAST_ROW = 8  # with a scale for each row, shorter rows would hardly be smaller
_SCALE = ".scale"


@dataclass(frozen=True)
class SerializedState:
    """Holds a state as `serialize` returns it.

    Attributes:
        tensors: by name, on any device.
        tree: dictionaries, lists, strings and None, as JSON keeps them. Its text is equally long for any
            number of tokens.
    """

    tensors: dict[str, Tensor]
    tree: Any


def serialize(state: MixerState, dtype: str = "float32") -> SerializedState:
    """Converts a state to named tensors and a tree of plain values.

    The state is not changed. The returned tensors may share its memory.

    Caches are cut to the tokens that they hold.

    Args:
        state: the state.
        dtype: "float32" rounds nothing: every tensor keeps the dtype in which it is held, and a tail of
            decoding stays a tail. "bfloat16" and "int8" fold tails and round tensors of three or more
            dimensions with rows of at least 8; int8 with a float32 scale for each row of the last dimension.
            Positions, sums that others are divided by and keys with sums of gates are never rounded.

    Raises ValueError for another dtype, and for int8 if numbers are not finite; TypeError for a state that holds
    objects other than tensors, states and numbers.
    """
    if dtype not in STATE_DTYPES:
        raise ValueError(f"the dtype of a context is one of {', '.join(STATE_DTYPES)}; got {dtype!r}")
    tensors: dict[str, Tensor] = {}
    return SerializedState(tensors, _packed(state, "state", dtype, tensors))


def deserialize(serialized: SerializedState, device: torch.device | str) -> Any:
    """Builds the state from the result of `serialize`, on a device and in the dtypes of the original state.

    Raises ValueError, KeyError or TypeError for other input than a result of `serialize`.
    """
    return _unpacked(serialized.tree, dict(serialized.tensors), _types(), device)


def fitted(state: Any, like: Any) -> Any:
    """Returns `state` in the form of `like`, the state of the same model before the first token.

    Power attention decodes with a tail on some devices and without a tail on others. So a tail is folded, or an empty
    tail is added. Raises ValueError if the two states are not of one kind.
    """
    if isinstance(state, PowerState | DecodingState) and isinstance(like, PowerState | DecodingState):
        _check_sums(state, like)
    if isinstance(state, DecodingState) and isinstance(like, PowerState):
        return state.folded()
    if isinstance(like, DecodingState) and isinstance(state, PowerState | DecodingState):
        if isinstance(state, PowerState):
            return like.continued(state)
        kept = (state.dtype, state.capacity, state.s.dtype) == (like.dtype, like.capacity, like.s.dtype)
        return state if kept else like.continued(state.folded())
    if like is None or isinstance(like, int | float | Tensor):  # some states hold None before the first token
        _check_leaf(state, like)
        return state
    if not isinstance(like, type(state)):  # a file of an earlier version holds windows as caches
        raise ValueError(f"expected {type(like).__name__}, got {type(state).__name__}")
    if isinstance(like, list | tuple):
        return type(like)(fitted(*pair) for pair in zip(state, like, strict=True))
    return type(like)(
        **{entry.name: fitted(getattr(state, entry.name), getattr(like, entry.name)) for entry in fields(like)}
    )


def _check_sums(state: PowerState | DecodingState, like: PowerState | DecodingState) -> None:
    """Raises ValueError for other sizes than those of `like`: folding a tail makes a row of D for each of its tokens.

    A file holds no slots, which could name one state many times.
    """
    own, wanted = ([each.p, each.key_dim, *each.s.shape[1:]] for each in (state, like))
    if own != wanted:
        raise ValueError(f"expected sums of [p, K, G, D, V] = {wanted}; got {own}")
    if isinstance(state, DecodingState):
        room = default_capacity(state.s.shape[2])
        if state.slots is not None or state.capacity > room:
            slots = "none" if state.slots is None else list(state.slots.shape)
            raise ValueError(f"expected a tail of at most {room} tokens without slots; got {state.capacity}, {slots}")


def _check_leaf(state: Any, like: Any) -> None:
    """Raises ValueError for a tensor of another dtype than that of `like`, and for another number than a count."""
    if isinstance(like, Tensor) and getattr(state, "dtype", None) != like.dtype:
        got = state.dtype if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"expected a tensor of {like.dtype}, got {got}")
    if not isinstance(like, int) or (isinstance(state, Tensor) and state.dtype in (torch.int32, torch.int64)):
        return
    if type(state) is not int or not 0 <= state < 1 << 63:
        raise ValueError(f"expected a number of tokens, got {type(state).__name__}: {state!s:.40}")


def _packed(value: Any, name: str, dtype: str, tensors: dict[str, Tensor], kept: bool = False) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {"int": f"{value:020d}"}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, Tensor):
        return _packed_tensor(value.detach(), name, "float32" if kept else dtype, tensors)
    if isinstance(value, list | tuple):
        items = [_packed(item, f"{name}.{i}", dtype, tensors, kept) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if not is_dataclass(value):
        raise TypeError(f"{name} is a {type(value).__name__}: a context holds tensors, states and numbers")
    if isinstance(value, DecodingState) and dtype != "float32" and not kept:
        value = value.folded()
    kind, packed = type(value).__name__, {}
    for entry in fields(value):
        item = _held(value, entry.name)
        values = isinstance(value, KVCache) and entry.name == "v"  # rounded in a gated cache too
        keep = (kept and not values) or (kind, entry.name) in _KEPT
        packed[entry.name] = _packed(item, f"{name}.{entry.name}", dtype, tensors, keep)
    return {"type": kind, "fields": packed}


def _held(value: Any, field: str) -> Any:
    """Returns a field of a state, without the spare room of a cache."""
    item = getattr(value, field)
    dim = _room_dim(type(value), field)
    if dim is None:
        return item
    return item.narrow(dim, 0, value.length if value.limit is None else min(value.length, value.limit))


def _room_dim(kind: type, field: str) -> int | None:
    """Returns the dimension of a cache's tensor along which its tokens lie."""
    if issubclass(kind, KVCache) and field in ("k", "v"):
        return 2
    return 1 if kind is InputCache and field == "x" else None


def _packed_tensor(x: Tensor, name: str, dtype: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    node: dict[str, Any] = {"tensor": name, "dtype": str(x.dtype).removeprefix("torch.")}
    if dtype == "float32" or not x.is_floating_point() or x.ndim < 3 or x.shape[-1] < _LEAST_ROW:
        strides = x.stride()
        order = sorted(range(x.ndim), key=lambda dim: -strides[dim])  # stable: of equal strides the first
        if not x.is_contiguous() and x.permute(order).is_contiguous():
            node["order"] = order  # the same memory layout as before: with another layout products round differently
            x = x.permute(order)
        tensors[name] = x.contiguous()
    elif dtype == "bfloat16":
        tensors[name] = x.to(torch.bfloat16).contiguous()
    else:
        node["scale"] = name + _SCALE
        tensors[name], tensors[node["scale"]] = _quantized(x, name)
    return node


def _quantized(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns x in int8 from -127 to 127, and the float32 scale of each row [..., 1]."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError(f"{name} is not finite, so it cannot be kept in int8")
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def _unpacked(node: Any, tensors: dict[str, Tensor], types: Mapping[str, type], device: torch.device | str) -> Any:
    """Builds what a node of the tree stands for. It removes the tensors that it uses from `tensors`."""
    if node is None or isinstance(node, bool):
        return node
    if "int" in node:
        return int(node["int"])
    if "float" in node:
        return float.fromhex(node["float"])
    if "tensor" in node:
        return _unpacked_tensor(node, tensors, device)
    for kind in (list, tuple):
        if kind.__name__ in node:
            return kind(_unpacked(item, tensors, types, device) for item in node[kind.__name__])
    cls = types[node["type"]]
    values = {name: _unpacked(item, tensors, types, device) for name, item in node["fields"].items()}
    for name in values:
        dim = _room_dim(cls, name)
        if dim is not None:
            values[name] = _with_room(values[name], values["length"], values["limit"], dim)
    return cls(**values)


def _unpacked_tensor(node: Mapping[str, Any], tensors: dict[str, Tensor], device: torch.device | str) -> Tensor:
    dtype = getattr(torch, node["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{node['dtype']} is no dtype")
    # A copy: what comes from a file may be mapped memory, anyhow aligned.
    x = _taken(tensors, node["tensor"]).to(device, copy=True)
    if "scale" in node:
        scale = _taken(tensors, node["scale"])
        if scale.shape != (*x.shape[:-1], 1):  # a product of other shapes may be much larger than the file
            raise ValueError(f"expected a scale for each row of {list(x.shape)}; got {list(scale.shape)}")
        x = x.float() * scale.to(device)
    if "order" in node:
        x = x.permute(torch.tensor(node["order"]).argsort().tolist())
    return x.to(dtype)


def _taken(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Removes a tensor and returns it. A second use would be a second copy, so that no size of a file bounds them."""
    x = tensors.pop(name, None)
    if x is None:
        raise ValueError(f"expected a tensor of the file that is used once; got {name!r:.80}")
    return x


def _with_room(held: Any, length: Any, limit: Any, dim: int) -> Tensor:
    """Returns the tensor of a cache of `length` tokens, at most `limit` of which it holds, with its spare room.

    Raises ValueError for a tensor of another number of tokens, so that the room depends on the size of the file.
    """
    shape = list(held.shape) if isinstance(held, Tensor) else []
    numbers = [length] if limit is None else [length, limit]
    if len(shape) <= dim or any(type(each) is not int or each < 0 for each in numbers) or shape[dim] != min(numbers):
        raise ValueError(f"expected a cache of {length} tokens, of which it holds at most {limit}; got {shape}")
    room = capacity(length, limit)
    if shape[dim] == room:
        return held
    shape[dim] = room
    grown = held.new_zeros(shape)
    grown.narrow(dim, 0, held.shape[dim]).copy_(held)
    return grown


def _types() -> dict[str, type]:
    """Returns the dataclasses that a state may be made of, by name. It imports all mixers, which define them."""
    for table in (MIXERS, FLA_MIXERS):
        tuple(table.values())
    found: dict[str, type] = {"PowerState": PowerState, "DecodingState": DecodingState}
    left: list[type] = [MixerState]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found
