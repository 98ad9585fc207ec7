"""The Triton kernels against the reference in float64: on a GPU every kernel and dtype, without one what Triton's
interpreter can run (small)."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from sympow.ops import power_attention
from sympow.ops.triton.rows import rows_of
from tests.ops.contract import (
    CASES,
    DEVICE,
    EPS32,
    Case,
    assert_within_budget,
    forward,
    gradients_of,
    make_inputs,
    run,
    terms_of_states,
    terms_through_states,
)

triton = pytest.importorskip("triton", reason="needs triton")
tl = pytest.importorskip("triton.language", reason="needs triton")
primitives = pytest.importorskip("sympow.ops.triton.primitives", reason="needs triton")
gradients = pytest.importorskip("sympow.ops.triton.gradients", reason="needs triton")
calls = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
gate = pytest.importorskip("sympow.ops.triton.gate", reason="needs triton")
launch = pytest.importorskip("sympow.ops.triton.launch", reason="needs triton")
GPU = DEVICE == "cuda"
# p 6 has no states in the kernels; p 4 has, and takes minutes in the interpreter.
NAMES = [n for n, c in CASES.items() if c.B and (c.T > 1 or c.state) and (c.p < 4 or (GPU and c.p == 4))]
HALF = {
    "p 1": Case(B=1, T=35, H=2, G=1, K=5, V=4, p=1, state=True),
    "p 2": Case(B=1, T=35, H=4, G=2, K=4, V=3, state=True),
    "p 2, packed": CASES["packed"],
    "p 2, quadratic": Case(B=1, T=16, H=4, G=2, K=4, V=3, return_state=False),
    "p 3": Case(B=1, T=18, H=1, G=1, K=5, V=4, p=3, state=True),
}
QUADRATIC = {name: replace(CASES[name], state=False, return_state=False) for name in ("groups", "p 3", "p 4", "p 6")}

# Shapes with which tiles are full and chunks many: T on no boundary, documents empty, of one token, and longer than a
# chunk.
LARGE = {
    f"K {k}, {name}": Case(K=k, V=k, **options)
    for k in (16, 32, 64, 128)
    for name, options in {
        "plain": {"B": 2, "T": 1100, "H": 2, "G": 2, "gate": False, "return_state": False},
        "gate": {"B": 1, "T": 1301, "H": 2, "G": 1, "state": True},
        "aligned": {"B": 2, "T": 1536, "H": 1, "G": 1, "return_state": False},
        "packed": {"T": 1500, "H": 2, "G": 1, "ends": (0, 1, 700, 700, 1500), "state": True},
    }.items()
} | {
    "V 48, K 40": Case(B=2, T=700, H=2, G=1, K=40, V=48, state=True),
    "V 160": Case(B=1, T=500, H=2, G=1, K=32, V=160, state=True),
    "p 3, K 32": Case(B=1, T=900, H=2, G=1, K=32, V=32, p=3, state=True),
    "p 3, K 32, packed": Case(T=1500, H=2, G=1, K=32, V=32, p=3, ends=(0, 1, 700, 700, 1500), state=True),
    "p 3, K 24": Case(B=2, T=600, H=2, G=1, K=24, V=20, p=3, state=True),
    "p 3, V 64": Case(B=1, T=800, H=2, G=2, K=32, V=64, p=3, gate=False, return_state=False),
    "p 4, K 16, V 64": Case(B=1, T=600, H=2, G=1, K=16, V=64, p=4, state=True),
    "p 4, K 20": Case(B=1, T=600, H=2, G=1, K=20, V=20, p=4, return_state=False),
    "p 4, K 24": Case(B=1, T=600, H=2, G=1, K=24, V=14, p=4, state=True),
    "p 4, K 32": Case(B=1, T=530, H=2, G=1, K=32, V=14, p=4, return_state=False),
    "p 4, packed": Case(T=900, H=2, G=1, K=16, V=16, p=4, ends=(0, 1, 300, 300, 900)),
    "p 3, K 48": Case(B=1, T=600, H=2, G=1, K=48, V=64, p=3, return_state=False),
    "p 3, K 64": Case(B=1, T=600, H=2, G=1, K=64, V=64, p=3, return_state=False),
    "p 4, K 16": Case(B=1, T=600, H=2, G=1, K=16, V=16, p=4, state=True),
    "p 1, K 64": Case(B=1, T=900, H=2, G=1, K=64, V=64, p=1, state=True),
}
# The quadratic form has an order of programs and, at K = 64, a key pass of its own. T is less than a block of its keys,
# at the end of one, within one.
LARGE_QUADRATIC = {
    name: Case(V=options["K"], return_state=False, **options)
    for name, options in {
        **{f"K {k}": {"B": 2, "T": 1301, "H": 2, "G": 1, "K": k} for k in (16, 32, 64, 128)},
        "heads of their own": {"B": 2, "T": 777, "H": 3, "G": 3, "K": 64},
        "no gate": {"B": 1, "T": 1301, "H": 6, "G": 2, "K": 64, "gate": False},
        "no normalizer": {"B": 2, "T": 333, "H": 4, "G": 2, "K": 64, "normalize": False},
        "neither": {"B": 1, "T": 333, "H": 2, "G": 2, "K": 64, "gate": False, "normalize": False},
        "aligned": {"B": 2, "T": 1024, "H": 2, "G": 2, "K": 64},
        "short": {"B": 3, "T": 37, "H": 4, "G": 2, "K": 64},
        "one token": {"B": 64, "T": 1, "H": 2, "G": 1, "K": 64},
        "packed": {"T": 700, "H": 2, "G": 1, "K": 64, "ends": (0, 1, 300, 300, 700)},
        "p 3, K 48": {"B": 1, "T": 777, "H": 2, "G": 1, "K": 48, "p": 3},
    }.items()
}


def smaller(case: Case) -> Case:
    """One row and few heads of at most 70 tokens, which the interpreter runs one after another."""
    if case.p > 2:
        case = replace(case, H=1, G=1)  # of the many rows of a state
    groups = min(case.G, 2 if case.H > 2 else 1)
    case = replace(case, H=groups * min(case.H // case.G, 2), G=groups, B=1, T=min(case.T, 70))
    return replace(case, T=9, ends=(0, 8, 9, 9)) if case.p > 2 and case.ends else case


@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    case = CASES[name] if GPU or name == "one head" else smaller(CASES[name])
    inputs = make_inputs(case, dtype=torch.float32)
    assert_within_budget(run(case, inputs, "triton", 16), case, inputs)


@pytest.mark.parametrize(("name", "dtype"), [*((n, torch.bfloat16) for n in HALF), ("p 2", torch.float16)], ids=str)
def test_half_precision(name, dtype):
    inputs = make_inputs(HALF[name], dtype=dtype)
    assert_within_budget(run(HALF[name], inputs, "triton", 16), HALF[name], inputs)


def test_a_row_shorter_than_its_only_chunk():
    """A state is asked for, so the row is a chunk, whose length the kernels round up."""
    case = Case(B=1, T=79, H=2, G=1, K=16, V=16, gate=True, return_state=True)
    inputs = make_inputs(case, dtype=torch.float32)
    assert_within_budget(run(case, inputs, "triton", 256), case, inputs)


@pytest.mark.parametrize("name", QUADRATIC)
def test_quadratic_form(name):
    inputs = make_inputs(QUADRATIC[name], dtype=torch.float32)
    assert_within_budget(run(QUADRATIC[name], inputs, "triton", 4096), QUADRATIC[name], inputs)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_large(name, dtype):
    case = LARGE[name]
    inputs = make_inputs(case, dtype=dtype)
    results = run(case, inputs, "triton", 256)
    assert_within_budget(results, case, inputs, 256 if case.p > 2 else None)
    again = run(case, inputs, "triton", 256)
    assert all(torch.equal(x, again[n]) for n, x in results.items()), "two runs differ"


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name in LARGE if name.startswith("K ")])
def test_large_without_gradients(name):
    """States then have other rows (`plan.HOPPER`)."""
    inputs = make_inputs(LARGE[name], dtype=torch.bfloat16)
    with torch.no_grad():
        results = forward(LARGE[name], inputs, "triton", 256)
    assert_within_budget(results, LARGE[name], inputs)


@pytest.mark.parametrize("seed", range(100 if GPU else 0))
def test_fuzz(seed):
    """Three random shapes of a call with random options. They share most of the compiled kernels."""
    draw = random.Random(seed)
    p = draw.choice([2, 2, 2, 2, 1, 3])
    key_dim = draw.choice([16, 32, 64, 128] if p < 3 else [16, 32])
    value_dim = key_dim if draw.random() < 0.7 else draw.randint(1, 100)
    options = {"gate": draw.random() < 0.7, "state": draw.random() < 0.4, "return_state": draw.random() < 0.5}
    groups, shared, packed = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.random() < 0.3
    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
    chunk_size = draw.choice([128, 256, 4096])
    for _ in range(3):
        T = draw.randint(1, 900)
        if packed:
            options |= {"B": 1, "ends": (*sorted(draw.randint(0, T) for _ in range(draw.randint(1, 4))), T)}
        else:
            options["B"] = draw.randint(1, 3)
        case = Case(T=T, H=groups * shared, G=groups, K=key_dim, V=value_dim, p=p, **options)
        inputs = make_inputs(case, seed=seed, dtype=dtype)
        peer = min(chunk_size, 256) if p > 2 else None
        assert_within_budget(run(case, inputs, "triton", chunk_size), case, inputs, peer)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", LARGE_QUADRATIC)
def test_large_quadratic(name):
    case = LARGE_QUADRATIC[name]
    inputs = make_inputs(case, dtype=torch.bfloat16)
    results = run(case, inputs, "triton", 4096)
    assert_within_budget(results, case, inputs)
    again = run(case, inputs, "triton", 4096)
    assert all(torch.equal(x, again[n]) for n, x in results.items()), "two runs differ"


@pytest.mark.parametrize("gated", [False, True])
def test_scales(gated):
    """What the key pass of `hopper.gradients_quadratic` multiplies a query's scores with; two heads share a gate."""
    B, T, H, G, V, out_scale = 2, 37, 4, 2, 16, 1 / 64
    gen = torch.Generator().manual_seed(0)
    out, dout = (torch.randn(B, T, H, V, generator=gen).to(DEVICE) for _ in range(2))
    norm = (torch.rand(H, B * T, generator=gen) + 0.5).to(DEVICE)
    low = -4 * torch.rand(G, B * T, generator=gen).cumsum(1).to(DEVICE) / T
    sums = torch.stack([low - 1e6, torch.full_like(low, -1e6), low])
    factor, scales, near, delta = (torch.empty_like(norm) for _ in range(4))
    gradients.row_factors[(B, H)](
        out, dout, norm, sums, factor, scales, near, delta, None, None, T, B * T, H, out_scale, V=V,
        COLUMNS=V, R=H // G, BLOCK=64, GATED=gated, NORMALIZE=True, TILED=True, PACKED=False, OVERLAP=False,
    )  # fmt: skip
    expected = (out_scale / norm.double()).log2()
    expected_near = out_scale / norm.double()
    if gated:
        decay = low.double().repeat_interleave(H // G, 0)
        expected += decay
        expected_near *= decay.exp2()
    assert (near / expected_near - 1).abs().max() <= 8 * EPS32
    # A GPU's quotient errs by 2 EPS32, its logarithm by 2 more, and the sum is rounded once.
    assert (scales - expected).abs().max() <= 4 * EPS32 * expected.abs().max()
    assert (factor * norm - 1).abs().max() <= 4 * EPS32


@pytest.mark.parametrize("tiled", [False, True], ids=["", "Hopper"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("ends", "chunk"), [(None, 300), (None, 64), ((0, 1, 40, 40, 300), 128)])
def test_sums_of_gates(ends, chunk, heads, tiled):
    """Their differences, behind resets and gates that are nearly resets, and where the high parts for Hopper change."""
    G, T, tile = 2 * heads, 300, gate.REACH_TILE.value
    gen = torch.Generator().manual_seed(0)
    log_g = -(10 ** (6 * torch.rand(1, T, G, generator=gen) - 4)).to(DEVICE)
    log_g[:, 5::7] = -1e30
    x = torch.zeros(1, T, G, 16, device=DEVICE)
    cu_seqlens = None if ends is None else torch.tensor((0, *ends), dtype=torch.int32, device=DEVICE)
    call = calls.Call(x, x, x, log_g, cu_seqlens, 2, 1.0, 0 if ends is None and chunk == T else chunk, False)
    sums = torch.full((3 if tiled else 2, G, T), torch.nan, device=DEVICE)
    gate.gate_sums[(call.plan.layout.blocks(chunk), G // heads)](
        log_g, sums, None, None, cu_seqlens, call.table(chunk), T, T, G, chunk, 150.0,
        BLOCK=128, HEADS=heads, TILED=tiled, PACKED=ends is not None, OVERLAP=False,
    )  # fmt: skip
    exact = (log_g[0].double() / math.log(2)).clamp(min=-160).T
    high, low = sums[-2:].double()
    for start, stop in pairwise((0, *(ends or (T,)))):
        for first in range(start, stop, chunk):
            span = slice(first, min(first + chunk, stop))
            wanted = exact[:, span].cumsum(1)
            read = slice(None)
            if tiled:
                ends_of_tiles = [*range(tile - 1, wanted.shape[1] - 1, tile), wanted.shape[1] - 1]
                read = torch.tensor(ends_of_tiles, device=DEVICE)
                assert sums[0, :, span].isnan().sum() == G * (wanted.shape[1] - len(read))
            torch.testing.assert_close(sums[0, :, span][:, read].double(), wanted[:, read], rtol=EPS32, atol=0)
            error = (high[:, span, None] - high[:, None, span]) + (low[:, span, None] - low[:, None, span])
            error -= wanted[:, :, None] - wanted[:, None]
            assert error.abs().max() <= (160 * tile * EPS32 if tiled else 1e-6)
            if tiled:
                tiles = high[:, span].split(tile, 1)
                assert not high.remainder(16).any() and all(y.eq(y[:, :1]).all() for y in tiles)
                before = torch.cat([torch.zeros(G, 1).to(wanted), wanted], 1)[:, : stop - first : tile][:, : len(tiles)]
                least = torch.stack([y[:, 0] for y in tiles], 1)
                assert ((before >= least) & (before < least + 16)).all()


@pytest.mark.parametrize(
    ("rows", "ends", "block"),  # in blocks of 8 tokens more follow one than are added up at once
    [
        (2, (100, 200), 8),
        (1, (0, 1, 1, 64, 65, 200, 200), 8),
        (2, (2500, 5000), launch.GATE_BLOCK),
        (1, (0, 1, 1, 2048, 2049, 5000, 5000), launch.GATE_BLOCK),
        (2, (100, 200), launch.GATE_BLOCK),  # one block has all of a row
        (1, (0, 1, 1, 64, 65, 200, 200), launch.GATE_BLOCK),
    ],
)
def test_gate_gradient(rows, ends, block, monkeypatch):
    """Of rows and of packed documents. The numbers have 17 bits, so that all is exact but for the last rounding."""
    monkeypatch.setattr(launch, "GATE_BLOCK", block)
    G, R, tokens = 2, 3, ends[-1]
    gen = torch.Generator().manual_seed(0)
    dsums_q, dsums_k, last = (
        torch.randint(-(2**16), 2**16, shape, generator=gen).float().to(DEVICE) / 1024
        for shape in ((G * R, tokens), (G, tokens), (len(ends), G))
    )
    cu_seqlens = torch.tensor((0, *ends), dtype=torch.int32, device=DEVICE) if rows == 1 else None
    q, k = (torch.zeros(rows, tokens // rows, heads, 16, device=DEVICE) for heads in (G * R, G))
    log_g = k[..., 0].contiguous()
    log_g.view(-1, G)[::7, 0] = -120.0  # a decay of 0
    call = calls.Call(q, k, k, log_g, cu_seqlens, p=2, scale=1.0, chunk=0, tf32=False)
    terms = (dsums_q.double().unflatten(0, (G, R)).sum(1) - dsums_k) / 2
    documents = zip(terms.split([b - a for a, b in pairwise((0, *ends))], 1), last.double(), strict=True)
    expected = torch.cat([x.flip(1).cumsum(1).flip(1) + end[:, None] for x, end in documents], 1).T.float()
    expected[::7, 0] = 0
    assert torch.equal(launch.gate_gradient(call, log_g, dsums_q, dsums_k, last).flatten(0, 1), expected)


@pytest.mark.parametrize(("rows", "ends"), [(2, (100, 200)), (1, (0, 1, 1, 64, 65, 200, 200))])
@pytest.mark.parametrize(("final", "block"), [(False, 8), (True, 8), (True, launch.SHORT_GATE_BLOCK)])
def test_gate_gradient_by_chunk(rows, ends, final, block, monkeypatch):
    """To the end of each chunk, and from there on what goes through the states. The numbers have 17 bits."""
    monkeypatch.setattr(launch, "SHORT_GATE_BLOCK", block)
    G, R, tokens = 2, 3, ends[-1]
    gen = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor((0, *ends), dtype=torch.int32, device=DEVICE) if rows == 1 else None
    q, k = (torch.zeros(rows, tokens // rows, heads, 16, device=DEVICE) for heads in (G * R, G))
    call = calls.Call(q, k, k, k[..., 0], cu_seqlens, p=2, scale=1.0, chunk=32, tf32=False, gradient_rows=True)
    assert call.plan.restarts
    chunk = call.plan.chunk  # as the device's kernels round it
    chunks = call.plan.layout.blocks(chunk)
    dsums_q, dsums_k, last, through = (
        torch.randint(-(2**16), 2**16, shape, generator=gen).to(torch.float32).to(DEVICE) / 1024
        for shape in ((G * R, tokens), (G, tokens), (len(ends), G), (chunks, G, launch.STATE_PARTS))
    )
    terms = (dsums_q.double().unflatten(0, (G, R)).sum(1) - dsums_k) / 2
    expected, index = [], 0
    for n, (start, stop) in enumerate(pairwise((0, *ends))):
        for first in range(start, stop, chunk):
            end = min(first + chunk, stop)
            after = through[index].double().sum(1) if end < stop else last[n].double() * final
            expected.append(terms[:, first:end].flip(1).cumsum(1).flip(1) + after[:, None])
            index += 1
    log_g = k[..., 0].contiguous()
    log_g.view(-1, G)[::7, 0] = -120.0  # a decay of 0
    want = torch.cat(expected, 1).T.float()
    want[::7, 0] = 0
    got = launch.gate_gradient(call, log_g, dsums_q, dsums_k, last if final else None, through.double())
    assert torch.equal(got.flatten(0, 1), want)


@pytest.mark.parametrize("ends", [None, (0, 1, 40, 40, 200)])
@pytest.mark.parametrize(("p", "key_dim"), [(1, 16), (2, 16), (2, 32)])
def test_through_states(p, key_dim, ends):
    """S . dS, and Z . dZ, at the end of every chunk that another of its sequence follows."""
    G = 2
    cu_seqlens = None if ends is None else torch.tensor((0, *ends), dtype=torch.int32, device=DEVICE)
    k = torch.zeros(1 if ends else 2, 200, G, key_dim, device=DEVICE)
    call = calls.Call(k, k, k, k[..., 0], cu_seqlens, p, 1.0, 32, False, gradient_rows=True)
    chunk = call.plan.chunk  # as the device's kernels round it
    shapes = call.plan.state_shapes(z=p == 2)
    gen = torch.Generator().manual_seed(0)
    (s, z), (ds, dz) = ([torch.randn(shape, generator=gen).to(DEVICE) for shape in shapes] for _ in range(2))
    # Of rows of one monomial all are alike, and Z is symmetric, as those that are summed up.
    s, ds = (call.plan.rows.from_public(call.plan.rows.to_public(x)) for x in (s, ds))
    through = launch.through_states(call, s, z, ds, dz, p == 2).sum(2)
    index = followed = 0
    for start, stop in pairwise((0, *ends)) if ends else ((0, 200), (200, 400)):
        for first in range(start, stop, chunk):
            if first + chunk < stop:
                a, b = (call.plan.rows.to_public(x).double() for x in (s[index + 1], ds[index]))
                expected = (a * b).sum((1, 2))
                if p == 2:
                    expected += (z[index + 1].double() * dz[index]).sum((1, 2))
                torch.testing.assert_close(through[index], expected, rtol=1e-5, atol=1e-4)
                followed += 1
            index += 1
    assert followed >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if GPU else [torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("p", "key_dim"), [(1, 16), (2, 16), *([(2, 32), (2, 64), (2, 128)] if GPU else [])])
def test_the_state_pass_multiplies_gradients_with_states(p, key_dim, packed, dtype):
    """While it forms them: as `through_states` of both; also where it writes them over the states."""
    B, T, G = 1 if packed else 2, 1100 if GPU else 100 if packed else 70, 2 if GPU else 1
    ends = (0, 1, T // 4, T // 4, T) if packed else None
    cu_seqlens = None if ends is None else torch.tensor((0, *ends), dtype=torch.int32, device=DEVICE)
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(B, T, G, key_dim, generator=gen).to(DEVICE, dtype) for _ in range(4))
    log_g = -torch.rand(B, T, G, generator=gen).to(DEVICE) / 16
    call = calls.Call(q, k, v, log_g, cu_seqlens, p, 0.1, 32, False, gradient_rows=True)
    factor, delta = (torch.rand(G, B * T, generator=gen).to(DEVICE) for _ in range(2))
    reads_z, gradient, parts = p == 2, (dout, factor, delta), []
    for apart in (True, False):
        s, z = launch.states(call, None, None, None, reads_z, room=launch.new_states(call, reads_z, 1))
        room = launch.new_states(call, reads_z) if apart else (s[1:], z[1:])
        products = launch.new_products(call, reads_z).fill_(0)
        forward = launch.ForwardStates(s[1:], z[1:], products)
        ds, dz = launch.states(call, None, None, None, reads_z, gradient, room, forward)
        parts.append((ds, dz, products))
        if apart:
            expected = launch.through_states(call, s, z, ds, dz, reads_z).sum(2)
    chunk, index, followed = call.plan.chunk, 0, []
    for start, stop in pairwise((0, *ends)) if ends else ((0, T), (0, T)):
        for first in range(start, stop, chunk):
            followed += [index] if first + chunk < stop else []
            index += 1
    assert len(followed) >= 2
    assert all(torch.equal(a[:index], b[:index]) for a, b in zip(*parts, strict=True))
    got, expected = parts[0][2].sum(2)[followed], expected[followed]
    assert (got - expected).norm() <= 1e-4 * expected.norm()  # float32 sums of products of either sign


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("key_dim", [32, 64, 128])
def test_gate_gradient_of_a_long_row(key_dim):
    """In bfloat16, of heads with a short, a middling and a long memory, where all scores have a part in common, as in
    new layers. What roundings of later tokens leave adds up over a chunk, not over the row."""
    time, heads, channels = 32_768, 3, key_dim // 8
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (0.5 * torch.randn(1, time, heads, key_dim, generator=gen) for _ in range(4))
    for x in (q, k):
        x[..., -channels:] += (key_dim**0.5 / channels) ** 0.5
    v, dout = (x + 0.3 * torch.randn(key_dim, generator=gen) for x in (v, dout))
    log_g = logsigmoid(torch.tensor([1.0, 4.5, 8.0]) + 0.1 * torch.randn(1, time, heads, generator=gen))
    q, k, v, dout = (x.to(DEVICE, torch.bfloat16) for x in (q, k, v, dout))

    def gradient(dtype, **options):
        gate = log_g.to(DEVICE, torch.promote_types(dtype, torch.float32)).requires_grad_()
        out = power_attention(q.to(dtype), k.to(dtype), v.to(dtype), gate, p=2, eps=1.0, **options).out
        out.backward(dout.to(dtype))
        return gate.grad[0].double()

    exact, got = gradient(torch.float64, impl="eager"), gradient(torch.bfloat16, impl="triton", chunk_size=1024)
    assert ((got - exact).norm(dim=0) < 0.1 * exact.norm(dim=0)).all()


def one_after_the_other(terms: torch.Tensor) -> torch.Tensor:
    """The sums of float32 terms [..., n, V] over n as a GPU's float32 products add them, less the exact ones."""
    summed = torch.from_numpy(np.add.accumulate(terms.numpy(), axis=-2)[..., -1, :].copy())
    return summed.double() - terms.double().sum(-2)


@pytest.mark.parametrize(("p", "key_dim"), [(2, 16), (3, 16), (4, 16)])
def test_the_budget_counts_sums_over_features(p, key_dim):
    """Sums of float32 terms in the order of the kernels are within it, and are not much smaller; a decay that is wrong
    by a thousandth is not. Before, sums over the 13,056 rows of p = 4 were not."""
    rows = rows_of(key_dim, p)
    case = Case(T=1, K=key_dim, V=16, p=p, gate=False, state=True, normalize=False)
    ratios = []
    for seed in range(8):
        inputs = {n: None if x is None else x.detach().cpu() for n, x in make_inputs(case, seed, torch.float32).items()}
        high = {n: None if x is None else x.double().requires_grad_() for n, x in inputs.items()}
        oracle = run(case, high, "reference")
        through, terms = {}, {}
        for name, x, state in (
            ("dv", inputs["k"], gradients_of(oracle, None)["s"]),
            ("out", inputs["q"] * case.K**-0.5, high["s"].detach()),
        ):
            phi = (x[..., rows.prefixes].prod(-1) * rows.weights)[..., None] * x[..., None, :]
            terms[name] = phi.flatten(-2)[..., None] * rows.from_public(state.float())[:, None]
            through[name] = one_after_the_other(terms[name])
        sizes = {"dv": terms_through_states(case, high, oracle)["dv"], "out": terms_of_states(case, high, None)[0]}
        ratios += [(through[n].norm() / (EPS32 * sizes[n].norm())).item() for n in through]
        sums = {n: oracle[n].detach() + x for n, x in through.items()}
        leaves = {n: None if x is None else x.to(DEVICE).requires_grad_() for n, x in inputs.items()}
        oracle = {n: x.to(DEVICE) for n, x in oracle.items()}
        assert_within_budget(oracle | {n: x.to(DEVICE) for n, x in sums.items()}, case, leaves, oracle=oracle)
        for name in sums:
            wrong = sums[name] - 1e-3 * terms[name].double().sum(-2)
            with pytest.raises(AssertionError, match=f"^{name}: "):
                assert_within_budget(oracle | {name: wrong.to(DEVICE)}, case, leaves, oracle=oracle)
    assert max(ratios) < 1 < 20 * sum(ratios) / len(ratios)


@triton.jit
def round_all(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, primitives.rounded(tl.load(x + i), "tf32"))


def test_factors_are_rounded_to_the_nearest_tf32():
    """To a multiple of 2**13 of the last bit; infinities and every NaN stay."""
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1024,), generator=gen).int()
    bits[:4] = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, 0x7F7FFFFF])  # two NaNs, infinity, the largest number
    x = bits.to(DEVICE).view(torch.float32)
    out = torch.empty_like(x)
    round_all[(1,)](x, out, N=1024)
    numbers = x.isfinite() & out.isfinite()
    assert out[0].isnan() and out[1].isnan() and out[2].isposinf() and out[3].isposinf()
    assert torch.equal(x.isnan(), out.isnan()) and numbers.sum() > 1000
    assert not (out[numbers].view(torch.int32) & 0x1FFF).any()
    exponent = x[numbers].double().frexp()[1].clamp(min=-125).double()
    assert ((out - x)[numbers].double().abs() <= 2 ** (exponent - 12)).all()  # half of 2**-10 of the power of two below


@pytest.mark.parametrize("final", [False, True])
def test_float16_averages_equal_values(final):
    """An average of ones is 1. Before, weights were cut to tf32 in the numerator, and averages were 0.9995."""
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 48, 2, 16, generator=gen).half().to(DEVICE) for _ in "qk")
    v = torch.ones_like(k)
    out, _ = power_attention(q, k, v, None, impl="triton", chunk_size=16 if final else None, return_state=final)
    assert (out.double() - 1).mean().abs() < 2**-13
