"""The public functions for runs: `run` trains the model of a config, `load` loads a trained model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.data import Batches, ByteTokenizer, Corpus, DataConfig, Splits, Tokenizer, load_tokenizer, open_corpus
from sympow.data.tokenizer_files import read_beside, write_beside
from sympow.models import LanguageModel
from sympow.ops.memory import check_memory
from sympow.progress import Progress
from sympow.training.checkpoint import check_whole, latest, latest_step
from sympow.training.config import RunConfig
from sympow.training.devices import resolve_device
from sympow.training.loop import Objective
from sympow.training.ranks import join, launched
from sympow.training.run_folder import folder_of, load_model, open_run_folder, read_config
from sympow.training.trainer import TrainingResult, train

TOKENIZER = "tokenizer.json"
OPENING = "opening the data"  # which may train a tokenizer and fill a cache


class Lesson(NamedTuple):
    """Holds the initial weights and the objective of a run. Both are None unless the run is a distillation."""

    start: Mapping[str, Tensor] | None = None
    objective: Objective | None = None


class _Parts(NamedTuple):
    model: LanguageModel
    tokenizer: Tokenizer | None
    config: RunConfig


class Run(_Parts):
    """Holds a trained model in evaluation mode, its tokenizer (None for tokens without text), its config.

    It is a tuple of these three. `held_out` is the fingerprint of the documents that were held out in the training;
    None if it is not known.
    """

    held_out: str | None = None


def run(
    config: RunConfig,
    out: str | os.PathLike[str],
    *,
    restart: bool = False,
    quiet: bool = False,
    lesson: Callable[[torch.device], Lesson] | None = None,
) -> TrainingResult:
    """Trains the model of a config on the data of the config, or continues the run in the folder.

    The folder then holds the config, the tokenizer, the metrics and the checkpoints. A run that was killed continues
    with the same call. A finished run is not changed. If torchrun started the program, the run uses all ranks.

    Args:
        config: the config of the run.
        out: the folder of the run: a new folder, or the folder of a run with the same config.
        restart: whether to remove the files of an earlier run in the folder first.
        quiet: show no progress on stderr.
        lesson: a function that loads the initial weights and the objective of a distillation onto the device of the
            run. `sympow.conversion.distill` passes it. None: the run is no distillation.

    If the config has a `start`, a new run begins with the weights of that run, and has its tokenizer.

    Returns the steps done and the last loss, which is None for a run that was finished before the call.

    Raises RuntimeError where another process trains in the folder, CheckpointError where the last checkpoint is cut or
    damaged, also of a finished run, ValueError where the folder holds another run, or the model from which this run
    begins or learns, where the vocabulary of the corpus is larger than that of the model, where the documents at
    `held_out_path` are those of the training, and where only one of `lesson` and `config.distillation` is given;
    FileNotFoundError where the data are missing; and as `train` does.
    """
    if (config.distillation is None) != (lesson is None):
        raise ValueError("a config with `distillation`, and no other, is for sympow.conversion.distill")
    _check_sources(config, Path(out))
    device, settings = resolve_device(config.training.device), config.training
    _check_pass(config, device)
    with launched(device):
        ranks = join(config, device)
        with open_run_folder(out, config, ranks, restart) as folder:
            if latest_step(folder) >= settings.steps:
                with ranks.together():
                    last = latest(folder) if ranks.main else None
                    if last is not None:
                        check_whole(last)
                return TrainingResult(settings.steps, settings.steps, None, None)
            with ranks.main_first(), Progress(OPENING, quiet=quiet or not ranks.main):
                batches, held_out = _open_batches(config, folder, save=ranks.main)
            start, objective = Lesson() if lesson is None else lesson(device)
            if config.start is not None and not latest_step(folder):
                begun = load_model(config.start)
                start = begun.model.state_dict()
                if ranks.main and config.data == begun.config.data:
                    tell_changed(config.start, begun.held_out, held_out.corpus)
            return train(
                config, batches, folder, held_out=held_out, start=start, objective=objective, quiet=quiet, ranks=ranks
            )


def _check_sources(config: RunConfig, out: Path) -> None:
    """Raises ValueError if the folder of the run is that of a model which the run reads: `restart` would remove it."""
    begins = config.start if config.distillation is None else config.distillation.start
    teacher = None if config.distillation is None else config.distillation.teacher
    for source, what in ((begins, "from which it begins"), (teacher, "which holds its teacher")):
        if source is not None and Path(source).exists() and folder_of(source).resolve() == out.resolve():
            raise ValueError(f"the run cannot be written into {out}, {what}: give another folder (--out)")


def fine_tuning_run(start: str | os.PathLike[str]) -> RunConfig:
    """Returns the config of a run that begins with the weights of another run, and is otherwise as that run.

    Args:
        start: the path of the other run's folder or of a checkpoint in it.

    Raises FileNotFoundError where there is none.
    """
    if not Path(start).exists():
        raise FileNotFoundError(f"no run and no checkpoint at {start}")
    folder = folder_of(start)
    if folder != Path(start) and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{start} is no checkpoint in the folder of a run: {folder} has no config.json")
    config = read_config(folder)
    return replace(config, name=f"{config.name}-tuned", start=str(start), distillation=None)


def load(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = torch.float32
) -> Run:
    """Loads a run from its folder, at the newest checkpoint, or from a checkpoint file in it.

    Args:
        path: the path of the folder or of the checkpoint.
        device: the device of the model.
        dtype: of the weights, as in `load_model`; None: that of the checkpoint.

    Returns the model in evaluation mode, the tokenizer (None for a run on tokens without text) and the config.

    Raises FileNotFoundError where there is no run or its tokenizer is missing, CheckpointError for a checkpoint that
    cannot be read, ValueError for a tokenizer with more tokens than the model.
    """
    loaded = load_model(path, device, dtype)
    vocab_size, named = loaded.config.model.vocab_size, loaded.config.data.tokenizer
    tokenizer = saved_tokenizer(loaded.run_dir, vocab_size)
    if tokenizer is None and named != "none":  # another one, made from the data, may have other tokens
        file = loaded.run_dir / TOKENIZER
        raise FileNotFoundError(f"{file} is missing: the run's config names a tokenizer, {named!r}, saved there")
    run = Run(loaded.model, tokenizer, loaded.config)
    run.held_out = loaded.held_out
    return run


def saved_tokenizer(run_dir: Path, vocab_size: int | None = None) -> Tokenizer | None:
    """Loads the tokenizer in a run folder, for a model of `vocab_size` tokens; None where there is none."""
    file = run_dir / TOKENIZER
    return load_tokenizer(file, vocab_size) if file.exists() else None


def tell_remarks(splits: Splits) -> None:
    """Prints on stderr what was left out of the data. A run with `quiet` shows it too, as it changes the result."""
    for line in splits.remarks:
        print(line, file=sys.stderr)


def tell_changed(name: str, held_out: str | None, now: Corpus) -> None:
    """Prints a line on stderr if other documents are held out now than in the training of a model.

    Args:
        name: of the model.
        held_out: the fingerprint of the documents that were held out then; None if it is not known.
        now: those of the same data config now.
    """
    if held_out not in (None, now.fingerprint):
        print(f"the documents have changed since the training of {name}, so that it may have been trained on some of "
              "those that are held out now; held_out_path can name others", file=sys.stderr)  # fmt: skip


def _check_pass(config: RunConfig, device: torch.device) -> None:
    """Raises ValueError if the tokens of a pass, or their embeddings, are larger than the memory."""
    settings = config.training
    tokens = settings.rows_per_pass * settings.context
    what = f"training.context = {settings.context:,} with {settings.rows_per_pass:,} rows in a pass"
    check_memory(what, 16 * tokens)  # int64, with their targets
    width, element = config.model.d_model, 4 if settings.precision == "float32" else 2
    embeddings = tokens * width * element // config.execution.context_parallel
    check_memory(f"{what} and model.d_model = {width:,}", embeddings, device)


def _open_batches(config: RunConfig, folder: Path, save: bool) -> tuple[Batches, Batches]:
    """Returns batches of the training and of the held-out documents.

    With `save`, saves the tokenizer in the folder and prints remarks on the data.
    """
    # One of a run that was stopped before its first checkpoint may be of texts that have changed since.
    tokenizer = saved_tokenizer(folder) if latest_step(folder) or not save else None
    if config.distillation is not None:
        tokenizer = _tokenizer_of(config.distillation.start, config.data)
        _check_tokenizer(config.data, tokenizer, "the model to distill")
    elif config.start is not None:
        if not latest_step(folder):
            tokenizer = _tokenizer_of(config.start, config.data)
        _check_tokenizer(config.data, tokenizer, config.start)
    settings, splits = config.training, open_corpus(config.data, tokenizer=tokenizer)
    if save:
        tell_remarks(splits)
    if splits.train.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the corpus has a vocabulary of {splits.train.vocab_size} tokens, "
            f"more than model.vocab_size = {config.model.vocab_size}"
        )
    path, trained = config.data.held_out_path, getattr(splits.train, "corpora", [splits.train])
    if path is not None and splits.held_out.fingerprint in {each.fingerprint for each in trained}:
        raise ValueError(
            f"data.held_out_path = {path!r} holds the documents of the training: name others, or none to hold a part "
            "of them out"
        )
    if splits.tokenizer is not None and save:
        splits.tokenizer.save(folder / TOKENIZER)
        named = config.data.tokenizer if config.distillation is None else str(folder_of(config.distillation.start))
        if config.start is not None:
            named = str(folder_of(config.start))
        if named not in ("bpe", "bytes", "none"):
            write_beside(read_beside(Path(named) if Path(named).is_dir() else Path(named).parent), folder)
    batches, held_out = (
        Batches(corpus, settings.context, settings.rows_per_pass, settings.seed, config.data.pack)
        for corpus in (splits.train, splits.held_out)
    )
    return batches, held_out


def _tokenizer_of(start: str, data: DataConfig) -> Tokenizer | None:
    """Returns the tokenizer of the run, or of the model to distill, to start from; None for tokens without text.

    Raises FileNotFoundError if it is missing, and ValueError if a new one would be trained for tokens without text.
    """
    own, named = saved_tokenizer(folder_of(start)), fine_tuning_run(start).data.tokenizer
    if own is None and named != "none":
        raise FileNotFoundError(f"{folder_of(start) / TOKENIZER} is missing: the config of {start} names a tokenizer")
    if own is None and data.tokenizer == "bpe":
        raise ValueError(f"the text of the tokens of {start} is not known, so no tokenizer is trained for them: "
                         "data.tokenizer names theirs")  # fmt: skip
    return own


def _check_tokenizer(data: DataConfig, own: Tokenizer | None, of: str) -> None:
    """Raises ValueError if the data config names another tokenizer than that of the model.

    "bpe" is what the config has by default. FileNotFoundError for a tokenizer that does not exist.

    Args:
        data: the config of the run's data.
        own: the model's tokenizer.
        of: names the model in messages.
    """
    if own is None:
        return
    if data.vocab_size not in (None, own.vocab_size):
        raise ValueError(f"data.vocab_size = {data.vocab_size}, but the tokenizer of {of} has {own.vocab_size} tokens")
    if data.tokenizer in ("bpe", "none"):
        return
    other = ByteTokenizer() if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer)
    if list(other.token_bytes) != list(own.token_bytes):
        raise ValueError(f"the data are in tokens of {data.tokenizer}, not in those of {of}")
