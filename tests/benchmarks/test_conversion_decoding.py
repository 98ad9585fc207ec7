"""Rows of decoding: one for each model and context, and what grows with the context."""

import torch

from benchmarks.conversion_decoding import CONVERTED, GROWING, WHOLE, measure


def test_only_states_of_teachers_and_hybrids_grow_with_the_context():
    rows = list(measure("tiny", torch.device("cpu"), [1100, 1300], batch=2, tokens=1))
    assert [row["model"] for row in rows] == [GROWING, WHOLE, *CONVERTED] * 2
    assert all(row["tokens_per_second"] > 0 for row in rows)
    states = {(row["model"], row["context"]): row["state_bytes"] for row in rows}
    for name in (GROWING, WHOLE, *CONVERTED):
        grows = name in (GROWING, WHOLE) or "gated" in name
        assert (states[name, 1300] > states[name, 1100]) == grows
