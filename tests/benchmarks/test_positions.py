"""The gradient of data-dependent positions in a trained model: both forms are measured, and are right in float32."""

import sys

import numpy as np
import zarr

from benchmarks import positions
from benchmarks.common.measure import read
from benchmarks.context_scaling.grid import DOCUMENT, SCALES


def test_both_forms_are_measured_in_every_layer(monkeypatch, tmp_path, capsys):
    length, rng = DOCUMENT // SCALES["toy"].shrink, np.random.default_rng(0)
    for name in ("train", "heldout"):
        tokens = rng.integers(0, 256, (3, length), dtype=np.uint16)
        zarr.create_array(str(tmp_path / f"{name}.zarr"), data=tokens, chunks=(1, length), zarr_format=2)
    file = tmp_path / "rows.csv"
    words = ("--corpus", tmp_path, "--scale", "toy", "--csv", file)
    monkeypatch.setattr(sys, "argv", ["positions", *map(str, words)])
    positions.main()
    rows = read(file)
    assert [row["form"] for row in rows] == list(positions.FORMS)
    for row in rows:
        assert len(row["errors"]) == 2 and row["worst_error"] == max(row["errors"]) < 1e-3
        assert row["step_ms"] > 0 and row["steps"] == 2
    assert capsys.readouterr().out.count("errs by") == 2
