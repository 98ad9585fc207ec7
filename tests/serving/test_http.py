"""OpenAI's interface: answers, streams, refusals, clients that leave."""

import asyncio
import json
import time

import pytest
import torch

from benchmarks.hostile_requests import CHAT, COMPLETIONS, hostile_requests, valid
from sympow.data import ByteTokenizer
from sympow.models import generate
from sympow.serving import Engine
from sympow.serving.http import ChatTemplate, Limits, Service, make_app
from sympow.serving.http.errors import ApiError
from sympow.serving.work import PARTS
from tests.serving.asgi import call, get, post

TOKENIZER = ByteTokenizer()
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


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
    answer = post(app, CHAT, valid(CHAT, "small") | {"messages": messages, "max_completion_tokens": 7}).json
    (choice,) = answer["choices"]
    expected = alone(model, "<system>be brief<user>hello<assistant>", 7)
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] == 7


def test_a_stream_joins_to_the_answer(app, model):
    fields = {"stream": True, "n": 2, "max_tokens": 20, "stream_options": {"include_usage": True}}
    for path, kind in ((COMPLETIONS, "text_completion"), (CHAT, "chat.completion.chunk")):
        answer = post(app, path, valid(path, "small") | fields)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, usage, done = answer.events
        assert done == "[DONE]" and {each["object"] for each in events} == {kind}
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 40
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
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt: Input should be greater than or equal to 0"),
        (COMPLETIONS, {"stop": ["a"] * 17}, 400, "stop: List should have at most 16 items"),
        (COMPLETIONS, {"stop": 3}, 400, "stop: Input should be a valid string"),
        (COMPLETIONS, {"max_tokens": 51}, 400, "at most 50 new tokens; got 51"),
        (COMPLETIONS, {"prompt": ["a"] * 5, "n": 16}, 400, "at most 64 choices a request; got 80"),
        (COMPLETIONS, {"temprature": 1}, 400, "temprature: Extra inputs are not permitted"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "the chat template refuses these messages: no t"),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs: needs logprobs to be true"),
    ],
)
def test_refusals_say_what_is_wrong(app, path, fields, status, message):
    answer = post(app, path, valid(path, "small") | fields)
    error = answer.json["error"]
    assert answer.status == status and error["message"].startswith(message)
    assert set(error) == {"message", "type", "param", "code"}


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


def test_a_large_or_slow_body_is_refused(engine):
    limits = Limits(prompt_tokens=10, body_seconds=0.05)
    app = make_app(Service(engine, TOKENIZER, "small", limits=limits))
    answer = asyncio.run(call(app, "POST", COMPLETIONS, b" " * (limits.body_bytes + 1)))
    assert answer.status == 413 and "at most 1,048,736 bytes" in answer.json["error"]["message"]

    async def slowly() -> int:
        statuses = []

        async def send(message):
            statuses.append(message.get("status"))

        async def receive():
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "root_path": ""}
        await app(scope | {"headers": []}, receive, send)
        return statuses[0]

    assert asyncio.run(slowly()) == 408


def test_keys(engine):
    app = make_app(Service(engine, TOKENIZER, "small", keys=("first key", "zweiter Schlüssel")))
    for key in (None, "", "first", "first key2"):
        assert get(app, "/v1/models", key=key).status == 401
        assert post(app, COMPLETIONS, valid(COMPLETIONS, "small"), key=key).status == 401
    assert get(app, "/v1/models", key="first key").status == 200
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

    def test_refusals(self):
        with pytest.raises(ValueError, match="the chat template cannot be read: "):
            ChatTemplate("{% for %}")
        with pytest.raises(ApiError, match="the chat template refuses these messages: "):
            ChatTemplate("{{ ''.__class__.__mro__ }}{{ messages[3].role.x }}").render([])
