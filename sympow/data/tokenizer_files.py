"""Files beside a tokenizer.json: its special tokens, the tokens that end a text, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sympow.data.tokens import Tokenizer
from sympow.files import write_text

CONFIG, GENERATION, SPECIAL = "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"
BESIDE = (CONFIG, GENERATION, SPECIAL, "chat_template.jinja")
"""Files by their names in folders of Hugging Face transformers."""


def read_beside(folder: Path) -> dict[str, str]:
    """Returns the texts of those of `BESIDE` that a folder has, by name. Raises as `beside_text`."""
    return {name: beside_text(folder / name) for name in BESIDE if (folder / name).is_file()}


def beside_text(file: Path) -> str:
    """Returns the text of one of `BESIDE`. Raises ValueError naming a file that is no UTF-8 text or no JSON object."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error.reason}") from None
    if file.suffix == ".json":
        json_object(file)
    return text


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


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens of a tokenizer by name, such as {"bos_token": "<s>"}.

    They are in `tokenizer_config.json`. Folders of older versions of transformers also have `special_tokens_map.json`.
    """
    config = tokenizer_config(folder)
    if "added_tokens_decoder" not in config:
        config = config | _content(folder / SPECIAL)
    named = {name: entry for name, entry in config.items() if name.endswith("_token")}
    more = config.get("extra_special_tokens")
    texts = {name: token_text(entry) for name, entry in (named | (more if isinstance(more, dict) else {})).items()}
    return {name: text for name, text in texts.items() if text is not None}


def end_tokens(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """Returns the tokens that end a text: those of `generation_config.json`, or the tokenizer's eos_token.

    Raises ValueError naming a file that is no JSON object, and for an `eos_token_id` that is no token of the
    tokenizer.
    """
    named = _content(folder / GENERATION).get("eos_token_id")
    if named is not None:
        ends = named if isinstance(named, list) else [named]
        wrong = [each for each in ends if type(each) is not int or not 0 <= each < tokenizer.vocab_size]
        if wrong:
            tokens = f"tokens from 0 to {tokenizer.vocab_size - 1:,}"
            raise ValueError(f"{folder / GENERATION}: expected {tokens} as eos_token_id, got {wrong[0]!r}")
        return set(ends)
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
