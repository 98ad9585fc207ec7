"""The gradient of positions by which queries and keys were rotated, as `power_attention` forms it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sympow.ops import PowerState, Rotation, power_attention, rotary_frequencies, rotate_alike
from sympow.ops.feature_map import spow
from tests.ops.contract import DEVICE

B, T, H, G, K, V = 2, 70, 4, 2, 6, 5


def inputs(dtype=torch.float64, time=T, device=DEVICE, key_dim=K, value_dim=V, groups=G):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, time, heads, width, generator=gen, dtype=torch.float64).to(device, dtype)
        for heads, width in ((H, key_dim), (G, key_dim), (G, value_dim))
    )
    log_g = -torch.rand(B, time, G, generator=gen, dtype=torch.float64) / 20
    beta = 1 + torch.randn(B, time, groups, generator=gen, dtype=torch.float64) / 5
    dout = torch.randn(B, time, H, value_dim, generator=gen, dtype=torch.float64).to(device, dtype)
    return q, k, v, log_g.to(device), beta.to(device), dout


def gradient(q, k, v, log_g, beta, dout, by_op, **options):
    """Of the steps beta, of which positions are the running sums."""
    beta = beta.clone().requires_grad_()
    frequencies = rotary_frequencies(q.shape[3], device=q.device)
    positions = beta.cumsum(1)
    q, k = (x.clone().requires_grad_() for x in (q, k))
    turned = rotate_alike((q, k), positions.detach() if by_op else positions, frequencies)
    log_g = log_g.to(torch.promote_types(q.dtype, torch.float32))
    rotation = Rotation(positions, frequencies) if by_op else None
    out = power_attention(*turned, v, log_g, rotation=rotation, **options).out
    (out * dout).sum().backward()
    return beta.grad, q.grad, k.grad


def test_later_positions_turn_the_state():
    """The sum of the gradients of all positions from a token on is -dS . J S, of the state S before it."""
    q, k, v, log_g, beta, dout = inputs(device="cpu")
    frequencies, positions = rotary_frequencies(K), beta.cumsum(1).requires_grad_()
    q, k = rotate_alike((q, k), positions, frequencies)
    border = 31
    _, state = power_attention(
        *(x[:, :border] for x in (q, k, v, log_g)), return_state=True, impl="reference", chunk_size=T
    )
    s, z = (x.detach().requires_grad_() for x in (state.s, state.z))
    later = (x[:, border:] for x in (q, k, v, log_g))
    out = power_attention(*later, initial_state=PowerState(s, z, 2, K), impl="reference", chunk_size=T).out
    (out * dout[:, border:]).sum().backward()

    def turned(angle):
        """The state, as if its keys had been turned by a small angle more."""
        many = torch.randn(40, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        more = rotate_alike((many[None, :, None],), torch.full((40,), angle, dtype=torch.float64), frequencies)[0]
        matrix = torch.linalg.lstsq(spow(many, 2), spow(more[0, :, 0], 2)).solution  # phi(P x) = phi(x) matrix
        return torch.einsum("ngdv,de->ngev", s.detach(), matrix), z.detach() @ matrix

    step = 1e-5
    moved = [(a - b) / (2 * step) for a, b in zip(turned(step), turned(-step), strict=True)]
    expected = -((s.grad * moved[0]).sum((2, 3)) + (z.grad * moved[1]).sum(2))
    torch.testing.assert_close(positions.grad[:, border:].sum(1), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_is_that_of_autograd(impl, groups):
    tensors = inputs(groups=groups)
    found, expected = (gradient(*tensors, by_op, impl=impl, chunk_size=16) for by_op in (True, False))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("p", "gated", "chunk", "dtype"),
    [
        (1, True, 16, torch.float32),
        (2, True, 16, torch.float32),
        (2, True, 16, torch.bfloat16),
        (2, False, 16, torch.float32),
        (2, True, 64, torch.float32),
        (3, True, 64, torch.float32),
    ],
)
def test_by_the_kernels(p, gated, chunk, dtype):
    pytest.importorskip("triton", reason="needs triton")
    tensors = [x[:1, :40] for x in inputs(dtype)]
    if not gated:
        tensors[3] = tensors[3] * 0
    options = {"p": p, "normalize": p == 2, "chunk_size": chunk}
    exact, *_ = gradient(*(x.double() for x in tensors), False, impl="reference", **options)
    found, *_ = gradient(*tensors, True, impl="triton", **options)
    assert (found - exact).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


def test_sums_begin_anew_at_every_chunk():
    """Whatever the terms of later chunks add up to, the sum from the end of a chunk on is what the states say."""
    turn = pytest.importorskip("sympow.ops.triton.position_gradient", reason="needs triton")
    q, k, *_ = inputs(torch.float32)
    dq, dk = q.flip(1), k.flip(1)
    chunk, frequencies = 16, rotary_frequencies(K, device=DEVICE)
    gen = torch.Generator().manual_seed(0)
    products = torch.randn(B, 5, G, generator=gen, dtype=torch.float64).to(DEVICE)
    products[:, -1] = 0  # no chunk follows the last one
    terms = turn.position_gradient(q, k, dq, dk, frequencies, chunk, None)
    found = turn.position_gradient(q, k, dq, dk, frequencies, chunk, products)
    sums = found.flip(1).cumsum(1).flip(1)
    ends = torch.arange(chunk - 1, T - 1, chunk)
    torch.testing.assert_close(sums[:, ends], terms[:, ends] + products[:, :-1])
    assert (terms - found).abs().sum((0, 2)).nonzero()[:, 0].tolist() == ends.tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"frequencies": torch.ones(2, dtype=torch.float64)}, "frequencies must be"),
        ({"positions": torch.zeros(B, T, 3, dtype=torch.float64)}, "n dividing G"),
        ({"positions": torch.zeros(B, T)}, "is float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    q, k, v, *_ = inputs(device="cpu")
    rotation = Rotation(torch.zeros(B, T, dtype=torch.float64), rotary_frequencies(K))._replace(**change)
    with pytest.raises((TypeError, ValueError), match=says):
        power_attention(q, k, v, rotation=rotation)


class Following(TorchDispatchMode):
    """Changes nothing. Where such a mode is on, calls go through registered operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_by_the_registered_operator():
    pytest.importorskip("triton", reason="needs triton")
    tensors = [x[:1, :20] for x in inputs(torch.float32, groups=1)]
    expected, *_ = gradient(*tensors, True, impl="triton", chunk_size=16)
    with Following():
        found, *_ = gradient(*tensors, True, impl="triton", chunk_size=16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
