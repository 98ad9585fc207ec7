"""The tables of Zoology: FLOPs and parameters of its language models, computed, counted on modules, as published."""

import pytest
import torch

from sympow.layers import MIXERS
from tests.ops.zoology_models import LENGTH, PARAMETERS, VOCABULARY, ZOOLOGY_MODELS, zoology_flops, zoology_parameters

# (mixer, millions): training TFLOPs of a sequence and millions of parameters that the corrected tables give, and the
# TFLOPs as printed.
TABLE = {
    ("attention", 73): (1.522, 73.2, 1.52),
    ("attention", 125): (2.460, 123.6, 2.46),
    ("attention", 360): (6.222, 359.8, 6.23),
    ("base_conv", 168): (2.461, 166.5, 2.46),
    ("base_conv", 354): (4.809, 351.3, 4.81),
    ("hyena", 158): (2.411, 158.3, 2.41),
    ("hyena", 358): (5.031, 356.8, 5.03),
    ("h3", 72): (1.328, 72.0, 1.33),
    ("h3", 168): (2.550, 167.6, 2.55),
    ("h3", 357): (4.849, 354.6, 4.85),
    ("long_convolution", 76): (1.204, 75.9, 1.20),
    ("long_convolution", 128): (1.744, 128.3, 1.74),
    ("long_convolution", 360): (4.081, 359.8, 4.08),
    ("rwkv4", 169): (2.079, 169.3, 2.08),
    ("rwkv4", 351): (4.309, 350.9, 4.31),
}
EVERY = pytest.mark.parametrize("name", TABLE, ids=lambda name: f"{name[0]}-{name[1]}")


def test_every_model_stands_in_the_table():
    assert set(TABLE) == set(ZOOLOGY_MODELS)


@EVERY
def test_flops(name):
    computed, _, published = TABLE[name]
    tera = zoology_flops(ZOOLOGY_MODELS[name]) / 1e12
    assert tera == pytest.approx(computed, abs=0.00051)
    assert tera == pytest.approx(published, rel=0.005)


@EVERY
def test_parameters(name):
    _, computed, _ = TABLE[name]
    millions = zoology_parameters(ZOOLOGY_MODELS[name]) / 1e6
    assert millions == pytest.approx(computed, rel=0.01)  # H3's source also trains B of its shift, 0.5% more
    assert millions == pytest.approx(name[1], rel=0.02)  # as the source names them


def built(mixer: str, d: int) -> float:
    """Parameters of our mixer, made without memory; of BaseConv the mean of a long and a short filter."""
    long = {"max_length": LENGTH}
    options = {
        "attention": [("softmax", {})],
        "long_convolution": [("long_convolution", long)],
        "base_conv": [("base_conv", long), ("base_conv", {"max_length": 3, "filter": "explicit"})],
        "hyena": [("hyena", long)],
        "h3": [("h3", {})],
        "rwkv4": [("rwkv4", {})],
    }[mixer]
    with torch.device("meta"):
        counts = [sum(p.numel() for p in MIXERS[name](d, 8, **o).parameters()) for name, o in options]
    return sum(counts) / len(counts)


@EVERY
def test_parameters_are_those_of_the_mixers(name):
    model = ZOOLOGY_MODELS[name]
    assert PARAMETERS[model.mixer](LENGTH, model.d_model) == built(model.mixer, model.d_model)


def test_the_rest_of_the_model_counted_on_modules():
    model = ZOOLOGY_MODELS["attention", 125]
    d, hidden = model.d_model, model.mlp_hidden
    with torch.device("meta"):
        block = [*(torch.nn.Linear(*s, bias=False) for s in ((d, hidden), (d, hidden), (hidden, d)))]
        block += [torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)]
        rest = [torch.nn.Linear(d, VOCABULARY, bias=False), torch.nn.LayerNorm(d)]
    count = {key: sum(p.numel() for m in modules for p in m.parameters()) for key, modules in
             (("block", block), ("rest", rest))}  # fmt: skip
    assert zoology_parameters(model) == 12 * (count["block"] + built("attention", d)) + count["rest"]
