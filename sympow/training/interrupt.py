"""Ctrl-C and SIGTERM as a request that the loop reads between steps."""

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Sets `.signal` at the first SIGINT or SIGTERM while it is entered.

    The second signal does what it did before, or nothing if `patient`.

    Outside the main thread, where Python handles no signals, it changes nothing and never asks to stop.
    """

    def __init__(self, patient: bool = False) -> None:
        self._patient = patient
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _request(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if not self._patient:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
