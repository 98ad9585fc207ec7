"""Devices without float64 are refused in one line. Tensors of a device that is not here are fake ones."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from sympow.layers import make_mixer
from sympow.ops import power_attention
from sympow.ops.checks import check_float64

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
