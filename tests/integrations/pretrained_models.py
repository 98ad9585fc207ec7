"""Small random models of transformers, of every kind that can be read, and how their refusal is checked."""

import pytest
import torch
import transformers

from sympow.data import BPETokenizer
from sympow.integrations.transformers.pretrained import load_pretrained
from tests.draws import disturb

SHAPE = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "Llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "rms_norm_eps": 1e-5}),
    "SmolLM": ("Llama", {"tie_word_embeddings": True}),
    "Llama with biases": ("Llama", {"attention_bias": True}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {"head_dim": 10, "rms_norm_eps": 1e-3}),
    "Mistral": ("Mistral", {"sliding_window": 9, "head_dim": 10}),
    "Mistral without a window": ("Mistral", {"sliding_window": None}),
    "SmolLM3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": None}),
    "SmolLM3, its own layers": ("SmolLM3", {"no_rope_layers": [0, 1, 1], "pad_token_id": None}),
    "Seed-OSS": ("SeedOss", {"head_dim": 12, "pad_token_id": None}),
    "Seed-OSS with all biases": ("SeedOss", {"attention_out_bias": True, "attention_bias": False}),
    "Granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.05,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.7,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "Granite, untied": ("Granite", {"embedding_multiplier": 3, "logits_scaling": 0.25}),
    "Phi-3": ("Phi3", {"sliding_window": 11, "pad_token_id": None}),
    "Phi-4": (
        "Phi3",
        {
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROTATIONS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3, other factors": LLAMA3 | {"low_freq_factor": 2.5, "high_freq_factor": 17.0, "factor": 32},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn with its magnitude": YARN | {"attention_factor": 1.7},
    "yarn with mscale": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn with one mscale": YARN | {"mscale": 2.0},
    "yarn of the lengths": YARN | {"factor": None},
}
TOKENIZER = BPETokenizer.train(["to be or not to be"], 260)


def pretrained(kind: str, **changes) -> transformers.PreTrainedModel:
    """A random model whose norms and biases are not at their start either."""
    name, options = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE | options | changes)
    torch.manual_seed(1)
    return disturb(getattr(transformers, f"{name}ForCausalLM")(config).eval(), 0.1, seed=1)


def loud(kind, **changes):
    """A model whose attention depends on positions."""
    model = pretrained(kind, **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(6)
    return model


def assert_refused(source, message):
    """Checks that a model cannot be read, and that the error is one line."""
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(source)
    assert "\n" not in str(error.value)
