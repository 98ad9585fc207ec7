"""Loss against context: one shape, one budget of tokens and one order of the data for every mixer and every context.

Say where the documents are: data.path=FOLDER/train.zarr data.held_out_path=FOLDER/heldout.zarr, two arrays in the
layout of LongCrawl64 with 16,384 different tokens. A step is 65,536 tokens at every context: training.context=N goes
with training.batch_size=65536/N. `python -m benchmarks.context_scaling run` runs the whole grid.
"""

from typing import Any

from sympow.data import DataConfig
from sympow.models import MixerConfig, preset
from sympow.training import RunConfig, TrainingConfig

TOKENS_PER_STEP = 65_536
STEPS = 460  # 30 million tokens
VOCAB_SIZE = 16_384


def power() -> RunConfig:
    """Power attention, p = 2, gated and rotated by the data: conformal sympow [CST]."""
    return _power("power", p=2)


def power_gated() -> RunConfig:
    """p = 2 with a gate and fixed rotation."""
    return _power("power_gated", p=2, rotation="fixed")


def power_ungated() -> RunConfig:
    """p = 2 without a gate and with fixed rotation: sympow as it was first published [SPT], but for how it starts."""
    return _power("power_ungated", p=2, gate=False, rotation="fixed")


def power4_gated() -> RunConfig:
    """p = 4 with a gate and fixed rotation; its quadratic form, as the state would be too large."""
    return _power("power4_gated", p=4, rotation="fixed")


def power4_ungated() -> RunConfig:
    """p = 4 without a gate."""
    return _power("power4_ungated", p=4, gate=False, rotation="fixed")


def power6_ungated() -> RunConfig:
    """p = 6 without a gate."""
    return _power("power6_ungated", p=6, gate=False, rotation="fixed")


def softmax() -> RunConfig:
    """Softmax attention with rotary positions."""
    return _config("softmax", MixerConfig("softmax"))


def window() -> RunConfig:
    """Softmax attention over a sliding window of 8,192 tokens."""
    return _config("window", MixerConfig("window", {"window": 8192}))


def linear() -> RunConfig:
    """Linear attention."""
    return _config("linear", MixerConfig("linear"))


def _power(name: str, **options: Any) -> RunConfig:
    return _config(name, MixerConfig("power", options))


def _config(name: str, mixer: MixerConfig) -> RunConfig:
    """At the longest context: a tenth of the steps warms up, held-out losses come eight times, a checkpoint last."""
    return RunConfig(
        name=f"scaling-{name}",
        model=preset("mini", vocab_size=VOCAB_SIZE, mixers=mixer),
        data=DataConfig(
            kind="zarr",
            path="corpus/train.zarr",
            held_out_path="corpus/heldout.zarr",
            tokenizer="none",
            vocab_size=VOCAB_SIZE,
            pack=False,
        ),
        training=TrainingConfig(
            context=TOKENS_PER_STEP,
            batch_size=1,
            steps=STEPS,
            learning_rate=2e-3,
            warmup_steps=STEPS // 10,
            precision="bf16",
            log_every=10,
            evaluate_every=-(-STEPS // 8),
            evaluation_batches=16,
            checkpoint_every=STEPS,
            keep_checkpoints=1,
        ),
    )
