"""The benchmark of the delta rule: what it checks before it times, and its rows."""

import pytest

from benchmarks import delta
from benchmarks.common.cases import Case

SMALL = Case(70, B=2, H=4, G=2)


@pytest.mark.parametrize("mode", delta.MODES)
def test_a_row(mode):
    row = delta.row_of(SMALL, "cpu", mode)
    assert row["err"] < 1e-5 and min(row["ms"], row["power_ms"], row["peer_ms"]) > 0
    assert (row["T"], row["H"], row["G"], row["K"], row["mode"]) == (70, 4, 2, 32, mode)


@pytest.mark.parametrize("wrong", range(6))
def test_a_wrong_result_is_not_timed(monkeypatch, wrong):
    """The output, and the gradient of each input, in the last head alone."""

    def spoilt(case, inputs, impl, mode):
        results = delta_call(case, inputs, impl, mode)
        if impl == "auto":
            results[wrong] = results[wrong].clone()
            results[wrong][-1, :, -1] *= 1.1
        return results

    delta_call = delta.delta_call
    monkeypatch.setattr(delta, "delta_call", spoilt)
    with pytest.raises(RuntimeError, match=r"errs by .* is allowed; not timed$"):
        delta.row_of(SMALL, "cpu", "forward+backward")
