"""Queries and keys of norm 1 against their formula in float64, and the kernel against that.

Tolerances, of norms of differences: 2e-6 in float32, a few operations a number; in half precision four times the
rounding of what is stored. A gradient is the part of one of terms that cancel, so its tolerance is of these terms.
"""

import pytest
import torch

from sympow.ops import power_delta_rule
from sympow.ops.fused.unit_heads import EPS, fused_unit_heads, unit, unit_heads
from tests.draws import normal
from tests.ops.contract import DEVICE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {  # of q and k
    "one number": ((1, 1, 1, 1), (1, 1, 1, 1)),
    "odd": ((2, 37, 6, 5), (2, 37, 3, 5)),
    "groups": ((3, 40, 6, 64), (3, 40, 1, 64)),
    "wide": ((1, 70, 3, 200), (1, 70, 3, 200)),
    "no token": ((2, 0, 4, 8), (2, 0, 2, 8)),
}


def formula(x, dout):
    """The result and the gradient, in float64."""
    x, dout = x.detach().double().cpu(), dout.double().cpu()
    norm = x.norm(dim=-1, keepdim=True)
    y = x / norm.clamp(min=EPS)
    along = (y * dout).sum(-1, keepdim=True).where(norm >= EPS, 0.0)
    return y, (dout - y * along) / norm.clamp(min=EPS)


def allowed(dtype):
    return 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps


def assert_right(call, q, k, seed=3):
    """Of a call(q, k): results and gradients, row by row."""
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    outs = call(*leaves)
    douts = [normal(*x.shape, seed=seed + n).to(DEVICE, x.dtype) for n, x in enumerate(outs)]
    grads = torch.autograd.grad(outs, leaves, douts)
    for x, dout, out, dx in zip(leaves, douts, outs, grads, strict=True):
        y, right = formula(x, dout)
        assert out.dtype == dx.dtype == x.dtype and out.shape == dx.shape == x.shape
        assert ((out.detach().double().cpu() - y).norm(dim=-1) <= allowed(x.dtype) * y.norm(dim=-1)).all()
        terms = dout.double().cpu().norm(dim=-1) / x.detach().double().cpu().norm(dim=-1).clamp(min=EPS)
        # Of numbers below the range of normal ones few digits are left.
        least = torch.finfo(x.dtype).tiny * x.shape[3] ** 0.5
        assert ((dx.double().cpu() - right).norm(dim=-1) <= allowed(x.dtype) * terms + least).all()


def kernel(q, k):
    pytest.importorskip("triton", reason="needs triton")
    return fused_unit_heads(q, k, EPS)[:2]


CALLS = {"kernel": kernel, "torch": lambda q, k: (unit(q), unit(k))}


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("call", CALLS)
def test_is_the_formula(call, name, dtype):
    if call == "kernel" and dtype == torch.float64:
        return
    assert_right(CALLS[call], *(normal(*shape, seed=n).to(DEVICE, dtype) for n, shape in enumerate(SHAPES[name])))


def extreme(dtype) -> torch.Tensor:
    """Vectors of the largest and the smallest numbers of a dtype, around the least norm, and of one number."""
    info = torch.finfo(dtype)
    sizes = [info.max / 2, info.max**0.5, 1e4, 1.0, 1e-4] + [1e-5, 1e-8, 1e-18] * (dtype != torch.float16)
    x = normal(1, len(sizes) + 1, 2, 24).clamp(-2, 2) * torch.tensor([*sizes, 1.0], dtype=torch.float64)[:, None, None]
    x[:, -1, :, 1:] = 0
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_extreme_values(call, dtype):
    assert_right(CALLS[call], extreme(dtype), extreme(dtype).flip(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_zeros_stay_zeros(call, dtype):
    """Their gradient is that of a division by the least norm."""
    q, k = (torch.zeros(1, 3, 2, 8, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(2))
    k.data[0, 1] = 1.0
    outs = CALLS[call](q, k)
    (dq, dk) = torch.autograd.grad(outs, (q, k), [torch.full_like(x, 2.0**-10) for x in outs])
    assert not outs[0].any() and not outs[1][0, ::2].any()
    torch.testing.assert_close(dq, torch.full_like(dq, 2.0**-10 / EPS))
    assert dk[0, 1].abs().max() <= 2.0**-10 * 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("batch", [1, 2])
def test_views_of_a_projection(batch):
    """They are read without a copy, and give the same, bit for bit."""
    flat = normal(batch, 21, 7 * 12).float().to(DEVICE)
    q, k = (x.unflatten(-1, (-1, 12)) for x in flat[..., 12:].split([4 * 12, 2 * 12], -1))
    for view, copy in zip(kernel(q, k), kernel(q.contiguous(), k.contiguous()), strict=True):
        assert torch.equal(view, copy)
    for view, copy in zip(kernel(q.mT.contiguous().mT, k), kernel(q, k), strict=True):
        assert torch.equal(view, copy)


@pytest.mark.parametrize("heads", [1, 3])
def test_views_without_the_last_channel(heads):
    """As the layer of the delta rule takes them, with an offset."""
    q, k = (normal(2, 9, n, 16, seed=n).float().to(DEVICE)[..., :-1] for n in (heads, 1))
    assert_right(kernel, q, k)


def test_only_one_of_both_has_a_gradient():
    q, k = (normal(1, 5, 2, 8, seed=n).float().to(DEVICE).requires_grad_() for n in range(2))
    unit_q, unit_k = kernel(q, k)
    (dq,) = torch.autograd.grad(unit_q.sum(), q, retain_graph=True)
    dk, none = torch.autograd.grad(unit_k.sum(), (k, q))
    assert dq.any() and dk.any() and not none.any()


def test_the_specification_has_second_derivatives_through_the_norm():
    q, k, v = (normal(1, 4, 1, 3, seed=n).to(DEVICE).requires_grad_() for n in range(3))
    beta = torch.full((1, 4, 1), 0.5, dtype=torch.float64, device=DEVICE)
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: power_delta_rule(q, k, v, beta, impl="reference").out, (q, k, v)
    )


@pytest.mark.parametrize("dtype, size", [(torch.float32, 2.0**80), (torch.float64, 2.0**600)], ids=str)
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_keys_of_any_size_are_one_key(impl, dtype, size):
    """Squares of keys of these sizes leave the range of their dtype. On some devices such keys became zeros."""
    q, k, v = (normal(1, 9, 2, 4, seed=n).to(DEVICE, dtype) for n in range(3))
    beta = torch.full((1, 9, 2), 0.5, device=DEVICE, dtype=dtype)
    small, large = (power_delta_rule(x, x, v, beta, impl=impl).out for x in (k, k * size))
    assert small.any()
    torch.testing.assert_close(large, small)
    assert unit_heads(q * size, k)[0].any()
