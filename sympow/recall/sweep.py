"""Sweeps of recall: runs shared out among processes that may be killed at any moment, and their rows in one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sympow.fields import unknown
from sympow.progress import Progress
from sympow.recall.config import RecallConfig, Sweep
from sympow.recall.results import group, write_results
from sympow.recall.run import run
from sympow.recall.steps import shape_key
from sympow.sweeps import EXECUTORS, Records, run_jobs
from sympow.sweeps.records import REMEDY

RESULTS = "results.csv"


def run_sweep(
    sweep: Sweep,
    folder: str | os.PathLike[str],
    *,
    executor: str = "submitit",
    jobs: int = 1,
    device: str = "auto",
    compiled: bool = True,
    cuda_graphs: bool = True,
    slurm: Mapping[str, Any] | None = None,
    quiet: bool = False,
    about: Mapping[str, Any] | None = None,
    tracker: str | None = None,
) -> list[dict[str, Any]]:
    """Does the missing runs of a sweep. Returns all rows of the sweep, which are also in `folder`/results.csv.

    results.csv is written again after every run. The folder keeps the rows of finished runs, which are never repeated;
    an interrupted run starts again. Therefore a sweep can be interrupted at any time and called again, also with more
    runs. `jobs` workers take the runs one after another, model by model, the longest first. Workers on one machine
    share its GPUs. See `sympow.sweeps.run_jobs`.

    Args:
        sweep: the runs.
        folder: where their rows and results.csv go.
        executor: where workers run. "submitit": in local jobs of submitit. "slurm": in a job array on Slurm; all nodes
            must share a file system with locks. "process": in child processes, without submitit. A sweep of one run,
            or with one worker and "process", runs in this process.
        jobs: the number of workers.
        device: as for `run`.
        compiled: as for `run`.
        cuda_graphs: as for `run`.
        slurm: parameters of submitit's executor, such as {"timeout_min": 60, "slurm_partition": "gpu"}.
        quiet: show no progress on stderr.
        about: further columns for the rows of runs of this call, such as a commit.
        tracker: as for `run`.

    Raises RuntimeError if runs failed, after all other runs are done. The folder contains the errors.
    """
    if executor not in EXECUTORS:
        raise ValueError(unknown("executor", executor, EXECUTORS))
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    if slurm and executor != "slurm":
        raise ValueError(f"parameters of Slurm are for the executor slurm; got {executor!r}")
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    records = Records(folder)
    missing = [config for config in sweep.runs if not records.is_done(config.id)]
    missing.sort(key=_cost, reverse=True)
    jobs = max(1, min(jobs, len(missing)))
    here = len(missing) < 2 or (jobs == 1 and executor == "process")
    sharing = None if here else 1 if executor == "slurm" else jobs
    alone = here and len(missing) == 1  # a single run tells more by itself
    work = _Run(device, compiled, cuda_graphs, sharing, quiet or not alone, dict(about or {}), tracker)
    total, silent = len(sweep.runs), quiet or len(missing) < 2
    try:
        with Progress("sweep", "run", total=total, done=total - len(missing), quiet=silent) as progress:
            for _ in run_jobs(
                {config.id: config for config in missing}, work, folder, executor=None if here else executor,
                workers=jobs, group=shape_key, slurm=slurm,
            ):  # fmt: skip
                progress.advance()
                _write(sweep, folder)
    finally:  # also of a sweep that is interrupted, or of which nothing is missing
        rows = _write(sweep, folder)
    failed = [config.id for config in sweep.runs if not records.is_done(config.id)]
    if failed:
        raise RuntimeError(f"{len(failed)} of {total} runs did not finish: {_first_error(records, failed)}")
    return rows


def collect(sweep: Sweep, folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Collects the rows of the runs that have finished, in the order of the sweep.

    Raises ValueError, which names the file, for a record that holds no rows of a run.
    """
    records = Records(Path(folder))
    rows: list[dict[str, Any]] = []
    for name in (config.id for config in sweep.runs if records.is_done(config.id)):
        result = records.read(name).result
        if not isinstance(result, list) or not all(isinstance(row, dict) for row in result):
            raise ValueError(f"{records.row_file(name)} holds no rows of a run: its result is {result!r:.40}{REMEDY}")
        rows += result
    return rows


def keep(rows: Iterable[Mapping[str, Any]], folder: str | os.PathLike[str]) -> None:
    """Writes rows of runs that finished elsewhere into the folder of a sweep, so that these runs are not repeated."""
    records = Records(Path(folder).absolute())
    records.open()
    for (name,), same in group(list(rows), "run").items():
        if not records.is_done(name):
            records.save(name, [dict(row) for row in same], same[0]["seconds"])


def _write(sweep: Sweep, folder: Path) -> list[dict[str, Any]]:
    """Writes the rows of the runs that have finished into one file, and returns them."""
    rows = collect(sweep, folder)
    if rows:
        write_results(folder / RESULTS, rows)
    return rows


@dataclass(frozen=True)
class _Run:
    """Describes the work of a sweep's workers. `workers` share the machine; None: this process is not a worker."""

    device: str
    compiled: bool
    cuda_graphs: bool
    workers: int | None
    quiet: bool
    about: Mapping[str, Any]
    tracker: str | None

    def prepare(self, worker: int) -> Callable[[RecallConfig], list[dict[str, Any]]]:
        device = self.device
        if self.workers is not None:
            threads = max(1, (os.cpu_count() or 1) // self.workers)
            torch.set_num_threads(threads)
            if self.compiled and device != "cpu" and torch.cuda.is_available():
                import torch._inductor.config as inductor

                inductor.compile_threads = threads  # each worker would start a process a core
            if device in ("auto", "cuda") and torch.cuda.device_count() > 1:
                device = f"cuda:{worker % torch.cuda.device_count()}"
        return partial(self._rows, device)

    def _rows(self, device: str, config: RecallConfig) -> list[dict[str, Any]]:
        """Returns the rows of a run on a device, with the further columns."""
        rows = run(config, device=device, compiled=self.compiled, cuda_graphs=self.cuda_graphs, quiet=self.quiet,
                   tracker=self.tracker)  # fmt: skip
        return [row | dict(self.about) for row in rows]


def _cost(config: RecallConfig) -> int:
    """Returns roughly what a run costs, so that the longest start first."""
    tokens = sum(task.length for task in config.train) * config.examples // len(config.train)
    return config.epochs * tokens * config.width * config.architecture.layers


def _first_error(records: Records, failed: list[str]) -> str:
    for name in failed:
        error = records.error(name)
        if error is not None:
            return f"{name}: {error} ({records.error_file(name)})"
    return f"{failed[0]} was interrupted; the same command continues"
