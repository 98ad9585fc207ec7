"""Sweeps: runs shared out among processes that may be killed at any moment, and their rows in one file."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sympow.progress import Progress
from sympow.recall.config import RecallConfig, Sweep
from sympow.recall.results import write_results
from sympow.recall.run import run
from sympow.recall.steps import shape_key
from sympow.training.checkpoint import atomic_write
from sympow.training.claim import claim
from sympow.training.config import unknown

EXECUTORS = ("submitit", "slurm", "process")
RESULTS = "results.csv"

_ROWS, _CLAIMS, _ERRORS = "rows", "claims", "errors"
_NO_LIMIT = 60 * 24 * 365  # minutes; submitit's local jobs would else end after two


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
) -> list[dict[str, Any]]:
    """Runs what is missing of a sweep, and returns all its rows, which are also in `folder`/results.csv.

    A finished run leaves its rows in the folder and is never repeated there; an interrupted one starts anew. So a sweep
    can be killed and given again, also with more runs in it. `jobs` workers take the runs one after another, model by
    model, the longest first; on one machine they share its GPUs.

    Args:
        executor: "submitit": local jobs of submitit; "slurm": the same as an array of Slurm, on a file system that all
            nodes share, with locks; "process": processes of this one alone, without submitit. A sweep of one run, or
            with one job of "process", runs in this process.
        jobs: workers.
        device, compiled, cuda_graphs: as for `run`.
        slurm: parameters of submitit's executor, such as {"timeout_min": 60, "slurm_partition": "gpu"}.
        quiet: no progress on stderr.

    Raises RuntimeError where runs failed, after all others were run; the folder holds their errors.
    """
    if executor not in EXECUTORS:
        raise ValueError(unknown("executor", executor, EXECUTORS))
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    if slurm and executor != "slurm":
        raise ValueError(f"parameters of Slurm are for the executor slurm; got {executor!r}")
    folder = Path(folder).absolute()
    for name in (_ROWS, _CLAIMS, _ERRORS):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for error in (folder / _ERRORS).iterdir():
        error.unlink()
    missing = [config for config in sweep.runs if not _row_file(folder, config).exists()]
    missing.sort(key=_cost, reverse=True)
    jobs = max(1, min(jobs, len(missing)))
    options = {"device": device, "compiled": compiled, "cuda_graphs": cuda_graphs, "workers": jobs}
    try:
        if len(missing) > 1 and (jobs > 1 or executor != "process"):
            start = {"process": _processes, "submitit": _local_jobs, "slurm": _slurm_jobs}[executor]
            _wait(start(missing, folder, jobs, options, slurm or {}), sweep, folder, quiet)
        else:
            _work_here(missing, folder, quiet, options)
    finally:  # also of a sweep that is interrupted
        rows = collect(sweep, folder)
        if rows:
            write_results(folder / RESULTS, rows)
    failed = [config.id for config in sweep.runs if not _row_file(folder, config).exists()]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(sweep.runs)} runs did not finish: {_first_error(folder, failed)}")
    return rows


def collect(sweep: Sweep, folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of the runs that have finished, in the order of the sweep."""
    files = (_row_file(Path(folder), config) for config in sweep.runs)
    return [row for file in files if file.exists() for row in json.loads(file.read_text(encoding="utf-8"))]


def work(
    runs: Sequence[RecallConfig],
    folder: Path,
    worker: int,
    *,
    device: str,
    compiled: bool,
    cuda_graphs: bool,
    workers: int,
) -> None:
    """Runs what nobody has run or is running; the whole of a worker process."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    if compiled and device != "cpu" and torch.cuda.is_available():
        import torch._inductor.config as inductor

        inductor.compile_threads = threads  # each worker would start a process a core
    if device in ("auto", "cuda") and torch.cuda.device_count() > 1:
        device = f"cuda:{worker % torch.cuda.device_count()}"
    _run_unclaimed(runs, folder, lambda _: None, device=device, compiled=compiled, cuda_graphs=cuda_graphs)


def _run_unclaimed(
    runs: Sequence[RecallConfig], folder: Path, done: Callable[[RecallConfig], object], **options: Any
) -> None:
    """All runs of a model, which is compiled once in a process, before those of another; then what others hold."""
    groups: dict[str, list[RecallConfig]] = {}
    for config in runs:
        groups.setdefault(shape_key(config), []).append(config)
    for key, group in groups.items():
        with claim(folder / _CLAIMS / f"model-{hashlib.sha256(key.encode()).hexdigest()[:16]}") as ours:
            for config in group if ours else ():
                _run_if_unclaimed(config, folder, done, options)
    for config in runs:
        _run_if_unclaimed(config, folder, done, options)


def _run_if_unclaimed(
    config: RecallConfig, folder: Path, done: Callable[[RecallConfig], object], options: Mapping[str, Any]
) -> None:
    with claim(folder / _CLAIMS / config.id) as ours:
        if not ours or _row_file(folder, config).exists() or _error_file(folder, config.id).exists():
            return
        try:
            rows = run(config, **options)
        except Exception:  # the others go on; the sweep tells at its end
            _error_file(folder, config.id).write_text(traceback.format_exc(), encoding="utf-8")
            return
        with atomic_write(_row_file(folder, config)) as file:
            file.write((json.dumps(rows, indent=1) + "\n").encode())
    done(config)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # others share the GPU


def _work_here(runs: Sequence[RecallConfig], folder: Path, quiet: bool, options: Mapping[str, Any]) -> None:
    with Progress("sweep", "run", total=len(runs), quiet=quiet or len(runs) < 2) as progress:  # a single one tells more
        own = {name: option for name, option in options.items() if name != "workers"}
        _run_unclaimed(runs, folder, lambda _: progress.advance(), **own, quiet=quiet or len(runs) > 1)


Alive = Callable[[], bool]
Stop = Callable[[], None]


def _processes(
    runs: Sequence[RecallConfig], folder: Path, jobs: int, options: Mapping[str, Any], slurm: Mapping[str, Any]
) -> tuple[Alive, Stop]:
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    started = [context.Process(target=work, args=(runs, folder, i), kwargs=options, daemon=True) for i in range(jobs)]
    for process in started:
        process.start()

    def stop() -> None:
        for process in started:
            process.terminate()

    return lambda: any(process.is_alive() for process in started), stop


def _local_jobs(
    runs: Sequence[RecallConfig], folder: Path, jobs: int, options: Mapping[str, Any], slurm: Mapping[str, Any]
) -> tuple[Alive, Stop]:
    executor = _submitit().LocalExecutor(folder / "submitit")
    executor.update_parameters(timeout_min=_NO_LIMIT, **_visible_gpus())
    started = [executor.submit(work, runs, folder, i, **options) for i in range(jobs)]

    def stop() -> None:
        for job in started:
            job.cancel()

    return lambda: not all(job.done() for job in started), stop


def _visible_gpus() -> dict[str, Any]:
    """The GPUs this process sees, as submitit, which sets CUDA_VISIBLE_DEVICES anew, wants to be told."""
    count, listed = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not listed or not count:
        return {"gpus_per_node": count}
    try:
        return {"gpus_per_node": count, "visible_gpus": [int(number) for number in listed.split(",")]}
    except ValueError:
        raise ValueError(
            f"submitit takes GPUs by number, CUDA_VISIBLE_DEVICES is {listed!r}: use the executor process"
        ) from None


def _slurm_jobs(
    runs: Sequence[RecallConfig], folder: Path, jobs: int, options: Mapping[str, Any], slurm: Mapping[str, Any]
) -> tuple[Alive, Stop]:
    executor = _submitit().AutoExecutor(folder / "submitit", cluster="slurm")
    executor.update_parameters(**slurm)
    with executor.batch():
        started = [executor.submit(work, runs, folder, 0, **{**options, "workers": 1}) for _ in range(jobs)]
    # They stay in the queue when this process ends: the same command, given later, collects.
    return lambda: not all(job.done() for job in started), lambda: None


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ImportError(
            "sweeps in local jobs and on Slurm need submitit: pip install 'sympow[sweep]'; "
            "the executor process does without"
        ) from error
    return submitit


def _wait(started: tuple[Alive, Stop], sweep: Sweep, folder: Path, quiet: bool) -> None:
    """Until no worker is alive; an interruption of the sweep stops them."""
    alive, stop = started
    seen = done = sum(_row_file(folder, config).exists() for config in sweep.runs)
    try:
        with Progress("sweep", "run", total=len(sweep.runs), done=done, quiet=quiet) as progress:
            while True:
                working = alive()  # before counting, so that the last rows are counted
                seen, done = done, sum(_row_file(folder, config).exists() for config in sweep.runs)
                progress.advance(done - seen)
                if not working:
                    return
                time.sleep(0.5)
    except BaseException:
        stop()
        raise


def _row_file(folder: Path, config: RecallConfig) -> Path:
    return folder / _ROWS / f"{config.id}.json"


def _error_file(folder: Path, run_id: str) -> Path:
    return folder / _ERRORS / f"{run_id}.txt"


def _cost(config: RecallConfig) -> int:
    """About what a run costs, to begin with the longest."""
    tokens = sum(task.length for task in config.train) * config.examples // len(config.train)
    return config.epochs * tokens * config.width * config.architecture.layers


def _first_error(folder: Path, failed: Sequence[str]) -> str:
    for name in failed:
        file = _error_file(folder, name)
        if file.exists():
            return f"{name}: {file.read_text(encoding='utf-8').splitlines()[-1]} ({file})"
    return f"{failed[0]} was interrupted; the same command continues"
