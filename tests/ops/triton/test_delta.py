"""The delta rule's Triton kernels against the specification in float64: small in the interpreter, large on a GPU."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from sympow.ops import power_delta_rule
from tests.ops.contract import DEVICE
from tests.ops.delta_contract import CASES, DeltaCase, assert_within_budget, make_inputs, run

delta = pytest.importorskip("sympow.ops.triton.delta", reason="needs triton")
GPU = DEVICE == "cuda"
SMALL = {
    "groups": DeltaCase(B=1, T=70, H=4, G=2, K=5, V=7, state=True),
    "no gate": DeltaCase(B=1, T=66, H=1, G=1, K=4, V=4, gate=False),
    "resets": DeltaCase(B=1, T=70, H=1, G=1, K=4, V=5, state=True, resets=True),
    "p 1": DeltaCase(B=1, T=70, H=1, G=1, K=5, V=4, p=1, state=True),
    "packed": replace(CASES["packed"], H=1),
    "p 3": DeltaCase(B=1, T=20, H=1, G=1, K=5, V=4, p=3),
}
# Rows of several groups of blocks, which other programs connect, and chunks of several groups.
LONG = {
    "gate": (DeltaCase(B=2, T=280, H=1, G=1, K=4, V=4, return_state=False), None),
    "no gate": (DeltaCase(B=1, T=400, H=2, G=1, K=4, V=5, gate=False, state=True), 320),
    "resets": (DeltaCase(B=1, T=660, H=1, G=1, K=4, V=3, state=True, resets=True), 320),
    "V 70": (DeltaCase(B=1, T=280, H=1, G=1, K=3, V=70, return_state=False), None),
    "rows in parts": (DeltaCase(B=3, T=140, H=2, G=1, K=4, V=40, state=True), 64),
    "many groups": (DeltaCase(B=1, T=1090, H=1, G=1, K=3, V=3, resets=True, return_state=False), None),
}
LARGE = {
    f"K {k}, {name}": DeltaCase(K=k, V=k, **options)
    for k in (16, 32, 64, 128)
    for name, options in {
        "plain": {"B": 2, "T": 1100, "H": 2, "G": 2, "gate": False, "return_state": False},
        "gate": {"B": 1, "T": 1301, "H": 2, "G": 1, "state": True},
        "resets": {"B": 2, "T": 777, "H": 4, "G": 2, "resets": True, "return_state": False},
        "repeated": {"B": 1, "T": 600, "H": 2, "G": 2, "repeated": True},
    }.items()
} | {
    "V 48, K 40": DeltaCase(B=2, T=700, H=2, G=1, K=40, V=48, state=True),
    "V 160": DeltaCase(B=1, T=500, H=2, G=1, K=64, V=160, state=True),
    "packed": DeltaCase(T=1500, H=2, G=1, K=64, V=64, ends=(0, 1, 700, 700, 1500), return_state=False),
    "packed, states": DeltaCase(T=900, H=2, G=1, K=64, V=64, ends=(0, 1, 300, 300, 900), state=True),
    "p 1": DeltaCase(B=1, T=900, H=2, G=1, K=64, V=64, p=1, state=True),
    "p 3": DeltaCase(B=1, T=300, H=2, G=1, K=64, V=64, p=3, return_state=False),
    "p 4": DeltaCase(B=1, T=300, H=2, G=1, K=64, V=64, p=4, return_state=False),
}


@pytest.mark.parametrize("chunk_size", [64, None])
@pytest.mark.parametrize("name", SMALL)
def test_float32(name, chunk_size):
    inputs = make_inputs(SMALL[name], dtype=torch.float32)
    assert_within_budget(run(SMALL[name], inputs, "triton", chunk_size), SMALL[name], inputs)


@pytest.mark.parametrize("name", ["groups", "resets"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name, dtype):
    inputs = make_inputs(SMALL[name], dtype=dtype)
    assert_within_budget(run(SMALL[name], inputs, "triton", 64), SMALL[name], inputs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in LONG]
    + [(name, torch.bfloat16) for name in ("gate", "no gate", "V 70", "rows in parts")],
    ids=str,
)
def test_groups_of_blocks(name, dtype):
    case, chunk_size = LONG[name]
    inputs = make_inputs(case, dtype=dtype)
    assert_within_budget(run(case, inputs, "triton", chunk_size), case, inputs)


def test_a_chunk_has_few_launches():
    """One launch solves all groups of a chunk, and the backward computes states in front of chunks once."""
    case = DeltaCase(B=1, T=530, H=1, G=1, K=4, V=4, return_state=False)
    inputs = make_inputs(case, dtype=torch.bfloat16)
    states = mock.patch.object(delta.launch, "state_launches", wraps=delta.launch.state_launches)
    kernels = mock.patch.object(delta, "launcher_of", wraps=delta.launcher_of)
    with states as computed, kernels as launched:
        assert_within_budget(run(case, inputs, "triton", 512), case, inputs)
    solved = [call for call in launched.call_args_list if call.args[0] is delta.solve_pass]
    assert len(solved) == 2 * 2  # chunks, forward and backward
    assert not [call for call in launched.call_args_list if call.args[0] is delta.groups_pass]
    assert computed.call_count == 1 + 1 + 3  # between chunks each way, and states with two kinds of gradients


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_large(name, dtype):
    case = LARGE[name]
    inputs = make_inputs(case, dtype=dtype)
    results = run(case, inputs, "triton", 256)
    assert_within_budget(results, case, inputs)
    again = run(case, inputs, "triton", 256)
    assert all(torch.equal(x, again[n]) for n, x in results.items()), "two runs differ"


@pytest.mark.parametrize("seed", range(100 if GPU else 0))
def test_fuzz(seed):
    """Five random shapes of a call with random options. They share most of the compiled kernels."""
    draw = random.Random(seed)
    p, key_dim = draw.choice([2, 2, 2, 2, 1, 3]), draw.choice([16, 24, 32, 48, 64, 64, 128])
    value_dim = key_dim if draw.random() < 0.7 else draw.randint(1, 100)
    options = {"gate": draw.random() < 0.7, "state": draw.random() < 0.4, "return_state": draw.random() < 0.5}
    options |= {"resets": draw.random() < 0.3, "repeated": draw.random() < 0.2}
    groups, shared, packed = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.random() < 0.3
    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
    chunk_size = draw.choice([128, 256, 4096])
    for _ in range(5):
        T = draw.randint(1, 900)
        if packed:
            options |= {"B": 1, "ends": (*sorted(draw.randint(0, T) for _ in range(draw.randint(1, 4))), T)}
        else:
            options["B"] = draw.randint(1, 3)
        case = DeltaCase(T=T, H=groups * shared, G=groups, K=key_dim, V=value_dim, p=p, **options)
        inputs = make_inputs(case, seed=seed, dtype=dtype)
        assert_within_budget(run(case, inputs, "triton", chunk_size), case, inputs)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_compiled_is_eager():
    """As an operator of torch.compile, with gradients."""
    case = DeltaCase(B=2, T=300, H=4, G=2, K=64, V=64, return_state=False)

    def call(function):
        inputs = make_inputs(case, dtype=torch.bfloat16)
        out = function(*(inputs[name] for name in ("q", "k", "v", "beta", "log_g"))).out
        return [out, *torch.autograd.grad(out.float().square().sum(), [x for x in inputs.values() if x is not None])]

    for a, b in zip(call(power_delta_rule), call(torch.compile(power_delta_rule, fullgraph=True)), strict=True):
        assert (a.float() - b.float()).norm() <= 2 * torch.finfo(torch.bfloat16).eps * a.float().norm()
