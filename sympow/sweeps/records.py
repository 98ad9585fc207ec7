"""The folder of a sweep: a file for each finished job, one for each failure, and who works on what."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from sympow.sweeps.claim import claim
from sympow.training.checkpoint import atomic_write

_FOLDERS = ("rows", "claims", "errors", "workers")


class Record(NamedTuple):
    """Holds what a job gave, in JSON values, and how long it took. Version 0.1 did not write down the seconds: None."""

    result: Any
    seconds: float | None


class Records:
    """Reads and writes the folder of a sweep. Every job has a name that can be that of a file."""

    def __init__(self, folder: Path):
        self.folder = folder

    def open(self) -> None:
        """Makes the folder, and forgets the errors of an earlier call, so that what failed is tried again."""
        for name in _FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("errors", "workers"):
            for file in (self.folder / name).iterdir():
                file.unlink()

    def claim(self, name: str) -> AbstractContextManager[bool]:
        """Returns a context that tells whether no other process holds the claim; see `claim`."""
        return claim(self.folder / "claims" / name)

    def save(self, name: str, result: Any, seconds: float) -> None:
        """Writes down what a job gave; whole or not at all."""
        with atomic_write(self._row(name)) as file:
            file.write((json.dumps({"seconds": round(seconds, 6), "result": result}, indent=1) + "\n").encode())

    def fail(self, name: str, error: str) -> None:
        """Writes down that a job failed, and why."""
        with atomic_write(self.error_file(name)) as file:
            file.write(error.encode())

    def is_done(self, name: str) -> bool:
        """Tells whether a job has a result."""
        return self._row(name).exists()

    def read(self, name: str) -> Record:
        """Returns what a finished job gave."""
        content = json.loads(self._row(name).read_text(encoding="utf-8"))
        if isinstance(content, list):  # of version 0.1: the rows of a run of recall
            return Record(content, None)
        return Record(content["result"], content["seconds"])

    def error(self, name: str) -> str | None:
        """Returns the last line that is not empty of what a failed job said; None for one that did not fail."""
        file = self.error_file(name)
        return file.read_text(encoding="utf-8").rstrip().splitlines()[-1] if file.exists() else None

    def error_file(self, name: str) -> Path:
        """Returns where the error of a job stands if it failed."""
        return self.folder / "errors" / f"{name}.txt"

    def begin(self, worker: int, name: str) -> None:
        """Writes down what a worker is at, for the error of one that dies."""
        self._worker(worker).write_text(name, encoding="utf-8")

    def last_of(self, worker: int) -> str | None:
        """Returns the job that a worker began last if it has not ended; None where there is none."""
        file = self._worker(worker)
        name = file.read_text(encoding="utf-8") if file.exists() else ""
        return name if name and not self.is_done(name) and self.error(name) is None else None

    def _row(self, name: str) -> Path:
        return self.folder / "rows" / f"{name}.json"

    def _worker(self, worker: int) -> Path:
        return self.folder / "workers" / str(worker)
