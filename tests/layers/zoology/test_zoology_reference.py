"""Mixers with the weights of Zoology's published code give its outputs; made by scripts/zoology_reference.py."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sympow.data.mqar import RecallTask, solve
from sympow.layers import MIXERS, Mixer

STORED = np.load(Path(__file__).with_name("zoology_reference.npz"))
WIDTH, TIME = 8, 12


def weights(case: str) -> dict[str, Tensor]:
    """The published weights of a case, by their names there."""
    start = f"{case}|w|"
    return {name.removeprefix(start): torch.from_numpy(STORED[name]) for name in STORED.files if name.startswith(start)}


def attention(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"qkv.weight": w["Wqkv.weight"], "qkv.bias": w["Wqkv.bias"],
            "out.weight": w["out_proj.weight"], "out.bias": w["out_proj.bias"]}  # fmt: skip


def projection(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of BaseConv; its listings have no bias behind the convolution."""
    return {"projection.weight": w["projection.weight"], "projection.bias": w["projection.bias"],
            "bias": torch.zeros(WIDTH)}  # fmt: skip


def short(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return projection(w) | {"filter.weight": w["conv.conv.weight"][:, 0].flip(1).T, "bias": w["conv.conv.bias"]}


def listing_1(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return projection(w) | {"filter.weight": w["filter"].T}


def listing_2(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return projection(w) | {
        "filter.first.weight": sines_negated(w["filter_mlp.0.weight"]), "filter.first.bias": w["filter_mlp.0.bias"],
        "filter.last.weight": w["filter_mlp.2.weight"], "filter.last.bias": w["filter_mlp.2.bias"],
    }  # fmt: skip


def sines_negated(weight: Tensor) -> Tensor:
    """Their features are the real and the imaginary part of exp(-i angle), ours cosine and sine."""
    weight = weight.clone()
    weight[:, 1 + weight.shape[1] // 2 :] *= -1
    return weight


def hyena(w: dict[str, Tensor]) -> dict[str, Tensor]:
    # Their projections are k, q, v, ours q, k, v.
    parts = {name: w[name].unflatten(0, (3, -1))[[1, 0, 2]].flatten(0, 1)
             for name in ("in_proj.weight", "in_proj.bias", "short_filter.weight", "short_filter.bias")}  # fmt: skip
    network = {f"filter.layers.{i}.{kind}": w[f"filter_fn.implicit_filter.{2 * i}.{kind}"]
               for i in range(3) for kind in ("weight", "bias")}  # fmt: skip
    network["filter.layers.0.weight"] = sines_negated(network["filter.layers.0.weight"])
    return network | {
        "projections.weight": parts["in_proj.weight"], "projections.bias": parts["in_proj.bias"],
        "short.weight": parts["short_filter.weight"][:, 0], "short.bias": parts["short_filter.bias"],
        "filter.last.weight": w["filter_fn.implicit_filter.6.weight"],
        "filter.frequency": w["filter_fn.implicit_filter.1.freq"][0], "filter.skip": w["filter_fn.bias"],
        "out.weight": w["out_proj.weight"], "out.bias": w["out_proj.bias"],
    }  # fmt: skip


def h3(w: dict[str, Tensor]) -> dict[str, Tensor]:
    taps = w["ssm_k_kernel.kernel.C"][0].clone()
    taps[:, 0] += w["ssm_k_D"]  # the skip weight of the shift is its first tap
    # Behind the heads of 2 channels theirs has all first channels and then all second ones, ours head by head.
    out = w["output_linear.weight"].unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    return {
        "qkv.weight": torch.cat([w[f"{part}_proj.weight"] for part in "qkv"]),
        "qkv.bias": torch.cat([w[f"{part}_proj.bias"] for part in "qkv"]),
        "shift.weight": taps.flip(1), "skip": w["D"],
        "diagonal.log_decay": w["kernel.kernel.inv_A_real"], "diagonal.frequency": w["kernel.kernel.A_imag"],
        "diagonal.b": w["kernel.kernel.B"], "diagonal.c": w["kernel.kernel.C"][0],
        "diagonal.log_dt": w["kernel.kernel.log_dt"],
        "out.weight": out, "out.bias": w["output_linear.bias"],
    }  # fmt: skip


PLAIN = {"rotation": "none"}
LONG = {"max_length": TIME, "residual": True}
# case: our mixer, its heads and options, how weights are named here, the tolerance
CASES = {
    "attention": ("softmax", 2, PLAIN, attention, 1e-12),
    "window": ("window", 1, PLAIN | {"window": 5}, attention, 1e-12),  # a block_size of 4 sees 4 tokens and itself
    "base_conv short": ("base_conv", 1, LONG | {"max_length": 3, "filter": "explicit"}, short, 1e-12),
    "base_conv listing 1": ("base_conv", 1, LONG | {"filter": "explicit"}, listing_1, 1e-12),
    "base_conv listing 2": ("base_conv", 1, LONG | {"filter": "relu", "order": 16, "bands": 1}, listing_2, 1e-12),
    "hyena": ("hyena", 1, {"max_length": TIME, "bands": 1}, hyena, 1e-12),
    "hyena options": (
        "hyena", 1, {"max_length": TIME, "bands": 2, "frequency": 10, "decays": (0.5, 2.0)}, hyena, 1e-12
    ),
    "h3": ("h3", 1, {"state_dim": TIME, "head_dim": 2}, h3, 1e-6),  # float32 there
}  # fmt: skip


def built(case: str) -> Mixer:
    """Our mixer with the published weights."""
    name, heads, options, renamed, _ = CASES[case]
    mixer = MIXERS[name](WIDTH, heads, **options).double()
    mixer.load_state_dict(renamed(weights(case)))
    return mixer.eval()


def test_every_published_mixer_is_compared():
    stored = {name.split("|")[0] for name in STORED.files}
    assert stored - set(CASES) == {"rwkv4", "mqar zero", "mqar random"}


@pytest.mark.parametrize("case", CASES)
def test_published_weights_give_published_outputs(case):
    x, y = (torch.from_numpy(STORED[f"{case}|{part}"]) for part in "xy")
    mixer = built(case)
    with torch.no_grad():
        scale = y.abs().max()
        torch.testing.assert_close(mixer(x) / scale, y / scale, rtol=0, atol=CASES[case][4])
        first = next(mixer.parameters())
        first += 1e-3
        assert (mixer(x) - y).abs().max() > 1e-6 * scale


@pytest.mark.parametrize("layers", [2, 12])
def test_rwkv4_starts_as_published(layers):
    for layer in range(layers):
        mixer = MIXERS["rwkv4"](WIDTH, 1, depth=layer / (layers - 1), shift_depth=layer / layers).double()
        mixer.reset_parameters()
        ours = {"time_decay": mixer.decay, "time_first": mixer.bonus,
                **dict(zip(("time_mix_k", "time_mix_v", "time_mix_r"), mixer.mix, strict=True))}  # fmt: skip
        for name, value in ours.items():
            # ours is drawn in float32
            expected = torch.from_numpy(STORED[f"rwkv4|{layers}|{layer}|{name}"])
            torch.testing.assert_close(value.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("filler", ["zero", "random"])
def test_published_rows_have_the_answers_of_our_oracle(filler):
    """With their random filler, which may repeat a key, our oracle also answers where they ask nothing."""
    inputs, labels = (STORED[f"mqar {filler}|{part}"] for part in ("inputs", "labels"))
    answers = solve(RecallTask(length=32, pairs=4, vocab_size=200), inputs)
    asked = labels != -100
    assert asked.sum(1).tolist() == [4] * len(labels)
    np.testing.assert_array_equal(answers[asked], labels[asked])
    extra = (answers != -100).sum() - asked.sum()
    assert extra > 0 if filler == "random" else extra == 0
