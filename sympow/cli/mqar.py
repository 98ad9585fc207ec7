"""Associative recall: `sympow mqar` and `sympow mqar-figures`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sympow.cli.options import DEVICE, AddCommand, ListRecipes, add_fields, add_number, add_path

_MQAR = """Trains models on multi-query associative recall and reports how many queries they answer. A recipe is a
Python function that returns a RecallConfig, or a Sweep of them. Results go to results.csv in the sweep's folder; the
same command continues a sweep that was stopped, and repeats no run that has finished."""

_MQAR_FIGURES = """Draws accuracy against width, pairs, heads, state size and learning rate, and the number of pairs
against the state size. Figures for which the results have no data are left out."""


def add(command: AddCommand) -> None:
    """Adds the commands to the parser."""
    mqar = command("mqar", "Train on associative recall: one run, or a sweep.", _MQAR)
    mqar.set_defaults(recipes=("RecallConfig", "Sweep"))
    mqar.add_argument("--list", nargs=0, action=ListRecipes, help="List the recipes and exit.")
    mqar.add_argument("recipe", metavar="RECIPE",
                      help="Run this recipe: mqar:attention, mqar:widths or path/to/file.py:function.")  # fmt: skip
    add_fields(mqar, "overrides", "Set a field of every run, such as learning_rate=1e-3.")
    add_path(mqar, "--out", "DIR", "Write results into this folder (default: runs/NAME, with the sweep's name).")
    add_number(mqar, "--jobs", "Do N runs at a time.", 1)
    executors = ("submitit", "slurm", "process")
    mqar.add_argument(
        "--executor",
        choices=executors,
        default="submitit",
        help="Run a sweep in local jobs of submitit, in jobs on Slurm, or in child processes (default: submitit).",
    )
    add_fields(mqar, "--slurm", "Set a parameter of the jobs, such as slurm_partition=gpu; may be repeated.")
    mqar.add_argument("--device", default="auto", help=DEVICE)
    mqar.add_argument("--no-compile", action="store_true", help="Train without torch.compile on GPUs.")
    mqar.add_argument("--no-cuda-graphs", action="store_true", help="Train without CUDA graphs; some mixers need this.")
    mqar.add_argument("--tracker", choices=("wandb", "mlflow", "comet_ml"),
                      help="Send every validation to this service as well.")  # fmt: skip
    mqar.add_argument("--quiet", action="store_true", help="Print the results only, without progress.")
    mqar.set_defaults(execute=run_mqar, rest="overrides")

    figures = command("mqar-figures", "Draw the figures of associative recall.", _MQAR_FIGURES)
    add_path(figures, "results", "RESULTS", "Read the results.csv of a sweep.", nargs="+")
    add_path(figures, "--out", "DIR", "Write the images into this folder.", required=True)
    figures.set_defaults(execute=run_mqar_figures, rest="results")


def run_mqar(options: argparse.Namespace) -> None:
    """Runs `sympow mqar`."""
    from sympow.recall import run_sweep, summary
    from sympow.recall.results import check_rows
    from sympow.recall.sweep import RESULTS
    from sympow.recipes import load_sweep
    from sympow.training.devices import resolve_device

    sweep = load_sweep(options.recipe).override(options.overrides)
    resolve_device(options.device)
    folder = Path(options.out or f"runs/{sweep.name}")
    try:
        rows = run_sweep(
            sweep,
            folder,
            executor=options.executor,
            jobs=options.jobs,
            device=options.device,
            compiled=not options.no_compile,
            cuda_graphs=not options.no_cuda_graphs,
            slurm=dict(_slurm_parameter(text) for text in options.slurm),
            quiet=options.quiet,
            tracker=options.tracker,
        )
    except KeyboardInterrupt:
        print("stopped; finished runs are kept, and the same command does the others", file=sys.stderr)
        raise
    check_rows(rows, folder / RESULTS)
    print(summary(rows))
    print(f"{len(sweep.runs)} {'run' if len(sweep.runs) == 1 else 'runs'}: {folder / RESULTS}")


def run_mqar_figures(options: argparse.Namespace) -> None:
    """Runs `sympow mqar-figures`."""
    from sympow.recall import draw_figures, read_results

    rows = [row for file in options.results for row in read_results(file)]
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for file in draw_figures(rows, folder):
        print(file)


def _slurm_parameter(text: str) -> tuple[str, int | str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"a parameter of Slurm is written key=value, got {text!r}")
    return key, int(value) if value.isdecimal() else value
