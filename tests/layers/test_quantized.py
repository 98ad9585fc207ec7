"""Linear layers that a quantizer has replaced: what they return counts, not how they hold their weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sympow.layers import MIXERS, make_mixer
from sympow.layers.base import any_weight, own_weight
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from tests.layers.contract import OPTIONS

SIZE, HEADS = 24, 4


class Packed(nn.Linear):
    """Holds levels of 8 bits in place of the weight, and a scale for each row, as bitsandbytes does."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def dense(self) -> nn.Linear:
        """The same layer with plain weights."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=self.scale.dtype)
        linear.weight = nn.Parameter(self.weight * self.scale)
        linear.bias = self.bias
        return linear

    def forward(self, x):
        weight = self.weight * self.scale
        return F.linear(x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Renamed(nn.Module):
    """Holds the weight under another name, as GPTQ does."""

    def __init__(self, packed: Packed):
        super().__init__()
        self.inner = [packed]
        self.register_buffer("qweight", packed.weight.detach())
        self.bias = packed.bias

    def forward(self, x):
        return self.inner[0](x)


def replace_linears(module: nn.Module, make) -> nn.Module:
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, make(child))
    return module


def pair(module: nn.Module, kind: str):
    """The module with plain weights, and with packed ones of the same values."""
    packed = replace_linears(module, Packed)
    dense = replace_linears(packed, Packed.dense)
    return dense, packed if kind == "packed" else replace_linears(packed, Renamed)


ATTENTION = [(name, options) for name in ("power", "softmax", "linear", "window", "retnet", "selection", "power_delta")
             for options in OPTIONS[name] if options.get("selection") != "learned"]  # fmt: skip


@pytest.mark.parametrize("kind", ["packed", "renamed"])
@pytest.mark.parametrize(("name", "options"), ATTENTION, ids=str)
def test_a_mixer_with_packed_weights_is_that_with_plain_ones(name, options, kind):
    torch.manual_seed(0)
    dense, packed = pair(make_mixer(name, SIZE, HEADS, options).eval(), kind)
    x = torch.randn(2, 9, SIZE)
    extras = dense.extras(torch.randint(5, (2, 9)))
    with torch.no_grad():
        torch.testing.assert_close(packed(x, **extras), dense(x, **extras))
        states = [mixer.init_state(2) for mixer in (dense, packed)]
        for part in (slice(0, 5), slice(5, 9)):
            some = {key: value if value is None else value[:, part] for key, value in extras.items()}
            outs = [mixer.step(x[:, part], state, **some) for mixer, state in zip((dense, packed), states, strict=True)]
            states = [state for _, state in outs]
            torch.testing.assert_close(outs[1][0], outs[0][0])


@pytest.mark.parametrize("kind", ["packed", "renamed"])
@pytest.mark.parametrize("body", ["gpt2", "llama"])
def test_a_model_with_packed_weights_trains_its_other_weights_and_decodes(body, kind):
    mixers = (MixerConfig("power"), MixerConfig("softmax"))
    dense, packed = pair(LanguageModel(ModelConfig(32, 24, 2, 2, mixers, body=body), seed=0), kind)
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))
    losses = [model.loss_sum(tokens[:, :-1], tokens[:, 1:]) for model in (dense, packed)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(packed.embedding.weight.grad, dense.embedding.weight.grad)
    with torch.no_grad():
        steps = [model.step(tokens, model.init_state(2))[0] for model in (dense, packed)]
    torch.testing.assert_close(steps[1], steps[0])


def test_activations_of_any_dtype_are_taken_by_packed_weights():
    """As in training with adapters, where the norms are of float32 and the activations of bfloat16."""
    _, packed = pair(make_mixer("power", SIZE, HEADS, {}), "packed")
    assert packed(torch.randn(1, 4, SIZE, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_weights_that_hold_numbers_are_found():
    linear = nn.Linear(4, 4)
    assert own_weight(linear) is linear.weight
    assert own_weight(Packed(linear)) is None and own_weight(nn.Identity()) is None
    assert any_weight(nn.Sequential(Packed(nn.Linear(4, 4, bias=False))), nn.Identity()).dtype == torch.float32
    mixer = make_mixer("power", SIZE, HEADS, {}).double()
    mixer.out = Packed(mixer.out)
    assert any_weight(mixer, mixer.out).dtype == torch.float64
    assert set(MIXERS) >= {name for name, _ in ATTENTION}


@pytest.mark.parametrize("name", ["power", "power_delta", "softmax", "hybrid_heads", "rwkv4", "hyena"])
@torch.no_grad()
def test_weights_of_torchao(name):
    """8 bits by the package itself: a scale for each row, so that a weight errs by at most 1/254 of the largest."""
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    options = {"hybrid_heads": {"window": 9}, "hyena": {"max_length": 64}}.get(name, {})
    model = LanguageModel(ModelConfig(61, 64, 2, 2, (MixerConfig(name, options),)), seed=0).eval()
    tokens = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    for block in model.blocks:
        assert any(type(weight.data) is not torch.Tensor for weight in block.mixer.parameters())
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=0.01 * expected.abs().max())
    _, state = model.step(tokens[:, :-1], model.init_state(2))
    torch.testing.assert_close(model.step(tokens[:, -1:], state)[0], model(tokens)[:, -1])
