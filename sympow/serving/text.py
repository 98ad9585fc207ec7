"""The text of an answer as its tokens come, cut at stop sequences."""

from __future__ import annotations

from collections.abc import Sequence

from sympow.data import StreamDecoder, Tokenizer


class AnswerText:
    """Turns tokens into text that no later token takes back.

    What may be the beginning of a stop sequence is held until it is certain; a stop sequence and what is behind it
    are never given.

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
        """Returns the text that is certain after one token more; `stopped` is true once a stop sequence came."""
        return self._certain(self._decoder.push([token]))

    def finish(self) -> str:
        """Returns what is held at the end of the answer."""
        if self.stopped:
            return ""
        text = self._certain(self._decoder.finish())
        text, self._held = text + self._held, ""
        return text

    def _certain(self, more: str) -> str:
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
    """Characters at the end of `text` with which `stop` begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
