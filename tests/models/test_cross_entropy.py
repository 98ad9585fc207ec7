"""The sum of losses behind a head: torch's cross_entropy, value and gradients, however it is sliced and padded."""

import pytest
import torch
from torch.nn import functional as F

from sympow.models.cross_entropy import IGNORE, CrossEntropy, cross_entropy_sum
from tests.ops.contract import DEVICE, FLOAT64_TOLERANCE

TOKENS, WIDTH = 11, 6


def inputs(vocabulary: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=gen, dtype=torch.float64) for n in (TOKENS, vocabulary))
    targets = torch.randint(vocabulary, (TOKENS,), generator=gen)
    targets[[2, 7]] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def total(hidden, weight, targets, rows: int = TOKENS) -> torch.Tensor:
    return cross_entropy_sum(hidden, weight, targets, rows=rows, cross_entropy=CrossEntropy())


@pytest.mark.parametrize("rows", [1, 4, TOKENS, 100])
@pytest.mark.parametrize("vocabulary", [1, 8, 13])
def test_value_and_gradients(vocabulary, rows):
    hidden, weight, targets = inputs(vocabulary)
    expected = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")
    found = total(hidden, weight, targets, rows)
    grads = [torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (found, expected)]
    for a, b in zip((found.detach(), *grads[0]), (expected.detach(), *grads[1]), strict=True):
        assert a.shape == b.shape and (a - b).norm() <= FLOAT64_TOLERANCE * max(1.0, b.norm().item())
    assert grads[0][0][2].eq(0).all()
    with torch.no_grad():
        assert torch.equal(total(hidden, weight, targets, rows), found)


def test_no_targets():
    hidden, weight, targets = inputs(5)
    loss = total(hidden, weight, targets.fill_(-100))
    assert loss == 0 and torch.autograd.grad(loss, hidden)[0].eq(0).all()


def test_a_hopeless_target_has_a_finite_loss():
    hidden, weight = torch.full((1, 1), 300.0, requires_grad=True), torch.tensor([[1.0], [-1.0]])
    loss = total(hidden, weight, torch.tensor([1]))
    assert loss == 600 and torch.autograd.grad(loss, hidden)[0] == 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_overwritten_with_their_gradients(dtype, compiled):
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, 13, generator=gen).to(dtype)
    logits[:, 11:] = -torch.inf
    targets = torch.randint(11, (TOKENS,), generator=gen)
    targets[4] = -100
    exact = logits.double().clone().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=-100, reduction="none")
    cross_entropy = CrossEntropy()
    if compiled:  # which takes another way to the target's logit
        cross_entropy.compile(backend="aot_eager", fullgraph=True)
    losses = cross_entropy(logits, targets)
    assert losses.dtype == torch.promote_types(dtype, torch.float32) and logits.dtype == dtype
    (grad,) = torch.autograd.grad(expected.sum(), exact)
    # A dozen roundings of numbers below 10; of gradients, below 1, one more to the dtype of the logits.
    rounding = torch.finfo(losses.dtype).eps
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=0, atol=120 * rounding)
    torch.testing.assert_close(logits.double(), grad, rtol=0, atol=12 * rounding + torch.finfo(dtype).eps)


@pytest.mark.parametrize("width", [1, 13, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel(dtype, width, monkeypatch):
    """Rows of one block, of a part of one, and of several, the first of which holds no token in one row."""
    pytest.importorskip("triton", reason="needs triton")
    from sympow.ops.fused import cross_entropy as kernel

    monkeypatch.setattr(kernel, "COLUMNS", 16)
    gen = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(TOKENS, width, generator=gen)).to(dtype)
    if width > 16:
        logits[5, :16] = -torch.inf
        logits[:, 37:] = -torch.inf
    targets = torch.randint(min(width, 37), (TOKENS,), generator=gen)
    targets[4], targets[5] = IGNORE, min(width, 37) - 1
    exact = logits.double().clone().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORE, reduction="none")
    (grad,) = torch.autograd.grad(expected.sum(), exact)
    logits, targets = logits.to(DEVICE), targets.to(DEVICE)
    losses = kernel.cross_entropy_of_rows(logits, targets, IGNORE).cpu()
    # The bounds of the test above.
    rounding = torch.finfo(torch.float32).eps
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=0, atol=120 * rounding)
    torch.testing.assert_close(logits.double().cpu(), grad, rtol=0, atol=12 * rounding + torch.finfo(dtype).eps)


def test_kernel_with_targets_of_any_stride_and_value():
    """A target that is neither a column nor IGNORE has a loss of NaN. No other memory is read."""
    pytest.importorskip("triton", reason="needs triton")
    from sympow.ops.fused.cross_entropy import cross_entropy_of_rows

    logits = torch.randn(3, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    pairs = torch.tensor([[2, 0], [13, 1], [-1, 12]], device=DEVICE)
    losses = cross_entropy_of_rows(logits.to(DEVICE), pairs[:, 0], IGNORE).cpu()
    assert losses.isnan().tolist() == [False, True, True]
    expected = F.cross_entropy(logits, pairs[:, 1].cpu(), reduction="none")
    torch.testing.assert_close(cross_entropy_of_rows(logits.to(DEVICE), pairs[:, 1], IGNORE).cpu(), expected)


def test_autocast():
    """bfloat16 products: as far from float64 as the same logits rounded to bfloat16, twice; sums in float32."""
    grads = []
    for dtype in (torch.float64, torch.float32):
        hidden, weight, targets = (x.detach().to(DEVICE).requires_grad_(x.requires_grad) for x in inputs(13, dtype))
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.float32):
            loss = total(hidden, weight, targets, 4)
        grads.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert [x.dtype for x in grads[1]] == [torch.float32] * 3
    for a, b in zip(*grads, strict=True):
        # Inputs, logits, their gradients and the products are each rounded, by 2**-9 of their norm at most.
        assert (a - b.double()).norm() <= 2 * 4 * 2**-9 * a.norm()
