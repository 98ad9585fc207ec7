"""The chat template of a tokenizer, which turns messages into the text that the model continues."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sympow.data.tokenizer_files import token_text, tokenizer_config
from sympow.serving.http.errors import ApiError


class ChatTemplate:
    """Renders messages by a template in the form of Hugging Face tokenizers.

    Args:
        source: in Jinja; it runs in a sandbox.
        **tokens: special tokens by name, such as bos_token="<s>".

    Raises ValueError if `source` is no template.
    """

    def __init__(self, source: str, **tokens: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.now().strftime}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {_line(error)}") from None
        self._tokens = tokens

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate | None:
        """Returns the template in `chat_template.jinja` or `tokenizer_config.json` of a folder, or None."""
        config = tokenizer_config(folder)
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((each["template"] for each in source if each["name"] == "default"), None)
        if not isinstance(source, str):
            return None
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return cls(source, **{name: text for name in names if (text := token_text(config.get(name))) is not None})

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Returns the text before the answer. Raises ApiError 400 for messages that the template refuses."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise ApiError(400, f"the chat template refuses these messages: {_line(error)}", param="messages") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _line(error: BaseException) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:300]
