"""Options of heads of two kinds, which the config of a model checks too."""

import pytest
import torch

from sympow.layers import HybridHeads, make_mixer
from sympow.models import HYBRID, LanguageModel, MixerConfig, ModelConfig

D_MODEL, N_HEADS, WINDOW = 24, 6, {"window": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": {"foo": 1}}, "the power_delta mixer has no option 'foo'"),  # of the mixer that is the default
        ({"options": {"p": "2"}}, "the option 'p' of the power_delta mixer must be an integer"),
        ({"options": {"mixer": "power"}}, "the power_delta mixer has no option 'mixer'"),
        ({"window_options": {"foo": 1}}, "the window mixer has no option 'foo'"),
        ({"window_options": {"bias": 1}}, "the option 'bias' of the window mixer must be true or false"),
        ({"window_options": {"window": 7}}, "window is an option of the hybrid_heads mixer itself"),
    ],
)
def test_options_within_options_are_checked_before_a_model_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        MixerConfig("hybrid_heads", WINDOW | options)
    with pytest.raises(ValueError, match=message):
        HybridHeads(D_MODEL, N_HEADS, **WINDOW, **options)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="n_heads must be at least 2, for heads of two kinds; got 1"):
        HybridHeads(D_MODEL, 1, window=4)
    with pytest.raises(ValueError, match="d_model must be a multiple of n_heads, or head_dim given in window_options"):
        HybridHeads(D_MODEL, 5, window=4)  # heads of 4 channels would leave 4 channels out
    with pytest.raises(ValueError, match="window_heads must be from 1 to 5, of 6 heads; got 6"):
        HybridHeads(D_MODEL, N_HEADS, window=4, window_heads=6)


@pytest.mark.parametrize("given", [{}, {"head_dim": None}])
def test_heads_of_both_kinds_have_one_width_by_default(given):
    mixer = HybridHeads(D_MODEL, N_HEADS, window=4, window_heads=2, window_options=given, options=given)
    assert (mixer.near.head_dim, mixer.far.head_dim) == (4, 4)
    wide = HybridHeads(D_MODEL, 5, window=4, window_options={"head_dim": 8}, options=given)
    assert (wide.near.head_dim, wide.far.head_dim) == (8, 8)
    assert wide(torch.zeros(1, 3, D_MODEL)).shape == (1, 3, D_MODEL)


@pytest.mark.parametrize("mixer", [{}, {"mixer": "power_delta"}])
def test_key_value_heads_of_a_model_reach_heads_of_both_kinds(mixer):
    config = ModelConfig(16, D_MODEL, 2, N_HEADS, (MixerConfig("hybrid_heads", WINDOW | mixer),), n_kv_heads=1)
    layer = LanguageModel(config).blocks[0].mixer
    assert (layer.near.n_kv_heads, layer.far.n_kv_heads) == (1, 1)
    own = MixerConfig("hybrid_heads", WINDOW | {"window_options": {"n_kv_heads": 3}})
    layer = LanguageModel(ModelConfig(16, D_MODEL, 2, N_HEADS, (own,), n_kv_heads=1)).blocks[0].mixer
    assert (layer.near.n_kv_heads, layer.far.n_kv_heads) == (3, 1)
    config = ModelConfig(16, D_MODEL, 6, N_HEADS, HYBRID, n_kv_heads=3)
    layers = [block.mixer for block in LanguageModel(config).blocks]
    assert layers[3].n_kv_heads == 3
    assert {(layer.near.n_kv_heads, layer.far.n_kv_heads) for layer in (*layers[:3], *layers[4:])} == {(3, 3)}
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_mixers_within_mixers():
    inner = {"mixer": "short_convolution", "options": {"mixer": "hybrid_heads", "options": {"window": 3}}}
    mixer = make_mixer("hybrid_heads", D_MODEL, 12, WINDOW | inner)
    assert mixer(torch.zeros(1, 5, D_MODEL)).shape == (1, 5, D_MODEL)
    with pytest.raises(ValueError, match="the hybrid_heads mixer needs the option 'window'"):
        make_mixer("hybrid_heads", D_MODEL, 12, WINDOW | {"mixer": "hybrid_heads"})
