"""Sliding-window attention on GPUs by torch's flex_attention: its kernel skips blocks outside the windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.runtime.launcher import next_power_of_2

_BLOCK = 128  # queries and keys that flex_attention skips, takes whole, or masks


def suits_flex(q: Tensor, v: Tensor) -> bool:
    """Returns whether flex_attention has a fast kernel for q [..., K] and v [..., V].

    It has one in half precision on CUDA devices.
    """
    widths = (q.shape[-1], v.shape[-1])
    powers_of_two = all(16 <= width <= 256 and width & (width - 1) == 0 for width in widths)
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and powers_of_two


def flex_attend_in_window(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None) -> Tensor:
    """Returns softmax attention of each token to the last `window` tokens, itself included.

    The first call with new shapes compiles a kernel.

    Args:
        q: [B, H, T, K].
        k: [B, G, T, K].
        v: [B, G, T, V].
        window: tokens that a token sees, itself included.
        scale: the factor of the scores; 1 / sqrt(K) if None.
    """
    time, grouped = q.shape[2], q.shape[1] != k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # Padded keys are in the future of every query, so the mask hides them. Whole blocks need no kernels of their own.
    # The channels of a gate are filled up to a power of two.
    more = next_power_of_2(q.shape[-1]) - q.shape[-1]
    q, k = (F.pad(x, (0, more, 0, -time % _BLOCK)) for x in (q, k))
    v = F.pad(v, (0, 0, 0, -time % _BLOCK))
    blocks = q.shape[2] // _BLOCK
    if torch.compiler.is_compiling():  # which looks through caches, with a warning
        mask, attend = _block_mask.__wrapped__(blocks, window, q.device), compiled_flex_attention.__wrapped__()
    else:
        mask, attend = _block_mask(blocks, window, q.device), compiled_flex_attention()
    return attend(q, k, v, block_mask=mask, enable_gqa=grouped, scale=scale)[:, :, :time]


@cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Returns flex_attention, which is compiled at its first call."""
    from torch.nn.attention.flex_attention import flex_attention  # imports torch._dynamo, for seconds

    return torch.compile(flex_attention, fullgraph=True)  # without a graph it would form all scores


@lru_cache(maxsize=8)
def _block_mask(blocks: int, window: int, device: torch.device) -> Any:
    """Returns the mask, computed block by block: `create_block_mask` would form a mask of all pairs of tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    number = torch.arange(blocks, device=device)
    apart = (number[:, None] - number) * _BLOCK  # distances of tokens differ from this by less than a block
    whole = (apart >= _BLOCK) & (apart + _BLOCK <= window)
    partly = (apart >= 0) & (apart - _BLOCK + 1 < window) & ~whole
    return BlockMask.from_kv_blocks(*_listed(partly), *_listed(whole), BLOCK_SIZE=_BLOCK, mask_mod=seen)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of key blocks of each query block, and their indices, which come first in a row.

    `blocks` is bool [queries, keys]. Both results are int32, with two axes in front for batch and heads.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
