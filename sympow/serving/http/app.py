"""The routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sympow.serving.http.answer_queue import AnswerQueue, ClientLeftError, while_connected
from sympow.serving.http.answers import DONE, Answer, ChatAnswer, CompletionAnswer, event, usage_of
from sympow.serving.http.errors import ApiError
from sympow.serving.http.fields import parsed
from sympow.serving.http.hosts import HostCheck
from sympow.serving.http.schema import ChatCompletion, Completion, Generation
from sympow.serving.http.service import Service
from sympow.serving.requests import Output, Request, Usage

_ALIVE_EVERY = 15.0  # seconds without an event, after which a comment shows that the stream is still open
_DEFAULT_NEW = 16  # tokens of a completion that names no number, as OpenAI's
# Bytes of a body behind its limit that are read and dropped. Many clients send the whole body before they read an
# answer, and an answer before that closes the connection.
_DROPPED = 1 << 26
_JSON = re.compile(r'application/json *(; *charset="?utf-?8"?)? *;?', re.IGNORECASE)
_ENDING = ApiError(503, "the server is shutting down", code="shutting_down")
_REFUSALS = {"timeout": 504, "cancelled": 503, "error": 500}


def make_app(service: Service, hosts: Collection[str] | None = None) -> Starlette:
    """Returns the ASGI application of a model.

    Args:
        service: the model.
        hosts: the hosts, beside localhost, that requests may name in their header Host; None: all hosts.
    """
    routes = _Routes(service)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.guarded(routes.completions), methods=["POST"]),
            Route("/v1/chat/completions", routes.guarded(routes.chat), methods=["POST"]),
            Route("/v1/models", routes.guarded(routes.models), methods=["GET"]),
            Route("/v1/models/{name:path}", routes.guarded(routes.model), methods=["GET"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
        ],
        middleware=[] if hosts is None else [Middleware(HostCheck, hosts)],
        exception_handlers={HTTPException: _no_such_place, Exception: _fault},
    )


class _Routes:
    def __init__(self, service: Service):
        self._service = service

    def guarded(
        self, route: Callable[[HttpRequest], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Returns the route with a check of the API key, and with refusals as responses."""

        async def answer(request: HttpRequest) -> Response:
            try:
                self._service.authorize(request.headers.get("authorization"))
                response = await route(request)
            except ApiError as error:
                response = error.response()
            except (ClientLeftError, ClientDisconnect):
                response = Response(status_code=499)  # the client has left, so nobody reads this response
            except asyncio.CancelledError:  # the server ends, and its grace is over
                response = _ENDING.response()
            self._service.metrics.answered(response.status_code)
            return response

        return answer

    async def completions(self, request: HttpRequest) -> Response:
        service, body = self._service, await self._body(request, Completion)
        given = body.prompts
        if not given:
            raise ApiError(400, "prompt: expected at least one; got an empty list", param="prompt")
        service.check_choices(body, len(given))
        prompts = await asyncio.to_thread(lambda: [service.tokens_of(prompt, begins=True) for prompt in given])
        new = _DEFAULT_NEW if body.max_tokens is None else body.max_tokens
        inbox = AnswerQueue()
        requests = service.requests(body, prompts, inbox, new=new, param="max_tokens", logprobs=body.logprobs)
        answer = CompletionAnswer(service.name, service.tokenizer, body.logprobs is not None)
        return await self._answered(request, body, requests, inbox, answer)

    async def chat(self, request: HttpRequest) -> Response:
        service, body = self._service, await self._body(request, ChatCompletion)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        template, messages = service.chat_template(), [message.plain() for message in body.messages]
        prompt = await asyncio.to_thread(lambda: service.tokens_of(template.render(messages), "messages"))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        named = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
        given = {name: value for name, value in named.items() if value is not None}
        if len(set(given.values())) > 1:
            got = f"{body.max_tokens} and {body.max_completion_tokens}"
            raise ApiError(400, f"expected max_tokens or max_completion_tokens; got {got}", param="max_tokens")
        param, new = next(iter(given.items()), ("max_tokens", service.limits.new_tokens))
        inbox = AnswerQueue()
        requests = service.requests(body, [prompt], inbox, new=new, param=param, logprobs=logprobs)
        answer = ChatAnswer(service.name, service.tokenizer, bool(body.logprobs))
        return await self._answered(request, body, requests, inbox, answer)

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: HttpRequest) -> Response:
        alive = self._service.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {"id": service.name, "object": "model", "created": service.created, "owned_by": "sympow"}

    async def _body(self, request: HttpRequest, schema: type[Any]) -> Any:
        """Reads and checks the body of a request.

        The content type must be that of JSON. A browser sends other types to any server without asking that server.
        """
        sent = request.headers.get("content-type", "")
        if not _JSON.fullmatch(sent.strip()):
            shown = sent[:200].encode("ascii", "backslashreplace").decode() or "none"
            raise ApiError(415, f"expected the header Content-Type: application/json, got {shown}", code="content_type")
        limits, content, size = self._service.limits, bytearray(), 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= limits.body_bytes:
                        content += chunk
                    elif size > limits.body_bytes + _DROPPED:
                        break
        except TimeoutError:
            raise ApiError(408, f"the request took longer than {limits.body_seconds:g} s to send") from None
        if size > limits.body_bytes:
            raise ApiError(413, f"a request has at most {limits.body_bytes:,} bytes", code="too_large")
        body = await asyncio.to_thread(parsed, schema, bytes(content))
        self._service.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream to be true", param="stream_options")
        return body

    async def _answered(
        self, request: HttpRequest, body: Generation, requests: Sequence[Request], inbox: AnswerQueue, answer: Answer
    ) -> Response:
        try:
            await asyncio.to_thread(self._service.submit, requests)
            if body.stream:
                answer.ends_with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
                events = _events(inbox, len(requests), answer, body.n or 1)
                limits = self._service.limits
                return _EventStream(events, requests, limits.seconds + limits.body_seconds)
            choices = await while_connected(request.receive, _collected(inbox, len(requests)))
        except BaseException:
            _cancel(requests)
            raise
        usages = [_usage(choice) for choice in choices]
        for choice in choices:
            _refuse_unfinished(choice)
        return JSONResponse(answer.whole(choices, usage_of(usages, body.n or 1)))


class _EventStream(Response):
    """Sends server-sent events, and cancels the requests if the client leaves, or if it does not read for so long.

    Args:
        events: what to send.
        requests: the requests whose answers the events are.
        seconds: the longest time until all is sent.
    """

    def __init__(self, events: AsyncIterator[bytes], requests: Sequence[Request], seconds: float):
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
        super().__init__(media_type="text/event-stream", headers=unbuffered)
        del self.headers["content-length"]
        self._events, self._requests, self._seconds = events, requests, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with asyncio.timeout(self._seconds):
                await while_connected(receive, self._write(send))
        except (ClientLeftError, OSError):  # also a TimeoutError
            return
        except asyncio.CancelledError:  # the server ends, and its grace is over
            last = event(_ENDING.body()) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            _cancel(self._requests)

    async def _write(self, send: Send) -> None:
        async for content in self._events:
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(inbox: AnswerQueue, count: int, answer: Answer, n: int) -> AsyncIterator[bytes]:
    """Yields the events of `count` choices."""
    usages: dict[int, Usage] = {}
    opened: set[int] = set()
    while len(usages) < count:
        pieces = await inbox.get(_ALIVE_EVERY)
        if not pieces:
            yield b": the request waits, or its prompt is read\n\n"
        events = []
        for index, output in _merged(pieces):
            opening = None if index in opened else answer.opening(index)
            opened.add(index)
            if opening is not None:
                events.append(opening)
            try:
                _refuse_unfinished(output)
            except ApiError as error:
                yield b"".join([*events, event(error.body()), DONE])
                return
            events.append(answer.piece(index, output))
            if output.finish is not None:
                usages[index] = _usage(output)
        if events:
            yield b"".join(events)
    if answer.ends_with_usage:
        yield answer.usage(usage_of([usages[i] for i in range(count)], n))
    yield DONE


def _merged(pieces: Sequence[tuple[int, Output]]) -> list[tuple[int, Output]]:
    """Joins the pieces of each choice, and leaves out empty ones."""
    merged: dict[int, Output] = {}
    for index, output in pieces:
        before = merged.get(index)
        merged[index] = output if before is None else before.followed_by(output)
    return [(i, each) for i, each in merged.items() if each.text or each.finish is not None or each.logprobs]


async def _collected(inbox: AnswerQueue, count: int) -> list[Output]:
    """Returns the whole answers of `count` choices."""
    done: dict[int, Output] = {}
    while len(done) < count:
        done |= dict(await inbox.get(_ALIVE_EVERY))
    return [done[i] for i in range(count)]


def _usage(output: Output) -> Usage:
    if output.usage is None:
        raise RuntimeError("the last piece of an answer has a usage")
    return output.usage


def _refuse_unfinished(output: Output) -> None:
    """Raises ApiError if the server, not the model, has ended an answer."""
    if output.finish in _REFUSALS:
        reasons = {"timeout": "the answer took too long", "cancelled": "the server is shutting down"}
        message = reasons.get(output.finish, "the model failed on this request")
        raise ApiError(_REFUSALS[output.finish], message, code=output.finish)


def _cancel(requests: Sequence[Request]) -> None:
    for request in requests:
        request.cancel()


async def _no_such_place(request: HttpRequest, error: Exception) -> Response:
    """Answers requests for unknown paths and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    allowed = (error.headers or {}).get("Allow") if isinstance(error, HTTPException) else None
    what = f"{request.method} {request.url.path[:200]}"
    message = f"this server has no {what}: see /v1/models" if allowed is None else f"this path takes {allowed}"
    return ApiError(status, message, code="not_found").response()


async def _fault(request: HttpRequest, error: Exception) -> Response:
    """Answers a request on which the server failed. Starlette logs the error."""
    return ApiError(500, "the server failed on this request", code="fault").response()
