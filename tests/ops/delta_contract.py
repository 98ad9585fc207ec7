"""What every implementation of the delta rule is held to: inputs, the oracle, and the tolerances, in one place.

The oracle is the quadratic form of `sympow.ops.delta_reference` in float64. In float64 the tolerance is that of
`contract`. In lower precision an implementation may err by at most three times what the quadratic form errs in plain
torch at that precision (products of rounded inputs, the rest in float32), plus what any implementation rounds. Three
and not two, because an implementation also rounds what it keeps between its passes: the inverse of a block, the errors
e, and the states. To this come one rounding of what is stored, p roundings of states, whose terms are products of p
entries, and the float32 rounding of sums over T tokens. A call that reads states also sums up their entries in float32,
which the quadratic form does in parts or not at all: over the D features for a value; for a channel of a query or key,
whose gradient is a sum over values too, over V times the features of degree p - 1. A sum of n terms rounds by about
n**0.5 times half an eps. For gradients of the gate, which are what is left of terms of both signs, the rounding of
those terms. What is below 1e-6 of the largest result is judged by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from sympow.ops import delta_reference, power_delta_rule
from sympow.ops.feature_map import spow_dim
from tests.ops.contract import DEVICE, EPS32, Sizes, assert_equal_float64, leaves, normal, with_gradients

__all__ = ["assert_equal_float64"]
_LEAST_CHUNK = 64  # tokens, up to which no implementation reads states that are neither given nor returned


@dataclass(frozen=True)
class DeltaCase(Sizes):
    """One call of power_delta_rule."""

    resets: bool = False
    repeated: bool = False


CASES = {
    "one token": DeltaCase(),
    "one token, state": DeltaCase(T=1, H=4, G=2, K=4, V=3, state=True),
    "no batch": DeltaCase(B=0, T=3),
    "no token": DeltaCase(B=2, T=0, state=True),
    "one head": DeltaCase(B=2, T=37, K=5, V=7),
    "no gate": DeltaCase(B=2, T=37, H=3, G=3, K=4, V=4, gate=False, state=True),
    "groups": DeltaCase(B=2, T=65, H=6, G=2, K=4, V=3, state=True),
    "multi-query": DeltaCase(B=1, T=130, H=5, G=1, K=3, V=1),
    "long": DeltaCase(B=1, T=301, H=2, G=2, K=8, V=8, state=True),
    "no state out": DeltaCase(B=1, T=150, H=2, G=1, K=4, V=5, return_state=False),
    "resets": DeltaCase(B=1, T=150, H=2, G=2, K=4, V=5, state=True, resets=True),
    "repeated keys": DeltaCase(B=1, T=70, H=2, G=2, K=4, V=5, repeated=True),
    "p 1": DeltaCase(B=2, T=70, H=2, G=1, K=5, V=4, p=1, state=True),
    "p 3": DeltaCase(B=1, T=45, H=2, G=1, K=5, V=4, p=3, state=True),
    "p 4": DeltaCase(B=1, T=45, H=2, G=1, K=5, V=4, p=4, state=True),
    "packed": DeltaCase(T=70, H=2, G=1, K=4, V=3, ends=(1, 1, 20, 70), return_state=False),
    "packed, states": DeltaCase(T=41, H=2, G=2, K=3, V=4, p=3, state=True, ends=(0, 40, 41, 41)),
}


def make_inputs(case: DeltaCase, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | None]:
    """Leaves that require gradients: q, k, v, beta, log_g, and the state s. Queries and keys are not unit yet."""
    gen = torch.Generator().manual_seed(seed)
    draw = normal(gen)
    k = draw(case.B, case.T, case.G, case.K)
    if case.repeated:
        k = k[:, torch.randint(0, min(3, case.T), (case.T,), generator=gen)]
    gates = logsigmoid(4 * draw(case.B, case.T, case.G) + 2)
    if case.resets:
        strengths = torch.tensor([-1e2, -1e4, -1e9, -1e30], dtype=torch.float64)
        chosen = torch.rand(gates.shape, generator=gen) < 0.1
        gates = torch.where(chosen, strengths[torch.randint(0, 4, gates.shape, generator=gen)], gates)
    inputs: dict[str, Tensor | None] = {
        "q": draw(case.B, case.T, case.H, case.K),
        "k": k,
        "v": draw(case.B, case.T, case.G, case.V),
        "beta": torch.rand(case.B, case.T, case.G, generator=gen, dtype=torch.float64),
        "log_g": gates if case.gate else None,
        "s": draw(case.states, case.G, spow_dim(case.K, case.p), case.V) / 4 if case.state else None,
    }
    return leaves(inputs, dtype)


def run(
    case: DeltaCase, inputs: dict[str, Tensor | None], impl: str, chunk_size: int | None = None
) -> dict[str, Tensor]:
    """Output, state and, for random output gradients, the gradient of every input."""
    tokens = [inputs[name] for name in ("q", "k", "v", "beta", "log_g")]
    out, state = power_delta_rule(
        *tokens, p=case.p, chunk_size=chunk_size, initial_state=inputs["s"], return_state=case.return_state,
        cu_seqlens=case.cu_seqlens, impl=impl,
    )  # fmt: skip
    return with_gradients({"out": out} | ({"s": state} if case.return_state else {}), inputs)


def by_document(case: DeltaCase, inputs: dict[str, Tensor | None], form) -> dict[str, Tensor]:
    """Outputs and states of a form(q, k, v, beta, log_g, state, p=p), one document at a time, of unit vectors."""
    q, k = (normalize(inputs[name], dim=-1, eps=1e-6) for name in "qk")
    tokens = [q, k, *(inputs[name] for name in ("v", "beta", "log_g"))]
    ends, outs, states = (0, *(case.ends or (case.T,))), [], []
    for n, (start, stop) in enumerate(pairwise(ends)):
        state = inputs["s"]
        if state is not None and case.ends is not None:
            state = state[n : n + 1]
        if start < stop and case.B:
            out, state = form(*(None if x is None else x[:, start:stop] for x in tokens), state, p=case.p)
            outs.append(out)
        batch = case.B if case.ends is None else 1
        zeros = k.new_zeros(batch, case.G, spow_dim(case.K, case.p), case.V)
        states.append(zeros if state is None else state)
    out = torch.cat(outs, 1) if outs else inputs["v"].new_zeros(case.B, case.T, case.H, case.V) + 0 * q.sum()
    return {"out": out} | ({"s": torch.cat(states) + 0 * k.sum()} if case.return_state else {})


def oracle_of(case: DeltaCase, inputs: dict[str, Tensor | None], form=delta_reference.recurrent) -> dict[str, Tensor]:
    """The results of a form of the specification in float64, with gradients."""
    high = {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}
    return with_gradients(by_document(case, high, form), high)


def assert_within_budget(actual: dict[str, Tensor], case: DeltaCase, inputs: dict[str, Tensor | None]) -> None:
    dtype = inputs["q"].dtype
    oracle = oracle_of(case, inputs, delta_reference.quadratic)
    low = {name: None if x is None else x.detach().float().requires_grad_() for name, x in inputs.items()}
    with torch.autocast(DEVICE, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        peer = with_gradients(by_document(case, low, delta_reference.quadratic), low)
    floor = max((x.norm().item() for x in oracle.values()), default=0.0) * 1e-6
    eps, wrong = torch.finfo(dtype).eps, []
    reads = case.state or case.return_state or case.T > _LEAST_CHUNK
    for name, got in actual.items():
        want = oracle[name]
        norm = max(want.norm().item(), floor)
        assert got.shape == want.shape, name
        rounding = (torch.finfo(got.dtype).eps + case.T**0.5 * EPS32) * norm + 2 * eps * norm
        rounding += (case.p / 2 if name in ("s", "ds") else max(0, case.p - 2)) * eps * norm
        entries = spow_dim(case.K, case.p)
        if name in ("dq", "dk", "dlog_g"):
            entries = case.V * (spow_dim(case.K, case.p - 1) if case.p > 1 else 1)
        summed = entries**0.5 * EPS32 / 2 if reads else 0.0
        rounding += summed * norm
        if name == "dlog_g":
            terms = sum((inputs[x].norm() * oracle["d" + x].norm()).item() for x in "qk") / case.p
            rounding += summed * terms
            terms += (oracle["dv"] * inputs["v"]).norm().item()
            rounding += 2 * eps * terms
        budget = 3 * (peer[name].double() - want).norm().item() + rounding
        error = (got.double() - want).norm().item()
        if not (torch.isfinite(got).all() and error <= budget):
            wrong.append(f"{name}: {error:.2e} of {norm:.2e}, allowed {budget:.2e}")
    assert not wrong, "; ".join(wrong)
