"""A request in the engine: what was read, what was drawn, and when."""

from __future__ import annotations

import time
from collections import deque

import torch

from sympow.data import Tokenizer
from sympow.models import ModelState
from sympow.serving.prefixes import PrefixKeys
from sympow.serving.requests import Output, Request, TokenLogprob, Usage
from sympow.serving.sampling import Draws
from sympow.serving.stop_text import AnswerText

# The least time between two pieces of a stream. Sending a piece takes time that the engine's thread needs. A reader
# does not notice that hundreds of tokens per second arrive in groups. With many streams the time is longer, so that
# the server sends at most 500 pieces per second.
PIECE_SECONDS = 0.03
_SECONDS_A_STREAM = 0.002


def pause(streams: int) -> float:
    """Returns the least time in seconds between two pieces of each of so many streams."""
    return max(PIECE_SECONDS, streams * _SECONDS_A_STREAM)


class Sequence:
    """Holds a request with its progress.

    Args:
        request: the request.
        keys: the names of the prompt's prefixes.
        tokenizer: the tokenizer of the model.
        device: the device of the logits.

    Attributes:
        request: the request.
        length: the number of tokens of the prompt.
        keys: the names of the prompt's prefixes.
        read: the number of tokens of the prompt read so far; `cached` of them were found in the prefix cache.
        state: the state of the model while the prompt is read; None afterwards, when a slot contains the state. In a
            group that is read together, the first sequence has the states of all.
        parting: the number of tokens that the prompt shares with earlier prompts, after which the state is kept; or 0.
        looked_up: whether `parting` is known.
        kept: whether the state after the prompt was offered to the prefix cache.
        draws: the options and the random numbers of the draws.
        drawn: the tokens of the answer, including an end token.
        finish: the reason why the request has ended, as in `Output`; None before.
    """

    def __init__(self, request: Request, keys: PrefixKeys, tokenizer: Tokenizer, device: torch.device):
        self.request, self.length, self.keys = request, len(request.tokens), keys
        self.read = self.cached = self.parting = 0
        self.looked_up = self.kept = False
        self.state: ModelState | None = None
        self.drawn: list[int] = []
        self.finish: str | None = None
        self.draws = Draws(request.sampling, device)
        self._answer = AnswerText(tokenizer, request.stop)
        self._text, self._count, self._logprobs = "", 0, list[TokenLogprob]()
        self._held = deque[tuple[int, TokenLogprob]]()  # of tokens whose text is not yet decided, with its place
        self._admitted: float | None = None
        self._first: float | None = None
        self._next_piece = 0.0  # when the next one may be delivered

    @property
    def left(self) -> int:
        """Returns how many tokens of the prompt are not yet read."""
        return self.length - self.read

    def read_of_answer(self, drawn: int) -> tuple[PrefixKeys, int]:
        """Returns the names of the prefixes of the prompt with `drawn` tokens of the answer, and the tokens' number."""
        return self.keys.extended(torch.tensor(self.drawn[:drawn], dtype=torch.int64)), self.read + drawn

    def admit(self) -> None:
        """Records the time at which the request stopped waiting."""
        self._admitted = time.monotonic()

    def push(self, token: int, shown: TokenLogprob | None, ends: frozenset[int], streams: int) -> None:
        """Adds a token.

        Args:
            token: the next token of the answer.
            shown: its log probabilities; None if they were not requested.
            ends: the model's end tokens.
            streams: the number of sequences that are being decoded.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = now
        self.drawn.append(token)
        if token in ends:
            self.finish = "stop"
        else:
            if shown is not None:
                self._held.append((self._answer.decoded, shown))
            self._text += self._answer.push(token)
            self._count += 1
            self._show(self._answer.given)
            if self._answer.stopped:
                self.finish = "stop"
            elif len(self.drawn) >= self.request.max_new_tokens:
                self.finish = "length"
        if self.finish is None and self.request.stream and now >= self._next_piece:
            self._deliver()
            self._next_piece = now + pause(streams)

    def end(self, finish: str | None = None) -> None:
        """Delivers the last piece. `finish` is the reason, if the tokens give none."""
        self.finish = self.finish or finish
        self._text += self._answer.finish()
        if self._answer.stopped:
            self.finish = "stop"
        else:
            self._show(self._answer.given + 1)  # the last tokens may have no text
        self._deliver(self._usage())

    def _show(self, end: int) -> None:
        """Adds the log probabilities of the tokens whose text begins before this place to the next piece."""
        while self._held and self._held[0][0] < end:
            self._logprobs.append(self._held.popleft()[1])

    def _deliver(self, usage: Usage | None = None) -> None:
        output = Output(self._text, self._count, tuple(self._logprobs), self.finish, usage)
        self._text, self._count, self._logprobs = "", 0, []
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
