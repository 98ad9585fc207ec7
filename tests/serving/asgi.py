"""A client without a network: it calls the application as a server would, and can leave at any moment."""

import asyncio
import json
from typing import NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self) -> list:
        """The events of a stream, comments left out; "[DONE]" as it is."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        texts = [line.removeprefix("data: ") for line in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def call(
    app,
    method: str,
    path: str,
    body: bytes = b"",
    key: str | None = None,
    gone: asyncio.Event | None = None,
    content_type: str | None = "application/json",
    host: str | None = "test",
) -> Answer:
    """Sends a request and returns the answer. Once `gone` is set, the client has left."""
    headers = {"host": host, "content-type": content_type, "authorization": key and f"Bearer {key}"}
    gone, parts, started = gone or asyncio.Event(), [], {"status": 0, "headers": []}
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        for message in sent:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items() if value is not None],
        "server": ("test", 80),
    }
    await app(scope, receive, send)
    answered = {name.decode(): value.decode() for name, value in started["headers"]}
    return Answer(started["status"], answered, b"".join(parts))


def post(app, path: str, fields: dict, **options) -> Answer:
    return asyncio.run(call(app, "POST", path, json.dumps(fields).encode(), **options))


def get(app, path: str, **options) -> Answer:
    return asyncio.run(call(app, "GET", path, **options))
