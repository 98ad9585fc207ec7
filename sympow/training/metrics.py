"""Writes the metrics of a run to a file of JSON lines, to TensorBoard if it is installed, and to a tracker."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sympow.files import naming, parsed_json, write_text
from sympow.training.config import RunConfig
from sympow.training.trackers import open_tracker


class MetricsWriter:
    """Appends metrics to `metrics.jsonl`, one object per line, and to `tensorboard/` if TensorBoard is installed.

    A run that continues from `step` first removes the metrics of later steps, which an interrupted run has written. So
    no step occurs twice.

    Args:
        run_dir: the folder of the run.
        step: the number of steps done.
        tracked: the config of the run, to send the metrics to its `execution.tracker` as well; None: do not send them.

    Raises ImportError if the package of the tracker is not installed.
    """

    def __init__(self, run_dir: Path, step: int, tracked: RunConfig | None = None):
        self._tracker = self._board = None
        if tracked is not None and tracked.execution.tracker is not None:
            service = tracked.execution.tracker
            self._tracker = open_tracker(service, tracked.name, tracked.to_dict(), run_dir.resolve())
        self._path, board = run_dir / "metrics.jsonl", run_dir / "tensorboard"
        lines = [json.dumps(row) for row in read_metrics(run_dir) if row["step"] <= step]
        write_text(self._path, "".join(f"{line}\n" for line in lines))
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        with naming(board), suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(board), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Writes metrics; "step" is the number of steps after which the other values were measured."""
        with naming(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        for name, value in row.items():
            if name != "step" and self._board is not None:
                self._board.add_scalar(name, value, row["step"])
        if self._tracker is not None:
            self._tracker.log(row, step=row["step"])

    def sync(self) -> None:
        """Writes the metrics to disk, so that a checkpoint is never newer than its metrics."""
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Closes the file, TensorBoard and the tracker."""
        with naming(self._path):
            self._file.close()  # which writes once more what did not fit
        if self._board is not None:
            self._board.close()
        if self._tracker is not None:
            self._tracker.finish()


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the rows of a run's `metrics.jsonl`, without a last line that was cut short; none without a file."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        rows = [parsed_json(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is not a file of JSON lines: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path} is no file of metrics: line {number} has no step")
    return rows
