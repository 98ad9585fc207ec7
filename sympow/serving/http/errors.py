"""Refusals, in the form of OpenAI's interface."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Reports why a request is not answered.

    Args:
        status: of HTTP.
        message: one line: what was expected and what came.
        code: a word for programs.
        param: the field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        """Returns the error as the client reads it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Returns the HTTP response."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)
