"""`sympow convert` and `sympow distill`: from a folder of transformers to a run that is killed, resumed and used."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sympow.cli import main
from sympow.data import BPETokenizer, load_tokenizer
from sympow.data.tokenizer_files import end_tokens, tokenizer_config, write_beside
from sympow.integrations.transformers.folders import from_transformers
from sympow.integrations.transformers.gguf_tokenizer import gguf_beside, gguf_fields
from sympow.serving.http import ChatTemplate
from sympow.training import load_model, read_metrics
from sympow.training.checkpoint import latest_step

TEXT = "To be or not to be, that is the question.\n" * 40
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
END = [ord("?") - 33]  # the bytes of a BPE are its first tokens, in the order of their characters
FIELDS = [
    "data.kind=text", "data.pack=false", "training.context=32", "training.batch_size=4", "training.micro_batch_size=2",
    "training.steps=12", "training.warmup_steps=2", "training.checkpoint_every=1", "training.log_every=1",
    "training.evaluation_batches=2", "training.precision=float32", "distillation.layer_steps=4",
    "distillation.text_steps=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with a tokenizer, texts, and a converted model."""
    folder = tmp_path_factory.mktemp("conversion")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    BPETokenizer.train([TEXT], 280).save(folder / "hf")
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "?", "chat_template": TEMPLATE}))
    (folder / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    (folder / "text").mkdir()
    for number in range(4):
        (folder / "text" / f"{number}.txt").write_text(TEXT + str(number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        command = ["convert", str(folder / "hf"), "--out", str(folder / "swapped"), "--pattern", "power,window"]
        assert main([*command, "--window", "8"]) == 0
        yield folder


def words(folder, out: str, *more: str) -> list[str]:
    command = ["distill", f"{folder}/swapped", "--teacher", f"{folder}/hf", "--out", f"{folder}/{out}", "--quiet"]
    return [*command, f"data.path={folder}/text", *FIELDS, *more]


def timeless(folder) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in read_metrics(folder)]


def test_a_killed_distillation_ends_as_one_that_was_not(folder, capsys):
    assert main(words(folder, "whole")) == 0
    assert "finished at step 12 of 12" in capsys.readouterr().out
    process = subprocess.Popen([sys.executable, "-m", "sympow", *words(folder, "killed")], env=os.environ)
    deadline = time.monotonic() + 600
    while latest_step(folder / "killed") < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 3 <= latest_step(folder / "killed") <= 12
    assert main(words(folder, "killed")) == 0
    assert timeless(folder / "killed") == timeless(folder / "whole")
    assert [row["stage"] for row in timeless(folder / "killed")] == [1] * 4 + [2] * 4 + [3] * 4
    assert main(words(folder, "killed", "training.learning_rate=1e-4")) == 2
    assert "training.learning_rate = 0.001, not 0.0001" in capsys.readouterr().err


def test_the_result_loads_everywhere(folder, capsys):
    run = str(folder / "swapped")
    assert main(["generate", run, "--prompt", "To be", "--max-new-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("To be")
    (folder / "page.txt").write_text(TEXT)
    assert main(["read", run, str(folder / "page.txt"), "--out", str(folder / "page.ctx"), "--quiet"]) == 0
    assert main(["export", run, "--out", str(folder / "exported")]) == 0
    tokens = torch.arange(20)[None]
    native, exported = load_model(run).model, AutoModelForCausalLM.from_pretrained(folder / "exported")
    torch.testing.assert_close(exported(tokens, use_cache=False).logits, native(tokens), rtol=0, atol=1e-5)


def test_special_tokens_and_the_chat_template_go_along(folder, capsys):
    """From transformers through every folder and back: where a text ends, and how a chat is written."""
    assert main(words(folder, "student")) == 0
    assert main(["export", str(folder / "student"), "--out", str(folder / "back")]) == 0
    from_transformers(folder / "back", folder / "again")
    for name in ("swapped", "student", "back", "again"):
        tokenizer = load_tokenizer(folder / name)
        assert end_tokens(folder / name, tokenizer) == set(END) and tokenizer.token_bytes[END[0]] == b"?"
        assert ChatTemplate.of(folder / name).render([{"role": "user", "content": "Be"}]) == "Be?"
    exported = AutoModelForCausalLM.from_pretrained(folder / "back")
    assert exported.generation_config.eos_token_id == END
    tokenizer = AutoTokenizer.from_pretrained(folder / "back")
    assert tokenizer.eos_token == "?"
    chat = [{"role": "user", "content": "Be"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Be?"


def test_a_text_ends_where_the_tokenizer_says(folder, capsys):
    command = ["generate", str(folder / "swapped"), "--prompt", "To be", "--max-new-tokens", "60"]
    assert main([*command, "--temperature", "0"]) == 0
    written = capsys.readouterr().out.removeprefix("To be").rstrip("\n")
    last = load_tokenizer(folder / "swapped").encode(written)[-1]
    (folder / "swapped" / "generation_config.json").write_text(json.dumps({"eos_token_id": int(last)}))
    assert main([*command, "--temperature", "0"]) == 0
    shorter = capsys.readouterr().out.removeprefix("To be").rstrip("\n")
    assert written.startswith(shorter) and len(shorter) < len(written)


def test_special_tokens_of_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_token_list(["a", "<end>", "<pad>"])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    write_beside(gguf_beside(gguf_fields(tmp_path / "tiny.gguf")), tmp_path)
    assert tokenizer_config(tmp_path) == {"eos_token": "<end>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 1, "pad_token_id": 2}


def test_commands_of_the_readme_run(folder, monkeypatch, capsys):
    """Those behind the two that fetch packages and a model, with a small model in its place."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S) if "sympow convert" in block)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) <= 5
    (folder / "readme").mkdir()
    monkeypatch.chdir(folder / "readme")
    given = {"SmolLM2-135M-Instruct.Q4_1.gguf": f"{folder}/hf", "data.path=TEXTS": f"data.path={folder}/text"}
    more = {"distill": [*FIELDS[1:], "--quiet"], "generate": ["--max-new-tokens", "5", "--temperature", "0"]}
    for command in [[given.get(word, word) for word in words[1:]] for words in commands if words[0] == "sympow"]:
        assert main(command + more.get(command[0], [])) == 0
    assert "The kernel" in capsys.readouterr().out


def test_the_pattern_softmax_is_the_teacher_itself(folder):
    assert main(["convert", f"{folder}/hf", "--out", f"{folder}/native", "--pattern", "softmax"]) == 0
    tokens = torch.arange(60).view(2, 30)
    expected = AutoModelForCausalLM.from_pretrained(folder / "hf")(tokens).logits
    torch.testing.assert_close(load_model(folder / "native").model(tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "{}/hf", "--out", "{}/hf"], "exists already; give a new or an empty folder"),
        (["convert", "{}/hf", "--out", "{}/new", "--pattern", "linear"], "a pattern is made of power, window, softmax"),
        (["convert", "{}/bare", "--out", "{}/new"], "has no tokenizer.json"),
        (["convert", "{}/text", "--out", "{}/new"], "it has no config.json"),
        (["convert", "{}/words", "--out", "{}/new"], "words cannot be used: expected a byte-level BPE"),
        (["convert", "{}/cut", "--out", "{}/new"], "cut cannot be read: Error while deserializing header"),
        (["distill", "{}/hf", "--teacher", "{}/hf", "--out", "{}/new"], "is of a model of Hugging Face transformers"),
        (["distill", "{}/swapped", "--teacher", "{}/text", "--out", "{}/new"], "it has no config.json"),
        (["distill", "{}/swapped", "--teacher", "{}/hf", "--out", "{}/new", "data.kind=text", "data.path={}/text",
          "data.tokenizer={}/other"], "not in those of the model to distill"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_line(folder, arguments, message, capsys):
    if not (folder / "bare").exists():
        AutoModelForCausalLM.from_pretrained(folder / "hf").save_pretrained(folder / "bare")
        BPETokenizer.train(["other words, other pairs"], 270).save(folder / "other" / "tokenizer.json")
        for name, file, text in (("words", "tokenizer.json", "{}"), ("cut", "model.safetensors", "")):
            shutil.copytree(folder / "hf", folder / name)
            (folder / name / file).write_text(text)
    assert main([word.format(folder) for word in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sympow")]  # others are bars
    assert len(lines) == 1 and message in lines[0]
