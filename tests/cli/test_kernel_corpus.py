"""`sympow kernel-corpus`: a corpus and the image of its lengths, which a run then trains on."""

import io
import sys
import threading

import pytest

from sympow import progress
from sympow.cli import main
from sympow.data.builders import kernel_corpus
from tests.data.builders.trees import source_tree, write_archive


@pytest.fixture
def words(tmp_path):
    """The command, for rows of 64 tokens."""
    archive = write_archive(tmp_path / "linux.tar.xz", source_tree())
    sizes = ["--vocab-size", "300", "--row-tokens", "64"]
    return ["kernel-corpus", "--out", f"{tmp_path}/kernel", "--source", str(archive), *sizes]


def test_the_corpus_is_made_drawn_and_trained_on(words, tmp_path, capsys):
    assert main([*words, "--plot", f"{tmp_path}/lengths.png"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and len(lines) == 2
    assert lines[0].startswith(f"{tmp_path}/kernel/train.zarr: ") and " rows of 64 tokens, from " in lines[0]
    assert lines[1].startswith(f"{tmp_path}/kernel/heldout.zarr: ")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert main(words) == 0 and capsys.readouterr().out == out

    corpus, run = tmp_path / "kernel", tmp_path / "run"
    data = {"path": corpus / "train.zarr", "held_out_path": corpus / "heldout.zarr", "tokenizer": corpus}
    overrides = [f"data.{name}={value}" for name, value in (data | {"vocab_size": 300}).items()]
    overrides += ["model.vocab_size=300", "model.d_model=24", "model.n_layers=1", "model.n_heads=2"]
    overrides += ["training.context=32", "training.batch_size=2", "training.steps=1", "training.warmup_steps=0"]
    overrides += ["training.precision=float32"]
    assert main(["train", "longcrawl64:power", *overrides, "--out", str(run), "--quiet"]) == 0
    assert main(["generate", str(run), "--prompt", "int", "--max-new-tokens", "1"]) == 0


def test_it_tells_how_far_it_is(every_count_is_told, words, capsys):
    """Where stderr is no terminal: every reading of the source, in turn, and nothing if quiet."""
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    tasks = list(dict.fromkeys(line.partition(":")[0] for line in lines))
    assert tasks == ["looking through", "training the tokenizer", "tokenizing"]
    files = len(source_tree())
    assert lines[0].startswith("looking through: 1 files, 0:00:")
    assert lines[-1].startswith(f"tokenizing: {files} of {files} files, 0:00:")
    assert main([*words, "--out", f"{words[2]}2", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_fetching_the_package_is_told(words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setattr(progress, "LOOK_EVERY", 0.001)
    said = threading.Event()

    def fetch(name, folder):
        monkeypatch.setattr(sys, "stderr", Signal(said))
        assert said.wait(60)
        raise RuntimeError("no network")

    monkeypatch.setattr(kernel_corpus, "fetch_package", fetch)
    assert main(["kernel-corpus", "--out", str(tmp_path / "other")]) == 2
    assert sys.stderr.getvalue().startswith("fetching linux-source-6.1: 0:00:")


class Signal(io.StringIO):
    """Sets an event when something is written."""

    def __init__(self, event):
        super().__init__()
        self._event = event

    def write(self, text):
        count = super().write(text)
        self._event.set()
        return count


def test_errors_are_one_line(words, tmp_path, capsys):
    for more, line in (
        (["--vocab-size", "100"], "vocab_size must be 256 to 65,536, as tokens are uint16; got 100"),
        (["--source", "nowhere"], "source does not exist: nowhere"),
        (["--plot", f"{tmp_path}/no/a.png"], f"{tmp_path}/no/a.png cannot be written: it is a folder, or its folder "),
    ):
        assert main([*words, *more]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"sympow: error: {line}") and err.count("\n") == 1
    assert not (tmp_path / "kernel").exists()
