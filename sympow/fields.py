"""Reads fields of configs from JSON and from the command line, and checks values. Unknown fields are refused."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeGuard

# Names that other libraries give to fields and values.
_OTHERS = {
    "lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "seq_len": "context", "dtype": "precision",
    "bfloat16": "bf16", "file": "path", "dir": "path", "hidden_size": "d_model", "num_layers": "n_layers",
    "num_heads": "n_heads",
}  # fmt: skip


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns one line saying that `name` is no `kind`, with the nearest of the `known` names and all of them.

    Of dotted names the last parts are compared. For a name of another library it is the name here.
    """
    known = sorted(known)
    last = name.rpartition(".")[2]
    lasts = {each.rpartition(".")[2]: each for each in known}
    own = _OTHERS.get(last)
    nearest = [own] if own in lasts else difflib.get_close_matches(last, lasts, n=1, cutoff=0.6)
    hint = f"did you mean {lasts[nearest[0]]!r}? " if nearest else ""
    return f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}"


def read_fields(cls: type, values: Any, kind: str) -> dict[str, Any]:
    """Returns the keyword arguments of a dataclass in a dictionary.

    Args:
        cls: the dataclass.
        values: the dictionary, as JSON gives it.
        kind: what the config is of, for messages.

    Raises TypeError where `values` is no dictionary, and ValueError for a field that is unknown or missing.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"the {kind} config must be a dict of fields, got {values!r}")
    entries = {entry.name: entry for entry in fields(cls)}
    for name in values:
        if name not in entries:
            raise ValueError(unknown(f"{kind} field", str(name), entries))
    needed = (name for name, entry in entries.items() if entry.default is entry.default_factory is MISSING)
    missing = ", ".join(repr(name) for name in needed if name not in values)
    if missing:
        raise ValueError(f"the {kind} config needs the field {missing}")
    return dict(values)


def is_integer(value: object) -> TypeGuard[int]:
    """Tells whether a value is an integer, which True and False are not here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Tells whether a value is an integer or a float, which True and False are not here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_integer(name: str, value: object, least: int) -> None:
    """Raises TypeError for what is no integer, and ValueError for one below `least`."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def check_number(name: str, value: object) -> None:
    """Raises TypeError for what is no number, and ValueError for one that is not finite, or beyond all floats."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number; got {value!r}")
    if not abs(value) <= sys.float_info.max:  # also of an integer that no float holds
        raise ValueError(f"{name} must be finite; got {value!r:.40}")


def with_lists(value: Any) -> Any:
    """Returns `value` with lists for tuples, as JSON gives them back: a config equals itself after a round trip."""
    if isinstance(value, Mapping):
        return {key: with_lists(item) for key, item in value.items()}
    return [with_lists(item) for item in value] if isinstance(value, list | tuple) else value
