"""Checkpoints that have power attention already, Brumby and PowerCoder, as native models with the same function."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sympow.integrations.transformers.errors import reading
from sympow.integrations.transformers.pretrained.config_fields import check_fields, rope_scaling
from sympow.integrations.transformers.pretrained.weight_layout import check_shapes, neighbouring_pairs
from sympow.integrations.transformers.weight_files import (
    FLOATS,
    check_dtypes,
    check_finite,
    safetensors_files,
)
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.models.lm import Undrawn

POWER_MODELS = ("brumby", "powercoder")
"""The `model_type` of what can be read."""

EPS = 1e-12
"""The option `eps` of the layers. The sources add 1e-6 times the largest weight of a row, which this does not do."""

_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
# Fields with one value that can be read; a field that is missing has it.
_EXPECTED: dict[str, dict[str, Any]] = {
    "brumby": {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "use_exp": False,
        "p": 2, "partial_rotary_factor": 1,
    },
    "powercoder": {
        "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None, "use_exp": False, "p": 2,
        "norm_epsilon": 1e-5, "partial_rotary_factor": 1,
    },
}  # fmt: skip
_LONGEST = {"brumby": 32768, "powercoder": 4096}
_NAMES = {
    "model.embed_tokens": "embedding", "model.norm": "final_norm", "lm_head": "head", "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mlp_norm", "self_attn.q_proj": "mixer.qkv", "self_attn.k_proj": "mixer.qkv",
    "self_attn.v_proj": "mixer.qkv", "self_attn.g_proj": "mixer.gate", "self_attn.o_proj": "mixer.out",
    "self_attn.q_norm": "mixer.q_norm", "self_attn.k_norm": "mixer.k_norm", "mlp.gate_proj": "mlp_in",
    "mlp.up_proj": "mlp_in", "mlp.down_proj": "mlp_out", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out",
}  # fmt: skip
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")


def power_config(stored: Mapping[str, Any], stored_head: bool, name: str) -> ModelConfig:
    """Returns the config of the native model of a config.json.

    Args:
        stored: the content of the file, of a `model_type` in `POWER_MODELS`.
        stored_head: whether the files have weights of the head, which decides where the config does not.
        name: of the model, for messages.

    Raises ValueError for a field that is missing, or of a value that the native model does not have.
    """
    kind = stored["model_type"]
    check_fields(stored, name, POWER_MODELS, {})
    for field, value in _EXPECTED[kind].items():
        if stored.get(field, value) != value:
            raise ValueError(f"{name} has {field} = {stored[field]!r}; expected {value!r}")
    for field in _NEEDED:
        if stored.get(field) is None:
            raise ValueError(f"{name} has no {field} in its config.json")
    width, heads, hidden = (stored[field] for field in ("hidden_size", "num_attention_heads", "intermediate_size"))
    head_dim = stored.get("head_dim") or width // heads
    if head_dim % 2:
        raise ValueError(f"{name} has heads of {head_dim} channels; the rotation needs an even number")
    options: dict[str, Any] = {
        "p": 2,
        "head_dim": head_dim,
        "rotary_fraction": 1.0,
        "bias": kind == "powercoder",
        "short_convolution": 0,
        "head_norm": False,
        "output_gate": False,
        "initial_score": 0.0,
        "eps": EPS,
        **_rotation(stored, head_dim, name),
    }
    shape: dict[str, Any] = {"body": "gpt2", "embedding_norm": False}
    if kind == "brumby":
        eps = stored.get("rms_norm_eps", 1e-6)
        options |= {"qk_norm": True, "qk_norm_eps": eps}
        shape = {"body": "llama", "mlp_hidden": hidden, "norm_eps": eps}
    elif hidden % width:
        raise ValueError(f"{name} has intermediate_size = {hidden}; the gpt2 body needs a multiple of {width}")
    else:
        shape["mlp_ratio"] = hidden // width
    return ModelConfig(
        vocab_size=stored["vocab_size"],
        d_model=width,
        n_layers=stored["num_hidden_layers"],
        n_heads=heads,
        mixers=(MixerConfig("power", options),),
        n_kv_heads=stored["num_key_value_heads"],
        tie_embeddings=stored.get("tie_word_embeddings", not stored_head),
        **shape,
    )


def longest_context(stored: Mapping[str, Any]) -> int:
    """Returns the longest context that the model of a config.json was made for, in tokens."""
    return int(stored.get("max_position_embeddings", _LONGEST[stored["model_type"]]))


def load_power_model(source: str | os.PathLike[str], stored: Mapping[str, Any]) -> LanguageModel:
    """Reads the weights of Brumby or PowerCoder into a native model, one weight at a time, in the files' dtype.

    Weights of several dtypes become weights of the wider one. The rows of queries and keys are ordered as in
    `load_pretrained`. A gate without a bias gets one of 0.

    Args:
        source: a folder or an id on the Hugging Face Hub, with weights in the format safetensors.
        stored: the content of its config.json, of a `model_type` in `POWER_MODELS`.

    Returns the model in evaluation mode.

    Raises the errors of `power_config`, of `safetensors_files` and of `reading`, and, before memory is allocated for
    the model, ValueError for weights that are missing, unknown, quantized, or of another shape than the config
    describes, and for a head that is not the embedding to which it is tied.
    """
    name = str(source)
    with reading(source):
        files = safetensors_files(source)
    # Frequencies of the rotation, which old checkpoints contain, are not read.
    where = {key: file for file, weights in files.items() for key in weights if not key.endswith("rotary_emb.inv_freq")}
    found = {key: files[file][key] for key, file in where.items()}
    check_dtypes(found, name)
    config = power_config(stored, "lm_head.weight" in found, name)
    head = found.pop("lm_head.weight", None) if config.tie_embeddings else None
    check_shapes(_described(stored, config), {key: each.shape for key, each in found.items()}, name)
    if head is not None:
        _check_tied(where, name)
    model = Undrawn(config, dtype=_widest({FLOATS[each.dtype] for each in found.values()}))
    own = dict(model.named_parameters())
    with torch.no_grad():
        for key, parameter in own.items():
            if key.endswith("mixer.gate.bias"):
                parameter.zero_()
        for file in files:
            with reading(file), safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    if key in found:
                        weight = opened.get_tensor(key)
                        check_finite(weight, key, str(file))
                        place(key, weight, own, config)
    return model.eval()


def _check_tied(where: Mapping[str, Path], name: str) -> None:
    """Raises ValueError for a head that is not the embedding to which it is tied; `where`: the files of weights."""
    pair = []
    for key in ("lm_head.weight", "model.embed_tokens.weight"):
        with reading(where[key]), safe_open(where[key], "pt") as opened:
            pair.append(opened.get_tensor(key))
    head, embedding = pair
    wider = torch.promote_types(head.dtype, embedding.dtype)
    if not torch.equal(head.to(wider), embedding.to(wider)):
        raise ValueError(f"{name} has tie_word_embeddings = True, and a lm_head.weight that is not its embedding")


def _widest(dtypes: set[torch.dtype]) -> torch.dtype:
    widest = dtypes.pop()
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def _rotation(stored: Mapping[str, Any], head_dim: int, name: str) -> dict[str, Any]:
    """Returns the options of the rotation. The base is never a default: sources disagree about it."""
    rope = {**(stored.get("rope_scaling") or {}), **(stored.get("rope_parameters") or {})}
    bases = {each for each in (stored.get("rope_theta"), rope.get("rope_theta")) if each is not None}
    if not bases:
        raise ValueError(f"{name} has no rope_theta in its config.json, the base of the rotation")
    if len(bases) > 1:
        raise ValueError(f"{name} has several rope_theta: {', '.join(map(str, sorted(bases)))}")
    scaling = rope_scaling(rope, longest_context(stored), head_dim, name)
    options: dict[str, Any] = {"rope_base": float(min(bases))}
    return options if scaling is None else options | {"rope_scaling": scaling}


def _described(stored: Mapping[str, Any], config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and the shapes of the weights that the files must have."""
    width, head_dim, groups = config.d_model, config.mixers[0].options["head_dim"], stored["num_key_value_heads"]
    inner, biased = config.n_heads * head_dim, stored["model_type"] == "powercoder"
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (inner, width),
        "self_attn.k_proj": (groups * head_dim, width),
        "self_attn.v_proj": (groups * head_dim, width),
        "self_attn.g_proj": (groups, width),
        "self_attn.o_proj": (width, inner),
        "post_attention_layernorm": (width,),
    }
    if biased:
        shapes |= {"mlp.c_fc": (config.mlp_width, width), "mlp.c_proj": (width, config.mlp_width)}
    else:
        shapes |= {f"self_attn.{each}_norm": (head_dim,) for each in "qk"}
        shapes |= {f"mlp.{each}_proj": (config.mlp_width, width) for each in ("gate", "up")}
        shapes["mlp.down_proj"] = (width, config.mlp_width)
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    for layer in range(config.n_layers):
        for part, shape in shapes.items():
            yield f"model.layers.{layer}.{part}.weight", shape
            if biased:
                yield f"model.layers.{layer}.{part}.bias", shape[:1]
    yield "model.norm.weight", (width,)
    if biased:
        yield "model.norm.bias", (width,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, width)


def place(key: str, weight: Tensor, own: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Copies a weight, by its name in the files, into the parameter or the part of a parameter that it is here."""
    stem, _, kind = key.rpartition(".")
    layer, part = "", stem
    if stem.startswith("model.layers."):
        _, _, number, part = stem.split(".", 3)
        layer = f"blocks.{number}."
    head_dim = config.mixers[0].options["head_dim"]
    if part in _ROTATED:
        weight = neighbouring_pairs(weight, head_dim)
    keys = config.mixer_options(0)["n_kv_heads"] * head_dim
    queries = config.n_heads * head_dim
    first = {"self_attn.k_proj": queries, "self_attn.v_proj": queries + keys, "mlp.up_proj": config.mlp_width}
    start = first.get(part, 0)
    own[f"{layer}{_NAMES[part]}.{kind}"][start : start + len(weight)].copy_(weight)
