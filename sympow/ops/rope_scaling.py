"""Scaled rotary frequencies of models whose context was extended: the rules "linear", "llama3", "yarn" and "factors".

The names and the numbers of the first three are those of `rope_parameters` in a config.json of Hugging Face
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, inf, log, tau
from typing import Any

import torch
from torch import Tensor

# The numbers that a rule needs, and those that it may have, with their defaults.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "factors": ("factors",),
}
_OPTIONAL: dict[str, dict[str, Any]] = {
    "yarn": {"attention_factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
}
SCALINGS = tuple(_NEEDED)


def check_scaling(scaling: Mapping[str, Any], pairs: int) -> None:
    """Raises ValueError for a scaling that `scaled` cannot compute.

    Args:
        scaling: {"rope_type": one of `SCALINGS`, ...} with the numbers of the rule. "linear" has a `factor`. "llama3"
            has a `factor`, a `low_freq_factor`, a greater `high_freq_factor` and `original_max_position_embeddings`.
            "yarn" has a `factor` and `original_max_position_embeddings`, and possibly `attention_factor`, `beta_fast`,
            `beta_slow` and `truncate`. "factors" has a list of `factors`, one for each pair of channels that is
            rotated.
        pairs: the number of these pairs.
    """
    rule = scaling.get("rope_type")
    if rule not in SCALINGS:
        raise ValueError(f"the rope_type of a scaled rotation is one of {', '.join(SCALINGS)}; got {rule!r}")
    needed, optional = _NEEDED[rule], _OPTIONAL.get(rule, {})
    for name in scaling:
        if name not in ("rope_type", *needed, *optional):
            raise ValueError(f"a rotation scaled by {rule} has no number {name!r}; it has {', '.join(needed)}")
    for name in needed:
        if name not in scaling:
            raise ValueError(f"a rotation scaled by {rule} needs the number {name!r}")
    numbers = {name: scaling[name] for name in scaling if name not in ("rope_type", "truncate", "factors")}
    for name, value in numbers.items():
        if not (name == "attention_factor" and value is None) and not _is_positive(value):
            raise ValueError(f"{name} of a scaled rotation must be positive and finite; got {value!r}")
    if rule == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ValueError(
            "high_freq_factor of a scaled rotation must be greater than low_freq_factor; "
            f"got {scaling['high_freq_factor']!r} and {scaling['low_freq_factor']!r}"
        )
    if not isinstance(scaling.get("truncate", True), bool):
        raise ValueError(f"truncate of a scaled rotation must be true or false; got {scaling['truncate']!r}")
    if rule == "factors":
        factors = scaling["factors"]
        if not isinstance(factors, list | tuple) or len(factors) != pairs or not all(map(_is_positive, factors)):
            raise ValueError(
                f"factors of a scaled rotation must be {pairs} positive numbers, one for each pair of channels"
            )


def scaled(frequencies: Tensor, scaling: Mapping[str, Any], base: float) -> Tensor:
    """Returns the frequencies of a scaled rotation.

    Args:
        frequencies: float64 [pairs], the frequencies base**(-m / pairs) without scaling.
        scaling: as for `check_scaling`, which has checked it.
        base: of the frequencies.

    Returns:
        float64 [pairs].
    """
    rule = scaling["rope_type"]
    if rule == "factors":
        return frequencies / torch.tensor(scaling["factors"], dtype=frequencies.dtype, device=frequencies.device)
    slow = frequencies / scaling["factor"]
    if rule == "linear":
        return slow
    length = scaling["original_max_position_embeddings"]
    if rule == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        # The share of the unscaled frequency: 1 for pairs that turn at least `high` times in the original context, 0
        # for pairs that turn at most `low` times.
        kept = ((frequencies * (length / tau) - low) / (high - low)).clamp(0, 1)
        return slow + (frequencies - slow) * kept
    pairs = frequencies.shape[0]

    def pair(turns: float) -> float:
        """Returns the number of the pair, in general no integer, that turns so many times in the original context."""
        return pairs * log(length / (turns * tau)) / log(base)

    first, last = pair(_number(scaling, "beta_fast")), pair(_number(scaling, "beta_slow"))
    if _number(scaling, "truncate"):
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    number = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
    kept = 1 - ((number - first) / (last - first if first != last else 0.001)).clamp(0, 1)
    return slow + (frequencies - slow) * kept


def magnitude(scaling: Mapping[str, Any] | None) -> float:
    """Returns the number by which a scaled rotation multiplies queries and keys: 1, except for "yarn"."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    given = _number(scaling, "attention_factor")
    return float(given) if given is not None else 0.1 * log(max(1.0, scaling["factor"])) + 1.0


def _number(scaling: Mapping[str, Any], name: str) -> Any:
    return scaling.get(name, _OPTIONAL["yarn"][name])


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
