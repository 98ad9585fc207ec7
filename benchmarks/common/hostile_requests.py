"""Requests that a server must refuse: each is malformed, or asks for what cannot be had."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Bytes that are no valid request of HTTP/1.1.
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X-Header: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n\r\n",
]


class Hostile(NamedTuple):
    """Describes a request that a server has to answer with a status from 400 to 499."""

    method: str
    path: str
    body: bytes


def hostile_requests(count: int, model: str, seed: int = 0) -> Iterator[Hostile]:
    """Yields requests to a server of `model`. The same seed gives the same requests."""
    rng = random.Random(seed)
    kinds: list[Callable[[random.Random, str], Hostile]] = [_wrong_field, _wrong_field, _no_json, _cut, _elsewhere]
    for _ in range(count):
        yield rng.choice(kinds)(rng, model)


def valid(path: str, model: str) -> dict[str, Any]:
    """Returns the body of a valid request."""
    asked = {"prompt": "def main("} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    return {"model": model, "max_tokens": 4, "temperature": 0} | asked


_ANY: dict[str, list[Any]] = {
    "model": [None, 3, "", "another", "../../etc/passwd", ["a"], "x" * 5000],
    "temperature": [-1, 2.5, "hot", [], 1e400, True, {"a": 1}],
    "top_p": [0, -0.5, 1.01, "all", [0.5]],
    "top_k": [-2, -3, 1.5, "many", 10**40],
    "seed": [1.5, "seed", 2**63, -(2**64), 10**400],
    "n": [0, -1, 17, 10**9, "two", 1.5],
    "max_tokens": [0, -5, 10**12, 2.5, "all", [1]],
    "stop": ["", [""], [3], {"a": 1}, ["a"] * 17, "s" * 1025, 5],
    "stream": ["yes", 1, [], "true"],
    "stream_options": [3, {"include_usage": "yes"}, {"other": True}],
    "presence_penalty": [0.5, "none"],
    "logit_bias": [{"3": 5}, [], 3],
    "unknown_field": [1, None, {"a": {"b": []}}],
    "__proto__": [{}],
}
_COMPLETION: dict[str, list[Any]] = {
    "prompt": ["", [], [[]], [""], None, 5, [1.5], [-1], [10**10], ["a", 3], [[1], "a"], {"a": 1}, [10**30], [True]],
    "logprobs": [-1, 21, "all", True],
    "echo": [True, "no"],
    "best_of": [2],
    "suffix": ["end"],
}
_CHAT: dict[str, list[Any]] = {
    "messages": [
        [],
        None,
        "hello",
        [{}],
        [{"role": "root", "content": "a"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": "a", "extra": 1}],
        ["hello"],
    ],
    "top_logprobs": [1, 25, -1],  # without logprobs
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "response_format": [{"type": "json_object"}, 3],
    "max_completion_tokens": [0, -1, 10**12, "a"],
}


def _wrong_field(rng: random.Random, model: str) -> Hostile:
    path = rng.choice([COMPLETIONS, CHAT])
    body = valid(path, model)
    fields = _ANY | (_COMPLETION if path == COMPLETIONS else _CHAT)
    name = rng.choice(list(fields))
    body[name] = rng.choice(fields[name])
    if body[name] is None and rng.random() < 0.5 and name in ("model", "prompt", "messages"):
        del body[name]
    return Hostile("POST", path, json.dumps(body).encode())


def _no_json(rng: random.Random, model: str) -> Hostile:
    bodies = [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{" * 5000,
        b"[" * 200_000,
        b'{"model":' + b'{"a":' * 20_000,
        b'{"model": NaN}',
        b"model=demo&prompt=hello",
        b"\xff\xfe\x00{",
        b'{"model": "\\ud800", "prompt": "\xff"}',
        rng.randbytes(rng.randrange(1, 300)),
        b'{"temperature": ' + b"9" * 10_000 + b"}",
    ]
    return Hostile("POST", rng.choice([COMPLETIONS, CHAT]), rng.choice(bodies))


def _cut(rng: random.Random, model: str) -> Hostile:
    path = rng.choice([COMPLETIONS, CHAT])
    whole = json.dumps(valid(path, model)).encode()
    return Hostile("POST", path, whole[: rng.randrange(len(whole))])


def _elsewhere(rng: random.Random, model: str) -> Hostile:
    places = [
        ("GET", COMPLETIONS),
        ("PUT", CHAT),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/models/../../etc/passwd"),
        ("GET", "/v1/models/another"),
        ("GET", "/v1/models/%00%ff"),
        ("POST", "/"),
        ("GET", "/" + "a" * 3000),
        ("POST", "/v1/completions/.."),
        ("PATCH", "/health"),
    ]
    method, path = rng.choice(places)
    return Hostile(method, path, json.dumps(valid(COMPLETIONS, model)).encode() if method == "POST" else b"")
