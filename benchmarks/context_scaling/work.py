"""What a worker does: takes runs that nobody has, trains and measures them, and leaves a record of each."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.context_scaling.grid import Run, Scale
from benchmarks.measure import commit, processor
from sympow.data import Batches, Corpus, Subset, TokenCorpus, open_corpus
from sympow.evaluation import context_losses
from sympow.training import NonFiniteError, RunConfig, load_model, read_metrics, train
from sympow.training.checkpoint import atomic_write
from sympow.training.claim import claim
from sympow.training.config import first_difference
from sympow.training.loop import autocast
from sympow.training.throughput import token_flops

HELD_OUT_DOCUMENTS = 16  # of the longest context: a million tokens
BEGUN, DONE, NOT_FINITE, FAILED = "begun", "done", "not finite", "failed"
FINISHED = (DONE, NOT_FINITE)
RECORDS, CLAIMS, RUNS = "records", "claims", "runs"  # folders


@dataclass(frozen=True)
class Job:
    """Runs and where they are, for every worker of a launch.

    launch, began: which command started the workers, and its time.time(). In one launch a run is begun once.
    """

    runs: tuple[Run, ...]
    scale: Scale
    corpus: Path
    out: Path
    steps: int
    device: str
    workers: int
    launch: str
    began: float

    def config(self, run: Run) -> RunConfig:
        return run.config(self.scale, self.corpus, self.steps, self.device)

    def record(self, run: Run) -> dict[str, Any] | None:
        """What is known of a run: "run", "status", "launch", "setting", and what else the status says; None: nothing.

        ValueError where it is known with another setting.
        """
        file = self._record_file(run)
        if not file.exists():
            return None
        record = json.loads(file.read_text(encoding="utf-8"))
        difference = first_difference(record["setting"], self._setting(run))
        if difference:
            field, old, new = difference
            raise ValueError(f"{file} is of a run with {field} = {old!r}, not {new!r}: give another folder")
        return record

    def write(self, run: Run, record: dict[str, Any]) -> None:
        with atomic_write(self._record_file(run)) as file:
            content = {"run": asdict(run), "launch": self.launch, "setting": self._setting(run), **record}
            file.write((json.dumps(content) + "\n").encode())

    def to_do(self, run: Run) -> bool:
        """Whether a run is neither finished nor begun in this launch. What failed in an earlier one is tried again."""
        record = self.record(run)
        return record is None or (record["status"] not in FINISHED and record["launch"] != self.launch)

    def _record_file(self, run: Run) -> Path:
        return self.out / RECORDS / f"{run.name}.json"

    def _setting(self, run: Run) -> dict[str, Any]:
        """What decides a run's results: its config, wherever the documents are and whatever device it is on."""
        config = self.config(run).to_dict()
        del config["training"]["device"], config["data"]["path"], config["data"]["held_out_path"], config["execution"]
        return config


def work(job: Job, worker: int) -> None:
    """The whole of a worker process. It ends early where it is interrupted, and with code 1 after a failure, which may
    have cost the CUDA context: another process goes on."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.workers))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C is for the launcher, which then terminates this
    if job.device == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(worker % torch.cuda.device_count())
    about = {"processor": processor(job.device), "torch": torch.__version__, "commit": commit()}
    documents = _documents(job)
    for run in job.runs:
        if not parent_alive():
            return
        with claim(job.out / CLAIMS / run.name) as ours:
            if not ours or not job.to_do(run):
                continue
            job.write(run, {"status": BEGUN})
            record = _attempt(job, run, *documents)
            if record is None:
                return
            job.write(run, {**record, "about": {**about, "corpus": documents[0].fingerprint}})
        print(_progress(job, run, record), flush=True)
        if record["status"] == FAILED:
            raise SystemExit(1)
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()


def parent_alive() -> bool:
    """Whether the launcher of this process still is."""
    parent = parent_process()
    return parent is not None and parent.is_alive()


def _documents(job: Job) -> tuple[TokenCorpus, TokenCorpus]:
    """Documents to train on and held-out ones, in memory: from compressed chunks short rows would come too slowly."""
    splits = open_corpus(job.config(job.runs[0]).data)
    count = len(splits.held_out)
    chosen = np.linspace(0, count - 1, min(HELD_OUT_DOCUMENTS, count)).astype(np.int64)
    return _in_memory(splits.train), _in_memory(Subset(splits.held_out, chosen))


def _in_memory(corpus: Corpus) -> TokenCorpus:
    """The same corpus, by its fingerprint too, so that `sympow train` can go on with a run."""
    texts = [corpus[i] for i in range(len(corpus))]
    offsets = np.cumsum([0, *(len(text) for text in texts)], dtype=np.int64)
    return TokenCorpus(np.concatenate(texts), offsets, corpus.vocab_size, corpus.fingerprint)


def _attempt(job: Job, run: Run, documents: TokenCorpus, held_out: TokenCorpus) -> dict[str, Any] | None:
    """The record of a run; None if it was interrupted."""
    try:
        with _fast_attention(job.device):
            return _measure(job, run, documents, held_out)
    except NonFiniteError as error:
        return {"status": NOT_FINITE, "error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"status": FAILED, "error": f"{type(error).__name__}: {error}"}


def _fast_attention(device: str) -> AbstractContextManager:
    """Softmax attention by cuDNN where it can: on Hopper it is the fastest, and not what torch takes by itself."""
    if device != "cuda":
        return nullcontext()
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends, set_priority=True)


def _measure(job: Job, run: Run, documents: TokenCorpus, held_out: TokenCorpus) -> dict[str, Any] | None:
    """Trains a run, or goes on with it, and evaluates it; None if it was interrupted."""
    config, folder, longest = job.config(run), job.out / RUNS / run.name, job.scale.longest
    settings = config.training
    batches, held_out_batches = (
        Batches(corpus, settings.context, settings.batch_size, settings.seed, config.data.pack)
        for corpus in (documents, held_out)
    )
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # Held-out losses along the way only where part (d) draws them.
    along = held_out_batches if run.context == longest else None
    result = train(config, batches, folder, held_out=along, quiet=True)
    if result.stopped_by:
        return None
    trained_here = result.loss is not None  # not so where only the evaluation was missing
    peak = torch.cuda.max_memory_allocated() if job.device == "cuda" and trained_here else None
    model = load_model(folder, job.device).model
    found = {}
    for context in sorted({run.context, longest}):
        with autocast(settings.precision, next(model.parameters()).device):
            # Rows of `context` tokens hold one prediction less, and all of them are taken.
            found[context] = context_losses(model, held_out, context - 1, rows=int(held_out.lengths.sum()))
    metrics = read_metrics(folder)
    tokens, per_token = metrics[-1]["tokens"], token_flops(model, run.context)
    speed = median(row["tokens_per_second"] for row in metrics[1:])  # the first steps compile kernels
    return {
        "status": DONE,
        "row": {
            "parameters": model.num_parameters(),
            "steps": settings.steps,
            "tokens": tokens,
            "flops": None if per_token is None else per_token * tokens,
            "seconds": tokens / speed,
            "tokens_per_second": speed,
            "peak_bytes": peak,
            "held_out_loss": found[run.context].loss,
        },
        "bins": [{"evaluated_context": n, **each._asdict()} for n, losses in found.items() for each in losses.bins],
        "curve": [{name: row.get(name) for name in ("step", "tokens", "loss", "held_out_loss")} for row in metrics],
    }


def _progress(job: Job, run: Run, record: dict[str, Any]) -> str:
    """A line: the run's result, how many runs are finished, and the time left as this launch has gone so far."""
    finished = {other: found for other in job.runs if (found := job.record(other)) and found["status"] in FINISHED}
    here = sum(other.cost() for other, found in finished.items() if found["launch"] == job.launch)
    left = sum(other.cost() for other in job.runs if other not in finished)
    seconds = time.time() - job.began
    result = record.get("error")
    if record["status"] == DONE:
        row = record["row"]
        result = f"held-out loss {row['held_out_loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s"
    wait = f", about {seconds * left / here / 60:.1f} min left" if here else ""
    return f"[{seconds:.0f} s] {len(finished)} of {len(job.runs)}: {run.name}: {result}{wait}"
