"""Continuous batching: requests start and end while other requests are decoded.

One thread runs iterations. In each iteration every decoding sequence draws a token (one batched step), and one chunk of
one prompt is read. A long prompt therefore delays the next token of other requests by one chunk at most, and a short
prompt waits for a chunk of a long prompt, not for the whole prompt.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.data import Tokenizer
from sympow.models import LanguageModel
from sympow.models.slots import Slots
from sympow.serving.prefixes import PrefixCache
from sympow.serving.requests import Request
from sympow.serving.sampling import Drawn, begun, draw, to_device
from sympow.serving.sequence import Sequence

_TOGETHER = 16  # prompts at most, each of which has its own state
_LEAST = 16  # tokens of a piece of a prompt, below which steps read it
_STEPS_END = 63  # tokens at the end of a prompt that steps read on a GPU, which takes no longer than a call more
_EVERY = 8  # every 8th chunk is of the prompt that waits longest; the others are of the shortest prompt


class QueueFullError(RuntimeError):
    """Reports a request that was refused because too many requests wait."""


class EngineClosedError(RuntimeError):
    """Reports a request that was refused because the engine is closing."""


class Load(NamedTuple):
    """Counts requests: waiting for a slot, reading their prompt, decoding."""

    waiting: int
    reading: int
    decoding: int


class _Flight(NamedTuple):
    """Holds tokens that are not yet in the answers.

    Attributes:
        sequences: those that the tokens belong to, by row; None where the prompt is not yet read.
        logits: [rows, vocab_size], from which the tokens were drawn. The next step may overwrite them.
        drawn: the tokens.
    """

    sequences: list[Sequence | None]
    logits: Tensor
    drawn: Drawn


class Engine:
    """Continues many prompts at a time.

    Call `start` first; `submit` and `close` work from any thread.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: of the model.
        slots: requests that are read or decoded at a time.
        queue: requests that may wait for a slot.
        chunk: tokens of a prompt that are read between two steps of decoding.
        prefixes: states to start from; None for none.
        ends: tokens that end an answer.

    Raises ValueError for numbers below 1 (`queue` below 0).
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        slots: int = 16,
        queue: int = 256,
        chunk: int = 256,
        prefixes: PrefixCache | None = None,
        ends: Collection[int] = (),
    ):
        for name, value, least in (("chunk", chunk, 1), ("queue", queue, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")
        self.prefixes = PrefixCache(model, 0) if prefixes is None else prefixes
        self._model, self._tokenizer, self._ends = model, tokenizer, frozenset(ends)
        self._device = model.embedding.weight.device
        self._queue, self._chunk = queue, chunk
        self._slots = Slots(model, slots)
        self._steps_end = _STEPS_END if runs_ahead(self._device) and self._slots.as_one_batch else 0
        self._waiting: deque[Sequence] = deque()
        self._reading: list[Sequence] = []  # in the order of their arrival
        self._decoding: list[Sequence] = []  # by row of the slots
        self._last = torch.zeros(slots, dtype=torch.int64, device=self._device)  # the tokens drawn last, by row
        self._flights: deque[_Flight] = deque()  # in the order of their draws
        self._piece_read: Callable[[], None] = begun(torch.device("cpu"))
        self._turns = 0
        self._changed = threading.Condition()
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def load(self) -> Load:
        """Returns the current numbers of requests."""
        return Load(len(self._waiting), len(self._reading), len(self._decoding))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all slots."""
        return self._slots.nbytes

    @property
    def alive(self) -> bool:
        """Returns whether the engine takes requests."""
        return self._thread.is_alive() and self._closing_at is None

    def start(self) -> None:
        """Starts the engine's thread. On a GPU its graphs and kernels are made first, which takes seconds."""
        self._slots.prepare()
        if self._device.type == "cuda":
            with torch.no_grad():  # kernels are compiled before the first request comes
                for size in {self._piece(tokens) for tokens in range(_LEAST, self._chunk + 1)}:
                    piece = torch.zeros(1, size, dtype=torch.int64, device=self._device)
                    self._model.step(piece, self._model.init_state(1))
        self._thread.start()

    def submit(self, requests: Collection[Request]) -> None:
        """Queues all of the requests, or none of them.

        Raises ValueError for a request that no engine could answer, QueueFullError where too many wait,
        EngineClosedError after `close`.
        """
        for request in requests:
            if request.tokens.ndim != 1 or not len(request.tokens) or request.max_new_tokens < 1:
                shape, new = list(request.tokens.shape), request.max_new_tokens
                raise ValueError(f"a request has tokens [T >= 1] and asks for at least one; got {shape} and {new}")
        made = []
        for request in requests:
            keys = self.prefixes.keys(request.tokens)
            self.prefixes.fetch(keys)
            made.append(Sequence(request, keys, self._tokenizer, self._device))
        with self._changed:
            if self._closing_at is not None:
                raise EngineClosedError("the server is shutting down")
            if len(self._waiting) + len(made) > self._queue + self._free():
                raise QueueFullError(f"{len(self._waiting)} requests wait already, of {self._queue} that may")
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
        return self._slots.capacity - len(self._reading) - len(self._decoding)

    def _run(self) -> None:
        with torch.no_grad():
            while self._wait():
                try:
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
        self._turns += 1
        self._drop_overdue()
        self._admit()
        self._decode()
        if self._reading:
            self._read(self._next_to_read())

    def _drop_overdue(self) -> None:
        """Ends requests that were cancelled or took too long. Each is asked once, as the answer changes with time."""
        with self._changed:
            waiting = [(each, each.request.overdue) for each in self._waiting]
            self._waiting = deque(each for each, overdue in waiting if overdue is None)
        reading = [(each, each.request.overdue) for each in self._reading]
        self._reading = [each for each, overdue in reading if overdue is None]
        decoding = [(row, each.request.overdue) for row, each in enumerate(self._decoding)]
        late = [(self._release(row), overdue) for row, overdue in reversed(decoding) if overdue is not None]
        for sequence, overdue in [*waiting, *reading, *late]:
            if overdue is not None:
                sequence.end(overdue)

    def _admit(self) -> None:
        while self._free() > 0:
            with self._changed:
                if not self._waiting:
                    return
                sequence = self._waiting.popleft()
            self._reading.append(sequence)
            sequence.admit()

    def _next_to_read(self) -> Sequence:
        if self._turns % _EVERY == 0:
            return self._reading[0]
        return min(self._reading, key=lambda each: each.left)

    def _read(self, sequence: Sequence) -> None:
        """Reads one piece of a prompt, or of several together. Before the first piece the cache is searched."""
        group = [sequence]
        if sequence.state is None:
            found = self.prefixes.find(sequence.keys)
            self._notice_parting(sequence)
            if found is None:
                group = self._group(sequence)
                sequence.state = self._model.init_state(len(group))
            else:
                sequence.state = found.state.clone()
                sequence.read = sequence.cached = len(found.tokens)
                if self._ends_in_steps(sequence):
                    self._begin(group, found.logits)
                    return
        goal = sequence.parting if sequence.read < sequence.parting else sequence.length
        stop = sequence.read + self._piece(goal - sequence.read)
        tokens = torch.stack([each.request.tokens[sequence.read : stop] for each in group])
        self._piece_read()  # so that at most one piece is begun before a short prompt that comes now
        logits, sequence.state = self._model.step(tokens.to(self._device, non_blocking=True), sequence.state)
        self._piece_read = begun(self._device)
        for each in group:
            each.read = stop
        if stop == sequence.parting and self.prefixes.keeps(stop):
            self.prefixes.keep(sequence.keys, stop, sequence.state.clone(), logits.clone())
        if self._ends_in_steps(sequence):
            self._begin(group, logits)

    def _piece(self, tokens: int) -> int:
        """Returns how many of so many tokens are read in one call.

        On a GPU that is a chunk, or a power of 2: other lengths would need kernels that are not yet compiled.
        """
        if tokens >= self._chunk or not self._steps_end:
            return min(tokens, self._chunk)
        return 1 << (tokens.bit_length() - 1) if tokens >= _LEAST else 1

    def _ends_in_steps(self, sequence: Sequence) -> bool:
        """Returns whether the rest of a prompt, if there is one, is read by the steps of those who decode."""
        return sequence.left <= self._steps_end and sequence.read >= sequence.parting

    def _notice_parting(self, sequence: Sequence) -> None:
        """Looks up, once, where a prompt begins to differ from earlier ones."""
        if not sequence.looked_up:
            sequence.looked_up = True
            parting = self.prefixes.parting(sequence.keys)
            sequence.parting = parting if parting < sequence.length else 0

    def _group(self, first: Sequence) -> list[Sequence]:
        """Returns a new prompt with others that begin with a piece of the same length and end in steps, on a GPU.

        To read them together takes little longer than to read one. Prompts that begin alike are read one after another,
        as the later ones find the state of the earlier one.
        """
        piece = self._piece(first.length)
        lengths = range(piece, piece + self._steps_end + 1)
        group, alike = [first], set(first.keys.blocks[1:2])
        if not self._steps_end or first.parting or first.length not in lengths:
            return group
        for each in self._reading:
            beginning = set(each.keys.blocks[1:2]) if self.prefixes.keeps(each.length) else set()
            if len(group) == _TOGETHER:
                break
            if each is first or each.state is not None or each.length not in lengths or beginning & alike:
                continue
            self._notice_parting(each)
            if not each.parting and not self.prefixes.find(each.keys):
                group.append(each)
                alike |= beginning
        return group

    def _begin(self, group: list[Sequence], logits: Tensor) -> None:
        """Draws the first tokens of answers, and moves the sequences into slots."""
        first = group[0]
        if first.state is None:
            raise RuntimeError("a sequence that was read has a state")
        self._reading = [each for each in self._reading if each not in group]
        row = self._slots.put(first.state, first.read)
        first.state = None
        self._decoding.extend(group)
        self._draw(group, logits, row)
        if not runs_ahead(self._device):
            self._land()

    def _decode(self) -> None:
        """Steps all decoding sequences, and puts drawn tokens into the answers.

        A GPU steps while the host puts in the tokens that were drawn before this step. A sequence whose answer ends
        with such a token has stepped once too often: its newest token is dropped.
        """
        stepped = bool(self._decoding)
        if stepped:
            logits = self._slots.step(self._last[: len(self._decoding)])
            for each in self._decoding:
                each.read += each.left > 0
            self._draw(list(self._decoding), logits, 0)
        while len(self._flights) > (stepped and runs_ahead(self._device)):
            self._land()

    def _draw(self, sequences: list[Sequence], logits: Tensor, row: int) -> None:
        """Draws a token for each of the sequences, which are in rows from `row` on, without waiting for the device.

        Sequences whose prompt is not yet read get its next token instead.
        """
        known = logits[:, : self._tokenizer.vocab_size]  # a model may have more, which stand for nothing
        ready = [None if each.left else each for each in sequences]
        how = [None if each is None else each.draws for each in ready]
        drawn = draw(known, how, [None if each is None else each.request.logprobs for each in ready])
        following = drawn.next
        if None in ready:
            given = torch.tensor([int(each.request.tokens[each.read]) if each.left else -1 for each in sequences])
            given = to_device(given, self._device)
            following = torch.where(given < 0, following, given)
        self._last[row : row + len(sequences)] = following
        self._flights.append(_Flight(ready, logits, drawn))
        for place, each in enumerate(sequences):
            if not each.left and not each.kept:
                each.kept = True
                if each.cached < each.read and self.prefixes.keeps(each.read):
                    state = self._slots.take(row + place)
                    self.prefixes.keep(each.keys, each.read, state, logits[place : place + 1].clone())

    def _land(self) -> None:
        """Puts the tokens that were drawn first into the answers; waits for the device."""
        flight = self._flights.popleft()
        tokens, logprobs = flight.drawn.tokens(), flight.drawn.logprobs()
        for row, (sequence, token) in enumerate(zip(flight.sequences, tokens, strict=True)):
            if sequence is None or sequence.finish is not None:
                continue
            if token is None:
                sequence.finish = "error"
            else:
                sequence.push(token, logprobs.get(row), self._ends, len(self._decoding))
        for row in reversed(range(len(self._decoding))):
            if self._decoding[row].finish is not None:
                self._keep_answer(row, flight)
                self._release(row).end()

    def _keep_answer(self, row: int, flight: _Flight) -> None:
        """Puts the state after an answer into the cache: the next turn of a conversation begins with it.

        The state has read the last token of the answer if a step was begun since that token was drawn.
        """
        sequence = self._decoding[row]
        newest = self._flights[-1] if self._flights else flight
        keys, length = sequence.read_of_answer(len(sequence.drawn) - (newest is flight))
        if sequence.finish != "error" and self.prefixes.keeps(length):
            place = newest.sequences.index(sequence)
            self.prefixes.keep(keys, length, self._slots.take(row), newest.logits[place : place + 1].clone())

    def _release(self, row: int) -> Sequence:
        """Frees a row, and returns the sequence that was in it."""
        released, last = self._decoding[row], self._decoding.pop()
        self._slots.release(row)
        if row < len(self._decoding):
            self._decoding[row] = last
            self._last[row] = self._last[len(self._decoding)]
        return released

    def _end_all(self, finish: str) -> None:
        with self._changed:
            left = [*self._waiting, *self._reading, *self._decoding]
            self._waiting.clear()
        self._reading, self._decoding = [], []
        self._flights.clear()
        while self._slots.count:
            self._slots.release(self._slots.count - 1)
        for sequence in left:
            sequence.end(finish)


def runs_ahead(device: torch.device) -> bool:
    """Returns whether a call of a step only begins it, so that the host has time until the results are needed."""
    return device.type == "cuda"
