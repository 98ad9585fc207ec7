"""The gradient of data-dependent positions in a trained model: both forms are measured, and are right in float32."""

from benchmarks import positions
from benchmarks.common.measure import read
from benchmarks.context_scaling.grid import DOCUMENT, SCALES
from tests.benchmarks.corpora import random_corpus


def test_both_forms_are_measured_in_every_layer(call, tmp_path, capsys):
    random_corpus(tmp_path, 3, 3, DOCUMENT // SCALES["toy"].shrink)
    file = tmp_path / "rows.csv"
    words = ("--corpus", tmp_path, "--scale", "toy", "--csv", file)
    call(positions, *words)
    rows = read(file)
    assert [row["form"] for row in rows] == list(positions.FORMS)
    for row in rows:
        assert len(row["errors"]) == 2 and row["worst_error"] == max(row["errors"]) < 1e-3
        assert row["step_ms"] > 0 and row["steps"] == 2
    assert capsys.readouterr().out.count("errs by") == 2
