"""Builds the text of an answer token by token, and cuts it at stop sequences."""

from __future__ import annotations

from collections.abc import Sequence

from sympow.data import StreamDecoder, Tokenizer


class AnswerText:
    """Turns tokens into text.

    Text that was returned does not change later.

    Text that may be the beginning of a stop sequence is held back until this is decided. A stop sequence and the text
    after it are never returned.

    Args:
        tokenizer: of the model.
        stop: texts that end the answer.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._decoder = StreamDecoder(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token, and returns the text that is now decided. Sets `stopped` if a stop sequence came."""
        return self._certain(self._decoder.push([token]))

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the answer."""
        if self.stopped:
            return ""
        text = self._certain(self._decoder.finish())
        text, self._held = text + self._held, ""
        return text

    def _certain(self, more: str) -> str:
        if not self._stop:
            return more
        self._held += more
        ends = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            text, self._held = self._held[: min(ends)], ""
            return text
        kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of `text` are a beginning of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
