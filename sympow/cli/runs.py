"""Runs as the commands see them: a config trained on its data, and a trained model with its tokenizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from sympow.cli.conversion import Lesson, check_tokenizer, open_lesson
from sympow.data import Batches, Tokenizer, load_tokenizer, open_corpus
from sympow.models import LanguageModel
from sympow.progress import Progress
from sympow.training import RunConfig, TrainingResult, load_model, train
from sympow.training.checkpoint import latest_step
from sympow.training.ranks import join, launched
from sympow.training.run_folder import clear_run_folder, open_run_folder
from sympow.training.step import resolve_device

TOKENIZER = "tokenizer.json"
OPENING = "opening the data"  # which may train a tokenizer and fill a cache


def train_run(
    config: RunConfig, run_dir: str | os.PathLike[str], *, quiet: bool = False, restart: bool = False
) -> TrainingResult:
    """Opens the data of a config and trains its model into a run folder, or continues the run in it.

    Started on several ranks by torchrun, it runs on all of them. A finished run is left as it is. `restart` first
    removes what the folder holds of an earlier run. Raises as `open_corpus` and `train` do, and ValueError where the
    corpus has more tokens than the model.
    """
    device, settings = resolve_device(config.training.device), config.training
    with launched(device):
        ranks = join(config, device)
        with ranks.together():
            if restart and ranks.main:
                clear_run_folder(run_dir)
        folder = open_run_folder(run_dir, config, ranks)
        if latest_step(folder) >= settings.steps:
            return TrainingResult(settings.steps, settings.steps, None, None)
        with ranks.main_first(), Progress(OPENING, quiet=quiet or not ranks.main):
            batches, held_out = _open_batches(config, folder, save=ranks.main)
        lesson = Lesson() if config.distillation is None else open_lesson(config.distillation, settings.steps, device)
        return train(
            config, batches, folder, held_out=held_out, start=lesson.start, objective=lesson.objective, quiet=quiet,
            ranks=ranks,
        )  # fmt: skip


def _open_batches(config: RunConfig, folder: Path, save: bool) -> tuple[Batches, Batches]:
    """Of the training and the held-out documents; saves the tokenizer into the run's folder if asked."""
    tokenizer = saved_tokenizer(folder)
    if config.distillation is not None:
        tokenizer = saved_tokenizer(Path(config.distillation.start))
        check_tokenizer(config.data.tokenizer, tokenizer)
    settings, splits = config.training, open_corpus(config.data, tokenizer=tokenizer)
    if splits.train.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the corpus has a vocabulary of {splits.train.vocab_size} tokens, "
            f"more than model.vocab_size = {config.model.vocab_size}"
        )
    if splits.tokenizer is not None and save:
        splits.tokenizer.save(folder / TOKENIZER)
    batches, held_out = (
        Batches(corpus, settings.context, settings.rows_per_pass, settings.seed, config.data.pack)
        for corpus in (splits.train, splits.held_out)
    )
    return batches, held_out


class Run(NamedTuple):
    """A trained model in evaluation mode, its tokenizer (None for tokens without text), its config."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    config: RunConfig


def load_run(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Run:
    """A run from its folder, at the newest checkpoint, or from a checkpoint file in it.

    Raises FileNotFoundError where there is none or its tokenizer is missing, CheckpointError for a checkpoint that
    cannot be read.
    """
    loaded = load_model(path, device)
    if loaded.older:
        what = "power attention without short convolution and output gate"
        print(f"{path} is a run of version 0.1: {what}", file=sys.stderr)
    tokenizer, named = saved_tokenizer(loaded.run_dir), loaded.config.data.tokenizer
    if tokenizer is None and named != "none":  # another one, made from the data, may have other tokens
        file = loaded.run_dir / TOKENIZER
        raise FileNotFoundError(f"{file} is missing: the run's config names a tokenizer, {named!r}, saved there")
    return Run(loaded.model, tokenizer, loaded.config)


def labels_of(paths: Sequence[str]) -> list[str]:
    """What to call runs: the last part of each path if that tells them apart, else the whole; ValueError for a run that
    is given twice."""
    last = [Path(path).resolve().name for path in paths]
    labels = last if len(set(last)) == len(last) else list(paths)
    if len(set(labels)) < len(paths):
        raise ValueError(f"a run is given twice: {', '.join(paths)}")
    return labels


def check_tokenizers(tokenizers: Mapping[str, Tokenizer | None]) -> None:
    """Raises ValueError unless the tokenizers of runs, by their labels, are one and the same."""
    (first, tokenizer), *others = tokenizers.items()
    for label, other in others:
        if (other and other.fingerprint) != (tokenizer and tokenizer.fingerprint):
            raise ValueError(f"{first} and {label} have different tokenizers: their tokens mean different things")


def saved_tokenizer(run_dir: Path) -> Tokenizer | None:
    """The tokenizer in a run folder, or None."""
    file = run_dir / TOKENIZER
    return load_tokenizer(file) if file.exists() else None
