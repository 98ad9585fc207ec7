"""Writes the metrics of a run to a file of JSON lines, to TensorBoard, and to Weights & Biases."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sympow.files import naming, write_text
from sympow.training.config import RunConfig


class MetricsWriter:
    """Appends metrics to `metrics.jsonl`, one object per line, and to `tensorboard/`.

    A run that continues from `step` first removes the metrics of later steps, which an interrupted run has written. So
    no step occurs twice.

    Args:
        run_dir: the folder of the run.
        step: the number of steps done.
        tracked: the config of the run, to send the metrics to Weights & Biases as well; None: do not send them.

    Raises ImportError if a package is not installed.
    """

    def __init__(self, run_dir: Path, step: int, tracked: RunConfig | None = None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("training metrics need tensorboard: pip install 'sympow[train]'") from error
        self._tracker = _open_tracker(run_dir, tracked) if tracked else None
        self._path, board = run_dir / "metrics.jsonl", run_dir / "tensorboard"
        lines = [json.dumps(row) for row in read_metrics(run_dir) if row["step"] <= step]
        write_text(self._path, "".join(f"{line}\n" for line in lines))
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        with naming(board):
            self._board = SummaryWriter(str(board), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Writes metrics; "step" is the number of steps after which the other values were measured."""
        with naming(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])
        if self._tracker is not None:
            self._tracker.log(row, step=row["step"])

    def sync(self) -> None:
        """Writes the metrics to disk, so that a checkpoint is never newer than its metrics."""
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        """Closes the file, TensorBoard and the tracker."""
        with naming(self._path):
            self._file.close()  # which writes once more what did not fit
        self._board.close()
        if self._tracker is not None:
            self._tracker.finish()


def open_tracker(name: str, config: Mapping[str, Any], **options: Any) -> Any:
    """Opens a run of Weights & Biases in the project "sympow".

    Args:
        name: the name that is shown.
        config: the configuration of the run.
        options: further options of `wandb.init`.

    Raises ImportError where wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ImportError("the tracker 'wandb' needs wandb: pip install 'sympow[track]'") from error
    return wandb.init(project="sympow", name=name, config=dict(config), **options)


def _open_tracker(run_dir: Path, config: RunConfig) -> Any:
    folder = run_dir.resolve()
    # A folder has one id, so that a run that continues also continues in Weights & Biases.
    name = f"{config.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    return open_tracker(config.name, config.to_dict(), id=name, resume="allow", dir=folder)


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the rows of a run's `metrics.jsonl`, without a last line that was cut short; none without a file."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is not a file of JSON lines: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path} is no file of metrics: line {number} has no step")
    return rows
