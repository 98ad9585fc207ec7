"""Starts workers, one a GPU, keeps them going until all runs are done or the time is up, and gathers the results."""

from __future__ import annotations

import math
import multiprocessing
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.context_scaling.grid import Run, Scale
from benchmarks.context_scaling.results import collect
from benchmarks.context_scaling.work import CLAIMS, RECORDS, RUNS, Job, work
from sympow.data import open_corpus
from sympow.training.interrupt import StopRequest


def launch(
    runs: Sequence[Run],
    scale: Scale,
    corpus: Path,
    out: Path,
    *,
    steps: int,
    device: str,
    workers: int,
    minutes: float = math.inf,
) -> dict[str, int]:
    """Runs what is missing in the folder `out` and writes its tables; how many of `runs` have which status.

    A finished run is never repeated, an interrupted one goes on, and one that was killed too, from its last checkpoint.
    Ctrl-C, SIGTERM and the end of `minutes` interrupt the runs in progress.
    """
    for name in (RECORDS, CLAIMS, RUNS):
        (out / name).mkdir(parents=True, exist_ok=True)
    job = Job(tuple(runs), scale, corpus, out, steps, device, workers, uuid.uuid4().hex, time.time())
    open_corpus(job.config(runs[0]).data)  # what is wrong with it is said here, once
    left = _left(job)
    print(f"{left} of {len(runs)} runs to do, {min(workers, left)} at a time on {device}", flush=True)
    try:
        _work(job, min(workers, left), job.began + 60 * minutes)
    finally:
        collect(out / RECORDS, out)
    statuses = [(job.record(run) or {"status": "not begun"})["status"] for run in runs]
    return {status: statuses.count(status) for status in dict.fromkeys(statuses)}


def _work(job: Job, workers: int, deadline: float) -> None:
    """Until no worker is alive. One that failed is started anew as long as others still get to begin runs."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    started: list[Any] = [None] * workers
    left = [0] * workers

    def start(number: int) -> None:
        left[number] = _left(job)
        started[number] = context.Process(target=work, args=(job, number))  # no daemon: compilers start processes
        started[number].start()

    for number in range(workers):
        start(number)
    try:
        with StopRequest() as stop:
            while any(process.is_alive() for process in started) and time.time() < deadline and not stop.signal:
                for number, process in enumerate(started):
                    if process.exitcode and 0 < _left(job) < left[number]:
                        start(number)
                time.sleep(0.2)
    finally:
        for process in started:
            process.terminate()  # in training it saves a checkpoint and ends
        for process in started:
            process.join()


def _left(job: Job) -> int:
    return sum(job.to_do(run) for run in job.runs)
