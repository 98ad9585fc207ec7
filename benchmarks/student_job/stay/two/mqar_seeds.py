"""mqar_seeds.py RECIPE CSV ID SEEDS RATES: trains runs like ID with other seeds and rates (with commas)."""
import os, sys
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from benchmarks.common.measure import measured
from sympow.recall import Sweep, run_sweep
from sympow.recall.sweep import RESULTS
from sympow.recipes import load_sweep
recipe, csv, name, seeds, rates = sys.argv[1:6]
sweep = load_sweep(recipe)
one, = [run for run in sweep.runs if run.id == name]
runs = tuple(replace(one, seed=int(s), learning_rate=float(r)) for r in rates.split(",") for s in seeds.split(","))
folder = Path(csv).with_suffix(".runs"); Path(csv).parent.mkdir(parents=True, exist_ok=True)
sweep = Sweep(sweep.name, runs)
if os.environ.get("TOY"):
    sweep = sweep.override(["examples=64", "validation_examples=32", "test_examples=32", "epochs=1"])
device = "cpu" if os.environ.get("TOY") else "cuda"
for row in run_sweep(sweep, folder, executor="process", jobs=1, device=device, quiet=True, about=measured(device)):
    if row["test"].endswith((":64", ":32")):
        print(row["run"], row["test"], row["test_accuracy"], row["steps"], row["seconds"], flush=True)
copyfile(folder / RESULTS, csv)
