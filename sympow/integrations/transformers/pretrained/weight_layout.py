"""The weights of models in files: names and shapes, and the orders of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sympow.integrations.transformers.pretrained.config_fields import MULTIPLIERS

_NAMES_IN_GGUF = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip


def described(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and the shapes of the weights of a model, as transformers names them.

    Args:
        config: the config of the model in transformers.
    """
    width, hidden, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head_dim = head_dim_of(config)
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


def head_dim_of(config: Any) -> int:
    """Returns the channels of a head; `config` is the config of the model in transformers."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def unfused(config: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a model as those of Llama, with the same function.

    Fused projections, as in Phi-3, are split. The multipliers of Granite become parts of the weights: those of the
    embedding, of scores, of the outputs of layers and of logits.

    Args:
        config: the config of the model in transformers.
        weights: by their names in transformers.
    """
    found = dict(weights)
    head_dim = head_dim_of(config)
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
    embedding, scores, outputs, logits = (float(getattr(config, field)) for field in MULTIPLIERS)
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
