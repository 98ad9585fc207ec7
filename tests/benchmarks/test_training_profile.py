"""The profile of a training step: kernels by name, and the time in which the GPU computes."""

from types import SimpleNamespace

import pytest

from benchmarks.training_profile import kernels


def event(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_kernels_are_summed_by_name_and_overlaps_count_once():
    """Two steps: a from 0 to 2,000 us, b within it and after it, then a gap, then a again."""
    events = [
        event("a", 6000, 9000), event("b", 1000, 1500), event("a", 0, 2000), event("b", 1900, 4000),
    ]  # fmt: skip
    rows, busy, span = kernels(events, 2)
    assert rows == [{"kernel": "a", "launches": 1.0, "ms": 2.5}, {"kernel": "b", "launches": 1.0, "ms": 1.3}]
    assert (busy, span) == (3.5, 4.5)


def test_without_kernels_there_is_an_error():
    with pytest.raises(RuntimeError, match="no kernel on the GPU"):
        kernels([], 1)
