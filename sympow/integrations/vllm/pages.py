"""States of many requests in pages: what a page holds, and steps of a mixer on the pages. This file needs no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.layers import MixerState
from sympow.layers.base import Mixer


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
    """Describes a page by the shapes and dtypes of the tensors of one sequence's state."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def page_of(state: MixerState) -> Page:
    """Describes a page that contains this state."""
    tensors = list(state.tensors())
    return Page(tuple(tuple(tensor.shape[1:]) for tensor in tensors), tuple(tensor.dtype for tensor in tensors))


def keeps_state(mixer: Mixer) -> bool:
    """Tells whether a page can contain the state of a mixer: the size must not depend on the number of tokens read."""
    return mixer.causal and not mixer.reads_tokens and mixer.init_state(1).rows_may_differ


def step_on_pages(mixer: Mixer, first: MixerState, pages: Sequence[Tensor], x: Tensor, parts: Sequence[Part]) -> Tensor:
    """Mixes the tokens x [N, d] of a batch, and writes the states after them to their pages: [N, d].

    Args:
        mixer: what is stepped.
        first: its state before the first token, of one sequence, with all room.
        pages: each tensor of a state for all pages, [P, ...], in the order of `first.tensors()`. The tensors may have
            any distance from page to page.
        x: the tokens of all requests.
        parts: the requests. Tokens of none of them are 0 in the result.
    """
    y = torch.zeros_like(x)
    for part in parts:
        out, after = mixer.step(x[part.tokens], _taken(first, pages, part))
        for held, tensor in zip(pages, after.counting(0).tensors(), strict=True):
            held.index_copy_(0, part.pages, tensor)
        y[part.tokens] = out
    return y


def _taken(first: MixerState, pages: Sequence[Tensor], part: Part) -> MixerState:
    """Returns the states of a part, copied out of their pages."""
    taken = []
    for held, start in zip(pages, first.tensors(), strict=True):
        begins = (part.read == 0).view(-1, *[1] * (held.ndim - 1))
        taken.append(torch.where(begins, start, held.index_select(0, part.pages)))
    tensors = iter(taken)
    return first.mapped(lambda _: next(tensors)).counting(part.read)
