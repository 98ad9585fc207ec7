"""Continuous batching: requests start and end while other requests are decoded.

One thread runs iterations. In each iteration every decoding sequence draws a token (one batched step), and the thread
reads one chunk of one prompt. A long prompt therefore delays the next token of other requests by one chunk at most. A
short prompt waits for one chunk of a long prompt, not for the whole prompt.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import torch

from sympow.data import Tokenizer
from sympow.models import LanguageModel
from sympow.models.slots import CacheRoom
from sympow.serving.decoding import Decoder
from sympow.serving.engine_time import EngineTime
from sympow.serving.prefill import Reader
from sympow.serving.prefixes import PrefixCache
from sympow.serving.requests import Request
from sympow.serving.sequence import Sequence


class QueueFullError(RuntimeError):
    """Reports a request that was refused because too many requests wait."""


class EngineClosedError(RuntimeError):
    """Reports a request that was refused because the engine is closing."""


class Load(NamedTuple):
    """Counts the requests that wait for a slot, whose prompt is being read, and whose answer is being decoded."""

    waiting: int
    reading: int
    decoding: int


class Engine:
    """Continues many prompts at a time.

    Call `start` first; `submit` and `close` work from any thread.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: of the model.
        slots: the number of requests that are read or decoded at a time.
        most: the largest number of tokens of a request, its prompt and its answer together. Key/value caches of softmax
            attention get room for as many if that takes little of the memory (`CacheRoom`). None: any number.
        queue: the number of requests that may wait for a slot.
        chunk: the number of tokens of a prompt that are read between two steps of decoding.
        prefixes: states to start from; None for none.
        ends: tokens that end an answer.
        state_dtype: of the sums of power attention in slots, torch.bfloat16 or torch.int8. The sums are then rounded,
            and take half or a quarter of the bytes. None keeps the dtype that the model gives them.

    Raises ValueError for numbers below 1 (`queue` below 0), for slots for which there is not enough memory, and for a
    `state_dtype` if the model has no sums of power attention.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        slots: int = 16,
        most: int | None = None,
        queue: int = 256,
        chunk: int = 256,
        prefixes: PrefixCache | None = None,
        ends: Collection[int] = (),
        state_dtype: torch.dtype | None = None,
    ):
        given = (
            ("slots", slots, 1),
            ("most", 1 if most is None else most, 1),
            ("chunk", chunk, 1),
            ("queue", queue, 0),
        )
        for name, value, least in given:
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")
        self.prefixes = PrefixCache(model, 0) if prefixes is None else prefixes
        self.work = EngineTime()
        self._tokenizer, self._device = tokenizer, model.embedding.weight.device
        self._queue, self._waiting = queue, deque[Sequence]()
        self._most = most
        self._decoder = Decoder(
            model,
            tokenizer,
            slots,
            most=most,
            prefixes=self.prefixes,
            ends=ends,
            state_dtype=state_dtype,
            work=self.work,
        )
        in_steps = self._decoder.reads_prompts
        self._reader = Reader(model, chunk, self.prefixes, in_steps=in_steps, work=self.work)
        self._changed = threading.Condition()
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def load(self) -> Load:
        """Returns the current numbers of requests."""
        return Load(len(self._waiting), len(self._reader.prompts), len(self._decoder.sequences))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all slots."""
        return self._decoder.slots.nbytes

    @property
    def room(self) -> CacheRoom | None:
        """Returns the room of key/value caches; None if the engine has no `most`."""
        return self._decoder.room

    @property
    def alive(self) -> bool:
        """Returns whether the engine takes requests."""
        return self._thread.is_alive() and self._closing_at is None

    def start(self) -> None:
        """Starts the engine's thread. On a GPU its graphs and kernels are made first, which takes seconds."""
        with torch.no_grad():
            self._decoder.slots.prepare()
            self._reader.prepare()
        self._thread.start()

    def submit(self, requests: Collection[Request]) -> None:
        """Queues all of the requests, or none of them.

        Raises ValueError for a request that this engine cannot answer, QueueFullError if too many requests wait, and
        EngineClosedError after `close`.
        """
        for request in requests:
            if request.tokens.ndim != 1 or not len(request.tokens) or request.max_new_tokens < 1:
                shape, new = list(request.tokens.shape), request.max_new_tokens
                raise ValueError(f"a request has tokens [T >= 1] and asks for at least one; got {shape} and {new}")
            total = len(request.tokens) + request.max_new_tokens
            if self._most is not None and total > self._most:
                raise ValueError(f"a request has at most {self._most:,} tokens, its answer included; got {total:,}")
        made = []
        for request in requests:
            keys = self.prefixes.keys(request.tokens)
            self.prefixes.fetch(keys)
            made.append(Sequence(request, keys, self._tokenizer, self._device))
        with self._changed:
            if self._closing_at is not None:
                raise EngineClosedError("the server is shutting down")
            slots = self._decoder.slots.capacity
            taken, places = slots - self._free() + len(self._waiting), slots + self._queue
            if taken + len(made) > places:
                free = f"{places - taken} of {places} places are free ({slots} in slots, {self._queue} in the queue)"
                raise QueueFullError(f"no room for {len(made)} more: {free}")
            self._waiting.extend(made)
            self._changed.notify()

    def close(self, grace: float = 0.0) -> None:
        """Refuses new requests, waits up to `grace` seconds for current ones, ends the rest, and stops the thread."""
        with self._changed:
            self._closing_at = time.monotonic() + grace
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self.prefixes.close()

    def _free(self) -> int:
        return self._decoder.slots.capacity - len(self._reader.prompts) - len(self._decoder.sequences)

    def _run(self) -> None:
        with torch.no_grad():
            while self._wait():
                try:
                    with self.work.during("schedule"):
                        self._turn()
                except Exception:  # the current requests are lost, but the server goes on
                    traceback.print_exc(file=sys.stderr)
                    self._end_all("error")
        self._end_all("cancelled")

    def _wait(self) -> bool:
        """Waits until there is a request; returns False when the engine is to stop."""
        with self._changed:
            while not any(self.load) and self._closing_at is None:
                self._changed.wait()
            if self._closing_at is None:
                return True
            return any(self.load) and time.monotonic() < self._closing_at

    def _turn(self) -> None:
        self._drop_overdue()
        self._admit()
        self._decoder.step()
        if self._reader.prompts:
            with self.work.during("read"):
                ready = self._reader.read()
            if ready is not None:
                with self.work.during("step"):
                    self._decoder.begin(ready)

    def _drop_overdue(self) -> None:
        """Ends requests that were cancelled or took too long. Each is checked once, as the result can change."""
        with self._changed:
            waiting = [(each, each.request.overdue) for each in self._waiting]
            self._waiting = deque(each for each, overdue in waiting if overdue is None)
        reading = [(each, each.request.overdue) for each in self._reader.prompts]
        self._reader.prompts = [each for each, overdue in reading if overdue is None]
        for sequence, overdue in [*waiting, *reading]:
            if overdue is not None:
                sequence.end(overdue)
        self._decoder.drop_overdue()

    def _admit(self) -> None:
        while self._free() > 0:
            with self._changed:
                if not self._waiting:
                    return
                sequence = self._waiting.popleft()
            self._reader.prompts.append(sequence)
            sequence.admit()

    def _end_all(self, finish: str) -> None:
        with self._changed:
            left = [*self._waiting, *self._reader.prompts]
            self._waiting.clear()
        self._reader.prompts = []
        for sequence in [*left, *self._decoder.clear()]:
            sequence.end(finish)
