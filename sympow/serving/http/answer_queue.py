"""Hands answers from the engine's thread to an event loop, and notices clients that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from sympow.serving.requests import Output

T = TypeVar("T")


class AnswerQueue:
    """Collects the pieces of one client's answers.

    `put` works in any thread, `get` in the event loop of the queue.

    A reader that is slower than the engine gets several pieces at once; the engine never waits.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._pieces: list[tuple[int, Output]] = []

    def put(self, choice: int, output: Output) -> None:
        """Adds a piece of the answer with this index."""
        with self._lock:
            self._pieces.append((choice, output))
            wake = len(self._pieces) == 1
        if wake:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self, timeout: float) -> list[tuple[int, Output]]:
        """Waits for a piece, and returns all pieces since the last call; none after `timeout` seconds."""
        # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with a piece.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._arrived.wait()
        self._arrived.clear()
        with self._lock:
            pieces, self._pieces = self._pieces, []
        return pieces


class ClientLeftError(Exception):
    """Reports a client that closed its connection before its answer was complete."""


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`.

    Cancels it and raises ClientLeftError if the client leaves first.

    Args:
        receive: of ASGI, after the whole body was read.
        work: what the client waits for.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Waits until the client has left. `receive` is of ASGI."""
    while (await receive())["type"] != "http.disconnect":
        continue
