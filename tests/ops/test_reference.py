"""The three forms of the specification agree, and have the properties that define them."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from sympow.ops import PowerState, power_attention, reference, rotary_frequencies, rotary_positions, rotate
from sympow.ops.feature_map import spow
from tests.ops.contract import DEVICE, Case, assert_equal_float64, by_document, make_inputs, with_gradients


@st.composite
def cases(draw):
    p, groups = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    time = draw(st.integers(1, 24))
    ends = draw(st.none() | st.lists(st.integers(0, time), max_size=2).map(lambda x: (*sorted(x), time)))
    return Case(
        B=draw(st.integers(1, 2)) if ends is None else 1,
        T=time,
        H=groups * draw(st.integers(1, 3)),
        G=groups,
        K=draw(st.sampled_from([2, 4])),
        V=draw(st.integers(1, 4)),
        p=p,
        gate=draw(st.booleans()),
        state=draw(st.booleans()),
        normalize=p % 2 == 0 and draw(st.booleans()),
        ends=ends,
    )


# form(chunk size, q, k, v, log_g, state, **options) -> out, state
FORMS = {
    "quadratic": lambda c, *a, **o: reference.quadratic(*a, **o),
    "chunked": lambda c, *a, **o: reference.chunked(*a, chunk_size=c, **o),
    "recurrent": lambda c, *a, **o: reference.recurrent(*a, **o),
    "eager": lambda c, q, k, v, log_g, state, **o: power_attention(
        q, k, v, log_g, initial_state=state, chunk_size=c, return_state=True, impl="eager", **o
    ),
}


@settings(max_examples=60)
@given(cases(), st.integers(1, 30), st.booleans(), st.integers(0, 1000))
def test_forms_agree(case, chunk_size, rotation, seed):
    """Outputs, states and all gradients, rotation's included, of every form; packed documents against each alone."""
    options = {"p": case.p, "scale": 0.7, "normalize": case.divides, "eps": case.eps}
    results = {}
    for name, form in FORMS.items():
        inputs = make_inputs(case, seed)
        tokens = inputs
        if rotation:
            gen = torch.Generator().manual_seed(seed)
            beta = torch.rand(case.B, case.T, case.G, generator=gen, dtype=torch.float64)
            inputs["beta"] = beta.to(DEVICE).requires_grad_()
            frequencies = rotary_frequencies(case.K, device=DEVICE)
            turn = partial(rotate, positions=rotary_positions(inputs["beta"]), frequencies=frequencies)
            tokens = inputs | {"q": turn(inputs["q"]), "k": turn(inputs["k"])}
        results[name] = with_gradients(by_document(case, tokens, partial(form, chunk_size, **options)), inputs)
    for name in ("chunked", "recurrent", "eager"):
        assert_equal_float64(results[name], results["quadratic"])


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["quadratic", "recurrent"])
def test_gradients_are_right(p, form):
    """gradcheck of the specification: q, k, v, log_g and the initial state."""
    inputs = make_inputs(Case(T=4, H=2, G=1, K=2, V=2, p=p, state=True))
    if p % 2 == 0:  # keep the normalizer away from zero, where finite differences say nothing
        ones = torch.ones(2, dtype=torch.float64, device=DEVICE)
        inputs["z"] = (inputs["z"].detach() + spow(ones, p)).requires_grad_()

    def call(q, k, v, log_g, s, z):
        options = {"p": p, "scale": 1.0, "normalize": p % 2 == 0, "eps": 1e-6}
        out, state = FORMS[form](None, q, k, v, log_g, PowerState(s, z, p, 2), **options)
        return out, state.s, state.z

    assert gradcheck(call, tuple(inputs.values()))


def test_a_worked_example():
    """Two tokens, by hand: scores 1 and 2, 1; squares decayed by one half."""
    q = torch.tensor([[[[1.0, 0.0]], [[2.0, 1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, 5.0]], [[0.0, 1.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[10.0]], [[20.0]]]], dtype=torch.float64)
    log_g = torch.tensor([[[0.1], [0.5]]], dtype=torch.float64).log()
    out, state = power_attention(q, k, v, log_g, scale=1.0, eps=1e-12, return_state=True, impl="reference")
    # Token 2 scores 7 and 1; the first has decayed by a half: (0.5 * 49 * 10 + 1 * 20) / (0.5 * 49 + 1).
    assert out.flatten().tolist() == pytest.approx([10.0, (24.5 * 10 + 20) / 25.5])
    # phi(k) = (k1 k1, sqrt 2 k1 k2, k2 k2)
    assert state.z.flatten().tolist() == pytest.approx([0.5, 0.5 * 2**0.5 * 5, 0.5 * 25 + 1])


def test_rows_of_zero_scores_give_zero():
    q, k, v = torch.zeros(1, 3, 1, 2), torch.randn(1, 3, 1, 2), torch.randn(1, 3, 1, 2)
    for impl in ("reference", "eager"):
        assert power_attention(q, k, v, impl=impl).out.abs().max() == 0


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_the_future_is_not_seen(impl):
    inputs = make_inputs(Case(T=40, H=2, G=1, K=4, V=3))
    args = [inputs[n].detach() for n in ("q", "k", "v", "log_g")]
    before = power_attention(*args, chunk_size=16, impl=impl).out
    for x in args[:3]:
        x[:, 25:] = 100.0
    args[3][:, 25:] = -9.0
    after = power_attention(*args, chunk_size=16, impl=impl).out
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25:], after[:, 25:])
