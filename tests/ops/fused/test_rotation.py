"""The kernel of the rotation against plain torch in float64; without a GPU in Triton's interpreter.

Tolerances, of norms of differences: twice what the torch path errs in the same dtype, plus one rounding of what is
stored. The gradient of a position is a sum of terms that cancel, c db - d da over the pairs that turn together. A term
has the rounding of the stored pair (c, d) and three float32 ones, two products and a difference, and the sum over heads
has one more: 4 times EPS32 / 2 of the sum of the terms' sizes.
"""

from dataclasses import dataclass

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from sympow.layers import PowerAttention, SoftmaxAttention
from sympow.layers.linear import LinearAttention
from sympow.ops import rotary_frequencies, rotate_heads
from tests.ops.contract import DEVICE, EPS32

pytest.importorskip("triton", reason="needs triton")
from sympow.ops.fused import rotation as kernel
from sympow.ops.runtime.launcher import Launcher
from tests.draws import normal

GPU = DEVICE == "cuda"
gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
NORM_EPS = 1e-3  # large enough to be seen where it is left out
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]


@dataclass(frozen=True)
class Shape:
    """Of a fused projection. `positions`: the axes of size 1 of [B, T, groups] are shared."""

    B: int
    T: int
    H: int
    G: int
    K: int
    V: int
    positions: tuple[int, int, int]


SHAPES = {
    "one token": Shape(1, 1, 1, 1, 2, 1, (1, 1, 1)),
    "positions of tokens": Shape(2, 37, 6, 6, 8, 8, (1, 37, 1)),
    "positions of rows": Shape(2, 33, 4, 2, 16, 4, (2, 33, 1)),
    "positions of heads": Shape(2, 70, 6, 2, 6, 5, (2, 70, 2)),
    "positions of pairs of heads": Shape(1, 40, 8, 4, 4, 6, (1, 40, 2)),
    "multi-query": Shape(1, 65, 5, 1, 12, 20, (1, 65, 1)),
    "one batch of positions": Shape(3, 7, 2, 2, 4, 4, (1, 7, 2)),
}


def turn(qkv, positions, frequencies, heads, kv_heads):
    """The kernel without a norm."""
    return kernel.fused_rotate_heads(qkv, positions, frequencies, heads, kv_heads, None, None, 0.0)


def make(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """qkv and positions up to a million, leaves that require gradients; frequencies; gradients of q, k and v."""
    s = shape
    qkv = normal(s.B, s.T, (s.H + s.G) * s.K + s.G * s.V).to(DEVICE, dtype).requires_grad_()
    positions = (normal(*s.positions, seed=1).abs() * 3e5).to(DEVICE).requires_grad_()
    sizes = ((s.H, s.K), (s.G, s.K), (s.G, s.V))
    grads = [normal(s.B, s.T, *size, seed=2).to(DEVICE, dtype) for size in sizes]
    return qkv, positions, rotary_frequencies(s.K, device=DEVICE), grads


def results(call, qkv, positions, frequencies, grads, *heads, norms=()):
    """q, k, v, dqkv, dpositions, and the gradients of the weights of norms."""
    outs = call(qkv, positions, frequencies, *heads)
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, (qkv, positions, *norms), grads)]


def in_torch(qkv, positions, frequencies, grads, shape, dtype, norms=None):
    """`results` of the torch path, which a CPU takes, in `dtype`."""
    qkv, positions, *grads = (x.detach().to("cpu") for x in (qkv, positions, *grads))
    leaves = qkv.to(dtype).requires_grad_(), positions.requires_grad_()
    grads = [x.to(dtype) for x in grads]
    if norms is None:
        return results(rotate_heads, *leaves, frequencies.cpu(), grads, shape.H, shape.G)
    norms = tuple(x.detach().cpu().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for x in norms)

    def call(*arguments):
        return rotate_heads(*arguments, norms, NORM_EPS)

    return results(call, *leaves, frequencies.cpu(), grads, shape.H, shape.G, norms=norms)


def moved_terms(exact, grads, positions, frequencies):
    """Of every position the sizes, added up, of the terms of its gradient."""
    groups, sizes = positions.shape[2], 0
    for turned, grad in zip(exact[:2], grads[:2], strict=True):
        pairs = [x.cpu().double().unflatten(-1, (-1, 2)).norm(dim=-1) for x in (turned, grad)]
        sizes = sizes + (pairs[0] * pairs[1] * frequencies.cpu()).unflatten(2, (groups, -1)).sum((3, 4))
    return sizes.sum_to_size(positions.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_contract(name, dtype):
    shape = SHAPES[name]
    inputs = make(shape, dtype)
    actual = results(turn, *inputs, shape.H, shape.G)
    exact, peer = (in_torch(*inputs, shape, x) for x in (torch.float64, dtype))
    half_ulp = torch.finfo(dtype).eps / 2
    for part, a, e, p in zip(("q", "k", "v", "dqkv"), actual, exact, peer, strict=False):
        assert a.dtype == dtype and a.shape == e.shape
        assert (a.cpu().double() - e).norm() <= 2 * (p.double() - e).norm() + half_ulp * e.norm(), part
    terms = moved_terms(exact, inputs[3], inputs[1], inputs[2])
    assert actual[4].dtype == torch.float64
    assert (actual[4].cpu() - exact[4]).norm() <= (half_ulp + 2 * EPS32) * terms.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_norms_before_the_rotation(name, dtype):
    """The norm of [K] rows and its gradients, of rows of different sizes."""
    shape = SHAPES[name]
    inputs = make(shape, dtype)
    with torch.no_grad():
        inputs[0].mul_(normal(shape.B, shape.T, 1, seed=3).exp().to(inputs[0]))
    norms = tuple((1 + 0.3 * normal(shape.K, seed=seed)).float().to(DEVICE).requires_grad_() for seed in (4, 5))

    def call(*arguments):
        return kernel.fused_rotate_heads(*arguments, *norms, NORM_EPS)

    actual = results(call, *inputs, shape.H, shape.G, norms=norms)
    exact, peer = (in_torch(*inputs, shape, x, norms) for x in (torch.float64, dtype))
    half_ulp = torch.finfo(dtype).eps / 2
    parts = ("q", "k", "v", "dqkv", "dpositions", "dweight_q", "dweight_k")
    for part, a, e, p in zip(parts, actual, exact, peer, strict=True):
        if part == "dpositions":
            continue  # its terms cancel; `test_contract` has its bound, and the norm does not change how it is formed
        assert a.shape == e.shape and a.dtype == (torch.float32 if part.startswith("dweight") else dtype)
        assert (a.cpu().double() - e).norm() <= 2 * (p.double() - e).norm() + half_ulp * e.norm(), part
    assert torch.isfinite(actual[4]).all()


def test_without_a_gradient_of_positions_nothing_is_kept():
    shape = SHAPES["positions of heads"]
    qkv, positions, frequencies, grads = make(shape, torch.float32)
    *_, expected, _ = results(turn, qkv, positions, frequencies, grads, shape.H, shape.G)
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        outs = turn(qkv, positions.detach(), frequencies, shape.H, shape.G)
    assert sorted(saved) == sorted([positions.numel(), frequencies.numel()])
    assert torch.equal(torch.autograd.grad(outs, qkv, grads)[0], expected)


def test_strides():
    """A projection's output inside a wider tensor, positions with time last, gradients with heads first, with channels
    apart and expanded."""
    shape = SHAPES["positions of heads"]
    qkv, positions, frequencies, grads = make(shape, torch.float32)
    grads[2] = grads[2][:, :1, :, :1].expand_as(grads[2])
    expected = results(turn, qkv, positions, frequencies, [x.contiguous() for x in grads], shape.H, shape.G)
    wide = torch.cat([qkv, qkv], 2).detach()[..., : qkv.shape[2]].requires_grad_()
    late = positions.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    grads[0] = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    grads[1] = grads[1].transpose(1, 3).contiguous().transpose(1, 3)
    actual = results(turn, wide, late, frequencies, grads, shape.H, shape.G)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    apart = qkv.detach().transpose(1, 2).contiguous().transpose(1, 2)
    outs = turn(apart, positions.detach(), frequencies, shape.H, shape.G)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=False))


def test_no_tokens():
    qkv = torch.zeros(2, 0, 12, device=DEVICE, requires_grad=True)
    positions = torch.zeros(1, 0, 1, dtype=torch.float64, device=DEVICE, requires_grad=True)
    q, k, v = turn(qkv, positions, rotary_frequencies(4, device=DEVICE), 1, 1)
    assert (q.shape, k.shape, v.shape) == ((2, 0, 1, 4),) * 3
    dqkv, dpositions = torch.autograd.grad((q, k, v), (qkv, positions), (q, k, v))
    assert dqkv.shape == qkv.shape and dpositions.shape == positions.shape


@pytest.mark.parametrize("grad", [False, True])
def test_operators(grad):
    shape = SHAPES["positions of heads"]
    qkv, positions, frequencies, grads = make(shape, torch.float32)
    positions.requires_grad_(grad)
    arguments = (qkv, positions, frequencies, shape.H, shape.G)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator, operator_backward = torch.ops.sympow.fused_rotate_heads, torch.ops.sympow.rotate_heads_backward
    torch.library.opcheck(operator, (*arguments, None, None, 0.0), test_utils=checks)
    turned = [x.detach() for x in turn(*arguments)[:2]] if grad else (None, None)
    weights = [torch.ones(shape.K, device=DEVICE, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(operator, (*arguments, *weights, NORM_EPS), test_utils=checks)
    arguments = (*grads, *turned, positions.detach(), frequencies)
    for normed in ((None, None, None, 0.0), (qkv.detach(), *(x.detach() for x in weights), NORM_EPS)):
        backward = (*arguments, *normed)
        torch.library.opcheck(operator_backward, backward, test_utils=("test_schema", "test_faketensor"))


LAYERS = {
    "power, data": lambda: PowerAttention(16, 2, n_kv_heads=1, rotation="data", chunk_size=8, impl="eager"),
    "power, fixed, qk_norm": lambda: PowerAttention(16, 2, rotation="fixed", qk_norm=True, impl="eager"),
    "softmax": lambda: SoftmaxAttention(16, 4, n_kv_heads=2, value_dim=3),
    "elu + 1": lambda: LinearAttention(16, 2, feature_map="elu+1", impl="eager"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_it(name, monkeypatch):
    """Whole sequences with gradients, and steps, as the torch path has them."""
    layer, x = LAYERS[name](), normal(2, 19, 16).float()
    if name == "power, data":
        torch.nn.init.normal_(layer.beta.weight, std=0.5)
    expected = layer_results(layer, x)
    launched = take_kernels(monkeypatch)
    actual = layer_results(layer.to(DEVICE), x.to(DEVICE))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    assert launched


@pytest.mark.parametrize("grad", [False, True])
def test_compile_fullgraph(grad, monkeypatch):
    shape = SHAPES["positions of heads"]
    qkv, positions, frequencies, grads = make(shape, torch.float32)
    positions.requires_grad_(grad)
    leaves = (qkv, positions) if grad else (qkv,)

    def call(qkv, positions):
        outs = rotate_heads(qkv, positions, frequencies, shape.H, shape.G)
        return [*outs, *torch.autograd.grad(outs, leaves, grads)]

    launched = take_kernels(monkeypatch)
    expected = call(qkv, positions)
    torch.compiler.reset()
    compiled = torch.compile(rotate_heads, backend="aot_eager", fullgraph=True)
    outs = compiled(qkv, positions, frequencies, shape.H, shape.G)
    for a, b in zip([*outs, *torch.autograd.grad(outs, leaves, grads)], expected, strict=True):
        assert torch.equal(a, b)
    assert len(launched) == 4
    torch.compiler.reset()


def layer_results(layer, x):
    y = layer(x)
    grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    with torch.no_grad():
        first, state = layer.step(x[:, :18], layer.init_state(2))
        last, _ = layer.step(x[:, 18:], state)
    return [y.detach(), *grads, torch.cat([first, last], 1)]


def take_kernels(monkeypatch) -> list:
    """Kernels are taken on the CPU as well; the list grows by one entry a launch."""
    launched, launch = [], Launcher.__call__
    monkeypatch.setattr(Launcher, "__call__", lambda self, **tensors: launched.append(1) or launch(self, **tensors))
    monkeypatch.setattr(kernel, "has_kernels", lambda device, dtype: True)
    return launched


@gpu
def test_autocast():
    layer, x = PowerAttention(64, 2).to(DEVICE), normal(1, 50, 64).float().to(DEVICE)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        q, k, v = layer.rotated_heads(x)
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}


@gpu
def test_graph():
    shape = SHAPES["positions of heads"]
    qkv, positions, frequencies, _ = make(shape, torch.bfloat16)
    with torch.no_grad():
        expected = turn(qkv, positions, frequencies, shape.H, shape.G)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = turn(qkv, positions, frequencies, shape.H, shape.G)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@gpu
def test_more_elements_than_int32_counts():
    """The last row comes out, and its gradient, as it does alone."""
    width = 3 * 16 * 64
    qkv = torch.randn(2**31 // (4096 * width) + 2, 4096, width, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(4096, dtype=torch.float64, device="cuda")[None, :, None]
    frequencies = rotary_frequencies(64, device="cuda")
    outs = turn(qkv, positions, frequencies, 16, 16)
    alone = turn(qkv[-1:], positions, frequencies, 16, 16)
    assert all(torch.equal(a[-1:], b) for a, b in zip(outs, alone, strict=True))
    back, *_ = kernel.rotate_heads_backward(*outs, None, None, positions, frequencies, None, None, None, 0.0)
    expected, *_ = kernel.rotate_heads_backward(*alone, None, None, positions, frequencies, None, None, None, 0.0)
    assert torch.equal(back[-1:], expected)
