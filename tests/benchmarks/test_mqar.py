"""The benchmark of associative recall keeps rows with their commit, goes on with them, and has a bar."""

import pytest

from benchmarks import mqar
from sympow.data.mqar import RecallTask
from sympow.models import MixerConfig
from sympow.recall import Architecture, RecallConfig, Sweep, grid, read_results, write_results
from sympow.recall.results import SETTING, chosen


@pytest.mark.parametrize(("accuracies", "code"), [((0.2, 0.995, 0.99), 0), ((1.0, 0.989, 0.98), 1)])
def test_rows_and_the_bar(tmp_path, call, monkeypatch, capsys, accuracies, code):
    def run_sweep(sweep, folder, *, about, **options):
        assert sweep.name == "mqar-anchors" and len(sweep.runs) == 6
        assert {run.epochs for run in sweep.runs} == {2}
        setting = dict.fromkeys(SETTING, 1) | {"label": "power", "state_bytes": 8, "learning_rate": 0.1}
        same = setting | about | {"validation_accuracy": 1.0, "validation_loss": 0.0}
        rows = [same | {"seed": seed, "test_accuracy": each} for seed, each in enumerate(accuracies)]
        write_results(folder / "results.csv", rows)
        return rows

    monkeypatch.setattr(mqar, "run_sweep", run_sweep)
    command = ["mqar:anchors", "epochs=2", "--csv", tmp_path / "rows.csv", "--out", tmp_path]
    assert call(mqar, *command) == code
    rows = read_results(tmp_path / "rows.csv")
    assert [row["test_accuracy"] for row in rows] == list(accuracies)
    assert all(row["commit"] and "thread" in row["processor"] for row in rows)
    assert ("below 99%: power" in capsys.readouterr().err) == bool(code)


@pytest.fixture
def tiny(monkeypatch):
    """A sweep of two widths, two learning rates and two seeds, each run of an instant."""
    task = RecallTask(length=16, pairs=2, vocab_size=32)
    model = Architecture("linear", (MixerConfig("linear"),), layers=1, mlp_ratio=0)
    base = RecallConfig(model, train=(task,), examples=16, batch_size=8, epochs=1, validation_examples=4,
                        test_examples=4)  # fmt: skip
    sweep = Sweep("tiny", grid(base, widths=(8, 16), learning_rates=(1e-3, 1e-1), seeds=(0, 1, 2)))
    monkeypatch.setattr(mqar, "load_sweep", lambda recipe: sweep)
    return sweep


def command(call, tmp_path, *words):
    assert call(mqar, "tiny", "--csv", tmp_path / "rows.csv", "--out", tmp_path / "sweep", *words) == 0
    return read_results(tmp_path / "rows.csv")


def test_a_part_of_a_sweep_keeps_the_rows_of_others(tiny, tmp_path, call):
    rows = command(call, tmp_path, "--only", "width=16", "--only", "seed=1")
    assert {(row["width"], row["seed"]) for row in rows} == {(16, 1)} and len(rows) == 2
    rows = command(call, tmp_path, "--only", "width=8", "--only", "seed=1")
    assert {(row["width"], row["seed"]) for row in rows} == {(8, 1), (16, 1)} and len(rows) == 4
    with pytest.raises(SystemExit):
        command(call, tmp_path, "--only", "width=32")


def test_a_file_of_another_sweep_is_refused(tiny, tmp_path, call, capsys):
    rows = command(call, tmp_path, "--only", "width=8", "--only", "seed=1")
    before = (tmp_path / "rows.csv").read_bytes()
    with pytest.raises(SystemExit):
        command(call, tmp_path, "weight_decay=0.2")
    assert (
        f"holds 2 runs that are not of this sweep, such as {min(row['run'] for row in rows)}" in capsys.readouterr().err
    )
    assert (tmp_path / "rows.csv").read_bytes() == before


def test_other_seeds_run_at_the_best_rate_of_the_first(tiny, tmp_path, call):
    rows = command(call, tmp_path, "--best-rate")
    assert len(rows) == 2 * (2 + 2)
    for width in (8, 16):
        first = [row for row in rows if (row["width"], row["seed"]) == (width, 0)]
        others = [row for row in rows if row["width"] == width and row["seed"]]
        (best,) = {row["learning_rate"] for row in chosen(first)}
        assert [(row["learning_rate"], row["seed"]) for row in others] == [(best, 1), (best, 2)]


def test_a_run_with_a_row_in_the_file_is_not_repeated(tmp_path, call, monkeypatch):
    """Two workers finish a sweep of which the file holds one run, made at another commit, and nothing else is left."""
    task = RecallTask(length=16, pairs=2, vocab_size=32)
    model = Architecture("linear", (MixerConfig("linear"),), layers=1, mlp_ratio=0)
    base = RecallConfig(model, width=8, train=(task,), examples=16, batch_size=8, epochs=1, validation_examples=4,
                        test_examples=4)  # fmt: skip
    sweep = Sweep("tiny", grid(base, seeds=(0, 1, 2)))
    monkeypatch.setattr(mqar, "load_sweep", lambda recipe: sweep)

    def command(folder):
        assert call(mqar, "tiny", "--csv", tmp_path / "rows.csv", "--out", tmp_path / folder, "--jobs", "2") == 0
        return read_results(tmp_path / "rows.csv")

    first = command("first")
    kept = [row | {"commit": "earlier", "test_accuracy": 0.5} for row in first if row["seed"] == 1]
    write_results(tmp_path / "rows.csv", kept)
    rows = command("second")
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert rows[1] == kept[0] and rows[0]["commit"] == first[0]["commit"]
