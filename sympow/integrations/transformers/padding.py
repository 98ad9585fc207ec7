"""Tokens that an attention mask leaves out."""

from __future__ import annotations

from torch import Tensor


def kept(mask: Tensor | None, rows: int, time: int) -> Tensor | None:
    """Returns the last `time` columns of an attention mask as booleans, or None if they leave out no token."""
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != rows or mask.shape[1] < time:
        raise ValueError(f"attention_mask must be [B = {rows}, at least T = {time}]; got {list(mask.shape)}")
    keep = mask[:, -time:].bool()
    return None if bool(keep.all()) else keep


def scattered(keep: Tensor, values: Tensor) -> Tensor:
    """Puts values [N, d] at the N true positions of keep [B, T]; returns [B, T, d] with zeros elsewhere."""
    return values.new_zeros(*keep.shape, values.shape[-1]).index_put(keep.nonzero(as_tuple=True), values)
