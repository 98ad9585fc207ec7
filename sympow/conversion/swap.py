"""The swap: power attention or windows replace the softmax attention of a model, and all else is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sympow.layers.power import PowerAttention
from sympow.models import LanguageModel, MixerConfig

KINDS = ("power", "window", "softmax")
ONE = 1.2784645427610738
"""silu(ONE) = 1: the bias with which an output gate of weights 0 changes nothing."""

# Of a new power layer. Gates begin open, with memories of exp(5) to exp(9) tokens. (score + a)^2 falls where scores lie
# below -a: scores of SmolLM2 are 0 on average with a standard deviation of 4.
GATE_BIAS = (5.0, 9.0)
INITIAL_SCORE = 6.0


def parse_pattern(text: str) -> tuple[str, ...]:
    """Reads a pattern of layers: "power*5,softmax" are five layers of power attention and one that stays as it is.

    Raises ValueError for a kind that is not one of `KINDS`, and for what is no number behind the asterisk.
    """
    kinds: list[str] = []
    for part in text.split(","):
        name, asterisk, count = (piece.strip() for piece in part.partition("*"))
        if name not in KINDS or (asterisk and not (count.isdecimal() and int(count) > 0)):
            raise ValueError(f"a pattern is made of {', '.join(KINDS)}, such as power*5,softmax; got {part.strip()!r}")
        kinds += [name] * (int(count) if asterisk else 1)
    return tuple(kinds)


def swap_mixers(
    teacher: LanguageModel, pattern: Sequence[str] = ("power",), *, p: int = 2, window: int = 1024
) -> LanguageModel:
    """Makes a model like `teacher` with other mixers.

    It shares no memory with the teacher.

    Norms, MLPs, embedding and head, and the projections of queries, keys, values and outputs are the teacher's.
    A window looks at the last tokens as the teacher does. A power layer weighs tokens by (score + a)^p in place of
    exp(score). What is new in it begins so that it changes nothing: the short convolution as the identity, the output
    gate at 1, without a norm of heads, which would take away the sizes of their outputs, and the gate nearly open and
    the same for all tokens. The constant a is `INITIAL_SCORE`, held by biases of queries and keys.

    Args:
        teacher: a model of the llama body in which all layers have softmax attention.
        pattern: kinds of layers, repeated over the layers: "power", "window" and "softmax", which stays as it is.
        p: the power.
        window: tokens that a window sees.

    Raises ValueError for a model of another body or other mixers, and as the mixers do for options that do not fit.
    """
    config = teacher.config
    kept = config.mixers[0]
    if config.body != "llama" or any(mixer.name != "softmax" for mixer in config.mixers) or len(config.mixers) > 1:
        names = ", ".join(dict.fromkeys(mixer.name for mixer in config.mixers))
        raise ValueError(f"the model to convert has the llama body and softmax attention; got {config.body}, {names}")
    mixers = {
        "softmax": kept,
        "window": MixerConfig("window", kept.options | {"window": window}),
        "power": MixerConfig("power", kept.options | _power_options(kept.options, p)),
    }
    kinds = [pattern[layer % len(pattern)] for layer in range(config.n_layers)]
    alike = kinds if len(set(kinds)) > 1 else kinds[:1]
    student = LanguageModel(replace(config, mixers=tuple(mixers[kind] for kind in alike)), seed=0)
    student.to(teacher.embedding.weight)  # before weights are copied, which it would round
    weights = teacher.state_dict()
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if name.endswith("mixer.qkv.bias"):
                parameter.add_(weights.get(name, torch.zeros(())))  # beside the initial score
            elif name in weights:
                parameter.copy_(weights[name])
        for block in student.blocks:
            if isinstance(block.mixer, PowerAttention):
                _make_neutral(block.mixer)
    return student.train(teacher.training)


def _power_options(kept: dict[str, Any], p: int) -> dict[str, Any]:
    """Returns the options of a power layer, without those that it shares with the softmax layer."""
    return {
        "p": p,
        "bias": True,
        "out_bias": kept.get("out_bias", kept.get("bias", True)),
        "rotary_fraction": kept.get("rotary_fraction", 1.0),
        "gate_bias": GATE_BIAS,
        "initial_score": 0.0 if kept.get("qk_norm") else INITIAL_SCORE,  # a norm behind the biases would change them
        "head_norm": False,
        "output_gate": True,
        "output_gate_bias": True,
    }


def _make_neutral(mixer: PowerAttention) -> None:
    """Starts the new parts of a power layer so that they change nothing, or little."""
    if mixer.convolution is not None:
        mixer.convolution.weight.zero_()
        mixer.convolution.weight[:, -1] = 1
        if mixer.convolution.bias is not None:
            mixer.convolution.bias.zero_()
    if mixer.gate is not None:
        mixer.gate.weight.zero_()  # what remains is the bias
    if mixer.output_gate is not None:
        mixer.output_gate.weight.zero_()
        mixer.output_gate.bias.fill_(ONE)
