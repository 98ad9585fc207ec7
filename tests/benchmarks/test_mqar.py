"""The benchmark of associative recall keeps rows with their commit, and holds the anchors to their bar."""

import sys

import pytest

from benchmarks import mqar
from sympow.recall import read_results
from sympow.recall.results import SETTING


@pytest.mark.parametrize(("accuracies", "code"), [((0.2, 0.995, 0.99), 0), ((1.0, 0.989, 0.98), 1)])
def test_rows_and_the_bar(tmp_path, monkeypatch, capsys, accuracies, code):
    def run_sweep(sweep, folder, **options):
        assert sweep.name == "mqar-anchors" and folder.name.startswith("mqar-anchors-") and len(sweep.runs) == 6
        assert {run.epochs for run in sweep.runs} == {2}
        setting = dict.fromkeys(SETTING, 1) | {"label": "power", "state_bytes": 8, "learning_rate": 0.1}
        return [setting | {"seed": seed, "validation_accuracy": 1.0, "validation_loss": 0.0, "test_accuracy": accuracy}
                for seed, accuracy in enumerate(accuracies)]  # fmt: skip

    monkeypatch.setattr(mqar, "run_sweep", run_sweep)
    monkeypatch.setattr(sys, "argv", ["mqar", "mqar:anchors", "epochs=2", "--csv", str(tmp_path / "rows.csv")])
    assert mqar.main() == code
    rows = read_results(tmp_path / "rows.csv")
    assert [row["test_accuracy"] for row in rows] == list(accuracies)
    assert all(row["commit"] and "threads" in row["processor"] for row in rows)
    assert ("below 99%: power" in capsys.readouterr().err) == bool(code)
