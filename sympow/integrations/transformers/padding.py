"""Tokens that an attention mask leaves out, and documents that are packed in a row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def kept(mask: Tensor | None, rows: int, time: int) -> Tensor | None:
    """Returns the last `time` columns of an attention mask as booleans, or None if they leave out no token.

    Raises ValueError for another shape, and for values other than 0 and 1, such as numbers of documents.
    """
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != rows or mask.shape[1] < time:
        raise ValueError(f"attention_mask must be [B = {rows}, at least T = {time}]; got {list(mask.shape)}")
    columns = mask[:, -time:]
    keep = columns.bool()
    if bool((columns == 1).all()):
        return None
    if bool((columns != keep).any()):
        raise ValueError("attention_mask must hold 0 and 1; position_ids or seq_idx tell where documents begin")
    return keep


def scattered(keep: Tensor, values: Tensor) -> Tensor:
    """Puts values [N, d] at the N true positions of keep [B, T]; returns [B, T, d] with zeros elsewhere."""
    return values.new_zeros(*keep.shape, values.shape[-1]).index_put(keep.nonzero(as_tuple=True), values)


def document_starts(
    position_ids: Tensor | None, seq_idx: Tensor | None, keep: Tensor | None, rows: int, time: int
) -> Tensor | None:
    """Finds the documents in rows whose positions start again, or whose document numbers change.

    A token is compared with the last token before it that the attention mask keeps.

    Args:
        position_ids: [B or 1, at least T], integers, of which the last T columns are read; None: not known.
        seq_idx: [B or 1, at least T], a number for each document; None: not known.
        keep: bool [B, T], from `kept`; None: all tokens are kept.
        rows: B.
        time: T.

    Returns:
        bool [B, T], true at the first kept token of every document; None if no row holds several documents.

    Raises ValueError for other shapes, and for positions that leave out numbers within a document: the position of a
    token is the number of tokens read before it.
    """
    given = {"position_ids": position_ids, "seq_idx": seq_idx}
    known = {name: values for name, values in given.items() if values is not None}
    if not known or not time:
        return None
    for name, values in known.items():
        if values.ndim != 2 or values.shape[0] not in (1, rows) or values.shape[1] < time:
            raise ValueError(f"{name} must be [B = {rows}, T = {time}]; got {list(values.shape)}")
    device = next(iter(known.values())).device
    read = torch.ones(rows, time, dtype=torch.bool, device=device) if keep is None else keep.to(device)
    place = torch.arange(time, device=device)
    last = torch.where(read, place, -1).cummax(1).values  # the last kept token up to each token
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    steps = {}
    for name, values in known.items():
        columns = values[:, -time:].to(device).expand(rows, time)
        steps[name] = columns - columns.gather(1, before.clamp(min=0))
    behind = read & (before >= 0)
    starts = torch.zeros_like(read)
    if "seq_idx" in steps:
        starts = behind & (steps["seq_idx"] != 0)
    if "position_ids" in steps:
        if bool((behind & ~starts & (steps["position_ids"] > 1)).any()):
            raise ValueError("position_ids must count up by 1 within a document, or start again with another one")
        starts = starts | (behind & (steps["position_ids"] < 1))
    return starts | (read & ~behind) if bool(starts.any()) else None


def first_tokens(
    mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None, seq_idx: Tensor | None, labels: Tensor
) -> Tensor | None:
    """Finds the first tokens of padded rows and of packed documents, and tokens that follow padding.

    Args:
        mask: an attention mask, see `kept`.
        position_ids: see `document_starts`.
        cu_seqlens: int [N + 1], the bounds of packed documents; then `position_ids` and `seq_idx` are not read.
        seq_idx: see `document_starts`.
        labels: [B, T].

    Returns:
        bool [B, T], true at these tokens; None without padding and packed documents.
    """
    rows, time = labels.shape
    if cu_seqlens is not None:
        first = torch.zeros(rows * time + 1, dtype=torch.bool, device=labels.device)
        return first.index_fill(0, cu_seqlens.to(labels.device).long(), True)[:-1].view(rows, time)
    keep = kept(mask, rows, time)
    starts = document_starts(position_ids, seq_idx, keep, rows, time)
    if keep is None:
        return None if starts is None else starts.to(labels.device)
    alone = keep & ~F.pad(keep[:, :-1], (1, 0))  # there are no logits before them
    return (alone if starts is None else alone | starts.to(alone.device)).to(labels.device)
