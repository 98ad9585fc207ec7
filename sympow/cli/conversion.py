"""Converted models as the commands make and train them, and their teachers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.conversion import Distillation, parse_pattern, swap_mixers
from sympow.data import DataConfig, Tokenizer, load_tokenizer
from sympow.models import LanguageModel
from sympow.training import DistillationConfig, Objective, RunConfig, TrainingConfig, load_model
from sympow.training.run_folder import new_folder, write_run_folder


def convert_model(
    source: str, out: str | os.PathLike[str], *, pattern: str, p: int, window: int
) -> tuple[Path, LanguageModel]:
    """Reads a pretrained model, swaps its mixers and writes the result as a run folder of 0 steps.

    Args:
        source: as for `load_pretrained`.
        out: a new or an empty folder.
        pattern: as for `parse_pattern` and `swap_mixers`.
        p: as for `parse_pattern` and `swap_mixers`.
        window: as for `parse_pattern` and `swap_mixers`.

    Returns the folder and the model. Raises as those do, and FileNotFoundError for a model without a tokenizer.
    """
    from sympow.integrations.transformers.pretrained import load_pretrained  # which imports transformers

    kinds, folder = parse_pattern(pattern), new_folder(out)
    pretrained = load_pretrained(source)
    if pretrained.tokenizer is None:
        raise FileNotFoundError(f"{source} has no tokenizer.json: a converted model reads and writes text by it")
    model = swap_mixers(pretrained.model, kinds, p=p, window=window)
    training = TrainingConfig(context=pretrained.context, steps=1, warmup_steps=0)
    config = RunConfig(folder.resolve().name, model.config, DataConfig(), training)
    return write_run_folder(folder, config, model, tokenizer=pretrained.tokenizer), model


class Lesson(NamedTuple):
    """What training begins with and aims at; None for both is that of any other run."""

    start: Mapping[str, Tensor] | None = None
    objective: Objective | None = None


def open_lesson(config: DistillationConfig, steps: int, device: torch.device) -> Lesson:
    """Loads the converted model and its teacher. Raises as `load_model` and `load_pretrained` do."""
    start = load_model(config.start).model.state_dict()
    return Lesson(start, Distillation(config, steps, load_teacher(config.teacher), device))


def load_teacher(source: str) -> LanguageModel:
    """Loads a teacher: the model of a run folder, such as that of the pattern softmax, or a pretrained one."""
    if (Path(source) / "checkpoints").is_dir():
        return load_model(source).model
    from sympow.integrations.transformers.pretrained import load_pretrained  # which imports transformers

    return load_pretrained(source).model


def check_tokenizer(named: str, own: Tokenizer | None) -> None:
    """Raises ValueError where the data name a tokenizer whose tokens mean something else than those of the model.

    Args:
        named: as `DataConfig.tokenizer`.
        own: the model's.
    """
    if own is None or not Path(named).exists():
        return
    other = load_tokenizer(named)
    if list(other.token_bytes) != list(own.token_bytes):
        raise ValueError(f"the data are in tokens of {named}, which is not the tokenizer of the converted model")
