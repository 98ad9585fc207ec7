"""Norm and gate behind the heads against their formula in float64, and the kernel against that.

Tolerances of the kernel, of norms of differences: 2e-6 in float32, a few operations a number; in half precision four
times the rounding of what is stored.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sympow.ops.fused.gated_norm import gated_norm
from tests.draws import normal
from tests.ops.contract import DEVICE

PARTS = [(True, True), (True, False), (False, True)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(2, 37, 3, 16), (1, 1, 1, 1), (1, 70, 5, 24), (3, 40, 6, 64)]


def make(shape, norm, gate):
    y, weight, z = normal(*shape), 1 + 0.5 * normal(shape[3], seed=1), normal(*shape[:2], shape[2] * shape[3], seed=2)
    return y, weight if norm else None, z if gate else None


def formula(y, weight, gate, eps=1e-6):
    if weight is not None:
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    y = y.flatten(2)
    return y if gate is None else y * gate / (1 + (-gate).exp())


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_formula(shape, parts):
    inputs = make(shape, *parts)
    torch.testing.assert_close(gated_norm(*inputs), formula(*inputs), rtol=1e-12, atol=1e-14)


def test_with_neither_heads_are_joined():
    y = normal(2, 3, 4, 5)
    assert torch.equal(gated_norm(y, None, None), y.flatten(2))


def test_an_output_of_zeros_stays_zero():
    y, weight, gate = make((1, 4, 2, 8), True, True)
    y = torch.zeros_like(y).requires_grad_()
    out = gated_norm(y, weight, gate)
    out.sum().backward()
    assert not out.any() and y.grad.isfinite().all()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel(shape, parts, dtype):
    pytest.importorskip("triton", reason="needs triton")
    from sympow.ops.fused import gated_norm as kernel

    dtypes = (dtype, torch.float32, dtype)
    given = make(shape, *parts)
    inputs = [None if x is None else x.to(DEVICE, d).requires_grad_() for x, d in zip(given, dtypes, strict=True)]
    exact = [None if x is None else x.detach().double().cpu().requires_grad_() for x in inputs]
    dout = normal(*shape[:2], shape[2] * shape[3], seed=3).to(dtype)
    out, right = kernel.fused_gated_norm(*inputs, 1e-6), formula(*exact)
    leaves, exact_leaves = ([x for x in xs if x is not None] for xs in (inputs, exact))
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout.to(DEVICE))]
    expected = [right.detach(), *torch.autograd.grad(right, exact_leaves, dout.double())]
    allowed = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        # A single channel is its own norm: its gradient is 0, of which roundings of the terms are left.
        assert (a.double().cpu() - b).norm() <= allowed * max(b.norm(), dout.double().norm())


def test_under_activation_checkpointing():
    pytest.importorskip("triton", reason="needs triton")
    from sympow.ops.fused import gated_norm as kernel

    y, weight, gate = (x.float().to(DEVICE).requires_grad_() for x in make((2, 5, 3, 4), True, True))

    def call(y, weight, gate):
        return kernel.fused_gated_norm(y, weight, gate, 1e-6).square().sum()

    expected = torch.autograd.grad(call(y, weight, gate), (y, weight, gate))
    found = torch.autograd.grad(checkpoint(call, y, weight, gate, use_reentrant=False), (y, weight, gate))
    assert all(map(torch.equal, found, expected))
