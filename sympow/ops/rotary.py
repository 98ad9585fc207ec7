"""Frequencies and positions of rotary embeddings, fixed or data-dependent (conformal): (M13) and (M14).

A position is a float64 number, the sum of the steps beta taken so far; fixed rotary takes steps of 1. Precision
matters: at 1,000,000 tokens an angle computed in float32 is wrong by a tenth of a radian. Positions are
accumulated in float64 and reduced to a fraction of a turn before sine and cosine.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sympow.ops.availability import check_float64
from sympow.ops.rope_scaling import check_scaling, scaled
from sympow.ops.running_sums import sums_so_far

RULES = ("standard", "conformal")


def rotary_frequencies(
    key_dim: int,
    rule: str = "standard",
    max_length: float | None = None,
    base: float | None = None,
    rotary_dim: int | None = None,
    scaling: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns theta_m = theta_1 / N**(2 (m - 1) / K), in radians per unit of position: float64 [K/2], (M13).

    Args:
        key_dim: K, even.
        rule: "standard": theta_1 = 1, N = base (Su et al., 2021). "conformal": theta_1 = 2 pi, N = max_length, the
            longest document (Kumar et al., 2025).
        max_length: N of the conformal rule; only for this rule.
        base: N of the standard rule, 10,000 if None; only for this rule.
        rotary_dim: the number of channels that are rotated, even and at most K. The first rotary_dim / 2 pairs have the
            frequencies of a key of rotary_dim channels, the others 0. None: all channels are rotated.
        scaling: changes the frequencies of the standard rule for a longer context; see
            `sympow.ops.rope_scaling.check_scaling`. None: they are not changed.
        device: of the result.
    """
    if key_dim < 2 or key_dim % 2:
        raise ValueError(f"rotary positions turn pairs of channels: key_dim must be even; got {key_dim}")
    if rule not in RULES:
        raise ValueError(f"the rotation's frequency rule is one of {', '.join(RULES)}; got {rule!r}")
    if (rule == "conformal") != (max_length is not None):
        raise ValueError(f"max_length belongs to the conformal rule and to it alone; got rule={rule!r}, {max_length=}")
    if rule == "conformal" and base is not None:
        raise ValueError(f"the rotation's base belongs to the standard rule; got {rule=}, {base=}")
    first, n = (1.0, 10_000.0 if base is None else float(base)) if max_length is None else (2 * pi, float(max_length))
    if not 1 < n < inf:
        name = "the rotation's base" if max_length is None else "max_length"
        raise ValueError(f"{name} must be greater than 1; got {n:g}")
    turning = key_dim if rotary_dim is None else rotary_dim
    if not 2 <= turning <= key_dim or turning % 2:
        raise ValueError(f"rotary_dim must be even, from 2 to {key_dim}; got {rotary_dim}")
    check_float64(torch.get_default_device() if device is None else torch.device(device))
    exponent = torch.arange(turning // 2, dtype=torch.float64, device=device) * (2 / turning)
    frequencies = first * n**-exponent
    if scaling is not None:
        if rule != "standard":
            raise ValueError(f"a scaled rotation is of the standard rule; got {rule=}")
        check_scaling(scaling, turning // 2)
        frequencies = scaled(frequencies, scaling, n)
    return F.pad(frequencies, (0, (key_dim - turning) // 2))


def rotary_positions(beta: Tensor, start: Tensor | None = None) -> Tensor:
    """Computes positions (M14): c_i = start + beta_1 + ... + beta_i, accumulated in float64.

    Args:
        beta: [B, T, G], the steps.
        start: [B, G] float64, the position of the token before the first; zero if None.

    Returns:
        float64 [B, T, G]. Its last row, [:, -1], is the `start` of what follows.
    """
    return sums_so_far(beta, start)
