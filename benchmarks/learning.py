"""Trains models by the optimizers of `sympow train`, and compares them with gated softmax attention.

    python -m benchmarks.learning run --grids rates,seeds --corpus FOLDER --out OUT --workers 8 --minutes 20 --compile
    python -m benchmarks.learning merge --from OUT

Corpus, model and measures are those of `benchmarks.context_scaling`. A finished run is a row of
benchmarks/results/learning.csv, so a grid can be completed in several calls. Losses by position are in
learning_positions.csv.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.context_scaling import cost
from benchmarks.context_scaling.data import name_of, read_documents
from benchmarks.context_scaling.grid import DOCUMENT, LONG, MIDDLE, SCALES, SHORT, Run, Scale
from benchmarks.context_scaling.work import DONE, FAILED, Trainer
from benchmarks.tables import RESULTS
from sympow.recall import write_results
from sympow.recall.results import read_rows
from sympow.sweeps import Estimates, run_jobs
from sympow.training import RunConfig
from sympow.training.step import resolve_device

TABLE, POSITIONS = RESULTS / "learning.csv", RESULTS / "learning_positions.csv"
CONTROL = "softmax_gate"
BILLION = 15_259 * DOCUMENT


@dataclass(frozen=True)
class LearningRun(Run):
    """Describes a run; the fields besides those of `Run` are `training.optimizer` and `training.muon_rate`."""

    optimizer: str = "muon"
    muon_rate: float = 1.0

    @property
    def name(self) -> str:
        """Returns the run in one word, different from that of any other run."""
        factor = f"x{self.muon_rate:g}" if self.muon_rate != 1 else ""
        return f"{super().name}-{self.optimizer}{factor}"

    def config(self, scale: Scale, corpus: Path, device: str = "auto", compiled: bool = False) -> RunConfig:
        """Returns the recipe with fields set, as `Run.config` does."""
        config = super().config(scale, corpus, device, compiled)
        training = replace(config.training, optimizer=self.optimizer, muon_rate=self.muon_rate)
        return replace(config, training=training)


KEY = tuple(field.name for field in fields(LearningRun))
COLUMNS = ("variant", "optimizer", "muon_rate", "learning_rate", "context", "tokens", "seed", "held_out_loss",
           "gate_softmax_loss", "gain", "best_loss", "best_context", "tokens_per_second", "processor", "documents",
           "row_tokens", "size", "status", "error", "parameters", "steps", "seconds", "peak_bytes", "compiled", "scale",
           "torch", "commit", "corpus")  # fmt: skip

BEST = 8e-3  # the best rate under Muon, by the grid "rates": that of all variants so far
SEEDS = (0, 1, 2)
MAIN = ("softmax_gate", "power", "power_delta")
# What the layer of the delta rule is compared with by its options.
SEARCH = (
    "power_delta+beta_bias=2", "power_delta+beta_bias=-2", "power_delta+beta_max=1.9", "power_delta+beta=1",
    "power_delta+beta=0.5", "power_delta+rotation=none", "power_delta+p=1", "power_delta+gate=false",
    "power_delta+p=3+head_dim=32+value_dim=64", "power_delta+p=4+head_dim=16+value_dim=64",
    "power_delta+short_convolution=0", "power+rotation=none", "power+p=4+head_dim=24+value_dim=64",
    "window_delta", "window_delta+window=64", "window_delta+window=512", "softmax_gate+rotation=none",
)  # fmt: skip


def runs(
    variants: tuple[str, ...], contexts: tuple[int, ...], tokens: int = SHORT, seeds: tuple[int, ...] = SEEDS,
    rates: tuple[float, ...] = (), optimizer: str = "muon",
) -> list[LearningRun]:  # fmt: skip
    """Returns the runs of all combinations, at the best rate of each variant unless rates are given."""
    return [
        LearningRun(variant, context, tokens, learning_rate=rate, seed=seed, optimizer=optimizer)
        for seed, context, variant in product(seeds, contexts, variants)
        for rate in rates or (BEST,)
    ]


GRIDS: dict[str, list[LearningRun]] = {
    "rates": runs(MAIN, (1024, 4096), seeds=(0,), rates=(2e-3, 4e-3, 8e-3, 1.6e-2)),
    "adamw": runs(MAIN, (1024, 4096), seeds=(0,), rates=(2e-3,), optimizer="adamw"),
    "seeds": runs(MAIN, (1024, 4096)),
    "search": runs(SEARCH, (1024, 4096), seeds=(0,)),
    "controls": runs(
        (
            "window",
            "window+window=2112",
            "softmax",
            "hybrid_power_gate",
            "hybrid_delta_gate",
            "hybrid_window_gate",
            "power+p=1",
        ),
        (4096,),
    ),
    "middle_rates": runs(MAIN, (4096,), MIDDLE, seeds=(0,), rates=(4e-3, 8e-3)),
    "middle": runs((*MAIN, "window", "hybrid_delta_gate", "hybrid_power_gate"), (4096,), MIDDLE),
    "middle_16384": runs((*MAIN, "window", "hybrid_delta_gate", "hybrid_power_gate"), (16_384,), MIDDLE),
    "middle_65536": runs((*MAIN, "window", "hybrid_delta_gate"), (65_536,), MIDDLE, seeds=(0,)),
    "long": runs(("power_delta", "softmax_gate", "power"), (4096,), LONG),
    # Claims of the papers. [SCRA] Table 4: equal states and FLOPs; Figures 3 and 1: linear attention beside a window of
    # equal state, and beside softmax attention at growing contexts; Figure 9 in the body of RWKV-7. [CST] Figure 1.
    "scra_states": [*runs(("softmax",), (1024,), MIDDLE), *runs(("window", "power"), (4096,), MIDDLE)],
    "scra_windows": runs(("body_linear", "body_window32"), (1024, 8192)),
    "scra_lengths": runs(("body_softmax", "body_linear"), (32, 1024, 8192)),
    "scra_bodies": runs(("body_power", "body_softmax", "body_window"), (65_536,)),
    "cst_contexts": runs(("published_p2", "published_p2_gated", "conformal_p2"), (1024, 4096, 16_384)),
    "based": runs(("based",), (1024, 4096)),
    "billion": runs(("power_delta", "softmax_gate"), (4096,), BILLION, seeds=(0,)),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="train what is missing")
    run.set_defaults(command=_run)
    run.add_argument("--grids", help=f"in order of priority, of {', '.join(GRIDS)}")
    run.add_argument("--names", help="instead of grids: variant:context:rate:seed:tokens:optimizer:muon_rate, ...")
    run.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    run.add_argument("--out", type=Path, required=True, help="folder of the tables that this command writes")
    run.add_argument("--workers", type=int, default=1, help="processes, dealt out over the GPUs (default: 1)")
    run.add_argument("--minutes", type=float, default=math.inf, help="give up what is not done after these")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--scale", choices=SCALES, default="full", help="toy: to try the program out")
    run.add_argument("--compile", action="store_true", help="run blocks through torch.compile")
    merge = commands.add_parser("merge", help="add finished rows to the committed tables")
    merge.set_defaults(command=_merge)
    merge.add_argument("--from", dest="source", type=Path, required=True, help="folder that run wrote")
    options = parser.parse_args()
    try:
        options.command(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    chosen = [_named(text) for text in options.names.split(",")] if options.names else []
    for name in options.grids.split(",") if options.grids else []:
        if name not in GRIDS:
            raise ValueError(f"a grid is one of {', '.join(GRIDS)}; got {name!r}")
        chosen += GRIDS[name]
    device = resolve_device(options.device).type
    corpus = name_of(read_documents(SCALES[options.scale], options.corpus).train)
    finished = {_run_of(row) for row in _rows(TABLE) if row["corpus"] == corpus and row["scale"] == options.scale}
    left = [run for run in dict.fromkeys(chosen) if run not in finished]
    print(f"{len(left)} of {len(set(chosen))} runs to do", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.workers)))
    trainer = Trainer(options.scale, options.corpus, device, options.compile)
    gpus = torch.cuda.device_count() if device == "cuda" else options.workers
    estimates = Estimates(cost.guess, cost.kind, max(1.0, 0.7 * options.workers / gpus) * 0.5)
    rows, positions, begun = [], [], time.time()
    for done in run_jobs(
        {run.name: run for run in left}, trainer, options.out / "jobs", workers=options.workers,
        minutes=options.minutes, estimates=estimates,
    ):  # fmt: skip
        run = done.job
        row = {name: getattr(run, name) for name in KEY} | {"scale": options.scale, "corpus": corpus}
        row |= {"status": FAILED, "error": done.error} if done.error else done.result["row"]
        rows.append(row)
        positions += [] if done.error else done.result["positions"]
        _write(options.out, rows, positions)
        said = f"held-out loss {row['held_out_loss']:.4f}" if row["status"] == DONE else row["error"]
        print(f"[{time.time() - begun:.0f} s] {run.name}: {said}, {row.get('tokens_per_second') or 0:,} tokens/s; "
              f"{len(rows)} of {len(left)}, about {done.left / 60:.1f} min left", flush=True)  # fmt: skip


def _named(text: str) -> LearningRun:
    values = text.split(":")
    kinds = (str, int, float, int, int, str, float)
    names = ("variant", "context", "learning_rate", "seed", "tokens", "optimizer", "muon_rate")
    return LearningRun(**{name: kind(value) for name, kind, value in zip(names, kinds, values, strict=False)})


def _merge(options: argparse.Namespace) -> None:
    old, new = _rows(TABLE), [row for row in _rows(options.source / TABLE.name) if row["status"] != FAILED]
    known = {(_run_of(row), row["corpus"], row["scale"]) for row in old}
    added = [row for row in new if (_run_of(row), row["corpus"], row["scale"]) not in known]
    rows = old + added
    names = {(_run_of(row).name, row["corpus"]) for row in added}
    positions = _rows(POSITIONS)
    positions += [row for row in _rows(options.source / POSITIONS.name) if (row["run"], row["corpus"]) in names]
    _write(RESULTS, rows, positions)
    print(f"{len(added)} runs added")


def with_controls(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each run the loss of gated softmax attention at its best rate, by optimizer, setting and seed."""

    def setting(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("optimizer", "context", "tokens", "documents", "corpus", "scale", "seed"))

    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["variant"] == CONTROL and row["status"] == DONE:
            best[setting(row)] = min(row["held_out_loss"], best.get(setting(row), math.inf))
    return [row | {"gate_softmax_loss": best.get(setting(row))} for row in rows]


def _write(folder: Path, rows: list[dict[str, Any]], positions: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = sorted(with_controls(rows), key=lambda row: [str(row[name]) for name in KEY])
    bins = sorted({name for row in positions for name in row if name.isdecimal()}, key=int)
    columns = ("run", "corpus", "step", "evaluated_context", "documents", "held_out_loss", *bins)
    last = [row for row in positions if row["step"] == max(x["step"] for x in positions if x["run"] == row["run"])]
    write_results(folder / POSITIONS.name, [{name: row.get(name) for name in columns} for row in last])
    write_results(folder / TABLE.name, [{name: row.get(name) for name in COLUMNS} for row in rows])


def _rows(file: Path) -> list[dict[str, Any]]:
    return read_rows(file, texts=("commit", "corpus")) if file.is_file() else []


def _run_of(row: dict[str, Any]) -> LearningRun:
    return LearningRun(**{name: row[name] for name in KEY})


if __name__ == "__main__":
    sys.exit(main())
