"""The chat template of a tokenizer, which turns messages into the text that the model continues."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from sympow.data.tokenizer_files import special_tokens, tokenizer_config
from sympow.serving.http.errors import ApiError
from sympow.serving.http.sandbox import BoundedEnvironment, bounded


class ChatTemplate:
    """Renders messages by a template in the form of Hugging Face tokenizers.

    Args:
        source: in Jinja; it runs in a sandbox, within bounds of steps and sizes.
        **tokens: special tokens by name, such as bos_token="<s>".

    Raises ValueError if `source` is no template.
    """

    def __init__(self, source: str, /, **tokens: str):
        self._environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self._environment.filters["tojson"] = bounded("tojson", _to_json)
        self._environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # templates are programs, which Python compiles
            raise ValueError(f"the chat template cannot be read: {_line(error)}") from None
        self._tokens = tokens

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate | None:
        """Returns the template in `chat_template.jinja` or `tokenizer_config.json` of a folder, or None.

        Of several templates it is the one with the name "default". Raises ValueError for a template that is no text.
        """
        config = tokenizer_config(folder)
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((each.get("template") for each in source if _is_default(each)), None)
        if source is None:
            return None
        if not isinstance(source, str):
            raise ValueError(f"{folder}: expected a text as chat_template, got {type(source).__name__}")
        return cls(source, **special_tokens(folder))

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Returns the text before the answer. Raises ApiError 400 for messages on which the template fails."""
        given = self._tokens | {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._environment.render(self._template, given)
        except Exception as error:  # templates are programs, which fail in any way
            raise ApiError(400, f"the chat template refuses these messages: {_line(error)}", param="messages") from None


class _Generation(Extension):
    """Reads the tag `generation`, which marks answers for training. The text in it is part of the text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _is_default(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("name") == "default"


def _line(error: BaseException) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:300]
