"""GPT-2 shapes on LongCrawl64, documents of 65,536 GPT-2 tokens in a zarr array.

The recipes need the path of the array: data.path=FOLDER, or data.path=URL with data.storage_options.token=anon for a
public bucket. With GPT-2's tokenizer.json as data.tokenizer=FILE the trained model can generate text. A step has
524,288 tokens at every context. `sympow kernel-corpus` makes another corpus with this layout; docs/guides/corpus.md
shows its use here.
"""

from sympow.data import DataConfig
from sympow.models import MixerConfig, preset
from sympow.recipes.scaling import BLOCK, CONFORMAL, PUBLISHED, UNGATED
from sympow.training import RunConfig, TrainingConfig


def power() -> RunConfig:
    """The small shape with power attention, p = 2, gated, in its block."""
    return _config("longcrawl64-power", MixerConfig("power", {"p": 2}))


def power_ungated() -> RunConfig:
    """Power attention, p = 2, without a gate and with fixed rotation: sympow as it was first published [SPT].

    eps is 1e-6, scores start at 0 and there is no block, as in the source.
    """
    return _config("longcrawl64-power-ungated", MixerConfig("power", PUBLISHED | UNGATED))


def conformal() -> RunConfig:
    """Power attention, p = 2, with gate, rotation, eps and initial scores as in [CST]: conformal sympow."""
    return _config("longcrawl64-conformal", MixerConfig("power", PUBLISHED | CONFORMAL))


def softmax() -> RunConfig:
    """Softmax attention in the same block."""
    return _config("longcrawl64-softmax", MixerConfig("softmax", BLOCK))


def window() -> RunConfig:
    """Softmax attention over a sliding window of 8,192 tokens, in the same block."""
    return _config("longcrawl64-window", MixerConfig("window", BLOCK | {"window": 8192}))


def linear() -> RunConfig:
    """Linear attention in the same block."""
    return _config("longcrawl64-linear", MixerConfig("linear", BLOCK))


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
