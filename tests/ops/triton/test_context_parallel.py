"""States that come in from other ranks, added to a rank's own: those of a pass that begins with them."""

import pytest
import torch

from sympow.ops import PowerState, power_attention
from tests.ops.contract import DEVICE, EPS32, Case, make_inputs

context_parallel = pytest.importorskip("sympow.ops.triton.context_parallel", reason="needs triton")
calls = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
launch = pytest.importorskip("sympow.ops.triton.launch", reason="needs triton")
adapt = pytest.importorskip("sympow.ops.triton.adapt", reason="needs triton")
plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
rows = pytest.importorskip("sympow.ops.triton.rows", reason="needs triton")
EPS, CHUNK = 1e-6, 128 if DEVICE == "cuda" else 32  # the kernels take chunks of whole blocks
# Several chunks, the last one not full, nearly full, and of one token; two query heads a kv head, and one.
CASES = {
    "gate": Case(B=1, T=3 * CHUNK + 4, H=4, G=2, K=16, V=16, state=True),
    "no gate": Case(B=1, T=3 * CHUNK - 1, H=1, G=1, K=16, V=16, gate=False, state=True),
    "p 1": Case(B=2, T=3 * CHUNK + 1, H=2, G=1, K=16, V=16, p=1, normalize=False, state=True),
}


def inputs_of(case: Case) -> dict[str, torch.Tensor]:
    inputs = {name: x if x is None else x.detach() for name, x in make_inputs(case, dtype=torch.float32).items()}
    if case.G > 1:  # one head decays to nothing within two chunks, one leaves something up to the end
        inputs["log_g"][:, :, 0] = -2.5
        inputs["log_g"][:, :, 1] /= 10
    return inputs


def call_of(case: Case, q, k, v, log_g) -> "calls.Call":
    call = calls.Call(q, k, v, log_g, None, case.p, 0.25, CHUNK, False, gradient_rows=True)
    assert call.plan.chunk == CHUNK  # what is compared with has the same
    return call


def flat(call, s, z) -> torch.Tensor:
    """As `context_parallel` has states that come in."""
    s, z = adapt.from_public(call.plan.rows, s, z if call.plan.p == 2 else None)
    return torch.cat([x.flatten() for x in (s, z) if x is not None])


def boundaries(case: Case, call, s, z) -> list[torch.Tensor]:
    """S and Z, if there is one, of each boundary [chunks, B, ...] in the public basis, in float64."""
    rows = call.plan.rows
    parts = [rows.to_public(s.double())] + ([rows.matrix_to_public(z.double())] if case.p == 2 else [])
    return [x.unflatten(0, (case.B, -1)).transpose(0, 1) for x in parts]


def exact_states(case: Case, q, k, v, log_g, s, z) -> list[PowerState]:
    """Before each chunk, and after the last, in float64."""
    states = [PowerState(s, z, case.p, case.K)]
    for first in range(0, case.T, CHUNK):
        here = [x if x is None else x[:, first : first + CHUNK] for x in (q, k, v, log_g)]
        after = power_attention(
            *here, p=case.p, scale=0.25, normalize=case.divides, eps=EPS, initial_state=states[-1], return_state=True,
            impl="reference",
        ).state  # fmt: skip
        states.append(after)
    return states


def assert_as_exact(case: Case, actual, direct, expected) -> None:
    """By comparison with the pass that begins with what comes in: carried states may err by twice as much, plus one
    rounding more, as they are stored twice."""
    for x, peer, exact in zip(actual, direct, expected, strict=True):
        budget = 2 * (peer - exact).norm() + EPS32 * exact.norm()
        assert (x - exact).norm() <= budget, f"{(x - exact).norm():.3e} > {budget:.3e}"


@pytest.mark.parametrize("name", CASES)
def test_states(name):
    case, x = CASES[name], inputs_of(CASES[name])
    tensors = [x[n] for n in ("q", "k", "v", "log_g")]
    call = call_of(case, *tensors)
    own = context_parallel.own_states(call)
    s, z = context_parallel.all_states(call, *own[:3], flat(call, x["s"], x["z"]))
    public = (x["s"], x["z"] if case.p == 2 else None)
    direct = launch.states(call, *adapt.from_public(call.plan.rows, *public), None, case.p == 2)
    exact = exact_states(case, *(y if y is None else y.double() for y in (*tensors, x["s"], x["z"])))[:-1]
    expected = [torch.stack([getattr(state, n) for state in exact]) for n in ("s", "z")][: 2 if case.p == 2 else 1]
    assert_as_exact(case, boundaries(case, call, s, z), boundaries(case, call, *direct), expected)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_states(name):
    case, x = CASES[name], inputs_of(CASES[name])
    tensors = [x[n] for n in ("q", "k", "v", "log_g")]
    gen = torch.Generator().manual_seed(1)
    dout, ds_in, dz_in = (
        torch.randn(shape, generator=gen).to(DEVICE)
        for shape in ((case.B, case.T, case.H, case.V), x["s"].shape, x["z"].shape)
    )

    given = {n: x[n] for n in ("q", "k", "v", "log_g")} | {"s_init": x["s"], "z_init": x["z"] if case.p == 2 else None}
    options = {"p": case.p, "scale": 0.25, "normalize": case.divides, "eps": EPS, "chunk": CHUNK}
    options |= dict.fromkeys(("final", "tf32", "wide", "gradient"), False)
    absent = dict.fromkeys(("cu_seqlens", "positions", "frequencies"))
    out, norm, *_ = torch.ops.sympow.power_forward(**given, **absent, **options)
    call = call_of(case, *tensors)
    factors = launch.row_factors(call, dout, out, norm, case.divides)
    gradient = (dout, factors.factor, factors.delta)
    own = context_parallel.own_states(call, gradient)
    ds, dz = context_parallel.all_states(call, *own[:3], flat(call, ds_in, dz_in))
    ends = adapt.from_public(call.plan.rows, ds_in, dz_in if case.p == 2 else None)
    direct = launch.states(call, *ends, None, case.p == 2, gradient)

    doubles = [y if y is None else y.double() for y in tensors]
    exact = exact_states(case, *doubles, x["s"].double(), x["z"].double())[1:]
    leaves = []
    for n, state in enumerate(exact[:-1]):
        s, z = (y.detach().clone().requires_grad_() for y in (state.s, state.z))
        later = slice((n + 1) * CHUNK, None)
        after = power_attention(
            *(y if y is None else y[:, later] for y in doubles), p=case.p, scale=0.25, normalize=case.divides, eps=EPS,
            initial_state=PowerState(s, z, case.p, case.K), return_state=True, impl="reference",
        )  # fmt: skip
        total = (after.out * dout.double()[:, later]).sum() + (after.state.s * ds_in.double()).sum()
        total = total + (after.state.z * dz_in.double()).sum()
        leaves.append(torch.autograd.grad(total, (s, z)))
    leaves.append((ds_in.double(), dz_in.double()))
    expected = [torch.stack(grads) for grads in zip(*leaves, strict=True)][: 2 if case.p == 2 else 1]
    assert_as_exact(case, boundaries(case, call, ds, dz), boundaries(case, call, *direct), expected)


def test_inner_product_of_states():
    for table in (rows.rows_of(16, 3), rows.rows_of(64, 2, 4)):
        a, b = torch.randn(
            2, 3, len(table.representative), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        inner = table.inner(table.from_public(a), table.from_public(b))
        torch.testing.assert_close(inner, (a * b).sum((1, 2)))


def test_forward_and_backward_have_the_same_rows(monkeypatch):
    """p = 3 on Hopper: a rank's last state, which the backward takes as the forward wrote it."""
    monkeypatch.setattr(plan, "on_hopper", lambda device: True)
    q = torch.zeros(2, 40, 1, 24, device=DEVICE, dtype=torch.bfloat16)
    call, other = (calls.Call(q, q, q[..., :16], None, None, 3, 1.0, CHUNK, False, kept) for kept in (False, True))
    assert call.plan.rows is other.plan.rows and call.plan.row_count == call.plan.rows.count
    assert call.q.shape[3] == 32 and torch.equal(call.own_channels(call.q), q)


@pytest.mark.parametrize("gate", [True, False])
def test_operators(gate):
    """The shapes promised to torch.compile are those of the tensors, and no output is an input."""
    case = Case(B=1, T=33, H=1, G=1, K=16, V=16, gate=gate)
    x = inputs_of(case)
    q, k, v, log_g = (x[n] for n in ("q", "k", "v", "log_g"))
    options = (2, 0.25, True, CHUNK, False)

    def checked(operator, *arguments):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        return operator(*arguments)

    s, z, sums, decays, message = checked(context_parallel.context_states, k, v, log_g, 2, 0.25, CHUNK, False, True)
    incoming = message[: message.numel() - gate * case.B * case.G].clone()
    own = (s, z, sums, decays, message, incoming)
    out, norm, s, z, last = checked(
        context_parallel.context_output, q, k, v, log_g, *own, 2, 0.25, True, EPS, CHUNK, False, False, True
    )
    assert s.numel() and z.numel()
    again = checked(context_parallel.context_query_gradient, out, q, k, v, log_g, out, norm, s, z, incoming, *options)
    none = s.new_empty(0)
    formed = context_parallel.context_query_gradient(out, q, k, v, log_g, out, norm, none, none, incoming, *options)
    _, factor, delta, dsums, *made, ds, dz, sums, decays, _ = again
    torch.testing.assert_close((*formed[:4], *formed[6:]), (*again[:4], *again[6:]))  # states that were not kept
    assert not any(x.numel() for x in made)
    if gate:
        torch.testing.assert_close(formed[4:6], (s, z))
    own = (factor, delta, dsums, s, z, ds, dz, sums, decays, incoming, last)
    checked(context_parallel.context_key_gradient, out, q, k, v, log_g, *own, 2, 0.25, CHUNK, False)
