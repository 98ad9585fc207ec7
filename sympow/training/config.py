"""Configurations of a run: `TrainingConfig`, `ExecutionConfig`, and `RunConfig`, which adds the model and the data."""

from dataclasses import asdict, dataclass, field
from typing import Any

from sympow.data.config import DataConfig
from sympow.fields import check_integer, check_number, read_fields, unknown
from sympow.models.config import ModelConfig

PRECISIONS = ("float32", "bf16")
TRACKERS = ("wandb", "mlflow", "comet_ml")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant", "wsd")


@dataclass(frozen=True)
class TrainingConfig:
    """Describes how a model is trained.

    Attributes:
        context: tokens in a row.
        short_context: rows are cut into rows of so many tokens in the first steps, the first `short_share` of all. A
            step has the same tokens as without. None: in no step.
        short_share: the share of steps with short rows, above 0 and at most 1; 0 without `short_context`.
        batch_size: rows in one optimizer step.
        micro_batch_size: rows in one forward and backward pass; None: all of `batch_size`.
        steps: optimizer steps of the whole run.
        optimizer: "adamw", or "muon": Muon for the matrices of the blocks and AdamW for all other weights, see
            `sympow.training.optimizer.muon_weights`.
        muon_rate: the factor of the learning rate, and so of the decay, for the matrices that Muon moves; for "muon"
            only.
        learning_rate: the highest one, reached after `warmup_steps`.
        min_lr_ratio: the last learning rate over the highest one. "constant" does not use it.
        schedule: how the learning rate goes on after `warmup_steps`: "cosine" (half a cosine), "linear", "constant", or
            "wsd" (warm-up, stable, decay), which is constant up to the last `decay_steps` and linear in them.
        decay_steps: for "wsd" only, the steps in which the rate falls; None: a tenth of `steps`.
        betas: the two decay rates of AdamW's averages.
        weight_decay: the weight decay, which is decoupled from the gradient. Only matrices decay.
        clip: largest norm of the gradient.
        precision: "float32", or "bf16": autocast, with weights, state and optimizer in float32.
        seed: of the initial weights, the order of the data and the generators of torch.
        log_every: steps from one line of metrics to the next.
        checkpoint_every: steps from one checkpoint to the next.
        keep_checkpoints: how many checkpoints stay on disk. One more stays until the newest one has given a finite
            loss, in the next step or in an evaluation.
        evaluate_every: steps from one held-out loss to the next.
        evaluation_batches: batches of a held-out loss.
        device: "auto" (CUDA where there is one, else the CPU) or a torch device.

    Raises TypeError for a value of a wrong type and ValueError for one out of range.
    """

    context: int = 1024
    short_context: int | None = None
    short_share: float = 0.0
    batch_size: int = 8
    micro_batch_size: int | None = None
    steps: int = 1000
    optimizer: str = "adamw"
    muon_rate: float = 1.0
    learning_rate: float = 6e-4
    warmup_steps: int = 100
    min_lr_ratio: float = 0.1
    schedule: str = "cosine"
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "float32"
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    evaluate_every: int = 500
    evaluation_batches: int = 8
    device: str = "auto"

    def __post_init__(self) -> None:
        positive = ("context", "batch_size", "steps", "log_every", "checkpoint_every", "keep_checkpoints",
                    "evaluate_every", "evaluation_batches")  # fmt: skip
        for name in positive:
            check_integer(f"training.{name}", getattr(self, name), 1)
        for name in ("warmup_steps", "seed"):
            check_integer(f"training.{name}", getattr(self, name), 0)
        if self.seed >= 2**63:
            raise ValueError(f"training.seed must be below 2**63, got {self.seed}")
        for name in ("learning_rate", "min_lr_ratio", "weight_decay", "clip", "short_share"):
            check_number(f"training.{name}", getattr(self, name))
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise TypeError(f"training.betas must be a tuple of two numbers, got {self.betas!r}")
        for beta in self.betas:
            check_number("training.betas", beta)
        if self.micro_batch_size is not None:
            check_integer("training.micro_batch_size", self.micro_batch_size, 1)
            if self.batch_size % self.micro_batch_size:
                raise ValueError(
                    f"training.batch_size must be a multiple of training.micro_batch_size, "
                    f"got {self.batch_size} and {self.micro_batch_size}"
                )
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"training.warmup_steps must be at most training.steps, got {self.warmup_steps} and {self.steps}: "
                "set both"
            )
        if self.learning_rate <= 0:
            raise ValueError(f"training.learning_rate must be above 0, got {self.learning_rate}")
        check_optimizer(self.optimizer, self.muon_rate, "training.")
        if self.clip <= 0:
            raise ValueError(f"training.clip must be above 0, got {self.clip}")
        if self.weight_decay < 0:
            raise ValueError(f"training.weight_decay must be at least 0, got {self.weight_decay}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"training.min_lr_ratio must be from 0 to 1, got {self.min_lr_ratio}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"training.betas must be at least 0 and below 1, got {self.betas}")
        if self.schedule not in SCHEDULES:
            raise ValueError(unknown("training.schedule", str(self.schedule), SCHEDULES))
        self._check_decay()
        self._check_short()
        if self.precision not in PRECISIONS:
            raise ValueError(unknown("training.precision", str(self.precision), PRECISIONS))
        if not isinstance(self.device, str):
            raise TypeError(f"training.device must be a string, got {self.device!r}")

    def _check_decay(self) -> None:
        if self.decay_steps is None:
            return
        check_integer("training.decay_steps", self.decay_steps, 1)
        if self.schedule != "wsd":
            raise ValueError(f"training.decay_steps is for training.schedule = 'wsd' only, got {self.decay_steps} and "
                             f"{self.schedule!r}: set both")  # fmt: skip
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"training.warmup_steps and training.decay_steps must be at most training.steps together, got "
                f"{self.warmup_steps} and {self.decay_steps} of {self.steps}"
            )

    def _check_short(self) -> None:
        if self.short_context is None:
            if self.short_share != 0:
                raise ValueError(f"training.short_share needs training.short_context, got {self.short_share}: set both")
            return
        check_integer("training.short_context", self.short_context, 1)
        if self.context % self.short_context:
            raise ValueError(
                f"training.context must be a multiple of training.short_context, got {self.context} and "
                f"{self.short_context}"
            )
        if not 0 < self.short_share <= 1:
            raise ValueError(f"training.short_share must be above 0 and at most 1, got {self.short_share}: set both")

    def context_of(self, step: int) -> int:
        """Returns the tokens in a row of a step, which counts from 0."""
        if self.short_context is not None and step < round(self.short_share * self.steps):
            return self.short_context
        return self.context

    @property
    def rows_per_pass(self) -> int:
        """Returns the rows in one forward and backward pass."""
        return self.micro_batch_size or self.batch_size

    @property
    def passes_per_step(self) -> int:
        """Returns the number of forward and backward passes in one optimizer step."""
        return self.batch_size // self.rows_per_pass

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingConfig":
        """Returns the config of `to_dict`'s values; an unknown field raises ValueError."""
        earlier: dict[str, Any] = {"optimizer": "adamw", "muon_rate": 1.0}  # of runs that do not name them
        values = earlier | read_fields(cls, values, "training")
        if isinstance(values.get("betas"), list):
            values["betas"] = tuple(values["betas"])
        return cls(**values)


@dataclass(frozen=True)
class ExecutionConfig:
    """Describes how a run is executed.

    The values affect speed, memory and rounding only. A run may be continued with other values.

    Attributes:
        context_parallel: the number of ranks that share a row; each computes a part of it. The total number of ranks
            must be a multiple.
        checkpoint_activations: whether to recompute every block in the backward pass.
        compile: whether to compile every block with torch.compile.
        profile_steps: the number of steps to trace, from the third step on, into profile/ in the run's folder; 0: none.
        tracker: "wandb", "mlflow" or "comet_ml", to send the metrics to that service as well, or None.

    Raises TypeError for a value of a wrong type and ValueError for one out of range.
    """

    context_parallel: int = 1
    checkpoint_activations: bool = False
    compile: bool = False
    profile_steps: int = 0
    tracker: str | None = None

    def __post_init__(self) -> None:
        check_integer("execution.context_parallel", self.context_parallel, 1)
        check_integer("execution.profile_steps", self.profile_steps, 0)
        for name in ("checkpoint_activations", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"execution.{name} must be true or false, got {getattr(self, name)!r}")
        if self.tracker is not None and self.tracker not in TRACKERS:
            raise ValueError(unknown("execution.tracker", str(self.tracker), TRACKERS))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ExecutionConfig":
        """Returns the config of `to_dict`'s values; an unknown field raises ValueError."""
        return cls(**read_fields(cls, values, "execution"))


@dataclass(frozen=True)
class DistillationConfig:
    """Describes how a converted model learns from its teacher, in three stages over the steps of a run.

    Attributes:
        start: the folder of the converted model, whose weights are the initial weights of the run.
        teacher: a run's folder, or a model that `sympow convert` can read.
        layer_steps: the steps of stage 1, which fits the output of every layer's mixer to the teacher's, on the
            teacher's inputs.
        text_steps: the steps of stage 3, which are the last ones and train on the text. Stage 2 is between them, and
            trains on the divergence of the predictions from the teacher's.
        window_dropout: the share of the steps of stages 2 and 3 in which the windows of the model hold only 64 tokens,
            so that the states are needed.
        teacher_context: in stages 1 and 2, the teacher reads rows as pieces of so many tokens, each by itself; 0: whole
            rows. In stage 1 the model reads these pieces too, in stage 2 whole rows.

    Raises TypeError for a value of a wrong type and ValueError for one out of range.
    """

    start: str
    teacher: str
    layer_steps: int = 0
    text_steps: int = 0
    window_dropout: float = 0.0
    teacher_context: int = 0

    def __post_init__(self) -> None:
        for name in ("start", "teacher"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"distillation.{name} must be a path, got {getattr(self, name)!r}")
        for name in ("layer_steps", "text_steps", "teacher_context"):
            check_integer(f"distillation.{name}", getattr(self, name), 0)
        check_number("distillation.window_dropout", self.window_dropout)
        if not 0 <= self.window_dropout <= 1:
            raise ValueError(f"distillation.window_dropout must be from 0 to 1, got {self.window_dropout}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DistillationConfig":
        """Returns the config of `to_dict`'s values; an unknown field raises ValueError."""
        return cls(**read_fields(cls, values, "distillation"))


@dataclass(frozen=True)
class RunConfig:
    """Holds the configuration of a run: its name, the model, the data, the training, and how the run is executed.

    `distillation` is None except for runs of `sympow distill`. `start` is the folder of a run, or a checkpoint, whose
    weights are the initial weights of this run; None: they are drawn from the seed.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    distillation: DistillationConfig | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("name", str),
            ("model", ModelConfig),
            ("data", DataConfig),
            ("training", TrainingConfig),
            ("execution", ExecutionConfig),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(f"RunConfig.{name} must be a {kind.__name__}, got a {type(value).__name__}")
        if not self.name or self.name != self.name.strip() or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"a run's name must be usable as a folder name, got {self.name!r}")
        if self.start is not None and not isinstance(self.start, str):
            raise TypeError(f"RunConfig.start must be a path or None, got {self.start!r}")
        if self.distillation is not None:
            self._check_distillation(self.distillation)
        parts = self.execution.context_parallel
        if parts > 1 and self.data.pack:
            raise ValueError(
                f"execution.context_parallel = {parts} splits rows over ranks, but not rows of packed documents: "
                "set data.pack = false"
            )
        for name in ("context", "short_context"):
            length = getattr(self.training, name)
            if length is not None and length % parts:
                raise ValueError(
                    f"training.{name} must be a multiple of execution.context_parallel, got {length} and {parts}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Returns the nested fields as JSON values."""
        values = {
            "name": self.name,
            "model": self.model.to_dict(),
            "data": self.data.to_dict(),
            "training": self.training.to_dict(),
            "execution": self.execution.to_dict(),
        }
        if self.distillation is not None:
            values["distillation"] = self.distillation.to_dict()
        return values if self.start is None else {**values, "start": self.start}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Returns the config of `to_dict`'s values; an unknown or a missing field raises ValueError."""
        values = read_fields(cls, values, "run")
        return cls(
            name=values["name"],
            model=ModelConfig.from_dict(values["model"]),
            data=DataConfig.from_dict(values["data"]),
            training=TrainingConfig.from_dict(values["training"]),
            execution=ExecutionConfig.from_dict(values.get("execution", {})),
            distillation=DistillationConfig.from_dict(values["distillation"]) if "distillation" in values else None,
            start=values.get("start"),
        )

    def _check_distillation(self, distillation: Any) -> None:
        if not isinstance(distillation, DistillationConfig):
            kind = type(distillation).__name__
            raise TypeError(f"RunConfig.distillation must be a DistillationConfig or None, got a {kind}")
        if self.start is not None:
            raise ValueError(f"distillation.start gives the initial weights; start must be None, got {self.start!r}")
        stages, steps = distillation.layer_steps + distillation.text_steps, self.training.steps
        if stages > steps:
            raise ValueError(
                f"distillation.layer_steps and distillation.text_steps must be at most training.steps together, "
                f"got {distillation.layer_steps} and {distillation.text_steps} of {steps}"
            )
        piece = distillation.teacher_context
        for name in ("context", "short_context"):
            length = getattr(self.training, name)
            if piece and length is not None and length % piece:
                raise ValueError(
                    f"training.{name} must be a multiple of distillation.teacher_context, got {length} and {piece}"
                )
        if piece and self.data.pack:
            raise ValueError(
                f"distillation.teacher_context = {piece} cuts rows, but not rows of packed documents: "
                "set data.pack = false"
            )
        if self.execution.context_parallel > 1:
            raise ValueError("distillation does not split rows over ranks: execution.context_parallel must be 1")


def decisive(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `RunConfig.to_dict` with which a run must continue.

    `execution` is left out, and so are the fields of `data` that have no effect beside its `held_out_path`.
    """
    kept = {name: value for name, value in values.items() if name != "execution"}
    data = kept.get("data")
    if isinstance(data, dict) and data.get("held_out_path") is not None:
        kept["data"] = {name: value for name, value in data.items() if name not in ("held_out", "seed")}
    return kept


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Returns the first difference of two JSON values as (dotted path, old, new), or None if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(str(key), old.get(key), new.get(key)) for key in {**old, **new}]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(old, new, strict=True))]
    else:
        return None if old == new else (path, old, new)
    for key, a, b in pairs:
        found = first_difference(a, b, f"{path}.{key}" if path else key)
        if found:
            return found
    return None


def check_optimizer(optimizer: Any, muon_rate: Any, group: str = "") -> None:
    """Raises TypeError or ValueError unless the fields `optimizer` and `muon_rate` of a config fit each other.

    `group` is written before the names of the fields.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(unknown(f"{group}optimizer", str(optimizer), OPTIMIZERS))
    check_number(f"{group}muon_rate", muon_rate)
    if muon_rate <= 0:
        raise ValueError(f"{group}muon_rate must be above 0, got {muon_rate}")
    if optimizer != "muon" and muon_rate != 1:
        raise ValueError(
            f"{group}muon_rate is for {group}optimizer = 'muon' only, got {muon_rate} and {optimizer!r}: set both"
        )
