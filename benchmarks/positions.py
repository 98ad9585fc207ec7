"""Measures the error of the gradient of data-dependent positions in a model that has begun to learn.

`python -m benchmarks.positions --device cuda --corpus FOLDER --csv FILE` trains the recipe `scaling:power_data` on
rows of 65,536 tokens in bfloat16, and stops after 40 steps. There it records what every power layer gives to the op for
one held-out row, and the gradient of the op's output. From these inputs it computes the gradient of the steps (M14) in
two forms: by the op, whose sum starts again at every chunk (`sympow.ops.Rotation`), and through the gradients of
queries and keys. The error is relative, in norm, against the same gradient by plain torch in float64. `step_ms` is the
time of a forward and backward of the model on that row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.measure import measured, milliseconds, options, write
from benchmarks.context_scaling.data import Documents, read_data
from benchmarks.context_scaling.grid import DOCUMENT, SCALES, Run
from sympow.data import Batches
from sympow.layers import power
from sympow.models import LanguageModel
from sympow.ops import Rotation, power_attention
from sympow.ops.fused.rotation import with_positions
from sympow.training import train
from sympow.training.devices import autocast

STEPS = 40
FORMS = {"by the op": True, "through q and k": False}


class _Reached(Exception):
    """Stops a training whose model has been measured."""


def gradient_of_steps(inputs: dict[str, Any], dout: Tensor, form: str) -> Tensor:
    """Returns the gradient of the steps [B, T, G], float64, of one call of the op: of FORMS, or "exact".

    Args:
        inputs: of `power_attention`, with the rotation.
        dout: the gradient of the output.
        form: "exact" computes with the same queries and keys in float64.
    """
    rotation, rest = inputs["rotation"], {name: x for name, x in inputs.items() if name not in ("rotation", *"qkv")}
    positions = rotation.positions.detach().requires_grad_()
    dtype = torch.float64 if form == "exact" else inputs["v"].dtype
    q, k, v = (inputs[name].to(dtype).requires_grad_() for name in "qkv")
    rotation, by_op = Rotation(positions, rotation.frequencies), FORMS.get(form, False)
    if not by_op:
        q, k = with_positions(q, k, rotation)
    if form == "exact":
        rest |= {"impl": "eager", "log_g": rest["log_g"].double()}
    out = power_attention(q, k, v, rotation=rotation if by_op else None, **rest).out
    (found,) = torch.autograd.grad(out, positions, dout.to(dtype))
    return found.flip(1).cumsum(1).flip(1)


@contextmanager
def recorded() -> Iterator[list[tuple[dict[str, Any], list[Tensor]]]]:
    """Records the inputs of every call of the op by a power layer, and in a list the gradient of its output."""
    calls: list[tuple[dict[str, Any], list[Tensor]]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, **rest: Any) -> Any:
        result = power_attention(q, k, v, log_g, **rest)
        inputs = {"q": q, "k": k, "v": v, "log_g": log_g}
        calls.append((rest | {name: x if x is None else x.detach() for name, x in inputs.items()}, []))
        result.out.register_hook(calls[-1][1].append)
        return result

    usual, power.power_attention = power.power_attention, record  # type: ignore[assignment]
    try:
        yield calls
    finally:
        power.power_attention = usual


def train_until_steps(
    run: Run, scale: str, corpus: Path, device: str, measure: Callable[[LanguageModel, Documents], None]
) -> None:
    """Trains a run, hands its model over after STEPS steps, and ends."""
    config = run.config(SCALES[scale], corpus, device)
    steps = min(STEPS, config.training.steps)
    settings = replace(config.training, evaluate_every=steps, log_every=steps)
    documents = read_data(config.data)
    batches = Batches(documents.train, settings.context, settings.rows_per_pass, run.seed, pack=False)

    def observe(model: LanguageModel, step: int) -> None:
        measure(model, documents)
        raise _Reached

    with tempfile.TemporaryDirectory() as folder:
        try:
            train(replace(config, training=settings), batches, folder, observe=observe, quiet=True)
        except _Reached:
            return
    raise RuntimeError(f"{run.name} ended before step {steps}")


def model_call(model: LanguageModel, row: tuple[Tensor, Tensor], precision: str, by_op: bool) -> None:
    """Runs a forward and backward of the model on tokens and targets. `by_op` selects the form of the gradient of
    positions."""
    usual = power.PowerAttention.takes_rotation
    if not by_op:
        power.PowerAttention.takes_rotation = lambda *_: False  # type: ignore[method-assign]
    try:
        model.zero_grad(set_to_none=True)
        with autocast(precision, row[0].device):
            loss = model.loss_sum(*row)
        loss.backward()
    finally:
        power.PowerAttention.takes_rotation = usual  # type: ignore[method-assign]


def main() -> None:
    parser = options("benchmarks.positions", __doc__ or "")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.zarr and heldout.zarr")
    parser.add_argument("--scale", choices=SCALES, default="full", help="toy: to try the program out")
    args = parser.parse_args()
    run, rows = Run("power_data", DOCUMENT), []

    def measure(model: LanguageModel, documents: Documents) -> None:
        scale = SCALES[args.scale]
        precision = run.config(scale, args.corpus, args.device).training.precision
        length = DOCUMENT // scale.shrink
        tokens, targets, _ = Batches(documents.held_out, length, 1, 0, pack=False)[0]
        row = tokens.to(args.device), targets.to(args.device)
        with torch.enable_grad():
            with recorded() as calls:
                model_call(model, row, precision, True)
            errors = []
            for inputs, (dout,) in calls:
                exact = gradient_of_steps(inputs, dout, "exact")
                found = [gradient_of_steps(inputs, dout, form) for form in FORMS]
                errors.append([((x - exact).norm() / exact.norm()).item() for x in found])
            timed = [partial(model_call, model, row, precision, by_op) for by_op in FORMS.values()]
            times = milliseconds(timed, args.device, rounds=5)
        for form, ms, found in zip(FORMS, times, zip(*errors, strict=True), strict=True):
            about = {"T": length, "steps": min(STEPS, scale.steps or STEPS), "form": form}
            about |= {"worst_error": round(max(found), 5), "errors": [round(x, 5) for x in found]}
            rows.append(about | {"step_ms": round(ms, 2)} | measured(args.device))

    train_until_steps(run, args.scale, args.corpus, args.device, measure)
    write(args.csv, rows)
    for row in rows:
        print(f"{row['form']}: errs by {row['worst_error']} at worst, forward and backward {row['step_ms']} ms")


if __name__ == "__main__":
    main()
