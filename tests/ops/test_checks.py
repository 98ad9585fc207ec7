"""Devices without float64 are refused in one line. A device that is not here has fake tensors, or stands in as meta."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from sympow.layers import MIXERS, make_mixer
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.ops import power_attention, power_delta_rule, rotary_frequencies, rotary_positions, rotate
from sympow.ops.availability import check_float64
from tests.layers.contract import D_MODEL, HEADS, OPTIONS

REFUSED = r"in float64, which the device 'mps(:0)?' does not have: use the CPU or a CUDA device$"
pytestmark = pytest.mark.skipif(torch.backends.mps.is_available(), reason="has this device, whose tensors are real")


def test_devices_with_float64_are_taken():
    for device in ("cpu", "cuda", "cuda:1", "meta"):
        check_float64(torch.device(device))
    with pytest.raises(ValueError, match=REFUSED):
        check_float64(torch.device("mps"))


def test_the_op_refuses_a_device_without_float64():
    with FakeTensorMode():
        q = torch.ones(1, 3, 2, 4, device="mps")
        with pytest.raises(ValueError, match=REFUSED):
            power_attention(q, q, q)


@pytest.mark.parametrize("name", ["power", "softmax", "window", "linear", "retnet"])
def test_layers_refuse_a_device_without_float64(name):
    mixer = make_mixer(name, 16, 2, {"window": 4} if name == "window" else {})
    shapes = {name: weight.shape for name, weight in mixer.state_dict().items()}
    with FakeTensorMode(), torch.device("mps"):
        weights = {name: torch.empty(shape) for name, shape in shapes.items()}
        with pytest.raises(ValueError, match=REFUSED):
            functional_call(mixer, weights, (torch.empty(1, 3, 16),))


class NoFloat64(TorchDispatchMode):
    """Fails where an operation makes a float64 tensor on a device other than the CPU and CUDA devices."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in results if isinstance(results, tuple | list) else [results]:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64 and x.device.type not in ("cpu", "cuda"):
                raise AssertionError(f"{function} makes float64 on {x.device}")
        return results


@pytest.fixture
def refused(monkeypatch):
    """Makes the meta device one without float64. The function tells whether a call on it is refused in one line."""
    monkeypatch.setattr("sympow.ops.availability.WITH_FLOAT64", ("cpu", "cuda"))
    monkeypatch.setattr("sympow.ops.availability.has_float64", lambda kind: False)

    def call(function):
        try:
            with NoFloat64():
                function()
        except ValueError as error:
            assert "does not have: use the CPU or a CUDA device" in str(error) and "\n" not in str(error)
            return True
        return False

    return call


@pytest.mark.parametrize("name", MIXERS)
def test_no_mixer_makes_float64_there(refused, name):
    """A whole row, with gradients, and the state before the first token."""
    for options in OPTIONS[name]:
        mixer = make_mixer(name, D_MODEL, HEADS, options).to("meta")
        x, tokens = torch.empty(1, 9, D_MODEL, device="meta"), torch.zeros(1, 9, dtype=torch.int64, device="meta")
        refused(lambda: mixer(x, **mixer.extras(tokens)).sum().backward())  # noqa: B023
        if mixer.causal:
            refused(lambda: mixer.init_state(1, device="meta"))  # noqa: B023


def test_no_model_and_no_op_makes_float64_there(refused):
    model = LanguageModel(ModelConfig(9, d_model=16, n_layers=1, n_heads=2, mixers=(MixerConfig("power"),))).to("meta")
    tokens, q = torch.zeros(1, 8, dtype=torch.int64, device="meta"), torch.ones(1, 3, 2, 4, device="meta")
    beta = q[..., 0]
    assert refused(lambda: model.loss_sum(tokens, tokens))
    assert refused(lambda: power_attention(q, q, q, impl="reference"))
    assert refused(lambda: power_delta_rule(q, q, q, beta))
    assert refused(lambda: rotary_frequencies(4, device="meta"))
    assert refused(lambda: rotary_positions(beta))
    assert refused(lambda: rotate(q, beta[0, :, 0], q[0, 0, 0, :2]))
