"""Estimates the time of a run, so that no run is started that would not end in time."""

from __future__ import annotations

from benchmarks.context_scaling.grid import Run, recipe
from sympow.models import preset

OVERHEAD = 15.0  # seconds of a run that are not training: its model, its evaluations, kernels to compile
# Seconds a token of the mini shape on an H200: of all but attention; of softmax attention over a token of context; and
# of attention in the quadratic form of power attention, which p > 2 takes in training.
TOKEN, SOFTMAX, QUADRATIC = 1.1e-6, 3.5e-11, 1.0e-10
STATE = 3e-7  # of a mixer with a state, whatever the context
DELTA = 1.6e-6  # of the delta rule
SEQUENTIAL = 4e-6  # of the mixers whose kernels take turns with plain torch


def guess(run: Run) -> float:
    """Returns seconds of a run alone on an H200, to a factor of two or so."""
    model = recipe(run.variant).model
    size = model if run.size is None else preset(run.size)
    share = size.d_model * size.n_layers / (384 * 6)
    per_token = TOKEN * max(0.3, share * size.d_model / 384)
    for layer in range(6):
        per_token += share / 6 * _mixing(run, model.mixer(layer).name, model.mixer(layer).options)
    return OVERHEAD + per_token * run.tokens


def _mixing(run: Run, name: str, options: dict) -> float:
    if name == "softmax":
        return SOFTMAX * run.trained_at * (2 if options.get("gate") else 1)
    if name == "window":
        return SOFTMAX * 2 * min(run.trained_at, options["window"]) + STATE
    if name == "power" and options.get("p", 2) > 2:
        return QUADRATIC * run.trained_at
    if name == "power_delta":
        return DELTA
    return SEQUENTIAL if name in ("rwkv7", "gated_delta_net") else STATE


def kind(run: Run) -> tuple[object, ...]:
    """Returns a key that is equal for runs that take the same time per token."""
    return run.variant, run.trained_at, run.size
