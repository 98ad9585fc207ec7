"""Packed documents in layers: their borders, and a function applied to each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from sympow.ops.availability import concatenated, dtype_in_products, is_exporting
from sympow.ops.packed import borders, check_borders
from sympow.ops.runtime.launcher import ALL_DEVICES, operator

# What `document_operator` has made operators of, by name.
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {}


def document_bounds(cu_seqlens: Tensor, x: Tensor) -> list[int]:
    """Returns the cu_seqlens of x [1, T, ...] as plain numbers, checked as in the op; documents may be empty."""
    check_borders(cu_seqlens, x.shape[0])
    return borders(cu_seqlens, x.shape[1])


def per_document(function: Callable[..., Tensor], cu_seqlens: Tensor | None, *tensors: Tensor) -> Tensor:
    """Calls function(*tensors), all [B, T, ...]; with cu_seqlens on each document alone, joined along time.

    Compiled code calls the function without compiling it, or there would be a graph for every length of a document.
    """
    if cu_seqlens is None:
        return function(*tensors)
    if _compiles():
        return torch.compiler.disable(_each)(function, cu_seqlens, *tensors)
    return _each(function, cu_seqlens, *tensors)


def document_operator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns call(cu_seqlens, *tensors, window=None), which is `per_document`, and one operator in compiled code.

    Args:
        function: a function of one to four tensors [B, T, H or G, ...], and of `window` where the call has one. Its
            result has the dtype of the first tensor and its shape, but for the last axis, which is that of the third.
            It does not depend on other tensors, such as weights. If there are three tensors, they are queries, keys and
            values of products that autocast computes in its dtype; otherwise autocast changes nothing.
    """
    name = function.__name__
    _FUNCTIONS[name] = function

    def call(cu_seqlens: Tensor | None, *tensors: Tensor, window: int | None = None) -> Tensor:
        if cu_seqlens is not None and _compiles():
            check_borders(cu_seqlens, tensors[0].shape[0])
            if len(tensors) == 3:  # the operator sees no autocast
                tensors = tuple(x.to(dtype_in_products(x)) for x in tensors)
            missing = (None,) * (4 - len(tensors))
            return each_document(*tensors, *missing, cu_seqlens, name, window)
        return per_document(_with_window(function, window), cu_seqlens, *tensors)

    return call


def _compiles() -> bool:
    """Returns whether torch.compile traces, and not torch.export, where borders have no values at any time."""
    return torch.compiler.is_dynamo_compiling() and not is_exporting()


def _with_window(function: Callable[..., Tensor], window: int | None) -> Callable[..., Tensor]:
    return function if window is None else lambda *tensors: function(*tensors, window)


def _each(function: Callable[..., Tensor], cu_seqlens: Tensor, *tensors: Tensor) -> Tensor:
    bounds = document_bounds(cu_seqlens, tensors[0])
    return concatenated([function(*document) for document in _split(bounds, tensors)], dim=1)


def _split(bounds: list[int], tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yields the parts of tensors [1, T, ...] that belong to each document that has tokens."""
    lengths = [stop - start for start, stop in pairwise(bounds) if start < stop]
    # split, not slices: the gradient of a slice is as long as the whole row
    return zip(*(tensor.split(lengths, dim=1) for tensor in tensors), strict=True)


def _like_backward(dout, first, second, third, fourth, *_):
    given = (x if x is None else x.new_empty(x.shape) for x in (first, second, third, fourth))
    return tuple(first.new_empty(0) if x is None else x for x in given)


@operator(_like_backward, devices=ALL_DEVICES)
def each_document_backward(
    dout: Tensor,
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    cu_seqlens: Tensor,
    name: str,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of the four tensors, empty for None, and the forward again, one document at a time."""
    results = _like_backward(dout, first, second, third, fourth)
    function = _with_window(_FUNCTIONS[name], window)
    given = [(x, dx) for x, dx in zip((first, second, third, fourth), results, strict=True) if x is not None]
    tensors, grads = zip(*given, strict=True)
    for *parts, own in _split(document_bounds(cu_seqlens, first), (*tensors, *grads, dout)):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in parts[: len(tensors)]]
            found = torch.autograd.grad(function(*leaves), leaves, own)
        for into, part in zip(parts[len(tensors) :], found, strict=True):
            into.copy_(part)
    return results


def _keep(ctx, inputs, output):
    *tensors, ctx.name, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout):
    tensors = ctx.saved_tensors
    grads = each_document_backward(dout, *tensors, ctx.name, ctx.window)
    return *(None if x is None else dx for x, dx in zip(tensors[:4], grads, strict=True)), None, None, None


def _like_forward(first, second, third, fourth, *_):
    return first.new_empty(*first.shape[:-1], (first if third is None else third).shape[-1])


@operator(_like_forward, _keep, _backward, devices=ALL_DEVICES)
def each_document(
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    cu_seqlens: Tensor,
    name: str,
    window: int | None,
) -> Tensor:
    """Computes the function `name` of `document_operator` for each document alone."""
    tensors = [x for x in (first, second, third, fourth) if x is not None]
    out = _like_forward(first, second, third, fourth)
    function = _with_window(_FUNCTIONS[name], window)
    for *parts, into in _split(document_bounds(cu_seqlens, first), (*tensors, out)):
        into.copy_(function(*parts))
    return out
