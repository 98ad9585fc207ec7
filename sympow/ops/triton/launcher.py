"""Launches one kernel many times. The arguments that do not change are bound once, and Triton chooses the code once.

Triton chooses the compiled code of a launch by looking at every argument: the dtypes and alignments of tensors, the
values of integers, the options. That takes longer than the launch itself. A `Launcher` holds all arguments but the
tensors. So after the first launch, tensors of the same dtypes at aligned addresses take the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

_ALIGNMENT = 16  # bytes: Triton compiles other code for addresses that are not multiples of it
# Versions of Triton whose compiled kernels can be called as `Launcher` does. With other versions Triton chooses at
# every launch.
_KNOWN = ("3.6.", "3.7.")


class Tile(NamedTuple):
    """Describes a tensor that a kernel copies in tiles, by a descriptor."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, self.shape, self.strides, self.block, self.layout)


class _Compiled(NamedTuple):
    run: Any  # the method of Triton's compiled kernel
    handle: Any  # of the code on the device
    metadata: Any
    grid: tuple[int, ...]  # three
    device: int
    arguments: list  # of all parameters; None in place of tensors
    # Of the tensors in the order of the first launch: names, indices in the arguments, dtypes (None: the tensor is
    # None).
    names: tuple[str, ...]
    places: tuple[int, ...]
    dtypes: tuple[Any, ...]
    tiled: tuple[int, ...]  # indices of those that are passed as descriptors


class Launcher:
    """Holds a kernel with its grid and all its arguments but the tensors."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], tiles: Mapping[str, Tile] | None = None
    ):
        """Args:
        kernel: a function of `triton.jit` or `gluon.jit`.
        grid: numbers of programs, one to three.
        arguments: by name; numbers, constants, tensors that are the same at every launch, and Triton's options.
        tiles: of the tensors that are handed over as descriptors.
        """
        self._kernel, self._grid, self._arguments, self._tiles = kernel, grid, arguments, tiles or {}
        self._compiled: _Compiled | None = None

    def __call__(self, **tensors: Tensor | None) -> None:
        """Launches the kernel on the current stream, with the missing arguments by name."""
        compiled = self._compiled
        if compiled is None or _hooked():
            return self._first(tensors)
        active = driver.active
        if active.get_current_device() != compiled.device:
            return self._first(tensors)
        run, handle, metadata, grid, device, arguments, names, places, dtypes, tiled = compiled
        if tuple(tensors) != names:
            return self._by_triton(tensors)
        arguments = arguments.copy()
        for place, dtype, x in zip(places, dtypes, tensors.values(), strict=True):
            if x is None:
                if dtype is None:
                    continue
                return self._by_triton(tensors)
            address = x.data_ptr()
            if address % _ALIGNMENT or x.dtype is not dtype:
                return self._by_triton(tensors)
            if place in tiled:
                descriptor = TensorDescriptor.__new__(TensorDescriptor)
                descriptor.__dict__.update(arguments[place].__dict__, base=x)
                arguments[place] = descriptor
            else:
                arguments[place] = address
        run(*grid, active.get_current_stream(device), handle, metadata, None, None, None, *arguments)

    def _by_triton(self, tensors: Mapping[str, Tensor | None]) -> Any:
        given = {
            name: self._tiles[name].descriptor(x) if x is not None and name in self._tiles else x
            for name, x in tensors.items()
        }
        return self._kernel[self._grid](**given, **self._arguments)

    def _first(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Launches as Triton does, and keeps the compiled kernel if later launches may use it."""
        kernel = self._by_triton(tensors)
        if not isinstance(kernel, CompiledKernel) or kernel.metadata.target.backend != "cuda":
            return
        if not triton.__version__.startswith(_KNOWN) or any(
            x is not None and x.data_ptr() % _ALIGNMENT for x in tensors.values()
        ):
            return
        names = self._kernel.arg_names
        arguments = [self._arguments.get(name) for name in names]
        for name, x in tensors.items():
            if x is not None and name in self._tiles:
                descriptor = self._tiles[name].descriptor(x)
                descriptor.base = None  # otherwise x would live as long as this launcher
                arguments[names.index(name)] = descriptor
        places = tuple(names.index(name) for name in tensors)
        dtypes = tuple(None if x is None else x.dtype for x in tensors.values())
        tiled = tuple(names.index(name) for name in self._tiles)
        grid = (*self._grid, 1, 1)[:3]
        device = driver.active.get_current_device()
        code = (kernel.run, kernel.function, kernel.packed_metadata)
        self._compiled = _Compiled(*code, grid, device, arguments, tuple(tensors), places, dtypes, tiled)


_launchers: dict[tuple, Launcher] = {}
MOST_LAUNCHERS = 1024  # of one kind that are kept: a server sees many lengths


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **tensors: Tensor | None) -> None:
    """Launches a kernel by the `Launcher` of these arguments, which must be numbers. It is made once."""
    key = (id(kernel), grid, *arguments.values())
    launcher = _launchers.get(key)
    if launcher is None:
        if len(_launchers) >= MOST_LAUNCHERS:
            _launchers.pop(next(iter(_launchers)))  # the oldest
        launcher = _launchers[key] = Launcher(kernel, grid, arguments)
    launcher(**tensors)


def forget_launchers() -> None:
    """Forgets all launchers of `launch`, for tests that change what kernels are launched with."""
    _launchers.clear()


def _hooked() -> bool:
    """Returns whether a profiler observes launches through Triton."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
