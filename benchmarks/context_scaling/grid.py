"""Describes a run: its fields, its name, and the config that `sympow train` would get."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sympow.layers import FLA_MIXERS, MIXERS
from sympow.models import MixerConfig, ModelConfig, preset
from sympow.recipes import load_recipe
from sympow.training import RunConfig, override

DOCUMENT = 65_536  # tokens of a document; a step is a multiple of them
BEST = 8e-3  # the best rate under Muon, by the grid "rates" of `benchmarks.learning`
SEEDS = (0, 1, 2)
EVALUATIONS = 8  # of the held-out loss along a run

# Tokens of a run: 460, 1,528 and 4,584 steps of one document, or 191 and 573 of eight.
SHORT = 460 * DOCUMENT
MIDDLE = 1_528 * DOCUMENT
LONG = 4_584 * DOCUMENT
BILLION = 15_259 * DOCUMENT


@dataclass(frozen=True)
class Scale:
    """Describes the size of the experiment.

    Attributes:
        shrink: the number by which all contexts are divided.
        steps: of every run; None: as many as its tokens make.
        overrides: of the configs of all runs.
    """

    shrink: int = 1
    steps: int | None = None
    overrides: tuple[str, ...] = ()


SCALES = {
    "full": Scale(),
    "toy": Scale(
        64, 2, ("model.d_model=32", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=256",
                "data.vocab_size=256", "training.precision=float32"),
    ),
}  # fmt: skip


# Names in tables, and options of the recipe `power`: a value of a source, or without one part of the block.
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "power_turned": ("all channels turn", {"rotary_fraction": 1.0}),
    "power_eps": ("eps 1e-6", {"eps": 1e-6}),
    "power_score": ("initial score 0", {"initial_score": 0.0}),
    "power_gate_bias_0": ("gate biases 0", {"gate_bias": (0.0, 0.0)}),  # [CST]: a half-life of one token
    "power_gate_bias_7": ("gate biases 6.9", {"gate_bias": (6.906768, 6.906768)}),  # gates of 0.999, as [SCRA]'s code
    "power_frequencies": ("frequencies of [CST]", {"frequencies": "conformal", "max_length": DOCUMENT}),  # (M13)
    "power_positions": ("positions at the full rate", {"rotation": "data", "position_rate": 1.0}),  # as [CST]
    "power_no_bias": ("no biases in projections", {"bias": False}),  # as in [SCRA]'s code; so scores start at 0
    "power_unnormalized": ("not normalized", {"normalize": False}),  # only the norm of heads is left
    "power_no_convolution": ("no short convolution", {"short_convolution": 0}),
    "power_no_head_norm": ("no norm of heads", {"head_norm": False}),
    "power_no_output_gate": ("no output gate", {"output_gate": False}),
}


def recipe(variant: str) -> RunConfig:
    """Returns the config of a variant: a recipe of sympow/recipes/scaling.py or one of ABLATIONS, and "+field=value".

    The field is one of the model's, `short_context` or `short_share` of training, or an option of its mixers: of all
    that have it, or of those of one name.
    "hybrid_softmax+qk_norm=true+softmax.gate=true+n_heads=3" changes all mixers, its softmax mixer and the model.
    Raises ValueError for a recipe, a mixer or a field that does not exist.
    """
    base, *changes = variant.split("+")
    config = load_recipe(f"scaling:{'power' if base in ABLATIONS else base}")
    if base in ABLATIONS:
        config = replace(config, model=replace(config.model, mixers=(MixerConfig("power", ABLATIONS[base][1]),)))
    assignments = []
    for change in changes:
        key = change.partition("=")[0]
        if key in (field.name for field in fields(ModelConfig)):
            assignments.append(f"model.{change}")
            continue
        if key in ("short_context", "short_share"):
            assignments.append(f"training.{change}")
            continue
        mixer_name, _, option = key.rpartition(".")
        value = change[len(key) :]
        mixers = [(i, mixer.name) for i, mixer in enumerate(config.model.mixers) if mixer_name in ("", mixer.name)]
        found = [f"model.mixers.{i}.options.{option}{value}" for i, name in mixers
                 if option in (MIXERS | FLA_MIXERS)[name].option_names()]  # fmt: skip
        if not found:
            raise ValueError(f"neither the model nor a mixer of {base!r} has a field {key!r}")
        assignments += found
    return override(config, assignments)


@dataclass(frozen=True)
class Run:
    """Describes a training run: a variant and its data.

    Attributes:
        variant: the name of the variant, see `recipe`.
        context: tokens of the stretches that documents are cut into; every step draws some of them.
        tokens: of the whole run.
        documents: tokens of a step, in documents.
        row_tokens: cuts the stretches of a step into rows of so many tokens, which the model is trained on; None: they
            are the rows. With 1,024 at a context of 65,536 a step holds the same documents as without (the reshape
            control).
        size: a preset in place of the recipe's shape; None: the recipe's.
        learning_rate: the highest one.
        seed: of the initial weights and the order of the data.
    """

    variant: str
    context: int
    tokens: int = SHORT
    documents: int = 1
    row_tokens: int | None = None
    size: str | None = None
    learning_rate: float = 2e-3
    seed: int = 0

    @property
    def trained_at(self) -> int:
        """Returns the most tokens that the model sees of a document in training."""
        return self.row_tokens or self.context

    @property
    def name(self) -> str:
        """Returns the run in one word, different from that of any other run."""
        parts = [self.variant, self.context, f"{self.tokens / 1e6:g}M", f"x{self.documents}"]
        parts += [f"rows{self.row_tokens}"] if self.row_tokens else []
        parts += [self.size] if self.size else []
        return "-".join(map(str, [*parts, f"lr{self.learning_rate:g}", f"seed{self.seed}"]))

    @property
    def steps(self) -> int:
        """Returns the number of optimizer steps at full scale."""
        return round(self.tokens / (self.documents * DOCUMENT))

    def config(self, scale: Scale, corpus: Path, device: str = "auto", compiled: bool = False) -> RunConfig:
        """Returns the recipe with fields set, and AdamW; its warm-up keeps its share of the steps.

        A pass is one document at a time, whatever the documents of a step.
        """
        config = recipe(self.variant)
        if self.size is not None:
            shape = preset(self.size)
            model = replace(config.model, d_model=shape.d_model, n_layers=shape.n_layers, n_heads=shape.n_heads)
            config = replace(config, model=model)
        paths = (f"data.path={corpus / 'train.zarr'}", f"data.held_out_path={corpus / 'heldout.zarr'}")
        config = override(config, [*scale.overrides, *paths])
        training, steps = config.training, scale.steps or self.steps
        short, share = training.short_context, training.short_share
        if self.row_tokens is not None:
            short, share = self.row_tokens, 1.0
        rows = DOCUMENT // self.context
        return replace(
            config,
            name=self.name,
            execution=replace(config.execution, compile=compiled),
            training=replace(
                training,
                context=self.context // scale.shrink,
                short_context=short and short // scale.shrink,
                short_share=share,
                batch_size=self.documents * rows,
                micro_batch_size=rows,
                steps=steps,
                warmup_steps=round(steps * training.warmup_steps / training.steps),
                optimizer="adamw",
                learning_rate=self.learning_rate,
                seed=self.seed,
                device=device,
                log_every=-(-steps // EVALUATIONS),
                evaluate_every=-(-steps // EVALUATIONS),
                checkpoint_every=steps,
            ),
        )


WHOLE = "muon_whole"  # Muon that orthogonalizes fused projections, such as q, k and v, as one matrix


@dataclass(frozen=True)
class LearningRun(Run):
    """Describes a run; the fields besides those of `Run` are `training.optimizer` and `training.muon_rate`.

    The optimizer may also be `WHOLE`.
    """

    optimizer: str = "muon"
    muon_rate: float = 1.0

    @property
    def name(self) -> str:
        """Returns the run in one word, different from that of any other run."""
        factor = f"x{self.muon_rate:g}" if self.muon_rate != 1 else ""
        return f"{super().name}-{self.optimizer}{factor}"

    def config(self, scale: Scale, corpus: Path, device: str = "auto", compiled: bool = False) -> RunConfig:
        """Returns the recipe with fields set, as `Run.config` does, and its own optimizer."""
        config = super().config(scale, corpus, device, compiled)
        optimizer = "muon" if self.optimizer == WHOLE else self.optimizer
        training = replace(config.training, optimizer=optimizer, muon_rate=self.muon_rate)
        return replace(config, training=training)


# The fields of what a run is trained on and how large it is: all but its variant, rate and seed.
SETTING = tuple(field.name for field in fields(Run) if field.name not in ("variant", "learning_rate", "seed"))


def setting_of(run: Run) -> tuple[Any, ...]:
    """Returns what a run is trained on and how large it is, the values of SETTING."""
    return tuple(getattr(run, name) for name in SETTING)
