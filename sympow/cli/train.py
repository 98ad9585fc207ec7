"""Trains models: `sympow train` and `sympow demo`."""

from __future__ import annotations

import argparse
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sympow.cli.options import AddCommand, ListRecipes, Refuse, add_fields, add_path

if TYPE_CHECKING:
    from sympow.training import RunConfig

_TRAIN = """Trains the model of a recipe, or continues from the newest checkpoint in the run's folder. A recipe is a
Python function that returns a RunConfig; key=value sets a field of the RunConfig. Ctrl-C saves a checkpoint and ends
the run after the current step; the same command continues the run."""

_DEMO = """Trains a small model with power attention and the same model with softmax attention on the source of Python's
standard library, evaluates both at four times the context they were trained on, draws the curves, and generates a
text. Steps that are finished already are not repeated."""


def add(command: AddCommand) -> None:
    """Adds the commands to the parser."""
    train = command("train", "Train the model of a recipe, or continue its run.", _TRAIN)
    train.set_defaults(recipes=("RunConfig",))
    train.add_argument("--list", nargs=0, action=ListRecipes, help="List the recipes and exit.")
    train.add_argument("recipe", metavar="RECIPE", nargs="?",
                       help="Run this recipe: demo:softmax, path/to/file.py:function or module:function. "
                            "It is optional with --from.")  # fmt: skip
    add_fields(train, "overrides", "Set a field of the recipe's config, such as training.learning_rate=1e-3.")
    add_path(train, "--from", "RUN",
             "Begin with the weights of this run or checkpoint, and without a recipe with its "
             "config.", dest="start")  # fmt: skip
    add_path(train, "--out", "DIR", "Write the run into this folder (default: runs/NAME, with the run's name).")
    train.add_argument("--restart", action="store_true", help="First remove the files of an earlier run in the folder.")
    train.add_argument("--quiet", action="store_true", help="Print the last line only, without progress.")
    train.set_defaults(execute=run_train, rest="overrides", check=_find_recipe)

    demo = command("demo", "Train two small models, compare them, and continue a text with one.", _DEMO)
    add_path(demo, "--out", "DIR", "Write the runs into this folder (default: runs/demo).", default="runs/demo")
    demo.add_argument("--quiet", action="store_true", help="Show no progress.")
    demo.set_defaults(execute=run_demo)


def _find_recipe(options: argparse.Namespace, refuse: Refuse) -> None:
    """Takes the recipe from the positional arguments, wherever options stand between them."""
    words = [*([] if options.recipe is None else [options.recipe]), *options.overrides]
    options.recipe = words.pop(0) if words and "=" not in words[0] else None
    options.overrides = words
    if options.recipe is None and options.start is None:
        refuse("the following arguments are required: RECIPE")


def run_train(options: argparse.Namespace) -> int | None:
    """Runs `sympow train`."""
    from sympow.cli.run_checks import check_bpe, check_given, check_held_out
    from sympow.recipes import load_recipe
    from sympow.training import fine_tuning_run, override
    from sympow.training.run_folder import folder_of
    from sympow.training.runs import saved_tokenizer

    config = fine_tuning_run(options.start) if options.recipe is None else load_recipe(options.recipe)
    if options.start is not None:
        check_given(options.overrides, {"start": "--from"})
        check_bpe(saved_tokenizer(folder_of(options.start)), options.start, options.overrides, "data.")
        config = replace(config, start=str(Path(options.start)))
    config = override(config, options.overrides)
    check_held_out(config.data, options.overrides, "data.")
    folder = Path(options.out or f"runs/{config.name}")
    return run_training(config, folder, options.quiet, options.restart)


def run_demo(options: argparse.Namespace) -> int | None:
    """Runs `sympow demo`: trains the recipes in `recipes/demo.py`, compares them, generates a text with the first."""
    from sympow.cli.generated_text import write_text
    from sympow.cli.measure import evaluate_runs, load_runs, print_curves
    from sympow.cli.result_files import image_types
    from sympow.evaluation import plot_context_losses, write_csv
    from sympow.recipes import load_recipe
    from sympow.training.devices import resolve_device

    image_types()  # raises without matplotlib, before the training
    folder = Path(options.out)
    folders = []
    for name in ("power", "softmax"):
        config = load_recipe(f"demo:{name}")
        folders.append(folder / config.name)
        code = run_training(config, folders[-1], options.quiet)
        if code:
            return code
    runs = load_runs([str(each) for each in folders], resolve_device("auto"), None)
    context = 4 * max(run.config.training.context for run in runs.values())
    curves = evaluate_runs(runs, context, rows=16, quiet=options.quiet)
    print_curves(curves)
    write_csv(folder / "context_loss.csv", curves)
    plot_context_losses(curves, folder / "context_loss.png")
    print(f"drawn: {folder / 'context_loss.png'}\n")
    write_text(next(iter(runs.values())), "def main(", 128, temperature=0.8, top_p=0.95)
    return None


def run_training(config: RunConfig, folder: Path, quiet: bool, restart: bool = False) -> int | None:
    """Trains or distills a run, and prints how it ended. Returns the exit code of the command."""
    from sympow import training
    from sympow.conversion import distill as distill_run
    from sympow.training.ranks import is_main

    do = training.run if config.distillation is None else distill_run
    result = do(config, folder, quiet=quiet, restart=restart)
    if result.stopped_by:
        line = (
            f"stopped by {result.stopped_by} at step {result.step} of {result.steps}, checkpoint saved; "
            "the same command continues"
        )
    elif result.loss is None:
        line = f"{folder} has finished already, at step {result.step} of {result.steps}"
    else:
        line = f"finished at step {result.step} of {result.steps}, loss {result.loss:.4f}: {folder}"
    if is_main():
        print(line)
    return 128 + signal.Signals[result.stopped_by] if result.stopped_by else None
