"""Functions in plain torch that are one operator of a compiled graph, whose backward computes them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor

from sympow.ops.availability import constant_result, is_exporting
from sympow.ops.runtime.launcher import ALL_DEVICES, operator


def recomputed(like: Callable, outputs: int = 1) -> Callable[[Callable], Callable]:
    """Makes a decorator of a function that torch.compile would trace for one length only.

    Compiled code calls the function as an operator, which is right for all lengths. Its backward computes the function
    again, and then the gradients. All other calls are those of the function itself, also of torch.export, and inside of
    torch.func and of forward-mode derivatives, which an operator does not have.

    Args:
        like: with the arguments of the function, returns tensors of the shapes, dtypes and devices of its results.
        outputs: the number of these results.

    The function takes tensors by position, and returns a tensor or a tuple of them, which share no memory with its
    arguments. It does not depend on other tensors, nor on autocast.
    """

    def decorate(function: Callable) -> Callable:
        names, results = list(signature(function).parameters), [f"gradient_{i}" for i in range(outputs)]

        def forward(*tensors: Tensor) -> Any:
            found = function(*tensors)
            return found.contiguous() if outputs == 1 else tuple(x.contiguous() for x in found)

        def backward(*gradients_and_tensors: Tensor) -> Any:
            gradients, tensors = gradients_and_tensors[:outputs], gradients_and_tensors[outputs:]
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in tensors]
                found = function(*leaves)
                pairs = zip((found,) if outputs == 1 else found, gradients, strict=True)
                ys, dys = zip(*((y, dy) for y, dy in pairs if y.requires_grad), strict=True)
            grads = torch.autograd.grad(ys, leaves, dys, allow_unused=True, materialize_grads=True)
            return tuple(x.contiguous() for x in grads)

        def like_backward(*gradients_and_tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.new_empty(x.shape) for x in gradients_and_tensors[outputs:])

        def keep(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs)

        def gradient(ctx: Any, *gradients: Tensor) -> Any:
            return of_backward(*gradients, *ctx.saved_tensors)

        _name(backward, f"{function.__name__}_backward", [*results, *names], len(names))
        _name(forward, function.__name__, names, outputs)
        of_backward = operator(like_backward, devices=ALL_DEVICES)(backward)
        compiled = operator(like, keep, gradient, devices=ALL_DEVICES)(forward)

        @wraps(function)
        def call(*tensors: Tensor) -> Any:
            if torch.compiler.is_dynamo_compiling() and not is_exporting() and not _is_transformed():
                return compiled(*tensors)
            return function(*tensors)

        return call

    return decorate


@constant_result
def _is_transformed() -> bool:
    """Returns whether a graph is made inside of a transform of torch.func, or of forward-mode derivatives."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _name(function: Any, name: str, arguments: list[str], results: int) -> None:
    """Gives a function of any tensors the name, arguments and number of results from which an operator is made."""
    given = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for each in arguments]
    returned = Tensor if results == 1 else tuple[(Tensor,) * results]  # type: ignore[misc]
    function.__name__, function.__signature__ = name, Signature(given, return_annotation=returned)
