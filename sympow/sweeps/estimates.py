"""Estimates the time of the jobs of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")


class Estimates(Generic[J]):
    """Estimates how long jobs take: a first guess, multiplied by a correction from finished jobs.

    Args:
        guess: returns the seconds of a job that runs alone.
        kind: returns the kind of a job. Jobs of one kind share a correction; other kinds use the mean of all.
        company: the factor by which jobs take longer side by side, used until a job is finished.

    Workers get a copy of the estimates. Therefore `guess` and `kind` must be functions of a module if there are workers
    in other processes.
    """

    def __init__(self, guess: Callable[[J], float], kind: Callable[[J], object], company: float):
        self._guess, self._kind, self._company = guess, kind, company
        self._factors: dict[object, float] = {}

    def seconds(self, job: J) -> float:
        """Returns the seconds that a job is expected to take."""
        known = self._factors.values()
        usual = sum(known) / len(known) if known else self._company
        return self._guess(job) * self._factors.get(self._kind(job), usual)

    def learn(self, job: J, seconds: float) -> None:
        """Learns from the seconds of a finished job."""
        self._factors[self._kind(job)] = seconds / self._guess(job)
