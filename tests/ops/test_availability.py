"""For which devices and dtypes kernels are taken, and what is said where there are none."""

import pytest
import torch

from sympow.ops import availability

pytest.importorskip("triton", reason="needs triton")


def test_who_takes_them(monkeypatch):
    assert not availability.has_kernels(torch.device("cpu"), torch.float32)
    assert not availability.has_kernels(torch.device("cuda"), torch.float64)
    assert availability.has_kernels(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(availability, "NO_TRITON", "needs another triton")
    assert not availability.has_kernels(torch.device("cuda"), torch.bfloat16)
    assert availability.refusal_of_kernels(torch.device("cuda"), torch.bfloat16) == "needs another triton"


def test_compiled_code_takes_kernels(monkeypatch):
    """In torch 2.11 its own function is true in everything that torch.compile traces."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert not availability.is_exporting()
    assert availability.has_kernels(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"triton": "3.5.1"}, "needs triton >= 3.6; found 3.5.1"),
        ({"triton": "3.6.0"}, None),
        ({"pytorch-triton": "3.10.0+git1"}, None),
        ({"pytorch-triton-rocm": "3.4.0"}, "needs triton >= 3.6; found 3.4.0"),
        ({}, None),  # built from source
        (None, "needs the package triton, which is not installed"),
    ],
)
def test_triton_must_be_there_and_new_enough(versions, reason, monkeypatch):
    def version(name):
        if name not in versions:
            raise availability.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(availability.metadata, "version", version)
    if versions is None:
        monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert availability.why_no_triton() == reason
