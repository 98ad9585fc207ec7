"""Gradients of first order: a derivative of such a gradient raises an error, and so do derivatives in forward mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sympow.ops.availability import constant_result


def refuse_tangents(name: str, inputs: Iterable[Any]) -> None:
    """Raises NotImplementedError where a kernel would lose derivatives in forward mode.

    These are eager calls of inputs with a tangent, and graphs that are made while forward mode is on.

    Args:
        name: of the function, for the error.
        inputs: tensors and others.
    """
    if _in_forward_mode() and (torch.compiler.is_compiling() or any(map(_has_tangent, inputs))):
        hint = "; expected impl='reference'" if "power_" in name else ""
        raise NotImplementedError(f"sympow's {name} has no derivatives in forward mode (torch.func.jvp){hint}")


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


@constant_result
def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def first_order(name: str) -> Callable[[Callable], Callable]:
    """Makes a decorator of the backward of a `torch.autograd.Function`: its gradients raise when differentiated again.

    `torch.autograd.function.once_differentiable` marks gradients only if an incoming gradient has a graph. With
    `create_graph=True` at the last operation before a loss none has. The gradients would then be constants, and second
    derivatives would lack this function without an error. The gradients here depend on the saved tensors too, so the
    function must save the inputs on which its gradients depend.

    Args:
        name: of the function, for the RuntimeError.
    """

    def decorate(backward: Callable) -> Callable:
        def gradient(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():  # the gradient is not differentiated
                return backward(ctx, *grads)
            context = _Context(ctx)
            with torch.no_grad():
                results = backward(context, *grads)
            return _refused(name, results, (*grads, *context.saved_tensors))

        return gradient

    return decorate


def _refused(name: str, results: Any, sources: tuple) -> tuple:
    results = results if isinstance(results, tuple) else (results,)
    places = [i for i, x in enumerate(results) if x is not None]
    tied = [x for x in sources if x is not None and x.requires_grad]
    marked = _Refused.apply(name, len(places), *(results[i] for i in places), *tied)
    found = dict(zip(places, marked, strict=True))
    return tuple(found.get(i) for i in range(len(results)))


class _Context:
    """Holds the context of a function whose saved tensors have been read, because checkpointing allows one read."""

    def __init__(self, ctx: Any):
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refused(torch.autograd.Function):
    """Returns the first `count` tensors. They depend on all tensors, by a derivative that raises an error."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hint = "; impl='reference' has second derivatives" if "power_" in ctx.name else ""
        raise RuntimeError(f"the gradient of {ctx.name} cannot be differentiated again (create_graph=True){hint}")
