"""Answers in the form of OpenAI's interface: whole ones, and events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sympow.data import StreamDecoder, Tokenizer
from sympow.serving.requests import Output, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def usage_of(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """Returns the usage of a request with `n` choices for each prompt. A prompt counts once."""
    prompts = usages[::n]
    prompt, new = sum(each.prompt_tokens for each in prompts), sum(each.new_tokens for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
    }


class Answer(ABC):
    """Formats one answer of one or more choices.

    Args:
        model: the name of the model.
        tokenizer: the tokenizer of the model.
        logprobs: whether log probabilities are shown.

    Attributes:
        ends_with_usage: whether the last event of a stream has the usage. Then all others have a null in its place.
    """

    prefix: str
    whole_kind: str
    event_kind: str

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool):
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self.ends_with_usage = False

    def whole(self, choices: Sequence[Output], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole answer."""
        made = [
            {"index": i, "finish_reason": output.finish, "logprobs": self._shown(i, output.logprobs)}
            | self._content(output)
            for i, output in enumerate(choices)
        ]
        return self._head | {"object": self.whole_kind, "choices": made, "usage": usage}

    def piece(self, index: int, output: Output) -> bytes:
        """Returns the event of a piece."""
        choice = {"index": index, "finish_reason": output.finish, "logprobs": self._shown(index, output.logprobs)}
        return self._event([choice | self._delta(output.text)])

    def opening(self, index: int) -> bytes | None:
        """Returns the event before the first piece, or None."""
        return None

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Returns the event of the usage."""
        return event(self._head | {"object": self.event_kind, "choices": [], "usage": usage})

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        usage = {"usage": None} if self.ends_with_usage else {}
        return event(self._head | {"object": self.event_kind, "choices": choices} | usage)

    def _shown(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._listed(index, logprobs) if self._logprobs else None

    def _text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        known = self._tokenizer.token_bytes
        return known[token] if token < len(known) else b""

    @abstractmethod
    def _content(self, output: Output) -> dict[str, Any]:
        """Returns the fields of a whole choice."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """Returns the fields of a choice in an event."""

    @abstractmethod
    def _listed(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns the log probabilities of choice `index`."""


class CompletionAnswer(Answer):
    """Formats an answer of /v1/completions. The arguments are those of `Answer`.

    Args:
        model: the name of the model.
        tokenizer: the tokenizer of the model.
        logprobs: whether log probabilities are shown.
    """

    prefix, whole_kind, event_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool):
        super().__init__(model, tokenizer, logprobs)
        self._places: dict[int, _Place] = {}

    def _content(self, output: Output) -> dict[str, Any]:
        return self._delta(output.text)

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _listed(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        place = self._places.setdefault(index, _Place(self._tokenizer))
        offsets = [place.passed(each.token) for each in logprobs]
        return {
            "tokens": [self._text(each.token) for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [{self._text(token): value for token, value in reversed(each.top)} for each in logprobs],
            "text_offset": offsets,
        }


class _Place:
    """Counts the characters of a choice."""

    def __init__(self, tokenizer: Tokenizer):
        self._decoder, self._count = StreamDecoder(tokenizer), 0

    def passed(self, token: int) -> int:
        """Adds a token, and returns the number of characters before it."""
        before = self._count
        self._count += len(self._decoder.push([token]))
        return before


class ChatAnswer(Answer):
    """Formats an answer of /v1/chat/completions."""

    prefix, whole_kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> bytes | None:
        """Returns the event that starts a choice and names its role."""
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._event([first | {"logprobs": None}])

    def _content(self, output: Output) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": output.text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _listed(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._entry(each.token, each.logprob) | {"top_logprobs": [self._entry(*pair) for pair in each.top]}
                for each in logprobs
            ]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": logprob, "bytes": list(self._bytes(token))}
