"""The kernel of a step of the delta rule against the step in plain torch in float64: small in the interpreter, large on
a GPU.

Queries and keys have norm 1, and so have their features. So a read rounds by about the eps of float32, times the norm
of a column of the state, for each of the p products of a feature and for the sum; a value u and what is written add as
much. `ROUNDINGS` is a limit on these. The output is also rounded to its dtype.
"""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from sympow.ops import delta_rule, power_delta_rule_step
from sympow.ops.feature_map import spow_dim
from tests.ops.contract import DEVICE, EPS32

delta_step = pytest.importorskip("sympow.ops.triton.delta_step", reason="needs triton")
gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDINGS = 2


@dataclass(frozen=True)
class Case:
    B: int = 2
    T: int = 1
    H: int = 2
    G: int = 2
    K: int = 5
    V: int = 7
    p: int = 2
    gate: bool = True
    log_gates: tuple[float, ...] = ()  # that tokens have in turn; (): of any size
    betas: tuple[float, ...] = ()


CASES = {
    "one number": Case(B=1, H=1, G=1, K=1, V=1),
    "two numbers": Case(B=1, H=1, G=1, K=2, V=1),
    "tokens": Case(T=3),
    "groups": Case(H=6, G=2, K=4, V=3),
    "8 queries for a key": Case(B=1, H=8, G=1),
    "11 queries for a key": Case(B=1, H=22, G=2, K=3, V=5),
    "no gate": Case(T=2, gate=False),
    "values of one part": Case(V=4),
    "wide values": Case(B=1, G=1, H=1, V=37),
    "p 1": Case(p=1, K=16),
    "p 3": Case(p=3, H=4),
    "p 4": Case(p=4, K=4, H=4),
    "gates of 1 and 0": Case(T=4, log_gates=(0.0, -1e9, -1e30, 0.0)),
    "extreme corrections": Case(T=4, betas=(0.0, 2.0, 1.0, 2.0)),
    "no sequence": Case(B=0),
    "no token": Case(T=0),
}
LARGE = {
    f"B {b}, G {g}, R {r}, K {k}, p {p}": Case(B=b, T=2, H=g * r, G=g, K=k, V=k, p=p)
    for b, g, r, k, p in (
        (1, 9, 1, 64, 2), (32, 9, 1, 64, 2), (5, 3, 8, 64, 2), (2, 1, 32, 64, 2), (1, 8, 4, 128, 2), (8, 8, 4, 128, 2),
        (40, 8, 4, 128, 2), (40, 12, 1, 32, 3), (2, 2, 4, 128, 1), (9, 12, 1, 64, 1), (2, 4, 2, 32, 3),
        (1, 1, 4, 64, 3), (2, 2, 2, 16, 4), (4, 8, 2, 16, 2),
    )
} | {
    "V 65": Case(T=2, K=64, V=65),
    "V 1": Case(T=2, K=64, V=1),
    "V 200, K 40": Case(B=9, G=8, H=8, K=40, V=200),
}  # fmt: skip


def make(case: Case, dtype: torch.dtype) -> tuple[list, torch.Tensor]:
    """Returns unit queries and keys, values, beta and log gates, and the state."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=gen)

    def strengths(given, drawn):
        steps = [given[t % len(given)] for t in range(case.T)] if given else []
        return torch.tensor(steps)[:, None].expand(drawn.shape) if given and case.T else drawn

    shape = (case.B, case.T, case.G)
    q, k = (torch.nn.functional.normalize(normal(case.B, case.T, h, case.K), dim=-1) for h in (case.H, case.G))
    beta = strengths(case.betas, 2 * torch.rand(shape, generator=gen))
    log_g = strengths(case.log_gates, -normal(*shape).abs()) if case.gate else None
    tokens = [x.to(DEVICE, dtype) for x in (q, k, normal(*shape, case.V))]
    tokens += [x if x is None else x.to(DEVICE) for x in (beta, log_g)]
    return tokens, normal(case.B, case.G, spow_dim(case.K, case.p), case.V).to(DEVICE)


def assert_right(case: Case, tokens: list, before: torch.Tensor, out: torch.Tensor, after: torch.Tensor) -> None:
    exact = [None if x is None else x.double() for x in tokens]
    want = power_delta_rule_step(*exact, state=before.double(), p=case.p, qk_norm=False)
    assert out.shape == want.out.shape and out.dtype == tokens[2].dtype and after.dtype == torch.float32
    if not out.numel():
        assert torch.equal(before, after)
        return
    size = before.double().norm(dim=2).amax() + tokens[2].double().abs().amax()
    allowed = ROUNDINGS * (case.p + case.T) * EPS32 * size.item()
    assert ((out.double() - want.out).abs() <= torch.finfo(out.dtype).eps * want.out.abs() + allowed).all()
    assert (after.double() - want.state).norm(dim=2).amax() <= allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_small(name, dtype):
    tokens, before = make(CASES[name], dtype)
    state = before.clone()
    assert_right(CASES[name], tokens, before, delta_step.power_delta_step(*tokens, state, CASES[name].p), state)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_large(name, dtype):
    """The first call goes the way of Triton, the second that of the launcher."""
    tokens, before = make(LARGE[name], dtype)
    states = [before.clone(), before.clone()]
    outs = [delta_step.power_delta_step(*tokens, state, LARGE[name].p) for state in states]
    assert_right(LARGE[name], tokens, before, outs[0], states[0])
    assert torch.equal(*outs) and torch.equal(*states)


def pages(s):
    """Slots on pages, with room between them."""
    room = s.new_full((s.shape[0], s[0].numel() + 5), 7.0)
    return room, room[:, 3:-2].unflatten(1, s.shape[1:])


def first_rows(s):
    room = s.new_full((s.shape[0] + 2, *s.shape[1:]), 7.0)
    return room, room[: s.shape[0]]


def columns_first(s):
    room = s.new_full((*s.shape[:2], s.shape[3] + 1, s.shape[2]), 7.0)
    return room, room[:, :, 1:].mT


def heads_first(s):
    room = s.new_full((s.shape[1] + 1, s.shape[0], *s.shape[2:]), 7.0)
    return room, room[1:].transpose(0, 1)


@pytest.mark.parametrize("view", [pages, first_rows, columns_first, heads_first])
def test_views(view):
    """Of states, and of tokens as a fused projection leaves them. What is not in the view stays as it is."""
    case = Case(B=3, T=2, H=4)
    tokens, before = make(case, torch.float32)
    room, state = view(before)
    state.copy_(before)
    strange = [x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x) for x in tokens[:3]]
    strange += [x.new_zeros(*x.shape[::-1]).permute(2, 1, 0).copy_(x) for x in tokens[3:]]
    assert not any(x.is_contiguous() for x in (*strange, *([] if view is first_rows else [state])))
    assert_right(case, tokens, before, delta_step.power_delta_step(*strange, state, case.p), state)
    assert (room == 7).sum() == room.numel() - state.numel()


def test_a_state_that_lies_over_itself_is_refused():
    tokens, before = make(Case(), torch.float32)
    with pytest.raises(RuntimeError, match="single memory location"):
        delta_step.power_delta_step(*tokens, before[:1].expand_as(before), 2)


def test_gates_and_strengths_in_float64():
    case = Case(T=2)
    tokens, before = make(case, torch.float32)
    state = before.clone()
    out = delta_step.power_delta_step(*tokens[:3], *(x.double() for x in tokens[3:]), state, case.p)
    assert_right(case, tokens, before, out, state)


def test_tokens_are_steps():
    case = Case(T=3, H=4)
    tokens, whole = make(case, torch.float32)
    state = whole.clone()
    out = delta_step.power_delta_step(*tokens, whole, case.p)
    outs = [delta_step.power_delta_step(*(x[:, t : t + 1] for x in tokens), state, case.p) for t in range(3)]
    assert torch.equal(out, torch.cat(outs, 1)) and torch.equal(whole, state)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_step_takes_the_kernel(monkeypatch, compiled, inplace):
    """Where there are kernels; float64 has none."""
    monkeypatch.setattr(delta_rule, "has_kernels", lambda device, dtype: dtype != torch.float64)
    case = Case(T=2, H=4)
    step = (
        torch.compile(power_delta_rule_step, backend="aot_eager", fullgraph=True) if compiled else power_delta_rule_step
    )
    tokens, before = make(case, torch.float32)
    kept = before.clone()
    with mock.patch.object(delta_step, "launch", wraps=delta_step.launch) as launched:
        out, after = step(*tokens, state=before, qk_norm=False, inplace=inplace)
    assert launched.call_count == case.T
    assert_right(case, tokens, kept, out, after)
    assert torch.equal(before, after if inplace else kept)
    with mock.patch.object(delta_step, "launch", wraps=delta_step.launch) as launched:
        step(*(x.double() for x in tokens), state=kept.double())
    assert not launched.called


def test_the_operator_changes_the_state_alone():
    tokens, state = make(Case(T=2, H=4), torch.float32)
    torch.library.opcheck(torch.ops.sympow.power_delta_step.default, (*tokens, state, 2))


@gpu
def test_graph_without_waiting():
    case = replace(LARGE["B 1, G 9, R 1, K 64, p 2"], T=1)
    tokens, before = make(case, torch.bfloat16)
    state = before.clone()
    want = power_delta_rule_step(*tokens, state=state.clone(), inplace=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            got = power_delta_rule_step(*tokens, state=state, inplace=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(got.out, want.out) and torch.equal(state, want.state) and not torch.equal(state, before)
