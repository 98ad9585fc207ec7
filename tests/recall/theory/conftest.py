"""The answers that constructions are held to."""

from collections.abc import Callable

import pytest
import torch

from sympow.recall.theory.instances import NONE, Instances


@pytest.fixture(scope="session")
def scanned() -> Callable[[Instances], torch.Tensor]:
    """The answers of rows of triples, by a scan with a dictionary."""

    def scan(instances: Instances) -> torch.Tensor:
        answers = torch.full_like(instances.queries, NONE)
        for row, (keys, values, queries) in enumerate(zip(*(part.tolist() for part in instances[:3]), strict=True)):
            seen: dict[int, int] = {}
            for i, (key, value, query) in enumerate(zip(keys, values, queries, strict=True)):
                answers[row, i] = seen.get(query, NONE)
                seen[key] = value
        return answers

    return scan
