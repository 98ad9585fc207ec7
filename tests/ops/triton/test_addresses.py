"""Inputs with gaps in memory, also gaps wider than int32 counts: the same results, bit for bit, as without gaps.

The memory of wide gaps is not touched, so the tests need room for addresses only.
"""

import pytest
import torch

from sympow.ops import Rotation, power_attention, rotary_frequencies
from sympow.ops.fused.gated_norm import fused_gated_norm
from sympow.ops.fused.rotation import fused_rotate_heads
from sympow.ops.fused.short_convolution import fused_short_convolution, fused_short_convolution_step
from tests.ops.contract import DEVICE

launch = pytest.importorskip("sympow.ops.triton.launch", reason="needs triton")
plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
segments = pytest.importorskip("sympow.ops.triton.segments", reason="needs triton")
CHUNK, K = (128, 32) if DEVICE == "cuda" else (32, 16)
TIME, HEADS = 3 * CHUNK + 1, 4
FAR = {"tokens": 2**31 // (2 * CHUNK), "heads": 2**31 // (HEADS - 1) // 16 * 16 + 16}


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Returns the output and all gradients."""
    gen = torch.Generator().manual_seed(1)
    log_g = -torch.rand(1, TIME, k.shape[2], generator=gen).to(DEVICE)
    positions = torch.rand(1, TIME, 1, generator=gen, dtype=torch.float64).to(DEVICE)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_g, positions)]
    rotation = Rotation(leaves[4], rotary_frequencies(K, device=DEVICE))
    out = power_attention(*leaves[:4], rotation=rotation, chunk_size=CHUNK, impl="triton").out
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def inputs() -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(1, TIME, heads, K, generator=gen).bfloat16().to(DEVICE) for heads in (HEADS, 1, 1)]


@pytest.mark.parametrize("far", FAR)
def test_inputs(far, monkeypatch):
    monkeypatch.setattr(segments, "number", lambda *_: 1)  # a segment of a row would start near its first token
    near = inputs()
    token, head, heads = (FAR["tokens"], K, HEADS + 2) if far == "tokens" else (K, FAR["heads"], HEADS)
    room = torch.empty(TIME * token + heads * head, device=DEVICE, dtype=torch.bfloat16)
    starts = (0, HEADS * K, (HEADS + 1) * K) if far == "tokens" else (0,)  # one key/value head is never far
    moved = [room[at:].as_strided(x.shape, (0, token, head, 1)).copy_(x) for at, x in zip(starts, near, strict=False)]
    moved += near[len(moved) :]
    for a, b in zip(results(*moved), results(*near), strict=True):
        assert torch.equal(a, b)


def test_transposed_queries(monkeypatch):
    """Of rows of very many tokens, as the state pass reads them for a group of query heads."""
    expected = results(*inputs())
    shape = launch.weighed_shape

    def wide(plan, reverse, z):
        rows, stride = shape(plan, reverse, z)
        return rows, (2**31 // ((HEADS - 1) * (K + 1)) // 128 + 1) * 128 if reverse else stride

    monkeypatch.setattr(launch, "weighed_shape", wide)
    plan.forget_plans()
    for a, b in zip(results(*inputs()), expected, strict=True):
        assert torch.equal(a, b)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradient_of_positions(frequencies: torch.Tensor) -> torch.Tensor:
    q, k, v = (normal(1, TIME, 1, K, seed=seed) for seed in range(3))
    positions = normal(1, TIME, 1, seed=3).double().requires_grad_()
    out = power_attention(q, k, v, rotation=Rotation(positions, frequencies), chunk_size=CHUNK, impl="triton").out
    return torch.autograd.grad(out, positions, torch.ones_like(out))[0]


def rotated_and_normed(weight: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(20.0, device=DEVICE, dtype=torch.float64)[None, :, None]
    heads = normal(1, 20, 4 * K, seed=0), positions, rotary_frequencies(K, device=DEVICE), 2, 1, weight, weight, 1e-6
    return fused_rotate_heads(*heads)[0]


def convolved(bias: torch.Tensor) -> torch.Tensor:
    return fused_short_convolution(normal(1, 20, K, seed=0), normal(K, 4, seed=1), bias, None)


SMALL = {
    "frequencies": (gradient_of_positions, lambda: rotary_frequencies(K, device=DEVICE)),
    "weights of a norm before a rotation": (rotated_and_normed, lambda: normal(K, seed=9)),
    "bias of a convolution": (convolved, lambda: normal(K, seed=9)),
    "bias of a step": (
        lambda bias: fused_short_convolution_step(
            normal(1, 1, K, seed=0), normal(1, 3, K, seed=2), normal(K, 4, seed=1), bias
        ),
        lambda: normal(K, seed=9),
    ),
    "weights of a norm": (
        lambda weight: fused_gated_norm(normal(1, 20, 2, K, seed=0), weight, None, 1e-6),
        lambda: normal(K, seed=9),
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_strided_vectors(name):
    """A vector may be a column of a matrix."""
    call, make = SMALL[name]
    vector = make()
    column = torch.stack([vector, vector.flip(0) + 1], 1)[:, 0]
    assert torch.equal(call(column), call(vector))
