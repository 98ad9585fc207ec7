"""`sympow read` and `sympow generate --context`: chunks, kills, signals, refusals, each error in one line."""

import io
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from sympow.cli import context_reading, main
from sympow.models.context_file import read_header
from tests.ranks import PRELOAD
from tests.tiny_runs import finished_runs

RECIPE = """
from sympow.data import DataConfig
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig

def _config(name, *mixers, **data):
    return RunConfig(
        name,
        ModelConfig(vocab_size=300, d_model=32, n_layers=2, n_heads=2, mixers=mixers),
        DataConfig(kind="text", path={corpus!r}, **data),
        TrainingConfig(context=32, batch_size=2, steps=4, warmup_steps=1, log_every=1, checkpoint_every=2,
                       evaluate_every=4, evaluation_batches=1),
    )

def hybrid():
    return _config("hybrid", MixerConfig("power"), MixerConfig("window", {{"window": 9}}), tokenizer="bytes")

def power():
    return _config("power", MixerConfig("power"), tokenizer="bpe", vocab_size=300)
"""
WORDS = ["power", "state", "of", "the", "key\n", "value", "± 1\n\n"]


def text(words: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, and a run with each tokenizer."""
    documents = [text(100, i) for i in range(4)]
    with finished_runs(tmp_path_factory.mktemp("read"), documents, ("hybrid", "power"), RECIPE) as folder:
        (folder / "manual.txt").write_text(text(700, 9), encoding="utf-8")
        yield folder


def read(folder: Path, run: str, out: Path, *more: str, source: str = "manual.txt") -> int:
    return main(["read", str(folder / run), str(folder / source), "--out", str(out), "--quiet", *more])


def continued(folder: Path, run: str, capsys, *words: str) -> str:
    capsys.readouterr()
    arguments = ["generate", str(folder / run), "--temperature", "0", "--max-new-tokens", "20"]
    assert main([*arguments, *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("run", ["hybrid", "power"])
def test_a_context_and_a_prompt_are_the_whole_prompt(run, folder, tmp_path, capsys):
    assert read(folder, run, tmp_path / "m.ctx", "--chunk", "64") == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/m.ctx: ")
    whole = continued(folder, run, capsys, "--prompt-file", str(folder / "manual.txt"))
    manual = (folder / "manual.txt").read_text(encoding="utf-8")
    assert whole.startswith(manual)
    for _ in range(2):  # as often as one likes
        assert manual + continued(folder, run, capsys, "--context", str(tmp_path / "m.ctx")) == whole
    prompted = continued(folder, run, capsys, "--context", str(tmp_path / "m.ctx"), "--prompt", "\nthe key")
    assert prompted.startswith("\nthe key") and len(prompted) > 20
    assert not (tmp_path / "m.ctx.part").exists()


def test_reading_on_behind_a_context_is_reading_both(folder, tmp_path, capsys):
    first, second = text(128, 5), text(40, 6)
    (tmp_path / "a").write_text(first)
    (tmp_path / "b").write_text(second)
    (tmp_path / "ab").write_text(first + second)
    assert read(tmp_path, folder / "hybrid", tmp_path / "a.ctx", source="a") == 0
    assert read(tmp_path, folder / "hybrid", tmp_path / "b.ctx", "--context", str(tmp_path / "a.ctx"), source="b") == 0
    assert read(tmp_path, folder / "hybrid", tmp_path / "ab.ctx", source="ab") == 0
    headers = [read_header(tmp_path / name) for name in ("b.ctx", "ab.ctx")]
    assert headers[0] == headers[1] and headers[0].tokens == len((first + second).encode())


def test_standard_input_and_a_finished_file(folder, tmp_path, capsys, monkeypatch):
    assert read(folder, "power", tmp_path / "m.ctx") == 0
    before = (tmp_path / "m.ctx").stat().st_mtime_ns
    monkeypatch.setattr(context_reading.Context, "read", None)  # the model is not asked again
    capsys.readouterr()
    assert read(folder, "power", tmp_path / "m.ctx") == 0
    assert capsys.readouterr().out.endswith("float32, read before\n")
    assert (tmp_path / "m.ctx").stat().st_mtime_ns == before
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", io.StringIO((folder / "manual.txt").read_text(encoding="utf-8")))
    assert main(["read", str(folder / "power"), "-", "--out", str(tmp_path / "s.ctx"), "--quiet"]) == 0
    assert (tmp_path / "s.ctx").read_bytes() == (tmp_path / "m.ctx").read_bytes()
    (folder / "longer.txt").write_text((folder / "manual.txt").read_text(encoding="utf-8") + "\nthe end", "utf-8")
    assert read(folder, "power", tmp_path / "m.ctx", source="longer.txt") == 0
    assert read_header(tmp_path / "m.ctx").tokens > read_header(tmp_path / "s.ctx").tokens
    assert read(folder, "power", tmp_path / "m.ctx", "--dtype", "int8") == 0
    assert read_header(tmp_path / "m.ctx").dtype == "int8"


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("run", ["hybrid", "power"])
def test_an_interrupted_reading_ends_with_the_same_file(run, dtype, folder, tmp_path, monkeypatch, capsys):
    options = ("--chunk", "50", "--dtype", dtype)
    (tmp_path / "other.txt").write_text(text(50, 77), encoding="utf-8")
    assert read(tmp_path, folder / run, tmp_path / "m.ctx", source="other.txt") == 0
    older = (tmp_path / "m.ctx").read_bytes()
    assert read(folder, run, tmp_path / "whole.ctx", *options) == 0
    monkeypatch.setattr(context_reading, "SAVE_EVERY", 0.0)
    original, left = context_reading.Context.read, [3]

    def dying(self, *arguments, **keywords):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(context_reading.Context, "read", dying)
    for done in (150, 350):
        with pytest.raises(Killed):
            read(folder, run, tmp_path / "m.ctx", *options)
        assert read_header(tmp_path / "m.ctx.part").tokens == done
        assert (tmp_path / "m.ctx").read_bytes() == older
        left[0] = 4
    left[0] = 1000
    assert read(folder, run, tmp_path / "m.ctx", *options) == 0
    assert (tmp_path / "m.ctx").read_bytes() == (tmp_path / "whole.ctx").read_bytes()
    assert not (tmp_path / "m.ctx.part").exists()


def test_a_part_of_another_text_or_model_is_not_gone_on_from(folder, tmp_path, capsys):
    assert read(folder, "power", tmp_path / "whole.ctx") == 0
    (tmp_path / "other.txt").write_text(text(50, 77))
    words = [str(folder / "power"), str(folder / "manual.txt"), "--out", str(tmp_path / "m.ctx")]
    causes = {"power": "is of another text", "hybrid": "is a context of another model: its config differs"}
    for run, cause in causes.items():
        assert read(tmp_path, folder / run, tmp_path / "m.ctx.part", source="other.txt") == 0
        (tmp_path / "m.ctx").unlink(missing_ok=True)
        capsys.readouterr()
        assert main(["read", *words]) == 0
        assert f"m.ctx.part {cause}: reading from the beginning" in capsys.readouterr().err
        assert (tmp_path / "m.ctx").read_bytes() == (tmp_path / "whole.ctx").read_bytes()


def test_line_ends_are_kept(folder, tmp_path):
    """As training reads them."""
    (tmp_path / "dos.txt").write_bytes(b"key\r\nvalue\r\nstate\r")
    assert read(tmp_path, folder / "hybrid", tmp_path / "m.ctx", source="dos.txt") == 0
    assert read_header(tmp_path / "m.ctx").tokens == 18


def test_no_other_file_is_replaced(folder, fails, tmp_path):
    start = ("read", folder / "power", folder / "manual.txt", "--quiet", "--out")
    allowed = "--out names a new file, or a context file"
    for content in (b"#", b"# my notes", bytes([32, *[0] * 7]) + b"{}" * 16):
        (tmp_path / "notes.md").write_bytes(content)
        assert fails(*start, tmp_path / "notes.md") == f"{tmp_path}/notes.md is no context file: {allowed}"
        assert (tmp_path / "notes.md").read_bytes() == content
    assert fails(*start, tmp_path) == f"{tmp_path} is no regular file: {allowed}"
    (tmp_path / "empty").touch()  # as `mktemp` makes it
    assert read(folder, "power", tmp_path / "empty") == 0
    whole = (tmp_path / "empty").read_bytes()
    (tmp_path / "empty").write_bytes(whole[:-5])  # a context file that was cut is made again
    assert read(folder, "power", tmp_path / "empty") == 0
    assert (tmp_path / "empty").read_bytes() == whole


def test_a_context_is_not_replaced_by_its_continuation(folder, fails, tmp_path, monkeypatch):
    """The same command again would read the text once more."""
    assert read(folder, "power", tmp_path / "m.ctx") == 0
    content = (tmp_path / "m.ctx").read_bytes()
    monkeypatch.chdir(tmp_path)
    for out in ("m.ctx", f"{tmp_path}/m.ctx"):
        line = fails("read", folder / "power", folder / "manual.txt", "--context", tmp_path / "m.ctx", "--out", out)
        assert line == f"{out} is the --context of this reading: --out names another file"
    assert (tmp_path / "m.ctx").read_bytes() == content


def test_errors_are_one_line(folder, tmp_path, fails):
    run, out = folder / "power", tmp_path / "m.ctx"
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    start = ("read", run, folder / "manual.txt", "--quiet", "--out")
    assert fails("read", run, "/nowhere", "--out", out) == "/nowhere: No such file or directory"
    assert "is not UTF-8 text" in fails("read", run, tmp_path / "latin", "--out", out)
    assert fails("read", run, tmp_path / "empty", "--out", out).endswith("empty: a context holds at least one token")
    assert "its folder does not exist" in fails(*start, tmp_path / "no" / "m.ctx")
    line = fails("read", "no run", folder / "manual.txt", "--out", "/proc/m.ctx")
    assert line == "/proc/m.ctx cannot be written: No such file or directory"
    assert "manual.txt is the text itself: --out names a new file" in fails(*start, folder / "manual.txt")
    assert f"{os.devnull} is no regular file: --out names a new file" in fails(*start, os.devnull)
    assert "invalid choice: 'int4'" in fails(*start, out, "--dtype", "int4")
    line = "states are stored in float32, bfloat16, int8, not in float16; --weights-dtype is the dtype of weights"
    assert line in fails(*start, out, "--dtype", "float16")
    assert fails("generate", run, "--context", out) == f"no context file at {out}"
    assert read(folder, "power", out) == 0
    assert fails("generate", folder / "hybrid", "--context", out).endswith("another model: its config differs")
    out.write_bytes(out.read_bytes()[:-5])
    assert fails("generate", run, "--context", out).endswith("its checksum is wrong, so it was cut or changed")
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob(".*"))


def read_slowly(folder: str, out: str) -> None:
    torch.set_num_threads(1)
    context_reading.SAVE_EVERY = 0.0
    original = context_reading.Context.read

    def slow(self, *arguments, **keywords):
        time.sleep(0.005)
        return original(self, *arguments, **keywords)

    context_reading.Context.read = slow
    sys.exit(read(Path(folder), "hybrid", Path(out), "--chunk", "20"))


def test_signals_and_kills(folder, tmp_path):
    assert read(folder, "hybrid", tmp_path / "whole.ctx", "--chunk", "20") == 0
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(PRELOAD)
    part, draw, seen = tmp_path / "m.ctx.part", random.Random(0), [0]
    signals = {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}
    for number, code in signals.items():
        process = forked.Process(target=read_slowly, args=(str(folder), str(tmp_path / "m.ctx")))
        process.start()
        while process.is_alive() and (not part.exists() or read_header(part).tokens <= seen[-1] + 60):
            time.sleep(0.001)
        time.sleep(draw.random() * 0.01)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == code
        seen.append(read_header(part).tokens)
    assert seen == sorted(set(seen)) and not (tmp_path / "m.ctx").exists()
    assert read(folder, "hybrid", tmp_path / "m.ctx", "--chunk", "20") == 0
    assert (tmp_path / "m.ctx").read_bytes() == (tmp_path / "whole.ctx").read_bytes()
