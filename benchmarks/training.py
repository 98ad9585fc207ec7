"""Times training steps: `python -m benchmarks.training --csv FILE`. With torchrun it uses several GPUs, which share
rows.

The step is `train_step` of `sympow.training.step`. It includes the copy of the batch to the device, clipping and the
optimizer. It does not include the check of the tokens, which the training loop does ahead of time. As in the loop, the
numbers of a step are read when the next step is launched; see `timed_steps`.
Tokens are random. Softmax attention is cuDNN's on a GPU. Before a mixer is timed, its loss and gradient in bfloat16 are
compared with those in float32 on a shorter row. Before another way to run it is timed, its first step is compared with
that of the plain way. Rows that are in FILE already are not measured again, so the same command continues a run that
was stopped.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.measure import csv_file, known, measured, write
from sympow.cli.options import positive
from sympow.data import DataConfig
from sympow.models import LanguageModel, MixerConfig, preset
from sympow.recipes.scaling import CONFORMAL, PUBLISHED, UNGATED
from sympow.training import ExecutionConfig, RunConfig, TrainingConfig
from sympow.training.config import OPTIMIZERS
from sympow.training.devices import autocast
from sympow.training.optimizer import make_optimizer
from sympow.training.ranks import ALONE, Part, Ranks, join, launched, prepare
from sympow.training.step import StepNumbers, make_pass, train_step
from sympow.training.throughput import peak_flops, token_flops

BLOCK = {"short_convolution": 4, "head_norm": True, "output_gate": True}
MIXERS = {
    "softmax": MixerConfig("softmax"),
    "softmax-block": MixerConfig("softmax", BLOCK),
    "power": MixerConfig("power"),
    "power-delta": MixerConfig("power_delta"),
    "power-fixed": MixerConfig("power", {"rotation": "fixed"}),
    "power-plain": MixerConfig("power", {"short_convolution": 0, "head_norm": False, "output_gate": False}),
    # [CST], appendix A.5: what a gate and a learned rotation cost.
    "power-published": MixerConfig("power", PUBLISHED | UNGATED),
    "power-conformal": MixerConfig("power", PUBLISHED | CONFORMAL),
}
MODES = {
    "eager": ExecutionConfig(),
    "checkpoint": ExecutionConfig(checkpoint_activations=True),
    "compile": ExecutionConfig(compile=True),
    "compile+checkpoint": ExecutionConfig(compile=True, checkpoint_activations=True),
}
WARM_UP = 2  # steps before those that are timed: the first compiles, the second still allocates memory
CHECKED = 2048  # tokens of the row that is also computed in float32
ALLOWED = 4 * torch.finfo(torch.bfloat16).eps  # a few roundings of the dtype, for a loss and the norm of a gradient


@dataclass(frozen=True)
class Shape:
    """Describes the training: a preset of the model with a vocabulary, steps of `rows` rows of `context` tokens, of
    which `micro_batch` are computed at once, and the optimizer."""

    preset: str
    vocabulary: int
    context: int
    rows: int
    micro_batch: int
    optimizer: str = "adamw"

    def config(self, mixer: str, mode: str, device: str, size: int) -> RunConfig:
        """Returns the config of a run on `size` ranks, which share every row."""
        execution = MODES[mode]
        return RunConfig(
            name="benchmark",
            model=preset(self.preset, self.vocabulary, MIXERS[mixer]),
            data=DataConfig(tokenizer="bytes", pack=False),
            training=TrainingConfig(
                context=self.context, batch_size=self.rows, micro_batch_size=self.micro_batch, precision="bf16",
                optimizer=self.optimizer, device=device,
            ),
            execution=ExecutionConfig(size, execution.checkpoint_activations, execution.compile),
        )  # fmt: skip

    def passes(self, step: int, ranks: Ranks) -> list[Part]:
        """Returns this rank's part of the step's rows: random tokens."""
        gen = torch.Generator().manual_seed(step)
        text = torch.randint(self.vocabulary, (self.rows, self.context + 1), generator=gen)
        rows = [Part(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in text.split(self.micro_batch)]
        return [ranks.part(each) for each in rows]


SHAPE = tuple(field.name for field in fields(Shape))


def attention(mixer: str, device: torch.device) -> AbstractContextManager:
    """Allows only cuDNN's kernels for softmax attention on a GPU."""
    softmax = mixer.startswith("softmax") and device.type == "cuda"
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if softmax else nullcontext()


def check_precision(shape: Shape, mixer: str, device: torch.device) -> float:
    """Returns the relative error of loss and gradient norm in bfloat16 against float32, at the start of the first
    row."""
    model = LanguageModel(preset(shape.preset, shape.vocabulary, MIXERS[mixer]), seed=0).to(device)
    rows = shape.passes(0, ALONE)[0]
    tokens, targets = (x[:1, :CHECKED].contiguous().to(device) for x in (rows.tokens, rows.targets))
    numbers = []
    for precision in ("float32", "bf16"):
        # In float32 any of torch's kernels: cuDNN's know half precision alone.
        with attention(mixer, device) if precision == "bf16" else nullcontext(), autocast(precision, device):
            loss = model.loss_sum(tokens, targets)
        loss.backward()
        numbers.append((loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()))
        model.zero_grad()
    return difference(numbers[1], numbers[0])


def difference(numbers: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference; NaN where a number is none."""
    errors = [abs(a - b) / abs(b) for a, b in zip(numbers, expected, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.nan


def timed_steps(launch: Callable[[int], StepNumbers], count: int) -> tuple[list[float], list[tuple[float, float]]]:
    """Takes `count` steps as the training loop does: reads the numbers of a step after the next step is launched.

    One more step is launched after the last timed step, so that the last step takes as long as any other. The launch of
    the second step is part of the time of the first.

    Args:
        launch: launches the step of an index, from 0 to `count`.
        count: the number of steps that are timed.

    Returns the seconds of every step, from the moment when the step before was read to that when it is read itself; and
    its mean loss and gradient norm.
    """
    seconds, numbers = [], []
    began, following = time.perf_counter(), launch(0)
    for step in range(count):
        current, following = following, launch(step + 1)
        loss, norm, _ = current.read()
        now = time.perf_counter()
        seconds.append(now - began)
        numbers.append((loss, norm))
        began = now
    following.read()  # so that the device is free for what comes next
    return seconds, numbers


def launcher(
    config: RunConfig, rows: Sequence[Sequence[Part]], device: torch.device, ranks: Ranks = ALONE
) -> tuple[LanguageModel, float | None, Callable[[int], StepNumbers]]:
    """Makes the model and the optimizer of a run.

    Returns the model, its FLOPs per token, and a function that launches a step on the rows of its index. The peak of
    memory is that from the third step on, because the first steps compile kernels and try them out.
    """
    model = LanguageModel(config.model, seed=0).to(device)
    flops = token_flops(model, config.training.context)
    prepare(model, config, ranks)
    optimizer = make_optimizer(model, config.training)
    steps = [[make_pass(part, model, device) for part in parts] for parts in rows]

    def launch(step: int) -> StepNumbers:
        if device.type == "cuda" and step <= WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        return train_step(model, optimizer, steps[step], 1e-4, config.training, device, ranks)

    return model, flops, launch


def take_steps(shape: Shape, mixer: str, mode: str, device: torch.device, count: int) -> dict:
    """Takes `count` steps. Returns loss and gradient norm of the first, seconds of each, the peak memory from the third
    step on in bytes, and FLOPs per token."""
    config = shape.config(mixer, mode, device.type, world_size())
    ranks = join(config, device)
    torch.compiler.reset()
    _, flops, launch = launcher(config, [shape.passes(step, ranks) for step in range(count + 1)], device, ranks)
    ranks.wait()
    with attention(mixer, device):
        seconds, numbers = timed_steps(launch, count)
    if not all(math.isfinite(x) for pair in numbers for x in pair):
        raise RuntimeError(f"{mixer}, {mode}: losses and gradient norms of {numbers}; not timed")
    peak = ranks.max(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0)
    return {"loss": numbers[0][0], "grad_norm": numbers[0][1], "seconds": seconds, "peak": peak, "flops": flops}


def measure(shape: Shape, mixer: str, mode: str, device: torch.device, count: int, known: Sequence[dict]) -> dict:
    """Returns the row of a mixer and a way to run it, with `count` timed steps. The first step is compared with the row
    of the plain way in `known`, from any number of ranks."""
    alike = {**asdict(shape), "mixer": mixer, "mode": "eager"}
    plain = next((row for row in known if row.items() >= alike.items() and row.get("ms")), {})
    error = plain["precision_error"] if plain else check_precision(shape, mixer, device)
    if not error <= ALLOWED:
        raise RuntimeError(f"{mixer}: bfloat16 is {error:.1e} from float32 where {ALLOWED:.1e} is allowed; not timed")
    if mode != "eager" and not plain:
        plain = take_steps(shape, mixer, "eager", device, 1)
    taken = take_steps(shape, mixer, mode, device, WARM_UP + count)
    wrong = difference(*((x["loss"], x["grad_norm"]) for x in (taken, plain or taken)))
    if not wrong <= ALLOWED:
        raise RuntimeError(f"{mixer}, {mode}: the first step is {wrong:.1e} from the plain one; not timed")
    second, most = statistics.median(taken["seconds"][WARM_UP:]), peak_flops(device, "bf16")
    speed, ranks = shape.rows * shape.context / second, world_size()
    return (
        {**asdict(shape), "mixer": mixer, "mode": mode, "ranks": ranks, "precision": "bf16"}
        | {"ms": round(second * 1e3, 3), "tokens_per_second": round(speed)}
        | {"mfu": round(speed * taken["flops"] / most / ranks, 4) if taken["flops"] and most else None}
        | {"peak_gib": round(taken["peak"] / 2**30, 2) or None, "first_step_s": round(taken["seconds"][0], 2)}
        | {"flops_per_token": taken["flops"], "loss": taken["loss"], "grad_norm": taken["grad_norm"]}
        | {"precision_error": float(f"{error:.2e}"), "mode_error": float(f"{wrong:.2e}")}
        | measured(device.type)
    )


def world_size() -> int:
    """Returns the number of ranks of the default group, or 1."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def with_ratios(rows: list[dict]) -> list[dict]:
    """Returns rows with three speeds, where these were measured: `ratio`, relative to softmax attention run in the same
    way, `speedup`, relative to one rank, and `over_adamw`, relative to AdamW."""

    def speed(row: dict, **changed: object) -> float | None:
        wanted = {name: row[name] for name in (*SHAPE, "mixer", "mode", "ranks")} | changed
        return next((r["tokens_per_second"] for r in rows if r.get("ms") and r.items() >= wanted.items()), None)

    for row in rows:
        if row.get("ms"):
            others = {"mixer": "softmax"}, {"ranks": 1}, {"optimizer": "adamw"}
            for name, changed in zip(("ratio", "speedup", "over_adamw"), others, strict=True):
                other = speed(row, **changed)
                row[name] = round(row["tokens_per_second"] / other, 3) if other else None
    return rows


def line(row: dict) -> str:
    """Returns a row as text to print."""
    what = f"{row['mixer']:>11} {row['mode']:>18} {row['optimizer']:>5}"
    what += f" {row['context']:>9,} x {row['rows']:<3} {row['ranks']:>2} ranks"
    if row.get("error"):
        return f"{what}  {row['error']}"
    numbers = f"{row['ms']:>10,.1f} ms {row['tokens_per_second']:>11,} tokens/s"
    mfu = "" if row["mfu"] is None else f" MFU {row['mfu']:.1%}"
    peak = "" if row["peak_gib"] is None else f" {row['peak_gib']:.1f} GiB"
    names = {"ratio": "softmax", "speedup": "one rank", "over_adamw": "AdamW"}
    ratios = "".join(f" {row[name]:.2f}x {of}" for name, of in names.items() if row[name])
    return f"{what} {numbers}{mfu}{peak}{ratios}; first step {row['first_step_s']:.1f} s, err {row['mode_error']:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--preset", default="small", help="shape of the model (default: small)")
    parser.add_argument("--vocabulary", type=positive, default=50_257, help="(default: 50257)")
    parser.add_argument("--contexts", type=positive, nargs="+", default=[65536, 8192], help="(default: 65536 8192)")
    parser.add_argument("--tokens", type=positive, default=65536, help="of a step, one row at least (default: 65536)")
    parser.add_argument("--micro-batch", type=positive, help="rows that pass at once (default: all of a step)")
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=["softmax", "power"], help="(default: both)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", "compile"], help="(default: two)")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adamw"], help="(default: adamw)")
    parser.add_argument("--steps", type=positive, default=5, help="timed, after two others (default: 5)")
    parser.add_argument("--csv", type=csv_file, required=True, help="file of the rows; those it holds are kept")
    args = parser.parse_args()
    device = torch.device(args.device)
    with launched(device):
        main_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        # Earlier rows do not name their optimizer.
        rows = [row | {"optimizer": row.get("optimizer") or "adamw"} for row in known(args.csv)]
        runs = itertools.product(args.contexts, args.mixers, args.modes, args.optimizers)
        for context, mixer, mode, optimizer in runs:
            count = max(1, args.tokens // context)
            passing = min(count, args.micro_batch or count)
            shape = Shape(args.preset, args.vocabulary, context, count, passing, optimizer)
            name = {**asdict(shape), "mixer": mixer, "mode": mode, "ranks": world_size()}
            if any(row.items() >= name.items() and row.get("ms") for row in rows):
                continue
            try:
                row = measure(shape, mixer, mode, device, args.steps, rows)
            except Exception as error:  # one that does not fit must not stop the others
                if world_size() > 1:  # but ranks that wait for each other cannot go on
                    raise
                row = name | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            rows = with_ratios([*(r for r in rows if not r.items() >= name.items()), row])
            if main_rank:
                print(line(row), flush=True)
                write(args.csv, rows)


if __name__ == "__main__":
    main()
