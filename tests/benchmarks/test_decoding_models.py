"""The benchmark of decoding whole models on a very small shape: what the rows hold."""

from benchmarks import decoding_models
from benchmarks.common.measure import read
from benchmarks.pages.result_tables import TABLES
from sympow.layers import base
from sympow.ops.fused import step_products


def test_command(tmp_path, call, capsys):
    file, most = tmp_path / "rows.csv", (step_products.MOST_ROWS, step_products.FEW_WIDE_ROWS)
    words = ["--preset", "nano", "--vocabulary", "31", "--context", "12", "--batches", "1", "2", "--threads", "2"]
    call(decoding_models, *words, "--csv", file)
    rows = read(file)
    assert [(row["mixer"], row["dtype"], row["rows"]) for row in rows] == [
        (name, dtype, batch) for name in decoding_models.MIXERS for dtype in ("bfloat16", "float32") for batch in (1, 2)
    ]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert most == (step_products.MOST_ROWS, step_products.FEW_WIDE_ROWS)
    for row in rows:
        written = decoding_models.WRITTEN.get(row["mixer"], 1 / 64)
        least = row["weight_bytes"] + row["state_bytes"] * (1 + written)
        assert abs(row["least_bytes"] - least) <= 0.02 * least
    table = TABLES["decoding_models_h200.csv"](rows)
    assert "power_delta" in table and "float32" in table


def test_the_model_of_parts_takes_no_kernels(monkeypatch):
    asked = []
    real = base.takes_step
    monkeypatch.setattr(base, "takes_step", lambda x, tensors: asked.append(real(x, tensors)) or asked[-1])
    monkeypatch.setattr(step_products, "has_kernels", lambda device, dtype: True)
    monkeypatch.setattr(decoding_models, "MIXERS", {decoding_models.PARTS: decoding_models.MIXERS["power"]})
    rows = list(decoding_models.measure("nano", 31, 4, [1], "cpu"))
    assert len(rows) == 2 and asked and not any(asked)
