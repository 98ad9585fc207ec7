"""How a function becomes an operator of PyTorch, and how a kernel is launched.

An operator is what torch.compile, torch.export and fake tensors see of a kernel. A plain call does not need it: the
dispatcher and the checks of `torch.library.custom_op` take longer on the host than the launch of a kernel. So
`operator` registers a function, and calls it without the dispatcher where nothing needs that.

The function launches kernels. Those that `jit` marks are given to Triton at their first launch. So a file can hold the
formula of an op in plain torch beside its kernels, and is imported also where Triton is not installed.

Triton chooses the compiled code of a launch by looking at every argument: the dtypes and alignments of tensors, the
values of integers, the options. That takes longer than the launch itself. A `Launcher` holds all arguments but the
tensors. So after the first launch, tensors of the same dtypes at aligned addresses take the same code. On NVIDIA GPUs
that code is launched by the function of Triton's driver that Triton itself calls in the end. `launch` finds the
`Launcher` of its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sympow.ops.first_order import first_order, refuse_tangents

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_LIBRARY = torch.library.Library("sympow", "FRAGMENT")
_DEVICES = ("CUDA", "CPU")  # of kernels; on the CPU they run in Triton's interpreter
ALL_DEVICES = ("CompositeExplicitAutograd",)  # of functions in plain torch

# The context of autograd, then the arguments of the operator and what it returned: keeps what the backward needs.
Setup = Callable[[Any, tuple, Any], None]


def operator(
    fake: Callable,
    setup: Setup | None = None,
    backward: Callable | None = None,
    *,
    changes: tuple[str, ...] = (),
    devices: tuple[str, ...] = _DEVICES,
) -> Callable[[Callable], Callable]:
    """Makes a decorator that registers a function as the operator `sympow::` and its name.

    Args:
        fake: with the arguments of the function, returns tensors of the shapes, dtypes and devices of its results.
        setup: keeps what `backward` needs; None: the operator has no gradient.
        backward: of the context and the gradients of the results, returns those of all arguments, None for numbers.
        changes: the tensors that the function writes into.
        devices: the keys of PyTorch's dispatcher for the devices that the function computes on.

    The function takes tensors, None and numbers by position, has type hints and has no defaults.
    The decorated function is called by position.
    """

    def decorate(function: Callable) -> Callable:
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=changes))
        for device in devices:
            _LIBRARY.impl(name, function, device)
        torch.library.register_fake(f"sympow::{name}", fake, lib=_LIBRARY)
        registered = getattr(torch.ops.sympow, name).default
        gradient = None
        if setup is not None and backward is not None:
            gradient = _gradient(name, function, setup, backward)
            _register_gradient(name, function, registered, setup, backward)

        @wraps(function)
        def call(*inputs: Any) -> Any:
            refuse_tangents(name, inputs)
            if torch.compiler.is_compiling() or is_followed(inputs[0]):
                return registered(*inputs)
            if gradient is not None and torch.is_grad_enabled() and _needs_gradient(inputs):
                return gradient(*inputs)
            return function(*inputs)

        return call

    return decorate


def is_followed(x: Tensor) -> bool:
    """Returns whether x is no plain tensor, or a mode of the dispatcher or a transform of torch.func is on."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    return type(x) is not Tensor and type(x) is not torch.nn.Parameter


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x.to(dtype), without a call if x has that dtype, because a call takes time even if it does nothing."""
    return x if x.dtype is dtype else x.to(dtype)


def _needs_gradient(inputs: tuple) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def differentiable(name: str, forward: Callable, backward: Callable) -> Callable:
    """Returns a function with a gradient, for plain calls, that is, where `is_followed` is false.

    Args:
        name: of its node in the graph of autograd.
        forward: the method of that name of a `torch.autograd.Function`.
        backward: its other method, whose results cannot be differentiated.

    Returns:
        A function with the arguments of `forward` after the context.
    """
    function = _function(name, forward, backward)
    # Without the preparation for calls inside of torch.func. mypy does not know the class in C++ that has the method.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _gradient(name: str, function: Callable, setup: Setup, backward: Callable) -> Callable:
    """Returns the function with its gradient, for calls without the dispatcher."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function(*inputs)
        setup(ctx, inputs, output)
        return output

    return differentiable(f"Direct_{name}", forward, backward)


def _register_gradient(name: str, kernel: Callable, registered: Any, setup: Setup, backward: Callable) -> None:
    """Gives a registered operator its gradient; `kernel` is what computes it."""

    def below(keyset: Any, inputs: tuple) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return registered.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    def forward(ctx: Any, *inputs_and_keyset: Any) -> Any:
        *inputs, keyset = inputs_and_keyset
        output = below(keyset, tuple(inputs))
        setup(ctx, tuple(inputs), output)
        return output

    def backward_of_all(ctx: Any, *gradients: Any) -> tuple:
        return (*backward(ctx, *gradients), None)  # None: of the key set

    function = _function(f"Registered_{name}", forward, backward_of_all)

    def autograd(keyset: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and _needs_gradient(inputs):
            return function.apply(*inputs, keyset)
        # Compiled code calls this with gradients off. Then the kernel need not be searched for a second time.
        return below(keyset, inputs) if is_followed(inputs[0]) or inputs[0].is_meta else kernel(*inputs)

    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)


def _function(name: str, forward: Callable, backward: Callable) -> type[torch.autograd.Function]:
    """Returns a function of autograd whose gradient cannot be differentiated."""
    methods = {"forward": forward, "backward": first_order(f"sympow's {name}")(backward)}
    return type(name, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})


_ALIGNMENT = 16  # bytes: Triton compiles other code for addresses that are not multiples of it
# Versions of Triton whose compiled kernels can be called as `Launcher` does. With other versions Triton chooses at
# every launch.
_KNOWN = ("3.6.", "3.7.")


class Kernel:
    """Holds a kernel, or a function that kernels call, until Triton compiles it; made by `jit`."""

    def __init__(self, function: FunctionType, options: Mapping[str, Any]):
        """Takes the function, and options of `triton.jit`."""
        self._function, self._options = function, options

    @cached_property
    def by_triton(self) -> Any:
        """Returns what `triton.jit` makes of the function. Names of its file get the values that Triton expects."""
        import triton
        import triton.language as tl

        function, names = self._function, {**self._function.__globals__, "tl": tl}
        for name in names.keys() & set(function.__code__.co_names):
            if isinstance(names[name], Kernel):
                names[name] = names[name].by_triton
            elif isinstance(names[name], int | float):
                names[name] = tl.constexpr(names[name])
        copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        copy.__annotations__ = function.__annotations__
        return triton.jit(**self._options)(copy)


def jit(function: Any = None, **options: Any) -> Any:
    """Marks a kernel, as `triton.jit` and with its options, and does not import Triton.

    In the function, `tl` is triton.language. Its file imports `tl` for type checkers alone. The numbers and the
    functions of `jit` that stand in the file can be used in it.
    """
    return partial(jit, **options) if function is None else Kernel(function, options)


class Tile(NamedTuple):
    """Describes a tensor that a kernel copies in tiles, by a descriptor."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any

    def descriptor(self, x: Tensor) -> TensorDescriptor:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(x, self.shape, self.strides, self.block, self.layout)


class _Compiled(NamedTuple):
    launch: Callable  # takes the grid, the stream, `options`, and the arguments: as a list, or one by one if `separate`
    options: tuple
    separate: bool
    arguments: list  # None in place of tensors
    early: tuple | None  # the options in a CUDA graph, for a kernel of `ahead`
    grid: tuple[int, ...]  # three
    device: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]  # of a device
    # Of the tensors in the order of the first launch: names, indices in the arguments, dtypes (None: the tensor is
    # None).
    names: tuple[str, ...]
    places: tuple[int, ...]
    dtypes: tuple[Any, ...]
    tiles: Mapping[int, Callable[[Tensor], Any]]  # make the arguments at these indices; others are addresses
    hooks: Any  # of Triton's runtime: where profilers enter themselves


class Launcher:
    """Holds a kernel with its grid and all its arguments but the tensors."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], tiles: Mapping[str, Tile] | None = None
    ):
        """Args:
        kernel: a function of `jit`, `triton.jit` or `gluon.jit`.
        grid: numbers of programs, one to three.
        arguments: by name; numbers, constants, tensors that are the same at every launch, and Triton's options.
        tiles: of the tensors that are handed over as descriptors.
        """
        self._kernel = kernel.by_triton if isinstance(kernel, Kernel) else kernel
        self._grid, self._arguments, self._tiles = grid, arguments, tiles or {}
        self._compiled: _Compiled | None = None

    def __call__(self, **tensors: Tensor | None) -> None:
        """Launches the kernel on the current stream, with the missing arguments by name."""
        compiled = self._compiled
        if compiled is None:
            return self._first(tensors)
        (launch, options, separate, arguments, early, grid, device, current_device, current_stream, names, places,
         dtypes, tiles, hooks) = compiled  # fmt: skip
        if _hooked(hooks) or current_device() != device:
            return self._first(tensors)
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
            arguments[place] = tiles[place](x) if place in tiles else address
        stream = current_stream(device)
        if early is not None and torch.cuda.is_current_stream_capturing():
            options = early
        if separate:
            launch(*grid, stream, *options, *arguments)
        else:
            launch(*grid, stream, *options, arguments)

    def _by_triton(self, tensors: Mapping[str, Tensor | None]) -> Any:
        given = {
            name: self._tiles[name].descriptor(x) if x is not None and name in self._tiles else x
            for name, x in tensors.items()
        }
        return self._kernel[self._grid](**given, **self._arguments)

    def _first(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Launches as Triton does, and keeps the compiled kernel if later launches may use it."""
        import triton
        from triton.compiler import CompiledKernel
        from triton.runtime import driver

        kernel = self._by_triton(tensors)
        if not isinstance(kernel, CompiledKernel) or kernel.metadata.target.backend != "cuda":
            return
        if not triton.__version__.startswith(_KNOWN) or any(
            x is not None and x.data_ptr() % _ALIGNMENT for x in tensors.values()
        ):
            return
        arguments = dict.fromkeys(self._kernel.arg_names) | {
            name: x for name, x in self._arguments.items() if name in self._kernel.arg_names
        }
        for name, x in tensors.items():
            if x is not None and name in self._tiles:
                arguments[name] = self._tiles[name].descriptor(x)
                arguments[name].base = None  # otherwise x would live as long as this launcher
        call, early = _by_driver(kernel, arguments), None
        if call is None:
            call = _by_kernel(kernel, arguments)
        elif self._arguments.get("AHEAD"):
            early = (*call.options[:2], True, *call.options[3:])
        places = tuple(-1 if x is None else call.places[name] for name, x in tensors.items())
        dtypes = tuple(None if x is None else x.dtype for x in tensors.values())
        tiles = {call.places[name]: make for name, make in call.tiles.items()}
        grid = (*self._grid, 1, 1)[:3]
        active = driver.active
        current = active.get_current_device
        if current is torch.cuda.current_device:  # which looks first whether torch has initialized the GPU
            current = torch._C._cuda_getDevice
        about = (grid, current(), current, active.get_current_stream)
        of_tensors = (tuple(tensors), places, dtypes, tiles)
        self._compiled = _Compiled(*call[:4], early, *about, *of_tensors, triton.knobs.runtime)


class _Call(NamedTuple):
    launch: Callable  # this and the next three: as in `_Compiled`
    options: tuple
    separate: bool
    arguments: list
    places: Mapping[str, int]  # indices in the arguments, by name
    tiles: Mapping[str, Callable[[Tensor], Any]]  # by name


def _by_kernel(kernel: CompiledKernel, arguments: Mapping[str, Any]) -> _Call:
    """Returns a launch by the method of Triton's compiled kernel, which takes the arguments of all parameters."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    options = (kernel.function, kernel.packed_metadata, None, None, None)
    tiles = {name: partial(_with_base, x) for name, x in arguments.items() if isinstance(x, TensorDescriptor)}
    places = {name: i for i, name in enumerate(arguments)}
    return _Call(kernel.run, options, True, list(arguments.values()), places, tiles)


def _by_driver(kernel: CompiledKernel, arguments: Mapping[str, Any]) -> _Call | None:
    """Returns a launch by the function of Triton's driver for NVIDIA GPUs; None for code that needs more than that.

    The method of the compiled kernel calls the same function. Before that it prepares memory that the code does not
    need, and makes the descriptors of tensors at every launch.
    """
    from triton.backends.nvidia import driver as nvidia  # not every build of Triton has it
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    run, kinds = kernel.run, kernel.src.signature
    if not isinstance(run, nvidia.CudaLauncher) or run.global_scratch_size or run.profile_scratch_size:
        return None
    if list(kinds) != list(arguments) or any(not isinstance(kind, str) for kind in kinds.values()):
        return None
    one_for_all = hasattr(nvidia, "expand_signature")  # not in Triton 3.6, which builds a function for each signature
    metas = list(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    found: list[Any] = []
    places: dict[str, int] = {}
    tiles: dict[str, Callable[[Tensor], Any]] = {}
    for name, x in arguments.items():
        if one_for_all and kinds[name] == "constexpr":
            continue
        places[name] = len(found)
        if isinstance(x, TensorDescriptor):
            if not metas:
                return None
            tiles[name] = _Maps(nvidia.make_tensordesc_arg, x, metas[len(tiles)])
            found += [None, *x.shape, *x.strides]
        else:
            found.append(x.data_ptr() if isinstance(x, Tensor) else x)
    # The third is whether the kernel starts before the one before has ended.
    how, hooks, scratch = (kernel.function, run.launch_cooperative_grid, run.launch_pdl), (None,) * 3, (None,) * 2
    if not one_for_all:
        launch = inspect.getclosurevars(run.launch).nonlocals["launcher"] if tiles else run.launch
        return _Call(launch, (*how, *scratch, kernel.packed_metadata, *hooks), True, found, places, tiles)
    expanded = nvidia.expand_signature(kinds.values(), metas)
    annotations = [x for x, kind in zip(run.arg_annotations, expanded, strict=True) if kind != "constexpr"]
    options = (*how, kernel.packed_metadata, *hooks, *scratch, annotations, run.kernel_signature)
    return _Call(driver.active.utils.launch, options, False, found, places, tiles)


def _with_base(descriptor: TensorDescriptor, x: Tensor) -> TensorDescriptor:
    """Returns the descriptor of another tensor with the same shape and strides."""
    new: TensorDescriptor = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__, base=x)
    return new


class _Maps:
    """Makes what the hardware takes as the descriptor of a tensor, once for each address."""

    MOST = 256  # that are kept: a model has a few tensors for each layer

    def __init__(self, make: Callable, descriptor: TensorDescriptor, meta: Any):
        """Takes the driver's function, and what it is called with besides the tensor."""
        self._make, self._descriptor, self._meta = make, descriptor, meta
        self._kept: dict[int, Any] = {}

    def __call__(self, x: Tensor) -> Any:
        address = x.data_ptr()
        found = self._kept.get(address)
        if found is None:
            if len(self._kept) >= self.MOST:
                self._kept.clear()
            found = self._kept[address] = self._make(_with_base(self._descriptor, x), self._meta)[0]
        return found


_launchers: dict[tuple, Launcher] = {}
MOST_LAUNCHERS = 1024  # of one kind that are kept: a server sees many lengths


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **tensors: Tensor | None) -> None:
    """Launches a kernel by its `launcher_of` these arguments."""
    launcher_of(kernel, grid, arguments, tensors)(**tensors)


def launcher_of(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
) -> Launcher:
    """Returns the launcher of a kernel for these arguments, which must be numbers. It is made once.

    Of the tensors, it depends on which are None: with others, a launcher takes the way of Triton, which is slow.
    """
    key = (id(kernel), grid, *arguments.values(), *(x is None for x in tensors.values()))
    launcher = _launchers.get(key)
    if launcher is None:
        if len(_launchers) >= MOST_LAUNCHERS:
            _launchers.pop(next(iter(_launchers)))  # the oldest
        launcher = _launchers[key] = Launcher(kernel, grid, arguments)
    return launcher


def forget_launchers() -> None:
    """Forgets all launchers of `launch`, for tests that change what kernels are launched with."""
    _launchers.clear()


def _hooked(runtime: Any) -> bool:
    """Returns whether a profiler observes launches through Triton."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up. Triton's own function is made for kernels too, and takes ten times as long on the
    host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n; 0 for 0. It replaces Triton's own, see `ceil_div`."""
    return 1 << (int(n) - 1).bit_length() if n else 0


def padded_key_dim(key_dim: int) -> int:
    """Returns the K of tiles: a power of two, at least 16."""
    return max(16, 1 << (key_dim - 1).bit_length())


def processors(device: torch.device) -> int:
    """Returns the number of SMs of a GPU; a few for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache(maxsize=8)
def ahead(device: torch.device) -> dict[str, bool]:
    """Returns the argument of a kernel that can start before the kernel before has ended, by `gdc_wait` (PDL).

    That is so on NVIDIA GPUs since Hopper. Such a kernel waits before it reads what the kernel before has written, and
    before it writes anything. A `Launcher` lets it start early in CUDA graphs only: there it may read weights before it
    waits, because no kernel of a graph changes them. Elsewhere the kernel before may be the one that does.
    """
    nvidia = device.type == "cuda" and torch.version.hip is None
    return {"AHEAD": nvidia and torch.cuda.get_device_capability(device) >= (9, 0)}


@lru_cache(maxsize=8)
def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program can have: 64 KB where a device does not tell."""
    about = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(about, "shared_memory_per_block_optin", 64 << 10)


def sharing(rows: int, blocks: int, programs: int, device: torch.device) -> int:
    """Returns the number of programs that share `rows` blocks of rows, for each of `blocks` blocks of columns.

    A GPU then has about so many `programs` for each SM.
    """
    return min(rows, max(1, programs * processors(device) // blocks))
