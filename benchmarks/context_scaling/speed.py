"""Measures tokens per second of training steps and of decoding, with one process on a GPU."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.decoding_rate import decoding
from benchmarks.context_scaling.grid import DOCUMENT, SCALES, Run
from benchmarks.context_scaling.work import fast_attention
from benchmarks.training import launcher, timed_steps
from sympow.models import LanguageModel
from sympow.training.ranks import Part

WARM_UP, TIMED = 4, 12  # steps of training
SEQUENCES, STEPS = 32, 64  # of decoding
SPEED = "speed.csv"
KEY = ("variant", "context", "mode")


@dataclass(frozen=True)
class Case:
    """Describes steps to time.

    Attributes:
        context: a step of training reads a document in rows of so many tokens; a step of decoding has read so many.
        mode: "eager" or "compiled" for training, or "decoding" of `SEQUENCES` sequences in bfloat16.
    """

    variant: str
    context: int
    mode: str


def timed(case: Case, scale_name: str, device_name: str) -> dict[str, Any]:
    """Returns tokens a second, the peak of memory, and what they are of, from one process alone on the device."""
    measure = _decoding if case.mode == "decoding" else _training
    found = measure(case, scale_name, device_name)
    gc.collect()
    torch.compiler.reset()
    if device_name == "cuda":
        torch.cuda.empty_cache()
    return found


def _decoding(case: Case, scale_name: str, device_name: str) -> dict[str, Any]:
    config = Run(case.variant, case.context).config(SCALES[scale_name], Path("corpus"), device_name).model
    model = LanguageModel(config, seed=0).to(device_name, torch.bfloat16).eval()
    context = case.context // SCALES[scale_name].shrink
    rate = decoding(model, SEQUENCES, context, STEPS)["tokens_per_second"]
    return {"tokens_per_second": rate and round(rate), "parameters": model.num_parameters()}


def _training(case: Case, scale_name: str, device_name: str) -> dict[str, Any]:
    run = Run(case.variant, case.context)
    config = run.config(SCALES[scale_name], Path("corpus"), device_name, case.mode == "compiled")
    generator, context = torch.Generator().manual_seed(0), config.training.context
    shape = (DOCUMENT // run.context, context + 1)
    texts = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(WARM_UP + TIMED + 1)]
    rows = [[Part(text[:, :-1].contiguous(), text[:, 1:].contiguous())] for text in texts]
    model, flops, launch = launcher(config, rows, torch.device(device_name))
    with fast_attention(device_name):
        seconds, _ = timed_steps(launch, WARM_UP + TIMED)
    return {
        "tokens_per_second": round(shape[0] * context / median(seconds[WARM_UP:])),
        "first_step_seconds": round(seconds[0], 1),
        "peak_bytes": torch.cuda.max_memory_allocated() if device_name == "cuda" else None,
        "flops_per_token": flops,
        "parameters": model.num_parameters(),
    }
