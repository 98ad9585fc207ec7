"""Butterfly and kaleidoscope matrices, arithmetic circuits and RetNet by BaseConv, and recall by sorting networks."""

import itertools
import math
import random

import pytest
import torch
from torch.nn.functional import pad

from sympow.recall.theory.base_conv import apply
from sympow.recall.theory.butterfly import Factor, factors_as_base_conv, kaleidoscope, random_butterfly, transposed
from sympow.recall.theory.circuits import Circuit, circuit_as_base_conv, fourier_circuit, planned
from sympow.recall.theory.instances import NONE, Instances, draw
from sympow.recall.theory.routing import copies, gather, permutation
from sympow.recall.theory.simulation import retnet_as_base_conv
from sympow.recall.theory.sorting import (
    answers,
    comparator,
    equal,
    less,
    network,
    recall_circuit,
    search_circuit,
    written,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=generator(seed)).double()


def multiplied(factors: list[Factor], x: torch.Tensor) -> torch.Tensor:
    for factor in factors:
        x = factor(x)
    return x


def on_a_tape(factors: list[Factor], x: torch.Tensor, width: int) -> torch.Tensor:
    """Returns what the BaseConv layers of the factors make of x [n, size], read back row by row."""
    tape = pad(x.view(len(x), -1, width), (0, 2 * width))
    out = apply(factors_as_base_conv(factors, width), tape)
    assert not out[..., width:].any()
    return out[..., :width].flatten(1)


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("block", [2, 4, 16])
def test_a_butterfly_factor_takes_one_or_two_layers(block, width):
    """H.14 to H.16 (1), against the matrix of its blocks [D_1, D_2; D_3, D_4]."""
    own, other = integers(16, seed=1), integers(16, seed=2)
    factor, half = Factor(block, own, other), block // 2
    blocks = [torch.cat([torch.cat([own[i : i + half].diag(), other[i : i + half].diag()], 1),
                         torch.cat([other[i + half : i + block].diag(), own[i + half : i + block].diag()], 1)])
              for i in range(0, 16, block)]  # fmt: skip
    matrix, x = torch.block_diag(*blocks), integers(10_000, 16, seed=3)
    assert torch.equal(factor(x), x @ matrix.T) and torch.equal(factor.transposed()(x), x @ matrix)
    assert torch.equal(on_a_tape([factor], x, width), x @ matrix.T)
    assert len(list(factors_as_base_conv([factor], width))) == (2 if half < width else 3)
    with pytest.raises(ValueError, match=r"the size and the width must be powers of two, .*; got 16, 3"):
        list(factors_as_base_conv([factor], 3))


@pytest.mark.parametrize(("size", "width", "pairs"), [(8, 2, 1), (32, 4, 3), (16, 16, 2), (16, 1, 2)])
def test_kaleidoscope_matrices_take_layers_as_their_factors(size, width, pairs):
    """H.16 (2) to H.18: at most 4 log n layers for each of the matrices B C*, and one for the sum at the end."""
    drawn = [
        (random_butterfly(size, generator(2 * i)), random_butterfly(size, generator(2 * i + 1))) for i in range(pairs)
    ]
    factors, x = kaleidoscope(drawn), torch.randn(1000, size, generator=generator(9), dtype=torch.float64)
    matrix = torch.eye(size).double()
    for outer, inner in drawn:
        dense = [multiplied(part, torch.eye(size).double()).T for part in (outer, inner)]
        matrix = dense[0] @ dense[1].T @ matrix
    torch.testing.assert_close(on_a_tape(factors, x, width), x @ matrix.T, rtol=1e-10, atol=1e-8)
    assert len(list(factors_as_base_conv(factors, width))) <= 4 * pairs * math.log2(size) + 1
    torch.testing.assert_close(multiplied(transposed(factors), x), x @ matrix, rtol=1e-10, atol=1e-8)


def test_the_fourier_transform_is_a_butterfly_matrix_behind_a_permutation():
    size = 32
    bits = size.bit_length() - 1
    factors = permutation([int(f"{i:0{bits}b}"[::-1], 2) for i in range(size)])
    for level in range(bits):
        block = 2 << level
        place = torch.arange(size) % block
        turn = torch.exp(-2j * math.pi * (place % (block // 2)).double() / block)
        upper = place < block // 2
        factors.append(Factor(block, torch.where(upper, 1, -turn), torch.where(upper, turn, 1)))
    x = torch.randn(100, size, generator=generator(), dtype=torch.complex128)
    torch.testing.assert_close(multiplied(factors, x), torch.fft.fft(x))
    complex_ = [Factor(each.block, each.own.to(x.dtype), each.other.to(x.dtype)) for each in factors]
    torch.testing.assert_close(on_a_tape(complex_, x, 4), torch.fft.fft(x))


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_networks_copy_and_permute(size):
    """H.19: gathers of any entries by 3 log n factors."""
    drawn = random.Random(size)
    x = integers(100, size, seed=size)
    for _ in range(20):
        order = drawn.sample(range(size), size)
        assert torch.equal(multiplied(permutation(order), x), x[:, order])
        entries = drawn.randint(1, size)
        more = [drawn.randrange(entries) for _ in range(drawn.randint(0, size - entries))]
        owner = sorted([*range(entries), *more])
        copied = multiplied(copies(owner, size), x)
        assert torch.equal(copied[:, : len(owner)], x[:, owner]) and not copied[:, len(owner) :].any()
        source = [*owner, *[None] * (size - len(owner))]
        drawn.shuffle(source)
        factors = gather(source, size)
        assert len(factors) == 3 * math.log2(size)
        there = [i for i, entry in enumerate(source) if entry is not None]
        assert torch.equal(multiplied(factors, x)[:, there], x[:, [source[i] for i in there]])
    with pytest.raises(ValueError, match=r"source must have entries 0, 1, \.\.\. without a gap"):
        gather([0, 2], 4)
    for wrong in ([0, 1, 2], [0, 0]):
        with pytest.raises(ValueError, match="source must be a permutation of a power of two places; got"):
            permutation(wrong)


def random_circuit(seed: int, products: bool) -> Circuit:
    """Draws 80 gates, most of them of wires made shortly before, and 6 outputs."""
    drawn, circuit = random.Random(seed), Circuit(8)
    for _ in range(80):
        wires = circuit.one + 1 + circuit.size
        x, y = drawn.randrange(max(0, wires - 15), wires), drawn.randrange(wires)
        if products and drawn.random() < 0.4:
            circuit.multiply(x, y)
        else:
            circuit.add(x, y, drawn.choice([-1, 1, 2, 0.5]), drawn.choice([-1, 0, 1]))
    circuit.outputs = [drawn.randrange(circuit.one + 1 + circuit.size) for _ in range(6)]
    return circuit


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [1, 8])
def test_base_conv_computes_arithmetic_circuits(seed, width):
    """Theorem 4.2: O(depth log width) layers of O(width) entries."""
    circuit = random_circuit(seed, products=seed % 2 == 0)
    model, plan = circuit_as_base_conv(circuit, width), planned(circuit)
    u = torch.randint(-1, 2, (100, 8), generator=generator(seed)).double()
    torch.testing.assert_close(model(u), circuit(u), rtol=1e-12, atol=1e-12)
    assert len(plan.levels) <= 2 * circuit.depth
    size = model.rows * model.width
    assert size <= max(4 * plan.width, 2 * width)
    assert len(list(model.layers())) <= (len(plan.levels) + 1) * (6 * math.log2(size) + 4)
    for level in plan.levels:
        kinds = {gate.multiplies for gate in level.gates}
        assert kinds == {level.multiplies}


def test_linear_circuits_are_matrices():
    """Corollary H.20, and the constant 1 adds no more than a bias."""
    circuit = random_circuit(1, products=False)
    model = circuit_as_base_conv(circuit, 4)
    bias = circuit(torch.zeros(1, 8).double())
    matrix = circuit(torch.eye(8).double()) - bias
    u = integers(100, 8)
    torch.testing.assert_close(model(u), u @ matrix + bias, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("size", [2, 16, 64])
def test_base_conv_computes_the_fourier_transform(size):
    circuit = fourier_circuit(size)
    assert circuit.size == 3 * size * math.log2(size) and circuit.depth == 2 * math.log2(size)
    assert not any(gate.multiplies for gate in circuit.gates)
    u = torch.randn(100, 2 * size, generator=generator(), dtype=torch.float64)
    expected = torch.fft.fft(torch.complex(u[:, :size], u[:, size:]))
    got = circuit_as_base_conv(circuit, 8)(u)
    torch.testing.assert_close(torch.complex(got[:, :size], got[:, size:]), expected, rtol=1e-12, atol=1e-12)


def test_gates_and_outputs_that_cannot_be():
    circuit = Circuit(2)
    with pytest.raises(ValueError, match="a gate reads wires 0 to 2; got 0 and 3"):
        circuit.add(0, 3)
    with pytest.raises(ValueError, match="a circuit must have outputs; got none"):
        circuit_as_base_conv(circuit)
    assert circuit.add(0, 1) == circuit.add(0, 1) == 3 and circuit.size == 1  # is made once
    circuit.outputs = [1, 1, circuit.one]
    assert circuit_as_base_conv(circuit)(torch.tensor([[5.0, 7.0]])).tolist() == [[7, 7, 1]]


@pytest.mark.parametrize("decay", [0.0, 0.75, 1.0])
def test_base_conv_computes_retnet(decay):
    """H.22, against the recurrence of Algorithm 6."""
    rows, d = 12, 3
    a, c, v = (integers(d, d, seed=i) / 9 for i in range(3))
    u = integers(1000, rows, d, seed=5) / 9
    state, expected = torch.zeros(1000, d, d).double(), []
    for token in u.unbind(1):
        state = decay * state + (token @ a)[:, :, None] * (token @ v)[:, None]
        expected.append(((token @ c)[:, None] @ state)[:, 0])
    layers = retnet_as_base_conv(a, c, v, decay, rows)
    got = apply(layers, pad(u, (0, 3 * d * d - d)))
    torch.testing.assert_close(got[..., :d], torch.stack(expected, 1), rtol=1e-12, atol=1e-10)
    assert len(layers) == 4 and not got[..., d:].any()


@pytest.mark.parametrize("bits", [1, 3, 4])
def test_comparators_order_all_numbers(bits):
    """H.31 and H.32: size O(d), depth O(log d)."""
    x, y = torch.cartesian_prod(*[torch.arange(2**bits)] * 2).T
    u = torch.stack([number >> bit & 1 for number in (x, y) for bit in reversed(range(bits))], dim=1).double()
    circuit = Circuit(2 * bits)
    records = list(range(bits)), list(range(bits, 2 * bits))
    low, high = comparator(circuit, *records, bits)
    circuit.outputs = [less(circuit, *records), equal(circuit, *records), *low, *high]
    weights = 2 ** torch.arange(bits).flip(0).double()
    for got in (circuit(u), circuit_as_base_conv(circuit, 2)(u)):
        assert torch.equal(got[:, 0], (x < y).double()) and torch.equal(got[:, 1], (x == y).double())
        assert torch.equal(got[:, 2 : 2 + bits] @ weights, torch.minimum(x, y).double())
        assert torch.equal(got[:, 2 + bits :] @ weights, torch.maximum(x, y).double())
    assert circuit.size <= 20 * bits and circuit.depth <= 2 * math.ceil(math.log2(bits)) + 7


@pytest.mark.parametrize("count", range(1, 11))
def test_networks_sort_all_zeros_and_ones(count):
    """A network that sorts every row of 0 and 1 sorts every row."""
    rows = torch.tensor(list(itertools.product([0, 1], repeat=count)))
    steps = list(network(count))
    for step in steps:
        assert len({place for pair in step for place in pair}) == 2 * len(step)
        for i, j in step:
            rows[:, [i, j]] = rows[:, [i, j]].sort(1).values
    assert torch.equal(rows, rows.sort(1).values)
    log = (count - 1).bit_length()
    assert len(steps) == log * (log + 1) / 2


@pytest.mark.parametrize(("queries", "keys", "bits"), [(1, 1, 2), (4, 4, 3), (3, 6, 4), (7, 2, 3), (16, 16, 5)])
def test_a_circuit_searches_for_sorted_queries(queries, keys, bits):
    """H.33, with the bounds of its size and depth; numbers may be equal."""
    drawn = torch.randint(2**bits, (10_000, queries + keys), generator=generator(queries))
    wanted, ordered = (part.sort(1).values.contiguous() for part in drawn.split([queries, keys], 1))
    u = (torch.cat([wanted, ordered], 1)[..., None] >> torch.arange(bits).flip(0) & 1).flatten(1).double()
    circuit = search_circuit(queries, keys, bits)
    expected = torch.searchsorted(ordered, wanted)
    assert torch.equal(circuit(u).long(), expected)
    if queries + keys <= 8:  # larger ones have thousands of layers
        assert torch.equal(circuit_as_base_conv(circuit, 4, torch.float32)(u[:500]).long(), expected[:500])
    total = queries + keys
    assert circuit.size <= 12 * total * (bits + 1) * (math.log2(total) + 1)
    assert circuit.depth <= (math.log2(total) + 1) * (2 * math.log2(bits + 1) + 12)


@pytest.mark.parametrize(("triples", "bits"), [(1, 1), (3, 2), (5, 4), (8, 4)])
def test_a_circuit_of_comparators_recalls(triples, bits, scanned):
    """H.36, with a logarithm more than by the network of Ajtai et al."""
    circuit, rows = recall_circuit(triples, bits), draw(10_000, triples, 2**bits, seed=triples)
    expected = scanned(rows)
    assert triples == 1 or 0.1 < (expected != NONE).double().mean() < 0.9
    assert torch.equal(answers(circuit(written(rows, bits)), bits), expected)
    with pytest.raises(ValueError, match=f"{bits - 1} bits hold {2 ** (bits - 1)} tokens; the vocabulary has"):
        written(rows, bits - 1)
    n, log = 3 * triples, math.log2(3 * triples)
    assert circuit.size <= 12 * n * (bits + log) * log**2 and circuit.depth <= 12 * math.log2(bits + log) * log**2


def every_row(triples: int, vocab_size: int) -> Instances:
    keys = torch.tensor(list(itertools.permutations(range(vocab_size), triples)))
    others = torch.cartesian_prod(*[torch.arange(vocab_size)] * (2 * triples))
    values, queries = others.repeat(len(keys), 1).split(triples, 1)
    return Instances(keys.repeat_interleave(len(others), 0), values, queries, vocab_size)


@pytest.mark.parametrize(
    ("rows", "answered"), [(every_row(2, 4), 0.125), (draw(100, 4, 4, seed=0), 0.37)], ids=["all of 2", "100 of 4"]
)
def test_base_conv_recalls_by_the_circuit(rows, answered, scanned):
    """Theorem 4.4. The tape is of float32, in which the zeros and ones are exact. Most queries have no answer."""
    bits, triples = 2, rows.keys.shape[1]
    model = circuit_as_base_conv(recall_circuit(triples, bits), 16, torch.float32)
    out = model(written(rows, bits))
    assert set(out.unique().tolist()) <= {0.0, 1.0}
    expected = scanned(rows)
    assert torch.equal(answers(out, bits), expected)
    assert (expected != NONE).double().mean() == pytest.approx(answered, abs=0.02)
