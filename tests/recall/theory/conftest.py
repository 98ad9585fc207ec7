"""The answers that constructions are held to."""

from collections.abc import Callable

import pytest
import torch

from sympow.recall.theory.instances import NONE, Instances


@pytest.fixture(scope="session")
def scanned() -> Callable[[Instances], torch.Tensor]:
    """The answers of rows of triples, by a scan with a dictionary."""

    def scan(instances: Instances) -> torch.Tensor:
        answers = []
        for keys, values, queries in zip(*(part.tolist() for part in instances[:3]), strict=True):
            seen: dict[int, int] = {}
            for key, value, query in zip(keys, values, queries, strict=True):
                answers.append(seen.get(query, NONE))
                seen[key] = value
        return torch.tensor(answers).view_as(instances.queries)

    return scan
