"""Recall on real text by attention, convolutions, and hybrids of both. The models differ in their mixers only.

The recipes need the paths of the documents: data.path=FOLDER/train.zarr data.held_out_path=FOLDER/heldout.zarr, two
arrays in the layout of LongCrawl64 with 16,384 different tokens. All models have the body llama and the same shape, and
train on the same tokens. `sympow ar-hits` measures them. The hybrids are those of Zoology (Arora et al., 2023, Table
2): BaseConv with attention in two of six layers, for all tokens or for selected tokens only.
"""

from typing import Any

from sympow.data import DataConfig
from sympow.models import MixerConfig, preset
from sympow.recipes.scaling import BLOCK, VOCAB_SIZE
from sympow.training import RunConfig, TrainingConfig

CONTEXT = 1024
STEPS = 720  # of 16 rows: 11.8 million tokens
SELECTED = 64  # top_k; of 1,024 tokens about 64 (1 + ln(1 + 1024 / 64)) = 245 ask


def attention() -> RunConfig:
    """Softmax attention, in the block that power attention has."""
    return _config("attention", MixerConfig("softmax", BLOCK))


def softmax_gate() -> RunConfig:
    """Softmax attention with the gate of power attention, in its block."""
    return _config("softmax_gate", MixerConfig("softmax", BLOCK | {"gate": True}))


def power() -> RunConfig:
    """Power attention, p = 2, gated, in its block."""
    return _config("power", MixerConfig("power"))


def power_delta() -> RunConfig:
    """The delta rule on the state of power attention, p = 2, gated, in its block."""
    return _config("power_delta", MixerConfig("power_delta"))


def hyena() -> RunConfig:
    """Hyena with a filter of the whole context."""
    return _config("hyena", MixerConfig("hyena", {"max_length": CONTEXT}))


def base_conv() -> RunConfig:
    """BaseConv: long implicit filters and explicit ones of 3 taps in turns."""
    return _config("base_conv", *_LONG_AND_SHORT)


def base_conv_full() -> RunConfig:
    """BaseConv with softmax attention in two layers."""
    return _hybrid("base_conv_full", MixerConfig("softmax"))


def base_conv_random() -> RunConfig:
    """BaseConv with attention for tokens drawn at random in two layers."""
    return _selection("base_conv_random", selection="random", top_k=SELECTED)


def base_conv_programmatic() -> RunConfig:
    """BaseConv with attention for tokens that occurred before in two layers."""
    return _selection("base_conv_programmatic", selection="programmatic")


def base_conv_learned() -> RunConfig:
    """BaseConv with attention for tokens that a learned score selects in two layers."""
    return _selection("base_conv_learned", selection="learned", top_k=SELECTED)


_LONG_AND_SHORT = (
    MixerConfig("base_conv", {"max_length": CONTEXT}),
    MixerConfig("base_conv", {"max_length": 3, "filter": "explicit"}),
)


def _selection(name: str, **options: Any) -> RunConfig:
    return _hybrid(name, MixerConfig("selection", options))


def _hybrid(name: str, attention: MixerConfig) -> RunConfig:
    return _config(name, *_LONG_AND_SHORT, attention)


def _config(name: str, *mixers: MixerConfig) -> RunConfig:
    return RunConfig(
        name=f"hybrids-{name}",
        model=preset("mini", vocab_size=VOCAB_SIZE, mixers=mixers, body="llama"),
        data=DataConfig(
            kind="zarr",
            path="corpus/train.zarr",
            held_out_path="corpus/heldout.zarr",
            tokenizer="none",
            vocab_size=VOCAB_SIZE,
            pack=False,
        ),
        training=TrainingConfig(
            context=CONTEXT,
            batch_size=16,
            steps=STEPS,
            learning_rate=2e-3,
            warmup_steps=STEPS // 10,
            precision="bf16",
            evaluate_every=STEPS,
            evaluation_batches=64,
            checkpoint_every=STEPS,
            keep_checkpoints=1,
        ),
    )
