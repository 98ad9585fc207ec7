"""The command line: every command, and every expected error in one line without a traceback."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from sympow import __version__, recipes
from sympow.cli import generate, main, measure, train
from sympow.data import load_tokenizer
from sympow.data.text import Document, train_bpe
from sympow.models.speculation import Pace
from sympow.ops import memory
from sympow.progress import Progress
from sympow.training import latest, load, load_checkpoint, read_metrics, runs
from sympow.training.checkpoint import list_checkpoints
from tests.cli.processes import in_process
from tests.tiny_runs import finished_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a corpus, a recipe file, and two finished runs."""
    documents = [f"{i} ± the quick brown fox jumps over it. " * 20 for i in range(4)]
    with finished_runs(tmp_path_factory.mktemp("cli"), documents) as folder:
        yield folder


def test_train_leaves_a_run_and_does_nothing_twice(folder, capsys):
    run = folder / "power"
    assert json.loads((run / "config.json").read_text())["name"] == "tiny-power"
    assert (run / "tokenizer.json").exists() and list((run / "tensorboard").iterdir())
    assert [path.name for path in list_checkpoints(run)] == ["step-00000002.pt", "step-00000004.pt"]
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    before = latest(run).stat().st_mtime_ns
    assert main(["train", f"{folder}/tiny.py:power", "--out", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{run} has finished already, at step 4 of 4\n" and err == ""
    assert latest(run).stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["cut", "changed", "directory", "empty"])
def test_a_finished_run_with_a_damaged_last_checkpoint_is_not_finished(folder, tmp_path, capsys, damage):
    run = shutil.copytree(folder / "power", tmp_path / "run")
    last, whole = latest(run), latest(run).read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 100]) + whole[middle + 100 :]
    directory = whole[:-500] + bytes(255 - byte for byte in whole[-500:-400]) + whole[-400:]
    made = {"cut": whole[:middle], "changed": changed, "directory": directory, "empty": b""}
    last.write_bytes(made[damage])
    assert main(["train", f"{folder}/tiny.py:power", "--out", str(run)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"sympow: error: {last} is ") and err.count("\n") == 1
    last.write_bytes(whole)
    assert main(["train", f"{folder}/tiny.py:power", "--out", str(run)]) == 0


def test_train_says_what_it_does(folder, tmp_path, capsys):
    arguments = [
        "train",
        f"{folder}/tiny.py:power",
        "training.steps=2",
        "--out",
        str(tmp_path / "run"),
        "data.pack=false",
    ]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("finished at step 2 of 2, loss ") and out.count("\n") == 1
    assert err.startswith("step 2 of 2: loss ") and err.count("\n") == 1
    config = load(tmp_path / "run").config
    assert (config.training.steps, config.data.pack) == (2, False)  # words before and after an option
    assert main([*arguments, "training.seed=1", "--restart", "--quiet"]) == 0
    assert load(tmp_path / "run").config.training.seed == 1
    assert capsys.readouterr().err == ""
    (tmp_path / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    assert main([*arguments, "--restart", "--quiet"]) == 2
    assert "notes.txt: move them first" in capsys.readouterr().err
    assert load(tmp_path / "run").config.training.seed == 1  # nothing was removed


def test_phases_between_steps_are_shown(folder, tmp_path, monkeypatch):
    phases, phase = [], Progress.phase
    monkeypatch.setattr(Progress, "phase", lambda self, name: phases.append(name) or phase(self, name))
    assert main(["train", f"{folder}/tiny.py:power", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert phases == ["saving a checkpoint", "computing the held-out loss", "saving a checkpoint"]


def test_long_commands_tell_how_far_they_are(every_count_is_told, folder, tmp_path, capsys):
    """Where stderr is no terminal."""
    run = str(tmp_path / "run")
    assert main(["train", f"{folder}/tiny.py:power", "--out", run]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(re.fullmatch(r"training: 3 of 4 steps, loss \d\.\d{4}, 0:\d\d:\d\d", line) for line in lines)
    assert main(["evaluate", run, "--context", "32", "--rows", "2"]) == 0
    assert "evaluating run: 2 of 2 rows, " in capsys.readouterr().err
    assert main(["train", f"{folder}/tiny.py:power", "--out", run, "--restart", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_opening_the_data_is_told(folder, tmp_path, capsys, monkeypatch):
    """It may train a tokenizer, for minutes, before there is a step to count."""
    told = []
    monkeypatch.setattr(runs, "Progress", lambda task, quiet: told.append((task, quiet)) or nullcontext())
    monkeypatch.setattr("sympow.progress.Progress", lambda task, quiet: told.append((task, quiet)) or nullcontext())
    words = ["train", f"{folder}/tiny.py:power", "training.steps=1", "--out", str(tmp_path / "run")]
    assert main(words) == main([*words[:-1], str(tmp_path / "quiet"), "--quiet"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--context", "32"]) == 0
    assert told == [("opening the data", False), ("opening the data", True), ("opening the data", False)]


def test_runs_go_to_a_folder_of_their_name(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"{folder}/tiny.py:softmax", "training.steps=1", "--quiet"]) == 0
    assert latest("runs/tiny-softmax") is not None


def test_evaluate_compares_runs(folder, tmp_path, capsys):
    runs = [str(folder / "power"), str(latest(folder / "softmax"))]
    files = {name: tmp_path / f"curves.{name}" for name in ("csv", "png")}
    options = ["--context", "100", "--rows", "3", "--csv", str(files["csv"]), "--plot", str(files["png"])]
    assert main(["evaluate", runs[0], *options, runs[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["context", "power", "step-00000004.pt"]
    assert [line.split()[0] for line in lines[1:9]] == ["1", "2", "3", "5", "9", "17", "33", "65"]
    assert lines[9].startswith("power: mean ") and "3 rows of 100 tokens" in lines[9] and "trained on 32" in lines[9]
    assert len(files["csv"].read_text().splitlines()) == 1 + 2 * 8
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_a_fraction_beside_a_path_of_held_out_documents_is_refused(folder, tmp_path, capsys):
    """As it would be ignored. A recipe may have one."""
    (tmp_path / "other.txt").write_text("something else " * 60)
    path = f"held_out_path={tmp_path}/other.txt"
    words = ["train", f"{folder}/tiny.py:power", "--out", str(tmp_path / "run"), "--quiet", f"data.{path}"]
    line = f" chooses held-out documents, which {{}}held_out_path = '{tmp_path}/other.txt' gives already: leave one "
    for key in ("held_out=0.3", "seed=4"):
        assert main([*words, f"data.{key}"]) == 2
        assert f"error: data.{key.partition('=')[0]}" + line.format("data.") in capsys.readouterr().err
        for command in ("evaluate", "ar-hits"):
            assert main([command, str(folder / "power"), "--data", path, "--data", key]) == 2
            assert f"error: {key.partition('=')[0]}" + line.format("") in capsys.readouterr().err
    assert main([*words, "training.steps=2"]) == 0


def test_evaluate_says_that_runs_have_other_held_out_documents(folder, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("something else " * 60)
    path = f"held_out_path={tmp_path}/other.txt"
    words = ["train", f"{folder}/tiny.py:power", "--out", str(tmp_path / "run"), "--quiet", f"data.{path}"]
    assert main([*words, "training.steps=2"]) == 0
    runs = [str(folder / "power"), str(tmp_path / "run")]
    capsys.readouterr()
    assert main(["evaluate", *runs, "--context", "32"]) == 0
    assert "run is evaluated on other held-out documents than power, so" in capsys.readouterr().err
    assert main(["evaluate", *runs, "--context", "32", "--data", path]) == 0
    assert "other held-out documents" not in capsys.readouterr().err


def test_documents_that_changed_since_the_training_are_told(tmp_path, capsys, monkeypatch):
    """The held-out ones are chosen anew, and a model may have been trained on some of them."""
    monkeypatch.chdir(tmp_path)
    documents = [f"def f{i}(): return {i}\n" * 20 for i in range(12)]
    with finished_runs(tmp_path, documents, names=("power",)):
        said = "the documents have changed since the training of power, so"
        evaluate = ["evaluate", "power", "--context", "32"]
        hits = ["ar-hits", "power", "--context", "32", "--count-tokens", "200"]
        words = (evaluate, hits, ["train", "--from", "power", "training.steps=2", "--quiet", "--out"])
        for changed in (False, True):
            for number, command in enumerate(words):
                new = [f"new{changed}"] if command[0] == "train" else []
                assert main([*command, *new]) == 0
                assert (said in capsys.readouterr().err) == changed, (number, changed)
            for i in range(3):
                (tmp_path / "corpus" / f"!{i}.txt").write_text("x = 1\n" * 9)
        assert main([*evaluate, "--data", "held_out_path=corpus/!0.txt"]) == 0
        assert said not in capsys.readouterr().err


def test_evaluate_on_other_data_and_by_default_beyond_the_trained_context(folder, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("other words than those " * 100)
    assert main(["evaluate", str(folder / "power"), "--data", f"held_out_path={tmp_path}/other.txt"]) == 0
    other = capsys.readouterr().out
    assert "of 128 tokens" in other
    assert main(["evaluate", str(folder / "power")]) == 0
    assert capsys.readouterr().out != other


def test_generate_is_reproducible_and_says_what_it_cost(folder, tmp_path, capsys, monkeypatch):
    arguments = [
        "generate",
        str(folder / "power"),
        "--max-new-tokens",
        "30",
        "--seed",
        "3",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
    ]
    assert main([*arguments, "--prompt", "the ±"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("the ±") and len(out) > 10
    state = load(folder / "power").model.init_state(1).nbytes
    assert err.startswith(f"state {state:,} bytes (") and "prefill of 6 tokens " in err and err.endswith(" tokens/s\n")
    (tmp_path / "prompt").write_text("the ±", encoding="utf-8")
    assert main([*arguments, "--prompt-file", str(tmp_path / "prompt")]) == 0
    assert capsys.readouterr().out == out
    monkeypatch.setattr(sys, "stdin", (tmp_path / "prompt").open(encoding="utf-8"))
    assert main([*arguments, "--prompt-file", "-"]) == 0
    assert capsys.readouterr().out == out


def test_line_ends_of_a_prompt_file_are_kept(folder, tmp_path, capsys):
    """As training reads them."""
    (tmp_path / "prompt").write_bytes(b"the\r\nquick\r")
    words = ["generate", str(folder / "power"), "--max-new-tokens", "1", "--prompt-file", str(tmp_path / "prompt")]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("the\r\nquick\r") and "prefill of 11 tokens" in err


def test_a_single_token_is_not_called_tokens(folder, tmp_path, capsys):
    assert main(["generate", str(folder / "power"), "--max-new-tokens", "1", "--prompt", "t"]) == 0
    assert ", prefill of 1 token " in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("drafts", [["--speculate"], ["--draft", "softmax"], ["--draft", "power"]])
def test_drafts_change_nothing_but_the_speed(drafts, temperature, folder, capsys, monkeypatch):
    monkeypatch.setattr(Pace, "length", lambda self: 5)  # how many does not depend on time
    command = ["generate", str(folder / "power"), "--prompt", "the quick the quick", "--max-new-tokens", "40"]
    command += ["--temperature", temperature, "--top-k", "3"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    assert main([*command, *(str(folder / x) if x in ("softmax", "power") else x for x in drafts)]) == 0
    out, err = capsys.readouterr()
    assert out == expected
    accepted, proposed = re.search(r", ([\d,]+) of ([\d,]+) draft tokens accepted$", err).groups()
    assert int(proposed) > 0 or drafts == ["--speculate"]
    if (drafts[-1], temperature) == ("power", "0"):
        assert accepted == proposed


def test_generated_state_of_softmax_grows(folder, capsys):
    def state(new: int) -> int:
        assert main(["generate", str(folder / "softmax"), "--prompt", "x" * 8, "--max-new-tokens", str(new)]) == 0
        return int(capsys.readouterr().err.split()[1].replace(",", ""))

    assert state(200) > state(1)


def test_sizes_are_the_published_ones(capsys):
    assert main(["sizes"]) == 0
    text = capsys.readouterr().out
    assert "39 MB" in text and "77 MB" in text
    assert main(["sizes", "small", "--p", "2", "--context", "1024", "--json"]) == 0
    tables = {table["name"]: table["rows"] for table in json.loads(capsys.readouterr().out)}
    assert [row["spow"] for row in tables["dimension"]] == [2080]
    assert main(["sizes", "--key-dim", "32", "--heads", "4", "--layers", "2", "--p", "2", "--json"]) == 0
    tables = {table["name"]: table["rows"] for table in json.loads(capsys.readouterr().out)}
    assert tables["power_state"][0]["spow_elements"] == 2 * 4 * 528 * 33


def test_sizes_of_the_xl_shape_and_of_bodies(capsys):
    def tables(*words):
        assert main(["sizes", *words, "--json"]) == 0
        return {table["name"]: table["rows"] for table in json.loads(capsys.readouterr().out)}

    assert tables("xl")["other_state"][0] == {
        "attention": "linear, no normalizer", "bytes": 9_830_400, "elements": 4_915_200
    }  # fmt: skip
    ratios = [
        tables("xl", "--body", body)["weight_state_flop_ratio"][0]["at_1024"] for body in ("gpt2", "llama", "rwkv7")
    ]
    weights = [4 * 1600**2 + others for others in (8 * 1600**2, 3 * 1600 * 4288, 8 * 1600**2 + 2 * 1600 * 192)]
    assert [ratio / ratios[0] for ratio in ratios] == pytest.approx([each / weights[0] for each in weights])


@pytest.mark.parametrize(
    "model", [["body=llama"], ["body=llama", "mlp_hidden=24", "n_kv_heads=1", "tie_embeddings=false"], ["body=rwkv7"]]
)
def test_a_body_is_an_override(folder, tmp_path, capsys, model):
    words = [f"{folder}/tiny.py:power", *(f"model.{each}" for each in model), "training.steps=2"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert load(tmp_path / "run").config.model.body == model[0].removeprefix("body=")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "the ", "--max-new-tokens", "4"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--context", "32"]) == 0
    capsys.readouterr()


def test_demo_trains_compares_and_generates(folder, tmp_path, capsys, monkeypatch):
    real = recipes.load_recipe
    monkeypatch.setattr(recipes, "load_recipe", lambda name: real(name.replace("demo:", f"{folder}/tiny.py:")))
    assert main(["demo", "--out", str(tmp_path / "demo"), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert out.count("finished at step 4 of 4") == 2 and "def main(" in out and "tiny-softmax: mean" in out
    assert (tmp_path / "demo" / "context_loss.png").exists() and (tmp_path / "demo" / "context_loss.csv").exists()
    assert main(["demo", "--out", str(tmp_path / "demo"), "--quiet"]) == 0
    assert capsys.readouterr().out.count("has finished already") == 2


# --------------------------------------------------------------------------------------------- bad input


def test_bad_words_on_the_command_line(folder, fails):
    assert fails() == "the following arguments are required: COMMAND (see sympow --help)"
    assert fails("tarin").startswith("argument COMMAND: invalid choice: 'tarin'")
    assert fails("train") == "the following arguments are required: RECIPE (see sympow train --help)"
    assert fails("train", "demo", "--fast") == "unrecognized arguments: --fast (see sympow train --help)"
    line = fails("generate", folder / "power", "--prompt", "x", "more")
    assert line == "unrecognized arguments: more (see sympow generate --help)"
    assert fails("evaluate", folder / "power", "--context", "0").startswith("argument --context: must be at least 1")
    assert fails("evaluate", folder / "power", "--rows", "x").startswith(
        "argument --rows: expected an integer of at least 1, got 'x' (see "
    )
    assert "one of the arguments --prompt --prompt-file --context is required" in fails("generate", folder / "power")
    assert fails("export", folder / "power", "--out", "model.gguf") == (
        "model.gguf: programs that read GGUF files have no power attention, so none is written: give a folder"
    )
    line = fails("serve", "no run", "--cache-disk", "5")
    assert line.startswith("--cache-disk needs --cache-dir, the folder of the states on disk")
    assert fails("train", "demo", "--out", "").startswith("argument --out: a path cannot be empty")
    assert fails("evaluate", "").startswith("argument RUN: a path cannot be empty")


def test_unknown_recipes(folder, fails):
    known = "demo, hybrids, longcrawl64, mqar, scaling"
    assert fails("train", "dmo") == f"unknown recipe 'dmo'; did you mean 'demo'? known: {known}"
    assert fails("train", "demo:sotfmax").startswith("unknown recipe in demo 'sotfmax'; did you mean 'softmax'?")
    assert fails("train", "/nowhere/x.py:f") == "no recipe file at /nowhere/x.py"
    assert fails("train", "no.such.module:f") == "No module named 'no'"
    for no_module in ("folder/recipe.txt", "..", "a..b:f"):
        assert fails("train", no_module).startswith("unknown recipe ")
    tiny = f"{folder}/tiny.py"
    recipes = ", ".join(f"{tiny}:{name}" for name in ("power", "softmax", "hybrid", "nothing", "needy"))
    assert fails("train", tiny) == f"{tiny} holds several recipes: name one of {recipes}"
    assert fails("train", f"{tiny}:pwoer").startswith(f"unknown recipe in {tiny} 'pwoer'; did you mean 'power'?")
    no_recipe = f"nothing in {tiny} is no recipe of sympow train: it returned int, not RunConfig"
    assert fails("train", f"{tiny}:nothing") == no_recipe
    assert fails("train", f"{tiny}:needy") == f"needy in {tiny} is no recipe: it needs the argument 'argument'"
    known = "describe_recipes, load_recipe, load_sweep, recipe_names"
    assert fails("train", "sympow.recipes:x") == f"unknown recipe in sympow.recipes 'x'; known: {known}"


def test_a_binary_file_is_no_recipe(fails, tmp_path):
    """Which Python refuses without a name and a line."""
    (tmp_path / "binary.py").write_bytes(b"\x00\x01")
    assert fails("train", tmp_path / "binary.py").startswith(f"{tmp_path / 'binary.py'}: SyntaxError: source code ")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (b"\ndef f(:", "line 2: SyntaxError: invalid syntax"),
        (b"def f():\n    return {}['key']", "line 2: KeyError: 'key'"),
        (b"x = 1\ny = x / 0", "line 2: ZeroDivisionError: division by zero"),
        (b"import sympow.nothing", "line 1: ModuleNotFoundError: No module named 'sympow.nothing'"),
        (
            b"from sympow.models import preset\n\ndef f():\n    return preset('tiny', 0)",
            "line 4: ValueError: vocab_size must be an integer of at least 1; got 0",
        ),
        (b"\xff", "line 1: SyntaxError: (unicode error) "),
    ],
)
def test_recipes_that_fail(fails, tmp_path, monkeypatch, source, line):
    """By their path and as a module: the line of the recipe, not that of the library."""
    path = tmp_path / "broken_recipes" / "broken.py"
    path.parent.mkdir()
    path.write_bytes(source)
    assert fails("train", f"{path}:f").startswith(f"{path}, {line}")
    monkeypatch.syspath_prepend(tmp_path)
    assert fails("train", "broken_recipes.broken:f").startswith(f"{path}, {line}")
    for name in ("broken_recipes", "broken_recipes.broken"):
        sys.modules.pop(name, None)


def test_unknown_and_wrong_options(folder, fails, tmp_path):
    def refused(*overrides) -> str:
        line = fails("train", f"{folder}/tiny.py:power", *overrides, "--out", tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return line

    assert refused("training.step=3").startswith("unknown field 'training.step'; did you mean 'training.steps'?")
    assert refused("training.steps=x") == "training.steps takes an integer, got 'x'"
    assert refused("training.steps=-1") == "training.steps must be at least 1; got -1"
    assert refused("steps") == "an override is written key=value, got 'steps'"
    assert "no option 'q'" in refused("model.mixers.0.options.q=1")
    assert refused("model.body=bert") == "model.body is one of gpt2, llama, rwkv7, got 'bert'"
    line = refused("model.body=llama", "model.mlp_ratio=3")
    assert line.startswith("the llama body has no field 'mlp_ratio'; it has vocab_size, ")
    assert "data held_out must be above 0" in refused("data.held_out=2")
    for command in ("passkey", "recall-probe"):
        line = fails(command, folder / "power", "--seed", "-1")
        assert line.startswith("argument --seed: must be at least 0, got -1")
    train_bpe([Document("a", lambda: "a b c " * 99)], ["a"], 260, tmp_path).save(tmp_path / "words.json")
    line = fails("evaluate", folder / "power", "--data", f"tokenizer={tmp_path}/words.json")
    assert line.endswith(" but power reads text by its own, another one")
    for command, label in (("evaluate", "power"), ("ar-hits", "the first model")):
        line = fails(command, folder / "power", "--data", f"tokenizer={tmp_path}/no")
        assert line == f"tokenizer file does not exist: {tmp_path}/no"
        line = fails(command, folder / "power", "--data", "tokenizer=bpe")
        assert line == f"{label} reads text by its own tokenizer, bytes: leave tokenizer=bpe out"
        line = fails(command, folder / "power", "--data", "vocab_size=17")
        assert line == f"vocab_size is 17, but the tokenizer of {label} has 256 tokens"
    assert "device 'meta' cannot be used here" in fails(
        "generate", folder / "power", "--prompt", "x", "--device", "meta"
    )
    assert "device 'warp' cannot be used here" in fails(
        "generate", folder / "power", "--prompt", "x", "--device", "warp"
    )


def test_missing_and_empty_corpora(folder, fails, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")

    def refused(path) -> str:
        return fails("train", f"{folder}/tiny.py:power", f"data.path={path}", "--out", tmp_path / "run")

    assert refused("/nowhere/at/all") == "text corpus does not exist: /nowhere/at/all; data.path names the corpus"
    line = fails("train", f"{folder}/tiny.py:power", "data.held_out_path=/nowhere", "--out", tmp_path / "held")
    assert line == "text corpus does not exist: /nowhere; data.held_out_path names the corpus"
    assert len(fails("train", f"{folder}/tiny.py:power", f"model.body={'x' * 9000}")) < 2100
    assert refused(tmp_path / "empty") == f"text corpus {tmp_path}/empty is empty: no text file in it"
    assert refused(tmp_path / "blank.txt") == f"text corpus {tmp_path}/blank.txt is empty: its files hold no text"
    # a mistyped path does not spoil the folder
    assert main(["train", f"{folder}/tiny.py:power", "--out", str(tmp_path / "run"), "--quiet"]) == 0


def test_a_vocabulary_larger_than_the_models(folder, fails, tmp_path):
    line = fails("train", f"{folder}/tiny.py:power", "model.vocab_size=100", "--out", tmp_path / "run")
    assert line == "the corpus has a vocabulary of 256 tokens, more than model.vocab_size = 100"


def test_another_config_in_the_same_folder(folder, fails):
    line = fails("train", f"{folder}/tiny.py:power", "training.steps=9", "--out", folder / "power")
    assert line.startswith(f"{folder}/power holds a run with training.steps = 4, not 9: ")


def test_what_is_no_run(folder, fails, tmp_path):
    assert fails("evaluate", tmp_path) == f"no run at {tmp_path}: it has no config.json"
    told = f"no checkpoint at {tmp_path}/x: expected a run folder, or a checkpoint of one"
    assert fails("generate", tmp_path / "x", "--prompt", "x") == told
    checkpoint = tmp_path / "step-00000004.pt"
    good = latest(folder / "power").read_bytes()
    checkpoint.write_bytes(good[:-1000])
    assert fails("evaluate", checkpoint) == f"{checkpoint} is truncated"
    checkpoint.write_text("not a checkpoint")
    assert fails("evaluate", checkpoint).startswith(f"{checkpoint} is no sympow checkpoint: ")
    torch.save({"weight": torch.ones(2)}, checkpoint)
    assert fails("generate", checkpoint, "--prompt", "x").endswith("it has no 'sympow-checkpoint' mark")
    checkpoint.write_bytes(good)
    missing = f"{tmp_path.parent}/tokenizer.json is missing: "  # taken out of its folder
    assert fails("generate", checkpoint, "--prompt", "x").startswith(missing)


def test_a_run_without_its_tokenizer(folder, fails, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "power", run)
    (run / "tokenizer.json").unlink()
    line = f"{run}/tokenizer.json is missing: the run's config names a tokenizer, 'bytes', saved there"
    assert fails("generate", run, "--prompt", "x") == line
    assert fails("evaluate", run) == line  # and does not train another


def test_a_run_with_a_tokenizer_of_more_tokens(folder, fails, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "power", run)
    train_bpe([Document("a", lambda: "a b c " * 99)], ["a"], 260, tmp_path).save(run)
    size = load_tokenizer(run).vocab_size
    line = f"{run}/tokenizer.json has {size} tokens, and the model knows 256: it is not the model's tokenizer"
    for command in (["generate", run, "--prompt", "x"], ["evaluate", run], ["serve", run]):
        assert fails(*command) == line


def test_a_tokenizer_that_is_gone_since_the_training(folder, fails, tmp_path):
    """The run has its own copy. A user who names the file is told."""
    words = tmp_path / "words.json"
    train_bpe([Document("a", lambda: "a b c " * 99)], ["a"], 260, tmp_path).save(words)
    options = [f"data.tokenizer={words}", "model.vocab_size=300", "training.steps=1", "--quiet"]
    assert main(["train", f"{folder}/tiny.py:power", *options, "--out", str(tmp_path / "run")]) == 0
    words.unlink()
    evaluate = ["evaluate", str(tmp_path / "run"), "--context", "32", "--rows", "2"]
    assert main(evaluate) == 0
    assert fails(*evaluate, "--data", f"tokenizer={words}") == f"tokenizer file does not exist: {words}"
    size = load(tmp_path / "run").tokenizer.vocab_size
    assert main([*evaluate, "--data", f"vocab_size={size}"]) == 0


def test_a_run_that_never_had_a_tokenizer(folder, fails, tmp_path):
    rows = torch.arange(8 * 64).remainder(251).view(8, 64).to(torch.uint16).numpy()
    zarr.save_array(tmp_path / "rows.zarr", rows)
    data = ["data.kind=zarr", f"data.path={tmp_path}/rows.zarr", "data.tokenizer=none", "data.vocab_size=256"]
    run = tmp_path / "run"
    words = ["train", f"{folder}/tiny.py:power", *data, "training.steps=1", "--out", str(run), "--quiet"]
    assert main(words) == 0
    line = "tiny-power was trained on tokens without a tokenizer: it cannot read or write text"
    assert fails("generate", run, "--prompt", "x") == line
    assert main(["evaluate", str(run), "--context", "32", "--rows", "2"]) == 0


def test_prompts_and_contexts(folder, fails, tmp_path):
    power = folder / "power"
    assert (
        fails("generate", power, "--prompt", "")
        == "the prompt is empty; a model continues a text of at least one token"
    )
    assert fails("generate", power, "--prompt-file", "/nowhere") == "/nowhere: No such file or directory"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in fails("generate", power, "--prompt-file", tmp_path / "binary")
    assert "needs a document of 1,000,001 tokens" in fails("evaluate", power, "--context", "1000000")
    for again in (power, f"{power}/", f"{folder}/./power", f"{folder}/softmax/../power"):
        assert fails("evaluate", power, again) == f"a run is given twice: {power}, {again}"
    assert fails("sizes", "smal").startswith("a preset is one of nano, ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["generate", "--max-new-tokens", "0"], "--max-new-tokens: must be at least 1, got 0"),
        (["generate", "--temperature", "-1"], "--temperature: expected a finite number of at least 0, got '-1'"),
        (["generate", "--temperature", "nan"], "--temperature: expected a finite number of at least 0, got 'nan'"),
        (["generate", "--top-k", "0"], "--top-k: must be at least 1, got 0"),
        (["generate", "--top-p", "0"], "--top-p: expected a number above 0 and at most 1, got '0'"),
        (["generate", "--top-p", "1.5"], "--top-p: expected a number above 0 and at most 1, got '1.5'"),
        (["generate", "--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["generate", "--seed", "1" * 5000], f"--seed: expected an integer of at least 0, got '{'1' * 60}'..."),
        (["ar-hits", "--frequent", "1" + "0" * 30], f"--frequent: must be below 2**63, got 1{'0' * 30}"),
        (["ar-hits", "--frequent", "-1"], "--frequent: must be at least 0, got -1"),
    ],
)
def test_numbers_that_an_option_cannot_have_are_refused_before_a_model_is_loaded(fails, words, line):
    prompt = ["--prompt", "x"] if words[0] == "generate" else []
    assert fails(words[0], "/nowhere", *prompt, *words[1:]) == f"argument {line} (see sympow {words[0]} --help)"


@pytest.mark.parametrize("name", ["a\nb", "a\r\nb", "a\x1b[2Kb", "a\u2028b", "a\tb"])
def test_an_error_is_one_line_whatever_is_in_a_path(folder, fails, tmp_path, name):
    """Only the text before a line end was printed, and codes of the terminal went to it."""
    shown, run = name.encode("unicode_escape").decode(), tmp_path / name
    assert f"{tmp_path}/{shown}" in fails("generate", run, "--prompt", "x")
    run.mkdir()
    assert f"{tmp_path}/{shown} cannot be written: it is a folder" in fails("evaluate", folder / "power", "--csv", run)
    assert shown in fails("train", f"{folder}/tiny.py:power", f"data.path={run}/texts", "--out", tmp_path / "new")
    assert shown in fails("train", "demo", f"--{name}")


def test_a_folder_whose_name_is_not_utf_8_is_told(folder, tmp_path):
    run = shutil.copytree(folder / "power", tmp_path / os.fsdecode(b"\xff"))
    words = [sys.executable, "-m", "sympow", "train", f"{folder}/tiny.py:power", "--out", str(run)]
    done = subprocess.run(words, capture_output=True, env=os.environ | {"PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"})
    assert done.stderr == b"" and done.stdout == bytes(run) + b" has finished already, at step 4 of 4\n"


class Piped:
    """Standard input of these bytes, in the encoding of a terminal that replaces what it does not know."""

    def __init__(self, content: bytes):
        self.buffer = io.BytesIO(content)

    def read(self) -> str:
        return self.buffer.read().decode("ascii", "replace")


@pytest.mark.parametrize("content", [b"caf\xe9", b"\xff\xfea\x00", "a €".encode("cp1252"), b"a \xed\xa0\x80"])
def test_standard_input_that_is_not_utf8(folder, fails, tmp_path, monkeypatch, content):
    for words in (("generate", folder / "power", "--prompt-file", "-"),
                  ("read", folder / "power", "-", "--out", tmp_path / "a.ctx")):  # fmt: skip
        monkeypatch.setattr(sys, "stdin", Piped(content))
        assert fails(*words).startswith("standard input is not UTF-8 text: ")
        assert not sys.stdin.buffer.closed
    monkeypatch.setattr(sys, "stdin", None)
    assert fails("generate", folder / "power", "--prompt-file", "-") == "standard input is closed"


def test_standard_input_is_utf8_in_every_locale(folder, tmp_path, capsys, monkeypatch):
    text = "caf\u00e9 ± 1\r\n2\n"
    (tmp_path / "prompt").write_bytes(text.encode())
    outs = []
    for file in (str(tmp_path / "prompt"), "-"):
        monkeypatch.setattr(sys, "stdin", Piped(text.encode()))
        words = ["generate", str(folder / "power"), "--prompt-file", file, "--max-new-tokens", "4"]
        assert main(words) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and outs[0].startswith(text)


def test_an_argument_that_is_not_utf8(folder, fails):
    words = ("generate", folder / "power", "--prompt", os.fsdecode(b"caf\xe9"))
    assert fails(*words) == "--prompt is not UTF-8 text"


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"sympow {__version__}\n")


def test_a_shell_completes_commands_and_options(tmp_path):
    pytest.importorskip("argcomplete")
    for line, expected in (("sympow gen", {"generate "}), ("sympow generate --promp", {"--prompt", "--prompt-file"})):
        answer = tmp_path / "answer"
        asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
        asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
        subprocess.run([sys.executable, "-m", "sympow"], env=os.environ | asked, check=True)
        assert set(answer.read_text().split("\n")) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.context=1000000000"], "training.context = 1,000,000,000 with 2 rows in a pass needs 32 GB of mem"),
        (["training.batch_size=500000000"], "training.context = 32 with 500,000,000 rows in a pass needs 256 GB of m"),
        (["training.context=" + "9" * 30], f"training.context = {10**30 - 1:,} with 2 rows in a pass needs 3.2e+31 b"),
        (["training.context=40000000"], "training.context = 40,000,000 with 2 rows in a pass and model.d_model = 16 "),
    ],
)
def test_rows_that_no_memory_holds(folder, fails, tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(memory, "memory_of", lambda device: memory.Memory(4 * 10**9, 8 * 10**9))
    error = fails("train", f"{folder}/tiny.py:power", "--out", tmp_path / "run", *words)
    assert error.startswith(message) and error.endswith("; this machine has 4.0 GB free")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.n_layers=1000000000"], "a model of 1,000,000,000 layers needs 2"),
        (["model.n_layers=1000000"], "a model of 1,000,000 layers needs 2"),
        (["model.vocab_size=1000000000"], "a model of 1 layer with d_model = 16 and a vocabulary of 1,000,000,000 ne"),
        (["model.mlp_ratio=1000000000"], "a model of 1 layer with d_model = 16 and a vocabulary of 256 needs 2.1 TB"),
        (["model.d_model=8000000"], "a model of 1 layer with d_model = 8,000,000 and a vocabulary of 256 needs 3"),
    ],
)
def test_models_that_no_memory_holds(folder, fails, tmp_path, monkeypatch, words, message):
    """Before, a billion layers were made one by one, until the system ended the process."""
    there = {"cpu": memory.Memory(4 * 10**9, 8 * 10**9)}  # layers are first made on the meta device
    monkeypatch.setattr(memory, "memory_of", lambda device: there.get(str(device)))
    error = fails("train", f"{folder}/tiny.py:power", "--out", tmp_path / "run", *words)
    assert error.startswith(message) and error.endswith(" of memory; this machine has 4.0 GB free")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", 10**9], "a context of 1,000,000,000 tokens needs 32 GB of memory; this machine has 4.0 GB free"),
        (["--texts", 10**9], "a list of 1,000,000,000 texts needs 64 GB of memory; this machine has 4.0 GB free"),
    ],
)
def test_texts_that_no_memory_holds(folder, fails, monkeypatch, words, message):
    monkeypatch.setattr(memory, "memory_of", lambda device: memory.Memory(4 * 10**9, 8 * 10**9))
    for command in ("passkey", "needles"):
        assert fails(command, folder / "power", *words) == message


@pytest.mark.parametrize(
    "words", [["generate", "x", "--prompt=--"], ["sizes", "--layers=--"], ["train", "x", "--out=--"]]
)
def test_two_dashes_are_no_value(fails, words):
    """argparse gives an empty list for them."""
    option = words[-1].removesuffix("=--")
    assert fails(*words).startswith(f"argument {option}: expected a value, got '--'")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--pattern", "power", "--window", 64],
            "--window is for window layers, and the pattern has none: power (see ",
        ),
        (["--pattern", "window*2,gated", "--p", 3], "--p is for power and delta layers, and the pattern has none: "),
    ],
)
def test_options_of_layers_that_a_pattern_does_not_have(fails, words, message):
    assert fails("convert", "model", "--out", "new", *words).startswith(message)


def test_sizes_of_powers_without_a_bound(fails):
    assert fails("sizes", "--p", 2, 10**9) == "sizes are computed up to p = 256, got powers=[2, 1000000000]"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: np.zeros((1 << 38, 1 << 20), np.int64), "not enough memory: Unable to allocate 2.00 EiB for an array"),
        (lambda: torch.zeros(1 << 55), "not enough memory: 144 PB were asked for; this machine has "),
        (lambda: torch.zeros(1 << 62, 1 << 62), "not enough memory: a tensor of sizes=[4611686018427387904, 461168601"),
        (lambda: [0] * (1 << 60), "not enough memory: an object of Python was asked for; this machine has "),
        (lambda: [0] * (1 << 70), "a number is too large: cannot fit 'int' into an index-sized integer"),
    ],
)
def test_memory_that_is_not_there(fails, monkeypatch, error, message):
    """Whatever the command is, and whoever allocates."""
    monkeypatch.setattr(measure, "run_sizes", lambda options: error())
    assert fails("sizes").startswith(message)


def test_runs_with_different_tokenizers_do_not_compare(folder, fails, tmp_path):
    bpe = ["data.tokenizer=bpe", "data.vocab_size=260", "model.vocab_size=260", "training.steps=1"]
    assert main(["train", f"{folder}/tiny.py:power", *bpe, "--out", str(tmp_path / "bpe"), "--quiet"]) == 0
    assert "power and bpe have different tokenizers" in fails("evaluate", folder / "power", tmp_path / "bpe")
    draft = ["--prompt", "x", "--draft", tmp_path / "bpe"]
    line = f"the run and the draft model {tmp_path}/bpe have different tokenizers: their tokens mean different things"
    assert fails("generate", folder / "power", *draft) == line
    assert "not allowed with argument --draft" in fails("generate", folder / "power", *draft, "--speculate")


def test_traceback_on_request(folder):
    with pytest.raises(ValueError, match="unknown recipe"):
        main(["train", "dmo", "--traceback"])


# --------------------------------------------------------------------------------------------- processes


def test_full_disk_while_saving_keeps_the_last_good_checkpoint(folder, tmp_path):
    """A real write that the system cuts off, as on a full disk; afterwards the run goes on."""
    run = tmp_path / "run"
    words = ["train", f"{folder}/tiny.py:power", "--out", str(run), "--quiet"]
    (good,) = (path for path in list_checkpoints(folder / "power") if path.name == "step-00000002.pt")
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (run / name).write_bytes((folder / "power" / name).read_bytes())
    (run / "checkpoints" / good.name).write_bytes(good.read_bytes())
    limit = good.stat().st_size // 2
    done = in_process(*words, script=f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"sympow: error: cannot save checkpoint {run}/checkpoints/step-00000004.pt: File too large; "
        f"the last good one stays: {run}/checkpoints/step-00000002.pt\n"
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002.pt"]
    assert main(words) == 0
    assert torch.equal(*(load_checkpoint(latest(each)).model["embedding.weight"] for each in (run, folder / "power")))


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (train, ["train", "demo"]),
        (measure, ["evaluate", "x"]),
        (generate, ["generate", "x", "--prompt", "x"]),
        (measure, ["sizes"]),
        (train, ["demo"]),
    ],
    ids=["train", "evaluate", "generate", "sizes", "demo"],
)
def test_ctrl_c_is_silent(monkeypatch, capsys, group, words):
    """Where a command does not handle it, as training does between its steps."""
    monkeypatch.setattr(group, f"run_{words[0]}", lambda options: signal.raise_signal(signal.SIGINT))
    assert main(words) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_is_no_error(folder):
    words = [sys.executable, "-m", "sympow", "sizes"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2])
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_interrupt_while_torch_is_imported_ends_the_process():
    """An interrupted import leaves half of a module, and the command went on with it."""
    code = (
        "import os, signal, sys, types\n"
        "from sympow.cli import main\n"
        "layers = types.ModuleType('sympow.layers')\n"
        "layers.__getattr__ = lambda name: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.modules['sympow.layers'] = layers\n"
        "main(['sizes'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
