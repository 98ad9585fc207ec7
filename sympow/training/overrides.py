"""`key.path=value` on a config: each value is read as the type of the field it goes to."""

import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sympow.fields import unknown
from sympow.files import parsed_json

C = TypeVar("C")


def override(config: C, assignments: Sequence[str]) -> C:
    """Returns a copy of a dataclass with some fields set, nested ones by dotted names: "training.learning_rate=1e-3".

    Tuples of plain values are written with commas (0.9,0.95), and None as none. Elements of a tuple of groups are named
    by number (model.mixers.0.name=softmax). Entries of a dict are named by key, and their values are read as JSON, or
    as strings if they are not JSON (model.mixers.0.options.p=4). All fields are set at once, so that values that depend
    on each other can be changed together.

    Raises ValueError in one line for an assignment that is not key=value, an unknown field, a field that is set twice,
    and a value that is not of its field's type.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not key or not equals:
            raise ValueError(f"an override is written key=value, got {assignment!r}")
        *parents, last = key.split(".")
        group = tree
        for name in parents:
            group = group.setdefault(name, {})
            if not isinstance(group, dict):
                break
        if not isinstance(group, dict) or last in group:
            raise ValueError(f"{key} is set twice")
        group[last] = value
    return _apply(config, type(config), tree, "")


def _apply(value: Any, kind: Any, change: Any, path: str) -> Any:
    """Returns `value`, of type `kind`, after `change`: a text that replaces it, or a dict of changes to its fields."""
    if isinstance(change, str):
        return _read(change, kind, path)
    prefix = f"{path}." if path else ""
    if is_dataclass(value) and not isinstance(value, type):
        kinds = get_type_hints(type(value))
        names = [field.name for field in fields(value)]
        for name in change:
            if name not in names:
                raise ValueError(unknown("field", prefix + name, [prefix + known for known in names]))
        changed = {k: _apply(getattr(value, k), kinds[k], part, prefix + k) for k, part in change.items()}
        return replace(value, **changed)
    if isinstance(value, tuple):
        items = list(value)
        for name, part in change.items():
            if not name.isdecimal() or int(name) >= len(items):
                raise ValueError(f"{path} has the elements 0 to {len(items) - 1}, not {name!r}")
            items[int(name)] = _apply(items[int(name)], type(items[int(name)]), part, prefix + name)
        return tuple(items)
    if isinstance(value, dict):
        return {**value, **{name: _apply(value.get(name), Any, part, prefix + name) for name, part in change.items()}}
    raise ValueError(f"{path} is a single value; it has no field {next(iter(change))!r}")


def _read(text: str, kind: Any, path: str) -> Any:
    """Returns `text` as a value of the type `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() == "none":
            return None
        choices = [argument for argument in arguments if argument is not type(None)]
        for choice in choices[:-1]:
            try:
                return _read(text, choice, path)
            except ValueError:
                continue
        return _read(text, choices[-1], path)
    if origin is Literal:
        for choice in arguments:
            if text == str(choice):
                return choice
        raise ValueError(f"{path} is one of {', '.join(map(str, arguments))}, got {text!r}")
    groups = get_args(arguments[0]) or arguments if origin is tuple else ()  # one type, or any of several
    if groups and is_dataclass(groups[0]):
        names = ", ".join(f"{path}.0.{field.name}" for field in fields(groups[0]))
        raise ValueError(f"{path} is a list of groups of fields; set one of {names}")
    if origin is tuple:
        if text.lower() == "none" and len(arguments) == 2 and arguments[1] is Ellipsis:
            return ()
        parts = [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
        open_ended = len(arguments) == 2 and arguments[1] is Ellipsis
        if not open_ended and len(parts) != len(arguments):
            raise ValueError(f"{path} takes {len(arguments)} values with commas between, got {text!r}")
        kinds = [arguments[0]] * len(parts) if open_ended else arguments
        return tuple(_read(part, part_kind, path) for part, part_kind in zip(parts, kinds, strict=True))
    if is_dataclass(kind):
        names = ", ".join(f"{path}.{field.name}" for field in fields(kind))
        raise ValueError(f"{path} is a group of fields; set one of {names}")
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{path} takes true or false, got {text!r}")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            name = "an integer" if kind is int else "a number"
            raise ValueError(f"{path} takes {name}, got {text!r}") from None
    if kind is str:
        return text
    if kind is Any:
        try:
            return parsed_json(text)
        except ValueError:
            return text
    raise ValueError(f"{path} cannot be set by an override; set one of its parts, or write a recipe")
