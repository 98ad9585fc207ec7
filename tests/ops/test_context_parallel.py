"""Rows split over ranks: the parts of the output and of the gradients add up to those of the whole row."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from sympow.ops import PowerState, power_attention
from sympow.ops.context_parallel import exclusive_scan, exclusive_sum, previous_tokens
from tests.ops.contract import (
    DEVICE,
    Case,
    assert_equal_float64,
    assert_within_budget,
    make_inputs,
    row_weights_of,
    run,
    with_gradients,
)
from tests.ranks import run_ranks

ODD = Case(B=2, T=37, H=4, G=2, K=4, V=3, return_state=False)
SPLIT = {
    "gate": ODD,
    "no gate": replace(ODD, gate=False),
    "no normalizer": replace(ODD, normalize=False),
    "p 1": replace(ODD, p=1),
    "p 3": replace(ODD, p=3),
    "p 4": replace(ODD, p=4),
    "resets": ODD,
}
CHUNKS = (None, 5)  # of a part; None: as the cost model chooses
KERNELS = {
    "gate": Case(B=1, T=24, H=2, G=1, K=16, V=16, return_state=False),
    "p 1": Case(B=1, T=20, H=1, G=1, K=16, V=16, p=1, return_state=False),
    "chunks": Case(B=1, T=140, H=1, G=1, K=16, V=16, return_state=False),
    "resets": Case(B=1, T=70, H=1, G=1, K=16, V=16, return_state=False),
}
if DEVICE == "cuda":  # these take long in Triton's interpreter
    KERNELS |= {
        "K 64": Case(B=2, T=1100, H=4, G=2, K=64, V=64, return_state=False),
        "no gate, V 160": Case(B=1, T=700, H=1, G=1, K=32, V=160, gate=False, return_state=False),
        "p 3": Case(B=1, T=700, H=2, G=1, K=16, V=16, p=3, return_state=False),
    }
KERNEL_DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def inputs_of(name: str, case: Case, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor | None]:
    inputs = make_inputs(case, dtype=dtype)
    if name == "resets":
        gates = inputs["log_g"].detach().clone()
        gates[:, 3::11], gates[:, 5::11] = -1e30, -80.0
        inputs["log_g"] = gates.requires_grad_()
    return inputs


def part(name: str, case: Case, impl: str, chunk_size: int | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What this rank has of `run(case, ...)`: its part of the output, and zeros; its share of the gradients."""
    inputs, rank, size = inputs_of(name, case, dtype), dist.get_rank(), dist.get_world_size()
    start, stop = case.T * rank // size, case.T * (rank + 1) // size  # parts of different lengths
    tokens = [None if inputs[x] is None else inputs[x][:, start:stop] for x in ("q", "k", "v", "log_g")]
    out = power_attention(
        *tokens, p=case.p, normalize=case.divides, eps=case.eps, chunk_size=chunk_size, impl=impl,
        context_group=dist.group.WORLD,
    ).out  # fmt: skip
    before, after = (out.new_zeros(case.B, n, case.H, case.V) for n in (start, case.T - stop))
    return with_gradients({"out": torch.cat([before, out, after], 1)}, inputs, row_weights_of(case, inputs))


def all_parts() -> dict:
    cases = [(name, chunk) for name in SPLIT for chunk in CHUNKS]
    parts = {(name, chunk): part(name, SPLIT[name], "eager", chunk, torch.float64) for name, chunk in cases}
    if dist.get_world_size() > 2:
        return parts
    return parts | {name: part(name, case, "triton", 16, KERNEL_DTYPE) for name, case in KERNELS.items()}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return run_ranks(all_parts, request.param, device=DEVICE)


def whole(ranks: list[dict], key) -> dict[str, torch.Tensor]:
    return {name: sum(rank[key][name] for rank in ranks) for name in ranks[0][key]}


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("name", SPLIT)
def test_split_rows_equal_whole_ones(ranks, name, chunk_size):
    case = SPLIT[name]
    assert_equal_float64(whole(ranks, (name, chunk_size)), run(case, inputs_of(name, case), "reference"))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(ranks, name):
    pytest.importorskip("triton", reason="needs triton")
    if len(ranks) == 2:
        case = KERNELS[name]
        assert_within_budget(whole(ranks, name), case, inputs_of(name, case, KERNEL_DTYPE), 16)


def compiled_kernels() -> list[float]:
    """How far the kernels' results are from those under torch.compile, of which they see no more than the operators."""
    from sympow.ops.triton.context_parallel import PowerInContext
    from sympow.ops.triton.plan import Options

    case = Case(B=1, T=40, H=1, G=1, K=16, V=16, return_state=False)
    tensors = [x for x in make_inputs(case, dtype=torch.float32).values() if x is not None]
    options = Options(2, 0.25, True, 1e-6, 32, final=False, tf32=False, wide=False, gradient=True)

    def results(attend):
        out = attend(*tensors, options, dist.group.WORLD)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]

    compiled = torch.compile(PowerInContext.apply, backend="aot_eager", fullgraph=True)
    pairs = zip(results(compiled), results(PowerInContext.apply), strict=True)
    return [float((a - b).abs().max()) for a, b in pairs]


def test_compiled_kernels():
    pytest.importorskip("triton", reason="needs triton")
    assert run_ranks(compiled_kernels, 2, device=DEVICE) == [[0.0] * 5] * 2


def recomputed_sum(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: exclusive_sum(x.sin(), dist.group.WORLD).cos(), x, use_reentrant=False)


def scans() -> list[torch.Tensor]:
    rank = dist.get_rank()
    x = torch.tensor([[1.0, 10.0], [100.0, 1000.0]]).mul(rank + 1).requires_grad_()
    log_decay = torch.tensor([0.5, 0.25]).log() * (rank + 1)
    total = exclusive_sum(x, dist.group.WORLD)
    (grad,) = torch.autograd.grad((total * (rank + 1)).sum(), x)
    decayed = [exclusive_scan(x.detach(), log_decay, dist.group.WORLD, reverse=back) for back in (False, True)]
    # Compiled: the first rank reads nothing of the message, and has to take part in it all the same, also again.
    compiled = torch.compile(recomputed_sum, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(call(x).sum(), x)[0] for call in (recomputed_sum, compiled)]
    return [total.detach(), grad, *decayed, grads[1] - grads[0]]


def test_scans():
    x = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    decay = torch.tensor([[0.5], [0.25]])
    total, grad, before, after, difference = zip(*run_ranks(scans, 3), strict=True)
    assert all(each.eq(0).all() for each in difference)
    torch.testing.assert_close(total, (0 * x, x, 3 * x))
    torch.testing.assert_close(grad, (torch.full_like(x, 5), torch.full_like(x, 3), 0 * x))
    torch.testing.assert_close(before, (0 * x, x, 2 * x + decay**2 * x))
    torch.testing.assert_close(after, (2 * x + decay**2 * 3 * x, 3 * x, 0 * x))


def neighbours() -> list[torch.Tensor]:
    rank = dist.get_rank()
    # Tokens 0 to 11 of two rows, 4 on each of three ranks.
    x = (torch.arange(4.0) + 4 * rank).repeat(2, 1).mul(torch.tensor([[1.0], [-1.0]]))[..., None].requires_grad_()

    def weighted(x: torch.Tensor) -> torch.Tensor:
        before = checkpoint(lambda x: previous_tokens(x.square(), 3, dist.group.WORLD), x, use_reentrant=False)
        return before * (rank + 1)

    results = []
    # Compiled: the last rank's tokens are read by nobody, and the first rank reads none.
    for call in (weighted, torch.compile(weighted, backend="aot_eager", fullgraph=True)):
        out = call(x)
        results += [out.detach(), *torch.autograd.grad(out.sum(), x)]
    return results


def test_previous_tokens():
    """The last of the rank before, the weight of whose squares is that rank's number plus two."""
    for rank, results in enumerate(run_ranks(neighbours, 3)):
        before = (torch.arange(1.0, 4.0) + 4 * (rank - 1)).square() * (rank + 1) * (rank > 0)
        after = (torch.arange(4.0) + 4 * rank) * 2 * (rank + 2) * torch.tensor([0, 1, 1, 1]) * (rank < 2)
        for out, grad in (results[:2], results[2:]):
            torch.testing.assert_close(out, before.repeat(2, 1)[..., None])
            torch.testing.assert_close(grad, torch.stack([after, -after])[..., None])


@pytest.mark.parametrize("count", [5])
def test_a_part_too_short_to_pass_tokens_on_is_refused(count):
    with pytest.raises(ValueError, match=f"a part of 4 tokens has no last {count} of them"):
        previous_tokens(torch.zeros(1, 4, 2), count, object())


def test_what_split_rows_do_not_have():
    q = torch.zeros(1, 4, 1, 2)
    state = PowerState.zeros(1, 1, 2, 2)
    for options, message in (
        ({"cu_seqlens": torch.tensor([0, 4])}, "packed documents .* cannot be split over ranks"),
        ({"initial_state": state}, "initial_state and return_state are of whole rows"),
        ({"return_state": True}, "initial_state and return_state are of whole rows"),
        ({"impl": "reference"}, "impl='reference' computes whole rows"),
    ):
        with pytest.raises(ValueError, match=message):
            power_attention(q, q, q, context_group=object(), **options)
    with pytest.raises(ValueError, match=r"context_group has at least one token; got q \[1, 0, 1, 2\]"):
        power_attention(q[:, :0], q[:, :0], q[:, :0], context_group=object())
