"""What models can be read: checks of the fields of a config.json, and of the scaling of its rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sympow.fields import is_integer, is_number
from sympow.ops.rope_scaling import check_scaling

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "seed_oss", "granite", "phi3")
"""The `model_type` of what can be read; SmolLM and SmolLM2 are of type "llama", Phi-4 is of type "phi3"."""

IN_GGUF = ("llama", "qwen2", "qwen3", "smollm3", "seed_oss", "granite", "phi3")
"""The architectures of GGUF files that can be read. A file of Mistral is of "llama"."""

SCALINGS = ("default", "linear", "llama3", "yarn")
"""The types of rotations that can be read from a config.json."""

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "sliding_window")
_BOUND = 2**63  # of numbers that torch takes
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_EXPECTED = {
    "hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "pretraining_tp": 1, "is_encoder_decoder":
    False,
}  # fmt: skip


def check_fields(
    config: Mapping[str, Any], name: str, known: Sequence[str] = ARCHITECTURES, expected: Mapping[str, Any] = _EXPECTED
) -> None:
    """Checks the fields of a config.json, before transformers reads them. Fields may be missing.

    Args:
        config: the content of the file.
        name: of the model, for messages.
        known: the architectures that can be read.
        expected: the values of fields that have one value only.

    Raises ValueError for another architecture, for the config of a run or of an exported one, for quantized layers, and
    for values that no model can have.
    """
    kind = config.get("model_type")
    if kind == "sympow" or (kind is None and {"model", "data", "training"} <= config.keys()):
        raise ValueError(f"{name} is a model of sympow already; give the pretrained model that it was made from")
    if kind not in known:
        raise ValueError(f"{name} is of the architecture {kind!r}; sympow reads {', '.join(known)}")
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "an unknown method") if isinstance(quantization, Mapping) else "?"
        raise ValueError(f"the layers of {name} are quantized ({method}); give the model in full precision, or as GGUF")
    for field in (*_SIZES, *_OPTIONAL_SIZES):
        value = config.get(field, 1)
        if value is None and field in _OPTIONAL_SIZES:
            continue
        if not is_integer(value) or not 1 <= value < _BOUND:
            raise ValueError(f"{name} has {field} = {value!r:.60}; expected an integer of at least 1, below 2**63")
    for field in ("dtype", "torch_dtype"):
        value = config.get(field)
        named = getattr(torch, value, None) if isinstance(value, str) else value
        if value is not None and not isinstance(named, torch.dtype):
            raise ValueError(f"{name} has {field} = {value!r}; expected the name of a dtype of torch")
    eps = config.get("rms_norm_eps", 1e-6)
    if not is_number(eps) or not 0 < eps < 1:
        raise ValueError(f"{name} has rms_norm_eps = {eps!r}; expected a number between 0 and 1")
    for field in MULTIPLIERS:
        value = config.get(field, 1)
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"{name} has {field} = {value!r}; expected a positive number")
    for field in ("tie_word_embeddings", "attention_bias", "attention_out_bias"):
        if not isinstance(config.get(field, False), bool):
            raise ValueError(f"{name} has {field} = {config[field]!r}; expected true or false")
    for field, value in expected.items():
        if config.get(field, value) not in (value, None):
            raise ValueError(f"{name} has {field} = {config[field]!r}; the llama body has {value!r}")
    layers = config.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(each != "full_attention" for each in layers)):
        raise ValueError(f"{name} has layers with another attention than full_attention in layer_types")
    _check_heads(config, name)
    rotated = config.get("no_rope_layers")
    if rotated is not None and (not isinstance(rotated, list) or any(each not in (0, 1) for each in rotated)):
        raise ValueError(f"{name} has no_rope_layers = {str(rotated)[:60]}; expected 0 or 1 for each layer")
    if rotated is not None and len(rotated) != config.get("num_hidden_layers", len(rotated)):
        raise ValueError(f"{name} has {config['num_hidden_layers']} layers, and no_rope_layers of {len(rotated)}")
    _check_base(config.get("rope_theta"), name)
    for field in ("rope_parameters", "rope_scaling"):
        if config.get(field) is not None:
            _check_rope(config[field], name, partial=kind == "phi3")


def _check_heads(config: Mapping[str, Any], name: str) -> None:
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads")
    if heads is not None and groups is not None and heads % groups:
        raise ValueError(f"{name} has {heads} heads, which is no multiple of its {groups} key/value heads")
    width = config.get("hidden_size")
    if heads is not None and width is not None and config.get("head_dim") is None and width % heads:
        raise ValueError(f"{name} has a hidden_size of {width}, which is no multiple of its {heads} heads")
    if (config.get("head_dim") or 2) % 2:
        raise ValueError(f"{name} has heads of {config['head_dim']} channels; the rotation needs an even number")


def _check_rope(rope: Any, name: str, partial: bool = True) -> None:
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} has the rotation {rope!r}; expected an object with rope_type")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ValueError(f"{name} has a scaled rotation of the type {kind!r} (rope_type in its config); "
                         f"sympow reads {known}")  # fmt: skip
    share = rope.get("partial_rotary_factor", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1 or (share != 1 and not partial):
        raise ValueError(f"{name} rotates a part of the channels only, {share!r} of them")
    _check_base(rope.get("rope_theta"), name)
    for field, value in rope.items():
        if isinstance(value, Mapping):
            raise ValueError(f"{name} has a rotation of its own for layers of {field}; expected one for all layers")
        if isinstance(value, int | float) and abs(value) >= _BOUND:
            raise ValueError(f"{name} has a rotation with {field} = {value!r:.60}; expected a number below 2**63")


def _check_base(base: Any, name: str) -> None:
    if base is not None and not (is_number(base) and 1 < base < _BOUND):
        raise ValueError(f"{name} has rope_theta = {base!r:.60}; expected a number greater than 1, below 2**63")


def rope_scaling(rope: Mapping[str, Any], longest: int, turning: int, name: str) -> dict[str, Any] | None:
    """Returns the option `rope_scaling` of the mixers; None for the plain rotation.

    Args:
        rope: the rotation as `rope_parameters` in transformers, or of the type "factors".
        longest: the longest context that the model was made for, in tokens.
        turning: channels of a head that are rotated.
        name: of the model, for messages.

    Raises ValueError for a scaling that is not known or not complete.
    """
    rope = dict(rope)
    rule = rope.pop("rope_type", rope.pop("type", "default"))
    if rule != "factors":
        _check_rope(rope | {"rope_type": rule}, name)
    for other in ("type", "rope_theta", "partial_rotary_factor"):
        rope.pop(other, None)
    if rule == "default":
        return None
    if rule == "yarn":
        rope = _yarn(rope, longest)
    elif rule == "linear":
        rope.pop("original_max_position_embeddings", None)  # which transformers does not read
    scaling = {"rope_type": rule} | rope
    try:
        check_scaling(scaling, turning // 2)
    except ValueError as error:
        raise ValueError(f"{name} has a scaled rotation that cannot be read: {error}") from None
    return scaling


def _yarn(rope: dict[str, Any], longest: int) -> dict[str, Any]:
    """Returns the numbers of "yarn" without those that only give others: `mscale` and `mscale_all_dim`."""
    rope = {key: value for key, value in rope.items() if value is not None}
    length = rope.get("original_max_position_embeddings")
    mscale, every = rope.pop("mscale", 0), rope.pop("mscale_all_dim", 0)
    if "factor" not in rope and length:
        rope["factor"] = longest / length
    for name in ("beta_fast", "beta_slow"):
        if rope.get(name) == 0:  # transformers then takes the usual one
            del rope[name]
    if "attention_factor" not in rope and mscale and every and rope.get("factor", 0) > 0:
        grown = math.log(max(1.0, rope["factor"])) / 10
        rope["attention_factor"] = (mscale * grown + 1) / (every * grown + 1)
    return rope
