"""Every gate that is accepted gives the right numbers: random calls with gates from 0 to -3e38, many resets among them,
against a recurrence in float64 that is written here and shares nothing with the package.

`GATE_CASES=3000 python -m pytest -s tests/ops/test_gates.py` draws so many calls for every implementation and dtype,
in parts of PART calls, so that `-n` runs them in several processes. The calls of a part then share their options, since
a GPU's kernels are compiled for each.
"""

import math
import os
import random
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations_with_replacement

import pytest
import torch
from torch import Tensor

from sympow.ops import DecodingState, PowerState, power_attention_step
from tests.ops.contract import (
    DEVICE,
    Case,
    assert_equal_float64,
    assert_within_budget,
    by_document,
    feature_terms,
    make_inputs,
    row_weights_of,
    run,
    with_gradients,
)

CASES = int(os.environ.get("GATE_CASES", "0"))
PART = 100
HARDEST = -3e38  # nearly the least number of float32


@lru_cache
def rows_of(key_dim: int, p: int) -> tuple[Tensor, Tensor]:
    """The channels [D, p] and the weight [D] of every row of a state, (M7)."""
    rows = list(combinations_with_replacement(range(key_dim), p))
    orderings = [math.factorial(p) / math.prod(map(math.factorial, Counter(row).values())) for row in rows]
    return torch.tensor(rows), torch.tensor(orderings, dtype=torch.float64).sqrt()


def recurrence(
    case: Case, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, state: PowerState | None
) -> tuple[Tensor, PowerState]:
    """Token by token, the weights of all earlier tokens and of the state are multiplied by one gate: no logarithms are
    summed, and nothing is chunked."""
    channels, weights = rows_of(case.K, case.p)
    (batch, time, groups, _), value_dim = k.shape, v.shape[3]
    phi_q = (q * case.K**-0.5)[..., channels].prod(-1) * weights
    phi_k = k[..., channels].prod(-1) * weights
    s = k.new_zeros(batch, groups, len(weights), value_dim) if state is None else state.s
    z = k.new_zeros(batch, groups, len(weights)) if state is None else state.z
    b = k.new_zeros(batch, 0, groups)  # of earlier tokens
    left = k.new_ones(batch, groups)  # of the state
    outs = []
    for t in range(time):
        gamma = k.new_ones(batch, groups) if log_g is None else log_g[:, t].exp()
        b = torch.cat([b * gamma[:, None], k.new_ones(batch, 1, groups)], 1)
        left = left * gamma
        query = q[:, t].unflatten(1, (groups, -1))
        weight = (torch.einsum("bgrk,bjgk->bjgr", query, k[:, : t + 1]) * case.K**-0.5) ** case.p * b[..., None]
        phi = phi_q[:, t].unflatten(1, (groups, -1)) * left[..., None, None]
        out = torch.einsum("bjgr,bjgv->bgrv", weight, v[:, : t + 1]) + torch.einsum("bgrd,bgdv->bgrv", phi, s)
        if case.divides:
            out = out / (weight.sum(1) + torch.einsum("bgrd,bgd->bgr", phi, z) + case.eps)[..., None]
        outs.append(out.flatten(1, 2))
    phi_k = phi_k * b[..., None]
    s = s * left[..., None, None] + torch.einsum("bjgd,bjgv->bgdv", phi_k, v)
    return torch.stack(outs, 1), PowerState(s, z * left[..., None] + phi_k.sum(1), case.p, case.K)


def expected(case: Case, inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """What `contract.run` returns, by the recurrence, on the CPU, where its many small steps take less time."""
    high = {name: None if x is None else x.detach().cpu().double().requires_grad_() for name, x in inputs.items()}
    results = by_document(case, high, partial(recurrence, case))
    return {name: x.to(DEVICE) for name, x in with_gradients(results, high, row_weights_of(case, high)).items()}


def hard_gates(shape: tuple[int, ...], seed: int) -> Tensor:
    """Log gates [B, T, G], float64: every row and head mixes other kinds, from gates of 1 to resets, one kind most."""
    draw = random.Random(seed)
    batch, time, groups = shape
    kinds = (
        lambda: 0.0,
        lambda: -(10 ** draw.uniform(-7, 0)),
        lambda: -draw.uniform(0, 5),
        lambda: -draw.uniform(60, 110),
        lambda: -draw.uniform(70, 90),
        lambda: -(10 ** draw.uniform(2, 5)),
        lambda: -(10 ** draw.uniform(4, 30)),
        lambda: HARDEST,
    )
    gates = torch.empty(shape, dtype=torch.float64)
    for b in range(batch):
        for g in range(groups):
            weights = [draw.random() ** 3 for _ in kinds]
            weights[draw.randrange(len(kinds))] += 3 * draw.random()
            every = draw.choice((0, 0, 2, 7, 16, 33))  # tokens from one reset to the next
            for t in range(time):
                gates[b, t, g] = draw.choices(kinds, weights)[0]()
                if every:
                    gates[b, t, g] = kinds[draw.choice((5, 6, 7))]() if t % every == 0 else gates[b, t, g].clamp(min=-5)
    return gates


def drawn(
    seed: int, options: int, dtype: torch.dtype, time: int, largest: int, wide: bool = False, highest: int = 4
) -> tuple[Case, dict[str, Tensor | None], int | None]:
    """A call with at most `time` tokens and K and V at most `largest`: its case, inputs and tokens of a chunk.
    `options` is the seed of what kernels are compiled for. `wide`: K and V are equal, and of sizes for which there are
    kernels for Hopper. `highest` is the largest p."""
    values, draw = random.Random(seed), random.Random(options)
    p = min(highest, draw.choice((1, 2, 2, 2, 2, 3, 4)))
    groups, packed = draw.choice((1, 1, 2)), draw.random() < 0.3
    length = values.randint(1, values.choice((4, time // 2, time)))
    ends = (*sorted(values.randint(0, length) for _ in range(values.randint(1, 3))), length) if packed else None
    case = Case(
        B=1 if packed else values.choice((1, 2)),
        T=length,
        H=groups * draw.choice((1, 1, 2, 3)),
        G=groups,
        K=draw.randint(1, largest if p < 3 else min(5, largest)),
        V=draw.randint(1, largest),
        p=p,
        state=draw.random() < 0.6,
        return_state=draw.random() < 0.7,
        normalize=p % 2 == 0 and draw.random() < 0.7,
        eps=draw.choice((1e-6, 1e-3, 1.0)),
        ends=ends,
    )
    if wide:
        width = draw.choice({1: (16, 64), 2: (16, 32, 64, 128), 3: (16, 32, 48), 4: (16,)}[p])
        case = replace(case, K=width, V=width, state=case.state and width != 48, return_state=width != 48)
    if p > 2 and highest < 4:  # the interpreter takes seconds for the many rows of a state
        case = replace(case, B=1, H=1, G=1)
    inputs = make_inputs(case, seed, dtype)
    gates = hard_gates((case.B, case.T, case.G), seed).to(DEVICE, inputs["log_g"].dtype)
    inputs["log_g"] = gates.requires_grad_()
    return case, inputs, draw.choice((None, 128, 256, 2 * time) if wide else (None, 8, 16, 32, 64, 2 * time))


def check(
    impl: str,
    dtype: torch.dtype,
    case: Case,
    inputs: dict[str, Tensor | None],
    chunk: int | None,
    want: dict[str, Tensor] | None = None,
) -> None:
    """`want` is what is expected; None: it is computed."""
    want, got = want or expected(case, inputs), run(case, inputs, impl, chunk)
    gone = inputs["log_g"].detach() < -800
    assert got["dlog_g"][gone].count_nonzero().item() == 0, "the gradient of a gate of 0 is 0"
    if dtype == torch.float64:
        assert_equal_float64(got, want)
    else:
        assert_within_budget(got, case, inputs, chunk if case.p > 2 else None, oracle=want)


DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN, KERNELS = ("eager", "reference"), ("triton",)  # the plain ones share their calls and what is expected
CALLS = [(impls, dtype) for impls in (PLAIN, KERNELS) for dtype in DTYPES if (impls, dtype) != (KERNELS, "float64")]
PARTS = range(-(-CASES // PART) or 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("impls", "dtype"), CALLS, ids=[f"{' and '.join(impls)}-{dtype}" for impls, dtype in CALLS])
def test_random_gates(impls, dtype, part):
    """Outputs, states, and the gradients of all inputs, of whole rows and of packed documents."""
    interpreted = impls == KERNELS and DEVICE == "cpu"
    wrong = []
    count = min(CASES - part * PART, PART) if CASES else 4 if interpreted else 24
    first = 1_000_000 * CALLS.index((impls, dtype)) + part * PART
    for seed in range(first, first + count):
        options = first if CASES else seed
        wide = impls == KERNELS and not interpreted and (options // PART if CASES else options) % 4 > 0
        size = (40, 4) if interpreted else (700, 8) if wide else (150, 8) if CASES else (80, 8)
        case, inputs, chunk = drawn(seed, options, DTYPES[dtype], *size, wide, 3 if interpreted else 4)
        want = expected(case, inputs)
        for impl in impls:
            try:
                check(impl, DTYPES[dtype], case, inputs, chunk, want)
            except AssertionError as error:
                wrong.append(f"{impl}, {seed}: {case}, chunk {chunk}: {error}")
    print(f"{' and '.join(impls)} {dtype}: {len(wrong)} of {count} wrong")
    assert not wrong, f"{len(wrong)} of {count} calls: " + "\n".join(wrong)


def test_p_4_in_kernels():
    """In the interpreter p = 4 takes as long as a hundred other calls, and is not drawn there. Here is one head, with
    tokens that read the state, and others behind a reset."""
    pytest.importorskip("triton", reason="needs triton")
    case = Case(T=5, K=2, V=2, p=4, state=True)
    inputs = make_inputs(case, dtype=torch.float32)
    inputs["log_g"] = torch.tensor([-0.5, -1.0, -1e5, -0.3, -0.1], device=DEVICE)[None, :, None].requires_grad_()
    check("triton", torch.float32, case, inputs, None)


def test_one_token_in_float16():
    """Its gradients are single products of factors in tf32, which tensor cores cut and do not round."""
    pytest.importorskip("triton", reason="needs triton")
    case, inputs, chunk = drawn(10_000_886, 10_000_800, torch.float16, 150, 8)
    check("triton", torch.float16, case, inputs, chunk)


def test_the_budget_counts_terms_that_cancel():
    """Of one channel and p = 3, z is a sum of cubes, here of 4.9, -3.6 and smaller ones. The kernels for Hopper round
    each product of a cube, the decay's too; z then errs by 2.26e-2 of 1.35, more than a budget of the sum
    alone allows. A cube that is left out, or a decay of values that is wrong by a fortieth, is not within it."""
    case, inputs, chunk = drawn(5_000_008, 5_000_008, torch.bfloat16, 80, 8)
    want = expected(case, inputs)
    k, gates = inputs["k"].detach()[..., 0], inputs["log_g"].detach().double()
    left = torch.cat([gates[:, 1:], torch.zeros_like(gates[:, :1])], 1).exp().flip(1).cumprod(1).flip(1)
    cubes = (k * left).to(k.dtype) * k * k  # nothing is left of the state before
    z = cubes.double().sum(1)[..., None]
    assert (z - want["z"]).norm() > 1.4 * case.p / 2 * torch.finfo(k.dtype).eps * want["z"].norm()
    assert_within_budget(want | {"z": z}, case, inputs, chunk, oracle=want)
    for name, wrong in (("z", z - cubes[:, 38, :, None].double()), ("s", want["s"] * (1 - 1 / 40))):
        with pytest.raises(AssertionError, match=f"^{name}: "):
            assert_within_budget(want | {name: wrong}, case, inputs, chunk, oracle=want)


@pytest.mark.parametrize("reset", [-1e4, -1e6, -1e9, -1e30, HARDEST], ids=str)
@pytest.mark.parametrize("impl", ["eager", "reference", "triton"])
def test_a_reset_takes_nothing_from_what_follows(impl, reset):
    """Four documents in a row, by resets. A sum of gates since the start would lose the gates behind a reset."""
    case = Case(T=64, K=4, V=3)
    inputs = make_inputs(case, dtype=torch.float32 if impl == "triton" else torch.float64)
    gates = torch.full_like(inputs["log_g"].detach(), -0.3)
    gates[:, ::16] = reset
    inputs["log_g"] = gates.requires_grad_()
    check(impl, inputs["q"].dtype, case, inputs, None if impl == "reference" else 32)


@pytest.mark.parametrize("time", [1, 3])
@pytest.mark.parametrize("impl", ["eager", "reference", "triton"])
def test_the_gradient_of_a_state_behind_a_hard_gate(impl, time):
    """exp(-80) is 2e-35, which float32 has. Nothing else is in the gradient, so a factor of 0 would be all wrong."""
    inputs = make_inputs(Case(T=time, K=4, V=3, state=True), dtype=torch.float32)
    inputs["log_g"] = torch.full_like(inputs["log_g"].detach(), -80.0).requires_grad_()
    case = Case(T=time, K=4, V=3, state=True)
    want, got = expected(case, inputs), run(case, inputs, impl)
    for name in ("ds", "dz"):
        scale = want[name].abs().max()
        # The state of the last token has another such factor, exp(-80) times its gradient.
        torch.testing.assert_close(got[name].double() / scale, want[name] / scale, rtol=1e-3, atol=1e-5)


def steps(impl: str, case: Case, inputs: dict[str, Tensor | None], draw: random.Random) -> dict[str, Tensor]:
    """The tokens of a call, in steps of one to five; a DecodingState for the kernels, else either kind of state."""
    x = {name: None if y is None else y.detach() for name, y in inputs.items()}
    dtype = torch.promote_types(x["q"].dtype, torch.float32)
    state = PowerState.zeros(case.B, case.G, case.K, case.V, case.p, dtype=dtype, device=DEVICE)
    if case.state:
        state = PowerState(x["s"].clone(), x["z"].clone(), case.p, case.K)
    if impl == "triton" or draw.random() < 0.5:
        state = DecodingState.from_state(state, dtype=x["q"].dtype, capacity=draw.choice((3, 8, 64)))
    outs, start = [], 0
    while start < case.T:
        now = slice(start, start + draw.randint(1, 5))
        tokens = [x[n][:, now] for n in ("q", "k", "v", "log_g")]
        out, state = power_attention_step(
            *tokens, state=state, p=case.p, normalize=case.divides, eps=case.eps, impl=impl, inplace=draw.random() < 0.5
        )
        outs.append(out)
        start = now.stop
    state = state.folded() if isinstance(state, DecodingState) else state
    return {"out": torch.cat(outs, 1), "s": state.s, "z": state.z}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("impls", "dtype"), CALLS, ids=[f"{' and '.join(impls)}-{dtype}" for impls, dtype in CALLS])
def test_random_gates_of_steps(impls, dtype, part):
    """On both kinds of states, with tails that are folded at any token."""
    interpreted = impls == KERNELS and DEVICE == "cpu"
    wrong = []
    count = min(CASES - part * PART, PART) if CASES else 3 if interpreted else 12
    first = 20_000_000 + 1_000_000 * CALLS.index((impls, dtype)) + part * PART
    for seed in range(first, first + count):
        size = (16, 4) if interpreted else (60, 8) if CASES else (30, 8)
        case, inputs, _ = drawn(seed, first if CASES else seed, DTYPES[dtype], *size)
        if case.ends is not None:
            case = replace(case, ends=None)
            inputs |= {n: None if inputs[n] is None else inputs[n][:1].detach() for n in ("s", "z")}
        case = replace(case, return_state=True)
        oracle = expected(case, inputs)
        want = {n: x for n, x in oracle.items() if n in ("out", "s", "z")}
        reading = {"out": feature_terms(case, inputs)}
        for impl in impls:
            got = steps(impl, case, inputs, random.Random(seed))
            try:
                if dtype == "float64":
                    assert_equal_float64(got, want, reading)
                else:
                    rounded = 1 if case.p > 2 else None
                    assert_within_budget(got, case, inputs, rounded, oracle=oracle, reading=reading)
            except AssertionError as error:
                wrong.append(f"{impl}, {seed}: {case}: {error}")
    print(f"{' and '.join(impls)} {dtype}, steps: {len(wrong)} of {count} wrong")
    assert not wrong, f"{len(wrong)} of {count} calls: " + "\n".join(wrong)


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_gates_of_float64(impl):
    """A gate beyond the range of float32 is a reset too, and none is blamed on q and k."""
    case = Case(T=20, K=4, V=3)
    inputs = make_inputs(case, dtype=torch.float32)
    gates = inputs["log_g"].detach().double()
    gates[:, ::6] = -1e300
    inputs["log_g"] = gates.requires_grad_()
    check(impl, torch.float32, case, inputs, None)
