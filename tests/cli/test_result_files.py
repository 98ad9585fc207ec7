"""Files of results, and files that are read: what is there already, full disks, and two results in one file."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sympow.cli import main
from tests.cli.processes import in_process
from tests.tiny_runs import finished_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a recipe file and two finished runs."""
    documents = [f"{i} ± the quick brown fox jumps over it. " * 20 for i in range(4)]
    with finished_runs(tmp_path_factory.mktemp("files"), documents) as folder:
        yield folder


def test_places_that_cannot_be_written(folder, fails, tmp_path):
    """Said before the work, not after it."""
    file = tmp_path / "file"
    file.write_text("")
    train = ["train", f"{folder}/tiny.py:power", "--quiet", "--out"]
    assert fails(*train, file) == f"{file} is a file; a run needs a folder"
    assert fails(*train, file / "run") == f"{file}/run: Not a directory"
    for option in ("--csv", "--plot"):
        for place in (tmp_path, tmp_path / "no" / "x.png"):
            line = fails("evaluate", folder / "power", option, place)
            assert line == f"{place} cannot be written: it is a folder, or its folder does not exist"
    for command in ("evaluate", "passkey", "ar-hits"):
        for option in ("--csv", "--plot", "--html")[: 3 if command == "ar-hits" else 2]:
            line = fails(command, "no run", option, "/proc/x.png")
            assert line == "/proc/x.png cannot be written: No such file or directory"
    line = fails("evaluate", folder / "power", "--plot", tmp_path / "x.xyz")
    assert line.startswith(f"{tmp_path}/x.xyz: an image is one of ") and line.endswith("got 'xyz'")


def test_files_that_are_there_already(folder, fails, tmp_path, monkeypatch):
    """They stay as they are until there are results, and one that cannot be opened is told before."""
    file = tmp_path / "old.csv"
    older = "run,bin_start,bin_end,loss,stderr,tokens,train_context\n"
    file.write_text(older)
    words = ["evaluate", folder / "power", "--csv", file, "--plot"]
    assert fails(*words, "/proc/x.png").startswith("/proc/x.png cannot be written")
    assert fails(*words, tmp_path / "x.xyz").startswith(f"{tmp_path}/x.xyz: an image is one of ")
    assert file.read_text() == older and list(tmp_path.iterdir()) == [file]

    def denied(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(Path, "open", denied)
    assert fails("evaluate", "no run", "--csv", file) == f"{file} cannot be written: Permission denied"


@pytest.mark.parametrize(
    "words",
    [
        "evaluate --context 32 --rows 2 --csv",
        "evaluate --context 32 --rows 2 --plot",
        "ar-hits --context 32 --rows 2 --csv",
        "ar-hits --context 32 --rows 2 --plot",
        "ar-hits --context 32 --rows 2 --html",
        "passkey --context 150 --texts 1 --csv",
        "passkey --context 150 --texts 1 --plot",
        "needles --context 400 --texts 1 --task single --csv",
    ],
)
def test_a_full_disk_is_told_with_the_file(words, folder, tmp_path, capsys):
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    name, *options = words.split()
    assert main([name, str(folder / "power"), *options, str(full)]) == 2
    assert capsys.readouterr().err.endswith(f"sympow: error: {full}: No space left on device\n")


def test_a_full_disk_behind_standard_output(folder, tmp_path):
    """Standard output is written while the table is open, but the error is not of the table."""
    words = ["passkey", folder / "power", "--context", 150, "--texts", 1, "--csv", tmp_path / "x.csv", "--quiet"]
    with open("/dev/full", "w") as full:
        done = in_process(*words, stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.stderr == "sympow: error: standard output: No space left on device\n"


def test_a_corpus_that_the_disk_does_not_take(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(2):
        text = np.random.default_rng(i).integers(97, 123, 1 << 16, dtype=np.uint8)
        (tmp_path / "texts" / f"{i}.txt").write_bytes(text.tobytes())
    limit = 1 << 14
    words = ["--out", tmp_path / "corpus", "--row-tokens", 1 << 15, "--vocab-size", 256, "--quiet"]
    script = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    done = in_process("corpus", tmp_path / "texts", *words, script=script)
    assert done.stderr == f"sympow: error: {tmp_path}/corpus.partial: File too large\n"


def test_a_file_that_cannot_be_read_is_told(folder, fails, tmp_path, monkeypatch):
    file, power = "/proc/self/mem", folder / "power"  # which can be opened, and whose first bytes cannot be read
    told = f"{file}: Input/output error"
    assert fails("generate", power, "--prompt-file", file) == told
    assert fails("read", power, file, "--out", tmp_path / "context") == told
    assert fails("needles", power, "--text", file) == told
    assert fails("mqar-figures", file, "--out", tmp_path / "figures") == told
    assert fails("serve", power, "--api-keys", file) == told
    assert fails("corpus", file, "--out", tmp_path / "corpus") == told
    with open(file, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert fails("generate", power, "--prompt-file", "-") == "standard input: Input/output error"


@pytest.mark.parametrize("content", [b"my notes\n", b"a,b\n1,2\n", b"\xff\x00", b"\n\n", b'"'])
@pytest.mark.parametrize(
    ("command", "option", "what"),
    [("evaluate", "--csv", "table"), ("ar-hits", "--csv", "table"), ("passkey", "--csv", "table"),
     ("needles", "--csv", "table"), ("ar-hits", "--html", "page")],
)  # fmt: skip
def test_files_of_others_are_not_replaced(command, option, what, content, fails, tmp_path):
    file = tmp_path / "notes"
    file.write_bytes(content)
    line = fails(command, "no run", option, file)
    assert line == f"{file} exists and is no {what} that this command wrote: give another file, or remove it"
    assert file.read_bytes() == content
    file.write_bytes(b"")
    assert "exists and is" not in fails(command, "no run", option, file)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("evaluate", "--csv --plot"),
        ("passkey", "--csv --plot"),
        ("ar-hits", "--csv --html"),
        ("ar-hits", "--plot --html"),
        ("corpus", "--out --plot"),
    ],
)
def test_two_results_do_not_go_into_one_file(command, options, fails, tmp_path, monkeypatch):
    """The one that is written first would be lost. Their paths may be written differently, or be links."""
    monkeypatch.chdir(tmp_path)
    Path("link.png").symlink_to("x.png")
    first, second = options.split()
    for other in ("x.png", f"{tmp_path}/x.png", "./x.png", "link.png"):
        line = fails(command, "no run", first, "x.png", second, other)
        assert line == f"{first} and {second} name one file: {other} (see sympow {command} --help)"


@pytest.mark.parametrize(
    "words",
    [
        ["needles", "no run", "--task", "single", "tracing", "single"],
        ["needles", "no run", "--values", "words", "words"],
        ["needles", "no run", "--context", "150", "0150"],
        ["passkey", "no run", "--context", "150", "300", "150"],
        ["recall-probe", "no run", "--pairs", "2", "2"],
        ["sizes", "--p", "1", "1"],
        ["sizes", "--context", "8", "8"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_value_that_is_given_twice_is_not_measured_twice(words, fails):
    command, option, value = words[0], next(word for word in words if word.startswith("--")), words[-1].lstrip("0")
    assert fails(*words) == f"argument {option}: {value} is given twice (see sympow {command} --help)"


@pytest.mark.parametrize("kind", ["png", "pdf", "svg", "jpg"])
def test_only_images_are_replaced_by_images(kind, fails, tmp_path):
    matplotlib = pytest.importorskip("matplotlib.figure")
    file = tmp_path / f"x.{kind}"
    file.write_text("my notes")
    line = fails("evaluate", "no run", "--plot", file)
    assert line == f"{file} exists and is no image of the type {kind}: give another file, or remove it"
    assert file.read_text() == "my notes"
    matplotlib.Figure().savefig(file)
    assert "exists and is" not in fails("evaluate", "no run", "--plot", file)


@pytest.mark.parametrize("words", [["evaluate", "no run", "--plot", "x.png"], ["ar-hits", "no run", "--plot", "x.png"],
                                   ["kernel-corpus", "--out", "corpus", "--plot", "x.png"], ["demo"]],
                         ids=lambda words: words[0])  # fmt: skip
def test_matplotlib_is_missed_before_the_work(fails, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert fails(*words).startswith("drawing images needs matplotlib: pip install 'sympow[eval]' (")
    assert not list(tmp_path.iterdir())
