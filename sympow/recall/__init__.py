"""Associative recall: training of models in runs and sweeps, and figures of the results."""

from sympow.recall.config import Architecture, RecallConfig, Sweep, grid
from sympow.recall.figures import draw_figures
from sympow.recall.own_task import OwnTask
from sympow.recall.results import chosen, read_results, summary, write_results
from sympow.recall.run import run
from sympow.recall.sweep import run_sweep

__all__ = [
    "Architecture",
    "OwnTask",
    "RecallConfig",
    "Sweep",
    "chosen",
    "draw_figures",
    "grid",
    "read_results",
    "run",
    "run_sweep",
    "summary",
    "write_results",
]
