"""Trains the recipes of sympow/recipes/hybrids.py and measures their AR hits in the same process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.common.measure import measured
from benchmarks.context_scaling.data import Documents, name_of, read_data
from benchmarks.context_scaling.work import choose_gpu, fast_attention, not_compiled
from sympow.data import Batches
from sympow.evaluation import BigramCounts, HitLosses, count_bigrams, hit_losses
from sympow.evaluation.ar_hits import FREQUENT, PARTS
from sympow.models import LanguageModel
from sympow.recipes import load_recipe
from sympow.training import RunConfig, override, read_metrics, train
from sympow.training.devices import autocast

RECIPES = ("attention", "softmax_gate", "power", "power_delta", "power_delta_offset", "hyena", "base_conv")
# Table 2 with one block everywhere, and other mixers of Tables 1, 3, 4 and 5.
CONTROLS = ("control_attention", "control_base_conv", "control_full", "control_random", "control_programmatic",
            "control_learned", "control_learned_row")  # fmt: skip
OTHERS = ("base_conv_published", "long_convolution", "h3", "rwkv4", "retnet", "liquid_s4", "hyena_window64",
          "hyena_window256", "hyena_w2", "hyena_w14", "hyena_heads")  # fmt: skip
# Changes that make every run one of a second, to try the program out.
TOY = ("model.d_model=32", "model.n_layers=6", "model.n_heads=2", "training.steps=2", "training.warmup_steps=1",
       "training.batch_size=2")  # fmt: skip
RATE = 8e-3  # the learning rate of the recipes
GUESS = 30.0  # seconds of a run on an H200, with three beside it


class Job(NamedTuple):
    """Holds a recipe, the seed of its weights and of the order of its data, and the highest learning rate."""

    recipe: str
    seed: int
    learning_rate: float

    def config(self, toy: bool, corpus: Path, device: str, vocab_size: int, changes: Sequence[str] = ()) -> RunConfig:
        """Returns the recipe on a corpus of `vocab_size` different tokens, with `changes` as "key.path=value"."""
        config = load_recipe(f"hybrids:{self.recipe}")
        paths = (f"data.path={corpus / 'train.zarr'}", f"data.held_out_path={corpus / 'heldout.zarr'}",
                 f"data.vocab_size={vocab_size}", f"model.vocab_size={vocab_size}")  # fmt: skip
        config = override(config, [*(TOY if toy else ()), *changes, *paths])
        steps, rate = config.training.steps, self.learning_rate
        every = {"log_every": max(1, steps // 8), "evaluate_every": steps}
        training = replace(config.training, seed=self.seed, learning_rate=rate, device=device, **every)
        return replace(config, training=training)


def guess(job: Job) -> float:
    """Returns the estimated seconds of a job."""
    return GUESS


def kind(job: Job) -> str:
    """Returns a key that is equal for jobs that take the same time."""
    return job.recipe


@dataclass(frozen=True)
class Trainer:
    """Describes how jobs are done: the corpus and its vocabulary, the device, whether runs are tiny, for a test,
    changes of every config, and the number of training documents (None: all of the corpus)."""

    corpus: Path
    vocab_size: int
    device: str
    toy: bool = False
    changes: tuple[str, ...] = ()
    rows: int | None = None

    def prepare(self, worker: int) -> Callable[[Job], dict[str, Any]]:
        """Returns a function that does a job. Reads the documents and counts their bigrams once."""
        choose_gpu(self.device, worker)
        documents = read_data(self._config(Job(RECIPES[0], 0, RATE)).data, self.rows)
        counts = count_bigrams(documents.train, documents.train.vocab_size)
        about = {"counted_tokens": counts.tokens, **measured(self.device), "corpus": name_of(documents.train)}
        return lambda job: self._record(job, documents, counts, about)

    def _config(self, job: Job) -> RunConfig:
        return job.config(self.toy, self.corpus, self.device, self.vocab_size, self.changes)

    def _record(self, job: Job, documents: Documents, counts: BigramCounts, about: dict[str, Any]) -> dict[str, Any]:
        """Returns the record of a job: "run", a row, and "slices" and "curves", lists of rows."""
        began = time.perf_counter()
        config = self._config(job)
        settings = config.training
        batches = Batches(documents.train, settings.context, settings.rows_per_pass, settings.seed, pack=False)
        found: dict[str, Any] = {}

        def observe(trained: LanguageModel, step: int) -> None:
            model = not_compiled(trained) if config.execution.compile else trained
            # Windows of `context` tokens, which fill the documents.
            context = settings.context - 1
            rows = 16 if self.toy else int(documents.held_out.lengths.sum())
            with autocast(settings.precision, next(model.parameters()).device):
                found["losses"] = hit_losses(model, documents.held_out, counts, context, rows)
            found["parameters"] = model.num_parameters()

        if config.execution.compile:  # compiled code of earlier runs would count towards the limit of recompilations
            torch.compiler.reset()
        with tempfile.TemporaryDirectory() as folder, fast_attention(self.device):
            train(config, batches, folder, observe=observe, quiet=True)
            metrics = read_metrics(folder)
        losses: HitLosses = found["losses"]
        key = job._asdict()
        run = {
            **key,
            "optimizer": settings.optimizer,
            "changes": " ".join(self.changes),
            "tokens": metrics[-1]["tokens"],
            "steps": settings.steps,
            "context": losses.context,
            "frequent": FREQUENT,
            "parameters": found["parameters"],
            "held_out_loss": round(losses.slice("all").loss, 5),
            "distance_exponent": round(losses.distance_law()[1], 4),
            # In the company of other runs; the first steps compile kernels.
            "tokens_per_second": round(median(row["tokens_per_second"] for row in metrics[1:] or metrics)),
            "seconds": round(time.perf_counter() - began, 1),
            **about,
        }
        return {"run": run, "slices": slice_rows(key, losses), "curves": curve_rows(key, losses)}


def slice_rows(key: dict[str, Any], losses: HitLosses) -> list[dict[str, Any]]:
    """Returns the tokens and the summed loss of every part in every document."""
    parts = {part: losses.by_document(part) for part in PARTS}
    return [
        {**key, "document": int(document), "part": part, "tokens": int(tokens[n]), "nats": round(float(nats[n]), 3)}
        for n, document in enumerate(losses.documents)
        for part, (tokens, nats) in parts.items()
    ]


def curve_rows(key: dict[str, Any], losses: HitLosses) -> list[dict[str, Any]]:
    """Returns the losses by count and by distance, and how many AR hits there are a token and distance."""
    curves = {"repeated": losses.by_count(True), "new": losses.by_count(False), "distance": losses.by_distance()}
    rates = dict(zip([cell.start for cell in losses.by_distance()], losses.distance_rates(), strict=True))
    rows = []
    for part, cells in curves.items():
        for cell in cells:
            if cell.tokens:
                row = {**key, "part": part, "start": cell.start, "end": cell.end, "tokens": cell.tokens}
                row |= {"loss": round(cell.loss, 5), "rate": None}
                if part == "distance":
                    row["rate"] = float(f"{rates[cell.start]:.4g}")
                rows.append(row)
    return rows
