"""Reads a body of JSON, and names the first field that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from sympow.serving.http.errors import ApiError

_FIELDS = 1000  # the most fields of an object: each unknown one takes the memory of an error

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Body = TypeVar("Body", bound=BaseModel)


def only(*known: Any) -> PlainValidator:
    """Returns the check of a field that this server does not support.

    Null is accepted, and so are values that ask for nothing else than the server does.
    """
    empty = {"[]": "an empty list", "{}": "an empty object"}
    accepted = " or ".join(empty.get(text, text) for text in map(json.dumps, known)) or "null"

    def check(value: Any) -> Any:
        if value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known):
            return value
        raise PydanticCustomError("not_supported", "not supported; expected {accepted}", {"accepted": accepted})

    return PlainValidator(check)


def parsed(schema: type[Body], content: bytes) -> Body:
    """Parses the body of a request. Raises ApiError 400 that names the first wrong field by its path."""
    body = _json(content)
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise _refusal(body, error) from None


def _refusal(body: Any, error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    places = [(each, *_place(body, each["loc"])) for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    # A field of several types has an error for each of them: the error furthest in belongs to the type that was meant.
    first, path, found = max(places, key=lambda place: _depth(place[1], place[0]["type"]))
    kind, message = first["type"], " ".join(str(first["msg"]).split())
    if kind == "model_type":
        message = "Input should be an object"
    if kind == "missing":
        path = [*path, first["loc"][-1]]
    elif kind not in ("extra_forbidden", "too_long", "too_short"):
        message += f"{',' if kind == 'not_supported' else ';'} got {_shown(found)}"
    param = ".".join(map(str, path))[:200]
    return ApiError(400, f"{param or 'the body'}: {message}", code=kind, param=param or None)


def _place(body: Any, loc: Sequence[int | str]) -> tuple[list[int | str], Any]:
    """Returns the path in the body to the place of an error, and the value there.

    Pydantic's places also contain the names of types, where a field may have several. The body has no such fields.
    """
    path: list[int | str] = []
    for part in loc:
        inside = isinstance(body, dict) and part in body
        if inside or (isinstance(body, list) and isinstance(part, int) and part < len(body)):
            path, body = [*path, part], body[part]
    return path, body


def _depth(path: Sequence[int | str], kind: str) -> tuple[list[int], int, bool]:
    return [part for part in path if isinstance(part, int)], len(path), not kind.endswith("_type")


def _json(content: bytes) -> Any:
    """Parses JSON. Raises ApiError 400, also for what parsers read in different ways, such as a field given twice."""
    try:
        body = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_no_number)
        if _SURROGATE.search(content):
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except UnicodeDecodeError as error:
        wrong = f"expected UTF-8, got {content[error.start]:#04x} at byte {error.start:,}"
    except UnicodeEncodeError:
        wrong = "a text has half of a surrogate pair"
    except json.JSONDecodeError as error:
        wrong = str(error)
    except RecursionError:
        wrong = "lists and objects are nested too deeply"
    except ValueError:  # Python reads only so many digits, since the time grows with their square
        wrong = "a number has too many digits"
    raise ApiError(400, f"the body is no valid JSON: {wrong}", code="json_invalid")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _FIELDS:
        message = f"an object of the body has at most {_FIELDS:,} fields; got {len(pairs):,}"
        raise ApiError(400, message, code="json_invalid")
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise _twice(name)
        made[name] = value
    return made


def _twice(name: str) -> ApiError:
    shown = name[:200].encode("utf-8", "backslashreplace").decode()
    return ApiError(400, f"{shown}: the field is there twice", code="json_invalid", param=shown)


def _no_number(name: str) -> NoReturn:
    raise ApiError(400, f"the body is no valid JSON: {name} is no number of JSON", code="json_invalid")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
