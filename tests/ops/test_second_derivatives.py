"""Second derivatives, and those in forward mode: an implementation has the right ones, or raises an error. None drops
a part of them."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual

from sympow.models.cross_entropy import CrossEntropy, Divergence, cross_entropy_sum, divergence_sum
from sympow.ops import PowerState, Rotation, power_attention, power_delta_rule, rotary_frequencies, rotate_alike
from sympow.ops.feature_map import spow_dim
from sympow.ops.fused.float32_linear import fused_float32_linear
from sympow.ops.fused.gated_norm import fused_gated_norm
from sympow.ops.fused.gelu_linear import gelu_linear
from sympow.ops.fused.rotation import fused_rotate_heads
from sympow.ops.fused.short_convolution import fused_short_convolution
from sympow.ops.fused.unit_heads import fused_unit_heads
from tests.draws import normal
from tests.ops.contract import DEVICE, FLOAT64_TOLERANCE

B, T, H, K, V = 1, 9, 2, 4, 3
REFUSED = "cannot be differentiated again"
NAMES = ["gated_norm", "gelu_linear", "short_convolution", "float32_linear", "rotate_heads", "unit_heads"]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(DEVICE, dtype).requires_grad_()


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    q, k, v = (drawn(B, T, H, width, seed=width + n, dtype=dtype) for n, width in enumerate((K, K, V)))
    gate = torch.promote_types(dtype, torch.float32)
    return [q, k, v, (-drawn(B, T, H, seed=9).detach().abs()).to(gate).requires_grad_()]


def assert_each_refused(function, tensors: list[Tensor], matched: str = REFUSED) -> None:
    """Every input raises, alone, and where another term has a second derivative: of sums, and of what is squared."""
    for loss in (torch.Tensor.sum, lambda y: y.square().sum()):
        grads = torch.autograd.grad(loss(function(*tensors)), tensors, create_graph=True)
        for grad in grads:
            total = grad.square().sum() + sum(x.square().sum() for x in tensors)
            with pytest.raises(RuntimeError, match=matched):
                torch.autograd.grad(total, tensors, retain_graph=True)


def call_with_state(q, k, v, log_g, s, z, **options):
    out, state = power_attention(q, k, v, log_g, initial_state=PowerState(s, z, 2, K), return_state=True, **options)
    return torch.cat([out.flatten(), state.s.flatten(), state.z.flatten()])


@pytest.mark.parametrize("chunk_size", [4, T])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_the_op(impl, packed, chunk_size):
    tensors = inputs(torch.float64 if impl == "eager" else torch.float32)
    cu_seqlens = torch.tensor([0, 5, 5, T], device=DEVICE) if packed else None
    options = {"impl": impl, "chunk_size": chunk_size, "cu_seqlens": cu_seqlens}
    assert_each_refused(lambda *x: power_attention(*x, **options).out, tensors)
    documents, sums = (3 if packed else B), tensors[3].dtype
    s, z = drawn(documents, H, spow_dim(K, 2), V, seed=5, dtype=sums), drawn(documents, H, spow_dim(K, 2), seed=6)
    z = z.detach().abs().to(sums).requires_grad_()
    assert_each_refused(partial(call_with_state, **options), [*tensors, s, z])


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_the_op_with_a_rotation(impl):
    q, k, v, log_g = inputs(torch.float64 if impl == "eager" else torch.float32)
    positions = drawn(B, T, seed=3)
    frequencies = rotary_frequencies(K, device=q.device)
    assert_each_refused(
        lambda q, k, v, positions: (
            power_attention(q, k, v, log_g, rotation=Rotation(positions, frequencies), impl=impl).out
        ),
        [q, k, v, positions],
    )


def test_a_compiled_call():
    call = torch.compile(lambda *x: power_attention(*x, impl="eager").out, backend="aot_eager")
    assert_each_refused(call, inputs(), "does not currently support double backward")


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_the_reference_has_them(chunk_size):
    call = partial(power_attention, impl="reference", chunk_size=chunk_size)
    few = [x.detach()[:, :6, :1].requires_grad_() for x in inputs()]  # the check moves every number of them
    assert torch.autograd.gradgradcheck(lambda *x: call(*x).out, few)


def test_the_reference_has_those_of_positions():
    """As of queries and keys that are rotated with a gradient of the positions."""
    q, k, v, log_g = inputs()
    positions, frequencies = drawn(B, T, seed=3), rotary_frequencies(K, device=q.device)
    leaves = (q, k, v, positions)

    def second(by_op: bool) -> list[Tensor]:
        turned = rotate_alike((q, k), positions.detach() if by_op else positions, frequencies)
        rotation = Rotation(positions, frequencies) if by_op else None
        out = power_attention(*turned, v, log_g, rotation=rotation, impl="reference").out
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.sin().sum() for grad in grads), leaves)

    for found, expected in zip(second(True), second(False), strict=True):
        assert (found - expected).norm() <= FLOAT64_TOLERANCE * expected.norm()


def test_a_rotation_has_them():
    x, positions, frequencies = drawn(B, T, H, K, seed=1), drawn(B, T, seed=2), rotary_frequencies(K, device="cpu")
    assert torch.autograd.gradgradcheck(
        lambda x, positions: rotate_alike((x,), positions, frequencies)[0],
        (x.detach().cpu().requires_grad_(), positions.detach().cpu().requires_grad_()),
    )


def kernels() -> dict:
    """Kernels with a gradient of their own, and the shapes of the inputs in which they are not linear."""
    pytest.importorskip("triton", reason="needs triton")
    frequencies = rotary_frequencies(K, device=DEVICE)

    def rotated(qkv, positions, *weights):
        parts = fused_rotate_heads(qkv, positions[..., None], frequencies, H, H, *weights, 1e-6)
        return torch.cat([x.flatten() for x in parts])

    return {
        "gated_norm": (lambda *x: fused_gated_norm(*x, 1e-6), [(B, T, H, V), (V,), (B, T, H * V)]),
        "gelu_linear": (lambda *x: gelu_linear(*x, None), [(T, 8), (8,), (5, 8)]),
        "short_convolution": (
            lambda *x: fused_short_convolution(*x, torch.zeros(V, device=DEVICE), None),
            [(B, T, V), (V, 3)],
        ),
        "float32_linear": (fused_float32_linear, [(T, 8), (3, 8)]),
        "rotate_heads": (rotated, [(B, T, 2 * H * K + H * V), (B, T), (K,), (K,)]),
        "unit_heads": (lambda q, k: torch.cat(fused_unit_heads(q, k, 1e-6)[:2]), [(B, T, H, K), (B, T, H, K)]),
    }


@pytest.mark.parametrize("name", NAMES)
def test_kernels(name):
    function, shapes = kernels()[name]
    tensors = [drawn(*shape, seed=n, dtype=torch.float32) for n, shape in enumerate(shapes)]
    if name == "float32_linear":
        tensors[0] = tensors[0].detach().bfloat16().requires_grad_()
    if name == "rotate_heads":
        tensors[1] = tensors[1].detach().double().requires_grad_()
    assert_each_refused(function, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_in_slices(dtype):
    hidden, weight = drawn(T, 6, seed=0, dtype=dtype), drawn(11, 6, seed=1, dtype=dtype)
    targets, real = torch.arange(T, device=DEVICE), torch.ones(T, dtype=torch.bool, device=DEVICE)
    teacher = drawn(T, 6, seed=2, dtype=dtype).detach(), drawn(11, 6, seed=3, dtype=dtype).detach()
    assert_each_refused(
        lambda *x: cross_entropy_sum(*x, targets, rows=4, cross_entropy=CrossEntropy()), [hidden, weight]
    )
    assert_each_refused(
        lambda *x: divergence_sum(*x, *teacher, real, rows=4, divergence=Divergence()), [hidden, weight]
    )


@pytest.mark.parametrize("op", ["power", "delta", *NAMES])
def test_kernels_have_none_in_forward_mode(op):
    """Also where no input requires a gradient, and where the call is compiled."""
    if op in NAMES:
        function, shapes = kernels()[op]
        tensors = [drawn(*shape, seed=n, dtype=torch.float32).detach() for n, shape in enumerate(shapes)]
    else:
        pytest.importorskip("triton")
        *tensors, log_g = (x.detach() for x in inputs(torch.float32))
        beta = log_g.exp()
        power = partial(power_attention, log_g=log_g, impl="triton")
        delta = partial(power_delta_rule, beta=beta, log_g=log_g, impl="triton")
        function = lambda *x: (power if op == "power" else delta)(*x).out  # noqa: E731
    tangents = tuple(x.cos() for x in tensors)
    calls = [function] if op in NAMES else [function, torch.compile(function, backend="aot_eager")]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"forward|jvp|setup_context"):
            torch.func.jvp(call, tuple(tensors), tangents)
        with dual_level(), pytest.raises(RuntimeError, match=r"forward|jvp|setup_context"):
            call(*map(make_dual, tensors, tangents))
    torch.compiler.reset()


def test_the_reference_has_those_in_forward_mode():
    tensors = [x.detach() for x in inputs()]
    found = torch.func.jvp(lambda *x: power_attention(*x, impl="reference").out, tuple(tensors), tuple(tensors))[1]
    leaves = [x.requires_grad_() for x in tensors]
    out = power_attention(*leaves, impl="reference").out
    y = torch.ones_like(out).cumsum(1)
    grads = torch.autograd.grad(out, leaves, y)
    assert torch.allclose((found * y).sum(), sum((x * grad).sum() for x, grad in zip(leaves, grads, strict=True)))


def test_transforms_of_the_specification():
    """In this order: tables that a transform made would end with it. vmap cannot read values, so it checks none."""
    q, k, v = normal(1, 4, 2, 7), normal(1, 4, 1, 7, seed=1), normal(1, 4, 1, 3, seed=2)
    log_g = -normal(1, 4, 1, seed=3).abs()

    def total(x):
        return power_attention(x, k, v, log_g, p=4, impl="reference").out.sum()

    hessian, gradient = torch.func.hessian(total)(q), torch.func.grad(total)(q)
    leaf = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(total(leaf), leaf, create_graph=True)
    torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(hessian[0, 0, 0, 0], torch.autograd.grad(wanted[0, 0, 0, 0], leaf)[0])
    mapped = torch.func.vmap(lambda x, g: power_attention(x, k, v, g, p=4, impl="reference").out)(q[None], log_g[None])
    torch.testing.assert_close(mapped[0].sum(), total(q))
