"""The kernels' own rows of a state: weights, and the way to and from the public basis."""

import pytest
import torch

from sympow.ops.feature_map import spow
from tests.ops.contract import FLOAT64_TOLERANCE

rows = pytest.importorskip("sympow.ops.triton.rows", reason="needs triton")
SHAPES = [(16, 1), (64, 1), (16, 2), (32, 2), (64, 2), (128, 2), (16, 3), (32, 3), (16, 4)]
TABLES = [(*shape, 2) for shape in SHAPES] + [(64, 2, 4), (128, 2, 4), (128, 2, 8)]


def monomials(table: rows.Rows, x: torch.Tensor) -> torch.Tensor:
    """Every row's monomial of x [K], by the prefixes alone."""
    parts = []
    for prefixes, first, end in table.bands:
        parts += [x[prefix].prod() * x[first:end] for prefix in prefixes]
    return torch.cat(parts)


@pytest.mark.parametrize(("key_dim", "p"), SHAPES)
def test_weighted_rows_make_the_power(key_dim, p):
    table = rows.rows_of(key_dim, p)
    x, y = torch.randn(2, key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = []
    for i in range(len(table.prefixes)):
        last = torch.arange(key_dim)[table.half if i >= table.lower else 0 :]
        base = torch.where(last >= table.half, p, 1) if i < table.lower else torch.ones_like(last)
        weights.append(table.weights[i].double() * base)
    power = (torch.cat(weights) * monomials(table, x) * monomials(table, y)).sum()
    assert abs(power - (x @ y) ** p) <= FLOAT64_TOLERANCE * (x.norm() * y.norm()) ** p


@pytest.mark.parametrize(("key_dim", "parts"), [(64, 4), (128, 4), (128, 8)])
def test_parts_make_the_square(key_dim, parts):
    table = rows.rows_of(key_dim, 2, parts)
    assert table.count == {4: 5 / 8, 8: 9 / 16}[parts] * key_dim**2
    x, y = torch.randn(2, key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    part = torch.arange(key_dim) // (key_dim // parts)
    weights = [1 + (part[prefixes] < part[None, first:end]).double().flatten() for prefixes, first, end in table.bands]
    square = (torch.cat(weights) * monomials(table, x) * monomials(table, y)).sum()
    assert abs(square - (x @ y) ** 2) <= FLOAT64_TOLERANCE * (x.norm() * y.norm()) ** 2


@pytest.mark.parametrize(("key_dim", "p", "parts"), [(32, 2, 4), (64, 2, 8), (64, 3, 4), (64, 2, 3)])
def test_parts_that_no_kernel_has(key_dim, p, parts):
    with pytest.raises(ValueError, match=f"got parts={parts}, p={p}, K={key_dim}"):
        rows.Rows(key_dim, p, parts)


@pytest.mark.parametrize(("key_dim", "p", "parts"), TABLES)
def test_public_basis_and_back(key_dim, p, parts):
    table = rows.rows_of(key_dim, p, parts)
    x = torch.randn(key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own, public = monomials(table, x)[:, None], spow(x, p)[:, None]
    torch.testing.assert_close(table.to_public(own), public)
    torch.testing.assert_close(table.from_public(public), own)


@pytest.mark.parametrize("key_dim", [16, 64])
def test_matrix_of_the_normalizer(key_dim):
    table = rows.rows_of(key_dim, 2)
    x = torch.randn(key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(table.matrix_to_public(torch.outer(x, x)), spow(x, 2))
    torch.testing.assert_close(table.matrix_from_public(spow(x, 2)), torch.outer(x, x))


@pytest.mark.parametrize(("key_dim", "p"), [(32, 2), (64, 2), (32, 3), (64, 3)])
def test_mirrored_rows_hold_the_same_monomials(key_dim, p):
    table = rows.rows_of(key_dim, p)
    x = torch.randn(key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own = monomials(table, x)
    wanted = x[table.prefixes[table.lower :]].prod(1)[:, None] * x[: table.half]
    torch.testing.assert_close(own[table.mirror], wanted)


@pytest.mark.parametrize(("key_dim", "p", "parts"), TABLES)
def test_counted_rows(key_dim, p, parts):
    assert rows.row_count(key_dim, p, parts) == rows.rows_of(key_dim, p, parts).count
