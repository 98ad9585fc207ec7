"""Checkpoints of Llama, SmolLM, Qwen2, Qwen3 and others as native models in the llama body with softmax attention."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from sympow.data import BPETokenizer
from sympow.data.tokenizer_files import BESIDE, beside_text, json_object
from sympow.integrations.transformers.errors import reading
from sympow.integrations.transformers.gguf_file import (
    ROPE_FACTORS,
    GGUFHeader,
    check_types,
    model_config,
    read_header,
    read_weight,
    rope_parameters,
)
from sympow.integrations.transformers.gguf_tokenizer import gguf_beside, gguf_tokenizer, tokenizer_fields
from sympow.integrations.transformers.power_models import POWER_MODELS, load_power_model, longest_context, power_config
from sympow.integrations.transformers.sources import (
    ARCHITECTURES,
    IN_GGUF,
    check_fields,
    check_shapes,
    described,
    halves_of_heads,
    in_names_of_models,
    layers_of,
    name_in_gguf,
    neighbouring_pairs,
    rope_scaling,
    unfused,
)
from sympow.integrations.transformers.weight_files import (
    FLOATS,
    check_dtypes,
    check_finite,
    check_loaded,
    check_no_adapter,
    stored_weights,
)
from sympow.models import LanguageModel, ModelConfig

# Of a file that a model may lack.
_OPTIONAL = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}


class Pretrained(NamedTuple):
    """Holds a pretrained model in native form.

    model: the model in evaluation mode; float32, but Brumby and PowerCoder in the dtype of the files.
    tokenizer: the text of its tokenizer.json, or None.
    beside: the files beside the tokenizer.json, see `sympow.data.tokenizer_files.read_beside`.
    context: the longest context that the model was made for, in tokens.
    """

    model: LanguageModel
    tokenizer: str | None
    beside: dict[str, str]
    context: int


def load_pretrained(source: str | os.PathLike[str] | PreTrainedModel) -> Pretrained:
    """Reads a pretrained model into the llama body with softmax attention. The logits are the same.

    Brumby and PowerCoder, which have power attention already, keep it; see `load_power_model`.

    Those models rotate pairs of channels from the two halves of a head; this package rotates pairs of neighbouring
    channels. Therefore the rows of query and key projections, their biases and their norms are permuted.

    Args:
        source: a folder of Hugging Face transformers, the path of a GGUF file, which is dequantized and needs the
            package gguf, an id on the Hugging Face Hub, or a model of transformers in memory, which comes without a
            tokenizer.

    Raises FileNotFoundError for a file that is missing, ValueError for a file that is cut, for another architecture,
    for layers that are quantized, for a tokenizer that is no byte-level BPE, for one with more tokens than the model,
    and for weights that do not fit the config. Config, tokenizer, and the sizes of weights are checked before a weight
    is read. Python files beside the weights are never run.
    """
    if isinstance(source, PreTrainedModel):
        config = source.config
        check_fields(config.to_dict(), type(source).__name__)
        weights, tokenizer, beside, name = source.state_dict(), None, {}, type(source).__name__
        _check_stored({key: tuple(each.shape) for key, each in weights.items()}, config, name)
        rotation = _rotation(config, {}, name)
    else:
        where, name = _place(source), str(source)
        header = read_header(Path(source)) if "gguf_file" in where else None
        if header is not None:
            check_fields({"model_type": header.fields.get("general.architecture")}, name, IN_GGUF)
        stored = model_config(header) if header is not None else _stored_config(source, where)
        if header is None:
            with reading(source):
                check_no_adapter(source)
        if header is None and stored.get("model_type") in POWER_MODELS:
            return _power(source, where, stored)
        check_fields(stored, name, ARCHITECTURES if header is not None else (*ARCHITECTURES, *POWER_MODELS))
        with reading(source):
            found = None if header is not None else stored_weights(source)
        names = header.shapes if header is not None else found
        if names is not None:
            _check_layers(stored, names, name)
        with reading(source):
            config = AutoConfig.for_model(**stored) if header is not None else AutoConfig.from_pretrained(**where)
        check_fields(config.to_dict(), name)
        rotation = _rotation(config, {} if header is None else rope_parameters(header), name)
        fields = None if header is None else tokenizer_fields(header.fields)
        tokenizer, beside = _tokenizer(source, where, fields), _beside(source, fields)
        if tokenizer is not None:
            check_tokenizer(tokenizer, config.vocab_size, name)
        if header is not None:
            shapes = {key: shape for key, shape in header.shapes.items() if key != ROPE_FACTORS}
            kind = header.fields["general.architecture"]
            check_shapes(((name_in_gguf(key, kind), shape) for key, shape in described(config)), shapes, name)
            with reading(source):
                weights = _gguf_weights(header, config)
        else:
            if found is not None:
                _check_stored({key: each.shape for key, each in found.items()}, config, name)
                check_dtypes(found, name)
            weights = _weights(source, where, config)
    native = _native(config, rotation, weights, name)
    return Pretrained(native, tokenizer, beside, config.max_position_embeddings)


def _weights(source: str | os.PathLike[str], where: Mapping[str, Any], config: Any) -> dict[str, Tensor]:
    """Reads the weights of a folder, or of an id on the Hub, by their names in transformers."""
    with reading(source):
        model, report = AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=torch.float32, output_loading_info=True
        )
    check_loaded(report, str(source))
    found: dict[str, Tensor] = model.state_dict()
    return found


def _gguf_weights(header: GGUFHeader, config: Any) -> dict[str, Tensor]:
    """Reads the weights of a GGUF file, dequantized, by their names in transformers."""
    check_types(header)  # before memory is taken
    kind, weights = header.fields["general.architecture"], {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, _ in described(config):
        weight = read_weight(header, name_in_gguf(key, kind))
        part = key.split(".")[-2]
        turned = part in heads and kind in ("llama", "smollm3", "granite")
        weights[key] = halves_of_heads(weight, heads[part]) if turned else weight
    return weights


def _power(source: str | os.PathLike[str], where: Mapping[str, Any], stored: Mapping[str, Any]) -> Pretrained:
    config = power_config(stored, True, str(source))
    tokenizer, beside = _tokenizer(source, where, None), _beside(source, None)
    if tokenizer is not None:
        check_tokenizer(tokenizer, config.vocab_size, str(source))
    return Pretrained(load_power_model(source, stored), tokenizer, beside, longest_context(stored))


def check_tokenizer(tokenizer: str, vocab_size: int, name: str) -> None:
    """Raises ValueError for a tokenizer that is no byte-level BPE, or has tokens that the model does not know.

    Args:
        tokenizer: the text of a tokenizer.json.
        vocab_size: of the model.
        name: of the model, for the message.
    """
    try:
        size = BPETokenizer(tokenizer).vocab_size
    except ValueError as error:
        raise ValueError(f"the tokenizer.json of {name} cannot be used: {error}") from None
    if size > vocab_size:
        raise ValueError(
            f"{name} has {vocab_size} embeddings, but its tokenizer has the token {size - 1}: "
            "the tokenizer is not that of the model"
        )


def _place(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the arguments by which `from_pretrained` finds a folder, a GGUF file or an id."""
    path = Path(source)
    # Without `trust_remote_code`, transformers asks on the terminal whether to run the folder's Python files.
    local = {"local_files_only": True, "trust_remote_code": False}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"no GGUF file at {path}")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name} | local
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is no model of transformers: it has no config.json")
        return {"pretrained_model_name_or_path": str(path)} | local
    if path.is_file():
        raise ValueError(
            f"{path} is no model: expected a folder, a GGUF file (*.gguf), or an id on the Hugging Face Hub"
        )
    if path.is_absolute() or len(path.parts) > 2 or str(source).startswith("."):
        raise FileNotFoundError(f"no model at {path}")
    return {"pretrained_model_name_or_path": str(source), "trust_remote_code": False}


def _tokenizer(
    source: str | os.PathLike[str], where: Mapping[str, Any], fields: Mapping[str, Any] | None
) -> str | None:
    """Returns the text of the tokenizer.json; None for a folder without one. `fields` are those of a GGUF file."""
    if fields is not None:
        return gguf_tokenizer(fields, str(source))
    with reading(source):
        file = cached_file(str(source), "tokenizer.json", **_OPTIONAL)
    if file is not None or Path(source).is_dir():
        with reading(Path(source) / "tokenizer.json"):
            return None if file is None else Path(file).read_text(encoding="utf-8")
    with reading(source):
        made = AutoTokenizer.from_pretrained(**where)
    return made.backend_tokenizer.to_str() if made.is_fast else None


def _beside(source: str | os.PathLike[str], fields: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the texts of the files beside the tokenizer, by their names. `fields` are those of a GGUF file."""
    if fields is not None:
        return gguf_beside(fields, str(source))
    files = {name: cached_file(str(source), name, **_OPTIONAL) for name in BESIDE}
    return {name: beside_text(Path(file)) for name, file in files.items() if file is not None}


def _stored_config(source: str | os.PathLike[str], where: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json in a folder, or of an id on the Hub.

    Raises ValueError for a file that is no JSON object, FileNotFoundError where there is none.
    """
    options = {key: value for key, value in where.items() if key == "local_files_only"}
    with reading(source):
        file = cached_file(str(source), "config.json", **options)
    if file is None:
        raise FileNotFoundError(f"{source} has no config.json")
    return json_object(Path(file))


def _check_stored(shapes: Mapping[str, tuple[int, ...]], config: Any, name: str) -> None:
    """Raises ValueError for weights, by their names in files or models, that are not those of the config."""
    check_shapes(described(config), in_names_of_models(shapes, config.tie_word_embeddings), name)


def _check_layers(stored: Mapping[str, Any], found: Mapping[str, Any], name: str) -> None:
    """Raises ValueError for more layers than a file has weights: transformers makes a list of them."""
    if stored.get("num_hidden_layers", 1) > len(found):
        raise ValueError(
            f"{name} lacks weights of its config: it has {stored['num_hidden_layers']:,} layers and "
            f"{len(found):,} weights"
        )


def _rotation(config: Any, scaling: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the mixers' options of the rotation, of `config` with `scaling` in place of its own."""
    rope = {**config.rope_parameters, **_outside(config), **scaling}
    options: dict[str, Any] = {"rope_base": float(rope["rope_theta"])}
    turning = _head_dim(config)
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1:
        options["rotary_fraction"], turning = share, int(share * turning)
        if turning < 2 or turning % 2:
            raise ValueError(f"{name} rotates {turning} channels of a head; expected an even number of at least 2")
    found = rope_scaling(rope, config.max_position_embeddings, turning, name)
    return options if found is None else options | {"rope_scaling": found}


def _outside(config: Any) -> dict[str, Any]:
    """Returns the number of the rotation that a config may have beside `rope_parameters`, and that then takes priority.

    transformers does not apply it when it reads the file, but when it makes the model.
    """
    length = getattr(config, "original_max_position_embeddings", None)
    if length is None or config.rope_parameters.get("rope_type") not in ("llama3", "yarn"):
        return {}
    return {"original_max_position_embeddings": length}


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _native(config: Any, rotation: Mapping[str, Any], weights: Mapping[str, Tensor], name: str) -> LanguageModel:
    """Makes the native model of a config, with weights by their names in transformers.

    `rotation` holds the mixers' options of the rotation.

    Raises ValueError for weights that are quantized, not finite, or on the meta device, and for a head that is not the
    embedding to which it is tied.
    """
    for key, weight in weights.items():
        if weight.dtype not in FLOATS.values() or weight.is_meta:
            kind = "on the meta device" if weight.is_meta else f"quantized ({str(weight.dtype).removeprefix('torch.')})"
            raise ValueError(f"{name} cannot be read: its weight {key} is {kind}")
        check_finite(weight, key, name)
    head = weights.get("lm_head.weight")
    if config.tie_word_embeddings and head is not None and not torch.equal(head, weights["model.embed_tokens.weight"]):
        raise ValueError(f"{name} has tie_word_embeddings = True, and a lm_head.weight that is not its embedding")
    weights, head_dim = unfused(config, weights), _head_dim(config)
    turning = int(rotation.get("rotary_fraction", 1.0) * head_dim)
    first = "model.layers.0.self_attn."
    options: dict[str, Any] = {
        "head_dim": head_dim,
        "bias": f"{first}q_proj.bias" in weights,
        "out_bias": f"{first}o_proj.bias" in weights,
        "qk_norm": f"{first}q_norm.weight" in weights,
        "qk_norm_eps": config.rms_norm_eps,
        **rotation,
    }
    native = LanguageModel(
        ModelConfig(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            mixers=layers_of(config, options),
            body="llama",
            n_kv_heads=config.num_key_value_heads,
            mlp_hidden=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            tie_embeddings=config.tie_word_embeddings,
        ),
        seed=0,
    )
    native.load_state_dict(_renamed(weights, native.config, head_dim, turning))
    return native.eval()


def _renamed(weights: Mapping[str, Tensor], config: ModelConfig, head_dim: int, turning: int) -> dict[str, Tensor]:
    """Returns weights by their names here, as `LanguageModel.load_state_dict` takes them.

    `turning` is the number of channels of a head that are rotated.
    """
    ours = {"embedding.weight": weights["model.embed_tokens.weight"], "final_norm.weight": weights["model.norm.weight"]}
    if not config.tie_embeddings:
        ours["head.weight"] = weights["lm_head.weight"]
    names = {
        "self_attn.o_proj.weight": "mixer.out.weight",
        "self_attn.o_proj.bias": "mixer.out.bias",
        "input_layernorm.weight": "mixer_norm.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "mlp.down_proj.weight": "mlp_out.weight",
    }
    for layer in range(config.n_layers):
        there, here = f"model.layers.{layer}.", f"blocks.{layer}."
        ours |= {here + new: weights[there + old] for old, new in names.items() if there + old in weights}
        for kind in ("weight", "bias"):
            projections = [weights.get(f"{there}self_attn.{each}_proj.{kind}") for each in "qkv"]
            q, k, v = projections
            if q is not None and k is not None and v is not None:
                qkv = [*(neighbouring_pairs(each, head_dim, turning) for each in (q, k)), v]
                ours[f"{here}mixer.qkv.{kind}"] = torch.cat(qkv)
        for each in "qk":
            norm = weights.get(f"{there}self_attn.{each}_norm.weight")
            if norm is not None:
                ours[f"{here}mixer.{each}_norm.weight"] = neighbouring_pairs(norm, head_dim, turning)
        gate_up = [weights[f"{there}mlp.{each}_proj.weight"] for each in ("gate", "up")]
        ours[f"{here}mlp_in.weight"] = torch.cat(gate_up)
    return ours
