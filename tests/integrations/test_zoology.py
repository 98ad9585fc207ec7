"""A mixer in a host that behaves as Zoology's harness does, in what it gives a mixer, asks of it and does to it."""

import importlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sympow.data.mqar import RecallTask, generate
from sympow.layers import make_mixer

NAME = "sympow.integrations.zoology.SequenceMixer"


def instantiate(name, **given):
    """A module by its import path, as the harness's configs name it."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)(**given)


def draw_anew(module, layers):
    """What the harness applies to every module, twice: linear weights and embeddings N(0, 0.02), biases 0."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    for name, parameter in module.named_parameters():
        if "out_proj.weight" in name or "fc2.weight" in name:
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)


class Block(nn.Module):
    def __init__(self, width, layer, kwargs):
        super().__init__()
        self.sequence_mixer = instantiate(NAME, d_model=width, layer_idx=layer, **kwargs)
        self.state_mixer = nn.Identity()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden, residual=None):
        residual = hidden if residual is None else hidden + residual
        hidden = self.sequence_mixer(self.norm1(residual))
        residual = hidden + residual
        return self.state_mixer(self.norm2(residual)), residual


class Backbone(nn.Module):
    def __init__(self, vocabulary, width, layers, kwargs):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, layer, kwargs) for layer in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.apply(partial(draw_anew, layers=layers))


class Host(nn.Module):
    def __init__(self, vocabulary=16, width=32, layers=2, **kwargs):
        super().__init__()
        self.backbone = Backbone(vocabulary, width, layers, kwargs)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.apply(partial(draw_anew, layers=layers))
        self.lm_head.weight = self.backbone.word_embeddings.weight

    def forward(self, tokens):
        hidden, residual = self.backbone.word_embeddings(tokens), None
        for layer in self.backbone.layers:
            hidden, residual = layer(hidden, residual)
        return self.lm_head(self.backbone.ln_f(hidden + residual))

    def state_size(self, length):
        return 4 * sum(layer.sequence_mixer.state_size(sequence_length=length) for layer in self.backbone.layers)


def train(host, steps, rate=1e-2):
    """The harness's steps, auxiliary losses asked for between forward and backward; the losses."""
    rows = generate(RecallTask(length=8, pairs=1, vocab_size=16), 32 * steps, 0)
    tokens, targets = (torch.from_numpy(part).long().split(32) for part in rows)
    optimizer = torch.optim.AdamW(host.parameters(), lr=rate, weight_decay=0.1)
    losses = []
    for x, y in zip(tokens, targets, strict=True):
        optimizer.zero_grad()
        loss, asked = F.cross_entropy(host(x).flatten(0, 1), y.flatten()), []
        host.apply(asked.append)
        extra = [module.get_auxiliary_loss() for module in asked if hasattr(module, "get_auxiliary_loss")]
        (loss + sum(extra)).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, extra


MIXERS = [
    {},
    {"n_heads": 4, "options": {"p": 4, "gate": False}},
    {"mixer": "retnet", "n_heads": 2},
    {"mixer": "rwkv7", "n_heads": 2},
    {"mixer": "short_convolution", "options": {"mixer": "softmax", "options": {"rotation": "none"}}},
]


@pytest.mark.parametrize("kwargs", MIXERS, ids=str)
def test_the_initial_weights_are_the_mixers_own(kwargs):
    torch.manual_seed(0)
    host = Host(layers=1, **kwargs)
    torch.manual_seed(0)
    nn.Embedding(16, 32)
    own = make_mixer(kwargs.get("mixer", "power"), 32, kwargs.get("n_heads", 1), kwargs.get("options", {}))
    held = host.backbone.layers[0].sequence_mixer.mixer.state_dict()
    assert held.keys() == own.state_dict().keys()
    assert all(torch.equal(held[name], value) for name, value in own.state_dict().items())
    assert host.backbone.word_embeddings.weight.std() < 0.03  # the host drew what is its own


def test_it_learns_in_the_host():
    torch.manual_seed(0)
    host = Host(n_heads=2)
    losses, extra = train(host, 150)
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10]) and extra == [0.0, 0.0]
    assert host.state_size(8) == 4 * 2 * make_mixer("power", 32, 2, {}).state_size(8)


def test_auxiliary_losses_reach_the_host():
    options = {"selection": "learned", "top_k": 2}
    torch.manual_seed(0)
    host = Host(layers=1, mixer="selection", options=options)
    _, (extra,) = train(host, 2)
    assert extra.requires_grad and extra.item() > 0


def test_the_mixer_itself_can_be_drawn_anew():
    mixer = instantiate(NAME, d_model=16)
    mixer.mixer.apply(partial(draw_anew, layers=1))
    before = mixer.mixer.qkv.weight.clone()
    mixer.apply(partial(draw_anew, layers=1))
    assert torch.equal(mixer.mixer.qkv.weight, before) and not mixer.mixer.qkv.bias.any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mixer": "attn"}, "a mixer is one of power, softmax"),
        ({"options": {"power": 2}}, "the power mixer has no option 'power'"),
        ({"mixer": "programmatic_conv"}, "the programmatic_conv mixer reads tokens, and the harness gives vectors"),
    ],
)
def test_refuses_what_the_host_cannot_train(kwargs, message):
    with pytest.raises(ValueError, match=message):
        instantiate(NAME, d_model=16, layer_idx=0, **kwargs)
