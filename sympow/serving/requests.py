"""Requests to the engine, and the pieces of their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Says how tokens are drawn. The fields are those of `sympow.models.stream`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


class TokenLogprob(NamedTuple):
    """Holds a drawn token, its log probability in nats, and those of the likeliest tokens, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Output:
    """Holds a piece of an answer.

    Attributes:
        text: the characters that can no longer change.
        tokens: the number of tokens drawn for this piece, without an end token.
        logprobs: the log probabilities of the tokens whose text begins in this piece or before it, if the request asked
            for them. Tokens of a stop sequence are not among them.
        finish: None before the last piece; then "stop" (a stop sequence or an end token), "length", "cancelled",
            "timeout" or "error".
        usage: the tokens and seconds of the request, with the last piece only.
    """

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    usage: Usage | None = None

    def followed_by(self, other: Output) -> Output:
        """Returns this piece and the next one as one piece."""
        text, tokens, logprobs = self.text + other.text, self.tokens + other.tokens, self.logprobs + other.logprobs
        return Output(text, tokens, logprobs, other.finish, other.usage)


@dataclass(frozen=True)
class Usage:
    """Counts the tokens and seconds of a request.

    Attributes:
        prompt_tokens: the tokens of the prompt; `cached_tokens` of them were not read but found in the prefix cache.
        new_tokens: the tokens drawn, including an end token.
        queued_seconds: the time before a slot was free.
        first_token_seconds: the time from the arrival to the first token; None if there was no token.
        seconds: the time from the arrival to the end.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    queued_seconds: float
    first_token_seconds: float | None
    seconds: float


@dataclass(eq=False)
class Request:
    """Describes a prompt to continue.

    Attributes:
        tokens: int64 [T], T >= 1, on the CPU.
        max_new_tokens: the largest number of tokens of the answer, at least 1.
        deliver: a function that the engine's thread calls with every piece; it must return at once.
        sampling: how tokens are drawn.
        stop: texts that end the answer, and are not part of it.
        logprobs: how many of the likeliest tokens to report beside each drawn one; None for no probabilities.
        stream: whether each piece is delivered when it is made; otherwise there is one piece, the last.
        deadline: the time of `time.monotonic` after which the request is ended.
        arrived: the time of arrival, of `time.monotonic`.
    """

    tokens: Tensor
    max_new_tokens: int
    deliver: Callable[[Output], None]
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    stream: bool = False
    deadline: float = float("inf")
    arrived: float = field(default_factory=time.monotonic)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Asks the engine to end the request. Works from any thread, and has no effect after the end."""
        self._cancelled.set()

    @property
    def overdue(self) -> str | None:
        """Returns "cancelled" or "timeout" if the request is to be ended for that reason."""
        if self._cancelled.is_set():
            return "cancelled"
        return "timeout" if time.monotonic() >= self.deadline else None
