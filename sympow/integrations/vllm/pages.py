"""States of many requests in pages: what a page holds, and steps of a mixer on the pages. This file needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sympow.layers import MixerState
from sympow.layers.base import Mixer

_ALIGNED = 64  # bytes, as torch's allocator aligns tensors on a CPU: enough for every dtype and for loads of kernels


@dataclass
class Part:
    """The requests of a batch that read equally many tokens, which are stepped as one batch.

    Attributes:
        tokens: int64 [B, T'], the indices of the requests' tokens in the batch.
        pages: int64 [B], the page of each request.
        read: int64 [B], the number of tokens that each request has read before. If it is 0, the page still contains
            the state of an earlier request.
    """

    tokens: Tensor
    pages: Tensor
    read: Tensor


class Page(NamedTuple):
    """Describes the bytes of a page, in which the tensors of one sequence's state in one layer lie one behind another.

    Attributes:
        shapes: those of the tensors, without the batch.
        dtypes: those of the tensors.
        starts: the first byte of every tensor, a multiple of 64.
        size: the number of bytes, a multiple of 64.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    starts: tuple[int, ...]
    size: int

    def tensors(self, pages: Tensor) -> list[Tensor]:
        """Returns views of each tensor for all pages [P, ...], of int8 pages [P, at least `size`] of any stride."""
        parts = []
        for shape, dtype, start in zip(self.shapes, self.dtypes, self.starts, strict=True):
            part = pages[:, start : start + prod(shape) * dtype.itemsize]
            parts.append(part.view(dtype).view(-1, *shape))
        return parts


def page_of(state: MixerState) -> Page:
    """Describes a page that contains this state."""
    tensors = list(state.tensors())
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors)
    dtypes = tuple(tensor.dtype for tensor in tensors)
    starts = [0]
    for shape, dtype in zip(shapes, dtypes, strict=True):
        starts.append(starts[-1] + -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED)
    return Page(shapes, dtypes, tuple(starts[:-1]), starts[-1])


def keeps_state(mixer: Mixer) -> bool:
    """Tells whether a page can contain the state of a mixer: the size must not depend on the number of tokens read."""
    return mixer.causal and not mixer.reads_tokens and mixer.init_state(1).rows_may_differ


def parts_of(query_start: Sequence[int], pages: Tensor, lengths: Tensor) -> list[Part]:
    """Collects the requests of a batch in parts, by the number of tokens that they read.

    Args:
        query_start: the first token of every request in the batch, and the end of the last one. Requests without tokens
            pad the batch, and are in no part.
        pages: [requests], the page of every request.
        lengths: [requests], the number of tokens of every request, those of the batch included.
    """
    rows_of: dict[int, list[int]] = {}
    for row, (start, stop) in enumerate(pairwise(query_start)):
        if start < stop:
            rows_of.setdefault(stop - start, []).append(row)
    parts = []
    for length, rows in rows_of.items():
        index = torch.tensor(rows, device=pages.device)
        first = torch.tensor([query_start[row] for row in rows], device=pages.device)
        tokens = first[:, None] + torch.arange(length, device=pages.device)
        parts.append(Part(tokens, pages[index].long(), lengths[index].long() - length))
    return parts


class DecodingPart:
    """Holds the part of a batch whose requests read one token each, in tensors that stay where they are.

    A CUDA graph reads these tensors again at every replay.

    Args:
        requests: the number of requests that a batch has at most.
        device: the device of the model.
    """

    def __init__(self, requests: int, device: torch.device):
        self.tokens = torch.arange(requests, device=device)[:, None]
        self.pages = torch.zeros(requests, dtype=torch.int64, device=device)
        self.read = torch.ones(requests, dtype=torch.int64, device=device)

    def of(self, pages: Tensor, lengths: Tensor, requests: int, rows: int) -> Part:
        """Returns the part for a batch, and writes its numbers into the tensors.

        Args:
            pages: [at least `requests`], the page of every request.
            lengths: [at least `requests`], the number of tokens of every request, that of the batch included.
            requests: the number of requests.
            rows: the number of rows of the batch. Those behind the requests pad it: they write to page 0, which vLLM
                gives to no request.
        """
        self.pages[:requests] = pages[:requests]
        self.read[:requests] = lengths[:requests] - 1
        self.pages[requests:rows] = 0
        self.read[requests:rows] = 1
        return Part(self.tokens[:rows], self.pages[:rows], self.read[:rows])


def step_on_pages(
    step: Callable[[Tensor, Any], tuple[Sequence[Tensor], Any]],
    first: MixerState,
    pages: Sequence[Tensor],
    x: Tensor,
    parts: Sequence[Part],
    outs: Sequence[Tensor],
) -> None:
    """Computes the outputs for the tokens x [N, d] of a batch, and writes the states after them to their pages.

    Args:
        step: maps x [B, T', d] and a state of B sequences to outputs [B, T', ...] and the states after them.
        first: the state before the first token, of one sequence, with all room.
        pages: each tensor of a state for all pages, [P, ...], in the order of `first.tensors()`. The tensors may have
            any distance from page to page.
        x: the tokens of all requests.
        parts: the requests.
        outs: [N, ...] each, where the outputs are written; 0 for tokens of no request.
    """
    for out in outs:
        out.zero_()
    for part in parts:
        values, after = step(x[part.tokens], _taken(first, pages, part))
        for held, tensor in zip(pages, after.counting(0).tensors(), strict=True):
            held.index_copy_(0, part.pages, tensor)
        for out, value in zip(outs, values, strict=True):
            out[part.tokens] = value


def _taken(first: MixerState, pages: Sequence[Tensor], part: Part) -> MixerState:
    """Returns the states of a part, copied out of their pages."""
    taken = []
    for held, start in zip(pages, first.tensors(), strict=True):
        begins = (part.read == 0).view(-1, *[1] * (held.ndim - 1))
        taken.append(torch.where(begins, start, held.index_select(0, part.pages)))
    tensors = iter(taken)
    return first.mapped(lambda _: next(tensors)).counting(part.read)
