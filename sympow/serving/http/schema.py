"""The fields of OpenAI's interface that this server accepts, and those that it calls not supported.

The server refuses unknown fields, and values that it does not support.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from sympow.serving.http.fields import only

_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Token = Annotated[int, Field(ge=0, lt=1 << 31)]
_Tokens = Annotated[list[_Token], Field(fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]
# vLLM's clients write -1 or 0 for no limit.
_TopK = Annotated[int, Field(ge=-1, lt=1 << 31), AfterValidator(lambda k: k if k > 0 else None)]
_Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Part(_Body):
    """Is an object within a body. Clients fill such objects up with nulls, which mean that the field is not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given


class StreamOptions(_Part):
    """Describes a stream: `include_usage` asks for a last event with the usage."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None
    continuous_usage_stats: Annotated[Any, only(False)] = None


class ResponseFormat(_Part):
    """Asks for text, the only format that this server has."""

    type: Annotated[Any, only("text")]


# The fields that vLLM adds to OpenAI's interface, by the values that ask for nothing. This server has none of them.
_OF_VLLM: list[tuple[list[Any], str]] = [
    ([], "add_special_tokens allowed_token_ids cache_salt ec_transfer_params guided_choice guided_decoding_backend "
         "guided_grammar guided_json guided_regex guided_whitespace_pattern kv_transfer_params logprob_token_ids "
         "mm_payload mm_processor_kwargs prompt_logprobs repetition_detection request_id session_id stream_interval "
         "structural_tag structured_outputs thinking_token_budget truncate_prompt_tokens truncation_side vllm_xargs"),
    ([False], "early_stopping ignore_eos include_stop_str_in_output return_mm_kwargs return_token_ids "
              "return_token_offsets return_tokens_as_token_ids use_beam_search watermarking"),
    ([0], "min_p min_tokens priority routed_experts_prompt_start"),
    ([1], "length_penalty repetition_penalty"),
    ([[]], "bad_words logits_processors stop_token_ids"),
    ([True, False], "skip_special_tokens spaces_between_special_tokens"),
]  # fmt: skip

if TYPE_CHECKING:
    _VLLMFields = _Body
else:
    _CHECKS = {name: only(*known) for known, names in _OF_VLLM for name in names.split()}
    _VLLMFields = create_model("_VLLMFields", __base__=_Body, **{
        name: (Annotated[Any, _CHECKS[name]], None) for name in sorted(_CHECKS)})  # fmt: skip


class Generation(_VLLMFields):
    """Holds the fields that completions and chat completions share.

    A null means the default.

    `top_k` is not a field of OpenAI: draw from the k likeliest tokens. `user`, `store` and `metadata` have no effect,
    nor have `skip_special_tokens` and `spaces_between_special_tokens`.
    """

    model: Annotated[str, Field(max_length=1024)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: _TopK | None = None
    seed: _Seed | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    logit_bias: Annotated[Any, only({})] = None
    echo: Annotated[Any, only(False)] = None
    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, only("")] = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Returns the stop sequences."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(Generation):
    """Holds the body of /v1/completions."""

    prompt: str | _Tokens | _Texts | Annotated[list[_Tokens], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: Annotated[Any, only(True)] = None
    prompt_embeds: Annotated[Any, only()] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Returns the prompts, each a text or tokens."""
        alone = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast(list[str] | list[list[int]], [self.prompt] if alone else self.prompt)


class TextPart(_Part):
    """Holds a part of a message."""

    type: Annotated[Any, only("text")]
    text: str


class Message(_Part):
    """Holds a message of a conversation.

    An answer of a server can be sent back as it came: its empty fields are accepted.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, only()] = None
    tool_calls: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    reasoning: Annotated[Any, only()] = None
    reasoning_content: Annotated[Any, only()] = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates read it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        more = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": text} | {name: value for name, value in more.items() if value}


class ChatCompletion(Generation):
    """Holds the body of /v1/chat/completions.

    `prompt_cache_key`, `safety_identifier` and `parallel_tool_calls` have no effect.
    """

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: Annotated[Any, only(False)] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    chat_template: Annotated[Any, only()] = None
    chat_template_kwargs: Annotated[Any, only({})] = None
    continue_final_message: Annotated[Any, only(False)] = None
    documents: Annotated[Any, only([])] = None
    include_reasoning: Annotated[Any, only(True, False)] = None
    media_io_kwargs: Annotated[Any, only()] = None
    return_prompt_text: Annotated[Any, only(False)] = None
    modalities: Annotated[Any, only(["text"])] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    audio: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Annotated[Any, only()] = None
    prompt_cache_retention: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    safety_identifier: str | None = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None

    @model_validator(mode="before")
    @classmethod
    def _without_unused_tools(cls, given: Any) -> Any:
        """Leaves out tools that the request itself forbids to call."""
        for choice, tools in (("tool_choice", "tools"), ("function_call", "functions")):
            if isinstance(given, dict) and given.get(choice) == "none" and isinstance(given.get(tools), list):
                given = given | {tools: []}
        return given
