"""Products of a step, and all that surrounds them, against their formula in float64.

Tolerances, of norms of differences: 2e-6 in float32, sums of some dozens of numbers; in half precision four times the
rounding of what is stored.
"""

import pytest
import torch
from torch.nn import functional as F

from sympow.ops.fused.step_products import (
    FEW_ROWS,
    GELU,
    LOG_SIGMOID,
    MOST_ROWS,
    SIGMOID,
    SWIGLU,
    Norm,
    Product,
    Shift,
    Taps,
    Turn,
    step_products,
    takes_parts,
    takes_step,
)
from tests.draws import normal
from tests.ops.contract import DEVICE

pytest.importorskip("triton", reason="needs triton")

# Triton's interpreter multiplies bfloat16 with errors of its own.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
ROWS = [(1, torch.float32), (8, torch.float32), (FEW_ROWS, HALF), (FEW_ROWS + 2, HALF)]
KEY_DIM = 6


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def drawn(dtype, *shape, seed=0, scale=1.0):
    return (scale * normal(*shape, seed=seed)).to(DEVICE, dtype)


def close(found, expected, dtype):
    allowed = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    found, expected = found.double().cpu(), expected.cpu()
    assert found.shape == expected.shape
    assert (found - expected).norm() <= allowed * expected.norm()


def doubled(*tensors):
    return (None if x is None else x.double() for x in tensors)


def normed(x, norm):
    """Returns the norm of x [B, d] in float64."""
    x, weight = x.double(), norm.weight.double()
    parts = x.unflatten(-1, (-1, len(weight)))
    if norm.centered:
        parts = parts - parts.mean(-1, keepdim=True)
    parts = parts / (parts.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
    return parts.flatten(-2) + (0 if norm.bias is None else norm.bias.double())


def rotated(y, positions, frequencies, outputs):
    """Rotates the first outputs of y [B, n] in float64."""
    pairs = y[:, :outputs].unflatten(-1, (-1, len(frequencies), 2))
    turned = torch.polar(torch.ones_like(pairs[..., 0]), positions.double()[:, None, None] * frequencies)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turned)
    return torch.cat([pairs.flatten(1), y[:, outputs:]], dim=1)


@pytest.mark.parametrize(("rows", "dtype"), ROWS)
@pytest.mark.parametrize("width", [4, 3, 1])
def test_the_projections_of_a_mixer(rows, dtype, width):
    """A norm, a convolution, four products, a rotation, and functions of two gates."""
    inputs, outputs, turned = 40, 30, 4 * KEY_DIM
    x, past = drawn(dtype, rows, 1, inputs), drawn(dtype, rows, width - 1, inputs, seed=1)
    norm = Norm(1 + drawn(dtype, inputs, seed=2, scale=0.3), drawn(dtype, inputs, seed=3), 1e-5, True)
    taps = Taps(drawn(dtype, inputs, width, seed=4), drawn(dtype, inputs, seed=5), past)
    weights = [drawn(dtype, n, inputs, seed=6 + n, scale=0.2) for n in (outputs, 12, 3, 5)]
    b0, b2, more = (drawn(dtype, n, seed=40 + n) for n in (outputs, 3, outputs))
    frequencies = torch.rand(KEY_DIM // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    positions = (7 + 100_000 * torch.arange(rows)).to(DEVICE)
    before = past.clone()
    found = step_products(
        x,
        Product(weights[0], b0, more),
        Product(weights[1]),
        [Product(weights[2], b2, function=LOG_SIGMOID), Product(weights[3], function=SIGMOID, factor=1.5)],
        norm=norm,
        taps=taps,
        turn=Turn(positions, frequencies, turned),
    )
    given = normed(x[:, 0], norm).to(dtype)
    held = torch.cat([before, given[:, None]], dim=1)
    c = torch.einsum("bkd,dk->bd", held.double(), taps.weight.double()) + taps.bias.double()
    if found.inputs is None:  # the rows were prepared by another kernel, which rounds them
        close(past, held[:, 1:].double(), dtype)
        c = c.to(dtype).double()
    else:
        assert torch.equal(past, before)
        close(found.inputs[:, 0], given.double(), dtype)
    w = [weight.double() for weight in weights]
    y = rotated(c @ w[0].T + b0.double() + more.double(), positions, frequencies, turned)
    close(found.first[:, 0], y, dtype)
    close(found.second[:, 0], c @ w[1].T, dtype)
    close(found.narrow[0][:, 0], F.logsigmoid(c @ w[2].T + b2.double()), dtype)
    close(found.narrow[1][:, 0], 1.5 * torch.sigmoid(c @ w[3].T), dtype)
    assert [x.dtype for x in found.narrow] == [torch.float32] * 2
    assert torch.equal(found.positions, positions + 1)


@pytest.mark.parametrize(("rows", "dtype"), ROWS)
@pytest.mark.parametrize(("heads", "channels"), [(3, 8), (1, 24), (1, 1500)])
def test_the_output_of_a_mixer(rows, dtype, heads, channels):
    """A norm of heads, a gate, a bias, the residual, and a convolution elsewhere that gets its newest input."""
    outputs = 22
    y, gate = drawn(dtype, rows, 1, heads * channels), drawn(dtype, rows, 1, heads * channels, seed=1)
    norm = Norm(1 + drawn(dtype, channels, seed=2, scale=0.3), None, 1e-6, False)
    weight, bias = drawn(dtype, outputs, heads * channels, seed=3, scale=0.2), drawn(dtype, outputs, seed=4)
    residual, past = drawn(dtype, rows, 1, outputs, seed=5), drawn(dtype, rows, 3, outputs, seed=6)
    shift = Shift(past.clone(), residual) if rows <= 8 and (dtype == torch.float32 or rows <= FEW_ROWS) else None
    found = step_products(y, Product(weight, bias), norm=norm, gate=gate, residual=residual, shift=shift).first
    expected = normed(y[:, 0], norm) * F.silu(gate[:, 0].double())
    close(found[:, 0], expected @ weight.double().T + bias.double() + residual[:, 0].double(), dtype)
    if shift is not None:
        assert torch.equal(shift.past, torch.cat([past[:, 1:], residual], dim=1))


@pytest.mark.parametrize(("rows", "dtype"), ROWS)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("function", [GELU, SWIGLU])
def test_the_first_half_of_an_mlp(rows, dtype, centered, function):
    inputs, outputs = 21, 34
    x, weight = drawn(dtype, rows, 1, inputs) + 2, drawn(dtype, outputs, inputs, seed=1, scale=0.3)
    norm = Norm(1 + drawn(dtype, inputs, seed=2, scale=0.3), None, 1e-5, centered)
    found = step_products(x, Product(weight, function=function), norm=norm).first[:, 0]
    h = normed(x[:, 0], norm) @ weight.double().T
    gate, up = h.chunk(2, dim=-1)
    close(found, F.gelu(h, approximate="tanh") if function == GELU else F.silu(gate) * up, dtype)


@pytest.mark.parametrize(("rows", "dtype"), ROWS)
@pytest.mark.parametrize("inputs", [3, 300, 1500])
def test_a_product_of_any_width(rows, dtype, inputs):
    x, weight = drawn(dtype, rows, 1, inputs), drawn(dtype, 9, inputs, seed=1)
    close(step_products(x, Product(weight)).first[:, 0], x[:, 0].double() @ weight.double().T, dtype)


def test_a_log_of_a_gate_that_is_almost_open():
    """log(sigmoid(x)) is about -exp(-x), which is added up over the context."""
    x, weight = torch.ones(1, 1, 1, device=DEVICE), torch.tensor([[20.0], [12.0], [-90.0]], device=DEVICE)
    found = step_products(x, Product(weight), None, [Product(weight, function=LOG_SIGMOID)]).narrow[0]
    torch.testing.assert_close(found.flatten().double(), F.logsigmoid(weight.flatten().double()), rtol=1e-6, atol=0)


def test_which_norms_of_parts_are_taken():
    x = torch.empty(1, 1, 96, dtype=HALF)
    assert [takes_parts(n, x) for n in (1, 64, 96, 256, 512)] == [True, True, False, True, False]
    assert not takes_parts(256, x.float())


def test_what_is_taken(monkeypatch):
    monkeypatch.setattr("sympow.ops.fused.step_products.has_kernels", lambda device, dtype: True)
    x, weight = torch.empty(2, 1, 8), torch.empty(4, 8)
    assert takes_step(x, [weight, None])
    assert not takes_step(torch.empty(2, 2, 8), [weight])
    assert not takes_step(torch.empty(9, 1, 8), [weight]) and takes_step(torch.empty(9, 1, 8).half(), [weight.half()])
    assert not takes_step(torch.empty(MOST_ROWS + 1, 1, 8).half(), [weight.half()])
    assert (
        not takes_step(x, [weight.half()])
        and not takes_step(x, [weight.t()])
        and not takes_step(x, [weight.to("meta")])
    )
    assert not takes_step(x, [torch.empty(2, 1 << 14)]) and takes_step(x, [torch.empty(1 << 14)])
    with torch.enable_grad():
        assert not takes_step(x, [weight])
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes_step(x, [weight])
