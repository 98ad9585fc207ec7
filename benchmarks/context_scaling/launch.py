"""Gives jobs to worker processes as long as there is time for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, Generic

from benchmarks.context_scaling.worker import J, Work, Worker
from sympow.training.interrupt import StopRequest


class Estimates(Generic[J]):
    """How long jobs take: a first guess, corrected by how wrong it was for those that are finished.

    Args:
        guess: seconds of a job by itself.
        kind: jobs of one kind share a correction; others take the mean of all.
        company: how much longer jobs take side by side, until one is finished.
    """

    def __init__(self, guess: Callable[[J], float], kind: Callable[[J], object], company: float):
        self._guess, self._kind, self._company = guess, kind, company
        self._factors: dict[object, float] = {}

    def seconds(self, job: J) -> float:
        known = self._factors.values()
        usual = sum(known) / len(known) if known else self._company
        return self._guess(job) * self._factors.get(self._kind(job), usual)

    def learn(self, job: J, seconds: float) -> None:
        self._factors[self._kind(job)] = seconds / self._guess(job)


def do_jobs(
    jobs: Sequence[J],
    work: Work[J],
    *,
    workers: int,
    minutes: float,
    estimates: Estimates[J],
) -> Iterator[tuple[J, dict[str, Any], float]]:
    """Yields every job that was done, with its result and the seconds left for those not begun, as they end.

    Jobs begin in their order, but one that would not end within `minutes` is left out for others that do. What is at
    work when the time is up, or at Ctrl-C and SIGTERM, is given up. A result {"error": ...} is that of a job that
    failed: another process takes the place of that worker, as what failed may have cost it the GPU.
    """
    left, deadline = list(jobs), time.time() + 60 * minutes
    team = [Worker(work, number) for number in range(min(workers, len(left)))]
    try:
        with StopRequest() as stop:
            while not stop.signal and time.time() < deadline:
                for worker in team:
                    if worker.job is None:
                        _give_next(worker, left, estimates, deadline)
                busy = [worker for worker in team if worker.job is not None]
                if not busy:
                    return
                for connection in wait([worker.connection for worker in busy], timeout=0.5):
                    worker = next(each for each in busy if each.connection is connection)
                    job, seconds = worker.job, time.time() - worker.begun
                    result = worker.result()
                    if "error" in result:
                        place = team.index(worker)
                        worker.stop()
                        team[place] = Worker(work, place)
                    else:
                        estimates.learn(job, seconds)
                    yield job, result, sum(map(estimates.seconds, left)) / len(team)
    finally:
        for worker in team:
            worker.stop()


def _give_next(worker: Worker[J], left: list[J], estimates: Estimates[J], deadline: float) -> None:
    room = deadline - time.time()
    job = next((each for each in left if math.isinf(room) or estimates.seconds(each) < room), None)
    if job is not None:
        left.remove(job)
        worker.give(job)
