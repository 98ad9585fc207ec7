"""The size tables of docs/math.md for any model shape: state dimensions, states, weight-state FLOP ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sympow.ops.cost import ModelShape, format_bytes, format_ratio, power_state, softmax_state, weight_state_flop_ratio
from sympow.ops.feature_map import spow_dim, tpow_dim

POWERS = (2, 3, 4, 5, 6, 8)
CONTEXTS = (1024, 8192, 65_536, 1_000_000)
WINDOW = 8192
_LARGEST_POWER = 256  # sizes grow as key_dim**p, and Python prints up to 4,300 digits


@dataclass(frozen=True)
class Column:
    """Holds a column: its name in JSON, its heading in text, and how its values are printed."""

    name: str
    heading: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Table:
    """Holds a named table of plain values."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]

    def text(self) -> str:
        """Returns the table in aligned columns under its title."""
        lines = [[column.heading for column in self.columns]]
        lines += [[column.show(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]
        widths = [max(len(cell) for cell in cells) for cells in zip(*lines, strict=True)]
        padded = (
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        )
        return "\n".join([self.title, *(line.rstrip() for line in padded)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the table for JSON: name, title and a dictionary for each row, of exact numbers."""
        names = [column.name for column in self.columns]
        return {
            "name": self.name,
            "title": self.title,
            "rows": [dict(zip(names, row, strict=True)) for row in self.rows],
        }


def size_tables(
    shape: ModelShape,
    *,
    powers: Sequence[int] = POWERS,
    contexts: Sequence[int] = CONTEXTS,
    window: int = WINDOW,
    element_bytes: int = 2,
) -> list[Table]:
    """Returns the tables of a model shape, e.g. of `ModelShape.of(*sympow.models.PRESETS["small"])`.

    Args:
        shape: the sizes of the model.
        powers: the p of power attention, in the tables of states; at most 256.
        contexts: in tokens, for what grows with the context and for the ratios.
        window: of window attention, in tokens.
        element_bytes: bytes of an element of a state.
    """
    if not powers or not contexts or element_bytes < 1:
        raise ValueError(
            f"sizes need at least one power, one context and one byte an element, got powers={list(powers)}, "
            f"contexts={list(contexts)}, element_bytes={element_bytes}"
        )
    if max(powers) > _LARGEST_POWER:
        raise ValueError(f"sizes are computed up to p = {_LARGEST_POWER}, got powers={list(powers)}")
    return [
        _dimensions(shape, powers),
        _power_states(shape, powers, element_bytes),
        _other_states(shape, contexts, window, element_bytes),
        _ratios(shape, powers, contexts, window),
    ]


def _dimensions(shape: ModelShape, powers: Sequence[int]) -> Table:
    rows = ((p, tpow_dim(shape.key_dim, p), spow_dim(shape.key_dim, p)) for p in powers)
    columns = (
        Column("p", "p"),
        Column("tpow", "tensor power", _count),
        Column("spow", "symmetric power", _count),
        Column("saving", "saving", lambda saving: f"{saving:.1%}"),
    )
    title = f"State dimension D at key dim {shape.key_dim}"
    return Table("dimension", title, columns, tuple((*row, 1 - row[2] / row[1]) for row in rows))


def _power_states(shape: ModelShape, powers: Sequence[int], element_bytes: int) -> Table:
    def elements(p: int, basis: str) -> int:
        held = power_state(shape.key_dim, shape.value_dim, p, kv_heads=shape.n_kv_heads, basis=basis)
        return shape.n_layers * held

    columns = (
        Column("p", "p"),
        Column("tpow_bytes", "tensor power", format_bytes),
        Column("spow_bytes", "symmetric power", format_bytes),
        Column("spow_elements", "elements", _count),
    )
    rows = (
        (p, elements(p, "tpow") * element_bytes, elements(p, "spow") * element_bytes, elements(p, "spow"))
        for p in powers
    )
    title = f"State of power attention, {_described(shape)}, {element_bytes} bytes an element, normalizer counted"
    return Table("power_state", title, columns, tuple(rows))


def _other_states(shape: ModelShape, contexts: Sequence[int], window: int, element_bytes: int) -> Table:
    def cache(context: int, window: int | None = None) -> int:
        return softmax_state(context, shape.key_dim, shape.value_dim, kv_heads=shape.n_kv_heads, window=window)

    linear = power_state(shape.key_dim, shape.value_dim, 1, kv_heads=shape.n_kv_heads, normalizer=False)
    held = [
        ("linear, no normalizer", linear),
        (f"window of {window:,}, full", cache(window)),
        *((f"softmax at {context:,}", cache(context)) for context in contexts),
    ]
    columns = (
        Column("attention", "attention"),
        Column("bytes", "state", format_bytes),
        Column("elements", "elements", _count),
    )
    rows = tuple((name, shape.n_layers * n * element_bytes, shape.n_layers * n) for name, n in held)
    title = f"State of other attention, {_described(shape)}, {element_bytes} bytes an element"
    return Table("other_state", title, columns, rows)


def _ratios(shape: ModelShape, powers: Sequence[int], contexts: Sequence[int], window: int) -> Table:
    kinds: list[tuple[str, dict[str, int]]] = [
        ("softmax", {}),
        ("linear", {"p": 1}),
        (f"window of {window:,}", {"window": window}),
    ]
    kinds += [(f"power, p = {p}", {"p": p}) for p in powers]
    columns = (
        Column("attention", "attention"),
        *(Column(f"at_{context}", f"{context:,}", format_ratio) for context in contexts),
    )
    rows = (
        (name, *(weight_state_flop_ratio(shape, context, **options) for context in contexts)) for name, options in kinds
    )
    title = "Weight-state FLOP ratio in training, by context (below 10 rounded to 1, above to 5)"
    return Table("weight_state_flop_ratio", title, columns, tuple(rows))


def _described(shape: ModelShape) -> str:
    return f"{shape.n_layers} layers of {shape.n_kv_heads} key/value heads, K = {shape.key_dim}, V = {shape.value_dim}"


def _count(number: int) -> str:
    return f"{number:,}"
