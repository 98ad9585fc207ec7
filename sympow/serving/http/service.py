"""The served model with its name and limits, and the conversion of clients' requests into the engine's requests."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sympow.data import Tokenizer, encode_text
from sympow.serving.engine import Engine, EngineClosedError, QueueFullError
from sympow.serving.http.answer_queue import AnswerQueue
from sympow.serving.http.chat import ChatTemplate
from sympow.serving.http.errors import ApiError
from sympow.serving.http.metrics import Metrics
from sympow.serving.http.schema import Generation
from sympow.serving.requests import Output, Request, Sampling

_SEEDS = 1 << 63


@dataclass(frozen=True)
class Limits:
    """Limits what one request may ask for.

    Attributes:
        prompt_tokens: the largest number of tokens of a prompt.
        new_tokens: the largest number of tokens of an answer; also the default of chats.
        choices: the largest number of prompts times `n`.
        seconds: the time limit of a whole answer.
        body_seconds: the time limit for sending a request.
    """

    prompt_tokens: int = 1_000_000
    new_tokens: int = 4096
    choices: int = 64
    seconds: float = 600.0
    body_seconds: float = 30.0

    @property
    def body_bytes(self) -> int:
        """Returns the most bytes of a body: enough for the longest prompt."""
        return (1 << 20) + 16 * self.prompt_tokens


@dataclass(frozen=True)
class Service:
    """Holds a served model and turns bodies of requests into requests of the engine.

    Attributes:
        engine: continues the prompts.
        tokenizer: the tokenizer of the model.
        name: the name of the model for clients.
        template: the chat template; None if the model has none.
        limits: the limits of a request.
        keys: the API keys, one of which a client must send; empty: clients need no key.
        created: the time of creation, in seconds since 1970.
    """

    engine: Engine
    tokenizer: Tokenizer
    name: str
    template: ChatTemplate | None = None
    limits: Limits = Limits()
    keys: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", Metrics(self.engine))

    def authorize(self, header: str | None) -> None:
        """Raises ApiError 401 if keys are needed and the header Authorization holds none of them."""
        if not self.keys:
            return
        scheme, _, given = (header or "").partition(" ")
        sent = given.strip(" \t").encode("latin-1")  # the bytes of the header; those beyond ASCII are UTF-8
        good = [hmac.compare_digest(sent, key.encode()) for key in self.keys]
        if scheme.lower() != "bearer" or not any(good):
            raise ApiError(401, "expected a header Authorization: Bearer KEY with a valid key", code="invalid_api_key")

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for another model."""
        if name != self.name:
            raise ApiError(404, f"this server has the model {self.name!r}", code="model_not_found", param="model")

    def chat_template(self) -> ChatTemplate:
        """Returns the chat template. Raises ApiError 400 if there is none."""
        if self.template is None:
            raise ApiError(400, f"{self.name} has no chat template: use /v1/completions", code="no_chat_template")
        return self.template

    def tokens_of(self, prompt: str | Sequence[int], param: str = "prompt", begins: bool = False) -> Tensor:
        """Returns a prompt as int64 tokens [T].

        Raises ApiError 400 for an empty or too long prompt, and for one that the tokenizer cannot read.

        Args:
            prompt: a text, or tokens.
            param: the field of the request that it is from, for errors.
            begins: whether a text gets the tokens that the tokenizer puts before every text. A chat template writes
                these itself.
        """
        text = isinstance(prompt, str)
        ids: Any = prompt
        if isinstance(prompt, str):
            try:
                ids = (encode_text(self.tokenizer, prompt) if begins else self.tokenizer.encode(prompt)).astype("int64")
            except ValueError as error:  # of a pattern that cannot split the text
                raise ApiError(400, str(error), param=param) from None
        if not len(ids):
            raise ApiError(400, "the prompt is empty; a model continues at least one token", param=param)
        if len(ids) > self.limits.prompt_tokens:
            most = f"{len(ids):,} tokens, more than the {self.limits.prompt_tokens:,} allowed"
            raise ApiError(400, f"the prompt has {most}", code="context_length_exceeded", param=param)
        vocabulary = self.tokenizer.vocab_size
        if not text and max(ids) >= vocabulary:
            raise ApiError(400, f"tokens must lie in a vocabulary of {vocabulary}; got {max(ids)}", param=param)
        return torch.as_tensor(ids, dtype=torch.int64)

    def check_choices(self, body: Generation, prompts: int) -> None:
        """Raises ApiError 400 if so many prompts, `body.n` choices each, are too many for a request."""
        n = body.n or 1
        if n * prompts > self.limits.choices:
            given = f"{n * prompts}: {prompts} prompts, n = {n}"
            most = self.limits.choices
            raise ApiError(400, f"at most {most} choices a request; got {given}", param="n" if n > 1 else "prompt")

    def requests(
        self,
        body: Generation,
        prompts: Sequence[Tensor],
        inbox: AnswerQueue,
        *,
        new: int,
        param: str,
        logprobs: int | None,
    ) -> list[Request]:
        """Returns the engine's requests: `body.n` for each prompt, in the order of the choices.

        Args:
            body: what the client asked for.
            prompts: int64 [T] each, a prompt for each list of choices.
            inbox: gets the pieces.
            new: tokens to write at most.
            param: the field of the request that says so, for errors.
            logprobs: as in `Request`.
        """
        n = body.n or 1
        if new > self.limits.new_tokens:
            most = self.limits.new_tokens
            raise ApiError(400, f"at most {most} new tokens; got {new} as {param}", param=param)
        seed = secrets.randbelow(_SEEDS) if body.seed is None else body.seed
        temperature = 1.0 if body.temperature is None else body.temperature
        deadline = time.monotonic() + self.limits.seconds
        return [
            Request(
                tokens=tokens,
                max_new_tokens=new,
                deliver=partial(self._deliver, inbox, place * n + choice),
                sampling=Sampling(temperature, body.top_k, body.top_p, seed_of(seed, place * n + choice)),
                stop=body.stops,
                logprobs=logprobs,
                stream=bool(body.stream),
                deadline=deadline,
            )
            for place, tokens in enumerate(prompts)
            for choice in range(n)
        ]

    def submit(self, requests: Sequence[Request]) -> None:
        """Gives requests to the engine.

        Raises ApiError 400 if one is too long for it, 429 if too many wait, and 503 while the server ends.
        """
        try:
            self.engine.submit(requests)
        except ValueError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from None
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full") from None
        except EngineClosedError as error:
            raise ApiError(503, str(error), code="shutting_down") from None

    def _deliver(self, inbox: AnswerQueue, choice: int, output: Output) -> None:
        if output.usage is not None:
            self.metrics.ended(output)
        inbox.put(choice, output)


def seed_of(seed: int, index: int) -> int:
    """Returns the seed of one choice of a request.

    The first choice has the seed of the request. The others have seeds that neither other choices nor requests with
    neighbouring seeds have, so that all draw different random numbers.
    """
    if index == 0:
        return seed % _SEEDS
    hashed = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "big") % _SEEDS
