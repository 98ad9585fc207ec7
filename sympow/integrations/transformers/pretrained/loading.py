"""Checkpoints of Llama, SmolLM, Qwen2, Qwen3 and others as native models, from a folder, a GGUF file or the memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from sympow.data import BPETokenizer
from sympow.data.tokenizer_files import BESIDE, beside_text, json_object
from sympow.integrations.transformers.errors import reading, without_bars
from sympow.integrations.transformers.pretrained.config_fields import ARCHITECTURES, IN_GGUF, check_fields
from sympow.integrations.transformers.pretrained.gguf_file import (
    ROPE_FACTORS,
    GGUFHeader,
    check_types,
    model_config,
    read_header,
    read_weight,
    rope_parameters,
)
from sympow.integrations.transformers.pretrained.gguf_tokenizer import gguf_beside, gguf_tokenizer
from sympow.integrations.transformers.pretrained.native import native_model, rotation_options
from sympow.integrations.transformers.pretrained.power_models import (
    POWER_MODELS,
    load_power_model,
    longest_context,
    power_config,
)
from sympow.integrations.transformers.pretrained.weight_layout import (
    check_shapes,
    described,
    halves_of_heads,
    in_names_of_models,
    name_in_gguf,
)
from sympow.integrations.transformers.weight_files import (
    check_dtypes,
    check_loaded,
    check_no_adapter,
    optional_file,
    stored_weights,
)
from sympow.models import LanguageModel, ModelConfig

Check = Callable[[str | None, ModelConfig | None], None]
"""Refuses a model before its weights are read, by its tokenizer.json, and by its config if it has power attention."""


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


def load_pretrained(source: str | os.PathLike[str] | PreTrainedModel, check: Check | None = None) -> Pretrained:
    """Reads a pretrained model into the llama body with softmax attention. The logits are the same.

    Brumby and PowerCoder, which have power attention already, keep it; see `load_power_model`.

    Those models rotate pairs of channels from the two halves of a head; this package rotates pairs of neighbouring
    channels. Therefore the rows of query and key projections, their biases and their norms are permuted.

    Args:
        source: a folder of Hugging Face transformers, the path of a GGUF file, which is dequantized and needs the
            package gguf, an id on the Hugging Face Hub, or a model of transformers in memory, which comes without a
            tokenizer.
        check: called before weights of a folder or an id are read; what it raises is raised.

    Raises FileNotFoundError for a file that is missing, ValueError for a file that is cut, for another architecture,
    for layers that are quantized, for a tokenizer that is no byte-level BPE, for one with more tokens than the model,
    and for weights that do not fit the config. Config, tokenizer, and the sizes of weights are checked before a weight
    is read. Python files beside the weights are never run.
    """
    if isinstance(source, PreTrainedModel):
        return _from_memory(source)
    return _from_gguf(source) if Path(source).suffix == ".gguf" else _from_folder(source, check)


def _from_memory(model: PreTrainedModel) -> Pretrained:
    name, config, weights = type(model).__name__, model.config, model.state_dict()
    check_fields(config.to_dict(), name)
    _check_stored({key: tuple(each.shape) for key, each in weights.items()}, config, name)
    native = native_model(config, rotation_options(config, {}, name), weights, name)
    return Pretrained(native, None, {}, config.max_position_embeddings)


def _from_gguf(source: str | os.PathLike[str]) -> Pretrained:
    name = str(source)
    if not Path(source).is_file():
        raise FileNotFoundError(f"no GGUF file at {Path(source)}")
    header = read_header(source)
    kind: Any = header.fields.get("general.architecture")
    check_fields({"model_type": kind}, name, IN_GGUF)
    stored = model_config(header)
    check_fields(stored, name)
    _check_layers(stored, header.shapes, name)
    with reading(source):
        config = AutoConfig.for_model(**stored)
    check_fields(config.to_dict(), name)
    rotation = rotation_options(config, rope_parameters(header), name)
    tokenizer, beside = gguf_tokenizer(header.fields, name), gguf_beside(header.fields, name)
    _check_tokenizer(tokenizer, config.vocab_size, name)
    shapes = {key: shape for key, shape in header.shapes.items() if key != ROPE_FACTORS}
    check_shapes(((name_in_gguf(key, kind), shape) for key, shape in described(config)), shapes, name)
    with reading(source):
        weights = _gguf_weights(header, config)
    return Pretrained(native_model(config, rotation, weights, name), tokenizer, beside, config.max_position_embeddings)


def _from_folder(source: str | os.PathLike[str], check: Check | None) -> Pretrained:
    """Reads the model of a folder, or of an id on the Hub."""
    where, name = _place(source), str(source)
    stored = _stored_config(source, where)
    with reading(source):
        check_no_adapter(source)
    if stored.get("model_type") in POWER_MODELS:
        power = power_config(stored, True, name)
        tokenizer, beside = _tokenizer(source, where, power.vocab_size), _beside(source)
        if check is not None:
            check(tokenizer, power)
        return Pretrained(load_power_model(source, stored), tokenizer, beside, longest_context(stored))
    check_fields(stored, name, (*ARCHITECTURES, *POWER_MODELS))
    with reading(source):
        found = stored_weights(source)
    if found is not None:
        _check_layers(stored, found, name)
    with reading(source):
        config = AutoConfig.from_pretrained(**where)
    if vars(config).get("head_dim", 0) is None:  # which transformers takes as absent in some architectures only
        del config.head_dim
    check_fields(config.to_dict(), name)
    rotation = rotation_options(config, {}, name)
    tokenizer, beside = _tokenizer(source, where, config.vocab_size), _beside(source)
    if check is not None:
        check(tokenizer, None)
    if found is not None:
        _check_stored({key: each.shape for key, each in found.items()}, config, name)
        check_dtypes(found, name)
    native = native_model(config, rotation, _weights(source, where, config), name)
    return Pretrained(native, tokenizer, beside, config.max_position_embeddings)


def _weights(source: str | os.PathLike[str], where: Mapping[str, Any], config: Any) -> dict[str, Tensor]:
    """Reads the weights of a folder, or of an id on the Hub, by their names in transformers."""
    with reading(source), without_bars():
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


def _check_tokenizer(tokenizer: str, vocab_size: int, name: str) -> None:
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
    """Returns the arguments by which `from_pretrained` finds a folder or an id."""
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is no model of transformers: it has no config.json")
        # Without `trust_remote_code`, transformers asks on the terminal whether to run the folder's Python files.
        return {"pretrained_model_name_or_path": str(path), "local_files_only": True, "trust_remote_code": False}
    if path.is_file():
        raise ValueError(
            f"{path} is no model: expected a folder, a GGUF file (*.gguf), or an id on the Hugging Face Hub"
        )
    if path.is_absolute() or len(path.parts) > 2 or str(source).startswith("."):
        raise FileNotFoundError(f"no model at {path}")
    return {"pretrained_model_name_or_path": str(source), "trust_remote_code": False}


def _tokenizer(source: str | os.PathLike[str], where: Mapping[str, Any], vocab_size: int) -> str | None:
    """Returns the text of the tokenizer.json; None for a folder without one. Raises as `_check_tokenizer`."""
    with reading(source):
        file = optional_file(source, "tokenizer.json")
    if file is not None:
        with reading(Path(source) / "tokenizer.json"):
            text = file.read_text(encoding="utf-8")
    elif Path(source).is_dir():
        return None
    else:
        with reading(source):
            made = AutoTokenizer.from_pretrained(**where)
        if not made.is_fast:
            return None
        text = made.backend_tokenizer.to_str()
    _check_tokenizer(text, vocab_size, str(source))
    return text


def _beside(source: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the texts of the files beside the tokenizer, by their names."""
    files = {name: optional_file(source, name) for name in BESIDE}
    return {name: beside_text(file) for name, file in files.items() if file is not None}


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
