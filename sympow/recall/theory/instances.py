"""The general form of multi-query associative recall: triples of a key, a value and a query (Zoology, appendix H.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

NONE = -1  # the answer to a query that equals no earlier key


class Instances(NamedTuple):
    """Holds rows of M triples: keys, values and queries, int64 [n, M] each, tokens 0 .. vocab_size - 1.

    The answer to query i is the value v_j of the earlier triple j < i whose key k_j equals q_i, and NONE without one.
    The keys of a row are all different.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    vocab_size: int


def draw(examples: int, triples: int, vocab_size: int, seed: int) -> Instances:
    """Draws rows whose queries are tokens of the vocabulary: earlier keys, later keys, and other tokens.

    Raises ValueError for a vocabulary that has fewer tokens than a row has triples.
    """
    if vocab_size < triples:
        raise ValueError(f"the {triples} keys of a row are different tokens; the vocabulary has {vocab_size}")
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(examples, vocab_size, generator=generator).argsort(1)[:, :triples]
    values, queries = torch.randint(vocab_size, (2, examples, triples), generator=generator)
    return Instances(keys, values, queries, vocab_size)


def draw_with_lags(examples: int, triples: int, vocab_size: int, lags: int, seed: int) -> Instances:
    """Draws rows in which the queries of a row find their keys at no more than `lags` distances.

    A query is the key at one of the row's distances before it, or the last token of the vocabulary, which is never a
    key. Raises ValueError if the vocabulary has no such token, or the row has fewer distances.
    """
    if vocab_size <= triples or not 1 <= lags < triples:
        raise ValueError(
            f"{triples} triples need more than {triples} tokens and 1 to {triples - 1} lags; got {vocab_size=}, {lags=}"
        )
    keys, values, _, _ = draw(examples, triples, vocab_size - 1, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    distances = torch.rand(examples, triples - 1, generator=generator).argsort(1)[:, :lags] + 1
    chosen = distances.gather(1, torch.randint(lags, (examples, triples), generator=generator))
    place = torch.arange(triples) - chosen
    queries = torch.where(place >= 0, keys.gather(1, place.clamp(min=0)), vocab_size - 1)
    return Instances(keys, values, queries, vocab_size)


def tape(instances: Instances) -> Tensor:
    """Writes rows of triples as one-hot vectors, float64 [n, 3 M, 3 C] with C the vocabulary's size.

    Row 3 i holds key i in the first C channels, row 3 i + 1 value i in the next C, row 3 i + 2 query i in the last C.
    """
    n, triples = instances.keys.shape
    size = instances.vocab_size
    u = torch.zeros(n, triples, 3, 3, size, dtype=torch.float64)
    for part, tokens in enumerate((instances.keys, instances.values, instances.queries)):
        u[:, :, part, part] = F.one_hot(tokens, size)
    return u.reshape(n, 3 * triples, 3 * size)


def read(values: Tensor) -> Tensor:
    """Reads one-hot values [n, 3 M, C] at the rows of the queries: the tokens [n, M], NONE where no entry is above 1/2.

    Entries of a right construction are 1 and 0 up to rounding, or up to the rest of a softmax.
    """
    largest, token = values[:, 2::3].max(-1)
    return torch.where(largest > 0.5, token, NONE)
