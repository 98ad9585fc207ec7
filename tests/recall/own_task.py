"""Tasks of a user's own, found by their import paths."""

import numpy as np

from sympow.data.batches import IGNORED


def copying(rng, examples, length, vocab_size, *, back=1):
    """The last token asks for the one that stood `back` tokens before it."""
    tokens = rng.integers(1, vocab_size, (examples, length))
    targets = np.full((examples, length), IGNORED)
    targets[:, -1] = tokens[:, -1 - back]
    return tokens, targets


def tokens_alone(rng, examples, length, vocab_size):
    return rng.integers(1, vocab_size, (examples, length))


def too_short(rng, examples, length, vocab_size):
    tokens, targets = copying(rng, examples, length, vocab_size)
    return tokens[:, 1:], targets


def other_tokens(rng, examples, length, vocab_size):
    tokens, targets = copying(rng, examples, length, vocab_size)
    return tokens + vocab_size, targets


def uneven(rng, examples, length, vocab_size):
    tokens, targets = copying(rng, examples, length, vocab_size)
    targets[0] = IGNORED
    return tokens, targets


def floats(rng, examples, length, vocab_size):
    tokens, targets = copying(rng, examples, length, vocab_size)
    return tokens, targets / 1
