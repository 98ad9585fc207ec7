"""The sweep runner: each job is done once, what fails is told, and time limits hold."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sympow.sweeps import Estimates, Records, run_jobs
from sympow.sweeps.worker import Worker, group_claim
from tests.sweeps.chores import Chores, guess, kind


def named(*jobs):
    return {f"job-{job}": job for job in jobs}


def nothing_known():
    return Estimates(guess, kind, 1.0)


def test_workers_take_the_place_of_those_that_failed(tmp_path):
    ended = run_jobs(named("a", "fail", "b", "die", "c"), Chores(), tmp_path, workers=2, estimates=nothing_known())
    found = {each.job: each for each in ended}
    assert {job: found[job].result["done"] for job in "abc"} == {"a": "a", "b": "b", "c": "c"}
    assert found["fail"].error == "RuntimeError: out of luck" and found["fail"].result is None
    assert found["die"].error == "the process ended with exit code 3"
    assert "out of luck" in Records(tmp_path).error_file("job-fail").read_text()


def test_a_worker_that_dies_between_jobs_is_replaced(tmp_path):
    ended = run_jobs(named("die later", "a", "b"), Chores(), tmp_path)
    assert [(each.job, each.error) for each in ended] == [("die later", None), ("a", None), ("b", None)]
    assert list((tmp_path / "workers").iterdir()) == []


def test_a_job_that_kills_its_worker_in_submitit_costs_one_job(tmp_path):
    """Also a worker that dies between two jobs."""
    pytest.importorskip("submitit")
    jobs = named("a", "die", "b", "die later", "c")
    found = {each.job: each for each in run_jobs(jobs, Chores(), tmp_path, executor="submitit")}
    assert {job: found[job].result["done"] for job in ("a", "b", "c", "die later")} == {
        "a": "a", "b": "b", "c": "c", "die later": "die later"
    }  # fmt: skip
    assert found["die"].error.startswith(f"the worker died in this job, its log is {tmp_path}/submitit/")
    assert list((tmp_path / "workers").iterdir()) == []


SCRIPT = """
import sys
from pathlib import Path
from sympow.sweeps import run_jobs
from tests.sweeps.chores import Chores

jobs = {"job-a": "a", "job-sleep": "sleep"}
for ended in run_jobs(jobs, Chores(), Path(sys.argv[1]), executor=sys.argv[2]):
    print(ended.result["process"], flush=True)
"""


@pytest.mark.parametrize("executor", ["process", "submitit"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_launcher(tmp_path, executor, number):
    """In the middle of a job, also if the launcher is killed."""
    if executor == "submitit":
        pytest.importorskip("submitit")
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-c", SCRIPT, str(tmp_path), executor]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **pipes, text=True, env=environment) as launcher:
        worker = int(launcher.stdout.readline())
        while not any(file.read_text() == "job-sleep" for file in (tmp_path / "workers").glob("*[0-9a-f]")):
            time.sleep(0.05)
        launcher.send_signal(number)
        launcher.communicate()
    wait_for_end(worker)
    if number == signal.SIGINT:
        assert list((tmp_path / "workers").iterdir()) == []


def wait_for_end(process: int) -> None:
    """Returns when a process is gone or a zombie. The test's own time limit is that of the job, ten minutes."""
    while (state := Path(f"/proc/{process}/stat")).exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)


def test_what_another_launcher_writes_in_the_folder_is_left_alone(tmp_path):
    Records(tmp_path).open()
    files = [tmp_path / "workers" / "of another", tmp_path / "errors" / ".half written"]
    for file in files:
        file.write_text("job-a", encoding="utf-8")
    (done,) = run_jobs(named("a"), Chores(), tmp_path)
    assert done.error is None and all(file.exists() for file in files)


def test_what_cannot_end_in_time_is_not_begun_and_what_runs_over_it_is_given_up(tmp_path):
    jobs = named("long", "a", "b")
    done = list(run_jobs(jobs, Chores(), tmp_path, executor=None, minutes=5, estimates=nothing_known()))
    assert [each.job for each in done] == ["a", "b"]
    assert list(run_jobs(named("sleep"), Chores(), tmp_path, minutes=0.02, estimates=nothing_known())) == []


def test_a_finished_job_is_told_again_and_not_repeated(tmp_path):
    (first,) = run_jobs(named("a"), Chores(), tmp_path, executor=None)
    again = list(run_jobs(named("a", "b"), Chores(), tmp_path, executor=None))
    assert [each.job for each in again] == ["a", "b"] and again[0].result == first.result
    assert math.isnan(again[0].left)


def test_a_failed_job_is_tried_again(tmp_path):
    (failed,) = run_jobs({"one": "fail"}, Chores(), tmp_path, executor=None)
    assert failed.error == "RuntimeError: out of luck"
    (done,) = run_jobs({"one": "a"}, Chores(), tmp_path, executor=None)
    assert done.error is None and done.result["done"] == "a"


def test_an_error_is_told_by_the_line_that_names_it(tmp_path):
    """PyTorch ends its errors with advice."""
    records = Records(tmp_path)
    records.open()
    assert records.error("job-a") is None
    traced = 'Traceback (most recent call last):\n  File "a.py", line 3\ntorch._dynamo.exc.Unsupported'
    for error, line in [
        (
            f"{traced}Error: it breaks\n  Hint: b\n\nSet TORCH_LOGS: it says more\n",
            "torch._dynamo.exc.UnsupportedError: it breaks",
        ),
        ("the process ended\nwith exit code 3\n", "with exit code 3"),
    ]:
        records.fail("job-a", error)
        assert records.error("job-a") == line


def test_a_worker_stays_with_a_group_and_then_helps_others(tmp_path):
    records = Records(tmp_path)
    records.open()
    worker = Worker(named("h1", "f1", "h2", "f2"), Chores(), tmp_path, group=kind)
    with records.claim(group_claim("h")):  # another worker's
        assert list(worker.run(0)) == ["job-f1", "job-f2", "job-h1", "job-h2"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"seconds": 1.0}', "it has no 'result'"),
        ('{"result": []}', "it has no 'seconds'"),
        ('{"result": [], "seconds": "1"}', "its seconds are '1'"),
        ('{"result": [], "seconds": null}', "its seconds are None"),
        ("3", "expected an object, got 3"),
        ('{"result": [', "Expecting value"),
        ("", "Expecting value"),
        (b"\xff", "'utf-8' codec can't decode"),
        ("[" * 100_000, "lists and objects are nested too deeply"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, content, found):
    records = Records(tmp_path)
    records.open()
    file = records.row_file("job-a")
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for call in (lambda: records.read("job-a"), lambda: list(run_jobs(named("a"), Chores(), tmp_path, executor=None))):
        with pytest.raises(ValueError, match=found) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(f"{file} is no record of a sweep: ") and "\n" not in message
        assert message.endswith("; remove the file to run the job again")


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_an_error_without_text_is_an_error(tmp_path, content):
    records = Records(tmp_path)
    records.open()
    records.error_file("job-a").write_bytes(content)
    assert records.error("job-a") and records.has_ended("job-a")


def test_estimates_learn_from_what_jobs_took():
    estimates = Estimates(lambda job: 10.0 * job, lambda job: job % 2, company=3.0)
    assert estimates.seconds(2) == 60
    estimates.learn(2, 10.0)
    assert estimates.seconds(4) == 20 and estimates.seconds(3) == 15  # another kind takes the mean of those known
    estimates.learn(1, 15.0)
    assert estimates.seconds(3) == 45 and estimates.seconds(4) == 20


def test_an_unknown_executor_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown executor 'threads'; known: process, slurm, submitit"):
        list(run_jobs(named("a"), Chores(), tmp_path / "out", executor="threads"))
    assert not (tmp_path / "out").exists()


def test_a_sweep_without_workers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a sweep needs at least one worker; got 0"):
        list(run_jobs(named("a"), Chores(), tmp_path / "out", workers=0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a/b", "the name of a job must be usable as a file name, got 'a/b'"),
        (".a", "usable as a file name, got '.a'"),
        ("", "usable as a file name, got ''"),
        ("ä" * 120, "the name of a job must have at most 200 bytes, got 240: 'ää"),
    ],
)
def test_a_name_that_names_no_file_is_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        list(run_jobs({name: "a"}, Chores(), tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    (done,) = run_jobs({"ä" * 100: "a"}, Chores(), tmp_path / "out", executor=None)
    assert done.error is None
