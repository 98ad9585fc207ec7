"""Reads prompts piece by piece, several short prompts in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.models import LanguageModel, ModelState
from sympow.serving.engine_time import EngineTime
from sympow.serving.prefixes import PrefixCache
from sympow.serving.sampling import begun
from sympow.serving.sequence import Sequence

_TOGETHER = 16  # the most prompts that are read together; each has its own state
_LEAST = 16  # pieces of a prompt with fewer tokens are read by steps
_STEPS_END = 63  # tokens at the end of a prompt that steps read on a GPU; one more call would take as long
_EVERY = 8  # every 8th chunk is of the prompt that waits longest; the others are of the shortest prompt


class Ready(NamedTuple):
    """Holds sequences whose prompts are read, except for tokens that steps read.

    Attributes:
        group: the sequences. All have read the same number of tokens.
        state: of the model, a row for each sequence.
        logits: [rows, vocab_size] after the tokens read. They are undefined if no tokens are read.
    """

    group: list[Sequence]
    state: ModelState
    logits: Tensor


class Reader:
    """Reads the prompts of sequences that have a slot.

    Args:
        model: in evaluation mode.
        chunk: the largest number of tokens of a prompt that are read in one call.
        prefixes: the cache of states to start from.
        in_steps: whether steps of the decoding sequences read the last tokens of a prompt. Then calls have few lengths.
        work: counts the time and the number of calls.
    """

    def __init__(self, model: LanguageModel, chunk: int, prefixes: PrefixCache, *, in_steps: bool, work: EngineTime):
        self.prompts: list[Sequence] = []  # in the order of their arrival
        self._model, self._chunk, self._prefixes, self._work = model, chunk, prefixes, work
        self._device = model.embedding.weight.device
        self._steps_end = _STEPS_END if in_steps else 0
        self._piece_read: Callable[[], None] = begun(torch.device("cpu"))
        self._reads = 0

    def prepare(self) -> None:
        """Makes calls on a GPU, so that their kernels are compiled before the first request comes."""
        if self._device.type == "cuda":
            with torch.no_grad():
                for batch, length in self.shapes():
                    piece = torch.zeros(batch, length, dtype=torch.int64, device=self._device)
                    self._model.step(piece, self._model.init_state(batch))

    def shapes(self) -> list[tuple[int, int]]:
        """Returns the prompts and tokens of calls that together need the kernels of all later calls.

        If no steps read prompts, calls can have any length, and the result has only the longest calls.
        """
        if not self._steps_end:
            return [(1, self._chunk)]
        lengths = sorted({self._piece(tokens) for tokens in range(1, self._chunk + 1)})
        return [(1, length) for length in lengths] + [(_TOGETHER, length) for length in lengths if length >= _LEAST]

    def read(self) -> Ready | None:
        """Reads one piece of a prompt, or of several together; returns the sequences whose reading ends with it.

        Before the first piece the cache is searched.
        """
        sequence = self._next()
        group = [sequence]
        if sequence.state is None:
            found = self._prefixes.find(sequence.keys)
            self._notice_parting(sequence)
            if found is None:
                group = self._group(sequence)
                sequence.state = self._model.init_state(len(group))
                if self._short(sequence):
                    weight = self._model.embedding.weight
                    return self._ready(group, weight.new_zeros(len(group), weight.shape[0]))
            else:
                sequence.state = found.state.clone()
                sequence.read = sequence.cached = len(found.tokens)
                if self._ends_in_steps(sequence):
                    return self._ready(group, found.logits)
        goal = sequence.parting if sequence.read < sequence.parting else sequence.length
        stop = sequence.read + self._piece(goal - sequence.read)
        tokens = torch.stack([each.request.tokens[sequence.read : stop] for each in group])
        with self._work.during("wait"):
            self._piece_read()  # so that at most one piece is started before a short prompt that arrives now
        logits, sequence.state = self._model.step(tokens.to(self._device, non_blocking=True), sequence.state)
        self._piece_read = begun(self._device)
        self._work.pieces += 1
        for each in group:
            each.read = stop
        if stop == sequence.parting and self._prefixes.keeps(stop):
            self._prefixes.keep(sequence.keys, stop, sequence.state.clone(), logits.clone())
        return self._ready(group, logits) if self._ends_in_steps(sequence) else None

    def _next(self) -> Sequence:
        self._reads += 1
        if self._reads % _EVERY == 0:
            return self.prompts[0]
        return min(self.prompts, key=lambda each: each.left)

    def _ready(self, group: list[Sequence], logits: Tensor) -> Ready:
        first = group[0]
        if first.state is None:
            raise RuntimeError("a sequence that was read has a state")
        self.prompts = [each for each in self.prompts if each not in group]
        state, first.state = first.state, None
        return Ready(group, state, logits)

    def _piece(self, tokens: int) -> int:
        """Returns how many of so many tokens are read in one call.

        On a GPU that is a chunk, or a power of 2: other lengths would need kernels that are not yet compiled.
        """
        if tokens >= self._chunk or not self._steps_end:
            return min(tokens, self._chunk)
        return 1 << (tokens.bit_length() - 1) if tokens >= _LEAST else 1

    def _short(self, sequence: Sequence) -> bool:
        """Returns whether steps read the whole prompt: it has fewer tokens than a piece, on a GPU."""
        return self._steps_end > 0 and sequence.length < min(_LEAST, self._chunk) and not sequence.parting

    def _ends_in_steps(self, sequence: Sequence) -> bool:
        """Returns whether steps of the decoding sequences read the rest of a prompt, if there is a rest."""
        return sequence.left <= self._steps_end and sequence.read >= sequence.parting

    def _notice_parting(self, sequence: Sequence) -> None:
        """Looks up, once, where a prompt begins to differ from earlier ones."""
        if not sequence.looked_up:
            sequence.looked_up = True
            parting = self._prefixes.parting(sequence.keys)
            sequence.parting = parting if parting < sequence.length else 0

    def _group(self, first: Sequence) -> list[Sequence]:
        """Returns a new prompt with others that begin with a piece of the same length and end in steps, on a GPU.

        A call with several prompts takes little longer than a call with one. Prompts with the same beginning are read
        one after another, because the later ones find the state of the earlier one.
        """
        if not self._steps_end or first.parting or first.length not in self._lengths(first):
            return [first]
        lengths = self._lengths(first)
        group, alike = [first], set(first.keys.blocks[1:2])
        for each in self.prompts:
            beginning = set(each.keys.blocks[1:2]) if self._prefixes.keeps(each.length) else set()
            if len(group) == _TOGETHER:
                break
            if each is first or each.state is not None or each.length not in lengths or beginning & alike:
                continue
            self._notice_parting(each)
            if not each.parting and not self._prefixes.find(each.keys):
                group.append(each)
                alike |= beginning
        return group

    def _lengths(self, first: Sequence) -> range:
        """Returns the lengths of prompts that may be read together with `first`."""
        if self._short(first):
            return range(1, min(_LEAST, self._chunk))
        piece = self._piece(first.length)
        return range(piece, piece + self._steps_end + 1)
