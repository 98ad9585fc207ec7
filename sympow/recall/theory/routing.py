"""Permutations and copies of entries as butterfly factors, the part of Theorem H.19 that is proved elsewhere.

Every permutation is one kaleidoscope matrix, because a Beneš network has the strides n/2 to 1 and 1 to n/2. A list of
entries, each copied to one or more places next to each other, is one transposed butterfly matrix: with the largest
stride first, no two different entries want the same place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sympow.recall.theory.butterfly import Factor


def permutation(source: Sequence[int]) -> list[Factor]:
    """Makes the factors that move entry source[i] to place i, for a permutation of n places, a power of two.

    Returns 2 log n factors, with blocks of n, ... 2 and then 2, ... n.

    Raises ValueError for anything else than a permutation of a power of two places.
    """
    if len(source) & (len(source) - 1) or sorted(source) != list(range(len(source))):
        raise ValueError(f"source must be a permutation of a power of two places; got {list(source)}")
    first, last = _switches(list(source))
    return [*(_switch(crossed, len(source) >> level) for level, crossed in enumerate(first)),
            *reversed([_switch(crossed, len(source) >> level) for level, crossed in enumerate(last)])]  # fmt: skip


def _switches(source: list[int]) -> tuple[list[list[bool]], list[list[bool]]]:
    """Returns for each stride, the largest first, which places are exchanged before and after the inner networks.

    A place and its partner, n / 2 away, are sent to different halves, and so are the entries for a place and its
    partner. Following these pairs in turns colours every entry with its half.
    """
    half = len(source) // 2
    if half == 0:
        return [], []
    place = [0] * len(source)
    for i, entry in enumerate(source):
        place[entry] = i
    lower: list[bool | None] = [None] * len(source)  # of each entry: whether it goes through the second half
    for start in range(half):
        entry = start
        while lower[entry] is None:
            lower[entry] = False
            other = source[place[entry] ^ half]  # goes to the partner of that place, so through the other half
            lower[other] = True
            entry = other ^ half
    before = [bool(lower[entry]) != (entry >= half) for entry in range(len(source))]
    after = [bool(lower[entry]) != (i >= half) for i, entry in enumerate(source)]
    inner: list[list[int]] = [[0] * half, [0] * half]
    for i, entry in enumerate(source):
        inner[bool(lower[entry])][i % half] = entry % half
    (first, last), (first_low, last_low) = map(_switches, inner)
    return [before, *_beside(first, first_low)], [after, *_beside(last, last_low)]


def _beside(upper: list[list[bool]], below: list[list[bool]]) -> list[list[bool]]:
    """Returns the switches of two networks that run at the same time, one on each half of the places."""
    return [[*a, *b] for a, b in zip(upper, below, strict=True)]


def _switch(crossed: list[bool], block: int) -> Factor:
    """Makes the factor that exchanges partners where `crossed`, of all places of both partners."""
    other = torch.tensor(crossed).double()
    return Factor(block, 1 - other, other)


def copies(owner: Sequence[int], size: int) -> list[Factor]:
    """Makes the factors that copy entry owner[i] to place i, for i below len(owner); the other places get 0.

    Args:
        owner: 0, 1, 2, ..., each once or several times in a row.
        size: n, a power of two of at least len(owner).
    """
    held: list[list[int]] = [[] for _ in range(size)]  # the places that what is in a place still has to reach
    for place, entry in enumerate(owner):
        held[entry].append(place)
    factors = []
    block = size
    while block > 1:
        own, other = torch.zeros(2, size, dtype=torch.float64)
        after: list[list[int]] = [[] for _ in range(size)]
        for place, wanted in enumerate(held):
            for target in wanted:
                there = place ^ ((place ^ target) & (block // 2))
                (own if there == place else other)[there] = 1
                after[there].append(target)
        factors.append(Factor(block, own, other))
        held, block = after, block // 2
    return factors


def gather(source: Sequence[int | None], size: int) -> list[Factor]:
    """Makes the factors that bring entry source[i] to place i, for any list of entries; None for any entry.

    The entries 0, 1, 2, ... up to the largest must each be in `source`. They are copied in order, and then permuted.

    Raises ValueError for a list with an entry missing, or longer than `size`.
    """
    wanted = sorted((entry, i) for i, entry in enumerate(source) if entry is not None)
    owner, order = [entry for entry, _ in wanted], [i for _, i in wanted]
    if len(source) > size or sorted(set(owner)) != list(range(len(set(owner)))):
        raise ValueError(f"source must have entries 0, 1, ... without a gap, at most {size}; got {list(source)}")
    free = sorted(set(range(size)) - set(order))
    moved = [0] * size
    for rank, i in enumerate([*order, *free]):
        moved[i] = rank
    return [*copies(owner, size), *permutation(moved)]
