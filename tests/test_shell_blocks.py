"""The shell blocks of pages run: each command as a user types it, but small, in the order of its page."""

import gc
import gzip
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sympow.conversion import swap_mixers
from sympow.data import DataConfig, build_kernel_corpus
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig
from sympow.training.run_folder import write_run_folder
from tests.data.builders.test_doc_corpus import write_packages
from tests.data.builders.trees import source_tree, write_folder
from tests.shell_blocks import NOT_RUN, SMALLER, check_options, commands_of, run
from tests.test_documents import PAGES, ROOT, python_of
from tests.tiny_runs import RECIPE, finished_runs

COMMANDS = {str(page.relative_to(ROOT)): list(commands_of(page)) for page in PAGES}
RUNNING = {page: [each for each in found if each.entry in SMALLER] for page, found in COMMANDS.items()}

# What pages name without making it, and which file or folder of `world` that is.
GIVEN = {
    "runs/power": "power", "runs/softmax": "softmax", "runs/large": "power", "runs/small": "softmax",
    "runs/demo/demo-power": "power", "runs/demo/demo-softmax": "softmax",
    "my_recipe.py": "tiny.py", "my_sweep.py": "my_sweep.py",
    "manual.txt": "corpus/0.txt", "long.txt": "corpus/0.txt", "module.py": "corpus/0.txt",
    "TEXTS": "corpus", "CODE": "corpus", "rows": "rows", "rows.jsonl.gz": "rows/a.jsonl.gz",
    "train.bin": "tokens.bin", "val.bin": "held_out.bin",
    "linux": "linux", "debs": "debs", "manuals": "kernel", "kernel": "kernel",
    "hf/power": "softmax", "teacher": "teacher", "smollm2": "teacher", "swapped": "swapped", "hybrid": "swapped",
    "swapped-delta": "swapped", "student": "swapped",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with two trained runs, a converted model with its teacher, a corpus of rows and sources of corpora."""
    folder = tmp_path_factory.mktemp("world")
    documents = [f"def f{i}(): return {i}\n" * 200 for i in range(40)]
    with finished_runs(folder, documents, recipe=f"{RECIPE}\nrun = power\n"), pytest.MonkeyPatch.context() as patch:
        (folder / "my_sweep.py").write_text(sweep_of_the_page())
        write_folder(folder / "linux", source_tree())
        write_packages(folder / "debs")
        rows = [json.dumps({"text": text, "content": text}) + "\n" for text in documents]
        write_folder(folder / "rows", {"a.jsonl.gz": gzip.compress("".join(rows).encode())})
        np.arange(4000, dtype="<u2").tofile(folder / "tokens.bin")
        np.arange(4000, 6000, dtype="<u2").tofile(folder / "held_out.bin")
        patch.setattr("sympow.data.builders.corpus_folder.ROW_TOKENS", 64)
        build_kernel_corpus(folder / "kernel", folder / "linux", vocab_size=300, row_tokens=64, progress=False)
        tokenizer = (folder / "kernel" / "tokenizer.json").read_text("utf-8")
        softmax = MixerConfig("softmax", {"bias": False})
        teacher = LanguageModel(ModelConfig(300, 16, 2, 2, (softmax,), body="llama"), seed=0)
        for name, model in (("teacher", teacher), ("swapped", swap_mixers(teacher, ("power", "softmax")))):
            config = RunConfig(name, model.config, DataConfig(), TrainingConfig(context=64, steps=1, warmup_steps=0))
            write_run_folder(folder / name, config, model, tokenizer=tokenizer)
        gc.freeze()  # every run of recall collects garbage, and need not look through all modules for it
        yield folder


def sweep_of_the_page() -> str:
    return next(block for block in python_of("docs/guides/mqar.md") if "def sweep()" in block)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder of a page's commands, which is that of a clone for what they write."""
    (tmp_path / "benchmarks" / "results" / "conversion").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_pages_that_install_an_extra_install_what_draws():
    """The demo, and every command with --plot, needs the extra `eval`."""
    seen = []
    for page, found in COMMANDS.items():
        installed = re.findall(r"\[(.*?)\]", " ".join(each.text for each in found if each.words[0] == "pip"))
        if installed and any(each.text.startswith("sympow demo") or "--plot" in each.words for each in found):
            assert "eval" in ",".join(installed).split(","), page
            seen.append(page)
    assert "docs/guides/serving.md" in seen


@pytest.mark.parametrize("page", [page for page, commands in RUNNING.items() if commands])
def test_commands_of_a_page_run(page, world, folder):
    for command in RUNNING[page]:
        values = (word.rpartition("=")[2] for word in (*command.words, *command.more))
        words = [word for value in values for word in value.split(",")]
        for name in GIVEN:
            if ("--out", name) in pairwise(command.words):
                drop_given(folder / name)
            elif any(word == name or word.startswith((f"{name}/", f"{name}:")) for word in words):
                give(world / GIVEN[name], folder / name)
        assert run(command) == 0, command.text


def give(source: Path, target: Path) -> None:
    """Puts a copy of something given where a page expects it, unless the page has made it."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        if target.is_dir():
            (target / ".given").touch()


def drop_given(target: Path) -> None:
    """Makes room for what a page makes under the name of something that was given before."""
    if (target / ".given").exists():
        shutil.rmtree(target)


@pytest.mark.parametrize("page", [page for page, commands in COMMANDS.items() if commands])
def test_commands_of_a_page_have_these_options(page):
    """Also of those that do not run."""
    for command in COMMANDS[page]:
        check_options(command)


def test_every_command_runs_or_is_listed_with_a_reason():
    found = [command for each in COMMANDS.values() for command in each]
    assert [f"{command.page.name}: {command.text}" for command in found if not command.entry] == []
    used = {command.entry for command in found}
    assert {*SMALLER, *NOT_RUN} - used == set() == SMALLER.keys() & NOT_RUN.keys()
    for reason in NOT_RUN.values():
        assert all((ROOT / file).is_file() for file in re.findall(r"tests/\S+\.py", reason)), reason
