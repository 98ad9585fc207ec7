"""Linear maps in float32 against float64, and the kernel against that.

Tolerances, of norms of differences: products of inputs that are exact are summed in float32. On a GPU the tensor cores
cut off a sum whenever they add 16 products, so the errors of up to 768 / 16 additions add up. The kernel's gradient of
x is rounded to bfloat16 once.
"""

import pytest
import torch

from sympow.ops.fused.float32_linear import float32_linear
from tests.ops.contract import DEVICE

FLOAT32, BFLOAT16 = 768 / 16 * 2.0**-23, 2.0**-8
SHAPES = [(70, 40, 3), (1, 16, 1), (300, 136, 17), (129, 768, 12), (0, 32, 4)]


def make(rows: int, inputs: int, width: int) -> tuple[torch.Tensor, ...]:
    """Returns x, with values of bfloat16, weights, and the gradient of the result."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=gen).bfloat16()
    weight, dy = torch.randn(width, inputs, generator=gen), torch.randn(rows, width, generator=gen)
    return x, weight, dy


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    return bool((got.double().cpu() - wanted).norm() <= tolerance * wanted.norm())


@pytest.mark.parametrize("autocast", [False, True])
def test_is_computed_in_float32(autocast):
    x, weight, _ = make(70, 40, 3)
    bias = torch.tensor([1.0, -2.0, 3.0])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = float32_linear(x, weight, bias)
    assert y.dtype == torch.float32 and close(y, x.double() @ weight.double().T + bias.double(), FLOAT32)
    y = float32_linear(x.double(), weight.double(), None)
    torch.testing.assert_close(y, x.double() @ weight.double().T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape):
    pytest.importorskip("triton", reason="needs triton")
    from sympow.ops.fused.float32_linear import fused_float32_linear

    x, weight, dy = make(*shape)
    leaves = x.to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_()
    y = fused_float32_linear(*leaves)
    dx, dweight = torch.autograd.grad(y, leaves, dy.to(DEVICE))
    assert y.dtype == torch.float32 and close(y, x.double() @ weight.double().T, FLOAT32)
    assert dx.dtype == torch.bfloat16 and close(dx, dy.double() @ weight.double(), BFLOAT16)
    assert dweight.dtype == torch.float32 and close(dweight, dy.double().T @ x.double(), FLOAT32)


def test_kernel_of_strided_inputs_and_narrow_weights():
    pytest.importorskip("triton", reason="needs triton")
    from sympow.ops.fused.float32_linear import fused_float32_linear

    x, weight, _ = make(70, 80, 3)
    x, weight = x[:, ::2].to(DEVICE), weight[:, ::2].bfloat16().to(DEVICE)
    assert close(fused_float32_linear(x, weight), x.double().cpu() @ weight.double().cpu().T, FLOAT32)


@pytest.mark.skipif(DEVICE != "cuda", reason="the choice of the kernel needs a GPU")
def test_a_gpu_takes_the_kernel():
    x, weight, _ = make(129, 768, 12)
    bias = torch.randn(12, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cuda", torch.bfloat16):
        y = float32_linear(x.cuda().view(3, 43, 768), weight.cuda(), bias.cuda())
    assert y.shape == (3, 43, 12)
    assert close(y.flatten(0, 1), x.double() @ weight.double().T + bias.double(), FLOAT32)
