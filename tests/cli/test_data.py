"""`sympow train` on files of one's own: every kind stops, continues, and equals the same texts in a folder."""

import gzip
import json
import random
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from sympow.cli import main
from sympow.data import Batches, load_tokenizer
from sympow.training import latest, load_checkpoint, read_metrics

RECIPE = """
from sympow.data import DataConfig
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig

def run():
    return RunConfig(
        "tiny",
        ModelConfig(vocab_size=256, d_model=16, n_layers=1, n_heads=2, mixers=(MixerConfig("power"),)),
        DataConfig(tokenizer="bytes"),
        TrainingConfig(context=32, batch_size=4, micro_batch_size=2, steps=12, warmup_steps=1, log_every=1,
                       checkpoint_every=5, evaluate_every=6, evaluation_batches=1),
    )
"""
DRAW = random.Random(0)
WORDS = ["power", "state", "of", "the", "key", "value"]
TEXTS = [" ".join(DRAW.choice(WORDS) for _ in range(DRAW.randint(20, 90))) for _ in range(20)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny.py").write_text(RECIPE)
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(text)
    return tmp_path


def train(out, *data) -> int:
    return main(["train", "tiny.py:run", "--out", out, "--quiet", *data])


def end(out):
    weights = load_checkpoint(latest(out)).model
    return {name: weight.numpy().tobytes() for name, weight in weights.items()}, [r["loss"] for r in read_metrics(out)]


def stopped_and_continued(out, *data):
    """The end of a run that a signal stops at its seventh step."""
    real, calls = Batches.__getitem__, []

    def get(self, index):
        calls.append(index)
        if len(calls) == 14:
            signal.raise_signal(signal.SIGTERM)
        return real(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "__getitem__", get)
        assert train(out, *data) == 143
    assert 0 < load_checkpoint(latest(out)).step < 12
    assert train(out, *data) == 0
    return end(out)


def jsonl_gz(here, monkeypatch):
    (here / "rows").mkdir()
    for i in range(4):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[5 * i : 5 * i + 5])
        (here / "rows" / f"{i}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return ["data.kind=text", "data.path=rows"]


def parquet(here, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"content": TEXTS}), here / "a.parquet")
    return ["data.kind=text", "data.path=a.parquet", "data.text_field=content"]


def dataset(here, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    (here / "saved").mkdir()
    table = arrow.table({"text": TEXTS})
    with arrow.ipc.new_stream(here / "saved" / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (here / "saved" / "dataset_info.json").write_text("{}")
    (here / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    return ["data.kind=text", "data.path=saved"]


def stream(here, monkeypatch):
    rows = [{"text": text} for text in [*TEXTS, "of no use"]]
    stub = SimpleNamespace(load_dataset=lambda *names, split, streaming: iter(rows))
    monkeypatch.setitem(sys.modules, "datasets", stub)
    return ["data.kind=text", "data.path=hf://datasets/owner/name?rows=20"]


@pytest.mark.parametrize("form", [jsonl_gz, parquet, dataset, stream])
def test_files_of_rows_train_as_a_folder_of_texts(here, monkeypatch, form):
    data = form(here, monkeypatch)
    assert train("plain", "data.kind=text", "data.path=texts") == 0
    assert stopped_and_continued("rows-run", *data) == end("plain")


def test_a_file_of_tokens_trains_as_the_same_text(here):
    data = {"path": "\n".join(TEXTS[:16]), "held_out_path": "\n".join(TEXTS[16:])}
    for name, text in data.items():
        (here / f"{name}.txt").write_text(text)
        np.frombuffer(text.encode(), np.uint8).astype("<u2").tofile(here / f"{name}.bin")
    assert train("plain", "data.kind=text", *(f"data.{name}={name}.txt" for name in data)) == 0
    binary = stopped_and_continued("binary", "data.kind=tokens", *(f"data.{name}={name}.bin" for name in data))
    assert binary == end("plain")


def test_three_sources_by_weight(here):
    """The loss of step i is that of the same batches in a run that was not stopped."""
    for name, text in (("one", "a"), ("two", "b"), ("three", "c")):
        (here / name).mkdir()
        for i in range(6):
            (here / name / f"{i}.txt").write_text(text * (100 + 17 * i))
    data = ["data.kind=text", "data.paths=one,two,three", "data.weights=5,3,2"]
    assert train("whole", *data) == 0
    assert stopped_and_continued("stopped", *data) == end("whole")
    assert train("whole", *data[:2], "data.weights=5,3,1") == 2


def test_a_run_killed_before_its_first_checkpoint_begins_with_a_tokenizer_of_the_present_texts(here, monkeypatch):
    words = ["data.kind=text", "data.path=texts", "data.tokenizer=bpe", "data.vocab_size=270", "model.vocab_size=270"]
    with monkeypatch.context() as patch:
        patch.setattr("sympow.training.runs.train", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train("run", *words)
    assert b"power" in load_tokenizer(here / "run").token_bytes
    for file in (here / "texts").iterdir():
        file.write_text(file.read_text().replace("power", "softmax"))
    assert train("run", *words) == 0
    assert b"power" not in load_tokenizer(here / "run").token_bytes


@pytest.mark.parametrize("paths", [["data.path=texts"], ["data.paths=more,texts", "data.weights=1,1"]])
def test_documents_of_the_training_are_not_held_out(here, capsys, paths):
    for name in ("copy", "more"):
        shutil.copytree("texts", name)
    (here / "more" / "00.txt").write_text("others")
    assert train("run", "data.kind=text", "data.held_out_path=copy", *paths) == 2
    assert "data.held_out_path = 'copy' holds the documents of the training" in capsys.readouterr().err
    assert train("run", "data.kind=text", "data.held_out_path=more", "data.path=texts") == 0


def test_what_is_left_out_is_printed(here, capsys):
    (here / "texts" / "picture.png").write_bytes(b"\0")
    assert train("run", "data.kind=text", "data.path=texts") == 0
    assert capsys.readouterr().err == "corpus texts: left out 1 binary (picture.png)\n"
    assert main(["evaluate", "run", "--context", "64", "--rows", "2", "--device", "cpu"]) == 0
    assert "corpus texts: left out 1 binary (picture.png)\n" in capsys.readouterr().err


def test_a_folder_with_a_damaged_file_is_refused_by_name(here, capsys):
    (here / "texts" / "z.jsonl.gz").write_bytes(b"no")
    assert train("run", "data.kind=text", "data.path=texts") == 2
    assert capsys.readouterr().err == (
        "sympow: error: texts/z.jsonl.gz cannot be read as .gz: Not a gzipped file (b'no')\n"
    )
