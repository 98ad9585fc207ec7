"""The sweep runner: jobs are shared out, each is done once, and results come as they are ready."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from sympow.fields import unknown
from sympow.sweeps.estimates import Estimates
from sympow.sweeps.executors import EXECUTORS, start
from sympow.sweeps.records import Records
from sympow.sweeps.worker import Work, Worker, learn
from sympow.training.interrupt import StopRequest

J = TypeVar("J")
_LOOK = 0.2  # seconds between looks at the folder


class Finished(NamedTuple, Generic[J]):
    """Tells of a job that ended: its result or the last line of its error, and the seconds left for others.

    The seconds are an estimate for the jobs that have not ended, shared among the workers; nan without estimates.
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
    """Runs jobs, and yields each that ended, as it ends; first those that `folder` holds already.

    A finished job leaves its result in the folder and is never repeated there. A job that failed is tried again by the
    next call. So a sweep can be killed at any moment and given again, also with more jobs in it, and several processes
    can work in one folder.

    Args:
        jobs: by names that can be those of files. They begin in this order.
        work: what is done to a job; see `Work`.
        folder: for results, errors and claims.
        executor: where workers run: "process": processes of this one; "submitit": local jobs of submitit; "slurm": an
            array of Slurm, on a file system that all nodes share, with locks. None: in this process, one after another.
        workers: how many there are.
        group: what the group of a job is called; a worker does the jobs of a group before those of another. It is a
            function of a module, as other processes get it. None: there are no groups.
        minutes: what is not done by then is given up, and what would not end by then is not begun.
        estimates: how long jobs take.
        slurm: parameters of submitit's executor, such as {"timeout_min": 60, "slurm_partition": "gpu"}.

    Raises ValueError for an unknown executor, ImportError where submitit is needed and missing, KeyboardInterrupt after
    SIGINT or SIGTERM, when the workers have been stopped.
    """
    if executor is not None and executor not in EXECUTORS:
        raise ValueError(unknown("executor", executor, EXECUTORS))
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
        with StopRequest() as stop:
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
