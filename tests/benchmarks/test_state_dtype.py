"""The benchmark of narrow states, on a model of a few weights."""

import numpy as np
import pytest
import torch

from benchmarks import state_dtype
from tests.integrations.small import VOCAB, small_model


class Documents:
    lengths = np.array([5, 30, 40])

    def __getitem__(self, index):
        return np.full(self.lengths[index], index, dtype=np.uint16)


def test_rows():
    tokens = torch.randint(VOCAB, (1, 63), generator=torch.Generator().manual_seed(0))
    model = small_model()
    plain, *narrow = state_dtype.measure(model, tokens)
    assert [row["state_dtype"] for row in (plain, *narrow)] == ["float32", "bfloat16", "int8"]
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
    assert plain["loss"] == pytest.approx(expected.item(), rel=1e-4) and plain["more"] == 0
    assert plain["state_bytes"] > narrow[0]["state_bytes"] > narrow[1]["state_bytes"]
    for row in narrow:
        assert row["loss"] == pytest.approx(plain["loss"], rel=0.01) and row["more"] != 0


def test_documents_are_joined():
    assert state_dtype.joined(Documents(), 36)[0].tolist() == [0] * 5 + [1] * 30 + [2]
    with pytest.raises(ValueError, match="76 tokens are needed; the held-out documents have 75"):
        state_dtype.joined(Documents(), 76)
