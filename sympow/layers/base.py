"""The contract of all sequence mixers: `Mixer`.

Axes: B batch, T time, H query heads, G key/value heads (H is a multiple of G), K key dim, V value dim,
d model width.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _all

from sympow.layers.float32_linear import Float32Linear
from sympow.layers.initial import init_linear
from sympow.layers.other_names import explained, renamed_call
from sympow.layers.state import (
    After,
    Device,
    DType,
    Form,
    MixerState,
    check_batch,
    check_form,
    checking_batch,
    form_of,
    try_by_copies,
)
from sympow.ops.availability import autocast_dtype
from sympow.ops.fused.step_products import Norm, takes_step
from sympow.ops.types import OutOfRangeError


class Mixer(nn.Module, ABC):
    """Maps a sequence to a sequence, [B, T, d] -> [B, T, d], causally, and can also run token by token.

    Learned tensors are parameters, and constants that are saved with them are buffers. `reset_parameters` fills both,
    because models are made on the meta device.

    Args:
        d_model: d, the width of the input and of the output.
        n_heads: H. A mixer without heads takes this argument too, but does not use it.

    Attributes:
        causal: row t of the output depends on rows 0..t of the input only. A mixer that is not causal cannot be
            stepped: its `init_state`, `step` and `state_size` raise NotImplementedError.
        reads_tokens: `forward` and `step` need the keyword `tokens`, int64 [B, T], the ids of the tokens of x.
        shifts_tokens: the mixer mixes every token with the one before and gates its output, as those of RWKV do.
        holds_mixer: the options `mixer` and `options` name another mixer, which is a part of this mixer.
        layer_index: the number of the mixer's layer in its model, from 0. Fixed random numbers depend on it.

    Raises ValueError for options it does not know or that do not fit.
    """

    causal: bool = True
    reads_tokens: bool = False
    shifts_tokens: bool = False
    holds_mixer: bool = False
    layer_index: int = 0
    context_group: dist.ProcessGroup | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = explained(cls.__init__)  # type: ignore[method-assign]
        if "init_state" in vars(cls):
            cls.init_state = checking_batch(cls.init_state)  # type: ignore[method-assign]

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        if min(d_model, n_heads) < 1:
            raise ValueError(f"d_model and n_heads must be positive; got {d_model=}, {n_heads=}")
        self.d_model, self.n_heads = d_model, n_heads

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls `forward`. Raises TypeError for an argument of other libraries, which says what to pass instead."""
        try:
            return super().__call__(*arguments, **options)
        except TypeError as error:
            renamed = renamed_call(self, error, options)
            if renamed is error:
                raise
            raise renamed from error

    @abstractmethod
    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mixes whole sequences.

        Args:
            x: [B, T, d], T >= 1.
            cu_seqlens: int [N + 1], where the N packed documents of a single row start and end: B = 1, first
                0, last T. Documents do not see each other.

        Returns:
            [B, T, d].
        """

    @abstractmethod
    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MixerState:
        """Returns the state before the first token, for `batch_size` sequences.

        `device` is the device of the weights by default. `dtype` is the dtype of cached keys and values, by default
        that of the weights. Sums over the past are kept in float32 at least.

        Raises TypeError or ValueError for a `batch_size` that is no number of sequences. Mixers with heads raise
        ValueError for a state that is larger than the free memory.
        """

    @abstractmethod
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Continues sequences by T' >= 1 tokens: x [B, T', d] -> (y [B, T', d], the state after them).

        The results equal those of `forward` on the whole sequence, for every way to cut the sequence. If gradients are
        off, the given state may be overwritten.
        """

    def try_step(self, x: Tensor, state: Any, **extras: Tensor | None) -> tuple[Tensor, After]:
        """Continues sequences by tokens that can still be taken back: x [B, T', d] -> (y [B, T', d], `After`).

        y is the output of `step`. after(n) returns the state after the first n tokens, for n from 0 to T'. The given
        state must not be used again. Gradients must be off. `after` raises TypeError or ValueError for another number.
        The method of this class steps copies of the state, token by token.
        """
        return try_by_copies(self.step, x, state, extras)

    def steps_in_block(self, x: Tensor) -> bool:
        """Returns whether `step_in_block` steps x [B, 1, d], which a few sequences on a device with kernels are."""
        return False

    def step_in_block(self, x: Tensor, norm: Norm, state: Any) -> tuple[Tensor, Any]:
        """Steps within a block, by few kernels: x [B, 1, d] -> (x + y, the state), y that of `step` for norm(x).

        Mixers override it together with `steps_in_block`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step by few kernels")

    @abstractmethod
    def state_size(self, context: int) -> int:
        """Returns the number of elements the state holds for a sequence after `context` tokens, spare room included."""

    def set_layer(self, layer: int) -> None:
        """Sets `layer_index` of this mixer and of the mixers in it."""
        for part in self.modules():
            if isinstance(part, Mixer):
                part.layer_index = layer

    def split_context(self, group: dist.ProcessGroup) -> None:
        """Makes `forward` take this rank's part of every row from now on, and return that part of the row's result.

        The ranks of `group` have the parts in their order, all of one length. Every rank calls `forward`, and its
        backward. `step` still takes whole rows, and packed documents (`cu_seqlens`) are refused.

        Raises ValueError if the mixer cannot split rows. Mixers that can split rows override this method.
        """
        raise ValueError(
            f"{type(self).__name__} cannot split a row over ranks (context parallelism); power and linear attention can"
        )

    def training_flops(self, time: int) -> int | None:
        """Counts the FLOPs of mixing one row of `time` tokens, forward and backward; None: not counted.

        The projections are left out. The FLOPs are those of the cheapest form, as `sympow.ops.cost` counts them,
        also if another form is executed.
        """
        return None

    def fused(self) -> dict[str, list[int]]:
        """Names the linear layers of this module whose weight holds several matrices, one above another.

        Returns the rows of every matrix, by the name of the layer. An optimizer that treats a weight as a matrix
        (`sympow.training.muon`) treats each of them by itself. Parts of the module that are mixers name theirs.
        """
        return {}

    @classmethod
    def parts(cls, options: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """Returns the mixers within a mixer that is made with `options`, each as its name and its options.

        The key is the option that holds the options of the mixer within. By default this is "options" if the mixer
        holds another one, see `holds_mixer`.

        Raises ValueError for options that exclude each other.
        """
        known = cls.option_parameters()
        if not cls.holds_mixer or "mixer" not in known:
            return {}
        name = options.get("mixer", known["mixer"].default)
        return {} if name in (None, inspect.Parameter.empty) else {"options": (name, options.get("options") or {})}

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Returns the keyword options of the constructor."""
        return tuple(cls.option_parameters())

    @classmethod
    def option_parameters(cls) -> dict[str, inspect.Parameter]:
        """Returns the keyword options of the constructor, and those that it passes on by `**`, with their defaults."""
        options: dict[str, inspect.Parameter] = {}
        for base in cls.__mro__:
            if not issubclass(base, Mixer) or "__init__" not in vars(base):
                continue
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            options |= {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in options}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return options

    def reset_parameters(
        self, *, std: float = 0.02, out_std: float | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Draws weights as GPT-2 does: N(0, std), biases 0, norms 1, the output projection `out` N(0, out_std).

        `out_std` defaults to `std`. The weights are drawn on the CPU, so that a seed gives the same weights on every
        device. At the end, the method calls `reset_own_parameters`.
        """
        out = getattr(self, "out", None)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                own = out_std if module is out and out_std is not None else std
                init_linear(module, own, generator)
            elif isinstance(module, Float32Linear):
                module.reset_parameters(std, generator)
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm | nn.GroupNorm):
                module.reset_parameters()
        self.reset_own_parameters(generator)

    def reset_own_parameters(self, generator: torch.Generator | None) -> None:
        """Fills the parameters that need a special initialisation. By default there are none.

        Mixers override this method. They override `reset_parameters` only if none of its rules holds for them.
        """
        return

    def extras(self, tokens: Tensor | None) -> dict[str, Tensor | None]:
        """Returns what `forward` and `step` need besides x, as keywords: {"tokens": tokens} or nothing.

        See `reads_tokens`.
        """
        return {"tokens": tokens} if self.reads_tokens else {}

    def check_step(self, x: Tensor, state: Any, weight: Tensor | None) -> None:
        """Raises the errors of `check_input`, and an error if `state` is no state of this mixer for the rows of x."""
        self.check_input(x, weight)
        check_batch(state, x.shape[0])
        check_form(state, self._state_form())

    def _state_form(self) -> Form:
        """Returns what all states of this mixer share; it is looked up once, on the meta device."""
        found: Form | None = self.__dict__.get("_form")
        if found is None:
            found = self._form = form_of(self.init_state(1, device="meta"))
        return found

    def naming_weights(self, x: Tensor, error: OutOfRangeError) -> OutOfRangeError:
        """Returns the error that names the weights, or the input x [B, T, d], whose values caused `error`."""
        names = [name for name, weight in self.state_dict().items() if not weight.isfinite().all()]
        if names:
            return OutOfRangeError(f"weights of {type(self).__name__} are not finite: {', '.join(names)}")
        return error if x.isfinite().all() else OutOfRangeError(f"the input of {type(self).__name__} is not finite")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        refuse_other_kinds(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def check_input(self, x: Tensor, weight: Tensor | None) -> None:
        """Raises TypeError or ValueError if x is not [B, T >= 1, d], or not of the device and dtype of `weight`.

        A weight of None takes any device and dtype, see `own_weight`.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor; got {type(x).__name__}")
        if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != self.d_model:
            raise ValueError(f"x must be [B, T >= 1, {self.d_model}]; got {list(x.shape)}")
        if weight is None:
            return
        if x.device != weight.device:
            raise ValueError(f"x must be on the device of the weights, {weight.device}; got {x.device}")
        if x.is_complex() or weight.is_complex():
            raise TypeError(f"x and the weights must be real; got x {x.dtype}, weights {weight.dtype}")
        if x.dtype != weight.dtype and autocast_dtype(x) is None:
            raise TypeError(f"x must have the dtype of the weights, {weight.dtype}, or autocast be on; got {x.dtype}")


def refuse_other_kinds(module: nn.Module, weights: Mapping[str, Any], prefix: str = "") -> None:
    """Raises TypeError for weights of `module` that are complex or integers.

    Loading them would lose the imaginary part, or the scale of quantized weights.

    Args:
        module: the module that loads.
        weights: by name.
        prefix: what stands before the names of the module's own weights.
    """
    for name, own in module.state_dict(keep_vars=True).items():
        given = weights.get(prefix + name)
        if isinstance(given, Tensor) and own.is_floating_point() and not given.is_floating_point():
            wanted = "real" if given.is_complex() else "floating-point numbers"
            raise TypeError(f"weights must be {wanted}; got {prefix + name} of {given.dtype}")


def state_options(
    weight: Tensor, device: torch.device | str | None, dtype: torch.dtype | None, *, sums: bool = False
) -> dict[str, Any]:
    """Returns device and dtype of a state: those of `weight` unless they are given; float32 at least for `sums`.

    See `Mixer.init_state`. Raises TypeError for a dtype that cannot hold fractions, which a step would round off, and
    for float64 where the weights are not.
    """
    dtype = weight.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise TypeError(f"the dtype of a state must be a floating-point type; got {dtype}")
    if dtype == torch.float64 != weight.dtype:
        raise TypeError(f"a state of torch.float64 continues weights of torch.float64; got weights of {weight.dtype}")
    dtype = torch.promote_types(dtype, torch.float32) if sums else dtype
    return {"device": weight.device if device is None else device, "dtype": dtype}


def holds_numbers(weight: Any) -> bool:
    """Tells whether a tensor holds weights as numbers that products take: no packed or 8-bit weights."""
    if not isinstance(weight, Tensor) or weight.dtype.itemsize < 2:
        return False
    return weight.is_floating_point() or weight.is_complex()


def own_weight(linear: nn.Module) -> Tensor | None:
    """Returns the weight of a linear layer; None for a quantized layer, which has packed weights or other names."""
    weight = getattr(linear, "weight", None)
    return weight if holds_numbers(weight) else None


def any_weight(mixer: nn.Module, linear: nn.Module) -> Tensor:
    """Returns a weight with the device and the dtype of a mixer's weights: that of `linear`, one of its linear layers.

    If it is quantized, this is another weight of the mixer that is not, or an empty tensor of torch's default dtype.
    """
    weight = own_weight(linear)
    if weight is None:
        tensors = [*mixer.parameters(), *mixer.buffers()]
        device = next((tensor.device for tensor in tensors), None)
        weight = next(filter(holds_numbers, mixer.parameters()), torch.empty(0, device=device))
    return weight


def is_plain(part: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Tells whether a part of a model is exactly of one of these classes, and a call runs the `forward` of that class.

    It does more if the part has hooks, also such as all modules have, or a `forward` of its own.
    """
    hooks = (
        part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks,
        _all._global_forward_hooks, _all._global_forward_pre_hooks,
        _all._global_backward_hooks, _all._global_backward_pre_hooks,
    )  # fmt: skip
    if type(part) not in kinds or any(hooks):
        return False
    # Compiled code notices when this changes. It does not notice new names in vars(part).
    return getattr(part.forward, "__func__", None) is type(part).forward


def is_as_made(part: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Tells whether a part of a model is plain, see `is_plain`, and its weights are not computed from others."""
    if not is_plain(part, *kinds):
        return False
    weights = (part.weight, getattr(part, "bias", None))
    return all(each is None or isinstance(each, nn.Parameter) for each in weights)


def multiplies(linear: nn.Module, outputs: int, inputs: int) -> bool:
    """Tells whether `linear` is a linear layer as it was made, with a weight of this shape."""
    return is_as_made(linear, nn.Linear, Float32Linear) and linear.weight.shape == (outputs, inputs)


def takes_kernels_of_step(x: Tensor, tensors: Sequence[Tensor | None] = ()) -> bool:
    """Tells whether `step_products` computes a step of x [B, 1, d] with these weights, and loses no derivatives."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    return takes_step(x, tensors)
