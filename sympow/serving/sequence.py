"""A request in the engine: what was read, what was drawn, and when."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from sympow.data import Tokenizer
from sympow.models import ModelState
from sympow.serving.prefixes import PrefixKeys
from sympow.serving.requests import Output, Request, TokenLogprob, Usage
from sympow.serving.sampling import Draws, logprob_of
from sympow.serving.text import AnswerText

# Least time between two pieces of a stream. Sending a piece takes time that the engine's thread needs, and a reader
# does not notice when hundreds of tokens a second come in groups.
PIECE_SECONDS = 0.03


class Sequence:
    """Holds a request with its progress.

    Attributes:
        request: what was asked for.
        keys: names of the prompt's prefixes.
        read: tokens of the prompt read so far; `cached` of them were found.
        state: while the prompt is read, that of the model; then None, as it stands in a slot.
        parting: tokens after which the prompt begins to differ from earlier ones, where the state is kept; or 0.
        draws: the options and the random numbers of its draws.
        drawn: tokens of the answer, an end token among them.
        finish: why the request has ended, as in `Output`; None before.
    """

    def __init__(self, request: Request, keys: PrefixKeys, tokenizer: Tokenizer, device: torch.device):
        self.request, self.keys = request, keys
        self.read = self.cached = self.parting = 0
        self.state: ModelState | None = None
        self.drawn: list[int] = []
        self.finish: str | None = None
        self.draws = Draws(request.sampling, device)
        self._answer = AnswerText(tokenizer, request.stop)
        self._text, self._count, self._logprobs = "", 0, list[TokenLogprob]()
        self._admitted: float | None = None
        self._first: float | None = None
        self._next_piece = 0.0  # when the next one may be delivered

    @property
    def left(self) -> int:
        """Returns how many tokens of the prompt are not yet read."""
        return len(self.request.tokens) - self.read

    @property
    def length(self) -> int:
        """Returns how many tokens the state has read, once the prompt is read. The last drawn token is not yet read."""
        return self.read + max(0, len(self.drawn) - 1)

    def keys_of_answer(self) -> PrefixKeys:
        """Returns the names of the prefixes of all tokens that the state has read."""
        return self.keys.extended(torch.tensor(self.drawn[:-1]))

    def may_end_with(self, token: int | None, ends: frozenset[int]) -> bool:
        """Returns whether the answer could end with this token, as its next; `ends` are the model's end tokens."""
        if token is None or token in ends or self.request.stop:
            return True
        return len(self.drawn) + 1 >= self.request.max_new_tokens

    def admit(self) -> None:
        """Records the time at which the request stopped waiting."""
        self._admitted = time.monotonic()

    def push(self, token: int, logits: Tensor, ends: frozenset[int]) -> None:
        """Adds a token that was drawn from logits [vocab_size]; `ends` are the model's end tokens."""
        if self._first is None:
            self._first = time.monotonic()
        self.drawn.append(token)
        if token in ends:
            self.finish = "stop"
        else:
            self._text += self._answer.push(token)
            self._count += 1
            if self.request.logprobs is not None:
                self._logprobs.append(logprob_of(logits, token, self.request.logprobs))
            if self._answer.stopped:
                self.finish = "stop"
            elif len(self.drawn) >= self.request.max_new_tokens:
                self.finish = "length"
        if self.finish is None and self.request.stream and time.monotonic() >= self._next_piece:
            self._deliver()

    def end(self, finish: str | None = None) -> None:
        """Delivers the last piece. `finish` is the reason, if the tokens give none."""
        self.finish = self.finish or finish
        self._text += self._answer.finish()
        self._deliver(self._usage())

    def _deliver(self, usage: Usage | None = None) -> None:
        output = Output(self._text, self._count, tuple(self._logprobs), self.finish, usage)
        self._text, self._count, self._logprobs = "", 0, []
        self._next_piece = time.monotonic() + PIECE_SECONDS
        self.request.deliver(output)

    def _usage(self) -> Usage:
        now, arrived = time.monotonic(), self.request.arrived
        return Usage(
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.cached,
            new_tokens=len(self.drawn),
            queued_seconds=(now if self._admitted is None else self._admitted) - arrived,
            first_token_seconds=None if self._first is None else self._first - arrived,
            seconds=now - arrived,
        )
