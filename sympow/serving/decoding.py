"""Steps all sequences whose prompts have been read, as one batch. Adds the drawn tokens to their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.data import Tokenizer
from sympow.models import LanguageModel
from sympow.models.slots import CacheRoom, Slots
from sympow.serving.engine_time import EngineTime
from sympow.serving.prefill import Ready
from sympow.serving.prefixes import PrefixCache
from sympow.serving.sampling import DrawnTokens, draw, to_device
from sympow.serving.sequence import Sequence


class _Flight(NamedTuple):
    """Holds tokens that are not yet in the answers.

    Attributes:
        sequences: the sequences of the tokens, by row; None for a sequence whose prompt is not yet read.
        logits: [rows, vocab_size], from which the tokens were drawn. The next step may overwrite them.
        drawn: the tokens.
    """

    sequences: list[Sequence | None]
    logits: Tensor
    drawn: DrawnTokens


class Decoder:
    """Decodes up to `slots` sequences at a time.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: of the model.
        slots: the largest number of sequences at a time.
        most: the largest number of tokens of a request, prompt and answer; None: any number.
        prefixes: the cache that stores the states after prompts and answers.
        ends: tokens that end an answer.
        state_dtype: of the sums of power attention, as in `Slots`.
        work: counts the time and the number of steps.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        slots: int,
        *,
        most: int | None,
        prefixes: PrefixCache,
        ends: Collection[int],
        state_dtype: torch.dtype | None,
        work: EngineTime,
    ):
        self.sequences: list[Sequence] = []  # by row of the slots
        self.room = None if most is None else CacheRoom.of(model, slots, most, state_dtype)
        fixed = most if self.room is not None and self.room.fixed else None
        self.slots = Slots(model, slots, fixed, state_dtype)
        self._tokenizer, self._prefixes, self._ends, self._work = tokenizer, prefixes, frozenset(ends), work
        self._device = model.embedding.weight.device
        self._ahead = runs_ahead(self._device)
        self._last = torch.zeros(slots, dtype=torch.int64, device=self._device)  # the tokens drawn last, by row
        self._flights: deque[_Flight] = deque()  # in the order of their draws

    @property
    def reads_prompts(self) -> bool:
        """Returns whether steps may read the last tokens of prompts."""
        return self._ahead and self.slots.as_one_batch

    def begin(self, ready: Ready) -> None:
        """Moves sequences into slots, and draws their first tokens."""
        self.sequences.extend(ready.group)
        row = self.slots.put(ready.state, ready.group[0].read)
        self._draw(ready.group, ready.logits, row)
        if not self._ahead:
            self._land()

    def step(self) -> None:
        """Steps all sequences, and puts drawn tokens into the answers.

        While a GPU computes the step, the host adds the tokens that were drawn before it to the answers. If such a
        token ends an answer, the sequence has taken one step too many, and its newest token is dropped.
        """
        stepped = bool(self.sequences)
        if stepped:
            with self._work.during("step"):
                logits = self.slots.step(self._last[: len(self.sequences)])
                for each in self.sequences:
                    each.read += each.left > 0
                self._draw(list(self.sequences), logits, 0)
            self._work.steps += 1
            self._work.rows += len(self.sequences)
        while len(self._flights) > (stepped and self._ahead):
            self._land()

    def drop_overdue(self) -> None:
        """Ends sequences that were cancelled or took too long."""
        overdue = [(row, each.request.overdue) for row, each in enumerate(self.sequences)]
        late = [(self._release(row), finish) for row, finish in reversed(overdue) if finish is not None]
        for sequence, finish in late:
            sequence.end(finish)

    def clear(self) -> list[Sequence]:
        """Frees all slots, and returns the sequences that were in them."""
        left, self.sequences = self.sequences, []
        self._flights.clear()
        while self.slots.count:
            self.slots.release(self.slots.count - 1)
        return left

    def _draw(self, sequences: list[Sequence], logits: Tensor, row: int) -> None:
        """Draws a token for each of the sequences, which are in rows from `row` on, without waiting for the device.

        Sequences whose prompt is not yet read get its next token instead.
        """
        known = logits[:, : self._tokenizer.vocab_size]  # a model may have more logits than tokens
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
                if each.cached < each.read and self._prefixes.keeps(each.read):
                    state = self.slots.take(row + place)
                    self._prefixes.keep(each.keys, each.read, state, logits[place : place + 1].clone())

    def _land(self) -> None:
        """Puts the oldest drawn tokens into the answers; waits for the device."""
        flight = self._flights.popleft()
        with self._work.during("wait"):
            tokens = flight.drawn.tokens()
        with self._work.during("answer"):
            logprobs = flight.drawn.logprobs()
            for row, (sequence, token) in enumerate(zip(flight.sequences, tokens, strict=True)):
                if sequence is None or sequence.finish is not None:
                    continue
                if token is None:
                    sequence.finish = "error"
                else:
                    sequence.push(token, logprobs.get(row), self._ends, len(self.sequences))
            for row in reversed(range(len(self.sequences))):
                if self.sequences[row].finish is not None:
                    self._keep_answer(row, flight)
                    self._release(row).end()

    def _keep_answer(self, row: int, flight: _Flight) -> None:
        """Puts the state after an answer into the cache, because the next prompt of a conversation starts with it.

        The state includes the last token of the answer if a step was started since that token was drawn.
        """
        sequence = self.sequences[row]
        newest = self._flights[-1] if self._flights else flight
        keys, length = sequence.read_of_answer(len(sequence.drawn) - (newest is flight))
        if sequence.finish != "error" and self._prefixes.keeps(length):
            place = newest.sequences.index(sequence)
            self._prefixes.keep(keys, length, self.slots.take(row), newest.logits[place : place + 1].clone())

    def _release(self, row: int) -> Sequence:
        """Frees a row, and returns the sequence that was in it."""
        released, last = self.sequences[row], self.sequences.pop()
        self.slots.release(row)
        if row < len(self.sequences):
            self.sequences[row] = last
            self._last[row] = self._last[len(self.sequences)]
        return released


def runs_ahead(device: torch.device) -> bool:
    """Returns whether steps run asynchronously on the device, so that the host can work until results are needed."""
    return device.type == "cuda"
