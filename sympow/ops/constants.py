"""Marks functions whose results torch.compile takes as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def constant_result(function: Function) -> Function:
    """Marks a function whose result depends on its arguments alone, for a table that is kept in a cache.

    `torch.compiler.assume_constant_result` sets the same mark, and also loads the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
