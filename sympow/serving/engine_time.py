"""Counts the steps of the engine's thread, and measures the time of its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("idle", "schedule", "read", "step", "wait", "answer")


class EngineTime:
    """Measures the time of one thread, and counts its steps.

    Every second belongs to one part:

    - idle: there is no request;
    - schedule: requests are admitted or dropped;
    - read: calls that read prompts, the compilation of their kernels included;
    - step: one token in every row is read, and the next tokens are drawn; a GPU only gets this work here;
    - wait: the thread waits until a GPU has drawn tokens or read a piece of a prompt;
    - answer: tokens are put into the answers.

    One thread writes; any thread may read.

    Attributes:
        seconds: of every part.
        steps: steps so far.
        rows: rows of all steps, so that rows / steps is the mean batch.
        pieces: calls that read prompts.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = self.rows = self.pieces = 0
        self._part, self._since = "idle", time.perf_counter()

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Counts the time of a `with` block for this part, and not for the part of an outer block."""
        around = self._change(part)
        try:
            yield
        finally:
            self._change(around)

    def _change(self, part: str) -> str:
        before, now = self._part, time.perf_counter()
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before
