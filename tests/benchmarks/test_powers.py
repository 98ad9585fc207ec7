"""The benchmark of p = 3 and 4, run on the CPU on very small shapes without a clock."""

import pytest

from benchmarks import powers
from benchmarks.common.measure import read

OPTIONS = ["--threads", "1", "--shapes", "3,4,4,1;4,3,5,1", "--times", "32,64", "--chunks", "8,16"]


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    monkeypatch.setattr(powers, "milliseconds", lambda calls, device, **_: [2.0 + len(calls)] * len(calls))


def run(call, tmp_path, *options):
    """Exit status and rows of the command."""
    file = tmp_path / "powers.csv"
    return call(powers, "--csv", file, *OPTIONS, *options), read(file)


def test_rows_and_table(call, tmp_path, capsys):
    status, rows = run(call, tmp_path)
    assert status == 0
    forms = ["chunk 8", "chunk 16", "quadratic", "auto"]
    assert [row["form"] for row in rows] == forms * 4
    assert {(row["p"], row["K"], row["V"], row["T"]) for row in rows} == {
        (p, k, v, time) for p, k, v in ((3, 4, 4), (4, 3, 5)) for time in (32, 64)
    }
    assert all(0 <= row["err"] < 0.05 and row["ms"] == 6.0 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert "| p | K | V | B | form | T 32 | T 64 | passes at 64 |" in lines
    assert any(line.startswith("| 4 | 3 | 5 | 1 | chunk 16 | 6.00 ") and "6.00 (1.00x)" in line for line in lines)


def test_a_wrong_result_is_not_timed(call, monkeypatch, tmp_path):
    real = powers.power_call

    def wrong_call(case, inputs, impl, mode, chunk=None):
        results = real(case, inputs, impl, mode, chunk)
        return [2 * x for x in results] if chunk == 8 else results

    monkeypatch.setattr(powers, "power_call", wrong_call)
    status, rows = run(call, tmp_path)
    assert status == 1
    wrong = [row for row in rows if row["form"] == "chunk 8"]
    assert all(row["ms"] is None and row["failure"].startswith("RuntimeError") for row in wrong)
    assert all(row["failure"] is None for row in rows if row["form"] != "chunk 8")
