"""The benchmark of the forms, run on the CPU on very small shapes without a clock."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from benchmarks import chunks
from benchmarks.common.cases import FORMS, Case
from benchmarks.common.measure import kernel_milliseconds, read
from benchmarks.pages import result_tables
from sympow.ops.triton import gradients, output, states
from sympow.ops.triton.hopper import key_gradient, query_gradient
from sympow.ops.triton.hopper import output as hopper_output
from sympow.ops.triton.hopper import states as hopper_states

SMALL = Case(T=32, H=2, G=1, K=4, V=3)
MS = {8: 4.0, 16: 2.0, 32: 3.0, None: 3.0}  # by chunk; "auto" is as slow as the quadratic form of 32 tokens


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    def times(calls, device, rounds, least):
        return [MS[call.args[4]] for call in calls]

    monkeypatch.setattr(chunks, "milliseconds", times)
    monkeypatch.setattr(chunks, "SHORTEST", 16)
    monkeypatch.setitem(FORMS, "cpu", [(SMALL, (8, 16))])


def run(call, tmp_path, *options):
    """Exit status and rows of the command."""
    file = tmp_path / "chunks.csv"
    return call(chunks, "--threads", "1", "--csv", file, *options), read(file)


def test_rows(call, tmp_path, capsys):
    status, rows = run(call, tmp_path)
    assert status == 0
    columns = "op impl device dtype B T H G K V p chunk gated mode ms ratio err passes failure graph processor commit"
    assert {*columns.split(), "torch"} <= rows[0].keys()
    long = [row for row in rows if row["T"] == 32 and row["mode"] == "forward"]
    assert [(row["impl"], row["chunk"]) for row in long[:3]] == [("eager", 8), ("eager", 16), ("eager", 32)]
    assert [row["ratio"] for row in long] == [2.0, 1.0, 1.5, 1.5] and long[3]["impl"] == "auto"
    short = [row for row in rows if row["T"] == 16]
    assert len(short) == 6 and {row["B"] for row in short} == {2}
    assert all(0 < row["err"] < 1e-5 for row in rows)
    printed = capsys.readouterr().out
    assert "| 2 | 4 | forward | quadratic, 1.50x | 16, 1.50x |" in printed
    assert "p 2, K 4, forward: chunk 16, quadratic up to 16: 1.000x; auto now 1.500x" in printed


def test_some_widths(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(FORMS, "cpu", [(SMALL, (8, 16)), (Case(T=16, H=2, G=1, K=5, V=3), (8, 16))])
    status, rows = run(call, tmp_path, "--widths", "5")
    assert status == 0 and {row["K"] for row in rows} == {5}
    with pytest.raises(SystemExit):
        run(call, tmp_path, "--widths", "6")
    assert "--widths are of [4, 5]; got [6]" in capsys.readouterr().err


def test_without_a_gate(call, tmp_path, capsys):
    status, rows = run(call, tmp_path, "--no-gate")
    assert status == 0 and not any(row["gated"] for row in rows)
    assert "H 2, no gate, float32" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed_and_does_not_stop_the_others(call, monkeypatch, tmp_path, capsys):
    exact = chunks.power_call

    def wrong(case, inputs, impl, mode, chunk):
        results = exact(case, inputs, impl, mode, chunk)
        return [x * 1.01 for x in results] if chunk == 16 and case.T == 32 else results

    monkeypatch.setattr(chunks, "power_call", wrong)
    status, rows = run(call, tmp_path)
    failed = [row for row in rows if row["failure"]]
    assert status == 1 and {(row["T"], row["chunk"], row["ms"]) for row in failed} == {(32, 16, None)}
    assert all("not timed" in row["failure"] for row in failed)
    assert [row["ratio"] for row in rows if row["T"] == 32] == [1.333, None, 1.0, 1.0] * 2
    assert "failed: RuntimeError: Case(" in capsys.readouterr().out


def test_advice_looks_at_every_context():
    """Chunks of 16 are best at 64 tokens, by much; the quadratic form at 32, with a backward, by much as well."""
    ms = {(16, 16): 1, (32, 16): 10, (32, 32): 11, (64, 16): 10, (64, 32): 20, (64, 64): 30}
    rows = []
    for mode in chunks.MODES:
        for (time, chunk), took in ms.items():
            took = 6 if (time, chunk, mode) == (32, 32, "forward+backward") else took
            rows.append({"p": 2, "K": 4, "T": time, "mode": mode, "chunk": chunk, "impl": "eager", "ms": took})
    for row in rows:
        same = [x["ms"] for x in rows if (x["T"], x["mode"]) == (row["T"], row["mode"])]
        row["ratio"] = row["ms"] / min(same)
    rows.append({"p": 2, "K": 4, "T": 64, "mode": "forward", "chunk": 32, "impl": "auto", "ms": 20, "ratio": 2.0})
    rows.append(rows[-1] | {"mode": "forward+backward"})
    assert list(chunks.advice(rows)) == [
        "p 2, K 4, forward: chunk 16, quadratic up to 16: 1.000x; auto now 2.000x",
        "p 2, K 4, forward+backward: chunk 16, quadratic up to 32: 1.000x; auto now 2.000x",
    ]


def test_passes_are_kernels_by_name():
    kernels = [gradients, output, states, hopper_output, hopper_states, key_gradient, query_gradient]
    assert all(any(hasattr(file, name) for file in kernels) for name in chunks.PASSES)
    times = chunks.by_pass({"state_pass": 3.0, "output_pass": 2.0, "weigh": 0.5, "memset": 0.25})
    assert times == {"state_pass": 3.0, "output_pass": 2.0, "query_pass": 0.0, "key_pass": 0.0, "other": 0.75}


def test_kernel_times_are_those_on_the_gpu_alone(monkeypatch):
    """A call is profiled three times; what the CPU did counts for nothing, and no kernel at all is no time of zero."""
    events = []

    def event(name, device, microseconds):
        found = FunctionEventAvg()
        found.key, found.device_type, found.self_device_time_total = name, device, microseconds
        return found

    profiler = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(profiler))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    events.append(event("cudaLaunchKernel", DeviceType.CPU, 30.0))
    with pytest.raises(RuntimeError, match="saw no kernel"):
        kernel_milliseconds(lambda: None)
    events.append(event("state_pass", DeviceType.CUDA, 6000.0))
    assert kernel_milliseconds(lambda: None) == {"state_pass": 2.0}


def test_figure(tmp_path):
    row = {"p": 2, "K": 4, "B": 1, "T": 32, "H": 2, "dtype": "bfloat16", "gated": True, "processor": "a GPU"}
    passes = chunks.by_pass({"state_pass": 1.0, "output_pass": 2.0})
    rows = [row | {"mode": mode, "chunk": chunk, "passes": passes} for mode in chunks.MODES for chunk in (8, 16)]
    chunks.plot([*rows, row | {"mode": "forward", "chunk": 32, "passes": None}], tmp_path / "chunks.png")
    assert (tmp_path / "chunks.png").stat().st_size > 1000


def test_the_cpu_has_no_passes_to_draw(call, tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(chunks, "--csv", tmp_path / "x.csv", "--plot", tmp_path / "x.png")
    assert "--plot shows the passes, kernels of --device cuda" in capsys.readouterr().err


def test_table():
    row = {"p": 2, "K": 4, "T": 64, "H": 2, "mode": "forward", "dtype": "bfloat16", "gated": True, "processor": "a GPU"}
    row |= {"impl": "triton", "chunk": 64, "ms": None, "ratio": None, "torch": "2", "commit": "c"}
    failed = [row, row | {"impl": "auto"}]
    assert "| 2 | 4 | forward |  |" in result_tables.chunks_table(failed)
    timings = [("triton", 8, 2.0, "forward"), ("triton", 16, 2.1, "forward"), ("auto", 16, 2.31, "forward"),
               ("triton", 8, 2.0, "forward+backward"), ("auto", 8, 1.8, "forward+backward")]  # fmt: skip
    names = ("impl", "chunk", "ms", "mode")
    timed = [row | {"T": 32, "ratio": timing[2] / 2} | dict(zip(names, timing, strict=True)) for timing in timings]
    written = result_tables.chunks_table([*failed, *timed])
    assert "| 2 | 4 | forward | 8, 1.16x |  |" in written and "| 2 | 4 | forward+backward | 8, 0.90x |  |" in written
    assert 'by name: at most 1.050 times the fastest. "auto" takes 0.900 to 1.100 times' in written
    assert "the time of that form, median 1.000." in written


def test_a_gpu_that_is_not_there_is_refused(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        call(chunks, "--device", "cuda", "--csv", tmp_path / "x.csv")
    assert "cuda needs a GPU, and torch finds none" in capsys.readouterr().err
