"""Which build of torch the Makefile's environment gets, decided on canned answers of pip."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "install.py"
spec = importlib.util.spec_from_file_location("install", SCRIPT)
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)


def report(*names):
    return {"version": "1", "install": [{"metadata": {"name": name, "version": "1"}} for name in names]}


CUDA_BUILD = report("torch", "numpy", "nvidia-cublas", "nvidia-cudnn-cu13", "cuda-bindings", "triton")
CPU_BUILD = report("torch", "numpy", "sympy", "filelock")


@pytest.mark.parametrize("name", ["nvidia_nccl_cu13", "nvidia-cublas", "cuda-toolkit", "triton"])
def test_each_kind_of_cuda_package_is_seen(name):
    assert install.brings_cuda(report("torch", name))
    assert not install.brings_cuda(CPU_BUILD)


@pytest.mark.parametrize(
    ("answer", "gpu", "backend"),
    [
        (CUDA_BUILD, True, None),  # Linux with a GPU: pip's default build uses it
        (CUDA_BUILD, False, "cpu"),  # Linux without: not the gigabytes
        (CPU_BUILD, False, None),
        (CPU_BUILD, True, "auto"),  # a platform or a pip configuration whose default build lacks CUDA
        (report(), True, None),  # torch is there already
        (report("triton"), False, None),
    ],
)
def test_torch_backend(answer, gpu, backend, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert install.torch_backend(answer, gpu) == backend


def test_no_cuda_on_a_mac(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert install.torch_backend(CPU_BUILD, gpu=True) is None


def test_gpu_is_seen_by_a_device_file_or_by_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not install.has_nvidia_gpu(signs=[str(tmp_path / "nvidia0")])
    assert install.has_nvidia_gpu(signs=[str(tmp_path)])
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: one'\n")
    smi.chmod(0o755)
    assert install.has_nvidia_gpu(signs=[])
    smi.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert not install.has_nvidia_gpu(signs=[])


def test_a_failing_command_ends_with_one_line():
    with pytest.raises(SystemExit, match="install: trying failed"):
        install.run(sys.executable, "-c", "raise SystemExit(3)", what="trying")
    assert install.run(sys.executable, "-c", "print(1)", what="trying", capture=True) == "1\n"
