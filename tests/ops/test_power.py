"""The public functions' errors: one clear line each, saying what was expected and what came."""

import dataclasses

import numpy as np
import pytest
import torch

from sympow.layers import PowerAttention
from sympow.ops import (
    DecodingState,
    OutOfRangeError,
    PowerState,
    eager,
    power,
    power_attention,
    power_attention_step,
)


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


def call(**changes):
    """A valid call, B 2, T 3, H 4, G 2, K 4, V 5, but for the changes."""
    args = {"q": ones(2, 3, 4, 4), "k": ones(2, 3, 2, 4), "v": ones(2, 3, 2, 5), "log_g": -ones(2, 3, 2)}
    return power_attention(**(args | changes))


def packed(ends, **changes):
    return call(q=ones(1, 3, 4, 4), k=ones(1, 3, 2, 4), v=ones(1, 3, 2, 5), log_g=None, cu_seqlens=ends, **changes)


def gates(*values):
    log_g = -ones(2, 3, 2)
    log_g[0, 0, : len(values)] = torch.tensor(values)
    return log_g


def tail(precision=torch.float32, **options):
    return DecodingState.from_state(PowerState.zeros(1, 1, 4, 4, dtype=precision), **options)


BAD = {
    "list": (lambda: call(q=[1.0]), TypeError, "q must be a torch.Tensor; got list"),
    "rank": (lambda: call(q=ones(3, 4, 4)), ValueError, r"q must be \[B, T, H, K\]; got \[3, 4, 4\]"),
    "gate rank": (lambda: call(log_g=-ones(2, 3, 2, 1)), ValueError, r"log_g must be \[B, T, G\]; got \[2, 3, 2, 1\]"),
    "time": (lambda: call(k=ones(2, 4, 2, 4)), ValueError, r"must agree in B, T, G and K; got q \[2, 3, 4, 4\]"),
    "key dim": (lambda: call(k=ones(2, 3, 2, 6)), ValueError, "must agree in B, T, G and K"),
    "value heads": (lambda: call(v=ones(2, 3, 4, 5)), ValueError, "must agree in B, T, G and K"),
    "groups": (lambda: call(q=ones(2, 3, 3, 4)), ValueError, "multiple of the key/value heads G; got H = 3, G = 2"),
    "gate a query head": (lambda: call(log_g=-ones(2, 3, 4)), ValueError, "one gate a key/value head; got"),
    "no tokens, documents": (
        lambda: call(
            q=ones(1, 0, 4, 4), k=ones(1, 0, 2, 4), v=ones(1, 0, 2, 5), log_g=None, cu_seqlens=torch.tensor([0, 1])
        ),
        ValueError,
        "rise from 0 to T = 0",
    ),
    "no heads": (lambda: call(q=ones(2, 3, 0, 4), k=ones(2, 3, 0, 4), v=ones(2, 3, 0, 5)), ValueError, "cannot be 0"),
    "integers": (lambda: call(q=ones(2, 3, 4, 4).long()), TypeError, "got torch.int64, torch.float32, torch.float32"),
    "mixed dtypes": (lambda: call(v=ones(2, 3, 2, 5).bfloat16()), TypeError, "must share one dtype"),
    "bf16 gate": (
        lambda: call(log_g=-ones(2, 3, 2).bfloat16()),
        TypeError,
        "log_g must be float32 .* got torch.bfloat16",
    ),
    "device": (lambda: call(k=ones(2, 3, 2, 4).to("meta")), ValueError, "one device; got q on cpu, k on meta"),
    "NaN gate": (
        lambda: call(log_g=gates(float("nan"))),
        OutOfRangeError,
        "finite and <= 0 .* got values from nan to nan: the weights or the input",
    ),
    "infinite gate": (lambda: call(log_g=gates(-float("inf"))), ValueError, "got values from -inf to -1.0"),
    "growing gate": (lambda: call(log_g=gates(0.5)), ValueError, "got values from -1.0 to 0.5"),
    "odd p": (lambda: call(p=3), ValueError, "normalize=True needs an even p: with p = 3 .* normalize=False"),
    "p zero": (lambda: call(p=0), ValueError, "p must be an integer >= 1; got 0"),
    "p beyond int64": (lambda: call(p=2**70), ValueError, r"p must be below 2\*\*63, .* got 1.2e\+21$"),
    "p that Python does not print": (lambda: call(p=10**5000), ValueError, r"below 2\*\*63, .* got 1.0e\+5000$"),
    "negative p": (lambda: call(p=-(10**5000)), ValueError, r"p must be an integer >= 1; got -1.0e\+5000$"),
    "p of a state": (lambda: PowerState.zeros(1, 1, 1, 1, 2**70), ValueError, r"below 2\*\*63, .* got 1.2e\+21$"),
    "p of a chunk": (
        lambda: power_attention(*[ones(1, 3, 1, 1)] * 3, p=1000, chunk_size=2),
        ValueError,
        "^states, and chunks, are computed for p up to 20; got p = 1000$",
    ),
    "p of a step": (
        lambda: power_attention_step(*[ones(1, 1, 1, 1)] * 3, p=22, state=PowerState.zeros(1, 1, 1, 1, 22)),
        ValueError,
        "computed for p up to 20; got p = 22$",
    ),
    "p float": (lambda: call(p=2.0), ValueError, "got 2.0"),
    "eps": (lambda: call(eps=0.0), ValueError, "eps must be at least 1.2e-38, .* and finite; got 0.0"),
    "eps that float32 does not hold": (lambda: call(eps=1e-46), ValueError, "got 1e-46"),
    "eps that float64 does not hold": (
        lambda: call(
            **{name: ones(2, 3, heads, 4).double() for name, heads in (("q", 4), ("k", 2), ("v", 2))}, eps=1e-310
        ),
        ValueError,
        r"eps must be at least 2\.2e-308, which float64 can hold",
    ),
    "no eps": (lambda: call(eps=None), TypeError, "eps must be a number; got None"),
    "eps that no float holds": (lambda: call(eps=10**400), ValueError, r"eps must be .* and finite; got 1.0e\+400$"),
    "eps that Python does not print": (lambda: call(eps=10**5000), ValueError, r"and finite; got 1.0e\+5000$"),
    "scale that no float holds": (lambda: call(scale=-(10**400)), ValueError, r"finite; got -1.0e\+400$"),
    "scale that Python does not print": (lambda: call(scale=10**5000), ValueError, r"finite; got 1.0e\+5000$"),
    "chunk size of a bool": (lambda: call(chunk_size=True), ValueError, "must be an integer >= 1, or None; got True"),
    "normalize": (lambda: call(normalize="no"), TypeError, "normalize must be True or False; got 'no'"),
    "return_state": (lambda: call(return_state="x"), TypeError, "return_state must be True or False; got 'x'"),
    "step inplace": (
        lambda: power_attention_step(*[ones(1, 1, 1, 4)] * 3, state=PowerState.zeros(1, 1, 4, 4), inplace="no"),
        TypeError,
        "inplace must be True or False; got 'no'",
    ),
    "scale of a bool": (lambda: call(scale=True), TypeError, "scale must be a number; got True"),
    "cu_seqlens of NumPy": (lambda: packed(np.array([0, 3])), TypeError, "int64 tensor; got ndarray"),
    "negative size": (lambda: PowerState.zeros(-1, 1, 4, 2), ValueError, "batch must not be negative; got -1"),
    "size of a state": (lambda: PowerState.zeros(1, 1, 4, 2.5), TypeError, "value_dim must be an integer; got 2.5"),
    "sparse": (lambda: call(q=ones(2, 3, 4, 4).to_sparse()), TypeError, "q must be a dense tensor; got torch.sparse"),
    "sparse state": (
        lambda: PowerState(ones(1, 1, 10, 4).to_sparse(), ones(1, 1, 10).to_sparse(), 2, 4),
        TypeError,
        "s of a PowerState must be a dense tensor; got torch.sparse_coo",
    ),
    "sparse borders": (
        lambda: packed(torch.tensor([0, 3]).to_sparse()),
        TypeError,
        "cu_seqlens must be a dense tensor; got torch.sparse_coo",
    ),
    "a state too large": (
        lambda: call(q=ones(2, 3, 4, 64), k=ones(2, 3, 2, 64), p=16, return_state=True),
        ValueError,
        "a state of p = 16 and K = 64 needs .* of memory; .* has",
    ),
    "states between chunks too large": (
        lambda: call(q=ones(2, 3, 4, 64), k=ones(2, 3, 2, 64), p=16, chunk_size=2),
        ValueError,
        "a state of p = 16 and K = 64 needs",
    ),
    "learned scale": (
        lambda: call(scale=torch.tensor(0.5, requires_grad=True)),
        TypeError,
        "scale must be a number; got a torch.Tensor",
    ),
    "scale text": (lambda: call(scale="2"), TypeError, "scale must be a number; got '2'"),
    "eps text": (lambda: call(eps=[1e-6]), TypeError, r"eps must be a number; got \[1e-06\]"),
    "scale": (lambda: call(scale=float("nan")), ValueError, "scale must be finite; got nan"),
    "chunk size": (lambda: call(chunk_size=0), ValueError, "chunk_size must be an integer >= 1, or None; got 0"),
    "impl": (lambda: call(impl="triton2"), ValueError, "impl is one of auto, eager, triton, reference; got 'triton2'"),
    "list of an impl": (
        lambda: call(impl=["auto"]),
        ValueError,
        r"impl is one of auto, eager, triton, reference; got \['auto'\]",
    ),
    "chunk size that Python does not print": (
        lambda: call(chunk_size=-(10**5000)),
        ValueError,
        r"chunk_size must be an integer >= 1, or None; got -1.0e\+5000$",
    ),
    "option": (lambda: call(power=2), TypeError, "unexpected keyword argument 'power'"),
    "state type": (lambda: call(initial_state=ones(2)), TypeError, "must be a PowerState; got Tensor"),
    "state p": (lambda: call(initial_state=PowerState.zeros(2, 2, 4, 5, p=4)), ValueError, "the state is of p=4, K=4"),
    "state batch": (lambda: call(initial_state=PowerState.zeros(1, 2, 4, 5)), ValueError, r"= \[2, 2, 10, 5\]; got"),
    "state dtype": (
        lambda: call(initial_state=PowerState.zeros(2, 2, 4, 5, dtype=torch.float64)),
        TypeError,
        "got torch.float64",
    ),
    "state device": (lambda: call(initial_state=PowerState.zeros(2, 2, 4, 5, device="meta")), ValueError, "on meta"),
    "cu_seqlens type": (lambda: packed([0, 3]), TypeError, "int32 or int64 tensor"),
    "cu_seqlens float": (lambda: packed(torch.tensor([0.0, 3.0])), TypeError, "got torch.float32"),
    "cu_seqlens rank": (lambda: packed(torch.tensor([[0, 3]])), ValueError, r"\[N \+ 1\] for N >= 1"),
    "cu_seqlens end": (lambda: packed(torch.tensor([0, 2])), ValueError, r"rise from 0 to T = 3 .*; got \[0, 2\]$"),
    "cu_seqlens start": (lambda: packed(torch.tensor([1, 3])), ValueError, "rise from 0 to T = 3"),
    "cu_seqlens order": (
        lambda: packed(torch.tensor([0, 2, 1, 3])),
        ValueError,
        r"rise from 0 to T = 3 without falling; got \[0, 2, 1, 3\], with 1 after 2$",
    ),
    "many cu_seqlens": (
        lambda: packed(torch.tensor([0, *[1] * 9, 0, 3])),
        ValueError,
        r"got \[0, 1, 1, 1, 1, 1, ..., 3\], with 0 after 1$",
    ),
    "cu_seqlens batch": (lambda: call(cu_seqlens=torch.tensor([0, 3])), ValueError, "got B = 2"),
    "packed state": (
        lambda: packed(torch.tensor([0, 1, 3]), initial_state=PowerState.zeros(1, 2, 4, 5)),
        ValueError,
        r"\[2, 2, 10, 5\]",
    ),
    "step state": (
        lambda: power_attention_step(ones(1, 1, 1, 4), ones(1, 1, 1, 4), ones(1, 1, 1, 4), state=None),
        TypeError,
        "state must be a PowerState or a DecodingState; got NoneType",
    ),
    "step inplace on an expanded state": (
        lambda: power_attention_step(
            *[ones(2, 1, 1, 4)] * 3,
            state=PowerState(ones(1, 1, 10, 4).expand(2, -1, -1, -1), ones(1, 1, 10).expand(2, -1, -1), 2, 4),
            inplace=True,
        ),
        ValueError,
        r"memory for every number of it; got an expanded or overlapping one: clone\(\) it",
    ),
    "step impl": (
        lambda: power_attention_step(*[ones(1, 1, 1, 4)] * 3, state=PowerState.zeros(1, 1, 4, 4), impl="cuda"),
        ValueError,
        "got 'cuda'",
    ),
    "step kernel without a tail": (
        lambda: power_attention_step(*[ones(1, 1, 1, 4)] * 3, state=PowerState.zeros(1, 1, 4, 4), impl="triton"),
        ValueError,
        r"needs a DecodingState \(DecodingState.from_state\); got a PowerState",
    ),
    "step kernel dtype": (
        lambda: power_attention_step(
            *[ones(1, 1, 1, 4, dtype=torch.float64)] * 3, state=tail(torch.float64), impl="triton"
        ),
        ValueError,
        "impl='triton' (needs a GPU|.* got torch.float64)",
    ),
    "step gradients": (
        lambda: power_attention_step(*[ones(1, 1, 1, 4).requires_grad_()] * 3, state=tail()),
        ValueError,
        "no gradients: call it under torch.no_grad",
    ),
    "tail dtype": (
        lambda: power_attention_step(*[ones(1, 1, 1, 4)] * 3, state=tail(dtype=torch.bfloat16)),
        TypeError,
        "tail is torch.bfloat16 and cannot hold keys and values of torch.float32",
    ),
    "tail capacity": (lambda: tail(capacity=0), ValueError, "capacity must be an integer >= 1; got 0"),
    "tail of doubles": (lambda: tail(dtype=torch.float64), TypeError, "a dtype it can hold; got torch.float64"),
    "tail shape": (
        lambda: dataclasses.replace(tail(), count=torch.zeros(1, 2, dtype=torch.int32)),
        ValueError,
        r"holds count \[1, 1\]; got \[1, 2\]",
    ),
    "tail strides": (
        lambda: dataclasses.replace(tail(), tail_v=tail().tail_v.mT.contiguous().mT),
        ValueError,
        "must be contiguous",
    ),
    "tail of nothing": (lambda: DecodingState.from_state(None), TypeError, "must be a PowerState; got NoneType"),
    "sequence on a tail": (
        lambda: call(initial_state=tail()),
        TypeError,
        "initial_state must be a PowerState; got DecodingState",
    ),
    "state shape": (lambda: PowerState(ones(1, 1, 9, 4), ones(1, 1, 9), 2, 4), ValueError, r"s \[B, G, 10, V\]"),
    "state precision": (
        lambda: PowerState.zeros(1, 1, 4, 4, dtype=torch.float16),
        TypeError,
        "float32 .* got s torch.float16",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    bad, error, message = BAD[name]
    with pytest.raises(error, match=message) as caught:
        bad()
    assert "\n" not in str(caught.value)


def test_the_valid_call_is_valid():
    assert call().out.shape == (2, 3, 4, 5)
    assert packed(torch.tensor([0, 3])).out.shape == (1, 3, 4, 5)


@pytest.mark.parametrize("option", [{"normalize": [True]}, {"chunk_size": [2]}, {"impl": ["auto"]}])
def test_options_without_a_hash_are_refused_where_checked_calls_are_kept(monkeypatch, option):
    """The signature of a call on a GPU holds its options."""
    signature = (*option.values(),)
    monkeypatch.setattr(power, "signature_of", lambda *arguments: signature)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(option))} (must be|is one of) .*; got \\["):
        call(**option)


def test_large_powers_are_computed_without_states():
    """In a long row of one channel chunks cost least. They need states, which are computed for p up to 20."""
    x = torch.empty(1, 20_000, 1, 1)
    assert eager.default_chunk_size(x, x, x, 20) < 20_000
    assert eager.default_chunk_size(x, x, x, 21) == eager.default_chunk_size(x, x, x, 1000) == 20_000


def test_inputs_are_left_as_they_were():
    q, k, v = torch.randn(1, 70, 2, 4), torch.randn(1, 70, 1, 4), torch.randn(1, 70, 1, 3)
    state = PowerState.zeros(1, 1, 4, 3)
    copies = [x.clone() for x in (q, k, v)]
    power_attention(q, k, v, initial_state=state, chunk_size=16, return_state=True)
    power_attention_step(q, k, v, state=state)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies, strict=True))
    assert state.s.abs().max() == 0 and state.z.abs().max() == 0


def large(p: int, size: float, **options):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 1, 8, generator=gen) for _ in range(3))
    return power_attention(size * q, size * k, v, p=p, **options).out


@pytest.mark.parametrize("chunk_size", [8, 64])
def test_sums_beyond_the_range_are_refused(chunk_size):
    """Of what is in the table of docs/math.md: p = 6 where q and k are 1e4, and not where they are 1e2; nor p = 2."""
    message = r"leave the range of torch.float32: .* p = 6 over T = 20 tokens is safe up to 1.6e\+06"
    with pytest.raises(OutOfRangeError, match=message) as caught:
        large(6, 1e4, chunk_size=chunk_size)
    assert "\n" not in str(caught.value)
    for p, size in ((6, 1e2), (2, 1e4)):
        out, exact = (large(p, size, chunk_size=chunk_size, impl=impl) for impl in ("eager", "reference"))
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "v"), [(1e20, 0.0), (1e15, 1e15)])
def test_a_state_beyond_the_range_is_refused(size, v):
    """The output of a query that is orthogonal to a large key is 0. Either z or s is too large."""
    q, k = torch.eye(2).view(2, 1, 1, 1, 2)
    assert not power_attention(q, size * k, torch.full((1, 1, 1, 3), v)).out.any()
    with pytest.raises(OutOfRangeError, match=r"^the state leaves the range of torch\.float32: .* smaller k and v$"):
        power_attention(q, size * k, torch.full((1, 1, 1, 3), v), return_state=True)
    with pytest.raises(OutOfRangeError, match=r"^the state leaves the range of torch\.float32; .*, or float64$"):
        power_attention(q, size * k, torch.full((1, 1, 1, 3), v), return_state=True, impl="reference")


def test_inputs_that_are_not_finite_are_no_error():
    """They come from elsewhere, and a trainer that skips such steps looks at the loss."""
    q = torch.full((1, 3, 1, 4), float("nan"))
    out, state = power_attention(q, q, q, return_state=True)
    assert out.isnan().all() and state.s.isnan().all()


def test_integers_of_numpy_are_integers():
    """As a loop over a NumPy array gives them."""
    whole = call(p=np.int64(2), chunk_size=np.int32(2), return_state=True)
    expected = call(p=2, chunk_size=2, return_state=True)
    assert torch.equal(whole.out, expected.out) and type(whole.state.p) is int
    token = {"q": ones(2, 1, 4, 4), "k": ones(2, 1, 2, 4), "v": ones(2, 1, 2, 5)}
    steps = [power_attention_step(**token, log_g=-ones(2, 1, 2), p=p, state=whole.state) for p in (np.int64(2), 2)]
    assert torch.equal(steps[0].out, steps[1].out)
    layer = PowerAttention(16, 2, p=np.int64(4))
    assert type(layer.p) is int and layer(ones(1, 3, 16)).shape == (1, 3, 16)
    with pytest.raises(ValueError, match=r"the power p must be an integer >= 1; got np.float64\(2.0\)"):
        call(p=np.float64(2))


def test_a_bool_of_numpy_is_a_bool():
    token = {"q": ones(2, 1, 4, 4), "k": ones(2, 1, 2, 4), "v": ones(2, 1, 2, 5)}
    state = PowerState(ones(2, 2, 10, 5), ones(2, 2, 10), 2, 4)
    for normalize in (True, False):
        given = np.bool_(normalize)
        assert torch.equal(call(normalize=given).out, call(normalize=normalize).out)
        steps = [power_attention_step(**token, state=state, normalize=n).out for n in (given, normalize)]
        assert torch.equal(*steps)


@pytest.mark.filterwarnings("error")
def test_floats_of_numpy_are_numbers():
    for dtype in (np.float16, np.float32, np.float64):
        expected = call(scale=0.5, eps=float(dtype(1e-3)))
        assert torch.equal(call(scale=dtype(0.5), eps=dtype(1e-3)).out, expected.out)
        with pytest.raises(ValueError, match="scale must be finite; got inf"):
            call(scale=dtype(np.inf))
        with pytest.raises(ValueError, match="and finite; got inf"):
            call(eps=dtype(np.inf))


def test_a_small_eps_in_float64():
    """Float32 does not hold this eps, which is to be smaller than weights of 1e-60."""
    q, v = 1e-15 * ones(1, 1, 1, 4, dtype=torch.float64), ones(1, 1, 1, 4, dtype=torch.float64)
    for impl in ("eager", "reference"):
        out, state = power_attention(q, q, v, eps=1e-100, impl=impl, return_state=True)
        torch.testing.assert_close(out, v)
        torch.testing.assert_close(power_attention_step(q, q, v, state=state, eps=1e-100, impl=impl).out, v)
