"""Datasets of Hugging Face's hub that are streamed: the texts are read once, and kept as JSON lines in the cache.

A run that continues, and other runs on the same rows, read the kept file, so that they see the same tokens.
"""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from sympow.files import atomic_write, default_cache_dir, digest
from sympow.packages import from_extra

STREAM = "hf://datasets/"
_KEYS = ("config", "split", "revision", "rows")


def streamed(url: str, field: str) -> Path:
    """Returns a file of JSON lines with the texts of a dataset. It streams the dataset if the cache lacks the file.

    Args:
        url: "hf://datasets/OWNER/NAME", and after a "?" any of config=, split= ("train" if none is named), revision=
            and rows=, the number of rows to take from the beginning, joined by "&".
        field: the field of a row that holds the text, also its name in the file.

    Raises ImportError naming the missing extra; ValueError for other keys, for a number of rows that is none, for a
    dataset that cannot be read, and for a row without a text.
    """
    name, _, query = url.removeprefix(STREAM).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [key for key in options if key not in _KEYS]
    rows = options.pop("rows", None)
    if not name or unknown or (rows is not None and not (rows.isdecimal() and int(rows) > 0)):
        raise ValueError(f"expected {STREAM}OWNER/NAME?config=...&split=...&revision=...&rows=NUMBER, got {url!r}")
    path = default_cache_dir() / "streams" / f"{digest([url, field])}.jsonl.gz"
    if path.exists():
        return path
    texts = _rows(name, {"split": "train"} | options, url)
    with atomic_write(path) as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for number, row in enumerate(islice(texts, None if rows is None else int(rows)), start=1):
            if not isinstance(row.get(field), str):
                fields = ", ".join(map(repr, row))
                raise ValueError(
                    f"{url}, row {number}: expected a text in the field {field!r}, got {fields}: data.text_field names "
                    "the field of the text"
                )
            file.write(json.dumps({field: row[field]}, ensure_ascii=False).encode() + b"\n")
    return path


def _rows(name: str, options: dict[str, str], url: str) -> Any:
    with from_extra("stream", f"reading {url} needs datasets"):
        import datasets
    config = options.pop("config", None)
    try:
        yield from datasets.load_dataset(name, config, streaming=True, **options)
    except Exception as error:  # many kinds, of the hub, of the network and of files
        line = str(error).split("\n")[0]
        raise ValueError(f"{url} cannot be read: {type(error).__name__}: {line}") from error
