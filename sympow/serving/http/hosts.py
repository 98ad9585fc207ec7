"""Refuses requests that name another host, so that a web page cannot use the server of its reader.

A browser lets a page read answers of the page's own host only. Whoever owns the name of that host can let it point to
127.0.0.1, and a server on this address then gets requests of the page. They name the page's host in the header Host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sympow.serving.http.errors import ApiError

ANY = "*"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(:\d{1,5})?", re.IGNORECASE)


class HostCheck:
    """Answers 403 to requests for other hosts.

    Args:
        app: gets the other requests.
        names: hosts, without ports, beside localhost and the addresses of the loopback device.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]):
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            if host is not None and not is_host(host, self._names):  # a browser always sends one
                shown = host[:200].encode("ascii", "backslashreplace").decode()
                message = f"expected the header Host to name this server, got {shown!r}; see --allowed-host"
                await ApiError(403, message, code="unknown_host").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_host(header: str, names: Collection[str]) -> bool:
    """Returns whether a header Host names localhost, an address of the loopback device, or one of `names`."""
    found = _HOST.fullmatch(header)
    if found is None:
        return False
    name = found[1].strip("[]").lower().removesuffix(".")
    return name == "localhost" or name in {each.strip("[]").lower() for each in names} or is_loopback(name)


def is_loopback(address: str) -> bool:
    """Returns whether a text is an address of the loopback device, which other machines do not reach."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
