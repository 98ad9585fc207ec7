"""The second half of an MLP by kernels, and its gradients, against the formula in float64.

Tolerances, of norms of differences: 2e-6 in float32, a few operations a number and a sum over up to 300 tokens or
channels; in half precision four times the rounding of what is stored.
"""

import pytest
import torch
from torch.nn import functional as F

from sympow.models import LanguageModel, ModelConfig
from sympow.ops.fused import gelu_linear as kernels
from tests.changed_linear import CHANGES
from tests.draws import normal
from tests.ops.contract import DEVICE

pytest.importorskip("triton", reason="needs triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [((2, 37), 24, 8), ((1, 1), 1, 1), ((3, 100), 300, 40), ((5,), 520, 3)]


@pytest.mark.parametrize("out_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels(shape, dtype, out_bias):
    batch, width, outputs = shape
    rounded = [normal(*batch, width, seed=0), normal(width, seed=1), normal(outputs, width, seed=2) / width**0.5]
    rounded.append(normal(outputs, seed=3))
    rounded = [x.to(dtype) for x in rounded]
    dout = normal(*batch, outputs, seed=4).to(dtype)
    found = []
    for to in (torch.float64, dtype):
        device = "cpu" if to == torch.float64 else DEVICE
        leaves = [x.to(device, to).requires_grad_() for x in rounded]
        hidden, bias, weight, c = leaves
        given = (hidden, bias, weight, c if out_bias else None)
        if to == torch.float64:
            out = F.linear(F.gelu(hidden + bias, approximate="tanh"), weight, given[3])
        else:
            out = kernels.gelu_linear(*given)
        wanted = leaves if out_bias else leaves[:3]
        found.append([out.detach(), *torch.autograd.grad(out, wanted, dout.to(out))])
    tolerance = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for exact, got in zip(*found, strict=True):
        assert got.dtype == dtype and got.shape == exact.shape
        assert (got.double().cpu() - exact).norm() <= tolerance * exact.norm()


def test_large_numbers_have_finite_gradients():
    hidden = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4]], device=DEVICE, requires_grad=True)
    zero, weight = torch.zeros(5, device=DEVICE), torch.ones(1, 5, device=DEVICE)
    out = kernels.gelu_linear(hidden, zero, weight, None)
    (grad,) = torch.autograd.grad(out.sum(), hidden)
    torch.testing.assert_close(out.cpu(), torch.tensor([[10_050.0]]))
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0]]))


def test_no_tokens():
    hidden = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    bias, weight = (torch.ones(shape, device=DEVICE, requires_grad=True) for shape in (8, (3, 8)))
    out = kernels.gelu_linear(hidden, bias, weight, None)
    grads = torch.autograd.grad(out.sum(), [hidden, bias, weight])
    assert out.shape == (0, 3) and not any(grad.any() for grad in grads)


def test_launches_of_many_tokens_are_ones_that_cuda_takes(monkeypatch):
    """The second and third axes of a grid have at most 65,535 programs."""
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, arguments, **tensors: grids.append(grid))
    hidden, bias, weight = torch.empty(600_000, 2), torch.empty(2), torch.empty(1, 2)
    kernels.gelu_linear(hidden, bias, weight, None)
    kernels.gelu_linear_backward(hidden[:, :1], hidden, bias, weight)
    assert len(grids) == 3 and all(size <= 65_535 for grid in grids for size in grid[1:])


def test_a_block_with_weights_that_are_not_trained_does_not(monkeypatch):
    """The kernels would compute the gradients of these weights too."""
    monkeypatch.setattr("sympow.models.bodies.gpt2.has_kernels", lambda device, dtype: True)
    block = LanguageModel(ModelConfig(16, 16, 2, 1, body="gpt2"), seed=0).blocks[0]
    x = torch.zeros(1, 3, 16)
    assert block.takes_kernels(x)
    block.mlp_out.weight.requires_grad_(False)
    assert not block.takes_kernels(x)
    block.mlp_out.weight.requires_grad_(True)
    block.mlp_in.bias = None
    assert not block.takes_kernels(x)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("part", ["mlp_in", "mlp_out"])
def test_a_block_with_a_changed_layer_does_not(part, change, monkeypatch):
    monkeypatch.setattr("sympow.models.bodies.gpt2.has_kernels", lambda device, dtype: True)
    block = LanguageModel(ModelConfig(16, 16, 2, 1, body="gpt2"), seed=0).blocks[0]
    undo = change(getattr(block, part))
    try:
        assert not block.takes_kernels(torch.zeros(1, 3, 16))
    finally:
        undo()


def test_a_block_takes_them(monkeypatch):
    """The same loss and gradients with the kernels and without. Only what they keep and round differs."""
    tokens = torch.randint(16, (2, 19), generator=torch.Generator().manual_seed(0))
    model = LanguageModel(ModelConfig(16, 16, 2, 2, body="gpt2"), seed=0).to(DEVICE)
    tokens, found = tokens.to(DEVICE), []
    for taken in (True, False):
        monkeypatch.setattr("sympow.models.bodies.gpt2.has_kernels", lambda device, dtype, taken=taken: taken)
        model.zero_grad()
        loss = model.loss_sum(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
