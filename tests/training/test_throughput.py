"""What counts as work, and which devices are known."""

import pytest
import torch

from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.ops.cost import least_power_flops, softmax_flops
from sympow.training.throughput import peak_flops, token_flops

MIXERS = (
    MixerConfig("power", {"n_kv_heads": 1, "rotation": "fixed"}),
    MixerConfig("softmax"),
    MixerConfig("window", {"window": 5}),
    MixerConfig("linear"),
)


def test_flops_of_a_token():
    model = LanguageModel(ModelConfig(11, d_model=8, n_layers=4, n_heads=2, mixers=MIXERS), seed=0)
    d, time, both = 8, 64, (False, True)
    matrices = 11 * d + 4 * 8 * d * d + 3 * 4 * d * d + 3 * d * d + d  # head, MLPs, projections, a group, its gate
    matrices += 4 * d + d * d  # of power attention: the convolution and the gate of the output
    mixing = least_power_flops(time, 4, 4, 2, True, heads=2, kv_heads=1) + least_power_flops(
        time, 4, 4, 1, heads=2, kv_heads=2
    )
    mixing += sum(softmax_flops(time, 4, 4, window=w, heads=2, backward=b) for w in (None, 5) for b in both)
    assert token_flops(model, time) == 6 * matrices + mixing / time


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"body": "llama", "mlp_hidden": 20}, 3 * 8 * 20),
        ({"body": "llama", "mlp_hidden": 20, "tie_embeddings": False}, 3 * 8 * 20),  # the embedding is looked up
        ({"body": "rwkv7", "mlp_ratio": 3}, 2 * 3 * 8 * 8 + 2 * 8 * 32),  # the rank of the gate is 32 at least
    ],
)
def test_flops_of_a_token_in_other_bodies(fields, others):
    model = LanguageModel(ModelConfig(11, d_model=8, n_layers=2, n_heads=2, mixers=MIXERS[1:2], **fields), seed=0)
    mixing = 2 * sum(softmax_flops(64, 4, 4, heads=2, backward=b) for b in (False, True))
    assert token_flops(model, 64) == 6 * (11 * 8 + 2 * (others + 4 * 8 * 8)) + mixing / 64


def test_a_mixer_that_does_not_count_makes_it_unknown(monkeypatch):
    model = LanguageModel(ModelConfig(11, d_model=8, n_layers=2, n_heads=2, mixers=MIXERS[:2]), seed=0)
    monkeypatch.setattr(type(model.blocks[1].mixer), "training_flops", lambda self, time: None)
    assert token_flops(model, 64) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("Unheard Of", None),
    ],
)
def test_peaks(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), "bf16") == peak
    assert peak_flops(torch.device("cuda"), "float32") is None
    assert peak_flops(torch.device("cpu"), "bf16") is None
