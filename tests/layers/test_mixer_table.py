"""The options of mixers, and the table of docs/guides/mixers.md against them: no row missing, none that is outdated."""

from pathlib import Path

import pytest
import torch

from sympow.layers import FLA_MIXERS, MIXERS, AttentionMixer, PowerAttention
from sympow.ops.feature_map import spow_dim

LINES = (Path(__file__).resolve().parents[2] / "docs/guides/mixers.md").read_text().splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("| ")]
ROWS = {cells[0]: cells[1:] for cells in CELLS[1:]}  # after the heading
HEADS = {
    "n_kv_heads", "head_dim", "value_dim", "rotation", "frequencies", "max_length", "rope_base", "rope_scaling",
    "rotary_fraction",
    "qk_norm", "qk_norm_eps", "bias", "out_bias", "short_convolution", "head_norm", "output_gate", "output_gate_bias",
}  # fmt: skip
REQUIRED = {
    "window": {"window": 24},
    "hybrid_heads": {"window": 24},
    "blocked_window": {"window": 48},
    "long_convolution": {"max_length": 40},
    "base_conv": {"max_length": 40},
    "hyena": {"max_length": 40},
    "selection": {"selection": "learned"},
}
D_MODEL, N_HEADS = 24, 4


def test_every_mixer_has_a_row():
    assert set(ROWS) == {*MIXERS, *FLA_MIXERS}


@pytest.mark.parametrize("name", ROWS)
def test_options_and_causality(name):
    mixer = (MIXERS | FLA_MIXERS)[name]
    options = set(ROWS[name][0].split(", ")) - {"none"}
    listed = (options - {"heads"}) | (HEADS if "heads" in options else set())
    assert listed == set(mixer.option_names())
    assert ("heads" in options) == issubclass(mixer, AttentionMixer)
    assert ROWS[name][4] == ("yes" if mixer.causal else "no")


@pytest.mark.parametrize("tokens", [16, 64])  # sizes at which caches have no spare room
@pytest.mark.parametrize("name", ROWS)
def test_state(name, tokens):
    steps, state = ROWS[name][2:4]
    if name in FLA_MIXERS:
        mixer = FLA_MIXERS[name].__new__(FLA_MIXERS[name])  # without the package, and so without its layer
        torch.nn.Module.__init__(mixer)
        mixer.d_model, mixer.n_heads, mixer.state_dim = D_MODEL, N_HEADS, 128
        mixer.head_dim, mixer.expand_v = None, 2.0
    else:
        mixer = MIXERS[name](D_MODEL, N_HEADS, **REQUIRED.get(name, {}))
    if not mixer.causal:
        assert steps == state == "none"
        return
    letters = {"d": D_MODEL, "N": tokens, "H": N_HEADS, "min": min}
    heads = getattr(mixer, "near", mixer)
    letters |= {"w": getattr(heads, "window", None), "L": REQUIRED.get(name, {}).get("max_length")}
    letters |= {"k": getattr(mixer, "top_k", 4), "n": getattr(mixer, "state_dim", 64)}
    if isinstance(heads, AttentionMixer):
        letters |= {"G": heads.n_kv_heads, "K": heads.head_dim, "V": heads.value_dim, "D": spow_dim(heads.head_dim, 2)}
    assert mixer.state_size(tokens) == eval(state.strip("`"), {"__builtins__": {}}, letters)
    grows = max(mixer.state_size(40), mixer.state_size(100_000)) > mixer.state_size(1)
    assert steps == ("cache" if grows else "recurrence")


def test_a_constructor_that_passes_no_options_on_has_its_own_alone():
    class Own(PowerAttention):
        def __init__(self, d_model: int, n_heads: int, *, scale: float = 1.0):
            super().__init__(d_model, n_heads)

    assert Own.option_names() == ("scale",)
