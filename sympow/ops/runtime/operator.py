"""Registers functions as PyTorch operators, and calls them without PyTorch's dispatcher where nothing needs it.

An operator is what torch.compile, torch.export and fake tensors see of a kernel. A plain call does not need it: the
dispatcher and the checks of `torch.library.custom_op` take longer on the host than the launch of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sympow.ops.first_order import first_order

_LIBRARY = torch.library.Library("sympow", "FRAGMENT")
_DEVICES = ("CUDA", "CPU")  # of kernels; on the CPU they run in Triton's interpreter
ALL_DEVICES = ("CompositeExplicitAutograd",)  # of functions in plain torch

# The context of autograd, then the arguments of the operator and what it returned: keeps what the backward needs.
Setup = Callable[[Any, tuple, Any], None]


def operator(
    fake: Callable,
    setup: Setup | None = None,
    backward: Callable | None = None,
    *,
    changes: tuple[str, ...] = (),
    devices: tuple[str, ...] = _DEVICES,
) -> Callable[[Callable], Callable]:
    """Makes a decorator that registers a function as the operator `sympow::` and its name.

    Args:
        fake: with the arguments of the function, returns tensors of the shapes, dtypes and devices of its results.
        setup: keeps what `backward` needs; None: the operator has no gradient.
        backward: of the context and the gradients of the results, returns those of all arguments, None for numbers.
        changes: the tensors that the function writes into.
        devices: the keys of PyTorch's dispatcher for the devices that the function computes on.

    The function takes tensors, None and numbers by position, has type hints and has no defaults.
    The decorated function is called by position.
    """

    def decorate(function: Callable) -> Callable:
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=changes))
        for device in devices:
            _LIBRARY.impl(name, function, device)
        torch.library.register_fake(f"sympow::{name}", fake, lib=_LIBRARY)
        registered = getattr(torch.ops.sympow, name).default
        gradient = None
        if setup is not None and backward is not None:
            gradient = _gradient(name, function, setup, backward)
            _register_gradient(name, function, registered, setup, backward)

        @wraps(function)
        def call(*inputs: Any) -> Any:
            if torch.compiler.is_compiling() or is_followed(inputs[0]):
                return registered(*inputs)
            if gradient is not None and torch.is_grad_enabled() and _needs_gradient(inputs):
                return gradient(*inputs)
            return function(*inputs)

        return call

    return decorate


def is_followed(x: Tensor) -> bool:
    """Returns whether x is no plain tensor, or a mode of the dispatcher or a transform of torch.func is on."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    return type(x) is not Tensor and type(x) is not torch.nn.Parameter


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x.to(dtype), without a call if x has that dtype, because a call takes time even if it does nothing."""
    return x if x.dtype is dtype else x.to(dtype)


def _needs_gradient(inputs: tuple) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def differentiable(name: str, forward: Callable, backward: Callable) -> Callable:
    """Returns a function with a gradient, for plain calls, that is, where `is_followed` is false.

    Args:
        name: of its node in the graph of autograd.
        forward: the method of that name of a `torch.autograd.Function`.
        backward: its other method, whose results cannot be differentiated.

    Returns:
        A function with the arguments of `forward` after the context.
    """
    function = _function(name, forward, backward)
    # Without the preparation for calls inside of torch.func. mypy does not know the class in C++ that has the method.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _gradient(name: str, function: Callable, setup: Setup, backward: Callable) -> Callable:
    """Returns the function with its gradient, for calls without the dispatcher."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function(*inputs)
        setup(ctx, inputs, output)
        return output

    return differentiable(f"Direct_{name}", forward, backward)


def _register_gradient(name: str, kernel: Callable, registered: Any, setup: Setup, backward: Callable) -> None:
    """Gives a registered operator its gradient; `kernel` is what computes it."""

    def below(keyset: Any, inputs: tuple) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return registered.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    def forward(ctx: Any, *inputs_and_keyset: Any) -> Any:
        *inputs, keyset = inputs_and_keyset
        output = below(keyset, tuple(inputs))
        setup(ctx, tuple(inputs), output)
        return output

    def backward_of_all(ctx: Any, *gradients: Any) -> tuple:
        return (*backward(ctx, *gradients), None)  # None: of the key set

    function = _function(f"Registered_{name}", forward, backward_of_all)

    def autograd(keyset: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and _needs_gradient(inputs):
            return function.apply(*inputs, keyset)
        # Compiled code calls this with gradients off. Then the kernel need not be searched for a second time.
        return below(keyset, inputs) if is_followed(inputs[0]) or inputs[0].is_meta else kernel(*inputs)

    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)


def _function(name: str, forward: Callable, backward: Callable) -> type[torch.autograd.Function]:
    """Returns a function of autograd whose gradient cannot be differentiated."""
    methods = {"forward": forward, "backward": first_order(f"sympow's {name}")(backward)}
    return type(name, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})
