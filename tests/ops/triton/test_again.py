"""Calls with the signature of one that was checked: computed without the checks, refused where the first was not."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from sympow.ops import OutOfRangeError, power, power_attention
from tests.ops.contract import DEVICE

pytest.importorskip("triton", reason="needs triton")


@pytest.fixture(autouse=True)
def none_checked(monkeypatch):
    monkeypatch.setattr(power, "checked", {})


def inputs(T: int = 20, seed: int = 0, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, T, heads, 16, generator=gen).to(DEVICE, dtype) for heads in (4, 2, 2))
    gate = logsigmoid(torch.randn(1, T, 2, generator=gen) + 2).to(DEVICE)
    return [x.requires_grad_(grad) for x in (q, k, v, gate)]


@pytest.mark.parametrize("grad", [False, True])
def test_a_second_call_is_that_of_the_reference(grad):
    for seed in range(2):
        given = inputs(seed=seed, grad=grad)
        out = power_attention(*given, impl="triton").out
        wanted = power_attention(*given, impl="reference").out
        assert len(power.checked) == 1
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
        if grad:
            got, exact = (torch.autograd.grad(x.float().sum(), given) for x in (out, wanted))
            for one, other in zip(got, exact, strict=True):
                torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_strides_are_those_of_each_call():
    given = inputs()
    first = power_attention(*given, impl="triton").out
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    second = power_attention(*turned, impl="triton").out
    assert len(power.checked) == 1 and torch.equal(first, second)


def test_what_the_signature_has_makes_another_call():
    calls = [{}, {"p": 4, "normalize": False}, {"scale": 0.5}, {"eps": 1e-3}, {"normalize": False}, {"chunk_size": 32}]
    outs = [power_attention(*inputs(), impl="triton", **options).out for options in calls]
    assert len(power.checked) == len(calls)
    again = [power_attention(*inputs(), impl="triton", **options).out for options in calls]
    assert all(map(torch.equal, outs, again)) and len(power.checked) == len(calls)
    power_attention(*inputs(T=21), impl="triton")
    power_attention(*inputs(grad=True), impl="triton")
    with torch.no_grad():
        power_attention(*inputs(grad=True), impl="triton")
    assert len(power.checked) == len(calls) + 2  # without gradients as the first


def test_checked_signatures_do_not_hide_errors():
    power_attention(*inputs(), p=1, normalize=False, impl="triton")
    q, k, v, log_g = inputs()
    for wrong in ({"p": True}, {"p": 1.0}, {"eps": 0.0}, {"scale": float("inf")}, {"scale": torch.ones(())}):
        with pytest.raises((TypeError, ValueError)):
            power_attention(q, k, v, log_g, **({"p": 1, "normalize": False, "impl": "triton"} | wrong))
    with pytest.raises(ValueError):
        power_attention(q, k[:, :19], v, log_g, p=1, normalize=False, impl="triton")
    with pytest.raises(TypeError):
        power_attention(q, k.float(), v, log_g, p=1, normalize=False, impl="triton")
    if DEVICE == "cpu":
        with pytest.raises(OutOfRangeError):
            power_attention(q, k, v, -log_g, p=1, normalize=False, impl="triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_calls_that_change_their_tensors_are_checked_each_time(dtype):
    power_attention(*inputs(dtype=dtype), impl="triton")
    q, k, v, log_g = inputs()
    power_attention(q[..., :12], k[..., :12], v, log_g, impl="triton")
    power_attention(q, k, v[..., :12], log_g, impl="triton")
    assert not power.checked
