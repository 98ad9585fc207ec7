"""What the gate has decayed to nothing is left out: tiles of the quadratic form, to the same numbers bit for bit, and
states of the chunked one."""

import pytest
import torch

from sympow.ops import power_attention
from tests.ops.contract import DEVICE, Case, assert_within_budget, make_inputs, run

calls = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
gate = pytest.importorskip("sympow.ops.triton.gate", reason="needs triton")

TILE = gate.REACH_TILE.value
# Batch, tokens, query and kv heads, head dims, p, with a normalizer
SHAPES = [(1, 4 * TILE + 3, 2, 2, 16, 2, True), (1, 2 * TILE, 2, 2, 16, 3, False), (1, 3 * TILE - 1, 1, 1, 8, 1, False)]
KINDS = [torch.float32]
if DEVICE == "cuda":
    KINDS.append(torch.bfloat16)
    SHAPES += [(2, 5 * TILE + 3, 4, 2, 16, 2, True)]
    SHAPES += [(2, 2100, 4, 2, width, 2, True) for width in (32, 64, 128)]
    SHAPES += [(2, 2048, 3, 3, 64, 2, False), (1, 1100, 2, 2, 32, 3, False), (1, 1100, 2, 1, 16, 4, True)]


def gates(batch: int, time: int, heads: int) -> torch.Tensor:
    """The first head forgets within a tile, others in more and more."""
    gen = torch.Generator().manual_seed(0)
    rate = 3.0 / 4.0 ** torch.arange(heads)
    return (-rate * torch.rand(batch, time, heads, generator=gen)).to(DEVICE)


@pytest.mark.parametrize("time", [1, TILE - 1, TILE, TILE + 1, 7 * TILE + 5, 70 * TILE])
def test_what_counts_is_found(monkeypatch, time):
    monkeypatch.setattr(plan, "LEAST_REACH", 0)
    log_g = gates(2, time, 3)
    x = torch.zeros(2, time, 3, 16, device=DEVICE)
    call = calls.Call(x, x, x, log_g, None, 2, 1.0, 0, False)
    sums = call.gate.sums.double().sum(0).view(3, 2, time)
    tiles = -(-time // TILE)
    first = torch.arange(tiles, device=DEVICE) * TILE
    last = (first + TILE).clamp(max=time) - 1
    before = torch.cat([torch.zeros_like(sums[..., :1]), sums[..., last[:-1]]], 2)
    # [heads, rows, tiles of queries, tiles of keys], and the same of tiles of keys and later tiles of queries
    keys = sums[..., None, last] - before[..., None] <= call.plan.vanishing
    queries = sums[..., last, None] - sums[..., None, first] <= call.plan.vanishing
    order = torch.arange(tiles, device=DEVICE)
    begins = TILE * (keys | (order[None] >= order[:, None])).int().argmax(-1)
    ends = TILE * (queries | (order[None] <= order[:, None])).int().sum(-1)
    assert call.gate.begins.view(3, 2, tiles).equal(begins.int())
    assert call.gate.ends.view(3, 2, tiles).equal(ends.clamp(max=time).int())
    if tiles > 2:
        assert begins[0].any() and ends[0, 0, 0] < time


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_the_same(monkeypatch, shape, dtype):
    batch, time, heads, groups, width, p, normalize = shape
    gen = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(batch, time, n, width, generator=gen).to(DEVICE, dtype).requires_grad_()
        for n in (heads, groups, groups)
    )
    log_g = gates(batch, time, groups).requires_grad_()

    def results(least: int) -> list[torch.Tensor]:
        monkeypatch.setattr(plan, "LEAST_REACH", least)
        plan.forget_plans()
        out = power_attention(q, k, v, log_g, p=p, normalize=normalize, chunk_size=time, impl="triton").out
        return [out, *torch.autograd.grad(out.float().square().sum(), [q, k, v, log_g])]

    for whole, cut in zip(results(time + 1), results(0), strict=True):
        assert whole.isfinite().all() and cut.equal(whole)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", [8] if DEVICE == "cpu" else [16, 32, 64, 128])
def test_states_are_read_as_far_as_they_count(width, dtype):
    """Blocks after a chunk's first see nothing of its state where the first head is concerned, others more and more."""
    heads, time, chunk = (2, 300, 256) if DEVICE == "cpu" else (4, 1100, 512)
    case = Case(B=1, T=time, H=heads, G=heads, K=width, V=width, state=True)
    inputs = make_inputs(case, dtype=dtype)
    inputs["log_g"] = gates(1, time, heads).requires_grad_()
    assert_within_budget(run(case, inputs, "triton", chunk), case, inputs)
