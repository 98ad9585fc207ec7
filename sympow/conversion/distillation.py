"""Distillation: a converted model learns from its teacher in three stages of one run of the trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sympow.data import BPETokenizer, Tokenizer
from sympow.layers.blocked_window import BlockedWindowAttention
from sympow.layers.window import WindowAttention
from sympow.models import LanguageModel
from sympow.models.context_file import fingerprint
from sympow.training import DistillationConfig, RunConfig, TrainingConfig, TrainingResult, load, load_model, run
from sympow.training.ranks import TokenRows
from sympow.training.run_folder import folder_of
from sympow.training.runs import Lesson, saved_tokenizer

NARROW = 64  # tokens of a window in the steps that `DistillationConfig.window_dropout` chooses


class Distillation:
    """Trains a converted model on its teacher, as an objective of the trainer (`sympow.training.Objective`).

    Stage 1 fits the output of every mixer to the teacher's (`LanguageModel.mixing_error_sum`), stage 2 the predictions
    to the teacher's (`LanguageModel.divergence_sum`), and stage 3 the predictions to the text
    (`LanguageModel.loss_sum`). Stages without steps are left out.

    Args:
        config: the stages.
        steps: the number of steps of the whole run.
        teacher: the model to learn from. It is put in evaluation mode and gets no gradients.
        device: the device of the run.
        seed: decides in which steps the windows are narrow, see `DistillationConfig.window_dropout`.
        compile: whether to compile the teacher, as `ExecutionConfig.compile` does with the model.
    """

    def __init__(
        self,
        config: DistillationConfig,
        steps: int,
        teacher: LanguageModel,
        device: torch.device,
        *,
        seed: int = 0,
        compile: bool = False,
    ):
        self._config, self._steps, self._seed = config, steps, seed
        self._identity = fingerprint(teacher)[1]
        self._teacher = teacher.to(device).eval().requires_grad_(False)
        if compile:
            self._teacher.compile_parts()

    @property
    def reference(self) -> LanguageModel:
        """Returns the teacher, whose held-out loss the metrics contain too."""
        return self._teacher

    @property
    def identity(self) -> str:
        """Returns a hash of the teacher's weights."""
        return self._identity

    def stage(self, step: int) -> tuple[int, int]:
        """Returns the stage of a step (counted from 0) as a number from 1, and the first step of the stage."""
        text = self._steps - self._config.text_steps
        if step < self._config.layer_steps:
            return 1, 0
        return (2, self._config.layer_steps) if step < text else (3, text)

    def during(self, model: LanguageModel, step: int) -> AbstractContextManager[None]:
        """Returns the context of a step, in which the windows of `model` are narrow if the step is chosen for that.

        Seed and step decide, so that all ranks and a run that continues agree. The backward is part of the context,
        because it may compute blocks again.
        """
        share = self._config.window_dropout
        if self.stage(step)[0] == 1 or np.random.default_rng([self._seed, step]).random() >= share:
            return nullcontext()
        return narrow_windows(model, NARROW)

    def loss_sum(self, model: LanguageModel, rows: TokenRows, step: int) -> Tensor:
        """Returns the loss of a step, summed over the targets of `rows`, as a scalar."""
        stage, _ = self.stage(step)
        tokens, targets, borders = rows.tokens, rows.targets, rows.cu_seqlens
        if stage == 3:
            return model.loss_sum(tokens, targets, cu_seqlens=borders)
        piece = self._config.teacher_context
        if stage == 2:
            return model.divergence_sum(
                tokens, targets, self._teacher, cu_seqlens=borders, teacher_context=piece or None
            )
        if piece:
            tokens, targets = tokens.reshape(-1, piece), targets.reshape(-1, piece)
        return model.mixing_error_sum(tokens, targets, self._teacher, cu_seqlens=borders)


@contextmanager
def narrow_windows(model: LanguageModel, window: int) -> Iterator[None]:
    """Lets the windows of a model hold the last `window` tokens at most within a `with` block.

    These are also windows within other mixers, such as `HybridHeads`.
    """
    mixers = [module for module in model.modules() if isinstance(module, WindowAttention | BlockedWindowAttention)]
    before = [mixer.window for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.window = min(window, mixer.window)
        yield
    finally:
        for mixer, own in zip(mixers, before, strict=True):
            mixer.window = own


def hides_nothing(config: RunConfig) -> bool:
    """Returns whether a run hides windows in some steps (`window_dropout`), but no window is wide enough for that."""
    share = 0.0 if config.distillation is None else config.distillation.window_dropout
    return share > 0 and all(_widest(mixer.options) <= NARROW for mixer in config.model.mixers)


def _widest(options: Mapping[str, Any]) -> int:
    """Returns the tokens of the window in the options of a mixer or of a mixer within it; 0 for none."""
    within = (_widest(value) for value in options.values() if isinstance(value, Mapping))
    return max(options.get("window", 0), *within, 0)


def distillation_run(converted: RunConfig, start: str, teacher: str, precision: str = "bf16") -> RunConfig:
    """Returns the default config of `sympow distill`: 33 million tokens in sequences of 2,048.

    Args:
        converted: the config of the converted model's folder.
        start: the converted model's folder.
        teacher: the teacher, as in `DistillationConfig`.
        precision: as in `TrainingConfig`. The command passes the `usual_precision` of the device.
    """
    training = TrainingConfig(
        context=2048,
        batch_size=16,
        steps=1000,
        learning_rate=1e-3,
        warmup_steps=20,
        min_lr_ratio=0.05,
        weight_decay=0.0,
        precision=precision,
        evaluate_every=100,
        checkpoint_every=100,
    )
    stages = DistillationConfig(start, teacher, layer_steps=250, text_steps=100)
    name = f"{converted.name.removesuffix('-distilled')}-distilled"
    return replace(converted, name=name, training=training, distillation=stages)


def distill(
    config: RunConfig, out: str | os.PathLike[str], *, restart: bool = False, quiet: bool = False
) -> TrainingResult:
    """Trains a converted model on its teacher's predictions, or continues; see `sympow.training.run`.

    Args:
        config: the config of the run, with `distillation`, such as the result of `distillation_run`.
        out: the folder of the run.
        restart: whether to remove the files of an earlier run in the folder first.
        quiet: show no progress on stderr.

    Raises ValueError for a config without `distillation`, and the errors of `sympow.training.run` and `load_teacher`.
    """
    if config.distillation is None:
        raise ValueError(f"the config of {config.name} has no distillation; it is for sympow.training.run")
    return run(config, out, restart=restart, quiet=quiet, lesson=partial(_open_lesson, config, config.distillation))


def load_teacher(source: str) -> LanguageModel:
    """Loads a teacher: a pretrained model, or the model of a run folder, such as one converted with pattern softmax."""
    return _teacher_and_tokenizer(source)[0]


def _teacher_and_tokenizer(source: str) -> tuple[LanguageModel, Tokenizer | None]:
    if (Path(source) / "checkpoints").is_dir():
        loaded = load(source)
        return loaded.model, loaded.tokenizer
    from sympow.integrations.transformers.pretrained import load_pretrained  # which imports transformers

    read = load_pretrained(source)
    return read.model.float(), None if read.tokenizer is None else BPETokenizer(read.tokenizer)


def _open_lesson(run: RunConfig, config: DistillationConfig, device: torch.device) -> Lesson:
    """Loads the converted model and its teacher.

    Raises the errors of `load_model` and `load_pretrained`, and ValueError for a teacher with other tokens.
    """
    start, own = load_model(config.start).model.state_dict(), saved_tokenizer(folder_of(config.start))
    teacher, tokenizer = _teacher_and_tokenizer(config.teacher)
    if own is not None and tokenizer is not None and list(own.token_bytes) != list(tokenizer.token_bytes):
        raise ValueError(f"{config.teacher} and {config.start} differ in their tokenizers; a teacher needs the same")
    steps, seed, compile = run.training.steps, run.training.seed, run.execution.compile
    return Lesson(start, Distillation(config, steps, teacher, device, seed=seed, compile=compile))
