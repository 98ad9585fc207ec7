"""Measures tokens per second and memory of training steps, with one process on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.context_scaling.grid import DOCUMENT, SCALES, Run
from benchmarks.context_scaling.work import choose_gpu, fast_attention
from benchmarks.measure import commit, processor
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

    @property
    def name(self) -> str:
        """Returns the case in one word."""
        return f"{self.variant}-{self.context}-{self.mode}"


def guess(case: Case) -> float:
    """Returns the estimated seconds of a case."""
    return 60.0 if case.mode == "compiled" else 15.0


def kind(case: Case) -> str:
    """Returns a key that is equal for cases that take the same time."""
    return case.mode


@dataclass(frozen=True)
class Timer:
    """Describes how cases are timed: the scale and the device."""

    scale: str
    device: str

    def prepare(self, worker: int) -> Callable[[Case], dict[str, Any]]:
        """Returns a function that times a case and returns its row."""
        choose_gpu(self.device, worker)
        about = {"processor": processor(self.device), "torch": torch.__version__, "commit": commit()}
        return lambda case: {"variant": case.variant, "context": case.context, "mode": case.mode,
                             **self._time(case), **about}  # fmt: skip

    def _time(self, case: Case) -> dict[str, Any]:
        measured = self._measure(case)
        gc.collect()
        torch.compiler.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return measured

    def _measure(self, case: Case) -> dict[str, Any]:
        scale = SCALES[self.scale]
        run = Run(case.variant, case.context)
        config = run.config(scale, Path("corpus"), self.device, case.mode == "compiled")
        settings, device = config.training, torch.device(self.device)
        model = LanguageModel(config.model, seed=0).to(device)
        flops = token_flops(model, settings.context)
        prepare(model, config, Ranks())
        optimizer = make_optimizer(model, settings)
        generator = torch.Generator().manual_seed(0)
        shape = (DOCUMENT // run.context, settings.context + 1)
        texts = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(WARM_UP + TIMED + 1)]
        passes = [make_pass(Part(text[:, :-1].contiguous(), text[:, 1:].contiguous()), model, device) for text in texts]

        def launch(step: int) -> StepNumbers:
            if self.device == "cuda" and step == 2:  # the first steps compile and try out kernels
                torch.cuda.reset_peak_memory_stats()
            return train_step(model, optimizer, [passes[step]], 1e-4, settings, device)

        with fast_attention(self.device):
            seconds, _ = timed_steps(launch, WARM_UP + TIMED)
        return {
            "tokens_per_second": round(shape[0] * settings.context / median(seconds[WARM_UP:])),
            "first_step_seconds": round(seconds[0], 1),
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device == "cuda" else None,
            "flops_per_token": flops,
            "parameters": model.num_parameters(),
        }
