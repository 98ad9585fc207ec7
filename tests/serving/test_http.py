"""OpenAI's interface: answers, streams, refusals, clients that leave."""

import asyncio
import json
import re
import time

import pytest
import torch
from pydantic import ValidationError

from benchmarks.common.hostile_requests import CHAT, COMPLETIONS, hostile_requests, valid
from sympow.data import ByteTokenizer
from sympow.models import generate
from sympow.serving import Engine
from sympow.serving.engine_time import PARTS
from sympow.serving.http import ChatTemplate, Limits, Service, make_app, sandbox
from sympow.serving.http.errors import ApiError
from sympow.serving.http.fields import parsed
from sympow.serving.http.schema import ChatCompletion, Completion
from tests.serving.asgi import call, get, post

TOKENIZER = ByteTokenizer()
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

MESSAGES = [{"role": "user", "content": "a<b é"}, {"role": "assistant", "content": "c"}]
# Templates in the form of Hugging Face tokenizers, and what they make of MESSAGES.
RENDERED = [
    (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
        "[a<b é]c</s>",
    ),
    ("{%- generation -%}  {% set x = 'a' %}{{ x }} {%- endgeneration -%} {{ x }}", "a"),
    ("{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
     "1user2assistant"),
    ("{{ 'tools' if tools is not none else 'none' }} {{ tools is defined }} {{ tools }}", "none True None"),
    ("{{ 'documents' if documents is not none else 'none' }} {{ add_generation_prompt }}", "none True"),
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a<b é"}'),
    ("{{ messages[0] | tojson(ensure_ascii=True) }}", '{"role": "user", "content": "a<b \\u00e9"}'),
    ("{{ messages[0] | tojson(separators=(',', ':')) }}", '{"role":"user","content":"a<b é"}'),
    ("{{ messages[0] | tojson(sort_keys=True) }}", '{"content": "a<b é", "role": "user"}'),
    ("{{ {'b': 1, 'a': [1]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  1\n ]\n}'),
    ("{{ {'b': 1} | tojson(indent='--') }}", '{\n--"b": 1\n}'),
    ("{{ messages[0] | tojson(True, None, (',', ':'), True) }}", '{"content":"a<b \\u00e9","role":"user"}'),
    ("{{ messages[0]['tool_calls'] is defined }} {{ messages[0].name is defined }}", "False False"),
    ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
    ("{{ 10.0 ** 3 }} {{ 2 ** 3 }} {{ 3 * 4 }} {{ 7 % 4 }} {{ 'x' * 3 }} {{ [1] + [2] }} {{ 1 ~ 'a' ~ none }}",
     "1000.0 8 12 3 xxx [1, 2] 1aNone"),
    ("{{ '%s %05.1f%% *' % ('a', 3) }} {{ '{{\"a\": \"{:>3}\"}} {}'.format('a', 1700000000) }} {{ '%s'|format(2) }}",
     'a 003.0% * {"a": "  a"} 1700000000 2'),
    ("{{ messages[1:][0].content[:1] }} {{ messages|map(attribute='role')|join(', ') }} {{ [1, 2]|sum }}",
     "c user, assistant 3"),
    ("{{ ', '.join(messages|map(attribute='role')) }} {{ 'a-b'.replace('-', '+') }} {{ 'a\nb'|indent(2) }}",
     "user, assistant a+b a\n  b"),
    ("{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.role }}{% else %}none{% endfor %}", "1user"),
    ("{% for m in [[1, [2]]] recursive %}{% for x in m if x is iterable %}{{ x }}{% endfor %}{% endfor %}", "[2]"),
    ("{% macro f(x) %}<{{ x }}>{{ caller() }}{% endmacro %}{% call f('a') %}b{% endcall %}", "<a>b"),
    ("{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x + m.role ~ 1 %}{% endfor %}{{ n.x }}",
     "user1assistant1"),
]  # fmt: skip
FAILING = [
    "{{ 1 // 0 }}", "{{ 1 / 0 }}", "{{ messages[0].role.x.y }}", "{{ messages[0] + 1 }}", "{{ 10.0 ** 400 }}",
    "{{ messages | tojson(indent=[]) }}", "{{ messages | tojson(what=1) }}", "{{ range(10 ** 9) | list }}",
    "{{ {}['a'].b() }}", "{{ ''.join() }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.append(1) }}", "{{ 'a'.encode('ascii', 3) }}",
    "{{ raise_exception('no\nline') }}", "{{ raise_exception('') }}", "{{ '%d' % 'a' }}", "{{ '{x}'.format() }}",
    "{{ [][3] | int / messages[7] }}", "{{ strftime_now(3) }}", "{{ 'é'.encode('ascii') }}", "{% include 'a' %}",
]  # fmt: skip
LONG = "expected texts of at most 1,000,000 characters; got about "
MANY = "expected at most 10,000 steps and 10,000,000 characters; got more"
WIDE = "expected a format with widths of at most 5 digits in it"
DEEP = "{% set n = namespace(x=['a']) %}{% for i in range(20) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
# Templates that take time or memory without a bound, here at sizes that a machine can do.
UNBOUNDED = [
    ("{{ 2 ** 10001 }}", "expected integers of at most 10,000 bits; got about 2.0e+04"),
    ("{{ (2 ** 4999 * 2 ** 4999) * 4 }}", "expected integers of at most 10,000 bits; got about 1.0e+04"),
    ("{{ ('a' * 60000000)|length }}", LONG + "6.0e+07"),
    ("{{ ([0] * 1000000)|length }}", LONG + "1.0e+08"),
    ("{% for a in range(1001) %}{% for b in range(1000) %}{% endfor %}{% endfor %}", MANY),
    ("{% for a in range(101) %}{% for b in range(9999) if b < 0 %}{% endfor %}{% endfor %}", MANY),
    ("{% for a in range(101) %}{{ range(9999)|select('none')|list }}{% endfor %}", MANY),
    ("{% set x %}{% for a in range(9999) %}" + "x" * 10000 + "{% endfor %}{% endset %}", MANY),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(18) }}", MANY),
    ("{% set n = namespace(x='aaaa') %}{% for i in range(24) %}{% set n.x = n.x + n.x %}{% endfor %}", LONG),
    ("{% set n = namespace(x='aaaa') %}{% for i in range(24) %}{% set n.x = n.x ~ n.x %}{% endfor %}", LONG),
    ("{% set n = namespace(x='aaaa') %}{% for i in range(26) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
     LONG),
    ("{% set n = namespace(x=[], b='a' * 500000) %}"
     "{% for i in range(600) %}{% set n.x = n.x + [n.b[1:]] %}{% endfor %}", MANY),
    ("{% set n = namespace(x=[], b='a' * 500000) %}"
     "{% for i in range(600) %}{% set n.x = n.x + [n.b.upper()] %}{% endfor %}", MANY),
    ("{{ ('a' * 1000000)|list|length }}", LONG),
    *((DEEP + use, LONG) for use in (
        "{{ n.x }}", "{{ n.x|tojson|length }}", "{{ n.x|string|length }}", "{{ ('%s' % n.x)|length }}",
        "{{ '{}'.format(n.x)|length }}", "{{ (n.x ~ '')|length }}", "{{ {'a': n.x}.values()|string|length }}")),
    (DEEP + "{{ n }}", "expected a text or a list; got a namespace"),
    *((use, LONG) for use in (
        "{{ 'a'|center(60000000)|length }}", "{{ 'a'.ljust(60000000)|length }}", "{{ 'a'|indent(60000000)|length }}",
        "{{ range(99999)|join('a' * 1000)|length }}", "{{ ('a' * 1000).join(['b'] * 99999)|length }}",
        "{{ ('a' * 9999)|replace('a', 'b' * 9999)|length }}", "{{ ('a' * 9999).replace('a', 'b' * 9999)|length }}",
        "{{ [1]|tojson(indent=60000000)|length }}", "{{ ([[1] * 1000] * 1000)|sum(start=[])|length }}",
        "{% filter center(60000000) %}a{% endfilter %}")),
    *((use, WIDE) for use in (
        "{{ '%999999d' % 1 }}", "{{ '%*d' % (999999, 1) }}", "{{ '%.*f' % (999999, 1) }}",
        "{{ '%(a)-999999d' % {'a': 1} }}",
        "{{ '%999999d'|format(1) }}", "{{ '{:999999}'.format(1) }}", "{{ '{:{}}'.format(1, 999999) }}")),
    ("{{ lipsum(1) }}", "'lipsum' is undefined"),
]  # fmt: skip


@pytest.fixture
def service(engine):
    return Service(engine, TOKENIZER, "small", ChatTemplate(TEMPLATE), Limits(prompt_tokens=5000, new_tokens=50))


@pytest.fixture
def app(service):
    return make_app(service)


def alone(model, prompt: str, new: int) -> str:
    return TOKENIZER.decode(generate(model, encoded(prompt), new, temperature=0).tokens[0].tolist())


def encoded(prompt: str) -> torch.Tensor:
    return torch.tensor([list(prompt.encode())])


def test_a_completion(app, model):
    answer = post(app, COMPLETIONS, valid(COMPLETIONS, "small") | {"prompt": "def main(", "max_tokens": 9})
    assert answer.status == 200 and answer.json["object"] == "text_completion"
    (choice,) = answer.json["choices"]
    assert choice == {"index": 0, "text": alone(model, "def main(", 9), "finish_reason": "length", "logprobs": None}
    assert answer.json["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 9,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_prompt_that_the_tokenizer_cannot_split_is_refused(app, monkeypatch):
    def fails(self, text):
        raise ValueError("the tokenizer's pattern cannot split this text: retry-limit")

    monkeypatch.setattr(ByteTokenizer, "encode", fails)
    for path, body in (("/v1/completions", {"prompt": "ab"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = post(app, path, {"model": "small", **body})
        assert answer.status == 400
        assert answer.json["error"]["message"] == "the tokenizer's pattern cannot split this text: retry-limit"


def test_prompts_and_choices_of_one_request(app, model):
    """Texts or tokens, several at once, each `n` times; a prompt counts once."""
    fields = {"prompt": ["some text", "other"], "n": 2, "max_tokens": 5}
    answer = post(app, COMPLETIONS, valid(COMPLETIONS, "small") | fields).json
    texts = [alone(model, prompt, 5) for prompt in ("some text", "some text", "other", "other")]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == 14 and answer["usage"]["completion_tokens"] == 20
    ids = {"prompt": [list(b"some text"), list(b"other")], "max_tokens": 5}
    answer = post(app, COMPLETIONS, valid(COMPLETIONS, "small") | ids).json
    assert [choice["text"] for choice in answer["choices"]] == texts[::2]
    one = post(app, COMPLETIONS, valid(COMPLETIONS, "small") | {"prompt": list(b"other"), "max_tokens": 5}).json
    assert one["choices"][0]["text"] == texts[2]


def test_choices_differ_and_a_seed_repeats_them(app):
    fields = {"temperature": 1.5, "n": 3, "seed": -4, "max_tokens": 12}
    texts = [
        [choice["text"] for choice in post(app, COMPLETIONS, valid(COMPLETIONS, "small") | fields).json["choices"]]
        for _ in range(2)
    ]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


def test_equal_prompts_of_one_request_draw_different_random_numbers(app):
    """Also choices of requests whose seeds are neighbours. The first choice is that of the seed alone."""
    fields = valid(COMPLETIONS, "small") | {"temperature": 1.5, "max_tokens": 12}
    seen = []
    for seed in (4, 5):
        one = post(app, COMPLETIONS, fields | {"prompt": "same", "seed": seed}).json["choices"][0]["text"]
        many = post(app, COMPLETIONS, fields | {"prompt": ["same"] * 4, "n": 2, "seed": seed}).json["choices"]
        texts = [choice["text"] for choice in many]
        assert texts[0] == one
        seen += texts
    assert len(set(seen)) == 16


def test_a_cached_prompt_is_named_in_the_usage(app):
    fields = valid(COMPLETIONS, "small") | {"prompt": "x" * 200}
    cached = [post(app, COMPLETIONS, fields).json["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 200]


def test_a_chat_is_what_its_template_says(app, model):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
    ]
    length = {"max_tokens": None, "max_completion_tokens": 7}
    answer = post(app, CHAT, valid(CHAT, "small") | {"messages": messages} | length).json
    (choice,) = answer["choices"]
    expected = alone(model, "<system>be brief<user>hello<assistant>", 7)
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, "types"), (CHAT, "types.chat")])
def test_null_means_the_default_in_every_field_of_the_client(app, path, base):
    """Some clients send a null for every field that was not set."""
    params = pytest.importorskip(f"openai.{base}.completion_create_params")
    fields = valid(path, "small")
    whole = {name: None for name in params.CompletionCreateParamsBase.__annotations__ if name not in fields}
    expected = post(app, path, fields).json["choices"]
    assert len(whole) > 10 and post(app, path, whole | {"stream": None} | fields).json["choices"] == expected


def test_fields_that_ask_for_nothing_else_are_accepted(app):
    shared = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "n": 1, "stop": [], "user": "a",
              "store": True, "metadata": {"a": "b"}}  # fmt: skip
    own = {
        COMPLETIONS: {"echo": False, "best_of": 1, "suffix": ""},
        CHAT: {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "none", "modalities": ["text"],
               "parallel_tool_calls": False, "response_format": {"type": "text"}, "service_tier": "auto",
               "verbosity": "medium", "reasoning_effort": "none", "prompt_cache_key": "a", "safety_identifier": "b",
               "top_logprobs": None, "logprobs": False},
    }  # fmt: skip
    for path, more in own.items():
        fields = valid(path, "small")
        assert post(app, path, fields | shared | more).json["choices"] == post(app, path, fields).json["choices"]


def test_the_template_gets_the_names_in_a_message():
    body = {"model": "small", "messages": [{"role": "tool", "content": "a", "name": "f", "tool_call_id": "c1"}]}
    (message,) = parsed(ChatCompletion, json.dumps(body).encode()).messages
    assert message.plain() == {"role": "tool", "content": "a", "name": "f", "tool_call_id": "c1"}


def test_an_answer_can_be_sent_back(app):
    """As it came, and with the nulls and empty lists that clients add to it."""
    question = {"role": "user", "content": "hello"}
    fields = valid(CHAT, "small")
    answer = post(app, CHAT, fields).json["choices"][0]["message"]
    again = {"role": "user", "content": [{"type": "text", "text": "and", "annotations": None}]}
    plain = {"role": "assistant", "content": answer["content"]}
    expected = post(app, CHAT, fields | {"messages": [question, plain, again]}).json["choices"][0]["message"]
    added = {"audio": None, "function_call": None, "tool_calls": None, "parsed": None, "reasoning_content": None}
    for more in ({}, added, {"annotations": [], "tool_calls": []}, {"name": None}):
        messages = [question, answer | more, again]
        assert post(app, CHAT, fields | {"messages": messages}).json["choices"][0]["message"] == expected


def test_a_stream_joins_to_the_answer(app, model):
    options = {"include_usage": True, "include_obfuscation": False}
    fields = {"stream": True, "n": 2, "max_tokens": 20, "stream_options": options}
    for path, kind in ((COMPLETIONS, "text_completion"), (CHAT, "chat.completion.chunk")):
        answer = post(app, path, valid(path, "small") | fields)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, usage, done = answer.events
        assert done == "[DONE]" and {each["object"] for each in events} == {kind}
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 40
        assert all(each["usage"] is None for each in events)
        choices = [choice for each in events for choice in each["choices"]]
        prompt = "def main(" if path == COMPLETIONS else "<user>hello<assistant>"
        for index in range(2):
            own = [choice for choice in choices if choice["index"] == index]
            texts = [c["text"] if path == COMPLETIONS else c["delta"].get("content", "") for c in own]
            assert "".join(texts) == alone(model, prompt, 20)
            assert [c["finish_reason"] for c in own][-1] == "length" and not any(c["finish_reason"] for c in own[:-1])


def test_logprobs(app):
    fields = {"logprobs": 2, "max_tokens": 4, "stop": ["never"]}
    shown = post(app, COMPLETIONS, valid(COMPLETIONS, "small") | fields).json["choices"][0]["logprobs"]
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["top_logprobs"]) == 4
    assert shown["text_offset"] == [0, 1, 2, 3]
    for token, value, top in zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True):
        assert top[token] == pytest.approx(value) == max(top.values())  # greedy
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    entries = post(app, CHAT, valid(CHAT, "small") | fields).json["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [entry["top_logprobs"][0]["logprob"] for entry in entries]
    assert all(bytes(entry["bytes"]).decode(errors="replace") == entry["token"] for entry in entries)


def test_the_offsets_of_tokens_are_places_in_the_text(app):
    """Also where several tokens make one character, and in the pieces of a stream."""
    fields = valid(COMPLETIONS, "small") | {"logprobs": 0, "max_tokens": 50, "temperature": 1.5, "seed": 3}
    whole = post(app, COMPLETIONS, fields).json["choices"][0]
    tokens, offsets = whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"]
    assert len(tokens) == 50 and offsets == sorted(offsets) != list(range(50))
    for token, place in zip(tokens, offsets, strict=True):
        assert token == "\ufffd" or whole["text"][place:].lstrip("\ufffd").startswith(token)
    *events, _ = post(app, COMPLETIONS, fields | {"stream": True}).events
    assert [place for each in events for place in each["choices"][0]["logprobs"]["text_offset"]] == offsets


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", COMPLETIONS, 405, "this path takes POST"),
        ("GET", "/v2", 404, "this server has no GET /v2: see /v1/models"),
    ],
)
def test_other_paths_and_methods(app, method, path, status, message):
    answer = asyncio.run(call(app, method, path))
    assert (answer.status, answer.json["error"]["message"]) == (status, message)


def test_models_health_and_metrics(app):
    (listed,) = get(app, "/v1/models").json["data"]
    assert listed == get(app, "/v1/models/small").json and listed["id"] == "small"
    assert get(app, "/health").json == {"status": "ok"}
    post(app, COMPLETIONS, valid(COMPLETIONS, "small"))
    lines = get(app, "/metrics").body.decode().splitlines()
    assert 'sympow_requests_total{finish="length"} 1.0' in lines and "sympow_generated_tokens_total 4.0" in lines
    assert "sympow_decoding 0.0" in lines
    assert "sympow_steps_total 3.0" in lines and "sympow_stepped_rows_total 3.0" in lines
    seconds = [float(line.split()[1]) for line in lines if line.startswith("sympow_engine_seconds_total{")]
    assert len(seconds) == len(PARTS) and sum(seconds) > 0


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        (COMPLETIONS, {"model": "other"}, 404, "this server has the model 'small'"),
        (COMPLETIONS, {"prompt": "x" * 5001}, 400, "the prompt has 5,001 tokens, more than the 5,000 allowed"),
        (COMPLETIONS, {"prompt": [3, 256]}, 400, "tokens must lie in a vocabulary of 256; got 256"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt: expected at least one; got an empty list"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt.0: Input should be greater than or equal to 0; got -1"),
        (COMPLETIONS, {"prompt": ["a", 3]}, 400, "prompt.1: Input should be a valid string; got 3"),
        (COMPLETIONS, {"prompt": [[3], [4, "b"]]}, 400, 'prompt.1.1: Input should be a valid integer; got "b"'),
        (COMPLETIONS, {"stop": ["a", ""]}, 400, 'stop.1: String should have at least 1 character; got ""'),
        (COMPLETIONS, {"stop": ["a"] * 17}, 400, "stop: List should have at most 16 items"),
        (COMPLETIONS, {"stop": 3}, 400, "stop: Input should be a valid string"),
        (COMPLETIONS, {"max_tokens": 51}, 400, "at most 50 new tokens; got 51 as max_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 51}, 400, "at most 50 new tokens; got 51 as max_complet"),
        (
            CHAT,
            {"max_tokens": 3, "max_completion_tokens": 4},
            400,
            "expected max_tokens or max_completion_tokens; got 3 and 4",
        ),
        (COMPLETIONS, {"prompt": ["a"] * 5, "n": 16}, 400, "at most 64 choices a request; got 80: 5 prompts, n = 16"),
        (COMPLETIONS, {"temprature": 1}, 400, "temprature: Extra inputs are not permitted"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "the chat template refuses these messages: no t"),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs: needs logprobs to be true"),
        (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options: needs stream to be true"),
        (COMPLETIONS, {"stream": False, "stream_options": {}}, 400, "stream_options: needs stream to be true"),
    ],
)
def test_refusals_say_what_is_wrong(app, path, fields, status, message):
    answer = post(app, path, valid(path, "small") | fields)
    error = answer.json["error"]
    assert answer.status == status and error["message"].startswith(message)
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "expected an empty list, got"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", 'expected "none" or "auto", got "required"'),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "expected an empty list, got a list"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format.type", 'expected "text", got "json_o'),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", 'expected ["text"], got a list'),
        (CHAT, {"audio": {"voice": "a", "format": "wav"}}, "audio", "expected null, got an object"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", 'expected "none", got "low"'),
        (COMPLETIONS, {"presence_penalty": 0.5}, "presence_penalty", "expected 0, got 0.5"),
        (CHAT, {"frequency_penalty": -2}, "frequency_penalty", "expected 0, got -2"),
        (CHAT, {"logit_bias": {"3": 5}}, "logit_bias", "expected an empty object, got an object"),
        (COMPLETIONS, {"echo": True}, "echo", "expected false, got true"),
        (COMPLETIONS, {"best_of": 2}, "best_of", "expected 1, got 2"),
        (COMPLETIONS, {"suffix": "end"}, "suffix", 'expected "", got "end"'),
        (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "expected fal"),
        (CHAT, {"best_of": 2}, "best_of", "expected 1, got 2"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format.type", 'expected "text", got "js'),
        (COMPLETIONS, {"min_p": 0.1}, "min_p", "expected 0, got 0.1"),
        (CHAT, {"repetition_penalty": 1.1}, "repetition_penalty", "expected 1, got 1.1"),
        (COMPLETIONS, {"guided_json": {"type": "object"}}, "guided_json", "expected null, got an object"),
        (CHAT, {"guided_choice": ["a", "b"]}, "guided_choice", "expected null, got a list"),
        (CHAT, {"structured_outputs": {"regex": "a+"}}, "structured_outputs", "expected null, got an object"),
        (COMPLETIONS, {"stop_token_ids": [3]}, "stop_token_ids", "expected an empty list, got a list"),
        (COMPLETIONS, {"ignore_eos": True}, "ignore_eos", "expected false, got true"),
        (CHAT, {"min_tokens": 2}, "min_tokens", "expected 0, got 2"),
        (CHAT, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "expected an empty object, got an object"),
        (
            CHAT,
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "expecte",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "messages.0.content.0.type",
            'expected "text", got "image_url"',
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages.1.tool_calls",
            "expected an empty list, got a list",
        ),
    ],
)
def test_what_is_not_supported_is_called_so(app, path, fields, param, message):
    answer = post(app, path, valid(path, "small") | fields)
    error = answer.json["error"]
    assert answer.status == 400 and error["param"] == param and error["code"] == "not_supported"
    assert error["message"].startswith(f"{param}: not supported; {message}")


def test_fields_of_vllm_that_ask_for_nothing_are_accepted(app):
    fields = {"min_p": 0, "repetition_penalty": 1.0, "ignore_eos": False, "stop_token_ids": [], "guided_json": None}
    fields |= {"top_p": 1, "skip_special_tokens": True, "spaces_between_special_tokens": True}
    for path in (COMPLETIONS, CHAT):
        given = fields | {"add_special_tokens": path == COMPLETIONS}
        plain = post(app, path, valid(path, "small") | {"temperature": 1, "seed": 3}).json["choices"]
        for top_k in (-1, 0):
            answer = post(app, path, valid(path, "small") | {"temperature": 1, "seed": 3, "top_k": top_k} | given)
            assert answer.status == 200 and answer.json["choices"] == plain
        assert post(app, path, valid(path, "small") | {"top_k": -2}).json["error"]["param"] == "top_k"


def test_tools_that_must_not_be_called_are_accepted(app):
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"tools": tools, "tool_choice": "none", "functions": tools, "function_call": "none"}
    fields |= {"include_reasoning": True}
    assert post(app, CHAT, valid(CHAT, "small") | fields).status == 200
    for other in ({"tool_choice": "auto"}, {"tools": "all"}, {"function_call": None}):
        param = "functions" if "function_call" in other else "tools"
        assert post(app, CHAT, valid(CHAT, "small") | fields | other).json["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user"}, {"content": "a"}]}, "messages.1.role: Field required"),
        ({"messages": [{"role": "user", "content": "a", "extra": 1}]}, "messages.0.extra: Extra inputs are not perm"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: Input should be a valid string; got 3"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: Field required"),
        ({"messages": ["hello"]}, 'messages.0: Input should be an object; got "hello"'),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage: Input should be a valid boolean"),
        ({"metadata": {"a": {"b": 1}}}, "metadata.a: Input should be a valid string; got an object"),
    ],
)
def test_a_wrong_field_within_a_body_is_named_by_its_path(app, fields, message):
    error = post(app, CHAT, valid(CHAT, "small") | fields).json["error"]
    assert error["message"].startswith(message) and error["param"] == message.partition(":")[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "Expecting value"),
        (b'{"model": "small", "prompt": "a", "temperature": NaN}', "NaN is no number of JSON"),
        (b'{"model": "small", "prompt": "a", "top_p": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"model": "small", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"model": "small", "prompt": "\\udc00a"}', "a text has half of a surrogate pair"),
        (b'{"model": "small", "prompt": "a", "\\ud800": 1}', "a text has half of a surrogate pair"),
        (b'{"model": "small", "prompt": "\xff"}', "expected UTF-8, got 0xff at byte 30"),
        (b'{"model": "small", "prompt": ' + b"[" * 100_000, "lists and objects are nested too deeply"),
        (b'{"model": ' + b'{"a":' * 100_000, "lists and objects are nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_is_refused(app, body, message):
    answer = asyncio.run(call(app, "POST", COMPLETIONS, body))
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(f"the body is no valid JSON: {message}")


def test_a_field_given_twice_is_refused(app):
    """Parsers take the first or the last of them, so that a proxy could read another request than the server."""
    for twice in (b'"prompt": "b"', b'"metadata": {"prompt": "a", "prompt": "b"}', b'"\\u0070rompt": "b"'):
        body = b'{"model": "small", "prompt": "a", ' + twice + b"}"
        answer = asyncio.run(call(app, "POST", COMPLETIONS, body))
        assert (answer.status, answer.json["error"]["message"]) == (400, "prompt: the field is there twice")


def test_a_body_of_many_faults_makes_few_errors():
    """Each error takes memory and time."""
    many = 10**5
    for schema, field, value in (
        (Completion, "prompt", [3] * many + ["a"] * many),
        (Completion, "prompt", ["a"] * many + [3] * many),
        (Completion, "prompt", [[3.5] * many] * 2),
        (Completion, "stop", [3] * many),
        (ChatCompletion, "messages", [{"a": 1}] * many),
        (ChatCompletion, "messages", [{"role": "user", "content": [{"a": 1}] * many}]),
    ):
        with pytest.raises(ValidationError) as caught:
            schema.model_validate(valid(COMPLETIONS if schema is Completion else CHAT, "small") | {field: value})
        assert caught.value.error_count() < 10
    answer = json.dumps(valid(COMPLETIONS, "small") | {str(i): 1 for i in range(1001)}).encode()
    with pytest.raises(ApiError, match="an object of the body has at most 1,000 fields; got 1,005"):
        parsed(Completion, answer)


def test_a_web_page_cannot_send_a_request(app):
    """A browser sends these types to other servers without asking them, and JSON not."""
    body = json.dumps(valid(COMPLETIONS, "small")).encode()
    for kind in (None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a",
                 "text/plain; a=application/json", "application/json; charset=latin-1", "text/json"):  # fmt: skip
        answer = asyncio.run(call(app, "POST", COMPLETIONS, body, content_type=kind))
        assert answer.status == 415
        expected = f"expected the header Content-Type: application/json, got {kind or 'none'}"
        assert answer.json["error"]["message"] == expected
    for kind in ("application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'):
        assert asyncio.run(call(app, "POST", COMPLETIONS, body, content_type=kind)).status == 200


@pytest.mark.parametrize(
    ("status", "host"),
    [(200, host) for host in (None, "localhost", "localhost:8000", "LocalHost.:1", "127.0.0.1:8000", "127.9.9.9",
                              "[::1]:80", "a.example", "A.Example.:443")]
    + [(403, host) for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "",
                                "localhost:evil", "evil@localhost", "localhost@evil", "[::2]", "10.0.0.1", "127.1",
                                "localhost ", "::1", "0.0.0.0", "\xff")],
)  # fmt: skip
def test_hosts(service, status, host):
    """A page can let its own name point to this machine. Its requests then name the page's host."""
    app = make_app(service, ["a.example"])
    for path in ("/v1/models", "/health", "/metrics"):
        answer = get(app, path, host=host)
        assert answer.status == status
    if status == 403:
        assert answer.json["error"]["message"].startswith("expected the header Host to name this server, got ")
    assert get(make_app(service), "/v1/models", host=host).status == 200


def test_hostile_requests_are_refused_and_change_nothing(app, service, model):
    async def refused() -> list:
        wrong = []
        for each in hostile_requests(400, "small", seed=1):
            answer = await call(app, each.method, each.path, each.body)
            if not 400 <= answer.status < 500 or "error" not in answer.json:
                wrong.append((each.method, each.path, each.body[:200], answer.status))
        return wrong

    assert asyncio.run(refused()) == []
    assert service.engine.load == (0, 0, 0)
    answer = post(app, COMPLETIONS, valid(COMPLETIONS, "small")).json
    assert answer["choices"][0]["text"] == alone(model, "def main(", 4)


def test_a_request_that_is_too_long_for_the_engine_is_refused(model):
    engine = Engine(model, TOKENIZER, most=20)
    engine.start()
    app = make_app(Service(engine, TOKENIZER, "small"))
    answer = post(app, COMPLETIONS, {"model": "small", "prompt": "x" * 16, "max_tokens": 5})
    engine.close()
    assert answer.status == 400 and answer.json["error"]["code"] == "context_length_exceeded"
    assert answer.json["error"]["message"] == "a request has at most 20 tokens, its answer included; got 21"


def test_a_large_or_slow_body_is_refused(engine):
    limits = Limits(prompt_tokens=10, body_seconds=0.05)
    app = make_app(Service(engine, TOKENIZER, "small", limits=limits))
    answer = asyncio.run(call(app, "POST", COMPLETIONS, b" " * (limits.body_bytes + 1)))
    assert answer.status == 413 and "at most 1,048,736 bytes" in answer.json["error"]["message"]

    async def sent(app, seconds: float, chunk: bytes) -> int:
        """The status of an answer to a body without an end, a chunk at a time."""
        statuses = []

        async def send(message):
            statuses.append(message.get("status"))

        async def receive():
            await asyncio.sleep(seconds)
            return {"type": "http.request", "body": chunk, "more_body": True}

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "root_path": ""}
        await app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
        return statuses[0]

    assert asyncio.run(sent(app, 0.02, b" ")) == 408
    patient = make_app(Service(engine, TOKENIZER, "small", limits=Limits(prompt_tokens=10, body_seconds=600.0)))
    assert asyncio.run(sent(patient, 0.0, b" " * (1 << 22))) == 413


def test_keys(engine):
    app = make_app(Service(engine, TOKENIZER, "small", keys=("first key", "zweiter Schlüssel", "à")))
    for key in (None, "", "first", "first key2"):
        assert get(app, "/v1/models", key=key).status == 401
        assert post(app, COMPLETIONS, valid(COMPLETIONS, "small"), key=key).status == 401
    for key in ("first key", "zweiter Schlüssel", "à"):
        assert get(app, "/v1/models", key=key).status == 200
    assert get(app, "/health").status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(service, path, stream):
    app = make_app(Service(service.engine, TOKENIZER, "small", service.template, Limits(new_tokens=1 << 30)))
    fields = valid(path, "small") | {"max_tokens": 1 << 30, "n": 4, "stream": stream}

    async def leaves() -> None:
        gone = asyncio.Event()
        task = asyncio.ensure_future(call(app, "POST", path, json.dumps(fields).encode(), gone=gone))
        while not service.engine.load.decoding:
            await asyncio.sleep(0.001)
        gone.set()
        await task

    asyncio.run(leaves())
    deadline, counted = time.monotonic() + 30, b'sympow_requests_total{finish="cancelled"}'
    while (any(service.engine.load) or counted not in get(app, "/metrics").body) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.engine.load == (0, 0, 0)
    assert counted in get(app, "/metrics").body


def asgi_post(app, path: str, fields: dict, send):
    """A request as a server passes it on, with a `send` of its own; the client stays."""
    sent = iter([{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}])

    async def receive():
        for message in sent:
            return message
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    return app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)


def test_a_client_that_never_reads_its_stream_is_left(engine):
    """A server waits in `send` until the client reads. The connection must not stay for ever."""
    app = make_app(Service(engine, TOKENIZER, "small", limits=Limits(seconds=0.05, body_seconds=0.05)))

    async def stuck(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def ended() -> None:
        async with asyncio.timeout(30):
            await asgi_post(app, COMPLETIONS, valid(COMPLETIONS, "small") | {"stream": True}, stuck)

    asyncio.run(ended())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_end_of_the_server_cuts_is_told(service, stream):
    """When the grace is over the server cancels what still runs."""
    app, messages = make_app(Service(service.engine, TOKENIZER, "small", limits=Limits(new_tokens=1 << 30))), []

    async def send(message):
        messages.append(message)

    async def cut() -> None:
        fields = valid(COMPLETIONS, "small") | {"max_tokens": 1 << 30, "stream": stream}
        task = asyncio.ensure_future(asgi_post(app, COMPLETIONS, fields, send))
        while not service.engine.load.decoding or (stream and not messages):
            await asyncio.sleep(0.001)
        task.cancel()
        await task

    asyncio.run(cut())
    body = b"".join(each.get("body", b"") for each in messages)
    assert b"the server is shutting down" in body and not messages[-1].get("more_body")
    assert messages[0]["status"] == (200 if stream else 503) and body.endswith(b"data: [DONE]\n\n") == stream
    while any(service.engine.load):
        time.sleep(0.01)


def test_a_full_queue_and_a_late_answer(model):
    engine = Engine(model, TOKENIZER, slots=1, queue=0)
    app = make_app(Service(engine, TOKENIZER, "small", limits=Limits(seconds=0.0)))
    answer = post(app, COMPLETIONS, valid(COMPLETIONS, "small") | {"n": 2})
    assert answer.status == 429 and answer.headers["retry-after"] == "1"
    engine.start()
    assert post(app, COMPLETIONS, valid(COMPLETIONS, "small")).status == 504
    late = post(app, COMPLETIONS, valid(COMPLETIONS, "small") | {"stream": True}).events
    assert late[0]["error"]["message"] == "the answer took too long" and late[-1] == "[DONE]"
    engine.close()
    assert post(app, COMPLETIONS, valid(COMPLETIONS, "small")).status == 503
    assert get(app, "/health").status == 503


class TestChatTemplate:
    def test_where_it_is_found(self, tmp_path):
        assert ChatTemplate.of(tmp_path) is None
        config = {"chat_template": "{{ bos_token }}a", "bos_token": {"content": "<s>"}, "eos_token": None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert ChatTemplate.of(tmp_path).render([]) == "<s>a"
        config["chat_template"] = [{"name": "tools", "template": "c"}, {"name": "default", "template": "b"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert ChatTemplate.of(tmp_path).render([]) == "b"
        (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}")
        assert ChatTemplate.of(tmp_path).render([{"role": "user"}]) == '[{"role": "user"}]'

    def test_special_tokens(self, tmp_path):
        """Those of tokenizer_config.json, and those that older folders have in a file of their own."""
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ image_token }}{{ boi }}{{ eos_token }}")
        config = {"bos_token": "<a>", "image_token": "<i>", "extra_special_tokens": {"boi": "<b>"}, "eos_token": None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert ChatTemplate.of(tmp_path).render([]) == "<a><i><b>"
        (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
        assert ChatTemplate.of(tmp_path).render([]) == "<s><i><b></s>"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
        assert ChatTemplate.of(tmp_path).render([]) == "<a><i><b>"

    @pytest.mark.parametrize(("source", "expected"), RENDERED)
    def test_what_templates_of_transformers_use(self, source, expected):
        assert ChatTemplate(source, eos_token="</s>").render(MESSAGES) == expected

    @pytest.mark.parametrize(("source", "expected"), RENDERED)
    def test_transformers_renders_the_same(self, source, expected):
        utils = pytest.importorskip("transformers.utils.chat_template_utils")
        (text,), _ = utils.render_jinja_template(
            [MESSAGES], chat_template=source, add_generation_prompt=True, eos_token="</s>"
        )
        assert text == expected

    @pytest.mark.parametrize("source", FAILING)
    def test_a_template_that_fails_is_a_refusal(self, service, source):
        app = make_app(Service(service.engine, TOKENIZER, "small", ChatTemplate(source), service.limits))
        error = post(app, CHAT, valid(CHAT, "small")).json["error"]
        assert error["message"].startswith("the chat template refuses these messages: ")
        assert "\n" not in error["message"] and error["param"] == "messages"

    @pytest.mark.parametrize(("source", "message"), UNBOUNDED)
    def test_a_template_has_bounds(self, source, message, monkeypatch):
        monkeypatch.setattr(sandbox, "LONGEST", sandbox.LONGEST // 50)
        monkeypatch.setattr(sandbox, "BUDGET", sandbox.BUDGET // 100)
        with pytest.raises(ApiError, match=f"^the chat template refuses these messages: {re.escape(message)}"):
            ChatTemplate(source).render([])

    def test_nothing_is_computed_when_a_template_is_compiled(self):
        """A server would not start. `autoescape` is read then; its operators and filters are left alone."""
        environment = sandbox.BoundedEnvironment()
        code = environment.compile("{{ 3 ** 2 }}{{ 'a' * 7 }}{{ 'a'|center(7) }}", raw=True)
        assert "aaaaaaa" not in code and "   a   " not in code and "'9'" not in code
        environment.compile("{% autoescape 'a'|center(10 ** 10) * 10 ** 10 %}{% endautoescape %}")

    @pytest.mark.parametrize("template", [None, [], ["a"], [{"name": "rag", "template": "a"}], [{"name": "default"}]])
    def test_a_config_without_a_default_template(self, tmp_path, template):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert ChatTemplate.of(tmp_path) is None

    @pytest.mark.parametrize("template", [3, {"a": "b"}, [{"name": "default", "template": ["a"]}]])
    def test_a_template_that_is_no_text(self, tmp_path, template):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(ValueError, match=r"expected a text as chat_template, got (int|dict|list)"):
            ChatTemplate.of(tmp_path)

    def test_refusals(self):
        nested = "{% for i in messages %}" * 30 + "{% endfor %}" * 30
        for source in (nested, "{% for %}", "{% generation %}", "{% endgeneration %}", "{% generation %}{% endfor %}"):
            with pytest.raises(ValueError, match="the chat template cannot be read: "):
                ChatTemplate(source)
        with pytest.raises(ApiError, match="the chat template refuses these messages: "):
            ChatTemplate("{{ ''.__class__.__mro__ }}{{ messages[3].role.x }}").render([])
