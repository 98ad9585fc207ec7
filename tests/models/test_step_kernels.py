"""Steps of models by few kernels against steps by the parts of the model.

Both compute in float32; results differ by roundings of sums of some dozens of numbers, over two layers.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from sympow.layers import PowerAttention
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.models.bodies.gpt2 import GPT2Block
from sympow.models.norms import LayerNorm
from sympow.models.slots import Slots
from sympow.ops.fused import step_products
from tests.draws import disturb
from tests.ops.contract import DEVICE

pytest.importorskip("triton", reason="needs triton")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GATED = {"gate": True, "output_gate": True, "head_norm": True, "short_convolution": 4}
MIXERS = {
    "power": ("power", {}),
    "power, learned positions": ("power", {"rotation": "data"}),
    "power, bare": ("power", {"rotation": "none", "gate": False, "output_gate": False, "head_norm": False}),
    "power, grouped": ("power", {"n_kv_heads": 2, "qk_norm": True, "short_convolution": 3, "bias": False}),
    "power, yarn": ("power", {"short_convolution": 0, "rope_scaling": YARN}),
    "delta": ("power_delta", {"beta_max": 2.0, "n_kv_heads": 2}),
    "delta, fixed": ("power_delta", {"offset": 0.5, "beta": 1.0, "gate": False}),
    "softmax": ("softmax", {}),
    "softmax, gated": ("softmax", GATED),
    "window": ("window", {"window": 4}),
    "window, gated": ("window", {"window": 3} | GATED),
}
CALLS = 4  # of two layers: projections, output, MLP in and out


@pytest.fixture
def calls(monkeypatch):
    """Lets kernels run on this device, and counts their launches."""
    counted = []
    real = step_products.launch

    def launch(kernel, *rest, **tensors):
        counted.append(kernel)
        real(kernel, *rest, **tensors)

    monkeypatch.setattr(step_products, "launch", launch)
    monkeypatch.setattr(step_products, "has_kernels", lambda device, dtype: True)
    return counted


def without_kernels(monkeypatch):
    monkeypatch.setattr(step_products, "has_kernels", lambda device, dtype: False)


def with_kernels(monkeypatch):
    monkeypatch.setattr(step_products, "has_kernels", lambda device, dtype: True)


def model_of(mixer, body="gpt2", **config):
    name, options = MIXERS[mixer]
    shape = {"vocab_size": 37, "d_model": 32, "n_layers": 2, "n_heads": 4, "body": body}
    model = LanguageModel(ModelConfig(**shape, mixers=(MixerConfig(name, options),), **config), seed=0)
    return disturb(model, 0.1).to(DEVICE).eval()


def assert_close(found, expected):
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("body", ["gpt2", "llama"])
@torch.no_grad()
def test_steps_are_those_of_the_parts(mixer, body, calls, monkeypatch):
    model = model_of(mixer, body)
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    without_kernels(monkeypatch)
    expected, state = [], model.step(tokens[:, :4], model.init_state(2))[1]
    for token in tokens[:, 4:].split(1, dim=1):
        logits, state = model.step(token, state)
        expected.append(logits)
    assert not calls
    with_kernels(monkeypatch)
    found, state = [], model.step(tokens[:, :4], model.init_state(2))[1]
    assert not calls  # several tokens at once
    for token in tokens[:, 4:].split(1, dim=1):
        logits, state = model.step(token, state)
        found.append(logits)
    assert len(calls) == 4 * (2 * CALLS + 1)
    assert_close(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("mixer", ["power", "power, learned positions", "delta", "softmax, gated", "window"])
@torch.no_grad()
def test_rows_of_different_lengths(mixer, calls, monkeypatch):
    """In slots, positions and lengths are tensors."""
    model = model_of(mixer)
    tokens = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for switch in (without_kernels, with_kernels):
        without_kernels(monkeypatch)
        slots = Slots(model, 3, 12)
        for row in range(3):
            slots.put(model.step(tokens[row : row + 1, : 3 + row], model.init_state(1))[1], 3 + row)
        switch(monkeypatch)
        results.append(torch.stack([slots.step(tokens[:, 6 + i]).clone() for i in range(3)]))
    assert calls
    if DEVICE == "cpu":  # a CUDA graph launches its kernels without calls
        assert len(calls) == 3 * (2 * CALLS + 1)
    assert_close(results[1], results[0])


@torch.no_grad()
def test_the_position_of_the_next_token(calls):
    """A number stays a number, and a tensor is counted without a launch of its own."""
    model = model_of("power")
    _, state = model.step(torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), model.init_state(2))
    assert [layer.behind.position for layer in state.layers] == [1, 1]
    counted = [layer.counting(torch.tensor([1, 5], device=DEVICE)) for layer in state.layers]
    _, state = model.step(torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), type(state)(counted))
    assert [layer.behind.position.tolist() for layer in state.layers] == [[2, 6], [2, 6]]


@torch.no_grad()
def test_a_past_with_channels_apart(calls, monkeypatch):
    """The past of a convolution may have any strides."""
    model = model_of("power")
    token = torch.ones(2, 1, dtype=torch.int64, device=DEVICE)
    results = []
    for apart in (False, True):
        _, state = model.step(token, model.init_state(2))
        for layer in state.layers:
            layer.past = layer.past.transpose(1, 2).contiguous().transpose(1, 2) if apart else layer.past
        for _ in range(2):
            logits, state = model.step(token, state)
        results.append(logits)
    assert torch.equal(*results)


class OwnPower(PowerAttention):
    def projected(self, x):
        return 2 * super().projected(x)


class OwnBlock(GPT2Block):
    def _narrowed(self, hidden):
        return self.mlp_out(torch.relu(hidden))


class OwnNorm(LayerNorm):
    def forward(self, input):
        return 2 * super().forward(input)


class OwnModel(LanguageModel):
    def _head(self, hidden):
        return 2 * torch.nn.functional.linear(hidden, self.head_weight)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def doubled_by_a_hook(model):
    model.blocks[0].mixer.qkv.register_forward_hook(lambda module, given, result: 2 * result)


def norm_with_a_hook(model):
    model.blocks[0].mixer_norm.register_forward_hook(lambda module, given, result: 2 * result)


def adapter(model):
    model.blocks[0].mlp_in = torch.nn.Sequential(model.blocks[0].mlp_in, Doubled())


def gate_of_another_class(model):
    model.blocks[0].mixer.gate = torch.nn.Sequential(model.blocks[0].mixer.gate)


def gate_of_another_dtype(model):
    model.blocks[0].mixer.gate.double()


def own_forward(model):
    linear = model.blocks[0].mlp_out
    linear.forward = lambda x: 2 * torch.nn.functional.linear(x, linear.weight)


def computed_weight(model):
    parametrize.register_parametrization(model.blocks[0].mixer.convolution, "weight", Doubled())


def weight_that_is_no_parameter(model):
    """A kernel may compute it just before the step."""
    linear = model.blocks[0].mlp_in
    weight = 2 * linear.weight
    del linear.weight
    linear.weight = weight


def subclass_of_a_mixer(model):
    model.blocks[0].mixer.__class__ = OwnPower


def subclass_of_a_block(model):
    model.blocks[0].__class__ = OwnBlock


def subclass_of_a_norm(model):
    model.blocks[0].mlp_norm.__class__ = OwnNorm


def subclass_of_a_model(model):
    model.__class__ = OwnModel


def norm_without_weights(model):
    model.blocks[0].mixer_norm = LayerNorm(32, elementwise_affine=False).to(DEVICE)


def head_of_another_class(model):
    model.head = torch.nn.Sequential(torch.nn.Linear(32, 37, bias=False)).to(DEVICE)
    model.head.weight = model.head[0].weight


CHANGES = {
    doubled_by_a_hook: 2, norm_with_a_hook: 2, adapter: 2, gate_of_another_class: 2, gate_of_another_dtype: 2,
    own_forward: 2, computed_weight: 2, weight_that_is_no_parameter: 2, subclass_of_a_mixer: 2, subclass_of_a_block: 2,
    subclass_of_a_norm: 2, subclass_of_a_model: 1, norm_without_weights: 2, head_of_another_class: 1,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_changed_parts_are_called(change, calls, monkeypatch):
    """What is more than a product or a norm is called as it is; the rest of the model keeps its kernels."""
    results = []
    for switch in (without_kernels, with_kernels):
        switch(monkeypatch)
        model = model_of("softmax, gated" if change is gate_of_another_class else "power")
        torch.manual_seed(0)
        change(model)
        state = model.init_state(1)
        for token in (1, 2):
            logits, state = model.step(torch.full((1, 1), token, device=DEVICE), state)
        results.append(logits)
    assert len(calls) == 2 * (2 * CALLS + 1 - CHANGES[change])
    assert_close(results[1], results[0])


@torch.no_grad()
def test_hooks_of_all_modules(calls):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, result: None)
    try:
        model_of("power").step(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), model_of("power").init_state(1))
    finally:
        handle.remove()
    assert not calls


@pytest.mark.parametrize(("heads", "body"), [(1, "gpt2"), (4, "llama")])
@torch.no_grad()
def test_other_shapes(heads, body, calls, monkeypatch):
    """One head, whose norm is of all channels; and biases in a gated MLP."""
    results = []
    for switch in (without_kernels, with_kernels):
        switch(monkeypatch)
        mixer = MixerConfig("power", {"head_dim": 8})
        model = LanguageModel(ModelConfig(37, 32, 1, heads, (mixer,), body=body), seed=0).to(DEVICE)
        torch.manual_seed(0)
        if body == "llama":
            model.blocks[0].mlp_in = torch.nn.Linear(32, model.blocks[0].mlp_in.out_features).to(DEVICE)
            torch.nn.init.ones_(model.blocks[0].mlp_in.bias)
        model = disturb(model, 0.1)
        results.append(model.step(torch.ones(2, 1, dtype=torch.int64, device=DEVICE), model.init_state(2))[0])
    assert len(calls) == (CALLS + 1 if heads == 1 else CALLS - 1)
    assert_close(results[1], results[0])


@torch.no_grad()
def test_an_input_with_strides(calls, monkeypatch):
    block, results = model_of("power").blocks[0], []
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for switch in (without_kernels, with_kernels):
        switch(monkeypatch)
        results.append(block.step(x[:, 1:2], block.init_state(2))[0])
    assert len(calls) == CALLS
    assert_close(results[1], results[0])


@torch.no_grad()
def test_a_state_with_learned_positions_is_refused(calls):
    state = model_of("power, learned positions").init_state(1)
    with pytest.raises(TypeError, match="data-dependent rotation"):
        model_of("power").step(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), state)


@torch.no_grad()
def test_tangents_of_weights(calls):
    """Derivatives in forward mode flow through the parts."""
    model = model_of("softmax")
    with forward_ad.dual_level():
        weight = model.blocks[1].mlp_out.weight
        del model.blocks[1].mlp_out.weight
        model.blocks[1].mlp_out.weight = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        logits, _ = model.step(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), model.init_state(1))
        assert forward_ad.unpack_dual(logits).tangent is not None and not calls


def test_an_exported_step_takes_any_number_of_rows():
    class Step(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block.step(x, self.block.init_state(x.shape[0]))[0]

    block = model_of("softmax").cpu().blocks[0]
    with torch.no_grad():
        rows = {"x": {0: torch.export.Dim("rows", min=2, max=1024)}}
        exported = torch.export.export(Step(block), (torch.zeros(4, 1, 32),), dynamic_shapes=rows)
        x = torch.randn(100, 1, 32)
        torch.testing.assert_close(exported.module()(x), Step(block)(x))


def test_gradients_flow_through_the_parts(calls):
    model = model_of("power")
    logits, _ = model.step(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), model.init_state(1))
    logits.sum().backward()
    assert not calls and model.blocks[0].mixer.qkv.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_a_state_of_another_mixer_is_refused(calls):
    model = model_of("power")
    with pytest.raises((TypeError, ValueError), match="state"):
        model.step(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), model_of("delta").init_state(1))
