"""How long the jobs of a sweep take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")


class Estimates(Generic[J]):
    """Tells how long jobs take: a first guess, corrected by how wrong it was for those that are finished.

    Args:
        guess: seconds of a job by itself.
        kind: jobs of one kind share a correction; others take the mean of all.
        company: how much longer jobs take side by side, until one is finished.

    Workers get a copy: in a sweep that workers share out, `guess` and `kind` are functions of a module.
    """

    def __init__(self, guess: Callable[[J], float], kind: Callable[[J], object], company: float):
        self._guess, self._kind, self._company = guess, kind, company
        self._factors: dict[object, float] = {}

    def seconds(self, job: J) -> float:
        """Returns what a job is expected to take."""
        known = self._factors.values()
        usual = sum(known) / len(known) if known else self._company
        return self._guess(job) * self._factors.get(self._kind(job), usual)

    def learn(self, job: J, seconds: float) -> None:
        """Learns from what a finished job took."""
        self._factors[self._kind(job)] = seconds / self._guess(job)
