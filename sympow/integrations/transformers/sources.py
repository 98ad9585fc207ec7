"""What models can be read: checks of configs, and the weights that a config describes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sympow.models import MixerConfig
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
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_EXPECTED = {
    "hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "pretraining_tp": 1, "is_encoder_decoder":
    False,
}  # fmt: skip
_NAMES_IN_GGUF = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
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
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} has {field} = {value!r}; expected an integer of at least 1")
    for field in ("dtype", "torch_dtype"):
        value = config.get(field)
        named = getattr(torch, value, None) if isinstance(value, str) else value
        if value is not None and not isinstance(named, torch.dtype):
            raise ValueError(f"{name} has {field} = {value!r}; expected the name of a dtype of torch")
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 < eps < 1:
        raise ValueError(f"{name} has rms_norm_eps = {eps!r}; expected a number between 0 and 1")
    for field in _MULTIPLIERS:
        value = config.get(field, 1)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
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
        raise ValueError(f"{name} has a scaled rotation of the type {kind!r}; sympow reads {known}")
    share = rope.get("partial_rotary_factor", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1 or (share != 1 and not partial):
        raise ValueError(f"{name} rotates a part of the channels only, {share!r} of them")
    base = rope.get("rope_theta")
    if base is not None and (not isinstance(base, int | float) or isinstance(base, bool) or not 1 < base < math.inf):
        raise ValueError(f"{name} has rope_theta = {base!r}; expected a number greater than 1")


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


def described(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and the shapes of the weights of a model, as transformers names them.

    Args:
        config: the config of the model in transformers.
    """
    width, hidden, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    keys = (config.num_key_value_heads or heads) * head_dim
    fused = config.model_type == "phi3"
    rows = {"q": heads * head_dim, "k": keys, "v": keys}
    biased, out_biased = _biases(config)
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for each, count in ({"qkv": sum(rows.values())} if fused else rows).items():
            yield f"{prefix}self_attn.{each}_proj.weight", (count, width)
            if biased:
                yield f"{prefix}self_attn.{each}_proj.bias", (count,)
        yield f"{prefix}self_attn.o_proj.weight", (width, heads * head_dim)
        if out_biased:
            yield f"{prefix}self_attn.o_proj.bias", (width,)
        if config.model_type == "qwen3":
            for each in "qk":
                yield f"{prefix}self_attn.{each}_norm.weight", (head_dim,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (width,)
        for each in ("gate_up",) if fused else ("gate", "up"):
            yield f"{prefix}mlp.{each}_proj.weight", (hidden * (1 + fused), width)
        yield f"{prefix}mlp.down_proj.weight", (width, hidden)
    yield "model.norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, width)


def _biases(config: Any) -> tuple[bool, bool]:
    """Returns whether the projections of queries, keys and values have biases, and whether that of outputs has one."""
    if config.model_type == "qwen2":
        return True, False
    biased = getattr(config, "attention_bias", False)
    return biased, getattr(config, "attention_out_bias", biased)


def unfused(config: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a model as those of Llama, with the same function.

    Fused projections, as in Phi-3, are split. The multipliers of Granite become parts of the weights: those of the
    embedding, of scores, of the outputs of layers and of logits.

    Args:
        config: the config of the model in transformers.
        weights: by their names in transformers.
    """
    found = dict(weights)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = [config.num_attention_heads * head_dim] + [config.num_key_value_heads * head_dim] * 2
    for key in list(found):
        for whole, parts, sizes in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj"), rows),
            ("gate_up_proj", ("gate_proj", "up_proj"), [config.intermediate_size] * 2),
        ):
            if f".{whole}." in key:
                pieces = found.pop(key).split(sizes)
                found |= {key.replace(whole, part): piece for part, piece in zip(parts, pieces, strict=True)}
    if config.model_type != "granite":
        return found
    embedding, scores, outputs, logits = (float(getattr(config, field)) for field in _MULTIPLIERS)
    tied = embedding if config.tie_word_embeddings else 1.0
    for key, weight in found.items():
        if key == "model.embed_tokens.weight":
            found[key] = weight * embedding
        elif key == "model.norm.weight":
            found[key] = weight / (logits * tied)
        elif ".q_proj." in key:
            found[key] = weight * (scores * head_dim**0.5)
        elif ".o_proj." in key or ".down_proj." in key:
            found[key] = weight * outputs
    return found


def layers_of(config: Any, options: dict[str, Any]) -> tuple[MixerConfig, ...]:
    """Returns the mixers of a model, as a pattern that is repeated over its layers.

    Args:
        config: the config of the model in transformers.
        options: the options of a layer of softmax attention with a rotation.
    """
    window = getattr(config, "sliding_window", None) if config.model_type in ("mistral", "phi3") else None
    if window is not None:
        return (MixerConfig("window", options | {"window": window}),)
    rotated = getattr(config, "no_rope_layers", None) if config.model_type == "smollm3" else None
    if rotated is None:
        return (MixerConfig("softmax", options),)
    still = {key: value for key, value in options.items() if not key.startswith("rope_")} | {"rotation": "none"}
    kinds = [MixerConfig("softmax", options if each else still) for each in rotated]
    period = next(n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    return tuple(kinds[:period])


def check_shapes(
    expected: Iterator[tuple[str, tuple[int, ...]]], found: Mapping[str, tuple[int, ...]], name: str
) -> None:
    """Compares the weights that a config describes with those in a file, before memory is allocated for them.

    The comparison ends at the first weight that the file lacks, so that its time depends on the file alone.

    Args:
        expected: names and shapes, as `described` yields them.
        found: shapes in the file, by the same names.
        name: of the model, for messages.

    Raises ValueError for a weight that is missing or of another shape, and for one that the config does not know.
    """
    known = set()
    for key, shape in expected:
        if found.get(key) != shape:
            what = f"has the shape {list(found[key])}, expected {list(shape)}" if key in found else "is missing"
            raise ValueError(f"{name} lacks weights of its config: {key} {what}")
        known.add(key)
    for key in found:
        if key not in known:
            raise ValueError(f"{name} has the weight {key}, which its config does not know")


def in_names_of_models(found: Mapping[str, tuple[int, ...]], tied: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes in files of transformers, by the names of `described`.

    The files of a model without head lack the first part of the names. Frequencies of the rotation, which old
    checkpoints contain, and a head that is tied to the embedding, are left out.
    """
    whole = any(key.startswith("model.") for key in found)
    names = {key if whole or key == "lm_head.weight" else f"model.{key}": shape for key, shape in found.items()}
    return {
        key: shape
        for key, shape in names.items()
        if not key.endswith("rotary_emb.inv_freq") and not (tied and key == "lm_head.weight")
    }


def name_in_gguf(name: str, architecture: str) -> str:
    """Returns the name of a weight of `described` in a GGUF file of an architecture."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES_IN_GGUF[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    if architecture == "seed_oss" and part == "post_attention_layernorm":
        return f"blk.{layer}.post_attention_norm.{kind}"
    return f"blk.{layer}.{_NAMES_IN_GGUF[part]}.{kind}"


def halves_of_heads(rows: Tensor, heads: int) -> Tensor:
    """Orders rows of queries or keys in which neighbours are rotated as pairs so that pairs are from the two halves.

    GGUF files of "llama", "smollm3" and "granite" have pairs of neighbours.

    Args:
        rows: [heads * head_dim, ...].
        heads: the number of heads.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def neighbouring_pairs(rows: Tensor, head_dim: int, turning: int | None = None) -> Tensor:
    """Orders the rows of heads, in which rows of the two halves are rotated as pairs, so that neighbours are pairs.

    Args:
        rows: [heads * head_dim, ...].
        head_dim: rows of a head.
        turning: the first rows of a head, which are rotated, an even number; None: all of them.

    Returns:
        The rows in another order: of those that are rotated, row m of the first half at 2 m, and row m of the second
        half at 2 m + 1.
    """
    turning = head_dim if turning is None else turning
    order = torch.arange(head_dim)
    order[:turning] = order[:turning].view(2, -1).t().flatten()
    return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
