"""The sweep runner: workers share the jobs, each job is done once, and results are yielded when they are ready."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from sympow.fields import unknown
from sympow.files import check_file_name
from sympow.sweeps.estimates import Estimates
from sympow.sweeps.executors import EXECUTORS, start
from sympow.sweeps.records import Records
from sympow.sweeps.worker import Work, Worker, learn
from sympow.training.interrupt import StopRequest

J = TypeVar("J")
_LOOK = 0.2  # seconds between looks at the folder


class Finished(NamedTuple, Generic[J]):
    """Holds the result of a job that ended, or one line of its error, and the seconds left for the sweep.

    The seconds are an estimate for all jobs that have not ended, divided among the workers; nan without estimates.
    """

    job: J
    result: Any
    error: str | None
    left: float


def run_jobs(
    jobs: Mapping[str, J],
    work: Work[J],
    folder: str | os.PathLike[str],
    *,
    executor: str | None = "process",
    workers: int = 1,
    group: Callable[[J], str] | None = None,
    minutes: float = math.inf,
    estimates: Estimates[J] | None = None,
    slurm: Mapping[str, Any] | None = None,
) -> Iterator[Finished[J]]:
    """Runs jobs, and yields every job when it ends. Jobs that finished in an earlier call are yielded first.

    The folder keeps the results of finished jobs, which are never repeated. A job that failed is tried again by the
    next call. Therefore a sweep can be killed at any time and called again, also with more jobs, and several processes
    can work in one folder.

    Args:
        jobs: the jobs by name, in the order in which they start. A name must be a valid file name.
        work: does the jobs, see `Work`.
        folder: the folder for results, errors and claims.
        executor: where workers run. "process": in child processes. "submitit": in local jobs of submitit. "slurm": in a
            job array on Slurm; all nodes must share a file system with locks. None: in this process.
        workers: the number of workers.
        group: returns the name of a job's group. A worker does all jobs of a group before those of another group. It
            must be a function of a module, because it is sent to other processes. None: there are no groups.
        minutes: the time limit. Jobs that are not done by then are given up, and jobs that would not end by then are
            not started.
        estimates: estimates how long jobs take.
        slurm: the parameters of submitit's executor, such as {"timeout_min": 60, "slurm_partition": "gpu"}.

    Raises ValueError for an unknown executor, a name that names no file, and less than one worker, ImportError if
    submitit is needed and not installed, and KeyboardInterrupt after SIGINT or SIGTERM, when the workers have been
    stopped.
    """
    if workers < 1:
        raise ValueError(f"a sweep needs at least one worker; got {workers}")
    if executor is not None and executor not in EXECUTORS:
        raise ValueError(unknown("executor", executor, EXECUTORS))
    for name in jobs:
        check_file_name(name, "the name of a job")
    deadline = time.time() + 60 * minutes
    records = Records(Path(folder).absolute())
    records.open()
    open_jobs, learned = dict(jobs), set[str]()

    def ended() -> Iterator[Finished[J]]:
        for name, job in list(open_jobs.items()):
            error = records.error(name)
            if error is None and not records.is_done(name):
                continue
            del open_jobs[name]
            if estimates is not None:
                learn(estimates, jobs, records, learned)
            left = math.nan if estimates is None else sum(map(estimates.seconds, open_jobs.values())) / workers
            yield Finished(job, None if error else records.read(name).result, error, left)

    yield from ended()
    if not open_jobs:
        return
    workers = min(workers, len(open_jobs))
    worker = Worker(dict(open_jobs), work, records.folder, group, deadline, estimates)
    if executor is None:
        for _ in worker.run(0):
            yield from ended()
        return
    team = start(executor, worker, workers, slurm or {})
    try:
        with StopRequest(doing="stopping the workers") as stop:
            while True:
                working = team.works()  # before looking, so that the last results are seen
                yield from ended()
                if stop.signal:
                    raise KeyboardInterrupt
                if not working or time.time() >= deadline:
                    return
                time.sleep(_LOOK)
    finally:
        team.stop()
