"""The rows by levels of p = 3 and 4: weights, the way to and from the public basis, and how programs share them."""

import pytest
import torch

from sympow.ops.feature_map import spow
from tests.ops.contract import FLOAT64_TOLERANCE

plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
levels = pytest.importorskip("sympow.ops.triton.levels", reason="needs triton")
powers = pytest.importorskip("sympow.ops.triton.hopper.states_levels", reason="needs triton with Gluon")
SHAPES = [(16, 3), (24, 3), (32, 3), (64, 3), (16, 4), (24, 4), (32, 4)]
WARPS, STEP = 4, 32


def padded(table: levels.Levels, x: torch.Tensor) -> torch.Tensor:
    """x [K] with the zeros in front that tiles hold."""
    return torch.cat([x.new_zeros(table.skip), x])


def inner_products(table: levels.Levels, x: torch.Tensor) -> torch.Tensor:
    """What a thread block stages of x [K]: the products of p - 2 entries."""
    if table.p == 3:
        return padded(table, x)
    return torch.cat([x[: j + 1] * x[j] for j in range(len(x))])


def rows_as_multiplied(table: levels.Levels, x: torch.Tensor, weighted: bool) -> torch.Tensor:
    """All rows of x [K] in the order of the state, by the steps of the output pass."""
    inner, rows, first = inner_products(table, x), [], 0
    x = padded(table, x)
    for at, width in [(n, width) for groups, width in table.shape for n in range(groups)]:
        group = max(1, 16 // width)
        entry = int(table.entries[len(rows)])
        u, k = entry & 0xFFFF, entry >> 16
        factor = inner.view(-1, group)[u] * x[k]
        weights = table.weights[first : first + group].double().T if weighted else torch.ones(2, group).double()
        base = x[table.width - width :].view(2, 1, -1)
        rows.append((base * (factor * weights)[..., None]).flatten())
        first += group
        assert at * group < len(table.prefixes)
    return torch.cat(rows)


@pytest.mark.parametrize(("key_dim", "p"), SHAPES)
def test_weighted_rows_make_the_power(key_dim, p):
    table = levels.levels_of(key_dim, p)
    x, y = torch.randn(2, key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    power = rows_as_multiplied(table, x, weighted=True) @ rows_as_multiplied(table, y, weighted=False)
    assert abs(power - (x @ y) ** p) <= FLOAT64_TOLERANCE * (x.norm() * y.norm()) ** p


@pytest.mark.parametrize(("key_dim", "p"), SHAPES)
def test_public_basis_and_back(key_dim, p):
    table = levels.levels_of(key_dim, p)
    x = torch.randn(key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own, public = rows_as_multiplied(table, x, weighted=False)[:, None], spow(x, p)[:, None]
    torch.testing.assert_close(table.to_public(own), public)
    torch.testing.assert_close(table.from_public(public), own)


@pytest.mark.parametrize(("key_dim", "p"), SHAPES)
def test_weights_are_exact_and_tiles_full(key_dim, p):
    table = levels.levels_of(key_dim, p)
    assert torch.equal(table.on(torch.device("cpu"))[2].float(), table.weights)
    for groups, width in table.shape:
        assert groups * max(16, width) % levels.TILE == 0
    assert table.count == levels.level_count(key_dim, p)


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize(("key_dim", "p"), SHAPES)
def test_programs_of_the_state_pass_share_the_rows(key_dim, p, tiles):
    """Each row is written once, as the product of its prefix and last index: as `hopper.states_levels` computes it."""
    table = levels.levels_of(key_dim, p)
    x = torch.randn(key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    entries = padded(table, x)
    state, written = torch.zeros(table.count, dtype=torch.float64), torch.zeros(table.count, dtype=torch.int64)
    m = torch.arange(32 * WARPS)
    local, last = m // 16 % WARPS * 8 + m % 8, m // (16 * WARPS) * 2 + m // 8 % 2
    for program in range(powers.programs(table.shape, tiles, WARPS)):
        level = max(n for n in range(len(table.shape)) if _first(table, n, tiles) <= program)
        (groups, width), at = table.shape[level], program - _first(table, level, tiles)
        group, here = max(1, 16 // width), min(width, 4 * tiles)
        part, prefix = at % (width // here), at // (width // here) * (128 * tiles // here)
        first_prefix = sum(n * max(1, 16 // w) for n, w in table.shape[:level])
        first_row = sum(n * max(16, w) for n, w in table.shape[:level])
        for tile in range(tiles):
            n = prefix + tile // (here // 4) * 8 * WARPS + local
            j = part * here + tile % (here // 4) * 4 + last
            run = 8 // group
            row = first_row + n // group * (group * width) + j // run * 8 + n % group * run + j % run
            there = n < groups * group
            values = entries[table.prefixes[first_prefix + n[there]]].prod(1) * entries[table.width - width + j[there]]
            state[row[there]] = values
            written[row[there]] += 1
    assert (written == 1).all()
    torch.testing.assert_close(state, rows_as_multiplied(table, x, weighted=False))


@pytest.mark.parametrize(("key_dim", "p"), SHAPES)
def test_slopes_make_the_gradient(key_dim, p):
    """Summed over the steps as the gradient passes do, the rows of y give that of (x . y)**p with respect to x."""
    table, block = levels.levels_of(key_dim, p), plan.slopes_group(levels.padded_key_dim(key_dim))
    slopes = levels.Slopes(table, block)
    x, y = torch.randn(2, key_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    entries, state = padded(table, x), rows_as_multiplied(table, y, weighted=False)
    assert torch.equal(slopes.weights, slopes.weights.bfloat16().float())
    assert torch.equal((slopes.entries & -65536).view(torch.float32), slopes.weights)
    indices = [slopes.entries >> 8 * m & 0xFF for m in range(p - 2)]
    factors = slopes.weights.double() * torch.stack([entries[i] for i in indices]).prod(0)
    wide = (factors[:, None] * state[slopes.rows]).view(-1, block, table.width)
    k = slopes.first[:, None] + torch.arange(block)
    gradient = p * (entries[k][..., None] * wide).sum((0, 1))[table.skip :]
    torch.testing.assert_close(gradient, p * (x @ y) ** (p - 1) * y)


def _first(table: levels.Levels, level: int, tiles: int) -> int:
    return powers.programs(table.shape[:level], tiles, WARPS)
