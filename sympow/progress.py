"""Shows the progress of a long task on stderr: with a bar on a terminal, otherwise with a line from time to time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sympow.packages import from_extra

INTERVAL = 30.0  # seconds between two lines
SHORT = 60.0  # seconds of work whose time is not told beforehand
LOOK_EVERY = 1.0  # seconds between looks at the clock: a single step may take longer than the interval


class Progress:
    """Shows the progress of a task in a `with` block: `with Progress("tokenizing", "file") as progress`.

    On a terminal, a bar of tqdm counts units. Any other stderr gets a line after 30 seconds without one, also in the
    middle of a step. A task without a unit is one step. It has no bar, and prints lines on a terminal too.

    Args:
        task: the name of the task, with which every line starts.
        unit: the name of a unit in the singular.
        total: the number of units, if it is known.
        done: the number of units that were done before.
        quiet: whether to show nothing.

    Raises ImportError at the start of the block if a bar is to be shown and tqdm is not installed.
    """

    def __init__(
        self, task: str, unit: str | None = None, *, total: int | None = None, done: int = 0, quiet: bool = False
    ):
        self.task, self.unit, self.total, self.done, self.quiet = task, unit, total, done, quiet
        self._note = ""
        self._bar: Any = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Progress:
        self._began = self._told = time.monotonic()
        if self.quiet:
            return self
        if self.unit is None or not sys.stderr.isatty():
            threading.Thread(target=self._watch, name="progress", daemon=True).start()
            return self
        with from_extra("train", "a progress bar needs tqdm"):
            from tqdm import tqdm
        self._bar = tqdm(desc=self.task, unit=self.unit, total=self.total, initial=self.done, dynamic_ncols=True)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:  # no line comes afterwards
            self._over.set()
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Counts units as done. `note`, such as a loss, is shown beside the count until the next call."""
        self.done += count
        self._note = note
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif not self.quiet:
            self._tell_if_due()

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif not self.quiet:
            with self._lock:
                self._told = time.monotonic()
                print(line, file=sys.stderr, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows what happens in the block, such as "computing the held-out loss", in place of the note."""
        before = self._note
        self._show(name)
        try:
            yield
        finally:
            self._show(before)

    def _show(self, note: str) -> None:
        self._note = note
        if self._bar is not None:
            self._bar.set_postfix_str(note)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            self._tell_if_due()

    def _tell_if_due(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._over.is_set() or now - self._told < INTERVAL:
                return
            self._told = now
            try:
                print(self._line(now), file=sys.stderr, flush=True)
            except (OSError, ValueError):  # stderr is closed: the work continues
                self._over.set()

    def _line(self, now: float) -> str:
        """Returns a line such as "training: 120 of 5,000 steps, loss 3.2100, 0:02:30"."""
        parts = []
        if self.unit is not None:
            parts.append(f"{self.done:,}{f' of {self.total:,}' if self.total is not None else ''} {self.unit}s")
        if self._note:
            parts.append(self._note)
        parts.append(str(timedelta(seconds=int(now - self._began))))
        return f"{self.task}: {', '.join(parts)}"


class Forecast:
    """Estimates, after the first steps of a task, how long the rest takes.

    The first step is often slower than the others, so the estimate comes after the third step, or after the first if
    that took a minute. A stage, whose steps cost something else, gets an estimate of its own.

    Args:
        done: the steps that were done before.
        total: the steps of the task.
    """

    def __init__(self, done: int, total: int):
        self.total = total
        self._first, self._stage = done, -1
        self._times = [time.monotonic()]

    def after(self, done: int, stage: int = 0) -> str | None:
        """Returns a line with the estimate after `done` steps; None if it is not due, or if the rest is short."""
        now = time.monotonic()
        if stage != self._stage:
            self._first, self._stage = done - 1, stage
            self._times = self._times[-1:]
        count = done - self._first
        if count > 3:
            self._times = [now]
            return None
        self._times.append(now)
        slow = self._times[1] - self._times[0] >= SHORT
        if count != (1 if slow else 3):
            return None
        since = 0 if slow else 1
        each = (now - self._times[since]) / (count - since)
        left = each * (self.total - done)
        if left < SHORT:
            return None
        steps = f"{self.total - done:,} steps left, {each:.3g} s each"
        rest = timedelta.max if left >= timedelta.max.total_seconds() else timedelta(seconds=round(left))
        return f"about {rest} for the {steps}, without evaluations and checkpoints"
