"""What the options of mixers must be: the types that their annotations name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sympow.fields import is_integer

_LARGEST = 2**63  # torch has no larger integers


def _is_integer(value: object) -> bool:
    return is_integer(value) and -_LARGEST <= value < _LARGEST


def _is_large(value: object) -> bool:
    """Tells whether a value is a larger integer, or a list with one."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(number, int) and not -_LARGEST <= number < _LARGEST for number in numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_integer(value)


# The annotations of options whose values are checked: what a value must be, in words, and whether one is that.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("an integer", _is_integer),
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
    if any(fits(value) for _, fits in kinds):
        return None
    return " or ".join(words for words, _ in kinds) + ", integers below 2**63 in size" * _is_large(value)


def certainly_wrong(parameter: inspect.Parameter, value: object) -> bool:
    """Tells whether no use of a value is meant: a text, a truth value or a huge integer as a number, a list as one.

    Numbers of NumPy and numbers as truth values are not certainly wrong.
    """
    listed = isinstance(value, list | tuple) and not any("Sequence" in name for name in _names(parameter))
    return wanted(parameter, value) is not None and (listed or _is_large(value) or isinstance(value, (bool, *_OTHERS)))


def _names(parameter: inspect.Parameter) -> list[str]:
    annotation = parameter.annotation
    return (annotation.__name__ if isinstance(annotation, type) else str(annotation)).split(" | ")
