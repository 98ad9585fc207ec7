"""Tasks that an `OwnTask` names: parity and majority of bits, and recall with one token for a key and its value.

They come from Zoology's code (github.com/HazyResearch/zoology, data/circuits.py and data/stacked_mqar.py). With length
N = 6, bits 0 and 1, and 2 for the end of the bits ("." stands for "no target"):

    parity           1 0 1 1 0 2      with every=True    1 0 1 1 0 1
      targets        . . . . . 1                         1 1 0 1 1 0
    majority         1 0 1 0 0 2      with every=True    1 0 1 0 0 1
      targets        . . . . . 0                         1 0 1 0 0 0

and with a vocabulary of C = 15, where 0 to 2 are values, 3 to 5 are keys, and 6 to 14 are the pairs of a key and a
value, (3, 0), (3, 1), (3, 2), (4, 0) and so on:

    stacked_mqar     8 9 13|5 3 4     the pairs (3, 2), (4, 0) and (5, 1)
      targets        . . . |1 2 0
"""

from __future__ import annotations

import math

import numpy as np

from sympow.data.batches import IGNORED
from sympow.data.mqar import draw_distinct
from sympow.fields import check_integer

END = 2  # the token that follows the bits


def parity(
    rng: np.random.Generator, examples: int, length: int, vocab_size: int, *, every: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Draws bits whose target is 1 if an odd number of them are 1, else 0.

    Args:
        rng: draws the bits, each with probability 1/2.
        examples: n.
        length: N.
        vocab_size: C, at least 3, or at least 2 with `every`.
        every: a row is N bits, and every token is asked for the parity of the bits so far, its own included. Otherwise
            a row is N - 1 bits and the end, where alone it is asked.

    Returns:
        tokens and targets, int64 [n, N].

    Raises ValueError for a shorter row and a smaller vocabulary than it needs, and TypeError for an `every` that is
    neither true nor false.
    """
    bits = _bits(rng, examples, length, vocab_size, every)
    return _asked(bits, bits.cumsum(1) % 2, every)


def majority(
    rng: np.random.Generator, examples: int, length: int, vocab_size: int, *, every: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Draws bits whose target is 1 if more than half of them are 1, else 0.

    Arguments, results and errors are those of `parity`. Zoology's code does the same at the end of a row. Where it asks
    every token, half of the bits are enough.
    """
    bits = _bits(rng, examples, length, vocab_size, every)
    return _asked(bits, (2 * bits - 1).cumsum(1) > 0, every)


def stacked_mqar(
    rng: np.random.Generator, examples: int, length: int, vocab_size: int, *, passes: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Draws rows of associative recall in which one token is a key and its value, so that no token must be shifted.

    A row has D = N / (passes + 1) pairs, all of whose keys are different, and so are all values. The pairs occur
    `passes` times, each time in another order. Then every key is asked once, in one more order. The vocabulary holds S
    values, S keys and S^2 pairs, where S is the largest number with S (S + 2) <= C.

    Args:
        rng: draws everything.
        examples: n.
        length: N, a multiple of passes + 1.
        vocab_size: C, at least D (D + 2).
        passes: how often every pair occurs.

    Returns:
        tokens and targets, int64 [n, N].

    Raises ValueError for sizes that no row can have, and TypeError for passes that are no integer.
    """
    check_integer("passes", passes, 1)
    if length % (passes + 1):
        raise ValueError(f"length must be a multiple of passes + 1; got {length=}, {passes=}")
    pairs, held = length // (passes + 1), math.isqrt(vocab_size + 1) - 1
    if held < pairs:
        raise ValueError(f"{pairs} pairs need a vocab_size of at least {pairs * (pairs + 2)}; got {vocab_size}")
    order = rng.permuted(np.tile(np.arange(pairs), (examples, passes + 1, 1)), axis=2).reshape(examples, -1)
    key, value = (np.take_along_axis(draw_distinct(rng, examples, 0, held, pairs), order, 1) for _ in range(2))
    asked = np.arange(length) >= length - pairs
    tokens = np.where(asked, held + key, 2 * held + held * key + value)
    return tokens.astype(np.int64), np.where(asked, value, IGNORED).astype(np.int64)


def _bits(rng: np.random.Generator, examples: int, length: int, vocab_size: int, every: bool) -> np.ndarray:
    """Draws the bits of a row, int64 [n, N], or [n, N - 1] before an end."""
    if not isinstance(every, bool):
        raise TypeError(f"every must be true or false; got {every!r}")
    least = (1, END) if every else (2, END + 1)
    if length < least[0] or vocab_size < least[1]:
        raise ValueError(
            f"bits{'' if every else ' and their end'} need a length of at least {least[0]} and a vocab_size of at "
            f"least {least[1]}; got {length=}, {vocab_size=}"
        )
    return rng.integers(0, 2, (examples, length if every else length - 1))


def _asked(bits: np.ndarray, answers: np.ndarray, every: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and targets: all answers, or the last one at an end that follows the bits."""
    if every:
        return bits, answers.astype(np.int64)
    tokens = np.pad(bits, ((0, 0), (0, 1)), constant_values=END)
    targets = np.full(tokens.shape, IGNORED)
    targets[:, -1] = answers[:, -1]
    return tokens, targets
