"""Make the mixers and the inputs of the contract tests: every mixer under every option set, in float64."""

import pytest
import torch

from sympow.layers import MIXERS, Mixer
from tests.draws import disturb, normal

D_MODEL, HEADS = 24, 4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TIGHT = {"rtol": 1e-9, "atol": 1e-9}

OPTIONS: dict[str, list[dict]] = {
    "power": [
        {},
        {"rotation": "data", "rotary_fraction": 1.0},
        {"gate": False, "rotation": "none"},
        {"rotation": "fixed", "n_kv_heads": 2},
        {"n_kv_heads": 1, "qk_norm": True, "bias": False},
        {"p": 4, "head_dim": 4, "value_dim": 10, "chunk_size": 5},
        {"p": 3, "head_dim": 4},
        {"p": 1, "frequencies": "conformal", "max_length": 64},
        {"normalize": False, "impl": "reference", "rotation": "data", "position_rate": 1.0},
        {"short_convolution": 0, "head_norm": False, "output_gate": False},
        {"short_convolution": 1, "output_gate": False, "rotary_fraction": 0.5, "rotation": "data"},
        {"output_gate_bias": True, "head_norm": False, "rotary_fraction": 1.0, "rope_scaling": YARN},
    ],
    "power_delta": [
        {},
        {"gate": False, "rotation": "none", "beta": 1.0},
        {"n_kv_heads": 2, "beta_max": 1.9, "beta_bias": 1.0, "offset": 0.09, "chunk_size": 5},
        {"p": 1, "qk_norm": True, "bias": False, "value_dim": 10},
        {"p": 3, "head_dim": 4, "impl": "reference", "offset": 0.5, "rotation": "none"},
        {"p": 4, "head_dim": 4, "short_convolution": 0, "head_norm": False, "output_gate": False},
        {"rotary_fraction": 0.5, "rope_scaling": YARN},
    ],
    "softmax": [
        {},
        {"n_kv_heads": 2, "value_dim": 10},
        {"rotation": "none", "qk_norm": True, "bias": False},
        {"short_convolution": 4, "head_norm": True, "output_gate": True},
        {"output_gate": True, "rotary_fraction": 0.7},
        {"rope_base": 5e5, "out_bias": False, "rotary_fraction": 0.5, "rope_scaling": YARN},
        {"qk_norm": True, "qk_norm_eps": 1e-3},
        {"gate": True, "short_convolution": 4, "head_norm": True, "output_gate": True},
        {"gate": True, "gate_bias": (0, 2), "n_kv_heads": 2, "value_dim": 30},
        {"gate": True, "n_kv_heads": 1, "rotation": "none", "qk_norm": True, "bias": False},
    ],
    "linear": [
        {},
        {"feature_map": "elu+1"},
        {"feature_map": "elu+1", "rotation": "none", "n_kv_heads": 2, "value_dim": 10},
        {"n_kv_heads": 1, "qk_norm": True, "chunk_size": 5},
        {"short_convolution": 2, "output_gate": True},
        {"feature_map": "elu+1", "short_convolution": 4, "head_norm": True, "rope_scaling": YARN},
        {"feature_map": "taylor", "head_dim": 4},
        {"feature_map": "taylor", "head_dim": 4, "n_kv_heads": 2, "value_dim": 10, "rotation": "none"},
    ],
    "window": [
        {"window": 1},
        {"window": 7},
        {"window": 40, "n_kv_heads": 2},
        {"window": 7, "rotation": "none"},
        {"window": 7, "short_convolution": 3, "head_norm": True, "output_gate": True},
        {"window": 7, "gate": True},
        {"window": 40, "gate": True, "gate_bias": (-1, 2), "n_kv_heads": 2, "rotation": "none"},
    ],
    "hybrid_heads": [
        {"window": 7},
        {"window": 5, "window_heads": 1, "mixer": "power", "options": {"p": 2, "head_dim": 4}},
        {
            "window": 40,
            "window_heads": 3,
            "mixer": "softmax",
            "options": {"gate": True},
            "window_options": {"n_kv_heads": 1, "head_dim": 8, "head_norm": False, "output_gate": False},
        },
        {"window": 5, "window_options": {"gate": True}},
    ],
    "short_convolution": [
        {},
        {"width": 1},
        {"width": 3, "mixer": "softmax", "options": {"rotation": "none"}},
        {"width": 4, "mixer": "power", "options": {"p": 2}},
    ],
    "long_convolution": [{"max_length": 400}, {"max_length": 9}],
    "base_conv": [
        {"max_length": 400, "order": 8},
        {"max_length": 9},
        {"max_length": 3, "filter": "explicit"},
        {"max_length": 9, "filter": "relu", "bands": 1, "residual": True},
        {"max_length": 9, "frequency": 3.0, "decays": (0.3, 1.2)},
    ],
    "h3": [{"state_dim": 8}, {"state_dim": 4, "head_dim": 3}],
    "liquid_s4": [{"state_dim": 8}],
    "rwkv4": [{}, {"depth": 1.0, "shift_depth": 0.5}],
    "rwkv7": [{}, {"depth": 0.5, "impl": "plain"}],
    "mamba": [{}, {"state_dim": 3}],
    "retnet": [
        {},
        {"chunk_size": 8, "value_dim": 4, "n_kv_heads": 2},
        {"chunk_size": 1, "rotation": "none", "qk_norm": True, "bias": True, "short_convolution": 4},
    ],
    "programmatic_conv": [{}, {"filler": 0}, {"matching": True}],
    "autocorrelation_conv": [{}, {"top_k": 2}, {"matching": True}, {"matching": True, "filler": 0}],
    "selection": [
        {"selection": "random", "probability": 0.5},
        {"selection": "programmatic", "short_convolution": 2},
        {"selection": "learned", "top_k": 3, "n_kv_heads": 2, "value_dim": 10, "noise": 1.0},
        {"selection": "learned", "top_k": 300, "rotation": "none"},
    ],
    "blocked_window": [
        {"window": 7},
        {"window": 1},
        {"window": 400, "n_kv_heads": 2},
        {"window": 20, "rotation": "none"},
    ],
    "hyena": [
        {"max_length": 400, "order": 8},
        {"max_length": 9, "bands": 2, "frequency": 3.0, "decays": (0.5, 2.0)},
        {"max_length": 400, "multi_head": True},
        {"max_length": 9, "multi_head": True},
        {"max_length": 400, "recurrences": 2},
        {"max_length": 9, "recurrences": 3},
    ],
}
CASES = [pytest.param((name, o), id=f"{name}-{i}") for name, sets in OPTIONS.items() for i, o in enumerate(sets)]
# The only mixers that look ahead, and so have no step form.
NOT_CAUSAL = ["programmatic_conv", "autocorrelation_conv"]
STEPPED = [case for case in CASES if case.values[0][0] not in NOT_CAUSAL]
T = 37


def make(case: tuple[str, dict], seed: int = 0) -> Mixer:
    """A mixer in float64 whose every parameter matters: nothing stays at its special initial value."""
    name, options = case
    return disturb(MIXERS[name](D_MODEL, HEADS, **options).double().eval(), 0.2, seed)


def sequence(batch: int = 2, time: int = T, seed: int = 1) -> torch.Tensor:
    return normal(batch, time, D_MODEL, seed=seed)


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """Tokens that x [B, T, d] may stand for: a few kinds, that repeat, each a function of its row."""
    return (1.5 * x[..., 0].double()).round().long()


def run(mixer: Mixer, x: torch.Tensor, **cu_seqlens: torch.Tensor) -> torch.Tensor:
    return mixer(x, **mixer.extras(tokens_of(x)), **cu_seqlens)


def in_steps(mixer: Mixer, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    state = mixer.init_state(x.shape[0])
    outs = []
    for piece in x.split(lengths, dim=1):
        y, state = mixer.step(piece, state, **mixer.extras(tokens_of(piece)))
        outs.append(y)
    return torch.cat(outs, dim=1)


def sees_itself_only(case: tuple[str, dict]) -> bool:
    return case[1].get("window") == 1 or case[1].get("width") == 1
