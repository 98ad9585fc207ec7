"""Training: the configuration of a run, the training loop, and checkpoints from which a run continues exactly."""

from sympow.training.checkpoint import Checkpoint, CheckpointError, latest, load_checkpoint, save_checkpoint
from sympow.training.config import DistillationConfig, ExecutionConfig, RunConfig, TrainingConfig
from sympow.training.loop import Objective
from sympow.training.metrics import read_metrics
from sympow.training.optimizer import make_optimizer
from sympow.training.overrides import override
from sympow.training.run_folder import load_model
from sympow.training.runs import Run, fine_tuning_run, load, run
from sympow.training.trainer import NonFiniteError, TrainingResult, train

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DistillationConfig",
    "ExecutionConfig",
    "NonFiniteError",
    "Objective",
    "Run",
    "RunConfig",
    "TrainingConfig",
    "TrainingResult",
    "fine_tuning_run",
    "latest",
    "load",
    "load_checkpoint",
    "load_model",
    "make_optimizer",
    "override",
    "read_metrics",
    "run",
    "save_checkpoint",
    "train",
]
