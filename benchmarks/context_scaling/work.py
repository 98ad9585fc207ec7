"""Trains and measures one run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.measure import measured
from benchmarks.context_scaling.data import Documents, name_of, read_documents
from benchmarks.context_scaling.grid import DOCUMENT, SCALES, WHOLE, Run
from benchmarks.context_scaling.measures import by_position, contexts_of, gain, measure, some_of
from benchmarks.context_use import LENGTHS, context_use
from sympow.data import Batches, Corpus
from sympow.evaluation import BigramCounts, ContextLosses, count_bigrams
from sympow.models import LanguageModel
from sympow.training import NonFiniteError, optimizer, read_metrics, train
from sympow.training.optimizer import muon_weights
from sympow.training.throughput import token_flops

DONE, NOT_FINITE, FAILED = "done", "not finite", "failed"


@dataclass(frozen=True)
class Trainer:
    """Describes how runs are trained: the scale, the corpus, the device, and whether torch.compile is used.

    Attributes:
        measures: whether a finished model's use of its context is measured, too.
        keep: the folder that the folders of runs are kept in, with their weights; None: nowhere.
    """

    scale: str
    corpus: Path
    device: str
    compiled: bool = False
    measures: bool = False
    keep: Path | None = None

    def prepare(self, worker: int) -> Callable[[Run], dict[str, Any]]:
        """Returns a function that trains a run and returns its record."""
        choose_gpu(self.device, worker)
        documents = read_documents(SCALES[self.scale], self.corpus)
        counts = count_bigrams(documents.train, documents.train.vocab_size) if self.measures else None
        about = {"compiled": self.compiled, **measured(self.device), "corpus": name_of(documents.train)}
        return lambda run: self._record(run, documents, counts, about)

    def _record(
        self, run: Run, documents: Documents, counts: BigramCounts | None, about: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the record of a run: "row" for the table of runs, "positions" for that of losses by position, and
        "use" for that of measures of the context."""
        begun = time.perf_counter()
        use: list[dict[str, Any]] = []
        try:
            with fast_attention(self.device):
                found, positions = self._train(run, documents, counts, use)
        except NonFiniteError as error:
            found, positions = {"status": NOT_FINITE, "error": str(error)}, []
        seconds = round(time.perf_counter() - begun, 1)
        row = {**asdict(run), "scale": self.scale, **found, "seconds": seconds, **about}
        of_corpus = {"corpus": about["corpus"]}
        return {"row": row, "positions": [each | of_corpus for each in positions],
                "use": [{"run": run.name} | of_corpus | each for each in use]}  # fmt: skip

    def _train(
        self, run: Run, documents: Documents, counts: BigramCounts | None, use: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        scale = SCALES[self.scale]
        config = run.config(scale, self.corpus, self.device, self.compiled)
        settings = config.training
        batches = Batches(documents.train, settings.context, settings.rows_per_pass, run.seed, pack=False)
        trained_at = run.trained_at // scale.shrink
        along = some_of(documents.held_out)
        found: dict[str, Any] = {}
        positions: list[dict[str, Any]] = []

        def observe(trained: LanguageModel, step: int) -> None:
            model = not_compiled(trained) if self.compiled else trained
            if step < settings.steps or len(along) < len(documents.held_out):
                losses = measure(model, along, trained_at, settings.precision)
                positions.append(_position_row(run, step, along, losses))
            if step < settings.steps:
                return
            for context in contexts_of(trained_at, DOCUMENT // scale.shrink):
                losses = measure(model, documents.held_out, context, settings.precision)
                positions.append(_position_row(run, step, documents.held_out, losses))
                if context == trained_at:
                    found.update(held_out_loss=round(losses.loss, 5), gain=gain(by_position(losses), context))
                found.update(best_loss=round(losses.best.loss, 4), best_context=losses.best.end)  # of the longest
            found.update(parameters=model.num_parameters(), flops=token_flops(model, trained_at))
            if counts is not None:
                lengths = [length // scale.shrink for length in LENGTHS]
                use.extend(context_use(model, documents.held_out, counts, settings.precision, lengths))

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if self.compiled:  # compiled code of earlier runs would count towards the limit of recompilations
            torch.compiler.reset()
        with self._folder(run) as folder, whole_matrices(run):
            train(config, batches, folder, observe=observe, quiet=True)
            if "held_out_loss" not in found:
                raise InterruptedError(f"{run.name} was stopped before step {settings.steps}, its last one")
            metrics = read_metrics(folder)
        if found["flops"] is not None:
            found["flops"] *= metrics[-1]["tokens"]
        return {
            "status": DONE,
            "steps": settings.steps,
            # In the company of other runs; the first steps compile kernels.
            "tokens_per_second": round(median(row["tokens_per_second"] for row in metrics[1:])),
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device == "cuda" else None,
            **found,
        }, positions

    def _folder(self, run: Run) -> AbstractContextManager[str]:
        """Returns the folder that a run is trained in, empty: one that is kept, or one that is removed at the end."""
        if self.keep is None:
            return tempfile.TemporaryDirectory()
        folder = self.keep / run.name
        shutil.rmtree(folder, ignore_errors=True)
        return nullcontext(str(folder))


def whole_matrices(run: Run) -> AbstractContextManager[Any]:
    """Lets Muon take fused projections as one matrix, where the optimizer of a run is `WHOLE`."""
    if getattr(run, "optimizer", None) != WHOLE:
        return nullcontext()
    return patch.object(optimizer, "muon_weights", lambda model: [(x, [len(x)]) for x, _ in muon_weights(model)])


def not_compiled(model: LanguageModel) -> LanguageModel:
    """Returns a copy that is not compiled, because rows of other lengths would be compiled again."""
    copied = LanguageModel(model.config, seed=0).to(next(model.parameters()).device)
    copied.load_state_dict(model.state_dict())
    return copied.eval()


def _position_row(run: Run, step: int, held_out: Corpus, losses: ContextLosses) -> dict[str, Any]:
    return {"run": run.name, "step": step, "evaluated_context": losses.context + 1, "documents": len(held_out),
            "held_out_loss": round(losses.loss, 5), **by_position(losses)}  # fmt: skip


def choose_gpu(device: str, worker: int) -> None:
    """Assigns a GPU to each worker."""
    if device == "cuda":
        torch.cuda.set_device(worker % torch.cuda.device_count())


def fast_attention(device: str) -> AbstractContextManager:
    """Lets torch use cuDNN's softmax attention where possible. It is the fastest on Hopper, but not torch's default."""
    if device != "cuda":
        return nullcontext()
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends, set_priority=True)
