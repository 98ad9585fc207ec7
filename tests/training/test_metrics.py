"""Metrics on disk: one line a step, also after a kill."""

import errno
import sys
import types
from dataclasses import replace

import pytest

from sympow.training.config import TRACKERS
from sympow.training.metrics import MetricsWriter, read_metrics
from sympow.training.trackers import open_tracker


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
    for text in ("step,loss\n1,2\n", "[" * 100_000 + "\n"):
        (tmp_path / "metrics.jsonl").write_text(text)
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


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    write(tmp_path, 0, [1, 2])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2] and not (tmp_path / "tensorboard").exists()


class Service:
    """The calls that a service gets."""

    def __init__(self, *names, **options):
        self.calls, self.names, self.options = [], names, options

    def log(self, row, step):
        self.calls.append((step, row))

    def finish(self):
        self.calls.append("finished")

    def start(self):
        self.calls.append("started")

    def store_init_configuration(self, values):
        self.calls.append(values)


@pytest.fixture
def services(monkeypatch):
    """Packages of services whose runs are kept. MLflow knows runs by their tags."""
    opened = []

    def open_run(*names, **options):
        opened.append(Service(*names, **options))
        return opened[-1]

    def search_runs(experiment_names, filter_string, output_format):
        same = [run for run in opened if run.options["tags"]["sympow.folder"] in filter_string]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id="known"))] * len(same)

    tracking = types.SimpleNamespace(PartialState=lambda: None, MLflowTracker=open_run, CometMLTracker=open_run)
    monkeypatch.setitem(sys.modules, "accelerate", types.SimpleNamespace(tracking=tracking))
    monkeypatch.setitem(sys.modules, "accelerate.tracking", tracking)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=open_run))
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(search_runs=search_runs))
    monkeypatch.setitem(sys.modules, "comet_ml", types.SimpleNamespace())
    return opened


@pytest.mark.parametrize("service", TRACKERS)
def test_a_tracker_gets_every_row_and_continues(tmp_path, make_config, services, service):
    config = make_config()
    config = replace(config, execution=replace(config.execution, tracker=service))
    for _ in range(2):  # a run that goes on
        metrics = MetricsWriter(tmp_path, 0, tracked=config)
        metrics.write({"step": 1, "loss": 2.0})
        metrics.close()
    first, second = services
    assert all(run.calls[-2:] == [(1, {"step": 1, "loss": 2.0}), "finished"] for run in services)
    if service == "wandb":
        assert first.options == second.options and first.options["id"].startswith("tiny-")
        assert first.options["resume"] == "allow" and first.options["config"] == config.to_dict()
        return
    assert first.calls[0] == "started" and first.calls[1]["training.steps"] == config.training.steps
    assert first.names == second.names == ("sympow",)
    if service == "mlflow":
        assert first.options["run_name"] == "tiny" and second.options["run_id"] == "known"
        assert len(second.calls) == 3  # no configuration, which MLflow may refuse
    else:
        assert first.options == second.options and first.options["mode"] == "get_or_create"


@pytest.mark.parametrize(
    ("service", "missing", "line"),
    [
        ("wandb", "wandb", r"the tracker needs wandb: pip install 'sympow\[track\]' \("),
        ("mlflow", "mlflow", r"the tracker needs mlflow: pip install mlflow \("),
        ("comet_ml", "accelerate.tracking", r"the tracker needs accelerate: pip install 'sympow\[track\]' \("),
    ],
)
def test_a_missing_package_is_named(tmp_path, make_config, services, monkeypatch, service, missing, line):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=line):
        open_tracker(service, "tiny", {}, tmp_path)


def test_mlflow_itself(tmp_path, monkeypatch):
    for name in ("mlflow", "accelerate"):
        pytest.importorskip(name)
    import mlflow

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    for first in (1, 3):
        run = open_tracker("mlflow", "tiny", {"training": {"steps": first}}, tmp_path)
        for step in (first, first + 1):
            run.log({"step": step, "loss": 1 / step}, step)
        run.finish()
    (found,) = mlflow.search_runs(experiment_names=["sympow"], output_format="list")
    history = mlflow.tracking.MlflowClient().get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(step, 1 / step) for step in (1, 2, 3, 4)]
    assert found.data.params == {"training.steps": "1"} and found.info.run_name == "tiny"
