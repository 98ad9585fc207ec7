"""Trains models by the optimizers of `sympow train`, and compares them with gated softmax attention.

    python -m benchmarks.learning plan --grids field,field_16384 --gpus 4 --workers 8
    python -m benchmarks.learning run --grids field --corpus FOLDER --out OUT --workers 8 --compile --measures
    python -m benchmarks.learning merge --from OUT

Corpus, model and measures are those of `benchmarks.context_scaling`. A finished run is a row of
benchmarks/results/learning.csv, so a grid can be completed in several calls. Losses by position are in
learning_positions.csv. With `--measures` a run also has rows in learning_context.csv, which
`benchmarks.context_use` describes. A finished run that lacks them is then done again, and `merge` replaces its rows.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import known, refuses, write
from benchmarks.context_scaling import cost, found
from benchmarks.context_scaling.data import name_of, read_documents
from benchmarks.context_scaling.grid import BEST, BILLION, LONG, MIDDLE, SCALES, SEEDS, SHORT, WHOLE, LearningRun, Run
from benchmarks.context_scaling.speed import SPEED
from benchmarks.context_scaling.studies import STUDIES, grid
from benchmarks.context_scaling.work import DONE, FAILED, Trainer
from benchmarks.tables import RESULTS
from sympow.recall import write_results
from sympow.recall.results import group
from sympow.sweeps import Estimates, run_jobs
from sympow.training.devices import resolve_device

TABLE, POSITIONS = RESULTS / "learning.csv", RESULTS / "learning_positions.csv"
USE = RESULTS / "learning_context.csv"
CONTROL = "softmax_gate"
COMPILED = 0.5  # the time of compiled steps, of that which `cost.guess` returns


KEY = tuple(field.name for field in fields(LearningRun))
COLUMNS = ("variant", "optimizer", "muon_rate", "learning_rate", "context", "tokens", "seed", "held_out_loss",
           "gate_softmax_loss", "gain", "best_loss", "best_context", "tokens_per_second", "processor", "documents",
           "row_tokens", "size", "status", "error", "parameters", "steps", "seconds", "peak_bytes", "compiled", "scale",
           "torch", "commit", "code", "corpus")  # fmt: skip

MAIN = ("softmax_gate", "power", "power_delta")
LONG_MEMORY = "power_delta+gate_bias=[4,12]"  # half-lives of 38 tokens to 100,000, where the layer has 2 to 2,000
# What the layer of the delta rule is compared with: hybrids, windows in turns with it, and its options one by one.
SEARCH = (
    "window_delta", "window_delta+window=512", "hybrid_delta_gate", "hybrid_window_delta", "window", LONG_MEMORY,
    "power_delta+gate=false", "power_delta+rotation=none", "window_delta+window=64", "hybrid_window_gate",
    "hybrid_delta_gate+softmax.rotation=fixed", "hybrid_power_gate", "window+window=512", "hybrid_window",
    "power_delta+p=1", "power_delta+beta_max=1.9", "power_delta+rotary_fraction=1", "power_delta+beta=1",
    "power_delta+short_convolution=0", "softmax_gate+rotation=none", "power+rotation=none",
    "power_delta+p=3+head_dim=32+value_dim=64", "power_delta+beta=0.5", "power_delta+beta_bias=2",
    "power_delta+beta_bias=-2", "power_delta+p=4+head_dim=16+value_dim=64", "power_delta+p=4+head_dim=24+value_dim=64",
)  # fmt: skip
OFFSETS = (
    "power_delta+offset=0.09", 'heads_delta+options={"offset":0.09}', "power_delta+offset=0.3",
    "power_delta+offset=1", "power_delta+offset=0.09+beta=0.5", "power_delta+beta=0.5", "power_delta+beta_bias=-2",
)  # fmt: skip
FIELD = ("window32", "softmax", "window+window=2112", "window+window=512", "hybrid_window+p=1")
ALONG = ("body_", "published_", "conformal_", "softmax_plain")  # whose losses along training the papers draw
SLOW = ("gated_delta_net", "rwkv7")  # a run of 100 million tokens takes eight minutes alone
FAR = ("softmax_gate", "power", "power_delta", "window", "hybrid_heads_delta", "hybrid_delta_gate",
       "hybrid_power_gate", "softmax", "window32")  # fmt: skip
FOUR = ("softmax_gate", "power_delta", "window", "hybrid_delta_gate")  # that matter for a choice


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
    "search": runs(SEARCH, (4096,), seeds=(0,)),
    "controls": runs(("window", "window+window=2112", "softmax", "hybrid_power_gate", "hybrid_delta_gate",
                      "hybrid_window_gate", "power+p=1"), (4096,)),
    "middle_rates": runs(MAIN, (4096,), MIDDLE, seeds=(0,), rates=(4e-3, 8e-3)),
    "middle": runs((*MAIN, "window", "hybrid_delta_gate", "hybrid_power_gate"), (4096,), MIDDLE),
    "middle_hybrid_rates": runs(("hybrid_delta_gate", "softmax_gate", "window", "power_delta"), (4096,), MIDDLE,
                                seeds=(0,), rates=(4e-3, 1.6e-2)),
    "heads": runs(("hybrid_heads_delta", "heads_delta", "heads_delta+window=512"), (4096,), MIDDLE),
    "gates": runs(("window+gate=true", "gated_heads_delta", "hybrid_gated_heads_delta"), (4096,), MIDDLE),
    # Documents cut short in the first half of the steps, and whole in the second.
    "short_first": runs(tuple(f"{name}+short_context=1024+short_share=0.5" for name in FOUR[:3]), (4096,)),
    # An offset of the scores, alone and with other strengths of a write.
    "offset": runs(OFFSETS, (4096,)),
    "offset_1024": runs(OFFSETS[:2], (1024,)),
    "offset_middle": runs(OFFSETS[:2], (4096,), MIDDLE),
    "offset_long": runs(OFFSETS[:2], (4096,), LONG),
    "offset_hybrid": runs(('hybrid_heads_delta+hybrid_heads.options={"offset":0.09}',), (4096,), MIDDLE),
    # Fused projections as one matrix, in place of queries, keys and values each alone.
    "whole": runs(("power_delta", "softmax_gate"), (4096,), optimizer=WHOLE),
    "memory": runs((LONG_MEMORY,), (4096,), MIDDLE, seeds=(0,)),
    "middle_16384": runs((*MAIN, "window", "hybrid_delta_gate", "hybrid_power_gate"), (16_384,), MIDDLE),
    "middle_65536": runs((*MAIN, "window", "hybrid_heads_delta"), (65_536,), MIDDLE, seeds=(0,)),
    "prose": runs((*MAIN, "window", "hybrid_heads_delta"), (4096,)),  # with another corpus
    "long": runs(("power_delta", "heads_delta", "softmax_gate", "power"), (4096,), LONG),
    # Claims of the papers. [SCRA] Table 4: equal states, tokens; Figures 3 and 1: linear attention beside a window of
    # equal state, and beside softmax attention at growing contexts; Figure 9 in the body of RWKV-7. [CST] Figure 1.
    "scra_states": [*runs(("softmax",), (1024,), MIDDLE), *runs(("window", "power"), (4096,), MIDDLE)],
    # Linear attention has a norm of the heads in this body, and so has what it is compared with.
    "scra_windows": runs(("body_linear", "body_window32+head_norm=true"), (1024, 8192)),
    "scra_lengths": runs(("body_softmax+head_norm=true", "body_linear"), (32, 1024, 8192)),
    "scra_bodies": [*runs(tuple(f"body_{name}+head_norm=true" for name in ("power", "softmax", "window")), (65_536,)),
                    *runs(("body_rwkv7",), (65_536,), seeds=(0,))],
    "cst_contexts": runs(("softmax_plain", "published_p2", "published_p2_gated", "conformal_p2"), (1024, 4096, 16_384)),
    # The powers of [SPT] as published, beside softmax attention: its claim with a sweep of rates.
    "spt_powers": runs(("softmax_plain", "published_p2", "published_p4", "published_p6"), (4096,), seeds=(0,),
                       rates=(8e-3, 4e-3, 1.6e-2, 2e-3)),
    "based": runs(("based",), (1024, 4096)),
    "billion": runs(("heads_delta", "power_delta", "softmax_gate"), (4096,), BILLION, seeds=(0,)),
    # FIELD has a window of as many bytes in bfloat16 as the state of p = 2 in float32, short windows alone and with
    # p = 1 in turns, and a window of 32 as the control with next to no context.
    "rates_field": runs((*FIELD, "window", "hybrid_delta_gate", "hybrid_power_gate"), (4096,), seeds=(0,),
                        rates=(4e-3, 8e-3, 1.6e-2)),
    "rates_16384": runs(MAIN, (16_384,), seeds=(0,), rates=(4e-3, 8e-3, 1.6e-2)),
    "field": runs(FIELD, (4096,), MIDDLE),
    "field_16384": runs(FIELD, (16_384,), MIDDLE),
    "rates_slow": runs(SLOW, (4096,), seeds=(0,), rates=(8e-3, 4e-3, 1.6e-2, 2e-3, 1e-3)),
    "slow": runs(SLOW, (4096,), MIDDLE, rates=(4e-3,)),  # the best rate of Gated DeltaNet
    "slow_16384": runs(SLOW, (16_384,), MIDDLE, rates=(4e-3,)),
    "far": runs(FAR, (65_536,), MIDDLE),
    "long_window": runs(("window", "hybrid_delta_gate", "hybrid_power_gate"), (4096,), LONG),
    "small": [replace(run, size="small") for run in runs(FOUR, (4096,), MIDDLE, seeds=(0,))],
    "small_billion": [replace(run, size="small") for run in runs(FOUR, (4096,), BILLION, seeds=(0,))],
}  # fmt: skip


@refuses
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="train what is missing")
    run.set_defaults(command=_run)
    run.add_argument("--grids", help=f"in order of priority, of {', '.join(GRIDS)}")
    run.add_argument("--studies", help=f"runs with AdamW, of {', '.join(STUDIES)}")
    run.add_argument("--names", help="instead of grids: variant:context:rate:seed:tokens:optimizer:muon_rate, ...")
    run.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    run.add_argument("--out", type=Path, required=True, help="folder of the tables that this command writes")
    run.add_argument("--workers", type=int, default=1, help="processes, dealt out over the GPUs (default: 1)")
    run.add_argument("--minutes", type=float, default=math.inf, help="give up what is not done after these")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--scale", choices=SCALES, default="full", help="toy: to try the program out")
    run.add_argument("--compile", action="store_true", help="run blocks through torch.compile")
    run.add_argument(
        "--measures", action="store_true", help="measure the use of the context, also of runs that lack it"
    )
    run.add_argument("--again", action="store_true", help="also train runs whose rows are committed")
    run.add_argument("--keep", type=Path, help="keep the folders of runs here, with their weights")
    plan = commands.add_parser("plan", help="print the seconds that runs of grids are expected to take")
    plan.set_defaults(command=_plan)
    plan.add_argument("--grids", required=True, help="as for run")
    plan.add_argument("--corpus-name", help="count runs that are finished on this corpus (default: all that are)")
    plan.add_argument("--measures", action="store_true", help="count only runs whose use of the context is measured")
    plan.add_argument("--gpus", type=int, default=1, help="(default: 1)")
    plan.add_argument("--workers", type=int, default=1, help="processes, dealt out over the GPUs (default: 1)")
    merge = commands.add_parser("merge", help="add finished rows to the committed tables")
    merge.set_defaults(command=_merge)
    merge.add_argument("--from", dest="source", type=Path, required=True, help="folder that run wrote")
    options = parser.parse_args()
    options.command(options)


def _run(options: argparse.Namespace) -> None:
    chosen = [_named(text) for text in options.names.split(",")] if options.names else []
    chosen += of_grids(options.grids) if options.grids else []
    chosen += [_by_adamw(run) for run in grid(options.studies.split(","))] if options.studies else []
    device = resolve_device(options.device).type
    corpus = name_of(read_documents(SCALES[options.scale], options.corpus).train)
    finished = {run_of(row) for row in known(TABLE) if row["corpus"] == corpus and row["scale"] == options.scale}
    finished |= {_by_adamw(found.run_of(row)) for row in known(RESULTS / "context_scaling" / found.RUNS)
                 if row["corpus"] == corpus and row["scale"] == options.scale}  # fmt: skip
    if options.measures:
        measured = {row["run"] for row in known(USE) if row["corpus"] == corpus}
        finished = {run for run in finished if run.name in measured}
    left = [run for run in dict.fromkeys(chosen) if options.again or run not in finished]
    print(f"{len(left)} of {len(set(chosen))} runs to do", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.workers)))
    trainer = Trainer(options.scale, options.corpus, device, options.compile, options.measures, options.keep)
    gpus = torch.cuda.device_count() if device == "cuda" else options.workers
    estimates = Estimates(expected, cost.kind, company(options.workers, gpus))
    rows, positions, use, begun = [], [], [], time.time()
    for done in run_jobs(
        {run.name: run for run in left}, trainer, options.out / "jobs", workers=options.workers,
        minutes=options.minutes, estimates=estimates,
    ):  # fmt: skip
        run = done.job
        row = {name: getattr(run, name) for name in KEY} | {"scale": options.scale, "corpus": corpus}
        row |= {"status": FAILED, "error": done.error} if done.error else done.result["row"]
        rows.append(row)
        positions += [] if done.error else done.result["positions"]
        use += [] if done.error else done.result["use"]
        _write(options.out, rows, positions, use)
        said = f"held-out loss {row['held_out_loss']:.4f}" if row["status"] == DONE else row["error"]
        print(f"[{time.time() - begun:.0f} s] {run.name}: {said}, {row.get('tokens_per_second') or 0:,} tokens/s; "
              f"{len(rows)} of {len(left)}, about {done.left / 60:.1f} min left", flush=True)  # fmt: skip


def of_grids(names: str) -> list[LearningRun]:
    """Returns the runs of grids whose names stand with commas between, each once; ValueError for other names."""
    chosen: list[LearningRun] = []
    for name in names.split(","):
        if name not in GRIDS:
            raise ValueError(f"a grid is one of {', '.join(GRIDS)}; got {name!r}")
        chosen += GRIDS[name]
    return list(dict.fromkeys(chosen))


def _by_adamw(run: Run) -> LearningRun:
    return LearningRun(**vars(run), optimizer="adamw")


def expected(run: Run) -> float:
    """Returns the seconds that a run is expected to take alone on an H200.

    They follow from the fastest time of the variant at this context that is known, which had the least company, or from
    `cost.guess` if that is less.
    """
    timed = known(TABLE.parent / "context_scaling" / SPEED)
    own = (run.variant, run.context)
    speeds = [row["tokens_per_second"] for row in [*known(TABLE), *timed]
              if (row["variant"], row["context"]) == own and row.get("size") == run.size
              and (row.get("compiled") or row.get("mode") == "compiled")]  # fmt: skip
    return min(cost.OVERHEAD + run.tokens / max(speeds, default=1), COMPILED * cost.guess(run))


def company(workers: int, gpus: int) -> float:
    """Returns the factor by which a run takes longer if several runs share its GPU."""
    return max(1.0, 0.9 * workers / gpus)


def _plan(options: argparse.Namespace) -> None:
    done = {run_of(row) for row in known(TABLE) if options.corpus_name in (None, row["corpus"])}
    if options.measures:
        measured = {row["run"] for row in known(USE)}
        done = {run for run in done if run.name in measured}
    left = [run for run in of_grids(options.grids) if run not in done]
    seconds = [expected(run) * company(options.workers, options.gpus) for run in left]
    for run, each in zip(left, seconds, strict=True):
        print(f"{each:6,.0f} s  {run.name}")
    longest = max([sum(seconds) / options.workers, *seconds])
    print(f"{len(left)} runs: {sum(seconds) / 60:,.0f} minutes of workers, at least {longest / 60:,.1f} minutes with "
          f"{options.workers} workers on {options.gpus} GPUs")  # fmt: skip


def _named(text: str) -> LearningRun:
    values = text.split(":")
    kinds = (str, int, float, int, int, str, float)
    names = ("variant", "context", "learning_rate", "seed", "tokens", "optimizer", "muon_rate")
    return LearningRun(**{name: kind(value) for name, kind, value in zip(names, kinds, values, strict=False)})


def _merge(options: argparse.Namespace) -> None:
    """Adds finished rows, in place of earlier ones of the same runs."""
    added = [row for row in known(options.source / TABLE.name) if row["status"] != FAILED]
    new = {(run_of(row), row["corpus"], row["scale"]) for row in added}
    old = known(TABLE)
    rows = [row for row in old if (run_of(row), row["corpus"], row["scale"]) not in new] + added
    names = {(run_of(row).name, row["corpus"]) for row in added}

    def merged(file: Path) -> list[dict[str, Any]]:
        kept = [row for row in known(file) if (row["run"], row["corpus"]) not in names]
        return kept + [row for row in known(options.source / file.name) if (row["run"], row["corpus"]) in names]

    _write(RESULTS, rows, merged(POSITIONS), merged(USE))
    print(f"{len(rows) - len(old)} runs added, {len(added) + len(old) - len(rows)} replaced")


def with_controls(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each run the loss of gated softmax attention at its best rate, by optimizer, setting and seed."""

    def setting(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("optimizer", "context", "tokens", "documents", "corpus", "scale", "seed"))

    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["variant"] == CONTROL and row["status"] == DONE:
            best[setting(row)] = min(row["held_out_loss"], best.get(setting(row), math.inf))
    return [row | {"gate_softmax_loss": best.get(setting(row))} for row in rows]


def _write(
    folder: Path, rows: list[dict[str, Any]], positions: list[dict[str, Any]], use: list[dict[str, Any]]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = sorted(with_controls(rows), key=lambda row: [str(row[name]) for name in KEY])
    bins = sorted({name for row in positions for name in row if name.isdecimal()}, key=int)
    columns = ("run", "corpus", "step", "evaluated_context", "documents", "held_out_loss", *bins)
    ends = {run: max(row["step"] for row in same) for (run,), same in group(positions, "run").items()}
    kept = [row for row in positions if row["step"] == ends[row["run"]] or row["run"].startswith(ALONG)]
    write_results(folder / POSITIONS.name, [{name: row.get(name) for name in columns} for row in kept])
    if use:
        write(folder / USE.name, use)
    write_results(folder / TABLE.name, [{name: row.get(name) for name in COLUMNS} for row in rows])


def run_of(row: dict[str, Any]) -> LearningRun:
    """Returns the run of a row."""
    return LearningRun(**{name: row[name] for name in KEY})


if __name__ == "__main__":
    sys.exit(main())
