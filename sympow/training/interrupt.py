"""Turns Ctrl-C and SIGTERM into a request that the training loop reads between steps."""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

_TWICE = 1.0  # seconds within which a second SIGTERM is the same request: `timeout` and schedulers send two


def _say(text: str) -> None:
    """Writes to stderr past its buffer, which the signal may have interrupted in the middle of a write."""
    try:
        os.write(sys.stderr.fileno(), text.encode())
    except (AttributeError, OSError, ValueError):  # no stderr, or one without a file
        return


class StopRequest:
    """Sets `signal` at the first SIGINT or SIGTERM inside its `with` block.

    The next signal goes to the previous handler, unless `patient` is true. A second SIGTERM in the same second has no
    effect, because a command such as `timeout` sends it to a process and to its group. Python handles signals in the
    main thread only. In other threads the block has no effect, and `signal` remains None.

    Args:
        patient: whether further signals in the block have no effect either.
        doing: what the first signal prints, such as "stopping after this step"; None: nothing.
    """

    def __init__(self, patient: bool = False, doing: str | None = None) -> None:
        self._patient, self._doing = patient, doing
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            twice = number == self.signal == signal.SIGTERM and time.monotonic() < self._since + _TWICE
            if not self._patient and not twice:
                self._restore()
                signal.raise_signal(number)
            return
        self.signal, self._since = signal.Signals(number), time.monotonic()
        if self._doing is not None:
            _say(f"\n{self._doing}{'' if self._patient else '; again to stop now'}\n")

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
