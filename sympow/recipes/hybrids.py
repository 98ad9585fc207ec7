"""Recall on real text by attention, convolutions, and hybrids of both. The models differ in their mixers only.

The recipes need the paths of the documents: data.path=FOLDER/train.zarr data.held_out_path=FOLDER/heldout.zarr, two
arrays in the layout of LongCrawl64 with 16,384 different tokens. All models have the body llama and the same shape, and
train on the same tokens. `sympow ar-hits` measures them. The hybrids are those of Zoology (Arora et al., 2023, Table
2): BaseConv with attention in two of six layers, for all tokens or for selected tokens only. In `control_` recipes all
attention layers have the same short convolution and rotation. Other recipes are models of the source's Tables 1, 3, 4
and 5, with the body and shape of all others.
"""

from dataclasses import replace
from typing import Any

from sympow.models import MixerConfig
from sympow.recipes import scaling
from sympow.recipes.scaling import BLOCK
from sympow.training import RunConfig

CONTEXT = 1024
SELECTED = 64  # top_k; of 1,024 tokens about 64 (1 + ln(1 + 1024 / 64)) = 245 ask
PROBABILITY = 0.24  # of random selection: 245 of 1,024 tokens ask
CONTROL: dict[str, Any] = {"short_convolution": 4, "rotary_fraction": 0.25}  # what selection can have of `BLOCK`


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


def power_delta_offset() -> RunConfig:
    """The delta rule of `power_delta`, with an offset of the scores."""
    return _config("power_delta_offset", MixerConfig("power_delta", {"offset": 0.09}))


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
    return _selection("base_conv_random", selection="random", probability=PROBABILITY)


def base_conv_programmatic() -> RunConfig:
    """BaseConv with attention for tokens that occurred before in two layers."""
    return _selection("base_conv_programmatic", selection="programmatic")


def base_conv_learned() -> RunConfig:
    """BaseConv with attention for tokens that a learned score selects in two layers."""
    return _selection("base_conv_learned", selection="learned", top_k=SELECTED)


def control_attention() -> RunConfig:
    """Control of Table 2: softmax attention in the block of the controls."""
    return _config("control_attention", MixerConfig("softmax", CONTROL))


def control_base_conv() -> RunConfig:
    """Control of Table 2: BaseConv, which has short convolutions of its own."""
    return _config("control_base_conv", *_LONG_AND_SHORT)


def control_full() -> RunConfig:
    """Control of Table 2: BaseConv with softmax attention in two layers, in the block of the controls."""
    return _config("control_full", *_LONG_AND_SHORT, MixerConfig("softmax", CONTROL))


def control_random() -> RunConfig:
    """Control of Table 2: the same with attention for tokens drawn at random."""
    return _controlled_selection("random", selection="random", probability=PROBABILITY)


def control_programmatic() -> RunConfig:
    """Control of Table 2: the same with attention for tokens that occurred before."""
    return _controlled_selection("programmatic", selection="programmatic")


def control_learned() -> RunConfig:
    """Control of Table 2: the same with attention for tokens of the largest learned scores so far."""
    return _controlled_selection("learned", selection="learned", top_k=SELECTED)


def control_learned_row() -> RunConfig:
    """Control of Table 2: the same with the 245 largest scores of the row; looks ahead, as in the source."""
    return _controlled_selection("learned_row", selection="learned", top_k=245, whole_row=True)


def base_conv_published() -> RunConfig:
    """BaseConv with the frequency and the decays of Zoology's Table 9."""
    long = {"max_length": CONTEXT, "frequency": 14.0, "decays": (0.3, 1.2)}
    return _config("base_conv_published", MixerConfig("base_conv", long), _LONG_AND_SHORT[1])


def long_convolution() -> RunConfig:
    """A long convolution without a gate (Tables 1 and 4)."""
    return _config("long_convolution", MixerConfig("long_convolution", {"max_length": CONTEXT}))


def h3() -> RunConfig:
    """H3 with a state of 64 (Tables 1 and 4)."""
    return _config("h3", MixerConfig("h3", {"state_dim": 64}))


def rwkv4() -> RunConfig:
    """The time mixing of RWKV-4 (Tables 1 and 4). The MLP is that of the body, not RWKV's channel mixing."""
    return _config("rwkv4", *(MixerConfig("rwkv4", {"depth": i / 5, "shift_depth": i / 6}) for i in range(6)))


def retnet() -> RunConfig:
    """RetNet in chunks of 128 tokens (Table 4)."""
    return _config("retnet", MixerConfig("retnet", {"chunk_size": 128}))


def liquid_s4() -> RunConfig:
    """Liquid S4 with a state of 64 (Table 3)."""
    return _config("liquid_s4", MixerConfig("liquid_s4", {"state_dim": 64}))


def hyena_window64() -> RunConfig:
    """Hyena with windows of 64 tokens in two layers (Table 4)."""
    return _hyena_window(64)


def hyena_window256() -> RunConfig:
    """Hyena with windows of 256 tokens in two layers (Table 4)."""
    return _hyena_window(256)


def hyena_w2() -> RunConfig:
    """Hyena with sines of the initial frequency 2 (Table 5)."""
    return _config("hyena_w2", MixerConfig("hyena", _HYENA | {"frequency": 2.0}))


def hyena_w14() -> RunConfig:
    """Hyena with sines of the initial frequency 14 (Table 5)."""
    return _config("hyena_w14", MixerConfig("hyena", _HYENA))


def hyena_heads() -> RunConfig:
    """Hyena with the frequency 2 in six heads of 64 channels (Table 5, where there are four heads)."""
    return _config("hyena_heads", MixerConfig("hyena", _HYENA | {"frequency": 2.0, "multi_head": True}))


_HYENA: dict[str, Any] = {"max_length": CONTEXT, "frequency": 14.0, "decays": (0.3, 1.2)}
_LONG_AND_SHORT = (
    MixerConfig("base_conv", {"max_length": CONTEXT}),
    MixerConfig("base_conv", {"max_length": 3, "filter": "explicit"}),
)


def _hyena_window(tokens: int) -> RunConfig:
    hyena = MixerConfig("hyena", _HYENA)
    return _config(f"hyena_window{tokens}", hyena, hyena, MixerConfig("window", {"window": tokens}))


def _controlled_selection(name: str, **options: Any) -> RunConfig:
    return _config(f"control_{name}", *_LONG_AND_SHORT, MixerConfig("selection", CONTROL | options))


def _selection(name: str, **options: Any) -> RunConfig:
    return _hybrid(name, MixerConfig("selection", options))


def _hybrid(name: str, attention: MixerConfig) -> RunConfig:
    return _config(name, *_LONG_AND_SHORT, attention)


def _config(name: str, *mixers: MixerConfig) -> RunConfig:
    """Returns the run of `scaling.power` with other mixers and in shorter rows. The held-out loss is measured once."""
    config = scaling.power()
    training = replace(
        config.training, context=CONTEXT, batch_size=64, evaluate_every=scaling.STEPS, evaluation_batches=64
    )
    return replace(config, name=f"hybrids-{name}", model=replace(config.model, mixers=mixers), training=training)
