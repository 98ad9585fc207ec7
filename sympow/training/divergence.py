"""Recognises training that has diverged where a component refuses the numbers first.

On a CPU, power attention refuses gates that are not finite and states that leave their range. AdamW refuses a learning
rate beyond float32. All other components pass on numbers that are not finite, up to the loss.
"""

from __future__ import annotations

from sympow.ops import OutOfRangeError

_OVERFLOW = "without overflow"  # words of PyTorch's error, which has no class of its own


def shows_divergence(error: Exception) -> bool:
    """Returns whether an error is that of a component which refuses numbers out of range."""
    return isinstance(error, OutOfRangeError) or (isinstance(error, RuntimeError) and _OVERFLOW in str(error))
