"""The delta rule on the state of power attention: all forms against the specification, and identities."""

import os
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from sympow.ops import OutOfRangeError, delta_reference, power_delta_rule, power_delta_rule_step
from sympow.ops.feature_map import spow_dim
from tests.ops.contract import DEVICE, FLOAT64_TOLERANCE
from tests.ops.delta_contract import (
    CASES,
    DeltaCase,
    assert_equal_float64,
    assert_within_budget,
    make_inputs,
    oracle_of,
    run,
)

FUZZED = int(os.environ.get("SYMPOW_FUZZED", "40"))  # random cases of each dtype


@pytest.mark.parametrize("name", CASES)
def test_the_two_forms_of_the_specification_agree(name):
    inputs = make_inputs(CASES[name])
    assert_equal_float64(oracle_of(CASES[name], inputs, delta_reference.quadratic), oracle_of(CASES[name], inputs))


@cache
def recurrence_of(case: DeltaCase) -> dict[str, torch.Tensor]:
    return oracle_of(case, make_inputs(case))


@pytest.mark.parametrize("chunk_size", [None, 1, 16, 1000])
@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_float64(name, impl, chunk_size):
    case = CASES[name]
    if chunk_size == 1 and not case.ends:  # twenty chunks are as good as three hundred
        case = replace(case, T=min(case.T, 20))
    assert_equal_float64(run(case, make_inputs(case), impl, chunk_size), recurrence_of(case))


def random_case(seed: int) -> tuple[DeltaCase, int | None]:
    draw = random.Random(seed)
    groups, p = draw.choice([1, 2, 3]), draw.choice([1, 2, 2, 2, 3, 4])
    time = draw.choice([1, 2, 17, 63, 64, 65, 130, 200])
    ends = (*sorted(draw.randint(0, time) for _ in range(draw.randint(1, 4))), time)
    packed = draw.random() < 0.2
    case = DeltaCase(
        B=1 if packed else draw.choice([1, 2]), T=time, H=groups * draw.choice([1, 2]), G=groups,
        K=draw.choice([2, 3, 4, 6] if p > 2 else [2, 4, 8, 16]), V=draw.choice([1, 3, 8]), p=p,
        gate=draw.random() < 0.8, state=draw.random() < 0.5, return_state=draw.random() < 0.6,
        resets=draw.random() < 0.3, repeated=draw.random() < 0.2, ends=ends if packed else None,
    )  # fmt: skip
    return case, draw.choice([None, 5, 64, 128])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("part", range(4))
def test_random_cases(dtype, part):
    for seed in range(part, FUZZED, 4):
        case, chunk_size = random_case(seed)
        inputs = make_inputs(case, seed, dtype)
        results = run(case, inputs, "eager", chunk_size)
        try:
            if dtype == torch.float64:
                assert_equal_float64(results, oracle_of(case, inputs))
            else:
                assert_within_budget(results, case, inputs)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {case}, chunk_size {chunk_size}: {error}") from None


@pytest.mark.parametrize("p", [1, 2, 3])
def test_steps_are_the_whole(p):
    case = DeltaCase(B=2, T=23, H=4, G=2, K=4, V=3, p=p, state=True, resets=True)
    inputs = {name: x.detach() for name, x in make_inputs(case).items()}
    whole = oracle_of(case, inputs)
    state, outs, before = inputs["s"], [], inputs["s"].clone()
    for span in (slice(0, 1), slice(1, 5), slice(5, 6), slice(6, 23)):
        tokens = [inputs[name][:, span] for name in ("q", "k", "v", "beta", "log_g")]
        out, state = power_delta_rule_step(*tokens, state=state, p=p)
        outs.append(out)
    assert torch.equal(before, inputs["s"])
    torch.testing.assert_close(torch.cat(outs, 1), whole["out"], rtol=0, atol=FLOAT64_TOLERANCE)
    torch.testing.assert_close(state, whole["s"], rtol=0, atol=FLOAT64_TOLERANCE)


def test_a_step_in_place_changes_the_given_state():
    case = DeltaCase(B=2, T=1, H=4, G=2, K=4, V=3, state=True)
    inputs = {name: x.detach() for name, x in make_inputs(case).items()}
    given = inputs["s"].clone()
    tokens = [inputs[name] for name in ("q", "k", "v", "beta", "log_g")]
    _, after = power_delta_rule_step(*tokens, state=given, inplace=True)
    assert after is given and torch.equal(given, power_delta_rule_step(*tokens, state=inputs["s"]).state)


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_a_later_token_changes_no_earlier_output(impl):
    case = DeltaCase(B=1, T=40, H=2, G=2, K=4, V=3)
    inputs = {name: x if x is None else x.detach() for name, x in make_inputs(case).items()}
    tokens = [inputs[name] for name in ("q", "k", "v", "beta", "log_g")]
    before = power_delta_rule(*tokens, impl=impl, chunk_size=16).out
    changed = [x.clone() for x in tokens]
    for x in changed:
        x[:, 25:] *= 0.5
    after = power_delta_rule(*changed, impl=impl, chunk_size=16).out
    assert torch.equal(before[:, :25], after[:, :25]) and not torch.equal(before[:, 25:], after[:, 25:])


def test_p_1_is_the_gated_delta_rule():
    """The recurrence of Gated DeltaNet (Yang et al., 2024, equation 10), in the order and the layout of its paper."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 50, 3, 8, generator=gen) for _ in range(3))
    beta, log_g = torch.rand(2, 50, 3, generator=gen), logsigmoid(torch.randn(2, 50, 3, generator=gen))
    s = torch.zeros(2, 3, 8, 8, dtype=torch.float64)  # [value, key]
    unit_q, unit_k = (normalize(x.double(), dim=-1) for x in (q, k))
    outs = []
    for t in range(50):
        key, b = unit_k[:, t, :, :, None], beta.double()[:, t, :, None, None]
        s = log_g.double()[:, t].exp()[..., None, None] * (s @ (torch.eye(8) - b * key @ key.mT))
        s = s + b * v.double()[:, t, :, :, None] @ key.mT
        outs.append((s @ unit_q[:, t, :, :, None])[..., 0])
    got = power_delta_rule(q, k, v, beta, log_g, p=1).out
    torch.testing.assert_close(got.double(), torch.stack(outs, 1), rtol=0, atol=1e-6 * 8**0.5)


def test_a_key_that_comes_again_replaces_its_value():
    gen = torch.Generator().manual_seed(0)
    key, v = torch.randn(1, 1, 1, 4, generator=gen).expand(1, 3, 1, 4), torch.randn(1, 3, 1, 5, generator=gen)
    out = power_delta_rule(key, key, v, torch.ones(1, 3, 1)).out
    torch.testing.assert_close(out, v, rtol=0, atol=1e-5)


def test_second_derivatives_are_refused():
    inputs = make_inputs(DeltaCase(T=5))
    out, _ = power_delta_rule(*(inputs[name] for name in ("q", "k", "v", "beta", "log_g")), impl="eager")
    (grad,) = torch.autograd.grad(out.sum(), inputs["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="the gradient of power_delta_rule cannot be differentiated again"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"beta": torch.rand(1, 4, 2)}, ValueError, r"beta must be \[B, T, G\] = \[1, 5, 2\]; got \[1, 4, 2\]"),
        ({"beta": torch.rand(1, 5, 2).half()}, TypeError, "beta must be float32 .*; got torch.float16"),
        ({"beta": torch.full((1, 5, 2), torch.nan)}, ValueError, "beta must be finite; got NaN or inf"),
        ({"beta": torch.rand(1, 5, 2).to_sparse()}, TypeError, "beta must be a dense tensor; got torch.sparse_coo"),
        ({"initial_state": torch.zeros(1, 2, 10, 3).to_sparse()}, TypeError, "must be a dense tensor; got torch.sp"),
        ({"beta": None}, TypeError, "beta must be a torch.Tensor; got NoneType"),
        ({"p": 0}, ValueError, "the power p must be an integer >= 1; got 0"),
        ({"p": 2**70}, ValueError, r"the power p must be below 2\*\*63, as torch takes .*; got 1.2e\+21"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be an integer >= 1, or None; got 0"),
        ({"qk_norm": "no"}, TypeError, "qk_norm must be True or False; got 'no'"),
        ({"return_state": 2}, TypeError, "return_state must be True or False; got 2"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "cu_seqlens must rise from 0 to T = 5"),
        ({"impl": "fast"}, ValueError, "impl is one of auto, eager, triton, reference; got 'fast'"),
        ({"initial_state": torch.zeros(1, 2, 9, 3)}, ValueError, r"must be \[B, G, D, V\] = \[1, 2, 10, 3\] for p"),
        ({"initial_state": torch.zeros(1, 2, 10, 3).double()}, TypeError, "inputs is torch.float32; got torch.float64"),
        ({"initial_state": 3}, TypeError, "state of the delta rule must be a torch.Tensor; got int"),
        ({"log_g": torch.ones(1, 5, 2)}, ValueError, "log_g must be finite and <= 0"),
        ({"k": torch.full((1, 5, 2, 4), 1e20), "qk_norm": False}, ValueError, r"leaves the range of torch.float32"),
    ],
)
def test_errors_are_one_line(change, error, message):
    q, k, v = torch.rand(1, 5, 4, 4), torch.rand(1, 5, 2, 4), torch.rand(1, 5, 2, 3)
    arguments = {"q": q, "k": k, "v": v, "beta": torch.rand(1, 5, 2)} | change
    with pytest.raises(error, match=message) as caught:
        power_delta_rule(**arguments)
    assert "\n" not in str(caught.value)


def test_a_state_beyond_the_range_is_refused():
    """The output of a query that is orthogonal to a large key is 0."""
    q, k = torch.eye(2).view(2, 1, 1, 1, 2)
    tokens = (q, 1e20 * k, torch.ones(1, 1, 1, 3), torch.ones(1, 1, 1))
    assert not power_delta_rule(*tokens, qk_norm=False).out.any()
    with pytest.raises(OutOfRangeError, match=r"the state leaves the range of torch\.float32"):
        power_delta_rule(*tokens, qk_norm=False, return_state=True)


def test_an_output_beyond_the_range_is_refused_in_compiled_code():
    q, k, v = torch.rand(1, 5, 4, 4), torch.full((1, 5, 2, 4), 1e20), torch.rand(1, 5, 2, 3)
    beta = torch.ones(1, 5, 2)
    compiled = torch.compile(lambda q: power_delta_rule(q, k, v, beta, qk_norm=False).out, backend="eager")
    with pytest.raises(OutOfRangeError, match=r"the state of the delta rule leaves the range of torch\.float32"):
        compiled(q)


def test_borders_of_no_tokens_are_checked():
    q, k, v = torch.rand(1, 0, 4, 4), torch.rand(1, 0, 2, 4), torch.rand(1, 0, 2, 3)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 0"):
        power_delta_rule(q, k, v, torch.rand(1, 0, 2), cu_seqlens=torch.tensor([0, 5]), return_state=True)


def test_a_step_without_a_state_is_refused():
    q, k, v = torch.rand(1, 1, 4, 4), torch.rand(1, 1, 2, 4), torch.rand(1, 1, 2, 3)
    with pytest.raises(TypeError, match="a step needs a state: power_delta_rule with return_state=True returns one"):
        power_delta_rule_step(q, k, v, torch.rand(1, 1, 2), state=None)


def test_flags_of_a_step_are_bools():
    q, k, v = torch.rand(1, 1, 4, 4), torch.rand(1, 1, 2, 4), torch.rand(1, 1, 2, 3)
    for name in ("qk_norm", "inplace"):
        with pytest.raises(TypeError, match=f"^{name} must be True or False; got None$"):
            power_delta_rule_step(q, k, v, torch.rand(1, 1, 2), state=torch.zeros(1, 2, 10, 3), **{name: None})


def test_integers_of_numpy_are_numbers():
    q, k, v, beta = torch.rand(1, 5, 4, 4), torch.rand(1, 5, 2, 4), torch.rand(1, 5, 2, 3), torch.rand(1, 5, 2)
    outs = [
        power_delta_rule(q, k, v, beta, p=p, chunk_size=size).out for p, size in ((np.int64(2), np.int64(3)), (2, 3))
    ]
    assert torch.equal(*outs)


def test_a_step_in_place_needs_a_state_of_its_own_memory():
    q, k, v, beta = torch.rand(2, 1, 2, 4), torch.rand(2, 1, 2, 4), torch.rand(2, 1, 2, 3), torch.rand(2, 1, 2)
    state = torch.zeros(1, 2, 10, 3).expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match="memory for every number of it; got an expanded or overlapping"):
        power_delta_rule_step(q, k, v, beta, state=state, inplace=True)
    state = torch.zeros(70).as_strided((2, 2, 10, 3), (3, 30, 3, 1))
    with pytest.raises(ValueError, match="got an expanded or overlapping"):
        power_delta_rule_step(q, k, v, beta, state=state, inplace=True)
    power_delta_rule_step(q, k, v, beta, state=torch.zeros(10, 2, 3, 2).permute(3, 1, 0, 2), inplace=True)
    with torch.inference_mode():
        state = torch.zeros(2, 2, 10, 3)
    with pytest.raises(ValueError, match="made in inference mode"):
        power_delta_rule_step(q, k, v, beta, state=state, inplace=True)


def test_the_state_has_the_rows_of_the_public_basis():
    inputs = make_inputs(DeltaCase(B=1, T=6, H=2, G=2, K=3, V=2))
    tokens = [inputs[name].detach() for name in ("q", "k", "v", "beta", "log_g")]
    state = power_delta_rule(*tokens, return_state=True).state
    assert state.shape == (1, 2, spow_dim(3, 2), 2) and state.device.type == DEVICE


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_gradients_without_the_norm(impl, p):
    """The gradient along a key is lost in the norm's, so only these calls show that of a token's own score."""
    dtype = torch.float64 if impl == "eager" else torch.float32
    gen = torch.Generator().manual_seed(p)
    q, k, v = (torch.randn(1, 20, 2, 5, generator=gen, dtype=torch.float64) / 2 for _ in range(3))
    beta, dout = torch.rand(1, 20, 2, generator=gen), torch.randn(1, 20, 2, 5, generator=gen, dtype=torch.float64)

    def gradients(implementation, dtype):
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (q, k, v, beta)]
        out = power_delta_rule(*leaves, p=p, qk_norm=False, impl=implementation).out
        return torch.autograd.grad(out, leaves, dout.to(out))

    for got, want in zip(gradients(impl, dtype), gradients("reference", torch.float64), strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=0, atol=1e4 * torch.finfo(dtype).eps * want.abs().max().item()
        )
