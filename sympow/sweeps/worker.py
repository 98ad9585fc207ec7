"""A worker of a sweep, which does one job after another. It skips jobs that are done or that others are doing."""

from __future__ import annotations

import gc
import hashlib
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from sympow.sweeps.estimates import Estimates
from sympow.sweeps.records import Records

J = TypeVar("J")
J_contra = TypeVar("J_contra", contravariant=True)


class Work(Protocol[J_contra]):
    """Describes what the workers of a sweep do. It is sent to every one of them, so it is made of plain values."""

    def prepare(self, worker: int) -> Callable[[J_contra], Any]:
        """Returns a function that does a job and returns its result in JSON values.

        `prepare` is called once in every worker, with the worker's number, before the worker's first job.
        """
        ...


@dataclass
class Worker(Generic[J]):
    """Does jobs of a sweep. All attributes can be sent to another process.

    Attributes:
        jobs: the jobs by name, in the order in which they start.
        work: does the jobs.
        folder: the folder of the sweep.
        group: returns the name of a job's group. One worker does the jobs of a group while there are other groups.
            None: there are no groups.
        deadline: the end of the sweep as time.time(). A job that would end later is not started.
        estimates: estimates how long jobs take; without it all jobs are started.
        notes: with what the names begin under which workers in jobs of submitit note the jobs that they start.
        launcher: the file of the launcher's `Presence`; None: the worker does not end with the launcher.
        paths: where the launcher finds modules, for workers in jobs of submitit.
        ends_on_failure: whether the worker ends when a job has failed, because the GPU may be unusable afterwards.
    """

    jobs: Mapping[str, J]
    work: Work[J]
    folder: Path
    group: Callable[[J], str] | None = None
    deadline: float = math.inf
    estimates: Estimates[J] | None = None
    notes: str = ""
    launcher: Path | None = None
    paths: tuple[str, ...] = ()
    ends_on_failure: bool = False
    _learned: set[str] = field(default_factory=set)

    def note(self, number: int) -> str:
        """Returns the name under which a worker in a job of submitit notes the jobs that it starts."""
        return f"{self.notes}-{number}"

    def run(self, number: int, note: str | None = None) -> Iterator[str]:
        """Runs jobs group by group, and then the jobs of other workers' groups. Yields the name of each job.

        note: the name under which the worker notes the jobs that it starts, see `Records.begin`; None: it notes none.
        """
        records, parent = Records(self.folder), multiprocessing.parent_process()
        do: Callable[[J], Any] | None = None
        for name in self._turns(records):
            if parent is not None and not parent.is_alive():
                return
            with records.claim(name) as ours:
                if not ours or records.has_ended(name) or not self._has_time(name):
                    continue
                if note is not None:
                    records.begin(note, name)
                began = time.perf_counter()
                try:
                    do = do or self.work.prepare(number)
                    result = do(self.jobs[name])
                except Exception:  # the others go on
                    records.fail(name, traceback.format_exc())
                else:
                    records.save(name, result, time.perf_counter() - began)
            yield name
            if self.ends_on_failure and records.error(name):
                return
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # others share the GPU

    def _turns(self, records: Records) -> Iterator[str]:
        """Yields the names of jobs: first group by group with a claim on the group, and then of all jobs."""
        groups: dict[str, list[str]] = {}
        if self.group is not None:
            for name, job in self.jobs.items():
                groups.setdefault(group_claim(self.group(job)), []).append(name)
        for group, names in groups.items():
            with records.claim(group) as ours:
                yield from names if ours else ()
        yield from self.jobs

    def _has_time(self, name: str) -> bool:
        if self.estimates is None or math.isinf(self.deadline):
            return True
        learn(self.estimates, self.jobs, Records(self.folder), self._learned)
        return self.estimates.seconds(self.jobs[name]) < self.deadline - time.time()


def learn(estimates: Estimates[J], jobs: Mapping[str, J], records: Records, learned: set[str]) -> None:
    """Learns from the jobs that finished since the last call. `learned` contains the names of earlier jobs."""
    for name in [name for name in jobs if name not in learned and records.is_done(name)]:
        learned.add(name)
        estimates.learn(jobs[name], records.read(name).seconds)


def group_claim(group: str) -> str:
    """Returns the name of the claim on a group."""
    return f"group-{hashlib.sha256(group.encode()).hexdigest()[:16]}"
