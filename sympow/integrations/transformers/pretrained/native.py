"""Makes the native model of a pretrained one: the llama body with softmax attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sympow.integrations.transformers.pretrained.config_fields import rope_scaling
from sympow.integrations.transformers.pretrained.weight_layout import head_dim_of, neighbouring_pairs, unfused
from sympow.integrations.transformers.weight_files import FLOATS, check_finite
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.models.lm import Undrawn


def rotation_options(config: Any, scaling: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the mixers' options of the rotation.

    Args:
        config: the config of the model in transformers.
        scaling: fields that take the place of those in its `rope_parameters`.
        name: of the model, for messages.

    Raises ValueError for a rotation that the mixers do not have.
    """
    rope = {**config.rope_parameters, **_outside(config), **scaling}
    options: dict[str, Any] = {"rope_base": float(rope["rope_theta"])}
    turning = head_dim_of(config)
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


def native_model(config: Any, rotation: Mapping[str, Any], weights: Mapping[str, Tensor], name: str) -> LanguageModel:
    """Makes a native model in evaluation mode.

    Args:
        config: the config of the model in transformers.
        rotation: the result of `rotation_options`.
        weights: by their names in transformers.
        name: of the model, for messages.

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
    weights, head_dim = unfused(config, weights), head_dim_of(config)
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
    native = Undrawn(
        ModelConfig(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            mixers=_mixers(config, options),
            body="llama",
            n_kv_heads=config.num_key_value_heads,
            mlp_hidden=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            tie_embeddings=config.tie_word_embeddings,
        )
    )
    native.load_state_dict(_renamed(weights, native.config, head_dim, turning))
    return native.eval()


def _mixers(config: Any, options: dict[str, Any]) -> tuple[MixerConfig, ...]:
    """Returns the mixers of a model, as a pattern that is repeated over its layers.

    `options` are those of a layer of softmax attention with a rotation.
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
