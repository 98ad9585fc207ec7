"""The configuration of a run's data, which JSON can represent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from sympow.fields import is_number, read_fields, with_lists

KINDS = ("stdlib", "text", "zarr", "tokens")
TOKEN_KINDS = ("zarr", "tokens")
GROUPS = ("file", "folder")

# Fields that apply to some kinds only. For other kinds they must have their defaults, so that no value is ignored.
_APPLIES = {
    "path": ("text", "zarr", "tokens"),
    "paths": ("text", "zarr", "tokens"),
    "weights": ("text", "zarr", "tokens"),
    "held_out_path": ("text", "zarr", "tokens"),
    "group": ("text",),
    "suffixes": ("text",),
    "text_field": ("text",),
    "end_token": ("tokens",),
    "storage_options": ("zarr",),
}

_TUPLES = ("paths", "weights", "suffixes")


@dataclass(frozen=True)
class DataConfig:
    """Describes which documents are read, and in which tokens.

    Attributes:
        kind: "stdlib": the source of Python's standard library on this machine. "text": a text file, a file with a
            text in each row, or a folder of them, see `find_texts`. "zarr": tokens in the LongCrawl64 layout, a zarr
            array of documents x tokens. "tokens": a .bin file of tokens, or a folder of them, see `open_token_files`.
        path: "text", "tokens": file or folder; "text" also a dataset to stream, see `find_texts`. "zarr": local path or
            fsspec URL of an array, or of a group holding one.
        paths: several paths, instead of `path`. Batches take tokens from them in the proportions of `weights`.
        weights: a number above 0 for each of `paths`.
        held_out_path: as `path`, documents kept for evaluation; without it `held_out` splits those at each path.
        tokenizer: "bpe": a byte-level BPE trained on the training documents. "bytes": UTF-8 bytes. "none": only for
            "zarr" and "tokens"; the text of the tokens is then unknown. Any other value is the path of a
            tokenizer.json or of a folder with one.
        vocab_size: for "bpe", the size to train, by default 2,048. For "none" it is required. For other tokenizers it
            is None or equal to the tokenizer's size.
        group: "text": a document per "file", or per "folder" (the files directly in it, in sorted order).
        suffixes: "text": file name endings to read, such as (".py", ".md"); empty: every text file.
        text_field: "text": the field of the rows of JSON lines, Parquet and Arrow files that holds the text.
        end_token: "tokens": the token that separates documents; None: each file is one document.
        held_out: fraction of the documents kept for evaluation, above 0 and below 1. With `held_out_path` it
            has no effect: a recipe may set a fraction, and a user the path. A command refuses a user's own fraction.
        seed: chooses the held-out documents, if `held_out` does; the order of training is the trainer's seed.
        pack: whether batches also hold documents and document tails shorter than the context, see `Batches`.
        storage_options: "zarr": for fsspec, JSON values such as {"token": "anon"}. Tuples become lists.

    Raises ValueError for a value that is unknown or does not apply to the kind, TypeError for one of a wrong
    type.
    """

    kind: str = "stdlib"
    path: str | None = None
    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    held_out_path: str | None = None
    tokenizer: str = "bpe"
    vocab_size: int | None = None
    group: str = "file"
    suffixes: tuple[str, ...] = ()
    text_field: str = "text"
    end_token: int | None = None
    held_out: float = 0.1
    seed: int = 0
    pack: bool = True
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "storage_options", with_lists(self.storage_options))
        _check_choice("kind", self.kind, KINDS)
        _check_choice("group", self.group, GROUPS)
        for name, kinds in _APPLIES.items():
            if self.kind not in kinds and getattr(self, name) != _defaults()[name]:
                raise ValueError(f"data {name} does not apply to kind {self.kind!r}, got {getattr(self, name)!r}")
        if self.kind != "stdlib" and not self.path and not self.paths:
            raise ValueError(f"data kind {self.kind!r} needs a path: set data.path")
        if self.path is not None and self.paths:
            raise ValueError(f"data takes path or paths, got {self.path!r} and {list(self.paths)}: set one to none")
        if len(self.weights) != len(self.paths) or not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(f"data weights must be a number above 0 for each of paths, got {list(self.weights)} for "
                             f"{list(self.paths)}")  # fmt: skip
        if not 0 < self.held_out < 1:
            raise ValueError(f"data held_out must be above 0 and below 1, got {self.held_out}")
        if self.seed < 0:
            raise ValueError(f"data seed must not be negative, got {self.seed}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"data vocab_size must be positive, got {self.vocab_size}")
        if self.end_token is not None and self.end_token < 0:
            raise ValueError(f"data end_token must not be negative, got {self.end_token}")
        if self.tokenizer == "none" and self.kind not in TOKEN_KINDS:
            raise ValueError(f"data tokenizer 'none' is for kind 'zarr' or 'tokens'; kind {self.kind!r} is text")
        if self.tokenizer == "none" and self.vocab_size is None:
            raise ValueError("data tokenizer 'none' needs vocab_size, the number of different tokens")
        if self.tokenizer == "bpe" and self.kind in TOKEN_KINDS:
            raise ValueError(
                f"data kind {self.kind!r} holds tokens already: tokenizer must be 'none', 'bytes' or a path"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        lists = {name: list(plain[name]) for name in _TUPLES}
        return plain | lists | {"storage_options": dict(self.storage_options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataConfig:
        """Returns the config of `to_dict`'s values.

        Fields left out keep their defaults; unknown ones raise ValueError.
        """
        values = read_fields(cls, values, "data")
        for name in _TUPLES:
            if isinstance(values.get(name), list):  # JSON has no tuples
                values[name] = tuple(values[name])
        return cls(**values)

    def _check_types(self) -> None:
        optional: dict[str, Any] = {"path": str, "held_out_path": str, "vocab_size": int, "end_token": int}
        required: dict[str, Any] = {
            "kind": str,
            "tokenizer": str,
            "group": str,
            "text_field": str,
            "held_out": (int, float),
            "seed": int,
            "pack": bool,
        }
        types: dict[str, Any] = optional | required | dict.fromkeys(_TUPLES, tuple)
        types["storage_options"] = Mapping
        for name, kind in types.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
                raise TypeError(f"data {name} must be {wanted}, got {value!r}")
        for name in ("held_out_path", "tokenizer"):
            if getattr(self, name) == "":  # which would mean the current folder
                raise ValueError(f"data {name} cannot be empty")
        if not all(isinstance(path, str) and path for path in self.paths):
            raise TypeError(f"data paths must be strings that are not empty, got {list(self.paths)}")
        if not all(map(is_number, self.weights)):
            raise TypeError(f"data weights must be numbers, got {list(self.weights)}")
        if not all(isinstance(suffix, str) and suffix.startswith(".") for suffix in self.suffixes):
            raise ValueError(f"data suffixes must be strings that start with a dot, got {list(self.suffixes)}")


def _defaults() -> dict[str, Any]:
    return {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(DataConfig)}


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"data {name} must be one of {', '.join(choices)}, got {value!r}")
