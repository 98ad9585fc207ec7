"""The GPU benchmark of decoding, run on the CPU on a very small shape without a clock."""

from dataclasses import replace

import pytest

from benchmarks import decoding_gpu
from benchmarks.common.cases import Case
from benchmarks.decoding_gpu import Step
from benchmarks.pages import result_tables

SMALL = Step(Case(1, B=2, H=2, G=2, K=4, V=4, dtype="bfloat16"))


@pytest.fixture(autouse=True)
def no_timing(call, monkeypatch):
    """A turn of 4 steps takes 8 ms, a copy 1 ms, the backends of torch 8 ms and more."""

    def times(calls, device, rounds):
        assert all(call() is not NotImplemented for call in calls)
        return [8.0, 1.0, *range(8, 6 + len(calls))]

    monkeypatch.setattr(decoding_gpu, "milliseconds", times)
    monkeypatch.setattr(decoding_gpu, "graphed", lambda call: call)


def test_rows():
    row = decoding_gpu.measure(SMALL, "cpu", context=16, copied=1 << 10)
    assert row["ms_per_token"] == 2 and row["peer_ms"] == 8 and row["ratio"] == 4 and row["tokens_per_s"] == 1000
    assert row["state_bytes"] == 2 * 2 * 10 * (4 + 1) * 4 < row["held_bytes"]
    assert row["copy_gb_per_s"] == 0 and row["peer"].startswith("torch scaled_dot_product_attention, ")
    assert 0 < row["err"] < 0.01
    assert "4.0x" in decoding_gpu.line(row)
    assert "| H 2, G 2, K = V = 4 | float32 | 2 | 2,000.0 |" in result_tables.decoding_gpu_table([row])


@pytest.mark.parametrize("options", [{"state_dtype": "bfloat16"}, {"state_dtype": "int8"}, {"slotted": True}])
def test_rows_of_other_states(options):
    row = decoding_gpu.measure(replace(SMALL, **options), "cpu", context=16, copied=1 << 10)
    element = 2 if "state_dtype" in options else 4
    assert row["state_bytes"] == 2 * 2 * 10 * (4 * element + 4) and row["err"] < 0.01
    assert row["held_bytes"] > row["state_bytes"] * (2 if "slotted" in options else 1)


def test_heads_that_share_have_a_peer():
    row = decoding_gpu.measure(Step(replace(SMALL.case, H=4)), "cpu", context=16, copied=1 << 10)
    assert row["peer"].startswith("torch scaled_dot_product_attention, ")


def test_a_shape_without_a_peer(monkeypatch):
    monkeypatch.setattr(decoding_gpu, "softmax_calls", lambda *case: {})
    row = decoding_gpu.measure(SMALL, "cpu", context=16, copied=1 << 10)
    assert row["peer"] is None and "no peer takes this shape" in decoding_gpu.line(row)
    assert "|  |  |" in result_tables.decoding_gpu_table([row])


def test_a_wrong_step_is_not_timed(monkeypatch):
    exact = decoding_gpu.power_attention_step

    def wrong(*inputs, **options):
        result = exact(*inputs, **options)
        return result._replace(out=result.out * 1.1)

    monkeypatch.setattr(decoding_gpu, "power_attention_step", wrong)
    with pytest.raises(RuntimeError, match=r"a step errs by .* where .* is allowed; not timed"):
        decoding_gpu.measure(SMALL, "cpu", context=16, copied=1 << 10)
