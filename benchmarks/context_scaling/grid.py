"""Which runs there are: variants, contexts, learning rates and seeds; and the config of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from sympow.recipes import load_recipe
from sympow.recipes.scaling import STEPS
from sympow.training import RunConfig, override

RATES = (2e-3, 1e-3, 4e-3)  # in this order: an experiment cut short has the middle one for all settings
MAIN = ("softmax", "power_ungated", "power_gated", "power")


@dataclass(frozen=True)
class Scale:
    """A size of the whole experiment. A step is one row of the longest context, at every context."""

    contexts: tuple[int, int, int, int]
    overrides: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        return self.contexts[-1]


SCALES = {
    "mini": Scale((1024, 4096, 16_384, 65_536)),
    "toy": Scale(
        (64, 128, 256, 512),
        ("model.d_model=32", "model.n_layers=1", "model.n_heads=2", "model.vocab_size=256", "data.vocab_size=256",
         "training.evaluation_batches=2"),
    ),
}


def parts(scale: Scale) -> dict[str, list[tuple[str, int]]]:
    """(variant, context) of each part that needs training of its own; the other parts read the same results."""
    *shorter, longest = scale.contexts
    return {
        "a": [*product(MAIN, scale.contexts), *product(["power4_gated"], shorter)],
        "d": [*product(("softmax", "power", "linear", "window"), [longest])],
        "f": [*product(("softmax", "power_ungated", "power4_ungated", "power6_ungated"), [scale.contexts[1]])],
    }


@dataclass(frozen=True)
class Run:
    """A recipe of sympow/recipes/scaling.py at a context, a learning rate and a seed."""

    variant: str
    context: int
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.context}-lr{self.learning_rate:g}-seed{self.seed}"

    def config(self, scale: Scale, corpus: Path, steps: int = STEPS, device: str = "auto") -> RunConfig:
        """What `sympow train` would get: the recipe with fields set."""
        rows = scale.longest // self.context
        config = override(
            load_recipe(f"scaling:{self.variant}"),
            [
                *scale.overrides,
                f"name={self.name}",
                f"data.path={corpus / 'train.zarr'}",
                f"data.held_out_path={corpus / 'heldout.zarr'}",
                f"training.context={self.context}",
                f"training.batch_size={rows}",
                f"training.learning_rate={self.learning_rate}",
                f"training.seed={self.seed}",
                f"training.device={device}",
            ],
        )
        schedule = replace(
            config.training,
            steps=steps,
            warmup_steps=steps // 10,
            log_every=min(config.training.log_every, steps // 2),  # two rows at least: the first is not timed
            evaluate_every=-(-steps // 8),
            checkpoint_every=steps,
        )
        return replace(config, training=schedule)

    def cost(self) -> int:
        """About the time of a step, in tokens of context that softmax attention takes it to see."""
        if self.variant == "softmax":
            seen = self.context
        elif self.variant in ("power4_gated", "power4_ungated", "power6_ungated"):
            seen = 3 * self.context
        else:
            seen = min(self.context, 8192)
        return 16_384 + seen


def settings(scale: Scale, names: Sequence[str]) -> list[tuple[str, int]]:
    """The (variant, context) of some parts, each once."""
    known = parts(scale)
    return list(dict.fromkeys(setting for name in names for setting in known[name]))


def grid(rates: Mapping[tuple[str, int], Sequence[float]], seeds: Sequence[int]) -> list[Run]:
    """The runs of all settings at their learning rates, as many for each: seed by seed, in a seed rate by rate, and the
    longest runs first."""
    runs = []
    for seed in seeds:
        for same_place in zip(*rates.values(), strict=True):
            of_place = [Run(*setting, rate, seed) for setting, rate in zip(rates, same_place, strict=True)]
            runs += sorted(of_place, key=Run.cost, reverse=True)
    return runs
