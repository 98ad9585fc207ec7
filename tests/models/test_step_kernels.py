"""Steps of models by few kernels against steps by the parts of the model.

Both compute in float32; results differ by roundings of sums of some dozens of numbers, over two layers.
"""

import pytest
import torch

from sympow.models import LanguageModel, MixerConfig, ModelConfig
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
    assert len(calls) == (3 * (2 * CALLS + 1) if DEVICE == "cpu" else len(calls))
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


def hooked(model):
    model.blocks[0].mixer.qkv.register_forward_hook(lambda module, given, result: result)
    return CALLS - 2  # the whole mixer


def with_hook_on_a_norm(model):
    model.blocks[0].mixer_norm.register_forward_hook(lambda module, given, result: result)
    return CALLS - 2


def with_an_adapter(model):
    model.blocks[0].mlp_in = torch.nn.Sequential(model.blocks[0].mlp_in)
    return CALLS - 2


def of_another_dtype(model):
    model.blocks[0].mixer.gate.double()
    return CALLS - 2


@pytest.mark.parametrize("change", [hooked, with_hook_on_a_norm, with_an_adapter, of_another_dtype])
@torch.no_grad()
def test_changed_parts_are_called(change, calls):
    """What is more than a product or a norm is called as it is; the rest of the model keeps its kernels."""
    model = model_of("power")
    left = change(model)
    model.step(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), model.init_state(1))
    assert len(calls) == left + CALLS + 1


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
