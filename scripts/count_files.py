"""Counts the files of sympow that a warm call enters before its Triton kernels run: `python scripts/count_files.py`.

Calls are made on the CPU as a GPU that is no Hopper would make them, with launches that do nothing. A file counts if a
function in it is called during the second call, which finds plans, launchers and tables as the first call left them.
Prints a line for each call: the number of files, and their names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

import sympow
from sympow.layers import make_mixer
from sympow.ops import availability, power
from sympow.ops.triton import plan

ROOT = Path(sympow.__file__).parent


@contextmanager
def as_on_a_gpu():
    """Makes every module take kernels for tensors on the CPU, and launches do nothing."""

    def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
        availability.refusal_of_kernels(device, dtype)  # the file is entered on a GPU too
        return True

    # A device of the type "cuda" cannot be made without a GPU.
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("sympow.")]
    patches = [mock.patch.object(each, "has_kernels", has_kernels) for each in modules if hasattr(each, "has_kernels")]
    patches += [
        mock.patch.object(power, "_chosen", lambda *_: power.BACKENDS["triton"]),
        mock.patch.object(power, "has_values", lambda x: availability.has_values(x) and False),  # nor on a GPU
        mock.patch.object(plan, "on_hopper", lambda device: False),
        mock.patch.object(JITFunction, "run", lambda *_, **__: None),
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


def entered(call: Callable[[], object]) -> list[str]:
    """Returns the files of sympow in which `call` calls a function, by their paths in the package."""
    found = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_name != "<module>":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                found.add(path.relative_to(ROOT).as_posix())

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(found)


def counted() -> dict[str, list[str]]:
    """Returns the files that a warm call enters, by what is called."""
    q, k, v = (torch.randn(1, 512, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    log_g = -torch.rand(1, 512, 2)
    layer = make_mixer("power", 128, 2, {}).to(torch.bfloat16)
    x = torch.randn(1, 512, 128, dtype=torch.bfloat16)
    calls = {
        "power_attention": lambda: power.power_attention(q, k, v, log_g, impl="triton"),
        "a layer": lambda: layer(x),
    }
    found = {}
    for name, call in calls.items():
        with torch.no_grad(), as_on_a_gpu():
            call()
            call()
            found[name] = entered(call)
    return found


def main() -> None:
    for name, files in counted().items():
        print(f"{name}: {len(files)} files: {' '.join(files)}")


if __name__ == "__main__":
    main()
