"""The benchmark of what calls cost the host, run on the CPU on a very small shape."""

import pytest
import torch

from benchmarks import host
from benchmarks.common.cases import Case
from benchmarks.common.measure import read

SMALL = Case(T=12, H=2, G=2, K=4, V=4)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(host, "CASES", {"cpu": [SMALL]})
    monkeypatch.setattr(host, "LAYER_CASES", {"cpu": [SMALL]})
    monkeypatch.setattr(torch, "compile", lambda module, mode: module)


def test_rows(call, monkeypatch, tmp_path):
    """The columns that results promise, from the command itself."""
    monkeypatch.setattr(host, "microseconds", lambda calls, device: [(len(call()), 8.0) for call in calls])
    file = tmp_path / "host.csv"
    call(host, "--device", "cpu", "--threads", "1", "--csv", file)
    rows = read(file)
    assert [row["what"] for row in rows] == ["forward", "forward+backward", *host.LAYERS]
    columns = "what T us peer_us one_thread_us peer_one_thread_us wall_us peer_wall_us ratio err peer processor"
    assert {*columns.split(), "commit", "code", "torch"} <= rows[0].keys()
    assert [(row["us"], row["peer_us"]) for row in rows[:2]] == [(1, 1), (5, 4)]
    assert all(row["ratio"] == 1 and row["err"] < 1e-5 for row in rows)


def test_a_profile_shows_the_backward(monkeypatch, capsys):
    """Which on a GPU runs in another thread: the profiler only sees that of the caller."""
    monkeypatch.setattr(host, "microseconds", lambda calls, device: [(1.0, 1.0)] * len(calls))
    monkeypatch.setattr(host, "ROUNDS", 1)
    seen = []
    monkeypatch.setattr(host, "print_profile", lambda call: seen.append(torch.autograd.is_multithreading_enabled()))
    host.measure(SMALL, "cpu", "forward+backward", profile=True)
    assert seen == [False] and torch.autograd.is_multithreading_enabled()
    monkeypatch.undo()
    monkeypatch.setattr(host, "ROUNDS", 1)
    host.print_profile(lambda: torch.ones(3, requires_grad=True).sum().backward())
    assert "run_backward" in capsys.readouterr().out


def test_parts_of_the_time_on_the_host(monkeypatch, capsys):
    times = [("TorchDynamo Cache Lookup", 3.0), ("aten::mm", 5.0), ("aten::add", 1.0), ("sympow::power_eager", 4.0)]
    parts = host.host_parts([*times, ("cudaLaunchKernel", 9.0), ("Activity Buffer Request", 2.0)])
    assert list(parts.items()) == [
        ("launches", 9.0), ("operators of PyTorch", 6.0), ("operators of sympow", 4.0), ("guards", 3.0), ("other", 2.0)
    ]  # fmt: skip
    monkeypatch.undo()
    x = torch.ones(8, 8, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x @ x).sum(), backend="aot_eager")
    compiled(x)
    host.print_launches(lambda: torch.autograd.grad(compiled(x), x), "cpu")
    line = capsys.readouterr().out
    assert line.startswith("host, us a call: ") and "guards" in line and "around the graph" in line
    torch.compiler.reset()


def test_a_call_is_timed_until_it_returns_and_until_its_work_is_done(monkeypatch):
    """On a GPU work goes on behind a call: here a clock that 2 s of launching and 3 s of waiting pass by."""
    now = [0.0]
    monkeypatch.setattr(host.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + 3 * host.CALLS))
    launch = [lambda seconds=s: now.__setitem__(0, now[0] + seconds) for s in (2, 4)]
    assert host.microseconds(launch, "cuda") == [(2e6, 5e6), (4e6, 7e6)]


@pytest.mark.parametrize("what", ["forward+backward", "layer"])
def test_a_wrong_result_is_not_timed(monkeypatch, what):
    name = "layer_call" if what == "layer" else "power_call"
    exact = getattr(host, name)

    def wrong(first, *rest):
        results = exact(first, *rest)
        return [x * (1.01 if getattr(first, "impl", "auto") == "auto" else 1) for x in results]

    monkeypatch.setattr(host, name, wrong)
    monkeypatch.setattr(host, "microseconds", None)
    with pytest.raises(RuntimeError, match="not timed"):
        host.measure(SMALL, "cpu", what)
