"""A language model with every row split over ranks: the losses and gradients of the whole rows."""

import pytest
import torch
import torch.distributed as dist

from sympow.models import LanguageModel, MixerConfig, ModelConfig
from tests.ops.contract import assert_equal_float64
from tests.ranks import run_ranks

POWER, LINEAR = MixerConfig("power", {"chunk_size": 4}), MixerConfig("linear")
ALONE = {"short_convolution": 0, "head_norm": False, "output_gate": False}
CASES = {
    "power, gate, data rotation": {"mixers": (POWER,)},
    "power alone": {"mixers": (MixerConfig("power", {"chunk_size": 4, **ALONE}),)},
    "power, fixed rotation": {"mixers": (MixerConfig("power", {"rotation": "fixed", "gate": False, "n_kv_heads": 1}),)},
    "power p 3": {"mixers": (MixerConfig("power", {"p": 3, "rotation": "none"}),)},
    "linear": {"mixers": (LINEAR, MixerConfig("linear", {"feature_map": "elu+1", "short_convolution": 3}))},
    "behind a convolution": {
        "mixers": (
            MixerConfig("short_convolution", {"mixer": "linear", "options": {"output_gate": True}}),
            MixerConfig("short_convolution"),
        )
    },
    "llama": {"mixers": (POWER, LINEAR), "body": "llama", "n_kv_heads": 1, "tie_embeddings": False},
    "rwkv7": {"mixers": (POWER, LINEAR), "body": "rwkv7"},
}
RECOMPUTED = ("llama", "rwkv7")  # blocks computed again in the backward, in which ranks exchange tokens anew
TIME = 24


def make(fields: dict) -> LanguageModel:
    model = LanguageModel(ModelConfig(11, d_model=8, n_layers=2, n_heads=2, **fields), seed=0).double()
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "beta" in name or fields.get("body") == "rwkv7":  # zeros at first, such as steps of the rotation
                parameter.normal_(generator=gen)
    return model


def part(name: str, rank: int, size: int) -> dict[str, torch.Tensor]:
    """This rank's losses, and zeros, and its part of every gradient."""
    model = make(CASES[name])
    if size > 1:
        model.split_context(dist.group.WORLD)
        if name in RECOMPUTED:
            model.checkpoint_activations()
    text = torch.randint(11, (2, TIME + 1), generator=torch.Generator().manual_seed(2))
    here = slice(TIME * rank // size, TIME * (rank + 1) // size)
    own = model.token_losses(text[:, :-1][:, here].contiguous(), text[:, 1:][:, here].contiguous())
    weight = torch.linspace(1, 2, TIME, dtype=torch.float64)[here]  # a loss that weighs positions differently
    (own * weight).sum().backward()
    losses = torch.zeros(2, TIME, dtype=torch.float64)
    losses[:, here] = own.detach()
    return {"losses": losses} | {name: p.grad for name, p in model.named_parameters()}


def parts() -> dict[str, dict[str, torch.Tensor]]:
    return {name: part(name, dist.get_rank(), dist.get_world_size()) for name in CASES}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return run_ranks(parts, request.param)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients(ranks, name):
    actual = {key: sum(rank[name][key] for rank in ranks) for key in ranks[0][name]}
    assert_equal_float64(actual, part(name, 0, 1))


@pytest.mark.parametrize("mixer", [MixerConfig("softmax"), MixerConfig("window", {"window": 4})], ids=lambda m: m.name)
def test_mixers_without_a_state_refuse(mixer):
    with pytest.raises(ValueError, match=f"{mixer.name.title()}Attention cannot split a row over ranks") as caught:
        make({"mixers": (MixerConfig("power"), mixer), "body": "rwkv7"}).split_context(object())
    assert "\n" not in str(caught.value)
