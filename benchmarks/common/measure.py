"""Measures time and memory, and keeps rows of results. All benchmarks use these functions and options.

Functions import what they need of `sympow`, so that `benchmarks.compare` can time versions that do not have it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.code_hash import PARTS, code_hash

TEXTS = ("commit", "code", "corpus", "torch")  # columns of text that may look like a number


def milliseconds(
    calls: Sequence[Callable[[], object]], device: str, *, rounds: int = 7, least: float = 0.3
) -> list[float]:
    """Returns the median time of each call, in milliseconds.

    All calls are timed in every round, so that a machine that slows down or speeds up over minutes does so for all of
    them, and their ratios stay right. Each round has another order, because the call after one that heats the GPU takes
    longer. In a round a call is repeated for `least` seconds; one round before the first warms up.
    """

    def timed(call: Callable[[], object]) -> float:
        if device == "cuda":
            return _gpu_milliseconds(call)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    for call in calls:
        timed(call)
    repeats = [max(1, min(50, int(least * 1e3 / timed(call)))) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(rounds):
        for i in order.sample(range(len(calls)), len(calls)):
            times[i] += [timed(calls[i]) for _ in range(repeats[i])]
    return [statistics.median(kept) for kept in times]


def _gpu_milliseconds(call: Callable[[], object]) -> float:
    """Times a call by events around it, after a write of more than the L2 holds, so that inputs come from memory."""
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda").zero_()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """Returns the call as a CUDA graph, for short calls, whose time would otherwise be that of launching."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    gc.collect()  # a graph that is freed while this one is captured would end the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Callable[[], object]) -> None:
    """Runs the graph. `call` is an argument because the graph reads its tensors, and does not keep them alive."""
    graph.replay()


def kernel_milliseconds(call: Callable[[], object], repeats: int = 3) -> dict[str, float]:
    """Returns the time of every kernel on the GPU in one call, over all its launches, by the kernel's name, from the
    profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    on_gpu = [x for x in profiler.key_averages() if x.device_type == torch.autograd.DeviceType.CUDA]
    if not on_gpu:
        raise RuntimeError("the profiler saw no kernel on the GPU")
    return {x.key: x.self_device_time_total / repeats / 1e3 for x in on_gpu}


def gpu_peak_extra_bytes(call: Callable[[], list[torch.Tensor]]) -> int:
    """Returns the peak of memory during a call, less what was allocated before and what the call returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in kept)


def peak_extra_bytes(call: Callable[[], list[torch.Tensor]]) -> int:
    """Returns the peak memory of the process in a call, without memory in use before and without the results.

    It works for CPU tensors on Linux only. The process should be new, because memory that an earlier call has freed can
    be used again without a change of the peak.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _status("VmRSS")
    kept = call()
    return _status("VmHWM") - before - sum(x.nbytes for x in kept)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def synchronize(device: str) -> None:
    """Waits until a GPU has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def commit(folder: Path = Path(__file__).parent) -> str:
    """Returns the commit of a folder, by default the one that is measured; with a + if files differ from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], capture_output=True, text=True, cwd=folder).stdout.strip()

    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "-uno") else "")


def measured(device: str) -> dict[str, str | None]:
    """Returns the fields of every row of results that describe the device and the code. `tables --stale` compares
    them."""
    about = {"processor": processor(device), "commit": commit(), "code": code_hash(PARTS[device])}
    return about | {"torch": torch.__version__}


def processor(device: str) -> str:
    """Returns the device by name, and for a CPU how many threads were used."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = [
        x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")
    ]
    threads = torch.get_num_threads()
    return f"{names[0] if names else 'CPU'}, {threads} thread{'' if threads == 1 else 's'}"


def options(module: str, doc: str) -> argparse.ArgumentParser:
    """Returns the options of every command that times something here; `doc` is its module's docstring."""
    from sympow.cli.options import positive

    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc.splitlines()[0])
    parser.add_argument("--device", type=_device, choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads, for all that is timed (default: 2)")
    parser.add_argument("--csv", type=csv_file, required=True, help="file the rows are written to")
    return parser


def refuses(main: Callable[[], int | None]) -> Callable[[], int]:
    """Makes a command print an error in one line and return 2, for an input or a place that it cannot use."""

    @wraps(main)
    def call() -> int:
        try:
            return main() or 0
        except (ValueError, TypeError, OSError, ImportError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return call


def csv_file(name: str, columns: Sequence[str] = ("processor", "commit")) -> Path:
    """Returns the path of a file for rows, as a type of argparse, which refuses it before anything is timed.

    A file is refused that exists and is no table with these columns, which tables of benchmarks have. So are a folder,
    a file in a folder that does not exist, and a device, in whose place there would be a file.
    """
    from sympow.cli.result_files import check_table

    try:
        check_table(name, columns)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if Path(name).exists() and not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name} is no regular file")
    return Path(name)


def _device(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("cuda needs a GPU, and torch finds none")
    return name


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as CSV, a line for each row and a column for every name in any of them, whole or not at all.

    None is an empty cell, and so is a name that a row lacks. Lists and dicts are JSON. So is a text that `read` would
    take for another value, such as "1e5", and one with line breaks.
    """
    from sympow.recall.results import write_results

    write_results(path, [{name: _cell(name, value) for name, value in row.items()} for row in rows])


def keep(path: Path, rows: Iterable[Mapping[str, Any]], shown: Callable[[Any], str] = str) -> list[dict[str, Any]]:
    """Writes and prints every row when it comes, so that a command that is stopped keeps what it has; returns all."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        kept.append(dict(row))
        write(path, kept)
        print(shown(row), flush=True)
    return kept


def known(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file; none where there is no file."""
    return read(path) if path.is_file() else []


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of `write`, or of `sympow.recall.write_results`; ValueError for another file.

    Every row has all columns of the file. Cells of the columns TEXTS are text, whatever they look like. "1 threads", as
    earlier versions wrote it, is read as "1 thread".
    """
    from sympow.recall.results import read_cells

    rows = [{name: _value(name, text) for name, text in row.items()} for row in read_cells(path)]
    for row in rows:
        if str(row.get("processor")).endswith(", 1 threads"):
            row["processor"] = row["processor"].removesuffix("s")
    return rows


def _cell(name: str, value: Any) -> Any:
    """Returns what the cell of a value holds."""
    if isinstance(value, str):
        plain = value and value.isprintable() and _value(name, value) == value
        return value if plain else json.dumps(value)
    return value if value is None or isinstance(value, bool) else json.dumps(value)


def _value(name: str, text: str) -> Any:
    """Returns the value of a cell."""
    from sympow.recall.results import cell_value

    if name in TEXTS and not text.startswith('"'):
        return text or None
    try:
        return json.loads(text)
    except ValueError:
        return cell_value(text)
