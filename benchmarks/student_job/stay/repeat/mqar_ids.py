"""Trains some runs of a recall sweep by their ids: mqar_ids.py RECIPE CSV [--compile] [--no-graphs] ID..."""
import os
import sys
from pathlib import Path
from shutil import copyfile

from benchmarks.common.measure import measured
from sympow.recall import Sweep, run_sweep
from sympow.recall.sweep import RESULTS
from sympow.recipes import load_sweep


def chosen(recipe: str, ids: list[str]) -> Sweep:
    sweep = load_sweep(recipe)
    if ids == ["@widths"]:  # the ids of this file are of an earlier config, the keys are those of these runs
        ids = [run.id for run in sweep.runs if run.architecture.label == "attention" and run.width == 64
               and run.train[0].length == 64 and run.learning_rate > 2e-3]
    if ids == ["@taylor"]:
        ids = [run.id for run in sweep.runs if "aylor" in run.architecture.label and (run.seed or not run.seed)]
    runs = tuple(run for run in sweep.runs if run.id in ids)
    if len(runs) != len(ids):
        raise SystemExit(f"{recipe} has {len(runs)} of the runs {ids}")
    return Sweep(sweep.name, runs)


def main() -> None:
    recipe, csv, *rest = sys.argv[1:]
    ids = [word for word in rest if not word.startswith("--")]
    sweep, device, folder = chosen(recipe, ids), os.environ.get("REPEAT_DEVICE", "cuda"), Path(csv).with_suffix(".runs")
    Path(csv).parent.mkdir(parents=True, exist_ok=True)
    if os.environ.get("REPEAT_TOY"):  # no repetition: to try the program out
        sweep = sweep.override(["examples=64", "validation_examples=32", "test_examples=32", "epochs=1"])
    rows = run_sweep(sweep, folder, executor="process", jobs=1, device=device, compiled="--compile" in rest,
                     cuda_graphs="--no-graphs" not in rest, quiet=True, about=measured(device))
    copyfile(folder / RESULTS, csv)
    for row in rows:
        print(row["run"], row["test"], row["test_accuracy"], row["steps"], row["seconds"], flush=True)


if __name__ == "__main__":
    main()
