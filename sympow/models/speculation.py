"""Speculative decoding: the model reads several draft tokens in one step, and accepts those that it draws itself.

A draft token is accepted if the model's own draw is that token. So drafts change no token that is drawn, at any
temperature: the draws use the same random numbers in the same order. Drafts change how many steps the tokens take. (A
step of several tokens rounds differently from steps of one token each.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from sympow.fields import check_integer
from sympow.models.lm import LanguageModel, ModelState

_MOST = 16  # draft tokens in a step
_LEAST = 3
_LONGEST_PAUSE = 64  # tokens


class Drafts(ABC):
    """Proposes the next tokens of one text. A subclass implements `propose`.

    Attributes:
        proposed: draft tokens since `begin`.
        accepted: how many of them the model has accepted.
    """

    proposed = 0
    accepted = 0

    def begin(self, model: LanguageModel) -> None:
        """Forgets the last text; a text of `model` follows. Raises ValueError if the drafts do not fit the model."""
        self.proposed = self.accepted = 0

    @abstractmethod
    def propose(self, new: Sequence[int], most: int) -> list[int]:
        """Returns at most `most` draft tokens. A stream raises ValueError if they are more.

        Args:
            new: the tokens of the text since the last call.
            most: the largest number of draft tokens; 0: only read `new`.
        """


class NgramDrafts(Drafts):
    """Finds an earlier occurrence of the last tokens, and proposes the tokens that followed it (prompt lookup).

    Args:
        longest: the largest number of last tokens that are looked up. Larger numbers are looked up first.
        shortest: the smallest number of last tokens that are looked up.

    Raises TypeError for what is no integer, and ValueError unless 1 <= shortest <= longest.
    """

    def __init__(self, longest: int = 5, shortest: int = 2):
        for name, size in (("longest", longest), ("shortest", shortest)):
            check_integer(name, size, 1)
        if shortest > longest:
            raise ValueError(f"1 <= shortest <= longest is expected; got {shortest=}, {longest=}")
        self.sizes = range(longest, shortest - 1, -1)
        self._text: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # the position after the last occurrence before the end of the text

    def begin(self, model: LanguageModel) -> None:
        """Forgets the last text and its n-grams; see `Drafts.begin`."""
        super().begin(model)
        self._text, self._next = [], {}

    def propose(self, new: Sequence[int], most: int) -> list[int]:
        """Returns at most `most` tokens that followed the longest earlier occurrence; see `Drafts.propose`."""
        text = self._text
        for token in new:
            for size in self.sizes:
                if size <= len(text):
                    self._next[tuple(text[-size:])] = len(text)
            text.append(token)
        found = next((self._next[key] for key in self._ends() if key in self._next), None)
        if found is None:
            return []
        draft: list[int] = []
        for at in range(found, found + most):  # after the end of the text, the draft repeats itself
            draft.append(text[at] if at < len(text) else draft[at - len(text)])
        return draft

    def _ends(self) -> Iterator[tuple[int, ...]]:
        return (tuple(self._text[-size:]) for size in self.sizes if size <= len(self._text))


class ModelDrafts(Drafts):
    """Proposes the likeliest tokens of a smaller model, the draft model.

    Args:
        model: the draft model. It reads the prompt and the new text, but not the `context` of a stream.

    Raises TypeError for what is no LanguageModel.
    """

    def __init__(self, model: LanguageModel):
        if not isinstance(model, LanguageModel):
            raise TypeError(f"a draft model must be a LanguageModel; got {type(model).__name__}")
        self.model = model
        self._state = model.init_state(1)
        self._unread: list[int] = []

    def begin(self, model: LanguageModel) -> None:
        """Forgets the last text. Raises ValueError if the vocabulary of `model` is not that of the draft model."""
        super().begin(model)
        own, other = self.model.config.vocab_size, model.config.vocab_size
        if own != other:
            raise ValueError(f"a draft model has the vocabulary of the model, {other} tokens; got {own}")
        self._state, self._unread = self.model.init_state(1), []

    @torch.no_grad()
    def propose(self, new: Sequence[int], most: int) -> list[int]:
        """Returns the `most` likeliest next tokens of the draft model, one after another; see `Drafts.propose`."""
        self._unread += new
        if most == 0:
            return []
        device = self.model.embedding.weight.device
        for piece in torch.tensor([self._unread], device=device).split(1024, dim=1):
            logits, self._state = self.model.step(piece, self._state)
        self._unread, state = [], self._state.clone()
        draft = [logits.argmax(-1)]
        while len(draft) < most:
            logits, state = self.model.step(draft[-1][:, None], state)
            draft.append(logits.argmax(-1))
        return torch.cat(draft).tolist()


class Pace:
    """Decides how many tokens to draft: more while drafts are accepted, none for a while if they cost time.

    The unit of time is a step without drafts, the shortest of the last ones.
    """

    def __init__(self) -> None:
        self._length = 4
        self._plain: float | None = None
        self._gain = 0.0
        self._waiting, self._pause = 0, 1

    def length(self) -> int:
        """Returns how many tokens to draft now; 0 for none."""
        return 0 if self._plain is None or self._waiting else self._length

    def stepped(self, seconds: float) -> None:
        """Records a step without drafts."""
        self._plain = seconds if self._plain is None else min(seconds, 1.05 * self._plain)
        self._waiting = max(0, self._waiting - 1)

    def tried(self, seconds: float, proposed: int, accepted: int) -> None:
        """Records a step with drafts; `seconds` include the time to make them."""
        full = accepted == proposed
        self._length = min(_MOST, 2 * self._length) if full else max(_LEAST, min(self._length, accepted + 1))
        gained = accepted + 1 - seconds / (self._plain or seconds)
        self._gain = (self._gain + max(-2.0, gained)) / 2  # bounded, because a slow step may have compiled a kernel
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
        model: the model whose tokens are drawn.
        token: int64 [1], the last token drawn.
        state: the state after all tokens before `token`.
        count: how many tokens to draw.
        draw: a function that maps logits [1, vocab] to a token [1].
        drafts: the drafts, after their `begin`.
        text: the prompt and `token`.

    Yields tokens [1], each with a state. The state has read all tokens before this token. It may also have read
    accepted tokens after it.
    """
    pace, new = Pace(), list(text)
    while count:
        started = perf_counter()
        most = min(pace.length(), count - 1)
        draft = drafts.propose(new, most)
        if draft is not None and len(draft) > most:  # the text would go on behind its last token
            raise ValueError(f"{type(drafts).__name__}.propose must return at most {most} tokens; got {len(draft)}")
        if draft:
            tokens = torch.cat([token, token.new_tensor(draft)])[None]
            logits, after = model.try_step(tokens, state)
            drawn: list[Tensor] = []
            while not drawn or (len(drawn) <= len(draft) and int(drawn[-1]) == draft[len(drawn) - 1]):
                drawn.append(draw(logits[:, len(drawn)]))
            state = after(len(drawn))
            drafts.proposed += len(draft)
            drafts.accepted += len(drawn) - 1
            pace.tried(perf_counter() - started, len(draft), len(drawn) - 1)
        else:
            logits, state = model.step(token[:, None], state)
            drawn = [draw(logits)]
        new = [int(each) for each in drawn]
        if not draft:
            pace.stepped(perf_counter() - started)
        for each in drawn:
            yield each, state
        token, count = drawn[-1], count - len(drawn)
