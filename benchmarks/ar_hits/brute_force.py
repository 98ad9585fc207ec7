"""AR hits by their definition, one token after another in plain Python, to test `sympow.evaluation.ar_hits`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np


def count(documents: Iterable[np.ndarray]) -> Counter[tuple[int, int]]:
    """Counts the bigrams of documents."""
    counts: Counter[tuple[int, int]] = Counter()
    for document in documents:
        text = document.tolist()
        for i in range(1, len(text)):
            counts[text[i - 1], text[i]] += 1
    return counts


def distances(row: Sequence[int]) -> list[int]:
    """Returns the distance from every token but the first to the last occurrence of its bigram; 0 if it is new."""
    last: dict[tuple[int, int], int] = {}
    found = []
    for i in range(1, len(row)):
        bigram = (row[i - 1], row[i])
        found.append(i - last[bigram] if bigram in last else 0)
        last[bigram] = i
    return found


def tally(
    rows: Iterable[Sequence[int]], losses: Iterable[Sequence[float]], counts: Counter[tuple[int, int]], frequent: int
) -> dict[str, tuple[int, float]]:
    """Returns the tokens and the summed loss of every slice of rows and of every distance and count of their bigrams.

    The keys are "hits", "frequent" and "new", "distance D" of AR hits and "count C" of repeats and, of what is new in
    its row, "new, count C".
    """
    tokens: dict[str, int] = defaultdict(int)
    sums: dict[str, float] = defaultdict(float)
    for row, of_row in zip(rows, losses, strict=True):
        for i, (distance, loss) in enumerate(zip(distances(row), of_row, strict=True), 1):
            seen = counts[row[i - 1], row[i]]
            if not distance:
                names = ["new", f"new, count {seen}"]
            elif seen > frequent:
                names = ["frequent", f"count {seen}"]
            else:
                names = ["hits", f"count {seen}", f"distance {distance}"]
            for name in names:
                tokens[name] += 1
                sums[name] += loss
    return {name: (tokens[name], sums[name]) for name in tokens}
