from math import comb, factorial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sympow.ops.feature_map import (
    multinomials,
    spow,
    spow_dim,
    spow_indices,
    spow_offset,
    tpow,
    tpow_dim,
    tspow,
    tspow_dim,
)


@given(st.integers(1, 4), st.sampled_from([(1, 1), (4, 2), (6, 3), (6, 1), (5, 5)]), st.integers(0, 99))
def test_inner_products_are_powers(p, shape, seed):
    key_dim, tile = shape
    x, y = torch.randn(2, 3, key_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = (x * y).sum(-1) ** p
    for phi, dim in (
        (lambda t: tpow(t, p), tpow_dim(key_dim, p)),
        (lambda t: spow(t, p), spow_dim(key_dim, p)),
        (lambda t: tspow(t, p, tile), tspow_dim(key_dim, p, tile)),
    ):
        assert phi(x).shape == (3, dim)
        # The sum of |terms| bounds the rounding: (|x| . |y|)**p.
        assert ((phi(x) * phi(y)).sum(-1) - expected).abs().max() <= 1e-13 * ((x.abs() * y.abs()).sum(-1) ** p).max()


def test_dimensions_as_published():
    assert [tpow_dim(64, p) for p in range(2, 7)] == [4096, 262144, 16777216, 1073741824, 68719476736]
    assert [spow_dim(64, p) for p in range(2, 7)] == [2080, 45760, 766480, 10424128, 119877472]
    assert tspow_dim(64, 2, 8) == 2304


def test_dimensions_of_large_powers():
    """Also of those that a damaged config names, at once."""
    for p in (255, 256, 257, 300):
        assert spow_dim(5, p) == comb(p + 4, 4)
    assert spow_dim(4, 10**15) == (10**15 + 3) * (10**15 + 2) * (10**15 + 1) // 6


@pytest.mark.parametrize(("key_dim", "p"), [(1, 3), (2, 5), (4, 3), (7, 2), (5, 1)])
def test_indices_are_every_sorted_tuple_in_order(key_dim, p):
    index = [tuple(i) for i in spow_indices(key_dim, p).tolist()]
    assert index == sorted(set(index))
    assert len(index) == spow_dim(key_dim, p)
    assert all(list(i) == sorted(i) and i[0] >= 0 and i[-1] < key_dim for i in index)
    for a in range(key_dim + 1):
        assert spow_offset(key_dim, p, a) == sum(i[0] < a for i in index)


def test_multinomials_count_the_orders_of_a_tuple():
    index, weights = spow_indices(4, 3).tolist(), multinomials(4, 3).tolist()
    expected = [factorial(3) / torch.tensor(i).bincount().double().add(1).lgamma().exp().prod().item() for i in index]
    assert weights == pytest.approx(expected, rel=1e-12)
    assert sum(weights) == 4**3


@pytest.mark.parametrize(
    ("p", "message"), [(0, "p must be an integer >= 1; got 0"), (2.0, "got 2.0"), (True, "got True")]
)
def test_bad_power(p, message):
    with pytest.raises(ValueError, match=message):
        spow_dim(4, p)


def test_bad_tile():
    with pytest.raises(ValueError, match="tile must divide key_dim=6; got tile=4"):
        tspow(torch.ones(6), 2, 4)
