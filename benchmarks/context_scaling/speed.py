"""Measures tokens per second and memory of training steps, with one process on a GPU."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.context_scaling.grid import DOCUMENT, SCALES, Run
from benchmarks.context_scaling.work import fast_attention
from benchmarks.training import timed_steps
from sympow.models import LanguageModel
from sympow.training.optimizer import make_optimizer
from sympow.training.ranks import Part, Ranks, prepare
from sympow.training.step import StepNumbers, make_pass, train_step
from sympow.training.throughput import token_flops

WARM_UP, TIMED = 4, 12  # steps
SPEED = "speed.csv"
KEY = ("variant", "context", "mode")


@dataclass(frozen=True)
class Case:
    """Describes steps to time: one document each, cut into rows of `context` tokens."""

    variant: str
    context: int
    mode: str  # "eager" or "compiled"


def timed(case: Case, scale_name: str, device_name: str) -> dict[str, Any]:
    """Returns tokens a second, the peak of memory, and what they are of, from one process alone on the device."""
    found = _timed(case, scale_name, device_name)
    gc.collect()
    torch.compiler.reset()
    if device_name == "cuda":
        torch.cuda.empty_cache()
    return found


def _timed(case: Case, scale_name: str, device_name: str) -> dict[str, Any]:
    scale = SCALES[scale_name]
    run = Run(case.variant, case.context)
    config = run.config(scale, Path("corpus"), device_name, case.mode == "compiled")
    settings, device = config.training, torch.device(device_name)
    model = LanguageModel(config.model, seed=0).to(device)
    flops = token_flops(model, settings.context)
    prepare(model, config, Ranks())
    optimizer = make_optimizer(model, settings)
    generator = torch.Generator().manual_seed(0)
    shape = (DOCUMENT // run.context, settings.context + 1)
    texts = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(WARM_UP + TIMED + 1)]
    passes = [make_pass(Part(text[:, :-1].contiguous(), text[:, 1:].contiguous()), model, device) for text in texts]

    def launch(step: int) -> StepNumbers:
        if device_name == "cuda" and step == 2:  # the first steps compile and try out kernels
            torch.cuda.reset_peak_memory_stats()
        return train_step(model, optimizer, [passes[step]], 1e-4, settings, device)

    with fast_attention(device_name):
        seconds, _ = timed_steps(launch, WARM_UP + TIMED)
    return {
        "tokens_per_second": round(shape[0] * settings.context / median(seconds[WARM_UP:])),
        "first_step_seconds": round(seconds[0], 1),
        "peak_bytes": torch.cuda.max_memory_allocated() if device_name == "cuda" else None,
        "flops_per_token": flops,
        "parameters": model.num_parameters(),
    }
