"""Marks functions whose results torch.compile takes as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def constant_result(function: Function) -> Function:
    """Makes torch.compile take the result of a function as a constant.

    The result depends on the arguments alone, as a table that is kept in a cache does.
    `torch.compiler.assume_constant_result` sets the same mark, and also loads the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
