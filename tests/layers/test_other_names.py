"""Arguments as other libraries name them: the error says what to write here."""

import re

import numpy as np
import pytest
import torch

from sympow.layers import MIXERS, Mixer, PowerAttention, PowerDeltaAttention, WindowAttention, check_mixer
from sympow.layers.option_types import wanted
from tests.layers.contract import CASES, D_MODEL, HEADS, make, run, sequence


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("kv_heads", "n_kv_heads"),
        ("num_kv_heads", "n_kv_heads"),
        ("num_key_value_heads", "n_kv_heads"),
        ("head_size", "head_dim"),
        ("power", "p"),
        ("rope_theta", "rope_base"),
    ],
)
def test_options(theirs, ours):
    with pytest.raises(TypeError, match=rf"^PowerAttention has no option '{theirs}'; it is called {ours}$"):
        PowerAttention(16, 2, **{theirs: 1})
    with pytest.raises(ValueError, match=rf"^the power mixer has no option '{theirs}'; it is called {ours}: it has p,"):
        check_mixer("power", {theirs: 1})


@pytest.mark.parametrize(("theirs", "ours"), [("hidden_size", "d_model"), ("dim", "d_model"), ("embed_dim", "d_model")])
@pytest.mark.parametrize(("heads", "n_heads"), [("num_heads", "n_heads"), ("nhead", "n_heads")])
def test_sizes(theirs, ours, heads, n_heads):
    with pytest.raises(TypeError, match=rf"^PowerAttention has no option '{theirs}'; it is called {ours}$"):
        PowerAttention(**{theirs: 16, heads: 2})
    with pytest.raises(TypeError, match=rf"^PowerAttention has no option '{heads}'; it is called {n_heads}$"):
        PowerAttention(16, **{heads: 2})


def test_options_that_are_not_there():
    with pytest.raises(TypeError, match=r"^PowerAttention has no option 'dropout': the layers have no dropout$"):
        PowerAttention(16, 2, dropout=0.1)
    with pytest.raises(TypeError, match=r"^WindowAttention has no option 'window_size'; it is called window$"):
        WindowAttention(16, 2, window_size=3)
    with pytest.raises(TypeError, match=r"^PowerAttention has no option 'gate_biass'; did you mean gate_bias\?$"):
        PowerAttention(16, 2, gate_biass=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        PowerAttention(16, 2, colour=3)


@pytest.mark.parametrize("case", [c for c in CASES if c.id.endswith("-0")])
def test_calls(case):
    mixer, x = make(case), sequence()
    extras = mixer.extras(torch.zeros(x.shape[:2], dtype=torch.int64))
    for name in ("attention_mask", "attn_mask", "position_ids"):
        message = rf"^{type(mixer).__name__} takes no {name}: .* cu_seqlens, int \[N \+ 1\]$"
        with pytest.raises(TypeError, match=message):
            mixer(x, **{name: x[..., 0]}, **extras)
    with pytest.raises(TypeError, match="takes no past_key_values: for decoding use init_state and step"):
        mixer(x, past_key_values=None, **extras)
    with pytest.raises(TypeError, match=r"takes no hidden_states: the input is the first argument, x \[B, T, d\]"):
        mixer(hidden_states=x, **extras)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        mixer(x, colour=3, **extras)
    assert run(mixer, x).shape == x.shape


class Masked(MIXERS["long_convolution"]):
    """A user's mixer that has what the others lack."""

    def __init__(self, d_model: int, n_heads: int, *, dropout: float = 0.0, **options):
        self.rest = options.pop("num_heads", 0)
        super().__init__(d_model, n_heads, max_length=9)
        self.dropout = dropout

    def forward(self, x, *, cu_seqlens=None, attention_mask=None):
        if attention_mask is None:
            raise TypeError("attention_mask must be given")
        return super().forward(x, cu_seqlens=cu_seqlens) * attention_mask


def test_names_of_a_mixer_are_its_own():
    mixer: Mixer = Masked(D_MODEL, HEADS, dropout=0.5, num_heads=3)
    x = torch.ones(1, 2, D_MODEL)
    assert mixer.dropout == 0.5 and mixer.rest == 3 and mixer(x, attention_mask=x).shape == x.shape
    with pytest.raises(TypeError, match=r"^attention_mask must be given$"):
        mixer(x)


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "selection"])
def test_options_of_another_type_are_named(name):
    """Also where Python would take the value for another one, such as a text for a switch that is on."""
    mixer = MIXERS[name]
    known = mixer.option_parameters()
    needed = {option: 16 for option, parameter in known.items() if parameter.default is parameter.empty}
    mixer(16, 4, **needed)
    for option, parameter in known.items():
        for value in ("x", None, True, 1j, [1], {}, 10**400, [10**400]):
            if wanted(parameter, value) is not None:
                with pytest.raises((TypeError, ValueError)) as error:
                    mixer(16, 4, **needed | {option: value})
                assert option in str(error.value)
                assert "\n" not in str(error.value)


def test_an_option_of_another_type():
    message = "the option 'offset' of PowerDeltaAttention must be a number; got "
    for value in ("0.1", True, None, [0.1]):
        with pytest.raises(TypeError, match=re.escape(message + repr(value))):
            PowerDeltaAttention(16, 2, offset=value)
    assert PowerDeltaAttention(16, 2, offset=np.float32(0.5)).offset == 0.5
