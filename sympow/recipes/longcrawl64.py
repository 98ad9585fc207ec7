"""GPT-2 shapes on LongCrawl64, documents of 65,536 GPT-2 tokens in a zarr array.

The recipes need the path of the array: data.path=FOLDER, or data.path=URL with data.storage_options.token=anon for a
public bucket. With GPT-2's tokenizer.json as data.tokenizer=FILE the trained model can generate text. A step has
524,288 tokens at every context. `sympow kernel-corpus` makes another corpus with this layout; docs/guides/corpus.md
shows its use here.
"""

from dataclasses import replace

from sympow.data import DataConfig
from sympow.models import MixerConfig, preset
from sympow.recipes.scaling import BLOCK, CONFORMAL, GATED, PUBLISHED, UNGATED
from sympow.training import RunConfig, TrainingConfig


def power() -> RunConfig:
    """The small shape with power attention, p = 2, gated, in its block."""
    return _config("longcrawl64-power", MixerConfig("power", {"p": 2}))


def softmax() -> RunConfig:
    """Softmax attention in the same block."""
    return _config("longcrawl64-softmax", MixerConfig("softmax", BLOCK))


def window() -> RunConfig:
    """Softmax attention over a sliding window of 8,192 tokens, in the same block."""
    return _config("longcrawl64-window", MixerConfig("window", BLOCK | {"window": 8192}))


def linear() -> RunConfig:
    """Linear attention in the same block."""
    return _config("longcrawl64-linear", MixerConfig("linear", BLOCK))


def power_ungated() -> RunConfig:
    """Power attention, p = 2, without a gate and with fixed rotation: sympow as it was first published [SPT]."""
    return _published("power-ungated", MixerConfig("power", PUBLISHED | UNGATED))


def power_ungated_p4() -> RunConfig:
    """Power attention, p = 4, without a gate and with fixed rotation [SPT]."""
    return _published("power-ungated-p4", MixerConfig("power", PUBLISHED | UNGATED | {"p": 4}))


def power_ungated_p6() -> RunConfig:
    """Power attention, p = 6, without a gate and with fixed rotation [SPT]."""
    return _published("power-ungated-p6", MixerConfig("power", PUBLISHED | UNGATED | {"p": 6}))


def power_gated() -> RunConfig:
    """Power attention, p = 2, with a gate and fixed rotation, as in [CST]: sympow with gating."""
    return _published("power-gated", MixerConfig("power", PUBLISHED | GATED))


def power_gated_p4() -> RunConfig:
    """Power attention, p = 4, with a gate and fixed rotation, as in [CST]."""
    return _published("power-gated-p4", MixerConfig("power", PUBLISHED | GATED | {"p": 4}))


def conformal() -> RunConfig:
    """Power attention, p = 2, with a gate and the rotation of [CST]: conformal sympow."""
    return _published("conformal", MixerConfig("power", PUBLISHED | CONFORMAL))


def conformal_p4() -> RunConfig:
    """Power attention, p = 4, with a gate and the rotation of [CST]."""
    return _published("conformal-p4", MixerConfig("power", PUBLISHED | CONFORMAL | {"p": 4}))


def softmax_plain() -> RunConfig:
    """Softmax attention as [SPT] and [CST] compare with: without the block."""
    return _published("softmax-plain", MixerConfig("softmax"))


def _published(name: str, mixer: MixerConfig) -> RunConfig:
    """Returns a model without a block, eps 1e-6 and scores from 0 on, trained at one rate, as [SPT] and [CST] do.

    [SPT] trains with 4,096 tokens of context. For the other contexts of [CST], change training.context and
    training.batch_size together.
    """
    config = _config(f"longcrawl64-{name}", mixer)
    training = replace(config.training, context=4096, batch_size=128, micro_batch_size=16, schedule="constant",
                       warmup_steps=0)  # fmt: skip
    return replace(config, training=training)


def _config(name: str, mixer: MixerConfig) -> RunConfig:
    return RunConfig(
        name=name,
        model=preset("small", mixers=mixer),
        data=DataConfig(
            kind="zarr", path="longcrawl64", tokenizer="none", vocab_size=50_257, held_out=0.001, pack=False
        ),
        training=TrainingConfig(
            context=65_536,
            batch_size=8,
            micro_batch_size=1,
            steps=10_000,
            learning_rate=6e-4,
            warmup_steps=500,
            precision="bf16",
            evaluate_every=250,
            checkpoint_every=250,
        ),
    )
