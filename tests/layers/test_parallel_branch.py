"""What a CUDA graph computes beside other work: when its branch starts, and when the rest waits for it."""

from contextlib import contextmanager

import pytest
import torch

from sympow.layers import PowerAttention
from sympow.layers.parallel_branch import parallel_branch

GPU = torch.device("cuda", 7)


class Stream:
    def __init__(self, name, told):
        self.name, self.told = name, told

    def wait_stream(self, other):
        self.told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def told(monkeypatch):
    """Of a graph that is captured: which stream waits for which, and what is computed on the branch."""
    told = []
    current, branch = Stream("the graph", told), Stream("the branch", told)

    @contextmanager
    def on(stream):
        told.append(f"on {stream.name}")
        yield
        told.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr("sympow.layers.parallel_branch.branch_of", lambda device: branch)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return told


def compute(told):
    told.append("computed")
    return torch.ones(1)


FORKED = ["the branch waits for the graph", "on the branch", "computed", "off the branch", "other work"]
JOINED = [*FORKED, "the graph waits for the branch"]


def test_a_branch_of_a_graph(told):
    with torch.no_grad(), parallel_branch(lambda: compute(told), GPU) as result:
        told.append("other work")
    assert told == JOINED
    assert torch.equal(result(), torch.ones(1)) and told == JOINED


def test_an_error_leaves_no_open_branch(told):
    """A graph with one could not be ended, and its stream would stay current."""
    with pytest.raises(RuntimeError, match="no memory"), torch.no_grad(), parallel_branch(lambda: compute(told), GPU):
        told.append("other work")
        raise RuntimeError("no memory")
    assert told == JOINED


@pytest.mark.parametrize("case", ["gradients", "no graph", "on a CPU"])
def test_elsewhere_it_is_computed_where_it_is_asked_for(case, told, monkeypatch):
    """A backward would run on the stream of the branch, for which nothing waits."""
    if case == "no graph":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cpu") if case == "on a CPU" else GPU
    with torch.set_grad_enabled(case == "gradients"), parallel_branch(lambda: compute(told), device) as result:
        assert told == []
    assert torch.equal(result(), torch.ones(1)) and told == ["computed"]


def test_a_step_is_compiled_whole():
    layer = PowerAttention(d_model=16, n_heads=2)
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    with torch.no_grad():
        y, _ = torch.compile(layer.step, backend="eager", fullgraph=True)(x, layer.init_state(1))
        torch.testing.assert_close(y, layer.step(x, layer.init_state(1))[0])
    torch.compiler.reset()
