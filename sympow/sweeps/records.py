"""The folder of a sweep: a file for each finished job, a file for each failed job, and the claims of workers."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from sympow.fields import is_number
from sympow.files import parsed_json, write_text
from sympow.locks import claim

_FOLDERS = ("rows", "claims", "errors", "workers")
REMEDY = "; remove the file to run the job again"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")  # the line of a traceback that names the exception


class Record(NamedTuple):
    """Holds the result of a job in JSON values, and its seconds."""

    result: Any
    seconds: float


class Records:
    """Reads and writes the folder of a sweep. The name of a job must be a valid file name.

    Args:
        folder: the folder of the sweep.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def open(self) -> None:
        """Makes the folder, and removes the errors of an earlier call, so that failed jobs are tried again."""
        for name in _FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for file in (self.folder / "errors").glob("[!.]*"):  # not what another launcher is writing
            file.unlink(missing_ok=True)

    def claim(self, name: str) -> AbstractContextManager[bool]:
        """Returns a context that tells whether no other process holds the claim; see `claim`."""
        return claim(self.folder / "claims" / name)

    def save(self, name: str, result: Any, seconds: float) -> None:
        """Writes the result of a job atomically."""
        write_text(self.row_file(name), json.dumps({"seconds": round(seconds, 6), "result": result}, indent=1) + "\n")

    def fail(self, name: str, error: str) -> None:
        """Writes the error of a job that failed."""
        write_text(self.error_file(name), error)

    def is_done(self, name: str) -> bool:
        """Tells whether a job has a result."""
        return self.row_file(name).exists()

    def read(self, name: str) -> Record:
        """Returns the record of a finished job. Raises ValueError, which names the file, if it holds no record."""
        file = self.row_file(name)
        try:
            content = parsed_json(file.read_text(encoding="utf-8"))
        except ValueError as error:  # also of text that is not UTF-8
            raise ValueError(f"{file} is no record of a sweep: {error}{REMEDY}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{file} is no record of a sweep: expected an object, got {content!r:.40}{REMEDY}")
        missing = [field for field in Record._fields if field not in content]
        if missing:
            raise ValueError(f"{file} is no record of a sweep: it has no {missing[0]!r}{REMEDY}")
        seconds = content["seconds"]
        if not is_number(seconds):
            raise ValueError(f"{file} is no record of a sweep: its seconds are {seconds!r:.40}{REMEDY}")
        return Record(content["result"], float(seconds))

    def error(self, name: str) -> str | None:
        """Returns one line of a failed job's error, or None if the job did not fail.

        It is the line that names the exception. PyTorch adds lines of advice after this line. If no line names an
        exception, it is the last line that is not empty.
        """
        file = self.error_file(name)
        if not file.exists():
            return None
        lines = file.read_text(encoding="utf-8", errors="replace").rstrip().splitlines() or ["an unknown error"]
        return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])

    def error_file(self, name: str) -> Path:
        """Returns the path of the file that contains the error of a job if it failed."""
        return self.folder / "errors" / f"{name}.txt"

    def begin(self, worker: str, name: str) -> None:
        """Writes the name of the job that a worker starts, so that the job is known if the worker dies.

        worker: a name that no other worker has, also none of another launcher in this folder.
        """
        write_text(self._worker(worker), name)

    def end(self, worker: str) -> str | None:
        """Forgets a worker that has ended. Returns the job that it started last, or None if it started none."""
        file = self._worker(worker)
        name = file.read_text(encoding="utf-8") if file.exists() else ""
        file.unlink(missing_ok=True)
        return name or None

    def has_ended(self, name: str) -> bool:
        """Tells whether a job has a result or an error."""
        return self.is_done(name) or self.error(name) is not None

    def row_file(self, name: str) -> Path:
        """Returns the path of the file that contains the record of a job if it finished."""
        return self.folder / "rows" / f"{name}.json"

    def _worker(self, worker: str) -> Path:
        return self.folder / "workers" / worker
