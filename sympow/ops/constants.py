"""Tables that functions keep for later calls, as torch.compile, torch.export and fake tensors see them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

_FAKE = torch._C._TorchDispatchModeKey.FAKE
Function = TypeVar("Function", bound=Callable)


def constant_result(function: Function) -> Function:
    """Makes torch.compile take the result of a function as a constant.

    The result depends on the arguments alone, as a table that is kept in a cache does.
    `torch.compiler.assume_constant_result` sets the same mark, and also loads the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def has_values(x: Tensor) -> bool:
    """Returns whether the host can read values of x: not of a meta or a fake tensor, nor while a compiler traces."""
    if torch.compiler.is_dynamo_compiling() or x.is_meta:
        return False
    return type(x) is Tensor or not is_fake(x)


def kept(size: int) -> Callable[[Function], Function]:
    """Makes a decorator that keeps the tables a function returns for its last `size` keys, and only real tensors.

    Under a FakeTensorMode of the caller a table is made for this call alone. For torch.export, which also has such a
    mode, it is a real tensor, which becomes a constant of the graph.
    """

    def decorate(function: Function) -> Function:
        cached = lru_cache(maxsize=size)(function)

        @wraps(function)
        def table(*key: Any, **more: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or torch._C._get_dispatch_mode(_FAKE) is None:
                return cached(*key, **more)
            if torch.compiler.is_compiling():
                with _disable_current_modes():
                    return cached(*key, **more)
            return function(*key, **more)

        return table  # type: ignore[return-value]

    return decorate
