"""Starts the workers of a sweep in child processes, in local jobs of submitit, or on Slurm."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from sympow.locks import claim
from sympow.sweeps.records import Records
from sympow.sweeps.worker import Worker

EXECUTORS = ("submitit", "slurm", "process")

_NO_LIMIT = 60 * 24 * 365  # minutes; by default submitit's local jobs end after two
_LOOK = 0.25  # seconds between looks whether a launcher or a job is there
_FAILED = 75  # exit code of a worker in which a job failed; Python exits with 1 if it cannot start


class Team(Protocol):
    """Holds the workers of a sweep."""

    def works(self) -> bool:
        """Tells whether a worker is at work."""
        ...

    def stop(self) -> None:
        """Ends the workers, even while they do a job."""
        ...


class Presence:
    """Shows workers on this machine that their launcher is there. They end when `leave` is called, or it dies.

    The launcher holds a claim on a file, and the workers look whether they get it.

    Args:
        worker: the worker; `launcher` is set.
        records: the folder of the sweep.
    """

    def __init__(self, worker: Worker[Any], records: Records):
        worker.launcher = self._file = records.folder / "workers" / f"{secrets.token_hex(8)}.launcher"
        self._held = ExitStack()
        self._held.enter_context(claim(self._file))

    def leave(self) -> None:
        """Ends the workers, within about a second each."""
        self._held.close()
        self._file.unlink(missing_ok=True)


def end_with(launcher: Path | None) -> None:
    """Ends this process when its launcher leaves or dies, even in the middle of a job; None: it goes on without."""
    if launcher is not None:
        threading.Thread(target=_watch, args=(launcher,), name="launcher", daemon=True).start()


def _watch(launcher: Path) -> None:
    while launcher.exists():
        with claim(launcher) as gone:
            if gone:
                break
        time.sleep(_LOOK)
    os._exit(1)


class Processes:
    """Runs workers in child processes. A process that dies, or in which a job failed, is replaced by a new one.

    Args:
        worker: what each process runs; `ends_on_failure` is set.
        workers: the number of processes.
    """

    def __init__(self, worker: Worker[Any], workers: int):
        worker.ends_on_failure = True
        self._worker, self._records = worker, Records(worker.folder)
        self._presence = Presence(worker, self._records)
        # A process that is forked from one with CUDA cannot use CUDA. Therefore processes are forked from a server
        # that has never used it. The server imports torch once, which takes seconds. It also imports torch._dynamo,
        # which torch imports at the first step of an optimizer.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["sympow.sweeps.worker", "torch._dynamo"])
        self._notes = [""] * workers  # names under which the workers note the jobs that they start
        self._team = [self._start(number) for number in range(workers)]

    def works(self) -> bool:
        """Tells whether a process is at work. Processes that died, or in which a job failed, are replaced first."""
        for number, process in enumerate(self._team):
            if process.exitcode in (None, 0):
                continue
            last = self._records.end(self._notes[number])
            if last is not None and not self._records.has_ended(last):
                self._records.fail(last, f"the process ended with exit code {process.exitcode}")
            if last is not None or process.exitcode == _FAILED:  # one that started no job would end again
                self._team[number] = self._start(number)
        return any(process.is_alive() for process in self._team)

    def stop(self) -> None:
        """Ends the processes: by a signal, and by SIGKILL those that still run 10 seconds after it."""
        for process in self._team:
            process.terminate()
        for process in self._team:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._presence.leave()
        for note in self._notes:
            self._records.end(note)

    def _start(self, number: int) -> Any:
        self._notes[number] = note = secrets.token_hex(8)  # other launchers may work in the same folder
        # No daemon, because compilers start processes.
        process = self._context.Process(target=_work, args=(self._worker, number, note))
        process.start()
        return process


def _work(worker: Worker[Any], number: int, note: str) -> None:
    """Runs a worker in a child process; exits with code `_FAILED` if its last job failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which then terminates this
    end_with(worker.launcher)
    names = list(worker.run(number, note))
    if names and Records(worker.folder).error(names[-1]):
        raise SystemExit(_FAILED)


class Submitted:
    """Runs workers in jobs of submitit. A worker that dies is replaced by a new one.

    Args:
        worker: what each job runs; `notes` is set.
        submit: submits `drain` for a worker and a number.
        jobs: the jobs of the workers, by number.
        presence: ends the jobs when the sweep is stopped; None: they continue.
    """

    def __init__(
        self, worker: Worker[Any], submit: Callable[[Worker[Any], int], Any], jobs: list[Any], presence: Presence | None
    ):
        self._worker, self._submit, self._jobs, self._presence = worker, submit, jobs, presence
        self._records, self._ended = Records(worker.folder), set[int]()

    def works(self) -> bool:
        """Tells whether at least one job is not done. Workers that died, which leave a note, are replaced first."""
        for number, job in enumerate(self._jobs):
            if number in self._ended or not job.done():
                continue
            last = self._records.end(self._worker.note(number))
            if last is None:
                self._ended.add(number)
                continue
            if not self._records.has_ended(last):
                self._records.fail(last, f"the worker died in this job, its log is {job.paths.stderr}")
            self._jobs[number] = self._submit(self._worker, number)
        return len(self._ended) < len(self._jobs)

    def stop(self) -> None:
        """Stops the jobs, unless they continue, and waits for up to 10 seconds until they have ended."""
        if self._presence is None:
            return
        self._presence.leave()
        end = time.monotonic() + 10
        while not all(job.done() for job in self._jobs) and time.monotonic() < end:
            time.sleep(_LOOK)
        for number, job in enumerate(self._jobs):
            job.cancel()
            self._records.end(self._worker.note(number))


def start(executor: str, worker: Worker[Any], workers: int, slurm: Mapping[str, Any]) -> Team:
    """Starts workers. Raises ImportError if submitit is needed and is not installed.

    Args:
        executor: one of `EXECUTORS`.
        worker: the worker that each process or job runs.
        workers: the number of workers.
        slurm: the parameters of submitit's executor, for "slurm".
    """
    if executor == "process":
        return Processes(worker, workers)
    folder = worker.folder / "submitit"
    worker.notes = secrets.token_hex(8)  # other launchers may work in the same folder
    worker.paths = tuple(sys.path)
    if executor == "submitit":
        local = _submitit().LocalExecutor(folder)
        local.update_parameters(timeout_min=_NO_LIMIT, **visible_gpus())
        presence = Presence(worker, Records(worker.folder))
        submit = partial(local.submit, drain)
        return Submitted(worker, submit, [submit(worker, number) for number in range(workers)], presence)
    array = _submitit().AutoExecutor(folder, cluster="slurm")
    array.update_parameters(**slurm)
    submit = partial(array.submit, drain)
    with array.batch():
        jobs = [submit(worker, number) for number in range(workers)]
    return Submitted(worker, submit, jobs, presence=None)  # the same command, run later, collects the results


def drain(worker: Worker[Any], number: int) -> None:
    """Runs a worker to its end, and then removes its note: a note that stays tells that the worker died."""
    end_with(worker.launcher)
    sys.path += [path for path in worker.paths if path not in sys.path]
    for _ in worker.run(number, worker.note(number)):
        pass
    Records(worker.folder).end(worker.note(number))


def visible_gpus() -> dict[str, Any]:
    """Returns the GPUs of this process as parameters of submitit, which sets CUDA_VISIBLE_DEVICES for its jobs.

    Raises ValueError if CUDA_VISIBLE_DEVICES does not list GPUs by number.
    """
    count, listed = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not listed or not count:
        return {"gpus_per_node": count}
    try:
        return {"gpus_per_node": count, "visible_gpus": [int(number) for number in listed.split(",")]}
    except ValueError:
        raise ValueError(
            f"submitit takes GPUs by number, CUDA_VISIBLE_DEVICES is {listed!r}: use the executor process"
        ) from None


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ImportError(
            "sweeps in local jobs and on Slurm need submitit: pip install 'sympow[sweep]' "
            f"({error}); the executor process does without"
        ) from error
    return submitit
