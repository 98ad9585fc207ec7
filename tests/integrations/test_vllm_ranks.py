"""The parts of the ranks of tensor parallelism add up to the whole. vLLM itself is not needed."""

import pytest
import torch

from sympow.integrations.vllm.ranks import rank_config, rank_part
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from tests.draws import disturb
from tests.integrations.small import small_model

SHAPE = {"vocab_size": 61, "d_model": 32, "n_layers": 1, "n_heads": 4}
OPTIONS = {
    "power": {},
    "data": {"rotation": "data", "output_gate_bias": True},
    "no block": {"short_convolution": 0, "head_norm": False, "output_gate": False, "bias": False, "qk_norm": True},
    "values": {"value_dim": 6, "head_dim": 10},
}


def whole_model(options, body):
    config = ModelConfig(**SHAPE, body=body, n_kv_heads=2, mixers=(MixerConfig("power", options),))
    return disturb(LanguageModel(config, seed=1), 0.1, seed=2).double()


@pytest.mark.parametrize("body", ["llama", "gpt2"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_parts_add_up_to_the_whole(options, body):
    whole = whole_model(options, body)
    state = whole.blocks[0].state_dict()
    x = torch.randn(2, 9, SHAPE["d_model"], dtype=torch.float64)
    mixed, widened = torch.zeros_like(x), torch.zeros_like(x)
    for rank in range(2):
        block = LanguageModel(rank_config(whole.config, 2), seed=3).double().blocks[0]
        own = block.state_dict()
        block.load_state_dict({name: rank_part(name, state[name], own[name], block, rank, 2) for name in own})
        mixed += block.mixed(x)
        widened += block.mlp(x)
    torch.testing.assert_close(mixed, whole.blocks[0].mixed(x))
    torch.testing.assert_close(widened, whole.blocks[0].mlp(x))


def test_one_rank_has_the_whole():
    model = small_model("llama")
    assert rank_config(model.config, 1) is model.config


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"mixers": (MixerConfig("retnet"),)}, "it cannot split the retnet mixer"),
        ({"mixers": (MixerConfig("rwkv7"),)}, "it cannot split the rwkv7 mixer"),
        ({"mixers": (MixerConfig("hybrid_heads", {"window": 4}),)}, "it cannot split the hybrid_heads mixer"),
        ({"n_kv_heads": 1}, "over 2 ranks needs n_kv_heads to be a multiple of that; got 1"),
        ({"n_heads": 3, "d_model": 33, "n_kv_heads": 3}, "over 2 ranks needs n_heads to be a multiple of that; got 3"),
        ({"mlp_ratio": 3}, "over 2 ranks needs mlp_ratio to be a multiple of that; got 3"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(fields, line):
    with pytest.raises(ValueError, match=line):
        rank_config(ModelConfig(**SHAPE | fields), 2)
