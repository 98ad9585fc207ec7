"""A process that does jobs. What it does imports what it takes, so that this module costs a new process nothing."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

J = TypeVar("J")


class Work(Protocol[J]):
    """What workers do. It is sent to every one of them, so it is made of plain values."""

    def prepare(self, worker: int) -> Callable[[J], dict[str, Any]]:
        """Returns what does a job and gives its result; called once in every worker, with its number."""


class Worker(Generic[J]):
    """A process that does one job after another; the first jobs wait for what it prepares."""

    def __init__(self, work: Work[J], number: int):
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(work, number, theirs))
        self.process.start()  # no daemon: compilers start processes
        theirs.close()
        self.job: J | None = None
        self.begun = 0.0

    def give(self, job: J) -> None:
        self.job, self.begun = job, time.time()
        with suppress(OSError):  # a process that is gone; `result` tells
            self.connection.send(job)

    def result(self) -> dict[str, Any]:
        """Returns the result of its job, or {"error": ...} where it raised or where the process is gone."""
        self.job = None
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return {"error": f"the process ended with exit code {self.process.exitcode}"}

    def stop(self) -> None:
        """Ends the process, whatever it is at."""
        self.connection.close()
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def _serve(work: Work[J], number: int, connection: Connection) -> None:
    """The whole of a worker process; it ends with its launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which then terminates this
    do = None
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            do = do or work.prepare(number)
            result = do(job)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}
        connection.send(result)
