"""Names of devices."""

import pytest
import torch

from sympow.training.devices import resolve_device


def test_devices():
    assert resolve_device("auto").type in ("cpu", "cuda")
    assert resolve_device("cpu") == torch.device("cpu")
    for name in ("tpu9", "meta:x", "cuda:99"):
        with pytest.raises(ValueError, match=f"device '{name}' cannot be used here") as caught:
            resolve_device(name)
        assert "\n" not in str(caught.value)
