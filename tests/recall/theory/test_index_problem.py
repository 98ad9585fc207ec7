"""A state of few bits tells little of many: accuracy falls with the bits for every stored one."""

import pytest

from sympow.recall.theory.index_problem import Memory, accuracy, best_protocol, most_possible, retnet

MEMORIES = [retnet(8, heads=3), Memory("power p=1", 1, 16), Memory("power p=2", 2, 8), Memory("power p=3", 3, 6)]


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: memory.label)
def test_accuracy_falls_to_guessing_where_the_state_is_small(memory):
    bits = memory.state_bits
    few, eighth = (accuracy(memory, stored, rows=24, seed=0) for stored in (bits // 64, 8 * bits))
    assert few > 0.75 > 0.6 >= eighth > 0.45


def test_no_state_tells_more_than_its_bits_allow():
    assert most_possible(1 / 8) == pytest.approx(0.7049, abs=1e-3)
    for memory in MEMORIES:
        for share in (1, 4):
            stored = memory.state_bits * share
            assert accuracy(memory, stored, rows=16, seed=1) < most_possible(1 / share)


@pytest.mark.parametrize(("stored", "bits", "best"), [(1, 0, 1 / 2), (2, 1, 3 / 4), (3, 1, 3 / 4), (3, 2, 10 / 12),
                                                      (4, 1, 11 / 16), (2, 2, 1)])  # fmt: skip
def test_no_protocol_tells_more_than_the_bits_of_its_message(stored, bits, best):
    """H.23 for few bits: of all protocols, the best is within the bound that follows from the entropy."""
    assert best_protocol(stored, bits) == pytest.approx(best)
    assert best <= most_possible(bits / stored) + 1e-6
    with pytest.raises(ValueError, match="all maps of 16 rows to 4 messages are too many"):
        best_protocol(4, 2)
