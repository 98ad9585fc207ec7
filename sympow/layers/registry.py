"""Finds mixers by name, or by import path, for configs, recipes and the command line."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sympow.layers.base import Mixer
from sympow.layers.option_types import wanted
from sympow.layers.other_names import option_hint


class MixerTable(Mapping[str, type[Mixer]]):
    """Maps names to mixers, which are imported when they are looked up."""

    def __init__(self, paths: Mapping[str, str]):
        """Takes the import path of every mixer, "module:Class"; modules are those of `sympow.layers`."""
        self._paths = dict(paths)

    def __getitem__(self, name: str) -> type[Mixer]:
        """Imports a mixer by its name."""
        module, _, attribute = self._paths[name].partition(":")
        return getattr(importlib.import_module(f"sympow.layers.{module}"), attribute)

    def __contains__(self, name: object) -> bool:
        """Tells whether there is such a name, without an import."""
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        """Lists the names."""
        return iter(self._paths)

    def __len__(self) -> int:
        """Counts the names."""
        return len(self._paths)

    def __or__(self, other: MixerTable) -> MixerTable:
        """Joins two tables."""
        return MixerTable(self._paths | other._paths)


MIXERS = MixerTable(
    {
        "power": "power:PowerAttention",
        "softmax": "softmax:SoftmaxAttention",
        "linear": "linear:LinearAttention",
        "window": "window:WindowAttention",
        "power_delta": "power_delta:PowerDeltaAttention",
        "hybrid_heads": "hybrid_heads:HybridHeads",
        "short_convolution": "short_convolution:ShortConvolution",
        "long_convolution": "zoology.long_convolution:LongConvolution",
        "base_conv": "zoology.base_conv:BaseConv",
        "hyena": "zoology.hyena:Hyena",
        "h3": "zoology.h3:H3",
        "liquid_s4": "zoology.liquid_s4:LiquidS4",
        "rwkv4": "zoology.rwkv4:RWKV4",
        "rwkv7": "rwkv7:RWKV7",
        "mamba": "mamba:Mamba",
        "retnet": "retnet:RetNet",
        "blocked_window": "blocked_window:BlockedWindowAttention",
        "programmatic_conv": "zoology.input_dependent_conv:ProgrammaticConv",
        "autocorrelation_conv": "zoology.input_dependent_conv:AutocorrelationConv",
        "selection": "zoology.selection:SelectiveAttention",
    }
)
# From flash-linear-attention: they need the extra `fla` and a GPU.
FLA_MIXERS = MixerTable(
    {"gla": "fla:GLA", "delta_net": "fla:DeltaNet", "gated_delta_net": "fla:GatedDeltaNet", "mamba2": "fla:Mamba2"}
)

_TRUSTED: ContextVar[bool] = ContextVar("sympow_trusted", default=False)


def mixer_class(name: str) -> type[Mixer]:
    """Finds a mixer of this package by its name, or a user's mixer by its import path, "package.module:Class".

    The module is imported at that moment, so that a config means the same in every process that can import it. Configs
    from files are checked by `check_trusted` first.

    Raises ValueError for an unknown name, and if the object at the path is not a subclass of `Mixer`; ImportError if
    the module cannot be imported.
    """
    every = MIXERS | FLA_MIXERS
    if isinstance(name, str) and name in every:
        return every[name]
    if not is_import_path(name):
        raise ValueError(f"a mixer is one of {', '.join(every)}, or package.module:Class; got {name!r}")
    found = imported(name, "mixer")
    if not (isinstance(found, type) and issubclass(found, Mixer)):
        module, _, attribute = name.partition(":")
        raise ValueError(f"{attribute} in {module} is no subclass of sympow.layers.Mixer; got {found!r}")
    return found


def is_import_path(name: object) -> bool:
    """Tells whether `name` is written as "package.module:attribute"."""
    module, colon, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


class UntrustedCodeError(ValueError):
    """Says that a config from a file names code that the caller has not allowed to be imported."""


@contextmanager
def trust_code(trusted: bool = True) -> Iterator[None]:
    """Lets the block read configs whose mixers are named by import path, and import the modules of these mixers.

    Outside of such a block, a config that is read from a file may name a mixer by import path only if the program has
    already imported the module of the mixer. A `MixerConfig` that a program makes itself needs no such block.

    Args:
        trusted: False changes nothing.
    """
    token = _TRUSTED.set(trusted or _TRUSTED.get())
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def check_trusted(name: object, options: object) -> None:
    """Raises UntrustedCodeError if reading a mixer's config would import a module that the caller has not allowed.

    Args:
        name: the mixer, as a config in a file names it.
        options: its options, which may name another mixer as "mixer", with its own "options".
    """
    module = name.partition(":")[0] if isinstance(name, str) and is_import_path(name) else None
    if module is not None and not _TRUSTED.get() and module not in sys.modules:
        raise UntrustedCodeError(
            f"the config names the mixer {name!r} by its import path, and importing runs code: if you trust it, allow "
            f"it by --trust-code, trust_remote_code=True or sympow.layers.trust_code(), or import {module} first"
        )
    if isinstance(options, Mapping) and "mixer" in options:
        check_trusted(options["mixer"], options.get("options"))


def imported(path: str, what: str) -> Any:
    """Returns what an import path names, None where its module has nothing of that name.

    Raises ImportError if the module cannot be imported. `what` is the word for the object in the error message.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ImportError(f"the module of the {what} {path!r} cannot be imported: {error}") from error


def check_mixer(name: str, options: Mapping[str, Any]) -> None:
    """Refuses options that the mixer does not have, and values of another type, also of mixers within it.

    Raises as `mixer_class` does, TypeError for options that are no dict, and ValueError otherwise.
    """
    mixer = mixer_class(name)
    if not isinstance(options, Mapping):
        raise TypeError(f"the options of the {name} mixer must be a dict; got {options!r}")
    known = mixer.option_parameters()
    for option, value in options.items():
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            hint = option_hint(option, known)
            raise ValueError(f"the {name} mixer has no option {option!r}{hint}{':' if hint[:1] == ';' else ';'} {has}")
        if words := wanted(known[option], value):
            raise ValueError(f"the option {option!r} of the {name} mixer must be {words}; got {value!r:.200}")
    for part in mixer.parts(options).values():
        check_mixer(*part)


def check_complete(name: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a missing option without which the mixer, or the one within it, cannot be made."""
    mixer = mixer_class(name)
    for parameter in inspect.signature(mixer).parameters.values():
        needed = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if needed and parameter.name not in options:
            raise ValueError(f"the {name} mixer needs the option {parameter.name!r}")
    for part in mixer.parts(options).values():
        check_complete(*part)


def make_mixer(name: str, d_model: int, n_heads: int, options: Mapping[str, Any]) -> Mixer:
    """Makes the mixer `name` of width `d_model`; raises as `check_mixer` does, and for options that do not fit."""
    check_mixer(name, options)
    check_complete(name, options)
    return mixer_class(name)(d_model, n_heads, **options)


def fill_options(name: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds options of `given` that the mixer has and that are not in `options`, also to mixers within the mixer."""
    mixer = mixer_class(name)
    known = mixer.option_names()
    filled = {option: value for option, value in given.items() if option in known} | dict(options)
    for option, (inner, own) in mixer.parts(options).items():
        added = {key: value for key, value in fill_options(inner, own, given).items() if own.get(key) != value}
        if added:
            filled[option] = dict(options.get(option) or {}) | added
    return filled
