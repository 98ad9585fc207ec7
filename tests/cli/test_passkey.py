"""`sympow passkey` on a small run."""

import csv
import json
import os
import shutil
import signal
import sys

import pytest
import torch

from sympow import training
from sympow.cli import main
from sympow.data import DataConfig
from sympow.evaluation import passkey
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("the pass key is 12345. " * 40)
    model = ModelConfig(vocab_size=256, d_model=16, n_layers=1, n_heads=2, mixers=(MixerConfig("power"),))
    data = DataConfig(kind="text", path=str(folder / "text.txt"), tokenizer="bytes")
    settings = TrainingConfig(context=32, batch_size=2, steps=1, warmup_steps=0)
    training.run(RunConfig("tiny", model, data, settings), folder / "tiny", quiet=True)
    return folder / "tiny"


def test_rows_and_image(run, tmp_path, capsys):
    files = ["--csv", f"{tmp_path}/a.csv", "--plot", f"{tmp_path}/a.png"]
    assert main(["passkey", str(run), "--context", "200", "210", "--texts", "2", "--quiet", *files]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[0] == "tiny: 200 tokens, depth 0%: 0% of 2 numbers"
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["context"], row["depth"]) for row in rows][:6] == [
        ("200", "0.0"), ("200", "0.25"), ("200", "0.5"), ("200", "0.75"), ("200", "1.0"), ("210", "0.0")
    ]  # fmt: skip
    assert {row["model"] for row in rows} == {"tiny"} and (tmp_path / "a.png").exists()


def test_errors_are_one_line(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "number").mkdir()
    (tmp_path / "number" / "config.json").write_text("1")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "sympow.integrations.transformers", raising=False)
    for words, line in (
        ([str(run), "--context", "50"], "a passkey needs a context of at least 1"),
        ([str(tmp_path / "hf")], "models in Hugging Face transformers need transformers: pip install 'sympow[trans"),
        ([str(tmp_path / "nothing")], ""),
        ([str(tmp_path / "number")], f"{tmp_path}/number/config.json must hold a JSON object"),
        ([str(run), "--csv", f"{tmp_path}/no/a.csv"], f"{tmp_path}/no/a.csv cannot be written"),
    ):
        assert main(["passkey", *words, "--quiet"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"sympow: error: {line}") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["passkey", "needles"])
def test_weights_are_read_in_the_dtype_that_is_asked_for(run, monkeypatch, capsys, command):
    dtypes, continued = [], passkey.native

    def seen(model):
        dtypes.append(next(model.parameters()).dtype)
        return continued(model)

    monkeypatch.setattr(passkey, "native", seen)
    words = [command, str(run), "--context", "600", "--texts", "1", "--quiet"]
    words += ["--task", "single", "--values", "digits"] * (command == "needles") + ["--dtype"]
    assert main([*words, "bfloat16"]) == 0 and main([*words, "float32"]) == 0
    assert dtypes == [torch.bfloat16, torch.float32]
    capsys.readouterr()


@pytest.mark.parametrize("command", ["passkey", "needles"])
def test_errors_of_all_models_come_before_the_first_one_is_measured(run, tmp_path, capsys, command):
    shutil.copytree(run, tmp_path / "mute")
    config = json.loads((run / "config.json").read_text())
    config["data"] = {"kind": "zarr", "path": "rows.zarr", "tokenizer": None, "vocab_size": 256}
    (tmp_path / "mute" / "config.json").write_text(json.dumps(config))
    words = [str(run), str(tmp_path / "mute"), "--context", "400", "--texts", "1", "--csv", f"{tmp_path}/a.csv"]
    assert main([command, *words, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("sympow: error: ") and err.count("\n") == 1
    assert "tokenizer" in err and not (tmp_path / "a.csv").exists()


def test_needles(run, tmp_path, capsys):
    (tmp_path / "prose.txt").write_text("It was late. Nobody had seen the ship. ")
    words = ["needles", str(run), "--context", "600", "--texts", "2", "--text", f"{tmp_path}/prose.txt", "--quiet"]
    assert main([*words, "--csv", f"{tmp_path}/a.csv"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and len(out.splitlines()) == 30
    first = out.splitlines()[0]
    assert first.startswith("tiny: single of digits, 600 tokens, depth 0%, ") and first.endswith(": 0% of 2 texts")
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["task"], row["values"]) for row in rows} == {
        (task, values) for task in ("single", "multikey", "tracing") for values in ("digits", "words")
    }
    assert len(rows) == 30 and float(rows[0]["distance"]) > float(rows[4]["distance"])
    assert main([*words, "--task", "multikey", "--values", "words", "--keys", "9"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    (tmp_path / "bytes").write_bytes(b"\xff")
    for more, line in (
        (["--context", "50"], "a text of single needs a context of at least"),
        (["--task", "double"], "argument --task: invalid choice: 'double'"),
        (["--text", f"{tmp_path}/nothing"], "nothing: No such file or directory"),
        (["--text", f"{tmp_path}/bytes"], f"{tmp_path}/bytes is not UTF-8 text: "),
        (["--keys", "1000"], "expected 1 to"),
        (["--task", "single", "--keys", "2"], "--keys is of the task multikey; got --task single"),
        (["--task", "single", "multikey", "--hops", "2"], "--hops is of the task tracing; got --task single multikey"),
    ):
        code = 2
        try:
            code = main([*words, *more])
        except SystemExit as stopped:
            code = stopped.code
        error = capsys.readouterr().err
        assert code == 2 and line in error and error.count("\n") == 1, error


@pytest.mark.parametrize("command", ["passkey", "needles"])
def test_what_was_measured_is_kept_when_the_command_is_stopped(run, tmp_path, capsys, monkeypatch, command):
    calls = []

    def stopped_in_the_second_row(model):
        def continues(texts, count):
            calls.append(count)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return texts[:, :count]

        return continues

    monkeypatch.setattr("sympow.evaluation.passkey.native", stopped_in_the_second_row)
    words = [command, str(run), "--context", "600", "--texts", "2", "--quiet", "--csv", f"{tmp_path}/a.csv"]
    assert main(words) == 128 + signal.SIGTERM
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == len(calls) == 2
    assert f"stopped by SIGTERM after 2 rows, which are in {tmp_path}/a.csv" in err
    with (tmp_path / "a.csv").open(newline="") as file:
        assert [row["depth"] for row in csv.DictReader(file)] == ["0.0", "0.25"]
