"""Parity, majority and stacked recall: every row is answered again by a count or a dictionary of its own tokens."""

import numpy as np
import pytest

from sympow.data.batches import IGNORED
from sympow.recall import OwnTask


def task(name, length, vocab_size, **options):
    return OwnTask(f"sympow.recall.tasks:{name}", length, vocab_size, options=options)


def answer(name, bits):
    ones = sum(bits)
    return ones % 2 if name == "parity" else int(ones > len(bits) - ones)


@pytest.mark.parametrize("name", ["parity", "majority"])
@pytest.mark.parametrize("length", [2, 3, 8, 17])
def test_bits_are_answered_at_their_end(name, length):
    rows = task(name, length, 3).draw(300, 0)
    for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist(), strict=True):
        assert set(tokens[:-1]) <= {0, 1} and tokens[-1] == 2
        assert targets == [IGNORED] * (length - 1) + [answer(name, tokens[:-1])]
    assert {tuple(row) for row in rows.tokens[:, :1].tolist()} == {(0,), (1,)}


@pytest.mark.parametrize("name", ["parity", "majority"])
@pytest.mark.parametrize("length", [1, 8, 17])
def test_bits_are_answered_at_every_token(name, length):
    rows = task(name, length, 2, every=True).draw(300, 0)
    for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist(), strict=True):
        assert set(tokens) <= {0, 1}
        assert targets == [answer(name, tokens[: i + 1]) for i in range(length)]


def test_a_bit_is_1_as_often_as_0():
    """30,000 bits are within four standard deviations of a half, which is 0.0116."""
    assert abs(task("parity", 31, 3).draw(1000, 0).tokens[:, :-1].mean() - 0.5) < 0.0116


@pytest.mark.parametrize(
    ("length", "vocab_size", "passes", "held"), [(2, 3, 1, 1), (6, 15, 1, 3), (6, 15, 2, 3), (32, 500, 3, 21)]
)
def test_stacked_rows_are_answered_by_a_dictionary(length, vocab_size, passes, held):
    pairs = length // (passes + 1)
    rows, orders = task("stacked_mqar", length, vocab_size, passes=passes).draw(300, 0), set()
    for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist(), strict=True):
        context, queries = tokens[:-pairs], tokens[-pairs:]
        assert min(context) >= 2 * held and max(context) < held * (held + 2)
        read = [divmod(token - 2 * held, held) for token in context]
        value_of = {held + key: value for key, value in read}
        assert len(value_of) == len(set(value_of.values())) == pairs and set(queries) == set(value_of)
        for i in range(0, len(read), pairs):
            assert set(read[i : i + pairs]) == set(read[:pairs])
        assert targets == [IGNORED] * len(context) + [value_of[query] for query in queries]
        places = {key + held: place for place, (key, _) in enumerate(read[:pairs])}
        orders.add(tuple(places[query] for query in queries))
    assert len(orders) >= min(6, np.prod(range(1, pairs + 1)))
    assert set(rows.targets[:, -1].tolist()) == set(range(held))


@pytest.mark.parametrize(("name", "options"), [("parity", {}), ("majority", {"every": True}), ("stacked_mqar", {})])
def test_rows_depend_on_the_seed_alone(name, options):
    rows, same, other = (task(name, 16, 80, **options).draw(50, seed) for seed in (1, [1], 2))
    assert (rows.tokens == same.tokens).all() and (rows.targets == same.targets).all()
    assert (rows.tokens != other.tokens).any()


@pytest.mark.parametrize(
    ("name", "length", "vocab_size", "options", "message"),
    [
        ("parity", 1, 3, {}, "bits and their end need a length of at least 2 and a vocab_size of at least 3"),
        ("majority", 8, 2, {}, "bits and their end need .* got length=8, vocab_size=2"),
        ("stacked_mqar", 7, 80, {}, "length must be a multiple of passes [+] 1; got length=7, passes=1"),
        ("stacked_mqar", 8, 80, {"passes": 0}, "passes must be at least 1; got 0"),
        ("stacked_mqar", 8, 23, {}, "4 pairs need a vocab_size of at least 24; got 23"),
    ],
)
def test_sizes_that_no_row_can_have(name, length, vocab_size, options, message):
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        task(name, length, vocab_size, **options).draw(4, 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("parity", {"every": "no"}, "every must be true or false; got 'no'"),
        ("majority", {"every": 1}, "every must be true or false; got 1"),
        ("stacked_mqar", {"passes": 1.0}, "passes must be an integer; got 1.0"),
        ("stacked_mqar", {"passes": "2"}, "passes must be an integer; got '2'"),
    ],
)
def test_options_of_another_type(name, options, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        task(name, 8, 80, **options).draw(4, 0)
