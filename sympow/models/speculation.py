"""Speculative decoding: guesses at the next tokens, which the model reads in one step and keeps while they are right.

A guess is right where the model draws that very token. So guesses change no token that is drawn, neither the likeliest
nor one by chance, whose draws are the same and in the same order: they change how many steps it takes. (As far as
roundings go: products of several tokens are not rounded as those of one are.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from sympow.models.lm import LanguageModel, ModelState

_MOST = 16  # tokens guessed at a time
_LEAST = 3
_LONGEST_PAUSE = 64  # tokens


class Drafts(ABC):
    """Something that guesses the next tokens of one text.

    Attributes:
        proposed: tokens guessed since `begin`.
        accepted: how many of them were right.
    """

    proposed = 0
    accepted = 0

    def begin(self, model: LanguageModel) -> None:
        """Forgets everything; a text of `model` follows. Raises ValueError where it cannot guess for that model."""
        self.proposed = self.accepted = 0

    @abstractmethod
    def propose(self, new: Sequence[int], most: int) -> list[int]:
        """Guesses what follows.

        Args:
            new: the tokens of the text since the last call.
            most: tokens to guess at most; 0 to take notice of `new` alone.
        """


class NgramDrafts(Drafts):
    """Guesses that what followed the last tokens before, in the prompt or in what was written, follows again.

    Args:
        longest, shortest: how many last tokens are looked for, the longest first.
    """

    def __init__(self, longest: int = 5, shortest: int = 2):
        if not 1 <= shortest <= longest:
            raise ValueError(f"1 <= shortest <= longest is expected; got {shortest=}, {longest=}")
        self.sizes = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # where the last occurrence before the end of the text goes on

    def begin(self, model: LanguageModel) -> None:
        super().begin(model)
        self._text, self._next = [], {}

    def propose(self, new: Sequence[int], most: int) -> list[int]:
        text = self._text
        for token in new:
            for size in self.sizes:
                if size <= len(text):
                    self._next[tuple(text[-size:])] = len(text)
            text.append(token)
        found = next((self._next[key] for key in self._ends() if key in self._next), None)
        if found is None:
            return []
        guess: list[int] = []
        for at in range(found, found + most):  # past the end of the text its own beginning follows: a period
            guess.append(text[at] if at < len(text) else guess[at - len(text)])
        return guess

    def _ends(self) -> Iterator[tuple[int, ...]]:
        return (tuple(self._text[-size:]) for size in self.sizes if size <= len(self._text))


class ModelDrafts(Drafts):
    """Guesses what a smaller model of the same tokens finds likeliest.

    Args:
        model: the smaller model. What a `context` holds it has not read: it reads the prompt and what is written.
    """

    def __init__(self, model: LanguageModel):
        self.model = model
        self._state = model.init_state(1)
        self._unread: list[int] = []

    def begin(self, model: LanguageModel) -> None:
        super().begin(model)
        own, other = self.model.config.vocab_size, model.config.vocab_size
        if own != other:
            raise ValueError(f"a draft model has the vocabulary of the model, {other} tokens; got {own}")
        self._state, self._unread = self.model.init_state(1), []

    @torch.no_grad()
    def propose(self, new: Sequence[int], most: int) -> list[int]:
        self._unread += new
        if most == 0:
            return []
        device = self.model.embedding.weight.device
        for piece in torch.tensor([self._unread], device=device).split(1024, dim=1):
            logits, self._state = self.model.step(piece, self._state)
        self._unread, state = [], self._state.clone()
        guess = [logits.argmax(-1)]
        while len(guess) < most:
            logits, state = self.model.step(guess[-1][:, None], state)
            guess.append(logits.argmax(-1))
        return torch.cat(guess).tolist()


class Pace:
    """Decides how many tokens to guess: more while guesses are right, none for a while where they cost time.

    Time is counted in steps without guesses, whose duration is the shortest of late.
    """

    def __init__(self) -> None:
        self._length = 4
        self._plain: float | None = None
        self._gain = 0.0
        self._waiting, self._pause = 0, 1

    def length(self) -> int:
        """How many tokens to guess now; 0 for none."""
        return 0 if self._plain is None or self._waiting else self._length

    def stepped(self, seconds: float) -> None:
        """Takes notice of a step without guesses."""
        self._plain = seconds if self._plain is None else min(seconds, 1.05 * self._plain)
        self._waiting = max(0, self._waiting - 1)

    def tried(self, seconds: float, proposed: int, accepted: int) -> None:
        """Takes notice of a step with guesses, the time to guess included."""
        full = accepted == proposed
        self._length = min(_MOST, 2 * self._length) if full else max(_LEAST, min(self._length, accepted + 1))
        gained = accepted + 1 - seconds / (self._plain or seconds)
        self._gain = (self._gain + max(-2.0, gained)) / 2  # a step that compiles a kernel is not held against the next
        if self._gain >= 0:
            self._pause = 1
        else:
            self._waiting, self._pause = self._pause, min(_LONGEST_PAUSE, 2 * self._pause)


def speculative_steps(
    model: LanguageModel,
    token: Tensor,
    state: ModelState,
    count: int,
    draw: Callable[[Tensor], Tensor],
    drafts: Drafts,
    text: Sequence[int],
) -> Iterator[tuple[Tensor, ModelState]]:
    """Draws `count` tokens more after `token` [1], as `draw` would from one step after another.

    Args:
        state: what has read all before `token`.
        draw: logits [1, vocab] to a token [1].
        drafts: begun.
        text: the prompt and `token`.

    Yields tokens [1], and the state, which has read the tokens before the one yielded, and perhaps some behind it.
    """
    pace, new = Pace(), list(text)
    while count:
        started = perf_counter()
        guess = drafts.propose(new, min(pace.length(), count - 1))
        if guess:
            tokens = torch.cat([token, token.new_tensor(guess)])[None]
            logits, after = model.try_step(tokens, state)
            drawn: list[Tensor] = []
            while not drawn or (len(drawn) <= len(guess) and int(drawn[-1]) == guess[len(drawn) - 1]):
                drawn.append(draw(logits[:, len(drawn)]))
            state = after(len(drawn))
            drafts.proposed += len(guess)
            drafts.accepted += len(drawn) - 1
            pace.tried(perf_counter() - started, len(guess), len(drawn) - 1)
        else:
            logits, state = model.step(token[:, None], state)
            drawn = [draw(logits)]
        new = [int(each) for each in drawn]
        if not guess:
            pace.stepped(perf_counter() - started)
        for each in drawn:
            yield each, state
        token, count = drawn[-1], count - len(drawn)
