"""Loss against context: the grid, runs that go on after any interruption, and the tables of their results."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

from benchmarks.context_scaling import __main__ as program
from benchmarks.context_scaling import work as worker
from benchmarks.context_scaling.grid import RATES, SCALES, Run, grid, parts, settings
from benchmarks.context_scaling.results import best, collect, read
from benchmarks.context_scaling.work import Job, work
from sympow.training import NonFiniteError

ROOT = Path(__file__).resolve().parents[2]
TOY = SCALES["toy"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 512 tokens, each said twice."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, documents in (("train", 6), ("heldout", 3)):
        tokens = rng.integers(0, 256, (documents, 256), dtype=np.uint16).repeat(2, axis=1)
        zarr.create_array(str(folder / f"{name}.zarr"), data=tokens, chunks=(1, 512), zarr_format=2)
    return folder


def make_job(corpus, out, runs, launch="first", **changes):
    for name in ("records", "claims", "runs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    fields = {"scale": TOY, "steps": 2, "device": "cpu", "workers": 2} | changes
    return Job(tuple(runs), corpus=corpus, out=out, launch=launch, began=time.time(), **fields)


def test_the_grid_is_that_of_the_report():
    mini = SCALES["mini"]
    of_part = parts(mini)
    assert {name: len(of_part[name]) for name in of_part} == {"a": 19, "d": 4, "f": 4}
    asked = settings(mini, "adf")
    assert len(asked) == len(set(asked)) == 19 + 2 + 2
    runs = grid(dict.fromkeys(asked, RATES), [0, 1])
    assert len(runs) == len({run.name for run in runs}) == 23 * 3 * 2
    first = runs[:23]
    assert {(run.seed, run.learning_rate) for run in first} == {(0, 2e-3)}
    assert (first[0].variant, first[0].context) == ("softmax", 65_536) and first[-1].context == 1024
    for run in runs:
        config = run.config(mini, Path("corpus"))
        assert config.training.context * config.training.batch_size == 65_536
        assert config.model.d_model == 384 and config.training.precision == "bf16" and not config.data.pack


def run_program(monkeypatch, corpus, out, *options):
    words = ["run", "--corpus", str(corpus), "--out", str(out), "--scale", "toy", "--steps", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["context_scaling", *words, *options])
    return program.main()


@pytest.fixture
def without_processes(monkeypatch):
    """Workers one after another in this process."""
    from benchmarks.context_scaling import launch

    monkeypatch.setattr(launch, "_work", lambda job, workers, deadline: work(job, 0))
    monkeypatch.setattr(worker, "parent_alive", lambda: True)
    monkeypatch.setattr(worker, "commit", lambda: "abc")  # git takes longer than a run


def test_runs_are_trained_and_tabulated_once(corpus, tmp_path, monkeypatch, without_processes, capsys):
    assert run_program(monkeypatch, corpus, tmp_path, "--parts", "d", "--rates", "1e-3") == 0
    printed = capsys.readouterr().out
    assert "4 of 4 runs to do" in printed and "4 of 4: window-512-lr0.001-seed0: held-out loss 5." in printed
    results = read(tmp_path)
    assert len(results.runs) == 4 and {row["status"] for row in results.runs} == {"done"}
    row = results.runs[0]
    assert (row["variant"], row["context"], row["steps"], row["tokens"]) == ("linear", 512, 2, 2 * 511)
    assert row["flops"] > 0 and row["tokens_per_second"] > 0 and row["peak_bytes"] is None
    ends = [line["end"] for line in results.bins if line["variant"] == "softmax"]
    assert ends == [1, 2, 4, 8, 16, 32, 64, 128, 256, 511]
    curve = [line for line in results.curves if line["variant"] == "power"]
    assert [line["step"] for line in curve] == [1, 2] and all(line["held_out_loss"] for line in curve)

    assert run_program(monkeypatch, corpus, tmp_path, "--parts", "d", "--rates", "best", "--seeds", "0,1") == 0
    assert "4 of 8 runs to do" in capsys.readouterr().out
    again = read(tmp_path)
    assert len(again.runs) == 8 and [row for row in again.runs if row["seed"] == 0] == results.runs
    assert {row["learning_rate"] for row in again.runs} == {1e-3}


def test_the_best_learning_rate_is_that_of_the_lowest_mean_loss_of_what_finished():
    losses = {(1e-3, 0): 3.0, (1e-3, 1): 3.2, (2e-3, 0): 2.9, (2e-3, 1): 3.4, (4e-3, 0): 1.0}
    rows = [{"variant": "power", "context": 64, "learning_rate": rate, "seed": seed, "held_out_loss": loss,
             "status": "failed" if rate == 4e-3 else "done"} for (rate, seed), loss in losses.items()]  # fmt: skip
    assert best(rows) == {("power", 64): 1e-3}
    assert best(rows[:3]) == {("power", 64): 2e-3} and best(rows[4:]) == {}


def test_shorter_rows_are_measured_at_their_own_context_and_at_the_longest(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "parent_alive", lambda: True)
    work(make_job(corpus, tmp_path, [Run("power", 64, 1e-3, 0)]), 0)
    collect(tmp_path / "records", tmp_path)
    (row,), bins = read(tmp_path).runs, read(tmp_path).bins
    own = [line for line in bins if line["evaluated_context"] == 64]
    assert sum(line["tokens"] for line in own) == 3 * 512 // 64 * 63
    assert sum(line["tokens"] for line in bins) == 3 * (512 // 64 * 63 + 511)
    mean = sum(line["loss"] * line["tokens"] for line in own) / sum(line["tokens"] for line in own)
    assert row["held_out_loss"] == pytest.approx(mean, abs=2e-5)  # bins are rounded to 1e-5


def test_what_fails_or_diverges_does_not_stop_the_others(corpus, tmp_path, monkeypatch):
    fails = {"softmax": NonFiniteError("the loss is nan"), "linear": RuntimeError("out of luck")}
    tried = []

    def measure(job, run, *documents):
        tried.append(run.variant)
        if run.variant in fails:
            raise fails[run.variant]
        return {"status": "done", "row": {"held_out_loss": 1.0, "tokens_per_second": 1.0}, "bins": [], "curve": []}

    monkeypatch.setattr(worker, "parent_alive", lambda: True)
    monkeypatch.setattr(worker, "_measure", measure)
    runs = [Run(variant, 64, 1e-3, 0) for variant in ("softmax", "linear", "power")]
    first = make_job(corpus, tmp_path, runs)
    with pytest.raises(SystemExit):  # after an error of an unknown kind the process ends ...
        work(first, 0)
    work(first, 0)  # ... and the next one goes on behind it
    assert tried == ["softmax", "linear", "power"]
    assert [first.record(run)["status"] for run in runs] == ["not finite", "failed", "done"]
    del fails["linear"]
    work(make_job(corpus, tmp_path, runs, launch="second"), 0)
    assert tried[3:] == ["linear"]
    collect(tmp_path / "records", tmp_path)
    assert [row["status"] for row in read(tmp_path).runs] == ["done", "done", "not finite"]
    assert list(best(read(tmp_path).runs)) == [("linear", 64), ("power", 64)]


def test_a_launch_killed_at_any_moment_continues(corpus, tmp_path):
    """Its workers, which outlive it, end after the run they are at; the next launch repeats nothing finished."""
    words = ["run", "--corpus", str(corpus), "--out", str(tmp_path), "--scale", "toy", "--steps", "2",
             "--device", "cpu", "--parts", "d", "--rates", "1e-3"]  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.context_scaling", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    while " 1 of 4: " not in killed.stdout.readline():
        assert killed.poll() is None
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    finished = {file: file.stat().st_mtime_ns for file in (tmp_path / "records").iterdir()
                if json.loads(file.read_text())["status"] == "done"}  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("4 done\n"), done.stderr
    assert finished and {file: file.stat().st_mtime_ns for file in finished} == finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "a,z"], "a part that trains is one of a, d, f; got 'z'"),
        (["--rates", "1e-3,fast"], "--rates takes numbers with commas between; got '1e-3,fast'"),
        (["--seeds", "0.5"], "--seeds takes numbers with commas between; got '0.5'"),
        (["--workers", "0"], "it takes a worker and two steps at least; got 0 and 2"),
        (["--rates", "best"], "--rates best needs finished runs"),
        (["--corpus", "nowhere"], "zarr corpus does not exist: nowhere/train.zarr"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(corpus, tmp_path, monkeypatch, capsys, options, message):
    collect(tmp_path, tmp_path)  # no runs
    assert run_program(monkeypatch, corpus, tmp_path, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_results_of_another_setting_are_not_taken_for_those_asked_for(corpus, tmp_path):
    run = Run("power", 64, 1e-3, 0)
    make_job(corpus, tmp_path, [run]).write(run, {"status": "done"})
    with pytest.raises(ValueError, match=r"is of a run with training\.\w+ = 2, not 4: give another folder"):
        make_job(corpus, tmp_path, [run], steps=4).record(run)


def test_no_results_are_said_to_be_none(tmp_path):
    with pytest.raises(ValueError, match=r"holds no results: it has no runs\.csv"):
        read(tmp_path)
