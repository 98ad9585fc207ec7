"""Operators by `sympow.ops.runtime.launcher`: the same results directly, compiled, and for fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sympow.ops.runtime.launcher import operator


def _like_gradient(dy, x):
    return torch.empty_like(x)


@operator(_like_gradient)
def cube_for_test_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return 3 * dy * x**2


def _keep(ctx, inputs, output):
    x, ctx.times = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return ctx.times * cube_for_test_backward(dy, x), None


@operator(lambda x, times: torch.empty_like(x), _keep, _backward)
def cube_for_test(x: torch.Tensor, times: int) -> torch.Tensor:
    return times * x**3


def results(function, x):
    x = x.clone().requires_grad_()
    y = function(x, 2)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("how", ["direct", "registered", "compiled"])
def test_values_and_gradients(how):
    x = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    registered = torch.ops.sympow.cube_for_test
    compiled = torch.compile(lambda x, times: cube_for_test(x + 0, times), backend="aot_eager", fullgraph=True)
    y, dx = results({"direct": cube_for_test, "registered": registered, "compiled": compiled}[how], x)
    assert torch.equal(y, 2 * x**3)
    assert torch.equal(dx, 2 * (3 * x**2))
    with torch.no_grad():
        assert not cube_for_test(x.clone().requires_grad_(), 2).requires_grad


def test_compiled_graphs_hold_the_operator_itself():
    graphs = []

    def keep(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch.compile(lambda x: cube_for_test(x, 2), backend=keep, fullgraph=True)(torch.ones(3))
    assert graphs == [[torch.ops.sympow.cube_for_test.default]]


def test_fake_tensors_and_the_checks_of_torch():
    with FakeTensorMode():
        assert cube_for_test(torch.empty(4, 2), 2).shape == (4, 2)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.sympow.cube_for_test, (torch.ones(3, requires_grad=True), 2), test_utils=checks)


@pytest.mark.parametrize("function", [cube_for_test, torch.ops.sympow.cube_for_test], ids=["direct", "registered"])
def test_a_second_derivative_is_refused(function):
    x = torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad(function(x, 2).sum(), x, create_graph=True)
    message = r"the gradient of .*cube_for_test cannot be differentiated again \(create_graph=True\)$"
    with pytest.raises(RuntimeError, match=message):  # without the hint at impl, which this function does not have
        torch.autograd.grad(dx.sum() + x.sum(), x)
