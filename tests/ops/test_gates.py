"""Every gate that is accepted gives the right numbers: random calls with gates from 0 to -3e38, many resets among them,
against a recurrence in float64 that is written here and shares nothing with the package.

`GATE_CASES=3000 python -m pytest -s tests/ops/test_gates.py` draws so many calls for every implementation and dtype.
"""

import math
import os
import random
from collections import Counter
from functools import lru_cache, partial
from itertools import combinations_with_replacement

import pytest
import torch
from torch import Tensor

from sympow.ops import DecodingState, OutOfRangeError, PowerState, power_attention, power_attention_step
from tests.ops.contract import (
    DEVICE,
    Case,
    assert_equal_float64,
    assert_within_budget,
    by_document,
    make_inputs,
    row_weights_of,
    run,
    with_gradients,
)

CASES = int(os.environ.get("GATE_CASES", "0"))
HARDEST = -3e38  # nearly the least number of float32


@lru_cache
def rows_of(key_dim: int, p: int) -> tuple[Tensor, Tensor]:
    """The channels [D, p] and the weight [D] of every row of a state, (M7)."""
    rows = list(combinations_with_replacement(range(key_dim), p))
    orderings = [math.factorial(p) / math.prod(map(math.factorial, Counter(row).values())) for row in rows]
    return torch.tensor(rows, device=DEVICE), torch.tensor(orderings, dtype=torch.float64, device=DEVICE).sqrt()


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
    """What `contract.run` returns, by the recurrence."""
    high = {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}
    results = by_document(case, high, partial(recurrence, case))
    return with_gradients(results, high, row_weights_of(case, high))


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


def drawn(seed: int, dtype: torch.dtype, time: int, largest: int) -> tuple[Case, dict[str, Tensor | None], int | None]:
    """A call with at most `time` tokens and K and V at most `largest`: its case, inputs and tokens of a chunk."""
    draw = random.Random(seed)
    p = draw.choice((1, 2, 2, 2, 2, 3, 4))
    groups, packed = draw.choice((1, 1, 2)), draw.random() < 0.3
    length = draw.randint(1, draw.choice((4, time // 2, time)))
    ends = (*sorted(draw.randint(0, length) for _ in range(draw.randint(1, 3))), length) if packed else None
    case = Case(
        B=1 if packed else draw.choice((1, 2)),
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
    inputs = make_inputs(case, seed, dtype)
    gates = hard_gates((case.B, case.T, case.G), seed).to(DEVICE, inputs["log_g"].dtype)
    inputs["log_g"] = gates.requires_grad_()
    return case, inputs, draw.choice((None, 8, 16, 32, 64, 2 * time))


def check(impl: str, dtype: torch.dtype, case: Case, inputs: dict[str, Tensor | None], chunk: int | None) -> None:
    want, got = expected(case, inputs), run(case, inputs, impl, chunk)
    gone = inputs["log_g"].detach() < -800
    assert got["dlog_g"][gone].count_nonzero().item() == 0, "the gradient of a gate of 0 is 0"
    if dtype == torch.float64:
        assert_equal_float64(got, want)
    else:
        assert_within_budget(got, case, inputs, chunk if case.p > 2 else None, oracle=want)


DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CALLS = [(impl, dtype) for impl in ("eager", "reference", "triton") for dtype in DTYPES]
CALLS.remove(("triton", "float64"))


@pytest.mark.parametrize(("impl", "dtype"), CALLS)
def test_random_gates(impl, dtype):
    """Outputs, states, and the gradients of all inputs, of whole rows and of packed documents."""
    interpreted = impl == "triton" and DEVICE == "cpu"
    if impl == "triton":
        pytest.importorskip("triton", reason="needs triton")
    wrong = []
    count = CASES or (6 if interpreted else 40)
    first = 1_000_000 * CALLS.index((impl, dtype))
    for seed in range(first, first + count):
        case, inputs, chunk = drawn(seed, DTYPES[dtype], *((40, 4) if interpreted else (150, 8)))
        try:
            check(impl, DTYPES[dtype], case, inputs, chunk)
        except AssertionError as error:
            wrong.append(f"{seed}: {case}, chunk {chunk}: {error}")
    print(f"{impl} {dtype}: {len(wrong)} of {count} wrong")
    assert not wrong, f"{len(wrong)} of {count} calls: " + "\n".join(wrong)
