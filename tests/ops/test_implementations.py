"""Every implementation of power_attention and power_attention_step against the reference in float64."""

import math
from dataclasses import replace

import pytest
import torch

from sympow.ops import DecodingState, PowerState, eager, power_attention, power_attention_step
from tests.ops.contract import CASES, DEVICE, Case, assert_equal_float64, assert_within_budget, make_inputs, run

IMPLEMENTATIONS = ["eager", "auto"]


@pytest.mark.parametrize(
    ("impl", "chunk_size"), [*(("eager", size) for size in (None, 1, 16, 64, 4096)), ("auto", None), ("auto", 16)]
)
@pytest.mark.parametrize("name", CASES)
def test_float64(impl, name, chunk_size):
    """In float64 "auto" is "eager" whatever the chunk size, so two of them are enough."""
    case = CASES[name]
    if chunk_size == 1 and not case.ends:  # more chunks of one token have no other borders
        case = replace(case, T=min(case.T, 20))
    expected = run(case, make_inputs(case), "reference")
    assert_equal_float64(run(case, make_inputs(case), impl, chunk_size), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.B and c.T > 1])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_error_budget(impl, name, dtype):
    case = CASES[name]
    inputs = make_inputs(case, dtype=dtype)
    assert_within_budget(run(case, inputs, impl, 16), case, inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("cuts", [(1,), (17, 18), (64,), (3, 50, 99)])
def test_any_split_is_the_whole(impl, cuts):
    inputs = {n: x.detach() for n, x in make_inputs(Case(B=2, T=100, H=4, G=2, K=4, V=3)).items() if x is not None}
    whole, last = power_attention(**inputs, return_state=True, impl=impl)
    state, outs = None, []
    for start, stop in zip((0, *cuts), (*cuts, 100), strict=True):
        part = {n: x[:, start:stop] for n, x in inputs.items()}
        out, state = power_attention(**part, initial_state=state, return_state=True, impl=impl)
        outs.append(out)
    parts = {"out": torch.cat(outs, 1), "s": state.s, "z": state.z}
    assert_equal_float64(parts, {"out": whole, "s": last.s, "z": last.z})


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.ends is None])
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "reference"])
def test_step_continues_a_sequence(impl, name, inplace):
    case = CASES[name]
    inputs = {n: None if x is None else x.detach() for n, x in make_inputs(case).items()}
    s, z = inputs.pop("s"), inputs.pop("z")
    options = {"p": case.p, "normalize": case.divides, "eps": case.eps}
    state = PowerState.zeros(case.B, case.G, case.K, case.V, case.p, dtype=torch.float64, device=DEVICE)
    state = PowerState(s, z, case.p, case.K) if case.state else state
    whole, last = power_attention(**inputs, **options, initial_state=state, return_state=True, impl="reference")
    state, outs = state.clone(), []
    for start in range(0, case.T, 3):  # one to three tokens at a time
        part = {n: None if x is None else x[:, start : start + 3] for n, x in inputs.items()}
        before, kept = state, state.clone()
        out, state = power_attention_step(**part, **options, state=state, inplace=inplace, impl=impl)
        assert (state.s is before.s) == inplace
        assert inplace or torch.equal(before.s, kept.s)
        outs.append(out)
    steps = {"out": torch.cat(outs, 1), "s": state.s, "z": state.z}
    assert_equal_float64(steps, {"out": whole, "s": last.s, "z": last.z})


def test_strong_decay_does_not_overflow():
    """Gates of exp(-200) over a long chunk: exp(L_i - L_j) is formed, never exp(-L_j)."""
    case = Case(B=1, T=200, H=1, G=1, K=4, V=4)
    inputs = make_inputs(case, dtype=torch.float32)
    inputs["log_g"] = torch.full_like(inputs["log_g"], -200.0).requires_grad_()
    results = run(case, inputs, "eager", 128)
    assert all(torch.isfinite(x).all() for x in results.values())
    # Nothing but the token itself is left.
    own = (inputs["q"] * inputs["k"]).sum(-1, keepdim=True).square() / case.K
    torch.testing.assert_close(results["out"], own / (own + 1e-6) * inputs["v"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_decays_are_never_subnormal(dtype):
    tiny = torch.finfo(dtype).tiny
    logs = torch.linspace(3 * math.log(tiny), 0, 4001, dtype=dtype)
    factors = eager.decay_factors(logs)
    products = factors[:, None] * factors
    assert ((products == 0) | (products >= tiny)).all()
    kept = factors > 0
    assert torch.equal(factors[kept], logs[kept].exp()) and logs[~kept].exp().max() < 2 * tiny**0.5
    assert eager.decay_factors(torch.tensor([math.nan, -math.inf]).to(dtype)).isnan().tolist() == [True, False]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_autocast_does_not_lower_the_precision(impl):
    """Neither of the forward, nor of a backward inside autocast, nor of a step."""
    case = Case(T=50, K=4, V=3)
    plain, inputs = run(case, make_inputs(case, dtype=torch.float32), impl, 16), make_inputs(case, dtype=torch.float32)
    tokens = {n: x.detach() for n, x in inputs.items() if x is not None}
    stepped = power_attention_step(**tokens, state=PowerState.zeros(1, 1, 4, 3, device=DEVICE), impl=impl).out
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        torch.testing.assert_close(run(case, inputs, impl, 16), plain)
        torch.testing.assert_close(
            power_attention_step(**tokens, state=PowerState.zeros(1, 1, 4, 3, device=DEVICE), impl=impl).out, stepped
        )


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("impl", ["eager", "reference", "auto"])
def test_packed_documents_under_autocast_of_any_dtype(impl, dtype, precision):
    """Autocast changes no number, with a state and without, whichever half precision it and the inputs have."""
    case = Case(T=12, H=2, G=2, K=4, V=3, ends=(5, 5, 12), state=True)
    for state in (True, False):
        results = []
        for enabled in (False, True):
            inputs = make_inputs(case, dtype=dtype)
            before = PowerState(inputs["s"], inputs["z"], 2, 4) if state else None
            tokens = [inputs[n] for n in ("q", "k", "v", "log_g")]
            with torch.autocast(DEVICE, dtype=precision, enabled=enabled):
                out, after = power_attention(
                    *tokens, cu_seqlens=torch.tensor([0, 5, 5, 12], device=DEVICE), initial_state=before,
                    return_state=True, impl=impl,
                )  # fmt: skip
                (out.double().sum() + after.s.double().sum() + after.z.double().sum()).backward()
            assert out.dtype == dtype
            results.append([out, after.s, after.z, *(x.grad for x in tokens)])
        assert all(torch.equal(plain, cast) for plain, cast in zip(*results, strict=True))


def test_the_quadratic_form_has_no_state_however_large_p_is(monkeypatch):
    """A state of p = 40 and K = 64 would have 4e28 rows."""
    monkeypatch.setattr(eager, "basis", None)
    q, k, v = torch.randn(3, 1, 5, 1, 64, dtype=torch.float64).requires_grad_()
    weights = ((q[0, :, 0] @ k[0, :, 0].T) / 8).pow(40).tril()
    expected = (weights @ v[0, :, 0] / (weights.sum(1, keepdim=True) + 1e-6))[None, :, None]
    out = power_attention(q, k, v, p=40).out
    torch.testing.assert_close(out, expected)
    for ours, wanted in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_only_what_asks_gets_a_gradient():
    """A frozen input, such as a fixed gate, costs no gradient and breaks nothing."""
    inputs = make_inputs(Case(T=20, H=2, G=1, K=4, V=3, state=True))
    for name in ("log_g", "s", "z", "k"):
        inputs[name] = inputs[name].detach()
    state = PowerState(inputs["s"], inputs["z"], 2, 4)
    out = power_attention(*(inputs[n] for n in ("q", "k", "v", "log_g")), initial_state=state, chunk_size=8).out
    out.sum().backward()
    assert inputs["q"].grad is not None and inputs["v"].grad is not None


def test_the_gradient_may_be_of_the_state_alone():
    inputs = make_inputs(Case(T=20, H=2, G=1, K=4, V=3))
    for impl in ("eager", "reference"):
        _, state = power_attention(*(inputs[n] for n in ("q", "k", "v", "log_g")), return_state=True, impl=impl)
        grads = torch.autograd.grad(state.s.square().sum(), [inputs[n] for n in ("k", "v", "log_g")])
        if impl == "eager":
            eager = grads
    for a, b in zip(eager, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "reference"])
def test_no_rows_and_no_tokens(impl, shape, state, dtype):
    """An empty output, the state that was there, and a gradient of zeros to every input."""
    case = Case(*shape, H=4, G=2, K=3, V=5, state=state)
    inputs = make_inputs(case, dtype=dtype)
    results = run(case, inputs, impl)
    assert results["out"].shape == (*shape, 4, 5) and results["out"].dtype == dtype
    for name, size in (("s", (shape[0], 2, 6, 5)), ("z", (shape[0], 2, 6))):
        before = inputs[name] if state else torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32))
        torch.testing.assert_close(results[name], before.detach().to(DEVICE), rtol=0, atol=0)
    for name in ("q", "k", "v", "log_g"):
        assert results["d" + name].shape == inputs[name].shape and not results["d" + name].any()
    out = power_attention(*(inputs[n] for n in ("q", "k", "v", "log_g")), impl=impl).out
    assert out.requires_grad and out.numel() == 0


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "reference"])
def test_documents_without_tokens(impl):
    inputs = make_inputs(Case(B=1, T=0, H=2, G=1, K=3, V=5))
    state = PowerState.zeros(2, 1, 3, 5, dtype=torch.float64, device=DEVICE)
    state.s.fill_(3)
    ends = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    args = [inputs[n] for n in ("q", "k", "v", "log_g")]
    out, after = power_attention(*args, cu_seqlens=ends, initial_state=state, return_state=True, impl=impl)
    assert out.shape == (1, 0, 2, 5) and torch.equal(after.s, state.s) and after.s is not state.s
    assert power_attention(*args, cu_seqlens=ends, return_state=True, impl=impl).state.s.shape == (2, 1, 6, 5)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "reference"])
def test_steps_of_no_rows_and_no_tokens(impl, shape, tail, inplace):
    inputs = make_inputs(Case(*shape, H=4, G=2, K=3, V=5), dtype=torch.float32)
    state = PowerState.zeros(shape[0], 2, 3, 5, device=DEVICE)
    state.s.fill_(3)
    state = DecodingState.from_state(state) if tail else state
    args = [inputs[n].detach() for n in ("q", "k", "v", "log_g")]
    out, after = power_attention_step(*args, state=state, inplace=inplace, impl=impl)
    assert out.shape == (*shape, 4, 5) and out.dtype == torch.float32
    assert (after.s is state.s) == inplace
    assert type(after) is type(state) and torch.equal(after.s, state.s)


@pytest.mark.parametrize("gate", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["sequence", "state", "state, in place", "tail", "tail, in place"])
def test_the_reference_computes_in_float64(how, dtype, gate):
    """Whatever the inputs and the gate are: the results are those of the same numbers in float64, rounded once."""
    case = Case(B=2, T=5, H=4, G=2, K=3, V=5, state=True)
    compute = torch.promote_types(dtype, torch.float32)
    rounded = {n: x.detach() for n, x in make_inputs(case, dtype=dtype).items()}
    tokens = [rounded[n] for n in ("q", "k", "v")]
    tokens.append(None if gate is None else rounded["log_g"].to(torch.float32).to(gate))
    state = PowerState(rounded["s"], rounded["z"], 2, 3)
    high = [None if x is None else x.double() for x in tokens]
    expected, last = power_attention(*high, initial_state=state.to(torch.float64), return_state=True, impl="reference")
    if how == "sequence":
        out, after = power_attention(*tokens, initial_state=state, return_state=True, impl="reference")
    else:
        before = state.clone()
        if "tail" in how:  # two of the tokens are in the tail already
            before = DecodingState.from_state(before, dtype=dtype, capacity=4)
            first = [None if x is None else x[:, :2] for x in tokens]
            before = power_attention_step(*first, state=before, impl="eager").state
            tokens, expected = [None if x is None else x[:, 2:] for x in tokens], expected[:, 2:]
        out, after = power_attention_step(*tokens, state=before, inplace="in place" in how, impl="reference")
    after = after.folded() if isinstance(after, DecodingState) else after
    assert out.dtype == dtype and after.s.dtype == compute
    for got, want in ((out, expected), (after.s, last.s), (after.z, last.z)):
        error = (got.double() - want).norm() / want.norm()
        # Rounded to nearest; eps is twice that. In float64 a few roundings are made.
        assert error <= (1e-13 if got.dtype == torch.float64 else torch.finfo(got.dtype).eps / 2), f"{error:.1e}"


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_cuda_graph_of_the_eager_path():
    """Heads of 561 channels, as a Taylor map has, are computed in plain torch, without copies from the host."""
    gen = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(1, 96, 2, dim, device=DEVICE, generator=gen, requires_grad=True) for dim in (561, 561, 32)]

    def step():
        out = power_attention(*inputs, p=1, normalize=False).out
        return (out, *torch.autograd.grad(out.square().sum(), inputs))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.testing.assert_close(got, expected)
