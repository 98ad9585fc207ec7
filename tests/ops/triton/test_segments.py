"""Rows that are divided into segments for the state pass: the same results as undivided ones, and a sensible number.

Tolerance: states are rounded twice instead of once, so results of both ways differ by a few roundings of the dtype, in
norm. Sums in float32 over up to T tokens differ by the square root of T roundings.
"""

import pytest
import torch

from sympow.ops import PowerState, power_attention
from tests.ops.contract import DEVICE, Case, make_inputs

plan = pytest.importorskip("sympow.ops.triton.plan", reason="needs triton")
segments = pytest.importorskip("sympow.ops.triton.segments", reason="needs triton")
CHUNK, K = (128, 64) if DEVICE == "cuda" else (32, 16)
ROUNDINGS = 8
COUNTS = (2, 5)  # segments that are asked for, of which there are fewer where the last would be empty
# Whole and partial last chunks and segments, several rows, groups, a state before the row, no gate, other powers.
CASES = {
    "gate": Case(B=1, T=6 * CHUNK + 5, H=2, G=1, K=K, V=K, state=True),
    "rows": Case(B=2, T=4 * CHUNK, H=1, G=1, K=K, V=K),
    "no gate": Case(B=1, T=7 * CHUNK - 1, H=1, G=1, K=K, V=K, gate=False, state=True),
    "no state": Case(B=1, T=6 * CHUNK + 1, H=1, G=1, K=K, V=K, return_state=False),
    "not normalized": Case(B=1, T=6 * CHUNK + 1, H=1, G=1, K=K, V=K, normalize=False),
    "p 1": Case(B=1, T=9 * CHUNK + 1, H=1, G=1, K=K, V=K, p=1, normalize=False, state=True),
    "p 3": Case(B=1, T=CHUNK + 1, H=1, G=1, K=16, V=16, p=3, normalize=False, state=True),
}


def results(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns outputs, states and gradients by name."""
    inputs = {name: x for name, x in make_inputs(case, dtype=dtype).items() if x is not None}
    if case.gate:
        inputs["log_g"] = inputs["log_g"] / CHUNK  # so that what comes into a segment outlasts a chunk
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if name != "dout"}
    given = PowerState(leaves["s"], leaves["z"], case.p, case.K) if case.state else None
    out, state = power_attention(
        leaves["q"], leaves["k"], leaves["v"], leaves.get("log_g"), p=case.p, normalize=case.divides, eps=case.eps,
        initial_state=given, return_state=case.return_state, chunk_size=CHUNK, impl="triton",
    )  # fmt: skip
    found = {"out": out}
    if state is not None:
        found |= {"s": state.s} | ({"z": state.z} if case.divides else {})
    generator = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in found.values())
    names = [name for name in leaves if name != "z" or case.divides]
    grads = torch.autograd.grad(total, [leaves[name] for name in names])
    return {name: x.detach() for name, x in found.items()} | {
        f"d{name}": x for name, x in zip(names, grads, strict=True)
    }


@pytest.mark.parametrize(
    ("label", "dtype"),
    [*((label, torch.float32) for label in CASES), *((label, torch.bfloat16) for label in ("gate", "rows", "p 3"))],
    ids=str,
)
def test_segments_change_nothing(label, dtype, monkeypatch):
    case = CASES[label]
    monkeypatch.setattr(segments, "number", lambda *_: 1)
    whole = results(case, dtype)
    allowed = ROUNDINGS * torch.finfo(dtype).eps + case.T**0.5 * torch.finfo(torch.float32).eps
    for count in COUNTS if case.T > 2 * CHUNK else COUNTS[:1]:
        plan.forget_plans()
        monkeypatch.setattr(segments, "number", lambda chunks, *_, count=count: -(-chunks // -(-chunks // count)))
        divided = results(case, dtype)
        for name, x in whole.items():
            error = (divided[name].double() - x.double()).norm() / x.double().norm()
            assert error <= allowed, (count, name)


@pytest.mark.parametrize(("chunks", "programs", "count"), [(64, 156, 5), (64, 78, 13), (16, 156, 8), (64, 312, 5)])
def test_few_programs_make_segments(chunks, programs, count):
    """A row of 65,536 tokens with 12 or 6 heads of K = 64, one of 16,384, and two rows, on 132 SMs."""
    assert segments.number(chunks, programs, 132) == count


@pytest.mark.parametrize(("chunks", "programs"), [(64, 1248), (64, 264), (1, 10), (512, 5280)])
def test_many_programs_and_single_chunks_do_not(chunks, programs):
    assert segments.number(chunks, programs, 132) == 1


def test_narrow_keys_have_more_programs_at_once():
    """Eight rows of 65,536 tokens with 12 heads of K = 32."""
    assert segments.number(256, 384, 132, segments.NARROW_PROGRAMS) == 1


def test_no_segment_is_empty():
    for chunks in range(1, 40):
        for programs in (1, 7, 100, 300):
            count = segments.number(chunks, programs, 132)
            each = -(-chunks // count)
            assert 1 <= count <= segments.MOST and (count - 1) * each < chunks <= count * each
