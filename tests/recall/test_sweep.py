"""A sweep runs what is missing, once, in any executor, and can be stopped anywhere."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sympow.models import MixerConfig
from sympow.recall import Architecture, RecallConfig, Sweep, grid, read_results, run_sweep
from sympow.recall import sweep as module
from sympow.sweeps.executors import visible_gpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(small):
    """Four runs of five steps."""
    runs = grid(replace(small, examples=160, epochs=1), learning_rates=(1e-3, 1e-2), seeds=(0, 1))
    return Sweep("tiny", runs)


@pytest.fixture
def counted(monkeypatch):
    """Runs in this process, faked and counted by name; `fails` names those that raise."""
    seen, fails = [], set()

    def run(config: RecallConfig, **options):
        seen.append(config.id)
        if config.id in fails:
            raise RuntimeError("out of memory\nand more")
        return [{"run": config.id, "seed": config.seed, "options": sorted(options)}]

    monkeypatch.setattr(module, "run", run)
    return seen, fails


def here(sweep, folder, **options):
    return run_sweep(sweep, folder, executor="process", device="cpu", quiet=True, **options)


def comparable(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize(("executor", "jobs"), [("process", 2), ("submitit", 1)])
def test_processes_share_the_runs(tiny, tmp_path, executor, jobs):
    rows = run_sweep(tiny, tmp_path, executor=executor, jobs=jobs, device="cpu", quiet=True)
    assert [row["run"] for row in rows] == [run.id for run in tiny.runs]
    assert comparable(read_results(tmp_path / "results.csv")) == comparable(rows)
    (expected,) = module.run(tiny.runs[3], device="cpu")
    assert rows[3]["steps"] == expected["steps"] == 5
    assert rows[3]["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)  # as many threads as cores


def test_a_finished_run_is_not_repeated_and_a_larger_sweep_goes_on(tiny, tmp_path, counted):
    seen, _ = counted
    here(Sweep("tiny", tiny.runs[:2]), tmp_path)
    assert sorted(seen) == sorted(run.id for run in tiny.runs[:2])
    rows = here(tiny, tmp_path)
    assert len(seen) == 4 and len(rows) == 4
    here(tiny, tmp_path)
    assert len(seen) == 4
    (tmp_path / "rows" / f"{tiny.runs[1].id}.json").unlink()
    here(tiny, tmp_path)
    assert seen[4:] == [tiny.runs[1].id]


@pytest.mark.parametrize("result", ["null", "3", "[1]", '{"run": "x"}'])
def test_a_record_without_rows_is_named(tiny, tmp_path, counted, result):
    here(tiny, tmp_path)
    file = tmp_path / "rows" / f"{tiny.runs[1].id}.json"
    file.write_text(f'{{"seconds": 1.0, "result": {result}}}')
    with pytest.raises(ValueError, match=r"holds no rows of a run: its result is .*; remove the file") as caught:
        here(tiny, tmp_path)
    assert str(caught.value).startswith(str(file))


def test_a_failed_run_is_told_after_the_others_and_tried_again(tiny, tmp_path, counted):
    seen, fails = counted
    fails.add(tiny.runs[0].id)
    with pytest.raises(RuntimeError) as told:
        here(tiny, tmp_path)
    message = str(told.value)
    error = "RuntimeError: out of memory"
    assert message.startswith(f"1 of 4 runs did not finish: {tiny.runs[0].id}: {error} (") and "\n" not in message
    assert len(seen) == 4 and len(read_rows(tmp_path)) == 3
    assert "RuntimeError: out of memory" in (tmp_path / "errors" / f"{tiny.runs[0].id}.txt").read_text()
    fails.clear()
    assert len(here(tiny, tmp_path)) == 4 and len(seen) == 5
    assert not list((tmp_path / "errors").iterdir())


def read_rows(folder):
    return [json.loads(file.read_text())["result"] for file in (folder / "rows").iterdir()]


def test_a_run_that_another_process_works_on_is_left_to_it(tiny, tmp_path, counted):
    seen, _ = counted
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
         "print('held', flush=True); sys.stdin.read()", str(prepared(tmp_path) / tiny.runs[2].id)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RuntimeError, match=f"1 of 4 runs did not finish: {tiny.runs[2].id} was interrupted"):
        here(tiny, tmp_path)
    assert tiny.runs[2].id not in seen and len(seen) == 3
    holder.kill()  # with it goes its claim
    holder.communicate()
    assert len(here(tiny, tmp_path)) == 4 and seen[3:] == [tiny.runs[2].id]


def prepared(folder):
    (folder / "claims").mkdir(parents=True)
    return folder / "claims"


def test_a_sweep_killed_at_any_moment_continues(tiny, tmp_path):
    """Killed after its first row: the rest is run by the next one, and rows already there stay as they are."""
    script = f"""
import pickle, sys
from sympow.recall import run_sweep
run_sweep(pickle.load(open(sys.argv[1], "rb")), {str(tmp_path / "out")!r}, executor="process", device="cpu", quiet=True)
"""
    (tmp_path / "sweep.pickle").write_bytes(pickle.dumps(tiny))
    killed = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "sweep.pickle")], cwd=ROOT)
    rows = tmp_path / "out" / "rows"
    while not (rows.is_dir() and any(rows.glob("*.json"))):
        assert killed.poll() is None
        time.sleep(0.005)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    before = {file: file.stat().st_mtime_ns for file in rows.glob("*.json")}
    assert len(here(tiny, tmp_path / "out")) == 4
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_an_interrupted_sweep_leaves_its_results(tiny, tmp_path, monkeypatch):
    def run(config, **options):
        if config.id == tiny.runs[2].id:
            raise KeyboardInterrupt
        return [{"run": config.id}]

    monkeypatch.setattr(module, "run", run)
    with pytest.raises(KeyboardInterrupt):
        here(tiny, tmp_path)
    assert (tmp_path / "results.csv").read_text().split() == ["run", tiny.runs[0].id, tiny.runs[1].id]


def test_the_longest_runs_come_first(small, tmp_path, counted):
    seen, _ = counted
    runs = grid(small, widths=(32, 128, 64))
    here(Sweep("widths", runs), tmp_path)
    assert seen == [runs[1].id, runs[2].id, runs[0].id]


def test_a_sweep_trains_all_runs_of_a_model_before_another(small, tmp_path, counted):
    seen, _ = counted
    runs = grid(small, widths=(32, 64), learning_rates=(1e-3, 1e-2))
    here(Sweep("groups", (runs[0], runs[2], runs[1], runs[3])), tmp_path)
    assert [name.split("-w")[1][:2] for name in seen] == ["64", "64", "32", "32"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "threads"}, "unknown executor 'threads'"),
        ({"jobs": 0}, "jobs must be at least 1; got 0"),
        ({"slurm": {"timeout_min": 5}}, "parameters of Slurm are for the executor slurm; got 'submitit'"),
    ],
)
def test_refused_before_anything_runs(tiny, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run_sweep(tiny, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_without_submitit_one_line_names_what_to_do(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(
        ImportError, match=r"need submitit: pip install 'sympow\[sweep\]' \(.+\); the executor process does"
    ):
        run_sweep(tiny, tmp_path, device="cpu", quiet=True)


def test_slurm_gets_an_array_of_workers_with_its_parameters(tiny, tmp_path, monkeypatch, counted):
    """Against a stand-in for submitit that runs a job where it is submitted."""
    seen, _ = counted
    submitted = []

    class Executor:
        def __init__(self, folder, cluster):
            submitted.append((Path(folder).name, cluster))

        def update_parameters(self, **parameters):
            submitted.append(parameters)

        def batch(self):
            return nullcontext()

        def submit(self, function, worker, number):
            submitted.append((number, worker.work.workers))
            function(worker, number)
            torch.set_num_threads(1)  # a worker takes all
            return SimpleNamespace(done=lambda: True)

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=Executor))
    rows = run_sweep(tiny, tmp_path, executor="slurm", jobs=2, slurm={"timeout_min": 5}, device="cpu", quiet=True)
    assert submitted == [("submitit", "slurm"), {"timeout_min": 5}, (0, 1), (1, 1)]  # each alone on its machine
    assert len(rows) == len(seen) == 4


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("", {"gpus_per_node": 2}), ("3,5", {"gpus_per_node": 2, "visible_gpus": [3, 5]}), ("GPU-a,GPU-b", None)],
)
def test_submitit_is_told_the_gpus_of_this_process(monkeypatch, listed, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    if expected is None:
        with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES is 'GPU-a,GPU-b': use the executor process"):
            visible_gpus()
    else:
        assert visible_gpus() == expected


def test_workers_find_a_mixer_by_its_import_path(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    own = MixerConfig("short_convolution", {"mixer": "own_mixer:Own", "options": {"scale": 0.5}})
    runs = tuple(replace(run, architecture=Architecture("own", (own,), mlp_ratio=0)) for run in tiny.runs[:2])
    rows = here(Sweep("own", runs), tmp_path, jobs=2)
    assert [row["steps"] for row in rows] == [5, 5]
    assert "own_mixer:Own" in rows[0]["mixers"] and "'max_length': 8" in rows[0]["mixers"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("own_mixer:Other", ValueError, "Other in own_mixer is no subclass of sympow.layers.Mixer; got None"),
        ("own_mixer:torch", ValueError, "torch in own_mixer is no subclass of sympow.layers.Mixer"),
        ("no_such_module:Own", ImportError, "the module of the mixer 'no_such_module:Own' cannot be imported: No mod"),
        ("own", ValueError, "or package.module:Class; got 'own'"),
    ],
)
def test_import_paths_that_name_no_mixer(monkeypatch, name, error, message):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(error, match=message):
        MixerConfig(name)
    with pytest.raises(ValueError, match=r"the own_mixer:Own mixer has no option 'size'; it has .*scale, max_length"):
        MixerConfig("own_mixer:Own", {"size": 1})
