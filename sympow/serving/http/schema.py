"""The fields of OpenAI's interface that this server accepts.

The server refuses unknown fields, and values that it does not support.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sympow.serving.http.errors import ApiError

_Zero = Annotated[float, Field(ge=0, le=0)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Token = Annotated[int, Field(ge=0, lt=1 << 31)]
_Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """Describes a stream: `include_usage` asks for a last event with the usage."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Generation(_Body):
    """Holds the fields that completions and chat completions share.

    A null means the default.

    `top_k` is not a field of OpenAI: draw from the k likeliest tokens. `user`, `store` and `metadata` have no effect.
    """

    model: Annotated[str, Field(max_length=1024)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    seed: _Seed | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: _Zero | None = None
    frequency_penalty: _Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Returns the stop sequences."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(Generation):
    """Holds the body of /v1/completions."""

    prompt: str | list[_Token] | list[str] | list[list[_Token]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Returns the prompts, each a text or tokens."""
        alone = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast(list[str] | list[list[int]], [self.prompt] if alone else self.prompt)


class TextPart(_Body):
    """Holds a part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """Holds a message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates read it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ResponseFormat(_Body):
    """Asks for text, the only format that this server has."""

    type: Literal["text"]


class ChatCompletion(Generation):
    """Holds the body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None


Body = TypeVar("Body", bound=BaseModel)


def parsed(schema: type[Body], body: bytes) -> Body:
    """Parses the body of a request. Raises ApiError 400 naming the first wrong field."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        of_first = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
        # A field of several types has an error for each of them: that of the type which was given comes first.
        first = min(of_first, key=lambda each: each["type"].endswith("_type"))
        param = ".".join(str(part) for part in first["loc"][:1]) or None
        message = " ".join(str(first["msg"]).split())
        what = f"{param}: {message}" if param else message
        raise ApiError(400, what[:500], code=str(first["type"]), param=param) from None
