"""What the options of mixers must be: the types that their annotations name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The annotations of options whose values are checked: what a value must be, in words, and whether one is that.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a number", _is_number),
    "str": ("a string", lambda value: isinstance(value, str)),
    "Sequence[float]": ("a list of numbers", lambda v: isinstance(v, list | tuple) and all(map(_is_number, v))),
    "Mapping[str, Any]": ("a dict", lambda value: isinstance(value, Mapping)),
    "None": ("None", lambda value: value is None),
}
_OTHERS = (str, bytes, complex, dict, set, type(None))  # types that no other annotation of an option stands for


def wanted(parameter: inspect.Parameter, value: object) -> str | None:
    """Returns what an option must be, in words; None for a value that it can have, or where the types are not known."""
    names = _names(parameter)
    if not all(name in _KINDS for name in names):
        return None
    kinds = [_KINDS[name] for name in names]
    return None if any(fits(value) for _, fits in kinds) else " or ".join(words for words, _ in kinds)


def certainly_wrong(parameter: inspect.Parameter, value: object) -> bool:
    """Tells whether no use of a value of this type is meant: a text or a truth value as a number, a list as a switch.

    Numbers of NumPy and numbers as truth values are not certainly wrong.
    """
    listed = isinstance(value, list | tuple) and not any("Sequence" in name for name in _names(parameter))
    return wanted(parameter, value) is not None and (listed or isinstance(value, (bool, *_OTHERS)))


def _names(parameter: inspect.Parameter) -> list[str]:
    annotation = parameter.annotation
    return (annotation.__name__ if isinstance(annotation, type) else str(annotation)).split(" | ")
