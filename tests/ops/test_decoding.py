"""Steps on a DecodingState, whose tail is folded every few tokens, against whole sequences."""

from dataclasses import replace

import pytest
import torch

from sympow.ops import DecodingState, PowerState, power_attention, power_attention_step
from tests.ops.contract import CASES, DEVICE, Case, assert_equal_float64, assert_within_budget, make_inputs

CAPACITY = 4
GPU = DEVICE == "cuda"
WHOLE = {name: case for name, case in CASES.items() if case.ends is None}
# For the kernel: short ones, as the interpreter takes milliseconds a program and tile.
KERNEL = {
    name: replace(case, B=min(case.B, 4 // case.H), T=min(case.T, 9), return_state=True)
    for name, case in WHOLE.items()
    if case.B and case.H < 6
} | {
    "6 heads, 2": Case(B=1, T=9, H=6, G=2, K=4, V=3, state=True),
    "7 heads, 1": Case(B=2, T=5, H=7, G=1, K=3, V=2),
    "wide": Case(B=1, T=6, H=1, G=1, K=9, V=20, state=True),
}
if GPU:
    KERNEL |= {
        "full tiles": Case(B=3, T=150, H=4, G=4, K=64, V=64, state=True),
        "full tiles, groups": Case(B=2, T=70, H=8, G=2, K=64, V=64, state=True),
        "many kv heads": Case(B=40, T=20, H=12, G=6, K=32, V=48, state=True),
        "K 128": Case(B=1, T=9, H=2, G=1, K=128, V=128, state=True),
        "p 3, K 32": Case(B=1, T=9, H=2, G=2, K=32, V=32, p=3, state=True),
        "p 4, K 16": Case(B=1, T=9, H=2, G=2, K=16, V=16, p=4, state=True),
        "V 300": Case(B=1, T=9, H=3, G=1, K=20, V=300, state=True),
    }


def tensors(inputs: dict) -> list[torch.Tensor | None]:
    return [None if inputs[x] is None else inputs[x].detach() for x in ("q", "k", "v", "log_g")]


def initial_state(case: Case, inputs: dict, capacity: int = CAPACITY) -> DecodingState:
    dtype = torch.promote_types(inputs["k"].dtype, torch.float32)
    state = PowerState.zeros(case.B, case.G, case.K, case.V, case.p, dtype=dtype, device=DEVICE)
    if case.state:
        state = PowerState(inputs["s"], inputs["z"], case.p, case.K).detach().clone()
    return DecodingState.from_state(state, dtype=inputs["k"].dtype, capacity=capacity)


def decode(case: Case, inputs: dict, impl: str, tokens: int = 1, capacity: int = CAPACITY) -> dict[str, torch.Tensor]:
    """Outputs and the last state, `tokens` a call."""
    state, outs = initial_state(case, inputs, capacity), []
    whole = tensors(inputs)
    for start in range(0, case.T, tokens):
        part = [None if x is None else x[:, start : start + tokens] for x in whole]
        options = {"p": case.p, "normalize": case.divides, "eps": case.eps, "inplace": True}
        out, state = power_attention_step(*part, state=state, impl=impl, **options)
        outs.append(out)
    after = state.folded()
    return {"out": torch.cat(outs, 1), "s": after.s, "z": after.z}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    ("impl", "tokens"), [("eager", 1), ("eager", 7), ("reference", 1), ("reference", 7), ("auto", 7)]
)
def test_steps_are_the_sequence(impl, name, tokens):
    """In float64 "auto" is "eager" whatever the number of tokens."""
    case = WHOLE[name]
    inputs = make_inputs(case)
    before = initial_state(case, inputs).folded() if case.state else None
    options = {"p": case.p, "normalize": case.divides, "eps": case.eps, "initial_state": before, "return_state": True}
    whole, last = power_attention(*tensors(inputs), **options, impl="reference")
    assert_equal_float64(decode(case, inputs, impl, tokens), {"out": whole, "s": last.s, "z": last.z})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KERNEL)
def test_plain_torch_errs_within_budget(name, dtype):
    inputs = make_inputs(KERNEL[name], dtype=dtype)
    assert_within_budget(decode(KERNEL[name], inputs, "eager", tokens=2), KERNEL[name], inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32], ids=str)
@pytest.mark.parametrize("name", KERNEL)
def test_kernel_errs_within_budget(name, dtype):
    pytest.importorskip("triton", reason="needs triton")
    case = KERNEL[name]
    inputs = make_inputs(case, dtype=dtype)
    results = decode(case, inputs, "triton", tokens=3)  # folds a tail that is not full
    assert_within_budget(results, case, inputs)
    if GPU:
        again = decode(case, inputs, "triton", tokens=3)
        assert all(torch.equal(x, again[n]) for n, x in results.items()), "two runs differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernel_in_half_precision(dtype):
    pytest.importorskip("triton", reason="needs triton")
    case = Case(B=1, T=5, H=2, G=1, K=3, V=5)
    inputs = make_inputs(case, dtype=dtype)
    assert_within_budget(decode(case, inputs, "triton", capacity=2), case, inputs)


@pytest.mark.parametrize("impl", ["eager", "triton", "reference"])
def test_continues_a_state_made_by_any_implementation(impl):
    case = Case(T=14, H=2, G=1, K=3, V=4)
    inputs = make_inputs(case, dtype=torch.float32)
    parts = [[x[:, a:b] for x in tensors(inputs)] for a, b in ((0, 9), (9, 12), (12, 14))]
    first, state = power_attention(*parts[0], return_state=True, chunk_size=4, impl=impl)
    state = DecodingState.from_state(state, capacity=2)
    rest, state = power_attention_step(*parts[1], state=state, inplace=True)
    last, state = power_attention(*parts[2], initial_state=state.folded(), return_state=True, impl=impl)
    assert_within_budget({"out": torch.cat([first, rest, last], 1), "s": state.s, "z": state.z}, case, inputs)


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [(impl, dtype) for impl in ("eager", "reference") for dtype in (torch.float32, torch.float64)]
    + [("triton", torch.float32)],  # the kernels do not take float64
)
def test_what_is_taken_back_was_never_read(impl, dtype):
    """Bit for bit, as long as there was room for it; without room the tail was folded earlier, which is all."""
    batch, groups = (1, 1) if impl == "triton" else (2, 2)
    case = Case(B=batch, T=9, H=2 * groups, G=groups, K=3, V=4, state=True)
    inputs = make_inputs(case, dtype=dtype)
    options = {"p": case.p, "normalize": case.divides, "eps": case.eps, "inplace": True, "impl": impl}
    for capacity, exact in ((8, True), (4, False)):

        def states(a, b, capacity=capacity):
            """After b tokens in one step, and before it, after a."""
            state = initial_state(case, inputs, capacity)
            power_attention_step(*(x[:, :a] for x in tensors(inputs)), state=state, **options)
            before = state.clone()
            power_attention_step(*(x[:, a:b] for x in tensors(inputs)), state=state, **options)
            return state, before

        for a, b, back in ((3, 7, 4), (3, 7, 1), (1, 2, 1), (3, 6, 0)):
            state, before = states(a, b)
            state.rollback(back)
            expected = before if back == b - a else states(a, b - back)[0]
            last = [x[:, b - back : b - back + 1] for x in tensors(inputs)]
            outs = [power_attention_step(*last, state=each, **options)[0] for each in (state, expected)]
            close = {"rtol": 0, "atol": 0} if exact else {}
            torch.testing.assert_close(*outs, **close)
            torch.testing.assert_close(state.folded().s, expected.folded().s, **close)


def test_a_token_that_is_taken_back_leaves_nothing_behind():
    """Not even if it is not finite, which a weight of 0 would not hide."""
    state = DecodingState.from_state(PowerState.zeros(1, 1, 2, 2), capacity=4)
    one = torch.ones(1, 1, 1, 2)
    expected = power_attention_step(one, one, one, state=state).out
    power_attention_step(one, one, one * torch.inf, state=state, inplace=True)
    state.rollback(1)
    assert torch.equal(power_attention_step(one, one, one, state=state).out, expected)


def test_what_the_tail_does_not_hold_cannot_be_taken_back():
    state = DecodingState.from_state(PowerState.zeros(1, 1, 2, 2), capacity=4)
    x = torch.ones(1, 3, 1, 2)
    power_attention_step(x, x, x, state=state, inplace=True)
    with pytest.raises(ValueError, match="only tokens of the tail can be taken back, and it holds 3; got 4"):
        state.rollback(4)
    with pytest.raises(ValueError, match=r"must be an integer >= 0; got -1"):
        state.rollback(-1)
    state.rollback(3)
    assert state.count.item() == 0


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_sequences_of_a_batch_may_stand_at_different_tokens(impl):
    case = Case(B=2, T=6, H=2, G=2, K=3, V=2)
    inputs = tensors(make_inputs(case, dtype=torch.float32))
    states, own = [], []
    for b, read in enumerate((1, 3)):  # tokens of a sequence read alone, before both go on together
        state = DecodingState.from_state(PowerState.zeros(1, 2, 3, 2, device=DEVICE), capacity=4)
        _, state = power_attention_step(*(x[b : b + 1, :read] for x in inputs), state=state, impl=impl)
        states.append(state)
        own.append([x[b : b + 1, read : read + 3] for x in inputs])
    joined = {n: torch.cat([getattr(x, n) for x in states]) for n in states[0].tensors()}
    together = [torch.cat(parts) for parts in zip(*own, strict=True)]
    both, _ = power_attention_step(*together, state=replace(states[0], **joined), impl=impl)
    for b in range(2):
        alone, _ = power_attention_step(*own[b], state=states[b], impl=impl)
        torch.testing.assert_close(both[b : b + 1], alone)


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_a_small_gate_behind_a_large_one(impl):
    """Decays are sums of the gates between two tokens; as differences of sums from the start they would lose 1e-3."""
    case = Case(T=6, K=3, V=2)
    inputs = make_inputs(case, dtype=torch.float32)
    gates = torch.tensor([-0.1, -3e4, -0.01, -0.02, -0.01, -0.02], device=DEVICE)
    inputs["log_g"] = gates[None, :, None].requires_grad_()
    # From the token of the large gate on: what came before is gone.
    rest = {n: None if x is None else x[:, 1:].detach().requires_grad_() for n, x in inputs.items()}
    results = decode(case, inputs, impl, capacity=8)
    rest["log_g"] = gates[None, 1:, None].clone()
    rest["log_g"][:, 0] = 0
    rest["log_g"].requires_grad_()
    assert_within_budget(results | {"out": results["out"][:, 1:]}, replace(case, T=5), rest)


@pytest.mark.parametrize("impl", ["eager", "triton", "reference"])
def test_a_step_in_place_needs_memory_for_every_sequence(impl):
    """Sequences that share a state, as one prompt that is continued twice, write over one another."""
    token = [torch.ones(2, 1, 1, channels, device=DEVICE) for channels in (4, 4, 3)]
    one = DecodingState.from_state(PowerState.zeros(1, 1, 4, 3, device=DEVICE))
    for name, x in one.tensors().items():
        others = {key: y.expand(2, *y.shape[1:]).clone() for key, y in one.tensors().items()}
        state = replace(one, **(others | {name: x.expand(2, *x.shape[1:])}))
        with pytest.raises(ValueError, match=r"got an expanded or overlapping one: clone\(\) it"):
            power_attention_step(*token, state=state, impl=impl, inplace=True)
        power_attention_step(*token, state=state, impl=impl)
        power_attention_step(*token, state=state.clone(), impl=impl, inplace=True)
    with torch.inference_mode():
        state = DecodingState.from_state(PowerState.zeros(2, 1, 4, 3, device=DEVICE))
        power_attention_step(*token, state=state, impl=impl, inplace=True)
    with pytest.raises(ValueError, match=r"made in inference mode: clone\(\) it"):
        power_attention_step(*token, state=state, impl=impl, inplace=True)


def test_round_trip_and_size():
    case = Case(B=2, T=9, H=2, G=2, K=4, V=3, state=True)
    inputs = make_inputs(case, dtype=torch.bfloat16)
    state = initial_state(case, inputs)
    before = state.folded()
    assert torch.equal(before.s, inputs["s"]) and torch.equal(before.z, inputs["z"])
    heads = 2 * 2
    assert state.nbytes == heads * (4 * 10 * (3 + 1) + CAPACITY * (2 * (4 + 3) + 4) + 2 * 4)
    tokens = tensors(inputs)
    _, after = power_attention_step(*tokens, state=state)
    assert after.nbytes == state.nbytes and after.capacity == CAPACITY and after.dtype == torch.bfloat16
    assert torch.equal(state.folded().s, before.s), "a step that is not in place leaves its state alone"
    _, same = power_attention_step(*tokens, state=state, inplace=True)
    assert same is state and torch.equal(same.folded().s, after.folded().s)


def test_moves_copies_and_detaches():
    state = DecodingState.from_state(PowerState.zeros(1, 2, 4, 3), dtype=torch.float16, capacity=3)
    assert all(x.device.type == "meta" for x in state.to("meta").tensors().values())
    copy = state.clone()
    copy.tail_k.fill_(1)
    assert state.tail_k.abs().max() == 0 and copy.value_dim == 3
    grown = replace(state, s=state.s.requires_grad_())
    assert grown.folded().s.requires_grad and not grown.detach().s.requires_grad


def test_kernel_is_a_proper_operator():
    """What it changes is declared, and its output known without running it."""
    pytest.importorskip("sympow.ops.triton.adapt", reason="needs triton")
    case = Case(B=1, T=2, H=2, G=1, K=3, V=2)
    inputs = make_inputs(case, dtype=torch.float32)
    state = initial_state(case, inputs)
    operator = torch.ops.sympow.power_decode.default
    narrow = initial_state(case, inputs).kept_in(torch.int8)
    for held in ([*state.tensors().values(), None, None], [*narrow.tensors().values()]):
        arguments = [*tensors(inputs), *held, None, 2, 0.5, True, 1e-6]
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("how", ["graph", "compile"])
def test_graph_and_compile(how):
    case = Case(B=2, T=11, H=4, G=2, K=32, V=32)
    inputs = make_inputs(case, dtype=torch.bfloat16)
    tokens = tensors(inputs)
    expected = decode(case, inputs, "triton")
    state = initial_state(case, inputs)
    held = [x[:, :1].clone() for x in tokens]

    def step(q, k, v, log_g):
        return power_attention_step(q, k, v, log_g, state=state, inplace=True).out

    if how == "compile":
        run = torch.compile(step, fullgraph=True)
    else:
        power_attention_step(*held, state=state)  # on a copy: compiles the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(*held)

        def run(*new):
            for x, y in zip(held, new, strict=True):
                x.copy_(y)
            graph.replay()
            return out.clone()

    outs = [run(*(x[:, i : i + 1].contiguous() for x in tokens)) for i in range(case.T)]
    after = state.folded()
    torch.testing.assert_close({"out": torch.cat(outs, 1), "s": after.s, "z": after.z}, expected)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_state_of_more_elements_than_int32_counts():
    """B G D V = 2**31 + ...: the last sequence comes out as it does alone."""
    batch, dim = 2**31 // (16 * 2080 * 64) + 1, 64
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(batch, 3, 16, dim, device="cuda", generator=gen).bfloat16() for _ in range(3))
    outs = []
    for x in ((q, k, v), (q[-1:], k[-1:], v[-1:])):
        zeros = PowerState.zeros(x[0].shape[0], 16, dim, dim, device="cuda")
        state = DecodingState.from_state(zeros, dtype=torch.bfloat16, capacity=2)
        outs.append(power_attention_step(*x, state=state, inplace=True).out[-1:])
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tail_v": torch.zeros(1, 2, 3, 3, dtype=torch.int32)},
            "tail_v .* must be torch.float16 on cpu; got torch.int32",
        ),
        (
            {"tail_g": torch.zeros(1, 2, 3, dtype=torch.float64)},
            "tail_g .* must be torch.float32 on cpu; got",
        ),
        (
            {"count": torch.zeros(1, 2)},
            "count .* must be torch.int32 on cpu; got torch.float32",
        ),
        ({"arrived": None}, "arrived of a DecodingState must be a torch.Tensor; got NoneType"),
        ({"tail_k": torch.zeros(1, 2, 3, 4).to_sparse()}, "tail_k of a DecodingState must be a dense tensor; got"),
        ({"count": torch.zeros(1, 2, dtype=torch.int32, device="meta")}, "count .* on cpu; got torch.int32 on meta"),
    ],
)
def test_tensors_of_other_kinds_are_refused(change, message):
    state = DecodingState.from_state(PowerState.zeros(1, 2, 4, 3), dtype=torch.float16, capacity=3)
    with pytest.raises(TypeError, match=f"^{message}"):
        replace(state, **change)
