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
from sympow.data import BPETokenizer, DataConfig, load_tokenizer, open_corpus
from sympow.data.tokenizer_files import end_tokens
from sympow.integrations.transformers.folders import from_transformers
from sympow.serving import Engine
from sympow.serving.http import ChatTemplate, Service
from sympow.training import load_model, read_metrics
from sympow.training.checkpoint import latest_step
from tests.serving.conftest import Client, ask

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep", "", "--by", "text"], "the layers to keep are of one kind, softmax or gated, such as 5 or gated*5"),
        (["--keep", "2", "--by", "nowhere"], "text corpus does not exist: nowhere"),
        (["--keep", "5", "--by", "text"], "expected at most 4 layers to keep, as the pattern replaces so many; got 5"),
        (
            ["--keep", "gated*1", "--by", "text", "--pattern", "softmax"],
            "expected at most 0 layers to keep, as the pattern replaces so many; got 1",
        ),
    ],
)
def test_layers_that_cannot_be_kept_are_refused_before_the_choice(folder, capsys, monkeypatch, words, message):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sympow.conversion.choice.swap_mixers", None)  # is not called
    assert main(["convert", "hf", "--out", "refused", *words]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(f"sympow: error: {message}")
    assert "data.path" not in error and not (folder / "refused").exists()


def test_the_usual_layers_are_windows_and_the_delta_rule_in_turns(folder, tmp_path):
    assert main(["convert", f"{folder}/hf", "--out", f"{tmp_path}/usual"]) == 0
    config = load_model(tmp_path / "usual").model.config
    mixers = [config.mixer(layer) for layer in range(4)]
    assert [mixer.name for mixer in mixers] == ["window", "power_delta"] * 2
    assert mixers[0].options["window"] == 1024 and mixers[1].options["n_kv_heads"] == config.n_heads


@pytest.mark.parametrize(("kind", "more"), [("power", ()), ("delta", ()), ("delta", ("--unshare",))])
def test_gated_layers_that_are_chosen_train_and_load_everywhere(folder, capsys, kind, more):
    name = f"gated-{kind}{len(more)}"
    command = ["convert", f"{folder}/hf", "--out", f"{folder}/{name}", "--pattern", f"{kind},window", "--window", "8"]
    assert main([*command, *more, "--keep", "gated*2", "--by", f"{folder}/text"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("layers of gated, with the divergence that the replacement of each alone gives: ")
    assert re.fullmatch(rf".* layers [12] of (gated|{kind}|window)(, [12] of (gated|{kind}|window))+", out[1])
    config = load_model(f"{folder}/{name}").model.config
    gated = [layer for layer in range(4) if config.mixer(layer).name == "softmax"]
    assert [int(layer) for layer in re.findall(r"(\d+) \(", out[0])] == gated and len(gated) == 2
    distilled = words(folder, f"{name}-student")
    assert main([distilled[0], f"{folder}/{name}", *distilled[2:]]) == 0
    capsys.readouterr()
    run = f"{folder}/{name}-student"
    student, start = load_model(run).model, load_model(f"{folder}/{name}").model
    for layer in gated:  # stage 1 trains them too
        mixer = student.blocks[layer].mixer
        assert mixer.gate is not None and not torch.equal(mixer.gate.weight, start.blocks[layer].mixer.gate.weight)
    assert main(["generate", run, "--prompt", "To be", "--max-new-tokens", "9", "--temperature", "0"]) == 0
    written = capsys.readouterr().out.rstrip("\n")
    assert main(["export", run, "--out", f"{folder}/{name}-hf"]) == 0
    tokens = torch.arange(20)[None]
    exported, tokenizer = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}-hf"), load_tokenizer(run)
    torch.testing.assert_close(exported(tokens, use_cache=False).logits, student(tokens), rtol=0, atol=1e-5)
    prompt = torch.from_numpy(tokenizer.encode("To be").astype("int64"))[None]
    made = exported.generate(prompt, max_new_tokens=9, do_sample=False)[0]
    ended = made.tolist().index(END[0]) if END[0] in made.tolist() else len(made)
    assert tokenizer.decode(made[:ended].tolist()).rstrip("\n") == written.removesuffix("?")
    engine = Engine(student, tokenizer, slots=2)
    engine.start()
    ((drawn, *_),) = ask(engine, Client(prompt[0], 9))
    engine.close()
    assert drawn == made[prompt.shape[1] :].tolist() or END[0] in made.tolist()


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


@pytest.fixture
def begun(folder, tmp_path):
    """The small Llama with a tokenizer as that of Llama 3: it puts a token before every text."""
    shutil.copytree(folder / "hf", tmp_path / "hf")
    spec = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    number = len(spec["model"]["vocab"])
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": number, "content": "<begin>"} | special]
    first, text = {"SpecialToken": {"id": "<begin>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    template = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text, text],
                "special_tokens": {"<begin>": {"id": "<begin>", "ids": [number], "tokens": ["<begin>"]}}}  # fmt: skip
    spec["post_processor"] = {"type": "Sequence", "processors": [level, template]}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(spec))
    chat = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"bos_token": "<begin>", "chat_template": chat}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "hf" / "generation_config.json").write_text("{}")
    assert main(["convert", f"{tmp_path}/hf", "--out", f"{tmp_path}/run", "--pattern", "softmax"]) == 0
    return tmp_path


def test_texts_begin_as_in_transformers(begun, folder, capsys, monkeypatch):
    """In generate, read, completions, evaluation and training; chats begin as their template says."""
    tokenizer, ours = AutoTokenizer.from_pretrained(begun / "hf"), load_tokenizer(begun / "run")
    prompt = "To be or"
    ids = tokenizer(prompt).input_ids
    assert ids[0] == ours.start[0] and tokenizer.decode(ids[0]) == "<begin>" and ids[1:] == ours.encode(prompt).tolist()
    model = AutoModelForCausalLM.from_pretrained(begun / "hf")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(ids) :]
    command = ["generate", f"{begun}/run", "--max-new-tokens", "8", "--temperature", "0"]
    assert main([*command, "--prompt", prompt]) == 0
    plain = capsys.readouterr().out
    assert plain.removeprefix(prompt).rstrip("\n") == ours.decode(expected.tolist()).rstrip("\n")
    (begun / "text.txt").write_text(prompt)
    assert main(["read", f"{begun}/run", f"{begun}/text.txt", "--out", f"{begun}/text.ctx", "--quiet"]) == 0
    assert f"{len(ids)} tokens" in capsys.readouterr().out
    assert main([*command, "--context", f"{begun}/text.ctx"]) == 0  # and not at the place where it goes on
    assert prompt + capsys.readouterr().out == plain
    engine = Engine(load_model(begun / "run").model, ours, slots=1)
    service = Service(engine, ours, "run", ChatTemplate.of(begun / "run"))
    assert service.tokens_of(prompt, begins=True).tolist() == ids
    chat = service.template.render([{"role": "user", "content": prompt}])
    assert chat == f"<begin>{prompt}" and service.tokens_of(chat).tolist() == ids
    corpus = open_corpus(DataConfig(kind="text", path=f"{folder}/text", held_out=0.5), tokenizer=ours)
    for split in (corpus.train, corpus.held_out):
        assert all(split[i][0] == ids[0] for i in range(len(split)))


def test_a_text_ends_where_the_tokenizer_says(folder, capsys):
    command = ["generate", str(folder / "swapped"), "--prompt", "To be", "--max-new-tokens", "60"]
    assert main([*command, "--temperature", "0"]) == 0
    written = capsys.readouterr().out.removeprefix("To be").rstrip("\n")
    last = load_tokenizer(folder / "swapped").encode(written)[-1]
    (folder / "swapped" / "generation_config.json").write_text(json.dumps({"eos_token_id": int(last)}))
    assert main([*command, "--temperature", "0"]) == 0
    shorter = capsys.readouterr().out.removeprefix("To be").rstrip("\n")
    assert written.startswith(shorter) and len(shorter) < len(written)


def test_commands_of_the_readme_run(folder, monkeypatch, capsys):
    """Those behind the two that fetch packages and a model, with a small model in its place."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S) if "sympow convert" in block)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) <= 5
    (folder / "readme").mkdir()
    monkeypatch.chdir(folder / "readme")
    given = {"SmolLM2-135M-Instruct.Q4_1.gguf": f"{folder}/hf", "data.path=TEXTS": f"data.path={folder}/text"}
    more = {"distill": [*FIELDS[1:], "--quiet"]}
    for command in [[given.get(word, word) for word in words[1:]] for words in commands if words[0] == "sympow"]:
        assert main(command + more.get(command[0], [])) == 0
    out = capsys.readouterr().out
    assert "layers 2 of window, 2 of delta" in out and "finished at step 12 of 12" in out


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
        (["convert", "{}/hf", "--out", "{}/new", "--pattern", "delta*0"], "such as power*5,softmax; got 'delta*0'"),
        (["convert", "{}/hf", "--out", "{}/new", "--pattern", "gated", "--unshare"], "the pattern has none: gated"),
        (["convert", "{}/hf", "--out", "{}/new", "--pattern", "window*4,delta"], "the pattern has 5 layers, and "),
        (["convert", "{}/hf", "--out", "{}/new", "--keep", "power*2", "--by", "{}/text"], "softmax or gated, such as"),
        (["convert", "{}/hf", "--out", "{}/new", "--keep", "9", "--by", "{}/text"], "at most 4 layers to keep"),
        (["convert", "{}/hf", "--out", "{}/new", "--keep", "2", "--by", "{}/hf"], "is empty"),
        (["convert", "{}/bare", "--out", "{}/new"], "has no tokenizer.json"),
        (["convert", "{}/text", "--out", "{}/new"], "it has no config.json"),
        (["convert", "{}/words", "--out", "{}/new"], "words cannot be used: expected a byte-level BPE"),
        (["convert", "{}/cut", "--out", "{}/new"], "cut/model.safetensors cannot be read: Error while"),
        (["convert", "{}/swapped", "--out", "{}/new"], "swapped is a model of sympow already; give the"),
        (["convert", "{}/made", "--out", "{}/new"], "made is a model of sympow already; give the pre"),
        (["distill", "{}/swapped", "--teacher", "{}/made", "--out", "{}/new"], "made is a model of sympow already"),
        (["distill", "{}/hf", "--teacher", "{}/hf", "--out", "{}/new"], "is of a model of Hugging Face transformers"),
        (["distill", "{}/swapped", "--teacher", "{}/text", "--out", "{}/new"], "it has no config.json"),
        (["distill", "{}/swapped", "--teacher", "{}/hf", "--out", "{}/new", "data.kind=text", "data.path={}/text",
          "data.tokenizer={}/other"], "not in those of the model to distill"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_line(folder, arguments, message, capsys):
    if not (folder / "bare").exists():
        AutoModelForCausalLM.from_pretrained(folder / "hf").save_pretrained(folder / "bare")
        assert main(["export", f"{folder}/swapped", "--out", f"{folder}/made"]) == 0
        BPETokenizer.train(["other words, other pairs"], 270).save(folder / "other" / "tokenizer.json")
        for name, file, text in (("words", "tokenizer.json", "{}"), ("cut", "model.safetensors", "")):
            shutil.copytree(folder / "hf", folder / name)
            (folder / name / file).write_text(text)
    capsys.readouterr()
    assert main([word.format(folder) for word in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_folder_without_a_tokenizer_is_refused_before_weights_are_read(folder, tmp_path, capsys, monkeypatch):
    shutil.copytree(folder / "hf", tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    monkeypatch.setattr("sympow.integrations.transformers.pretrained.loading.AutoModelForCausalLM", None)
    assert main(["convert", str(tmp_path / "bare"), "--out", str(tmp_path / "new")]) == 2
    assert "bare has no tokenizer.json: a converted model" in capsys.readouterr().err


def test_a_killed_conversion_leaves_nothing_in_the_way(folder, tmp_path):
    """Neither of the folder of a run nor of an exported one, of which a part has been written."""
    convert = ["convert", f"{folder}/hf", "--out", f"{tmp_path}/new"]
    export = ["export", f"{folder}/swapped", "--out", f"{tmp_path}/hf"]
    for words, name in ((convert, "sympow.training.run_folder.save_checkpoint"),
                        (export, "sympow.integrations.transformers.folders.write_beside")):  # fmt: skip
        module, _, function = name.rpartition(".")
        code = (
            f"import os, {module} as module\nfrom sympow.cli import main\n"
            f"module.{function} = lambda *_: os._exit(9)\nmain({words!r})"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 9
        (leftover,) = tmp_path.iterdir()
        assert leftover.name.startswith(".") and any(leftover.iterdir())
        assert main(words) == 0
        (made,) = tmp_path.iterdir()
        assert made.name == Path(words[-1]).name
        shutil.rmtree(made)


def test_everyone_may_read_what_a_user_may_share(folder, tmp_path):
    """Files of weights and contexts have the mode of other files, also where that is stricter."""
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            assert main(["export", f"{folder}/swapped", "--out", f"{tmp_path}/{mask}", "--max-shard-size", "60KB"]) == 0
            (tmp_path / "text.txt").write_text(TEXT)
            words = ["read", f"{folder}/swapped", f"{tmp_path}/text.txt", "--out", f"{tmp_path}/{mask}.ctx", "--quiet"]
            assert main(words) == 0
        finally:
            os.umask(before)
        files = [*(tmp_path / str(mask)).iterdir(), tmp_path / f"{mask}.ctx"]
        assert len(list((tmp_path / str(mask)).glob("*.safetensors"))) > 1
        assert {oct(file.stat().st_mode & 0o777) for file in files} == {oct(mode)}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "tokenizer_config.json is no JSON"),
        ("tokenizer_config.json", b"[1]", "tokenizer_config.json must hold a JSON object; got list"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is no UTF-8 text"),
        ("generation_config.json", b"[1]", "generation_config.json must hold a JSON object; got list"),
        ("special_tokens_map.json", b"3", "special_tokens_map.json must hold a JSON object; got int"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is no UTF-8 text"),
        ("tokenizer.json", b"3", "expected a byte-level BPE"),
    ],
)
def test_damaged_files_beside_the_weights_are_named(folder, tmp_path, file, content, message, capsys):
    shutil.copytree(folder / "hf", tmp_path / "hf")
    (tmp_path / "hf" / file).write_bytes(content)
    assert main(["convert", f"{tmp_path}/hf", "--out", f"{tmp_path}/new"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("sympow: error:") and message in error and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "content",
    ['{"eos_token_id": "x"}', '{"eos_token_id": [1, "x"]}', '{"eos_token_id": true}', '{"eos_token_id": -1}', "[1]"],
)
def test_end_tokens_that_are_none_are_refused(folder, tmp_path, content, capsys):
    shutil.copytree(folder / "swapped", tmp_path / "run")
    (tmp_path / "run" / "generation_config.json").write_text(content)
    assert main(["generate", f"{tmp_path}/run", "--prompt", "To be", "--max-new-tokens", "2"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "generation_config.json" in error
