"""Replaces the softmax attention of a model by power, delta, window or gated attention. Other parts are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sympow.layers.attention import AttentionMixer
from sympow.layers.power import PowerAttention
from sympow.layers.power_delta import PowerDeltaAttention
from sympow.layers.softmax import SoftmaxAttention
from sympow.models import LanguageModel, MixerConfig, ModelConfig

KINDS = ("power", "window", "softmax", "gated", "delta")
MOST_LAYERS = 10_000  # of one part of a pattern
ONE = 1.2784645427610738
"""The solution of silu(ONE) = 1. An output gate with weights 0 and this bias multiplies by 1."""

# Initial values of a new power layer. Gates are nearly open at first, with memories of exp(5) to exp(9) tokens. The
# constant a of (score + a)^2 is INITIAL_SCORE. The square decreases with the score where scores are below -a; scores of
# SmolLM2 are 0 on average, with a standard deviation of 4.
GATE_BIAS = (5.0, 9.0)
INITIAL_SCORE = 6.0

# Initial values of a new delta layer. The rule itself replaces what is out of date, so the gates are nearly open, with
# memories of exp(8) to exp(14) tokens. Queries and keys have norm 1 there, so the weight of a token is a power of a
# cosine. A larger constant brings the layer closer to that of its teacher at first, and a smaller one keeps more of a
# single token in a long text. A weaker write brings it closer, too, and a stronger one keeps more.
DELTA_GATE_BIAS = (8.0, 14.0)
DELTA_SCORE = 12.0
BETA_BIAS = -1.0

_OF_ROTATIONS = ("frequencies", "max_length", "rotary_fraction", "rope_base", "rope_scaling")


def parse_pattern(text: str) -> tuple[str, ...]:
    """Reads a pattern of layers: "power*5,softmax" means five layers of power attention and one unchanged layer.

    Raises ValueError for a kind that is not in `KINDS`, and for a count after the asterisk that is not a number
    or above `MOST_LAYERS`.
    """
    kinds: list[str] = []
    for part in text.split(","):
        name, asterisk, count = (piece.strip() for piece in part.partition("*"))
        if name not in KINDS or (asterisk and not (count.isdecimal() and int(count) > 0)):
            raise ValueError(f"a pattern is made of {', '.join(KINDS)}, such as power*5,softmax; got {part.strip()!r}")
        if asterisk and int(count) > MOST_LAYERS:
            raise ValueError(f"a part of a pattern has at most {MOST_LAYERS:,} layers; got {part.strip()!r}")
        kinds += [name] * (int(count) if asterisk else 1)
    return tuple(kinds)


def kind_of(mixer: MixerConfig) -> str:
    """Returns the kind of a converted model's layer, as in a pattern; for layers of no kind, the name of the mixer."""
    if mixer.name == "power_delta":
        return "delta"
    return "gated" if mixer.name == "softmax" and mixer.options.get("gate") else mixer.name


def keeps_layers(config: ModelConfig, pattern: Sequence[str], p: int = 2, unshare: bool = False) -> bool:
    """Returns whether a pattern keeps all layers of a model as they are.

    The part "softmax" keeps layers of softmax attention. The part "power" keeps layers of a model whose layers all have
    power attention already; no other part can replace these.

    Args:
        config: of the model.
        pattern: the kinds of layers, as for `swap_mixers`.
        p: the power of power layers.
        unshare: as for `swap_mixers`.

    Raises ValueError for power attention that a part would replace, or whose power is not `p`, and for heads to unshare
    without a new power or delta layer.
    """
    if any(mixer.name != "power" for mixer in config.mixers):
        _check_heads(pattern[: config.n_layers], unshare)
        return all(kind == "softmax" for kind in pattern)
    for mixer in config.mixers:
        own = mixer.options.get("p", 2)
        if own != p:
            raise ValueError(f"the layers of the model have power attention with p = {own}, which is kept; got p = {p}")
    for kind in pattern:
        if kind != "power":
            raise ValueError(f"the layers of the model have power attention, kept by the pattern power; got {kind!r}")
    if unshare:
        raise ValueError("the layers of the model have power attention, which is kept, as its key/value heads are")
    return True


def swap_mixers(
    teacher: LanguageModel,
    pattern: Sequence[str] = ("power",),
    *,
    p: int = 2,
    window: int = 1024,
    unshare: bool = False,
) -> LanguageModel:
    """Makes a model like `teacher` with other mixers. The model shares no memory with the teacher.

    Norms, MLPs, embedding, head, and the projections of queries, keys, values and outputs are copies of the teacher's.
    A window layer attends to the last tokens as the teacher does. A power layer weighs tokens by (score + a)^p instead
    of exp(score). The constant a is `INITIAL_SCORE`, and biases of queries and keys contain it. The new parts of a
    power layer initially change nothing, or little: the short convolution is the identity, the output gate is 1, and
    the gate is nearly open and the same for all tokens. A power layer gets no new norm of heads, because the norm would
    remove the magnitudes of the heads' outputs. A gated layer has softmax attention to all tokens, with the same gate
    and without rotation, so that no position is new to it in a text longer than those of the training. A delta layer
    has power attention with the delta rule. It has the new parts of a power layer, no rotation either, and a learned
    strength that is the same for all tokens at first. Parts that the teacher's layers have too keep their weights.

    Args:
        teacher: a model of the llama body in which all layers have softmax attention, to all tokens or in windows. A
            layer with windows does not get wider ones.
        pattern: the kinds of layers, repeated over the layers: one of `KINDS`, of which "softmax" keeps the
            layer; or a text for `parse_pattern`.
        p: the power of power and delta layers.
        window: the number of tokens that a window layer attends to.
        unshare: whether every query head of a power or delta layer gets a key/value head of its own, a copy of the one
            that it shared. Their states have a gate and a strength of their own then.

    Raises ValueError for a model with another body or other mixers, and for an unknown kind, and the errors of
    the mixers for their options.
    """
    config = teacher.config
    mixers = _mixers(config, pattern, p, window, unshare)
    alike = mixers if any(mixer != mixers[0] for mixer in mixers) else mixers[:1]
    shared = None if all("n_kv_heads" in mixer.options for mixer in mixers) else config.n_kv_heads
    student = LanguageModel(replace(config, mixers=tuple(alike), n_kv_heads=shared), seed=0)
    student.to(teacher.embedding.weight)  # before weights are copied: afterwards it would round them
    weights = teacher.state_dict()
    with torch.no_grad():
        for layer, (own, other) in enumerate(zip(student.blocks, teacher.blocks, strict=True)):
            if isinstance(own.mixer, AttentionMixer) and isinstance(other.mixer, AttentionMixer):
                _spread(weights, f"blocks.{layer}.mixer", own.mixer, other.mixer)
        for name, parameter in student.named_parameters():
            if name.endswith("mixer.qkv.bias"):
                parameter.add_(weights.get(name, torch.zeros(())))  # beside the initial score
            elif name in weights:
                parameter.copy_(weights[name])
        for layer, block in enumerate(student.blocks):
            if isinstance(block.mixer, PowerAttention | PowerDeltaAttention | SoftmaxAttention):
                _make_neutral(block.mixer, config.mixer(layer).options)
    return student.train(teacher.training)


def replaced_layers(
    config: ModelConfig, pattern: Sequence[str], *, p: int = 2, window: int = 1024, unshare: bool = False
) -> list[int]:
    """Returns the layers of which `swap_mixers` makes other ones; arguments and errors are those of `swap_mixers`."""
    mixers = _mixers(config, pattern, p, window, unshare)
    return [layer for layer, mixer in enumerate(mixers) if mixer != config.mixer(layer)]


def _mixers(config: ModelConfig, pattern: Sequence[str], p: int, window: int, unshare: bool) -> list[MixerConfig]:
    """Returns the mixers of all layers after the swap."""
    pattern = parse_pattern(pattern) if isinstance(pattern, str) else tuple(pattern)
    if not pattern or any(kind not in KINDS for kind in pattern):
        raise ValueError(f"a pattern is made of {', '.join(KINDS)}; got {list(pattern)}")
    if config.body != "llama" or any(mixer.name not in ("softmax", "window") for mixer in config.mixers):
        names = ", ".join(dict.fromkeys(mixer.name for mixer in config.mixers))
        raise ValueError(f"the model to convert has the llama body and softmax attention; got {config.body}, {names}")
    _check_heads(pattern[: config.n_layers], unshare)
    heads = {"n_kv_heads": config.n_heads} if unshare else {}
    kinds = [pattern[layer % len(pattern)] for layer in range(config.n_layers)]
    return [_swapped(config.mixer(layer), kind, p, window, heads) for layer, kind in enumerate(kinds)]


def _check_heads(pattern: Sequence[str], unshare: bool) -> None:
    if unshare and not {"power", "delta"} & set(pattern):
        raise ValueError(f"heads are unshared in power and delta layers; the pattern has none: {','.join(pattern)}")


def _swapped(kept: MixerConfig, kind: str, p: int, window: int, heads: dict[str, Any]) -> MixerConfig:
    """Returns the mixer of the given kind in place of the mixer `kept`; `heads`: options of power and delta layers."""
    options = {name: value for name, value in kept.options.items() if name != "window"}
    if kind == "softmax":
        return kept
    if kind == "window":
        return MixerConfig(kind, options | {"window": min(window, kept.options.get("window", window))})
    if kind == "power":
        return MixerConfig(kind, options | _power_options(options, p) | heads)
    options = {name: value for name, value in options.items() if name not in _OF_ROTATIONS} | {"rotation": "none"}
    if kind == "delta":
        return MixerConfig("power_delta", options | _delta_options(options, p) | heads)
    gate = {"gate": True, "gate_bias": kept.options.get("gate_bias", GATE_BIAS)}
    return MixerConfig("softmax", options | gate)


def _power_options(kept: dict[str, Any], p: int) -> dict[str, Any]:
    """Returns the options of a power layer, without those that it shares with the softmax layer."""
    return _block_options(kept, p, GATE_BIAS) | {
        "rotary_fraction": kept.get("rotary_fraction", 1.0),
        "initial_score": 0.0 if kept.get("qk_norm") else INITIAL_SCORE,  # a norm after the biases would change them
    }


def _delta_options(kept: dict[str, Any], p: int) -> dict[str, Any]:
    """Returns the options of a delta layer, without those that it shares with the softmax layer."""
    return _block_options(kept, p, DELTA_GATE_BIAS) | {"gate": True, "beta_bias": BETA_BIAS}


def _block_options(kept: dict[str, Any], p: int, gate_bias: tuple[float, float]) -> dict[str, Any]:
    """Returns the options that power and delta layers have in common."""
    return {
        "p": p,
        "bias": True,
        "out_bias": kept.get("out_bias", kept.get("bias", True)),
        "gate_bias": kept.get("gate_bias", gate_bias),
        "head_norm": kept.get("head_norm", False),
        "output_gate": True,
        "output_gate_bias": kept.get("output_gate_bias", False) if kept.get("output_gate") else True,
    }


def _spread(weights: dict[str, Tensor], prefix: str, own: AttentionMixer, other: AttentionMixer) -> None:
    """Repeats, in `weights`, what belongs to the key/value heads of `other`, for the more such heads of `own`."""
    times = own.n_kv_heads // other.n_kv_heads
    if times == 1:
        return
    for name in (f"{prefix}.{part}" for part in ("qkv.weight", "qkv.bias", "gate.weight", "gate.bias")):
        if name not in weights:
            continue
        parts = weights[name].split(other.fused()["qkv"]) if ".qkv." in name else [weights[name][:0], weights[name]]
        shared = [part.unflatten(0, (other.n_kv_heads, -1)).repeat_interleave(times, 0) for part in parts[1:]]
        weights[name] = torch.cat([parts[0], *(part.flatten(0, 1) for part in shared)])


def _make_neutral(mixer: PowerAttention | PowerDeltaAttention | SoftmaxAttention, kept: dict[str, Any]) -> None:
    """Sets the new parts of a layer so that they change nothing, or little; `kept`: options of the layer before."""
    if isinstance(mixer, PowerDeltaAttention):
        if mixer.strength is not None:
            mixer.strength.weight.zero_()  # what remains is the bias
        if mixer.qkv.bias is not None and mixer.q_norm is None:
            heads = mixer.qkv.bias[: (mixer.n_heads + mixer.n_kv_heads) * mixer.head_dim].view(-1, mixer.head_dim)
            channels = max(1, mixer.head_dim // 8)
            heads[:, -channels:] += (DELTA_SCORE * mixer.head_dim**0.5 / channels) ** 0.5
    if mixer.convolution is not None and not kept.get("short_convolution"):
        mixer.convolution.weight.zero_()
        mixer.convolution.weight[:, -1] = 1
        if mixer.convolution.bias is not None:
            mixer.convolution.bias.zero_()
    if mixer.gate is not None and not kept.get("gate"):
        mixer.gate.weight.zero_()  # what remains is the bias
    if mixer.output_gate is not None and not kept.get("output_gate"):
        mixer.output_gate.weight.zero_()
        mixer.output_gate.bias.fill_(ONE)
