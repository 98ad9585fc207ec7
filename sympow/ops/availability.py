"""What the surroundings of a call allow: kernels for a device and a dtype, float64, autocast, values for the host.

Kernels may also lack because the package triton is missing or too old. The meta device has no autocast. Tables that
functions keep for later calls are made such that torch.compile, torch.export and fake tensors can use them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, wraps
from importlib import metadata
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

_LEAST = (3, 6)  # earlier versions have another Gluon, and compile it in another way
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of kernels
_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm")


def why_no_triton() -> str | None:
    """Returns why Triton cannot be used, as the end of a sentence, or None if it can. Triton is not imported."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            too_old = tuple(map(int, re.findall(r"\d+", version)[:2])) < _LEAST
            return f"needs triton >= {'.'.join(map(str, _LEAST))}; found {version}" if too_old else None
    return None


# Why there are no kernels at all, as the end of a sentence; None if there are. It is computed once, and does not load
# triton.
NO_TRITON = why_no_triton()


def unsupported_tensors(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why no kernel takes tensors of this device and dtype, as the end of a sentence; None if they do."""
    if device.type != "cuda" and not _interpreted():
        return f"needs a GPU (or TRITON_INTERPRET=1, to try it out); got tensors on {device}"
    if dtype not in _DTYPES:
        return f"computes in bfloat16, float16 and float32; got {dtype}"
    return None


def refusal_of_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why no kernel supports this device and dtype, as the end of a sentence; None if one does."""
    if NO_TRITON:
        return NO_TRITON
    return unsupported_tensors(device, dtype)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether "auto" takes kernels: on GPUs, not in Triton's interpreter nor for torch.export.

    An exported program then holds operators of torch alone, and runs on any device.
    """
    if is_exporting():
        return False
    return device.type == "cuda" and refusal_of_kernels(device, dtype) is None


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


def is_exporting() -> bool:
    """Returns whether torch.export traces; not so while torch.compile does.

    `torch.compiler.is_exporting` reads the same flag, but in torch 2.11 it is true in all functions that torch.compile
    traces.
    """
    return torch.compiler._is_exporting_flag


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Returns a context in which autocast changes no dtype on the device of x."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype of products under autocast on the device of x, None where autocast is off."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def dtype_in_products(x: Tensor) -> torch.dtype:
    """Returns the dtype in which x is multiplied. Autocast leaves float64 as it is."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x) or x.dtype


def concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Returns torch.cat of tensors. Under autocast, torch.cat refuses a half precision other than that of autocast."""
    if autocast_dtype(tensors[0]) is None:
        return torch.cat(tensors, dim)  # type: ignore[arg-type]
    with without_autocast(tensors[0]):
        return torch.cat(tensors, dim)  # type: ignore[arg-type]


_FAKE = torch._C._TorchDispatchModeKey.FAKE
Function = TypeVar("Function", bound=Callable)


def constant_result(function: Function) -> Function:
    """Makes torch.compile take the result of a function as a constant.

    The result depends on the arguments alone, as a table that is kept in a cache does.
    `torch.compiler.assume_constant_result` sets the same mark, and also loads the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def static_shape(x: Tensor) -> Tensor:
    """Makes torch.compile take the shape of a constant x as numbers, also with dynamic=True, and returns x.

    As symbols they would be those of inputs that happen to have equal sizes. `torch._dynamo.mark_static` sets the same
    mark, and also loads the compiler.
    """
    x._dynamo_static_indices = set(range(x.ndim))  # type: ignore[attr-defined]
    return x


@constant_result
def _interpreted() -> bool:
    """Returns whether Triton's interpreter runs the kernels; torch.compile cannot trace how Triton looks that up."""
    from triton import knobs

    return knobs.runtime.interpret


def has_values(x: Tensor) -> bool:
    """Returns whether the host can read values of x: not of a meta or a fake tensor, nor while a compiler traces."""
    if torch.compiler.is_dynamo_compiling() or x.is_meta:
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):  # vmap's
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return type(x) is Tensor or not is_fake(x)


def makes_fakes() -> bool:
    """Returns whether a FakeTensorMode of the caller makes new tensors, which take no memory."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


def has_symbols(length: int) -> bool:
    """Returns whether a length is a symbol of torch.compile, so that compiled code is for other lengths too."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(length)


def kept(size: int) -> Callable[[Function], Function]:
    """Makes a decorator that keeps the tables a function returns for its last `size` keys, and only real tensors.

    Under a FakeTensorMode of the caller a table is made for this call alone. For torch.export, which also has such a
    mode, it is a real tensor, which becomes a constant of the graph.
    """

    def decorate(function: Function) -> Function:
        @lru_cache(maxsize=size)
        def cached(*key: Any, **more: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return function(*key, **more)
            with torch._C._DisableFuncTorch():  # a tensor made within a transform ends with it
                return function(*key, **more)

        @wraps(function)
        def table(*key: Any, **more: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or not makes_fakes():
                return cached(*key, **more)
            if torch.compiler.is_compiling():
                with _disable_current_modes():
                    return cached(*key, **more)
            return function(*key, **more)

        return table  # type: ignore[return-value]

    return decorate
