"""Metrics on disk: one line a step, also after a kill."""

import errno
import sys
import types

import pytest

from sympow.training.metrics import MetricsWriter, read_metrics


def write(run_dir, start, steps):
    metrics = MetricsWriter(run_dir, start)
    for step in steps:
        metrics.write({"step": step, "loss": 1 / step})
    metrics.sync()
    metrics.close()


def test_rows_come_back_exactly(tmp_path):
    assert read_metrics(tmp_path) == []
    write(tmp_path, 0, [1, 2, 3])
    assert read_metrics(tmp_path) == [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]


def test_going_on_drops_what_came_after_the_checkpoint(tmp_path):
    write(tmp_path, 0, [1, 2, 3, 4, 5])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    write(tmp_path, 3, [4, 5])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    write(tmp_path, 0, [1])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_tensorboard_has_every_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 0, [1, 2, 3, 4])
    write(tmp_path, 2, [3, 4])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(event.step for event in events.Scalars("loss")) == [1, 2, 3, 4]


def test_foreign_metrics_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("step,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl is not a file of JSON lines: "):
        MetricsWriter(tmp_path, 0)


@pytest.mark.parametrize("row", ["{}", "[1]", '{"step": null}'])
def test_rows_without_a_step_are_refused(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{row}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is no file of metrics: line 2 has no step"):
        read_metrics(tmp_path)


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    """Also where the file is closed, which writes again what the disk did not take."""
    full = open("/dev/full", "w")  # noqa: SIM115 - `metrics` closes it
    monkeypatch.setattr("sympow.training.metrics.open", lambda *_, **__: full, raising=False)
    metrics = MetricsWriter(tmp_path, 0)
    for act in (lambda: metrics.write({"step": 1}), metrics.close):
        with pytest.raises(OSError) as caught:
            act()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "metrics.jsonl"))
    metrics.close()


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"training metrics need tensorboard: pip install 'sympow\[train\]'"):
        MetricsWriter(tmp_path, 0)


def test_a_tracker_gets_every_row(tmp_path, make_config, monkeypatch):
    calls = []

    class Tracker:
        def log(self, row, step):
            calls.append((step, row))

        def finish(self):
            calls.append("finished")

    opened = []
    fake = types.SimpleNamespace(init=lambda **options: opened.append(options) or Tracker())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):  # a run that goes on
        metrics = MetricsWriter(tmp_path, 0, tracked=make_config())
        metrics.write({"step": 1, "loss": 2.0})
        metrics.close()
    assert calls == [(1, {"step": 1, "loss": 2.0}), "finished"] * 2
    assert opened[0] == opened[1] and opened[0]["id"].startswith("tiny-") and opened[0]["resume"] == "allow"
    assert opened[0]["config"] == make_config().to_dict()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"needs wandb: pip install 'sympow\[track\]'"):
        MetricsWriter(tmp_path, 0, tracked=make_config())
