"""The server's process: its socket, its signals, and its shutdown."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from types import FrameType

import uvicorn
from h11 import LocalProtocolError
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from sympow.serving.http.answer_queue import left
from sympow.serving.http.app import make_app
from sympow.serving.http.hosts import ANY, is_loopback
from sympow.serving.http.service import Service

_CONNECTIONS = 4096  # at a time; more are answered 503
_SWITCH_SECONDS = 0.0005


class _Server(uvicorn.Server):
    """Calls `ending` at the first signal to end."""

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]):
        super().__init__(config)
        self._ending = ending

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first = not self.should_exit
        super().handle_exit(sig, frame)
        if first:
            with suppress(OSError, RuntimeError):  # nobody reads stderr, or something is being written there
                self._ending()


def run_server(
    service: Service,
    host: str,
    port: int,
    *,
    grace: int,
    started: Callable[[str], None],
    ending: Callable[[], None],
    allowed_hosts: Collection[str] = (),
) -> None:
    """Serves until SIGINT or SIGTERM. Running requests then get `grace` seconds to end, or until a second SIGINT.

    Args:
        service: the service; its engine is started here, and closed at the end.
        host: the address to listen at.
        port: the port to listen at; 0 takes a free one.
        grace: the seconds that running requests get at the end, at least 1.
        started: called with the address when the server accepts requests.
        ending: called at the first of these signals.
        allowed_hosts: hosts that requests may name in their header Host, beside localhost and `host`; "*" allows all.
            Without them, requests are checked on the loopback device only.

    Raises ValueError for a port out of range, OSError if the address cannot be used.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"a port is a number from 0 to 65,535; got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}"
    checks = ANY not in allowed_hosts and (bool(allowed_hosts) or is_loopback(listening.getsockname()[0]))
    app = make_app(service, [host, *allowed_hosts] if checks else None)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        started(address)
        yield

    app.router.lifespan_context = lifespan

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if server.force_exit and message["type"] == "lifespan.shutdown.failed":
                message = {**message, "message": ""}  # the traceback of a cancelled task, which uvicorn would log
            await send(message)

        try:
            await app(scope, receive, told if scope["type"] == "lifespan" else send)
        except LocalProtocolError:  # what began as a request was none: uvicorn answers, and closes the connection
            await left(receive)

    config = uvicorn.Config(
        quiet,
        http="h11",
        ws="none",
        lifespan="on",
        log_level="error",
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=grace,
        server_header=False,
    )
    server = _Server(config, ending)
    # uvicorn raises the signal again after its shutdown, when the signal needs no further action.
    # The engine's thread waits for a GPU in every step, and then needs the interpreter at once. With the default switch
    # interval the event loop would keep the interpreter for 5 ms.
    switching = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    service.engine.start()
    try:
        server.run(sockets=[listening])
    finally:
        service.engine.close()
        listening.close()
        sys.setswitchinterval(switching)
        for number, handler in previous.items():
            signal.signal(number, handler)
