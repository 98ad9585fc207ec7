"""Small models with weights large enough that every part of a block counts."""

import torch

from sympow.models import HYBRID, LanguageModel, MixerConfig, ModelConfig

VOCAB = 61
# All mixers with a step form, in small.
MIXERS = {
    "power": {},
    "power_delta": {},
    "hybrid_heads": {"window": 5},
    "softmax": {},
    "linear": {},
    "window": {"window": 5},
    "short_convolution": {"width": 3, "mixer": "window", "options": {"window": 5}},
    "long_convolution": {"max_length": 16},
    "base_conv": {"max_length": 16},
    "hyena": {"max_length": 16},
    "h3": {"state_dim": 8},
    "liquid_s4": {"state_dim": 8},
    "rwkv4": {},
    "rwkv7": {},
    "retnet": {},
    "blocked_window": {"window": 5},
    "selection": {"selection": "random", "probability": 0.5},
}
POWER = MixerConfig("power")
CASES = {
    **{name: {"mixers": (MixerConfig(name, options),)} for name, options in MIXERS.items()},
    "data-dependent rotation": {"mixers": (MixerConfig("power", {"rotation": "data"}),)},
    "gated softmax": {"mixers": (MixerConfig("softmax", {"gate": True}),)},
    "grouped softmax": {"body": "llama", "n_kv_heads": 2, "mixers": (MixerConfig("softmax"),)},
    "recommended hybrid": {"mixers": (MixerConfig("hybrid_heads", {"window": 5}), HYBRID[3])},
    "elu": {"mixers": (MixerConfig("linear", {"feature_map": "elu+1"}),)},
    "llama": {"body": "llama", "n_kv_heads": 2},
    "rwkv7 body": {"body": "rwkv7"},
    "rwkv7 body of rwkv7": {"body": "rwkv7", "mixers": (MixerConfig("rwkv7"),)},
    "hybrid": {"mixers": (POWER, MixerConfig("window", {"window": 5}), MixerConfig("softmax")), "n_layers": 3},
    "rwkv7 body of windows": {"body": "rwkv7", "mixers": (MixerConfig("window", {"window": 5}),)},
    "untied": {"tie_embeddings": False},
    "learned selection": {"mixers": (MixerConfig("selection", {"selection": "learned", "top_k": 3}),)},
    "programmatic selection": {"mixers": (MixerConfig("selection", {"selection": "programmatic", "top_k": 3}),)},
}


def small_config(case: str = "power") -> ModelConfig:
    return ModelConfig(**({"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4} | CASES[case]))


def small_model(case: str = "power") -> LanguageModel:
    return loud_model(small_config(case))


def loud_model(config: ModelConfig) -> LanguageModel:
    model = LanguageModel(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator))
    return model.eval()
