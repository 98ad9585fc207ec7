"""`sympow serve` as a process: its folder, its keys, its end."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
import uvicorn

from benchmarks.common.hostile_requests import CHAT, COMPLETIONS, NO_HTTP, valid
from benchmarks.serving import untrained_run
from sympow import serving
from sympow.cli import main
from sympow.cli.served_model import api_keys, engine_threads, load_served
from sympow.data import BPETokenizer, ByteTokenizer
from sympow.data.tokenizer_files import end_tokens
from sympow.models import MixerConfig, generate, preset
from sympow.models.slots import slot_bytes
from sympow.ops import memory
from sympow.ops.cost import format_bytes
from tests.serving.asgi import call
from tests.shell_blocks import commands_of

KEY = "a-key"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "serving.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    untrained_run(folder, preset("nano", 256))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    (folder / "keys").write_text(f"other\n{KEY}\n")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as process_and_port:
        yield process_and_port


@contextmanager
def served(folder):
    """The process and its port; it is killed if the tests did not end it."""
    words = ["serve", str(folder), "--port", "0", "--api-keys", str(folder / "keys"), "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-m", "sympow", *words], stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    found = re.fullmatch(r"serving tiny at http://127\.0\.0\.1:(\d+)/v1: completions and chats, 16 slots of .*\n", line)
    assert found, line
    try:
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("device", "chosen", "threads", "expected"),
    [("cpu", None, 8, 7), ("cpu", None, 1, 1), ("cpu", "8", 8, 8), ("meta", None, 8, 8)],
)
def test_requests_have_a_core_of_a_cpu_unless_the_user_chose_threads(device, chosen, threads, expected, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert engine_threads(torch.device(device)) == expected


def headers_with(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def send(port: int, method: str, path: str, fields=None, key=KEY, **headers) -> tuple[int, dict]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, json.dumps(fields or {}), headers_with(key) | headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content)


def test_answers(server):
    _, port = server
    assert send(port, "GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
    assert send(port, "GET", "/v1/models", key="no-key")[0] == 401
    for path in (COMPLETIONS, CHAT):
        status, answer = send(port, "POST", path, valid(path, "tiny"))
        assert status == 200 and answer["usage"]["completion_tokens"] == 4


def test_the_client_of_openai(server):
    openai = pytest.importorskip("openai")
    _, port = server
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(prompt="def main(", **asked, logprobs=1)
    assert whole.usage.completion_tokens == 8 and len(whole.choices[0].logprobs.tokens) == 8
    pieces = list(client.completions.create(prompt="def main(", **asked, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=messages, **asked, logprobs=True, top_logprobs=2)
    assert len(chat.choices[0].logprobs.content) == 8
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = client.chat.completions.create(messages=messages, **asked, **options)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == chat.choices[0].message.content and last.usage.completion_tokens == 8
    ends = asked | {"stop": text[-1]}  # the helpers below raise an error for an answer that is cut at its limit
    with client.chat.completions.stream(messages=messages, **ends) as stream:
        streamed = stream.get_final_completion().choices[0].message
    parsed = client.chat.completions.parse(messages=messages, **ends).choices[0].message
    assert streamed.content == parsed.content == text[: text.index(text[-1])]
    whole = chat.choices[0].message
    for message in (whole, whole.model_dump(), whole.to_dict(), streamed, parsed, parsed.model_dump()):
        turn = client.chat.completions.create(messages=[*messages, message, *messages], **asked)
        assert turn.usage.prompt_tokens > 2 * chat.usage.prompt_tokens
    with client.chat.completions.create(messages=messages, model="tiny", stream=True) as stream:
        next(iter(stream))  # and leave: a stream of 4,096 tokens is cancelled
    with pytest.raises(openai.NotFoundError, match="this server has the model 'tiny'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be less than or equal to 2"):
        client.completions.create(model="tiny", prompt="a", temperature=3)


def test_python_of_the_page_runs(server, capsys):
    pytest.importorskip("openai")
    _, port = server
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    for words, here in (("8000", str(port)), ('"none"', repr(KEY)), ('"demo-power"', '"tiny"')):
        assert words in block
        block = block.replace(words, here)
    exec(compile(block, PAGE, "exec"), {})
    assert capsys.readouterr().out


def test_curl_of_the_page(server):
    """The path, the header and the fields that it sends."""
    _, port = server
    (curl,) = (command for command in commands_of(PAGE) if command.words[0] == "curl")
    address, header, fields = curl.words[1], *(curl.words[i + 1] for i, x in enumerate(curl.words) if x in ("-H", "-d"))
    assert address.startswith("http://127.0.0.1:8000/") and header == "Content-Type: application/json"
    asked = json.loads(fields) | {"model": "tiny"}
    status, answer = send(port, "POST", address.removeprefix("http://127.0.0.1:8000"), asked)
    assert status == 200 and answer["usage"]["completion_tokens"] == asked["max_tokens"]


def test_other_hosts_and_types_are_refused_on_the_loopback_device(server):
    _, port = server
    for host, status in (("localhost", 200), (f"127.0.0.1:{port}", 200), ("[::1]", 200), ("evil.example", 403)):
        assert send(port, "GET", "/v1/models", Host=host)[0] == status
    for kind, status in (("application/json", 200), ("text/plain", 415)):
        headers = {"Content-Type": kind}
        assert send(port, "POST", COMPLETIONS, valid(COMPLETIONS, "tiny"), **headers)[0] == status


def test_a_client_that_sends_too_much_reads_why(server):
    """It sends the whole body before it reads. A connection that is closed meanwhile gives it an error instead."""
    _, port = server
    request = Request(f"http://127.0.0.1:{port}{COMPLETIONS}", b" " * (40 << 20), headers_with(KEY))
    with pytest.raises(HTTPError) as answer:
        urlopen(request, timeout=60)
    with answer.value:
        assert answer.value.code == 413 and json.load(answer.value)["error"]["code"] == "too_large"


def test_bytes_that_are_no_http(server):
    """They are answered, and leave no traceback: `test_it_ends_in_order` reads what the server has printed."""
    _, port = server
    for content in NO_HTTP:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(content)
            assert connection.recv(100).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 "))
    assert send(port, "GET", "/v1/models")[0] == 200


@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("evil.example", ["--allowed-host", "a.example"], 403),
        ("a.example:80", ["--allowed-host", "a.example", "--allowed-host", "b"], 200),
        ("evil.example", ["--allowed-host", "*"], 200),
        ("[2001:db8::1]:80", ["--allowed-host", "2001:db8::1"], 200),
        ("evil.example", ["--host", "0.0.0.0"], 200),
        ("evil.example", ["--host", "0.0.0.0", "--allowed-host", "a.example"], 403),
        ("evil.example", ["--host", "localhost"], 403),
    ],
)
def test_options_of_hosts(folder, monkeypatch, host, options, status):
    answered = []

    def answer_one(server, sockets):
        answered.append(asyncio.run(call(server.config.app, "GET", "/health", host=host)).status)

    monkeypatch.setattr(uvicorn.Server, "run", answer_one)
    assert main(["serve", str(folder), *options, "--port", "0", "--device", "cpu"]) == 0
    assert answered == [status]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--max-prompt-tokens", "1000", "--max-new-tokens", "24"],
         "2 slots of {} with key/value caches of 1,024 tokens"),
        ([], "2 slots of {}; softmax attention is stepped row by row, because caches of 1,004,096 tokens in all slots "
             "would take 1.0 GB, more than a tenth of the free memory, 100 MB: see --max-prompt-tokens"),
    ],
)  # fmt: skip
def test_the_first_line_says_what_room_caches_have(words, shown, tmp_path, capsys, monkeypatch):
    """And the metrics count it."""
    untrained_run(tmp_path / "hybrid", preset("nano", 256, (MixerConfig("power"), MixerConfig("softmax"))))
    states = 2 * slot_bytes(load_served(str(tmp_path / "hybrid"), torch.device("cpu")).model, None)
    free = memory.Memory(states + 10**9, states + 10**9)
    monkeypatch.setattr("sympow.models.slots.memory_of", lambda device: free)
    lines = []

    async def begin(app):
        events = iter(("lifespan.startup", "lifespan.shutdown"))

        async def receive():
            return {"type": next(events)}

        async def send(message):
            assert message["type"].endswith(".complete"), message

        await app({"type": "lifespan"}, receive, send)

    def answer_one(server, sockets):
        asyncio.run(begin(server.config.app))
        answer = asyncio.run(call(server.config.app, "GET", "/metrics", host="localhost"))
        lines.extend(answer.body.decode().splitlines())

    monkeypatch.setattr(uvicorn.Server, "run", answer_one)
    words = ["--slots", "2", "--port", "0", "--device", "cpu", *words]
    assert main(["serve", str(tmp_path / "hybrid"), *words]) == 0
    (held,) = (float(line.split()[1]) for line in lines if line.startswith("sympow_slots_bytes "))
    first = capsys.readouterr().err.splitlines()[0]
    assert first.endswith(f"/v1: completions (no chat template), {shown.format(format_bytes(int(held) // 2))}")
    assert (held > 2 * 1024 * 2 * 64 * 4) == ("row by row" not in shown)


def test_it_ends_in_order(server):
    """A stream that has begun is answered whole after SIGTERM, and the exit code is 0."""
    process, port = server
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    fields = valid(COMPLETIONS, "tiny") | {"max_tokens": 200, "stream": True}
    connection.request("POST", COMPLETIONS, json.dumps(fields), headers_with(KEY))
    answer = connection.getresponse()
    begun = answer.readline()
    process.send_signal(signal.SIGTERM)
    rest = answer.read().decode()
    assert begun.startswith(b"data: ") and '"finish_reason":"length"' in rest and rest.endswith("data: [DONE]\n\n")
    told = []
    reader = threading.Thread(target=lambda: told.extend(process.stderr))
    reader.start()
    assert process.wait(timeout=60) == 0
    reader.join()
    assert told == ["stopping: running requests have 30 s; Ctrl-C again stops now\n", "stopped\n"]


def test_a_second_interrupt_ends_at_once(folder):
    with served(folder) as (process, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        fields = valid(COMPLETIONS, "tiny") | {"max_tokens": 200, "stream": True}
        connection.request("POST", COMPLETIONS, json.dumps(fields), headers_with(KEY))
        connection.getresponse().readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("stopping: ")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0 and process.stderr.read() == "stopped\n"


def test_end_tokens(tmp_path):
    tokenizer = ByteTokenizer()
    assert end_tokens(tmp_path, tokenizer) == set()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "\\u0004"}}')
    assert end_tokens(tmp_path, tokenizer) == {4}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "two"}')  # of several tokens: no end
    assert end_tokens(tmp_path, tokenizer) == set()
    for named, ends in (("7", {7}), ("[7, 9]", {7, 9})):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {named}}}')
        assert end_tokens(tmp_path, tokenizer) == ends


@pytest.mark.parametrize("named", ['"x"', "[3, null]", "[[3]]", "{}", "true", "1.5", "-1", "256"])
def test_end_tokens_that_are_no_tokens(tmp_path, named):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {named}}}')
    with pytest.raises(ValueError, match=r"generation_config.json: expected tokens from 0 to 255 as eos_token_id, got"):
        end_tokens(tmp_path, ByteTokenizer())


def test_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("SYMPOW_API_KEYS", "one, two,")
    assert api_keys(None) == ("one", "two")
    monkeypatch.delenv("SYMPOW_API_KEYS")
    assert api_keys(None) == ()
    (tmp_path / "keys").write_text("\n three \n")
    assert api_keys(str(tmp_path / "keys")) == ("three",)
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ValueError, match="holds no API keys: one a line is expected"):
        api_keys(str(tmp_path / "keys"))


def test_errors_are_one_line(folder, tmp_path, capsys):
    for words, message in (
        ([str(tmp_path)], "no run at"),
        ([str(folder), "--host", "192.0.2.1"], ""),
    ):
        assert main(["serve", *words, "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("sympow: error: ") and message in error and error.count("\n") == 1
    for option, message in (
        ("--slots=0", "argument --slots: must be at least 1, got 0"),
        ("--port=70000", "argument --port: must be below 65,536, got 70000"),
        ("--queue=-1", "argument --queue: must be at least 0, got -1"),
        ("--timeout=0", "argument --timeout: expected a finite number above 0, got '0'"),
        ("--timeout=nan", "argument --timeout: expected a finite number above 0, got 'nan'"),
        ("--grace=-1", "argument --grace: expected a finite number of at least 0, got '-1'"),
        ("--host=", "argument --host: an address cannot be empty; 0.0.0.0 means all of this machine"),
        ("--host= ", "argument --host: an address cannot be empty"),
        ("--allowed-host=http://a.example", "expected a name without scheme and port, such as example.org, got 'http:"),
        ("--allowed-host=a.example:80", "expected a name without scheme and port, such as example.org, got 'a.ex"),
        ("--allowed-host=", "expected a name without scheme and port"),
    ):
        with pytest.raises(SystemExit):
            main(["serve", str(folder), option])
        error = capsys.readouterr().err
        assert error.startswith("sympow: error: ") and message in error and error.count("\n") == 1


def test_sizes_of_the_prefix_cache(folder, tmp_path, capsys, monkeypatch):
    def refuse(model, memory, cache, disk, state_dtype):
        raise ValueError(f"{memory} {cache} {disk} {state_dtype}")

    monkeypatch.setattr(serving, "PrefixCache", refuse)
    words = ["serve", str(folder), "--device", "cpu", "--cache-memory", "0.5"]
    for more, cache, disk in (([], None, 10), (["--cache-dir", str(tmp_path)], tmp_path, 10),
                              (["--cache-dir", str(tmp_path), "--cache-disk", "0"], tmp_path, 0)):  # fmt: skip
        for dtype, narrow in (("float32", None), ("int8", torch.int8)):
            assert main([*words, *more, "--state-dtype", dtype]) == 2
            assert capsys.readouterr().err == f"sympow: error: {1 << 29} {cache} {disk << 30} {narrow}\n"


def test_sizes_that_no_memory_holds(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "memory_of", lambda device: memory.Memory(2 * 10**9, 4 * 10**9))
    for words, message in (
        (["--slots", "1000000000"],
         "a state for 1,000,000,000 slots needs 280 TB of memory; this machine has 2.0 GB free"),
        (["--cache-memory", "4"], "--cache-memory 4 needs 4.3 GB of memory; this machine has 4.0 GB"),
        (["--cache-memory", "1e308"], "--cache-memory 1e+308 needs inf bytes of memory; this machine has 4.0 GB"),
        (["--max-prompt-tokens", "10" + "0" * 9],
         "--max-prompt-tokens 10,000,000,000 needs 160 GB of memory; this machine has 4.0 GB"),
        (["--cache-dir", __file__], "--cache-dir is a folder; "),
        (["--cache-dir", str(tmp_path / "a/b"), "--cache-disk", "1e9"], "--cache-disk 1e+09 asks for that many GiB; "),
    ):  # fmt: skip
        assert main(["serve", str(folder), *words, "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"sympow: error: {message}") and error.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["serve", str(folder), "--slots", "1" + "0" * 30])
    assert "argument --slots: must be below 2**63, got 1000" in capsys.readouterr().err


def test_a_checkpoint_is_served_with_the_tokenizer_of_its_run(folder):
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert load_served(str(checkpoint), "cpu").folder == folder


def test_an_exported_folder_is_served(folder, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    assert main(["export", str(folder), "--out", str(tmp_path / "hf")]) == 0
    exported, run = (load_served(str(path), torch.device("cpu")) for path in (tmp_path / "hf", folder))
    prompt = torch.tensor([list(b"def main(")])
    answers = [generate(each.model, prompt, 8, temperature=0).tokens for each in (exported, run)]
    assert torch.equal(*answers) and exported.tokenizer.encode("±").tolist() == [194, 177]
    BPETokenizer.train(["a b c " * 99], 260).save(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"hf/tokenizer\.json has 25\d tokens, and the model knows 256: it is not"):
        load_served(str(tmp_path / "hf"), torch.device("cpu"))
