"""Measures a row of a million tokens on one GPU, forward and backward, and its loss by position.

A small model is first trained on shorter rows of Markov chains (`benchmarks.common.chains`), each row with another
chain. So the curve of the loss has a meaning: it falls while the model reads the transitions of the row, and rises if
its memory or its rotation fails beyond the length of training. Then the long row is computed; every block is recomputed
in the backward. A training that was stopped continues. `python -m benchmarks.long_row --out DIR` writes
DIR/long_row.csv and .png.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common.chains import Chains, options, run_config
from benchmarks.common.measure import measured, write
from sympow.models import LanguageModel
from sympow.training import ExecutionConfig, load_model, train
from sympow.training.devices import autocast

TENTHS = 10


def long_pass(model: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor, device: torch.device) -> dict:
    """Computes forward and backward of one row [1, T]. Returns losses float64 [T] on the CPU, the norm of the gradient,
    seconds, and the peak of memory in bytes."""
    model.checkpoint_activations()
    model.check_tokens(tokens, targets)
    tokens, targets = tokens.to(device), targets.to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with autocast("bf16", device):
        losses = model.token_losses(tokens, targets)
    losses.mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"losses": losses[0].detach().double().cpu(), "grad_norm": norm, "seconds": seconds, "peak": peak}


def curve(losses: torch.Tensor, points: int = 60) -> list[dict]:
    """Returns the mean losses [T] of spans that grow by about the same factor: [{"start", "stop", "loss"}]."""
    edges = sorted({round(len(losses) ** (i / points)) for i in range(points + 1)} - {0})
    spans = zip([0, *edges[:-1]], edges, strict=True)
    return [{"start": a, "stop": b, "loss": round(losses[a:b].mean().item(), 5)} for a, b in spans]


def summary(losses: torch.Tensor) -> dict:
    """Returns the mean loss of each tenth of the row, and whether the last is at most the one before plus three
    standard errors of their difference."""
    tenths = losses.tensor_split(TENTHS)
    before, last = tenths[-2:]
    error = math.sqrt(before.var().item() / len(before) + last.var().item() / len(last))
    rise = (last.mean() - before.mean()).item()
    return {
        "finite": bool(losses.isfinite().all()),
        "tenths": [round(x.mean().item(), 5) for x in tenths],
        "rise_at_the_end": round(rise, 6),
        "standard_error": round(error, 6),
        "flat_or_falling": rise <= 3 * error,
    }


def plot(result: dict, path: Path) -> None:
    """Draws the loss against position, with the length of the training rows and the loss with a perfect memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axis = figure.subplots()
    axis.step([span["stop"] for span in result["curve"]], [span["loss"] for span in result["curve"]], where="pre")
    axis.axvline(result["trained_context"], color="grey", linestyle=":", label="length of training rows")
    axis.axhline(result["best_loss"], color="grey", linestyle="--", label="all transitions known")
    axis.set(xscale="log", xlabel="position in the row, tokens", ylabel="loss, nats a token")
    about = f"{result['preset']}, power p = 2, one run, one row of {result['length']:,} tokens"
    axis.set_title(f"{about}; {result['processor']}", fontsize=11)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = options("benchmarks.long_row", __doc__, rows=8, steps=600, learning_rate=5e-4)
    parser.add_argument("--length", type=int, default=1_000_000, help="tokens of the row (default: 1000000)")
    args = parser.parse_args()
    often = {"warmup_steps": args.steps // 10, "checkpoint_every": 100, "keep_checkpoints": 1}
    device, config = torch.device(args.device), run_config(args, "long-row", args.vocabulary, **often)
    config = replace(config, execution=ExecutionConfig(checkpoint_activations=True))
    training = Chains(args.context, args.rows, args.vocabulary)
    trained = train(config, training, args.out / "run", quiet=True)
    if trained.stopped_by:
        print(f"stopped by {trained.stopped_by} at step {trained.step}: the same command goes on")
        return 1
    model = load_model(args.out / "run", device).model
    row = Chains(args.length, 1, args.vocabulary, seed=1)[0]
    done = long_pass(model, row.tokens, row.targets, device)
    losses = done.pop("losses")
    result = (
        {"preset": args.preset, "mixer": "power", "p": 2, "precision": "bf16", "vocabulary": args.vocabulary}
        | {"trained_steps": trained.steps, "trained_context": args.context, "trained_rows": args.rows}
        | {"length": args.length, "grad_norm": done["grad_norm"], "seconds": round(done["seconds"], 3)}
        | {"peak_gib": round(done["peak"] / 2**30, 2) or None, "best_loss": round(math.log(training.successors), 5)}
        | measured(args.device)
        | summary(losses)
        | {"curve": curve(losses)}
    )
    write(args.out / "long_row.csv", [result])
    plot(result, args.out / "long_row.png")
    finite = result["finite"] and math.isfinite(result["grad_norm"])
    print(f"{args.length:,} tokens, forward and backward: {result['seconds']:.1f} s, peak {result['peak_gib']} GiB, "
          f"norm of the gradient {result['grad_norm']:.3f}, {'finite' if finite else 'NOT FINITE'}")  # fmt: skip
    print("loss by tenths of the row: " + " ".join(f"{x:.4f}" for x in result["tenths"]))
    print(f"the end: {result['rise_at_the_end']:+.5f}, standard error {result['standard_error']:.5f}")
    return int(not (finite and result["flat_or_falling"]))


if __name__ == "__main__":
    sys.exit(main())
