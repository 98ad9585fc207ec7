"""Files beside a tokenizer.json: its special tokens, the tokens that end a text, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sympow.data.files import write_text
from sympow.data.tokens import Tokenizer

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
BESIDE = (CONFIG, GENERATION, "special_tokens_map.json", "chat_template.jinja")
"""Files by their names in folders of Hugging Face transformers."""


def read_beside(folder: Path) -> dict[str, str]:
    """Returns the texts of those of `BESIDE` that a folder has, by name."""
    return {name: (folder / name).read_text(encoding="utf-8") for name in BESIDE if (folder / name).is_file()}


def write_beside(files: Mapping[str, str], folder: Path) -> None:
    """Writes texts by name, as `read_beside` returns them, into a folder."""
    for name, text in files.items():
        write_text(folder / name, text)


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Returns the content of `tokenizer_config.json`, or {} if there is no such file."""
    return _content(folder / CONFIG)


def token_text(entry: Any) -> str | None:
    """Returns the text of a special token, which is a string or an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def end_tokens(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """Returns the tokens that end a text: those of `generation_config.json`, or the tokenizer's eos_token."""
    named = _content(folder / GENERATION).get("eos_token_id")
    if named is not None:
        return set(named if isinstance(named, list) else [named])
    text = token_text(tokenizer_config(folder).get("eos_token"))
    tokens = [] if text is None else tokenizer.encode(text).tolist()
    return set(tokens) if len(tokens) == 1 else set()


def json_object(file: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises ValueError naming the file for other content, OSError if the file cannot be read.
    """
    try:
        content = json.loads(file.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object; got {type(content).__name__}")
    return content


def _content(file: Path) -> dict[str, Any]:
    return json_object(file) if file.is_file() else {}
