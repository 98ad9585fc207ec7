"""Configurations of runs of associative recall (`RecallConfig`) and of sweeps (`Sweep`)."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from sympow.data.mqar import RecallTask
from sympow.fields import check_integer, check_number, unknown
from sympow.files import check_file_name
from sympow.layers import make_mixer
from sympow.layers.registry import mixer_class
from sympow.models import MixerConfig, ModelConfig
from sympow.ops.memory import check_memory
from sympow.recall.own_task import OwnTask
from sympow.training.config import PRECISIONS, check_optimizer
from sympow.training.overrides import override

AnyTask = RecallTask | OwnTask
_LABEL = 100  # bytes of a label in the name of a run, which is the name of a file


@dataclass(frozen=True)
class Architecture:
    """Describes a model except for its width and vocabulary.

    Attributes:
        label: the name of the model in tables and figures.
        mixers: a pattern that is repeated over the layers, as in `ModelConfig`. If a mixer needs a `max_length` that
            is not given, it gets the length of the run's longest row.
        heads: the number of heads of every mixer.
        head_dim: if given, the number of heads is width / head_dim, and `heads` must be 1.
        layers: the number of blocks.
        mlp_ratio: the hidden width of the MLP divided by the width; 0 for no MLP.
        positions: whether there are learned positions. In the published runs only attention has them.
    """

    label: str
    mixers: tuple[MixerConfig, ...]
    heads: int = 1
    head_dim: int | None = None
    layers: int = 2
    mlp_ratio: int = 4
    positions: bool = False

    def __post_init__(self) -> None:
        if self.head_dim is not None and self.heads != 1:
            raise ValueError(
                f"heads are width / head_dim where head_dim is given; got heads = {self.heads} and head_dim = "
                f"{self.head_dim}: set head_dim to none"
            )
        if not isinstance(self.label, str) or not re.fullmatch(r"[\w .,=+()-]+", self.label):
            raise ValueError(f"a label is made of letters, digits, spaces and . , = + ( ) -; got {self.label!r}")
        if not isinstance(self.positions, bool):
            raise TypeError(f"positions must be true or false; got {self.positions!r}")
        mixers = tuple(self.mixers) if isinstance(self.mixers, list | tuple) else ()
        if not mixers or not all(isinstance(mixer, MixerConfig) for mixer in mixers):
            raise TypeError(f"mixers is a tuple of at least one MixerConfig; got {self.mixers!r}")
        object.__setattr__(self, "mixers", mixers)

    def model(self, width: int, vocab_size: int, length: int) -> ModelConfig:
        """Returns the config of the model for rows of `length`; ValueError where head_dim does not divide the width."""
        heads = self.heads
        if self.head_dim is not None:
            if self.head_dim < 1 or width % self.head_dim:
                raise ValueError(f"{self.label}: width {width} is no multiple of head_dim {self.head_dim}")
            heads = width // self.head_dim
        mixers = tuple(MixerConfig(m.name, _with_length(m.name, m.options, length)) for m in self.mixers)
        return ModelConfig(vocab_size, width, self.layers, heads, mixers, self.mlp_ratio)


@dataclass(frozen=True)
class RecallConfig:
    """Describes a run: a model trained on recall until it is solved or its epochs are over.

    The defaults are the published protocol (Zoology, appendix; its code, train.py, for what falls after the warmup).

    Attributes:
        architecture, width: the model and its width d.
        learning_rate: the highest learning rate. The rate rises linearly over the first `warmup` of all steps and then
            falls to 0 by a half cosine.
        seed: the seed of the weights and of the order of examples.
        train: the training tasks: one `RecallTask` or `OwnTask`, or several, which are mixed in equal parts.
        test: the tasks of the test, each of which is tested separately; empty: the tasks of `train`. Validation always
            uses the tasks of `train`.
        examples, validation_examples, test_examples: the numbers of rows. Training and validation have so many rows of
            all tasks together, the test has so many rows of each task.
        data_seed: the seed of the data. Training, validation and test data are drawn from separate streams.
        epochs: the largest number of epochs.
        batch_size: the number of rows in a step; None: 8 if the longest row or the width is 512 or more, 16 if one of
            them is 256 or more, otherwise 64.
        optimizer, muon_rate: as in `sympow.training.TrainingConfig`.
        weight_decay: the weight decay, which applies to matrices.
        warmup: the share of all steps in which the learning rate rises.
        stop_at: the validation accuracy at which training stops; None: never.
        validations: the number of validations in an epoch, for tasks that are solved within one epoch; at most the
            steps of an epoch.
        precision: "float32", or "bf16" for autocast.

    Raises TypeError and ValueError in one line for values with which a run is not possible, including options of
    mixers.
    """

    architecture: Architecture
    width: int = 64
    learning_rate: float = 1e-3
    seed: int = 0
    train: tuple[AnyTask, ...] = (RecallTask(),)
    test: tuple[AnyTask, ...] = ()
    examples: int = 100_000
    validation_examples: int = 3000
    test_examples: int = 3000
    data_seed: int = 0
    epochs: int = 64
    batch_size: int | None = None
    optimizer: str = "adamw"
    muon_rate: float = 1.0
    weight_decay: float = 0.1
    warmup: float = 0.1
    stop_at: float | None = 0.99
    validations: int = 1
    precision: str = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, Architecture):
            raise TypeError(f"architecture must be an Architecture; got {self.architecture!r}")
        for name in ("train", "test"):
            given = getattr(self, name)
            tasks = (given,) if isinstance(given, AnyTask) else given
            if not isinstance(tasks, list | tuple) or not all(isinstance(task, AnyTask) for task in tasks):
                raise TypeError(f"{name} must be a RecallTask or an OwnTask, or several of them; got {given!r}")
            object.__setattr__(self, name, tuple(tasks))
        for name, least in (("width", 1), ("seed", 0), ("data_seed", 0), ("examples", 1), ("validation_examples", 1),
                            ("test_examples", 1), ("epochs", 1), ("validations", 1)):  # fmt: skip
            check_integer(name, getattr(self, name), least)
        if self.batch_size is not None:
            check_integer("batch_size", self.batch_size, 1)
        if self.seed >= 1 << 63:
            raise ValueError(f"seed must be below 2**63; got {self.seed}")
        for name in ("learning_rate", "weight_decay", "warmup"):
            check_number(name, getattr(self, name))
        if self.stop_at is not None:
            check_number("stop_at", self.stop_at)
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0; got {self.learning_rate!r}")
        check_optimizer(self.optimizer, self.muon_rate)
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0; got {self.weight_decay!r}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is a share of the steps, 0 to 1; got {self.warmup!r}")
        if self.stop_at is not None and not 0 < self.stop_at <= 1:
            raise ValueError(f"stop_at is an accuracy above 0 and at most 1, or none; got {self.stop_at!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(unknown("precision", str(self.precision), PRECISIONS))
        if not self.train:
            raise ValueError("train needs at least one task")
        if len({task.vocab_size for task in (*self.train, *self.test)}) > 1:
            raise ValueError("all tasks of a run have one vocab_size")
        rows = self.examples // len(self.train)
        if rows < self.batch:
            raise ValueError(f"every task needs a batch of {self.batch} rows to train on; got {rows}")
        steps = sum((self.examples + i) // len(self.train) // self.batch for i in range(len(self.train)))
        if self.validations > steps:
            raise ValueError(f"validations must be at most the {steps} steps of an epoch; got {self.validations}")
        if self.validation_examples < len(self.train):
            raise ValueError(f"validation_examples must be at least 1 for each of the {len(self.train)} tasks")
        longest = max(task.length for task in self.train)
        for task in self.test:
            if self.architecture.positions and task.length > longest:
                raise ValueError(f"learned positions end at the trained length, {longest}; the test has {task.length}")
        check_memory(f"width = {self.width:,}", 4 * self.width**2)  # a matrix of any mixer
        model = self.model
        for layer in range(min(model.n_layers, len(model.mixers))):  # the pattern, which is repeated
            mixer = model.mixer(layer)
            _check_mixer(mixer.name, json.dumps(mixer.options, sort_keys=True), model.d_model, model.n_heads)

    @property
    def model(self) -> ModelConfig:
        """Returns the model's config."""
        longest = max(task.length for task in (*self.train, *self.test))
        return self.architecture.model(self.width, self.train[0].vocab_size, longest)

    @property
    def batch(self) -> int:
        """Returns the rows in a step."""
        size = max(self.width, *(task.length for task in self.train))
        return self.batch_size or (8 if size >= 512 else 16 if size >= 256 else 64)

    @property
    def tests(self) -> tuple[AnyTask, ...]:
        """Returns the tasks tested on."""
        return self.test or self.train

    @property
    def id(self) -> str:
        """Returns a file name of this run: readable, of at most 200 bytes, and different for every config."""
        # Runs without these fields keep the names that they had before, so that a sweep of that time can continue.
        values = asdict(self)
        for task in (*values["train"], *values["test"]):
            if not task.get("min_distance"):
                task.pop("min_distance", None)
        if self.optimizer == "adamw":
            del values["optimizer"], values["muon_rate"]
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        label = re.sub(r"\W+", "-", self.architecture.label).strip("-")
        label = label.encode()[:_LABEL].decode(errors="ignore")
        task = self.train[-1]
        pairs = "" if task.pairs is None else f"-d{task.pairs}"
        return f"{label}-n{task.length}{pairs}-w{self.width}-lr{self.learning_rate:.2g}-s{self.seed}-{digest}"


@dataclass(frozen=True)
class Sweep:
    """Lists runs under one name. A run that occurs twice counts once."""

    name: str
    runs: tuple[RecallConfig, ...]

    def __post_init__(self) -> None:
        check_file_name(self.name, "the name of a sweep")
        object.__setattr__(self, "runs", tuple({run.id: run for run in self.runs}.values()))
        if not self.runs:
            raise ValueError(f"the sweep {self.name} has no runs")

    def override(self, assignments: Sequence[str]) -> Sweep:
        """Returns the sweep with fields of every run set, each as "key.path=value"; see `sympow.training.override`."""
        return Sweep(self.name, tuple(override(run, assignments) for run in self.runs))


def grid(
    base: RecallConfig,
    *,
    architectures: Sequence[Architecture] = (),
    widths: Sequence[int] = (),
    tasks: Sequence[AnyTask] = (),
    learning_rates: Sequence[float] = (),
    seeds: Sequence[int] = (),
) -> tuple[RecallConfig, ...]:
    """Returns `base` with every combination of the given values. A field without values keeps its value in `base`."""
    runs = [base]
    axes: dict[str, Sequence[Any]] = {"train": [(task,) for task in tasks], "architecture": architectures,
                                      "width": widths, "learning_rate": learning_rates, "seed": seeds}  # fmt: skip
    for name, values in axes.items():
        if values:
            runs = [replace(run, **{name: value}) for run in runs for value in values]
    return tuple(runs)


@lru_cache(maxsize=256)  # a sweep of a thousand runs has a few mixers
def _check_mixer(name: str, options: str, width: int, heads: int) -> None:
    """Makes a mixer without its weights, to raise the errors of its options."""
    with torch.device("meta"):
        make_mixer(name, width, heads, json.loads(options))


def _with_length(name: str, options: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Returns the options of a mixer, or of the mixer after its short convolution, with the `max_length` it needs."""
    options = dict(options)
    if options.get("mixer") is not None:
        options["options"] = _with_length(options["mixer"], options.get("options") or {}, length)
    parameter = inspect.signature(mixer_class(name)).parameters.get("max_length")
    if parameter is not None and parameter.default is parameter.empty:
        options.setdefault("max_length", length)
    return options
