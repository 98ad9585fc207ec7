"""Sums over all tokens so far, of gates and of features."""

from __future__ import annotations

from torch import Tensor

from sympow.ops import rotary_positions


def running_sums(x: Tensor, start: Tensor | None = None) -> Tensor:
    """Returns start + x_1 + ... + x_t for every token t, in float64.

    The sums are formed in blocks, as the positions of a rotation are. On a GPU torch.compile fails at some plain
    cumulative sums over more than 128 tokens.

    Args:
        x: [B, T, G].
        start: [B, G] float64; zero if None.

    Returns:
        [B, T, G] float64.
    """
    return rotary_positions(x, start)
