"""Builds the text of an answer token by token, and cuts it at stop sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sympow.data import StreamDecoder, Tokenizer


class AnswerText:
    """Turns tokens into text.

    Text that was returned does not change later.

    Text that may be the beginning of a stop sequence is held back until this is decided. A stop sequence and the text
    after it are never returned.

    Args:
        tokenizer: of the model.
        stop: texts that end the answer. The first one that is complete ends it, of several the longest.

    Attributes:
        stopped: whether a stop sequence came.
        decoded: the number of characters of the tokens so far.
        given: the number of characters that were returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._decoder = StreamDecoder(tokenizer)
        self._stops = [_Stop(each) for each in stop]
        self._held = ""
        self.stopped = False
        self.decoded = self.given = 0

    def push(self, token: int) -> str:
        """Adds a token, and returns the text that is now decided. Sets `stopped` if a stop sequence came."""
        return self._certain(self._decoder.push([token]))

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the answer."""
        if self.stopped:
            return ""
        text = self._certain(self._decoder.finish())
        self.given += len(self._held)
        text, self._held = text + self._held, ""
        return text

    def _certain(self, more: str) -> str:
        start = len(self._held)
        self._held += more
        self.decoded += len(more)
        kept = 0
        if self._stops:
            for place, character in enumerate(more, start + 1):
                ended = [len(stop.text) for stop in self._stops if stop.ends_with(character)]
                if ended:
                    self.stopped = True
                    self._held = self._held[: place - max(ended)]
                    break
            kept = 0 if self.stopped else max(stop.begun for stop in self._stops)
        cut = len(self._held) - kept
        text, self._held = self._held[:cut], self._held[cut:]
        self.given += cut
        return text


class _Stop:
    """Looks for a text in characters that come one at a time, by the algorithm of Knuth, Morris and Pratt.

    Attributes:
        text: what is looked for.
        begun: how many of its characters are at the end of the characters so far.
    """

    def __init__(self, text: str):
        self.text, self.begun, self._borders = text, 0, _borders(text)

    def ends_with(self, character: str) -> bool:
        """Adds a character, and returns whether the characters so far end with the text."""
        while self.begun and self.text[self.begun] != character:
            self.begun = self._borders[self.begun - 1]
        self.begun += self.text[self.begun] == character
        return self.begun == len(self.text)


@lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """Returns, for each beginning of a text, the length of its longest shorter beginning that is also its end."""
    borders, length = [0], 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length - 1]
        length += text[length] == character
        borders.append(length)
    return tuple(borders)
