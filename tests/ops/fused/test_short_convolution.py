"""The short convolution against its sum, written out, in float64; its kernel against that, and on packed documents.

Tolerances of the kernel, of norms of differences: sums of a few products in float32, 1e-6 of the norm; in half
precision twice the rounding of what is stored. Sums over all tokens, the gradients of the weights, likewise.
"""

from itertools import pairwise

import pytest
import torch

from sympow.ops.convolution import causal_convolution
from sympow.ops.fused import short_convolution as module
from sympow.ops.fused.short_convolution import document_starts, short_convolution, short_convolution_step
from tests.draws import normal
from tests.ops.contract import DEVICE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(2, 37, 5, 4), (1, 1, 3, 4), (1, 3, 130, 7), (2, 530, 4, 1), (1, 513, 129, 3)]
KERNEL = [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[0], dtype) for dtype in DTYPES[1:]]
BORDERS = [0, 2, 2, 3, 20, 37]


def written_out(x, weight, bias):
    """Token by token and tap by tap."""
    y = bias.expand_as(x).clone()
    for t in range(x.shape[1]):
        for s in range(min(weight.shape[1], t + 1)):
            y[:, t] = y[:, t] + weight[:, weight.shape[1] - 1 - s] * x[:, t - s]
    return y


def make(batch, time, channels, width):
    return normal(batch, time, channels), normal(channels, width, seed=1), normal(channels, seed=2)


@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_sum(shape):
    x, weight, bias = make(*shape)
    torch.testing.assert_close(short_convolution(x, weight, bias), written_out(x, weight, bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("past", [0, 39])
def test_many_taps_are_no_sum_that_is_written_out(past, monkeypatch):
    """Compiled code and kernels have a line for each tap; more than 16 taps are a long convolution."""
    x, weight, bias = (each.requires_grad_() for each in make(2, 50 + past, 3, 40))
    seen = {"past": x[:, :past]} if past else {}
    expected = short_convolution(x[:, past:], weight, bias, **seen)
    gradients = torch.autograd.grad(expected.square().sum(), (x, weight, bias))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    taps = []
    monkeypatch.setattr(module, "causal_convolution", lambda x, h: taps.append(len(h)) or causal_convolution(x, h))
    got = short_convolution(x[:, past:], weight, bias, **seen)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), (x, weight, bias)), gradients)
    assert taps == [40]


def test_documents_are_each_alone():
    x, weight, bias = make(1, 37, 5, 4)
    alone = [short_convolution(x[:, a:b], weight, bias) for a, b in pairwise(BORDERS)]
    packed = short_convolution(x, weight, bias, cu_seqlens=torch.tensor(BORDERS))
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 2, 20, 36])
def test_goes_on_from_the_tokens_before(cut):
    x, weight, bias = make(2, 37, 5, 4)
    padded = torch.cat([torch.zeros(2, 3, 5, dtype=torch.float64), x], 1)
    y = short_convolution(x[:, cut:], weight, bias, past=padded[:, cut : cut + 3])
    torch.testing.assert_close(y, short_convolution(x, weight, bias)[:, cut:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize(("channels", "width"), [(5, 4), (130, 7), (4, 1)])
def test_steps_go_on_in_place(channels, width, dtype):
    """Steps of one token, of more than are kept, and of none; by plain torch in float64, else by the kernel."""
    x, weight, bias = make(2, 12, channels, width)
    expected = written_out(x, weight, bias)
    step = short_convolution_step
    if dtype != torch.float64:
        pytest.importorskip("triton", reason="needs triton")
        from sympow.ops.fused.short_convolution import fused_short_convolution_step as step
    device = "cpu" if dtype == torch.float64 else DEVICE
    weight, bias = (z.to(device, torch.promote_types(dtype, torch.float32)) for z in (weight, bias))
    parts = x.to(device, dtype).split([1, 1, 7, 0, 2, 1], 1)
    pool = torch.zeros(2, width + 3, channels, device=device, dtype=dtype)
    past = pool[:, 2 : width + 1]  # a view: nothing beside it changes
    found = torch.cat([step(part, past, weight, bias) for part in parts], 1)
    allowed = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert (found.double().cpu() - expected).norm() <= allowed * expected.norm()
    assert torch.equal(past, torch.cat(parts, 1)[:, 12 - (width - 1) :])
    assert not pool[:, :2].any() and not pool[:, width + 1 :].any()


def test_what_is_no_dense_tensor_is_refused():
    x, weight, bias = make(2, 5, 3, 3)
    past, nested = x.new_zeros(2, 2, 3), torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
    for bad in (x.to_sparse(), nested, [1]):
        with pytest.raises(TypeError, match=r"x must be a (dense tensor|torch\.Tensor); got "):
            short_convolution(bad, weight, bias)
        with pytest.raises(TypeError, match=r"x must be a (dense tensor|torch\.Tensor); got "):
            short_convolution_step(bad, past, weight, bias)
    with pytest.raises(TypeError, match=r"past must be a dense tensor; got torch\.sparse_coo"):
        short_convolution(x, weight, bias, past=past.to_sparse())
    with pytest.raises(TypeError, match=r"past must be a dense tensor; got torch\.sparse_coo"):
        short_convolution_step(x, past.to_sparse(), weight, bias)


@pytest.mark.parametrize("bounds", [[0, 30], [0, 20, 10, 37], [1, 37], [37]])
def test_wrong_borders_are_refused(bounds):
    x, weight, bias = make(1, 37, 5, 4)
    with pytest.raises(ValueError, match="cu_seqlens"):
        short_convolution(x, weight, bias, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), KERNEL)
def test_kernel(shape, packed, dtype):
    pytest.importorskip("triton", reason="needs triton")
    from sympow.ops.fused import short_convolution as kernel

    x, weight, bias = (z.requires_grad_() for z in make(*shape))
    dy, time = normal(*shape[:3], seed=3), shape[1]
    cu_seqlens = torch.tensor(sorted({0, *(b for b in BORDERS if b < time), time})) if packed else None
    if packed:
        x, dy = x.detach()[:1].clone().requires_grad_(), dy[:1]
    y = short_convolution(x, weight, bias, cu_seqlens=cu_seqlens)
    expected = [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)]
    inputs = [z.detach().to(DEVICE, dtype if i == 0 else torch.float32).requires_grad_()
              for i, z in enumerate((x, weight, bias))]  # fmt: skip
    first = None if cu_seqlens is None else document_starts(cu_seqlens, time).to(DEVICE)
    y = kernel.fused_short_convolution(*inputs, first)
    found = [y.detach(), *torch.autograd.grad(y, inputs, dy.to(DEVICE, dtype))]
    allowed = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        assert (a.double().cpu() - b).norm() <= allowed * b.norm()
