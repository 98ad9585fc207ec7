"""Writes down the launches of attention for Hopper without a GPU: `python -m tests.ops.triton.driver_launches`.

Every kernel is compiled and launched twice on the same tensors: as `Launcher` does after its first launch, and as
Triton does. Triton's own launcher for NVIDIA GPUs runs down to the function of the driver, which is replaced. Prints
JSON, a list of pairs of what that function was given.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from sympow.ops.runtime.launcher import Launcher
from sympow.ops.triton import plan
from sympow.ops.triton.adapt import attention


class Driver:
    """As much of a driver as launches ask for."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.utils = self

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return nvidia.CudaLauncher(src, metadata)

    def load_binary(self, name: str, kernel: Any, shared: int, device: int) -> tuple:
        return object(), name, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def build_signature_metadata(self, kinds: list[str]) -> list[str]:
        return list(kinds)

    def fill_tma_descriptor_tiled(self, address: int, *form: Any) -> list:
        return ["descriptor", address, *form]

    fill_tma_descriptor = fill_tma_descriptor_tiled  # its name in Triton 3.6

    def launch(self, x, y, z, stream, function, cooperative, early, metadata, *rest: Any) -> None:
        """Is the function of Triton 3.7, the same for all kernels."""
        _, _, _, *scratch, annotations, kinds, arguments = rest  # the first three are for hooks
        taken = [a for each, a in zip(annotations, arguments, strict=True) if each.type == "kernel"]
        assert len(taken) == len(kinds)
        self.note([x, y, z], stream, function, [cooperative, early, metadata, scratch, kinds], taken)

    def launch_of_signature(self, x, y, z, stream, function, cooperative, early, *rest: Any) -> None:
        """Is a function of Triton 3.6, which builds one for each signature."""
        *scratch, metadata, _, _, _ = rest[:6]
        self.note([x, y, z], stream, function, [cooperative, early, metadata, scratch], rest[6:])

    def note(self, grid, stream, function, how, arguments) -> None:
        told = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        self.launched.append({"kernel": function, "grid": grid, "stream": stream, "how": how, "arguments": told})


def main() -> None:
    nvidia.PyKernelArg = SimpleNamespace
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL, nvidia.ARG_TUPLE = "constant", "kernel", "tuple"
    nvidia.library_dirs = list  # Triton 3.6 looks for the driver of a GPU
    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=driver.launch_of_signature)
    plan.on_hopper, plan.processors = lambda device: True, lambda device: 132
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    hook, usual, pairs = triton.knobs.runtime.launch_enter_hook, Launcher.__call__, []

    def three_times(self: Launcher, **tensors: Any) -> None:
        usual(self, **tensors)
        driver.launched.clear()
        usual(self, **tensors)
        hook.add(ignore)  # with a hook Triton chooses
        usual(self, **tensors)
        hook.remove(ignore)
        pairs.append(driver.launched[:])

    Launcher.__call__ = three_times
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, 256, 2, 64, generator=gen).bfloat16().requires_grad_()
    log_g = (-torch.rand(1, 256, 2, generator=gen)).requires_grad_()
    options = {"p": 2, "scale": 1.0, "normalize": True, "eps": 1e-6, "return_state": False}
    for chunk_size in (256, 128):
        out, _ = attention(q, q, q, log_g, None, chunk_size=chunk_size, **options)
        torch.autograd.grad(out, [q, log_g], torch.ones_like(out))
    print(json.dumps(pairs))


def ignore(*_: Any) -> None:
    """Is a hook that does nothing."""


if __name__ == "__main__":
    main()
