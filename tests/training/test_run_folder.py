"""A run folder that is open in one process is kept from others, where its file system has locks."""

import errno
import fcntl
import json
import os
from dataclasses import replace

import pytest
import torch

from sympow.data import DataConfig
from sympow.models import LanguageModel, ModelConfig
from sympow.training import RunConfig, TrainingConfig, latest, load_checkpoint, load_model, run, save_checkpoint, train
from sympow.training.checkpoint import CheckpointError
from sympow.training.run_folder import clear_run_folder, open_run_folder, write_run_folder


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_open_folder_cannot_be_opened_again(tmp_path, make_config, make_batches):
    config, folder = make_config(steps=2), tmp_path / "run"
    with open_run_folder(folder, config):
        held = names(folder)
        refused = pytest.raises(
            RuntimeError, match=rf"^{folder} is in use, another process trains there: wait for it, "
        )
        with refused:
            train(config, make_batches(config), folder, quiet=True)
        with refused:
            run(config, folder, restart=True, quiet=True)
        assert names(folder) == held
    assert train(config, make_batches(config), folder, quiet=True).step == 2


def test_a_folder_of_something_else_is_not_locked(tmp_path, make_config):
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(FileExistsError, match="holds other things than a run"),
        open_run_folder(tmp_path, make_config()),
    ):
        pass
    assert names(tmp_path) == ["thesis.tex"]


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(
    tmp_path, make_config, make_batches, monkeypatch, capsys
):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    config = make_config(steps=2)
    assert train(config, make_batches(config), tmp_path / "run", quiet=True).step == 2
    line = "cannot be locked (No locks available): do not start the same command twice at the same time"
    assert capsys.readouterr().err == f"{tmp_path / 'run'} {line}\n"


@pytest.mark.parametrize("restart", [False, True])
def test_a_config_of_something_else_is_left_alone(tmp_path, make_config, restart):
    """As that of a tokenizer or a model of the Hub."""
    for name, text in (("config.json", '{"model_type": "llama"}'), ("tokenizer.json", "{}")):
        (tmp_path / name).write_text(text)
    with pytest.raises(FileExistsError, match="holds other things than a run"):
        run(make_config(), tmp_path, restart=restart, quiet=True)
    with pytest.raises(FileNotFoundError, match=r"its config\.json is of no run, so nothing in it is removed"):
        clear_run_folder(tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}' and len(names(tmp_path)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "RunConfig.name must be a str, got a int"),
        ({"data": None}, "the data config must be a dict of fields, got None"),
        ({"zz": 1}, "unknown run field 'zz'"),
        ({"model": {"vocab_size": 16, "d_model": 8, "n_layers": 10**30, "n_heads": 2}}, "n_layers must be below"),
        ({"model": {"vocab_size": 16, "d_model": 8, "n_layers": 2, "n_heads": 2, "mixers": [{"name": "nowhere:X"}]}},
         "the config names the mixer 'nowhere:X' by its import path"),
    ],
)  # fmt: skip
def test_a_refused_config_is_named_with_its_file(tmp_path, change, message):
    model = ModelConfig(vocab_size=16, d_model=8, n_layers=2, n_heads=2)
    run = RunConfig("small", model, DataConfig(), TrainingConfig())
    folder = write_run_folder(tmp_path / "run", run, LanguageModel(model, seed=0), tokenizer=None)
    whole, file = load_checkpoint(latest(folder)), folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert str(error.value).startswith(f"{file}: {message}")
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON: lists and objects are nested too deeply"):
        load_model(folder)
    save_checkpoint(replace(whole, config=whole.config | change), folder, 1)
    with pytest.raises(ValueError) as error:
        load_model(latest(folder))
    assert str(error.value).startswith(f"{latest(folder)}: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 10**9}, "the config has 1,000,000,000 layers, the weights are of 2"),
        ({"n_layers": 3}, "the config has 3 layers, the weights are of 2"),
        ({"vocab_size": 2**40}, r"'embedding.weight' has shape \[16, 8\], the model needs \[1099511627776, 8\]"),
        ({"d_model": 2**40}, r"'embedding.weight' has shape"),
        ({"mlp_ratio": 2**40}, r"'blocks.0.mlp_in.weight' has shape \[32, 8\], the model needs"),
        ({"n_heads": 2**40}, "the config has n_heads = 1,099,511,627,776, and no axis of a weight is longer than 32"),
        ({"options": {"head_dim": 2**40}}, "the config has head_dim = 1,099,511,627,776"),
        ({"options": {"value_dim": 30}}, r"'blocks.0.mixer.qkv\S*' has shape"),
    ],
)
def test_a_config_that_is_larger_than_its_weights_is_refused(tmp_path, changes, message):
    """Before memory is allocated: in the config of a checkpoint too, which needs no folder."""
    model = ModelConfig(vocab_size=16, d_model=8, n_layers=2, n_heads=2)
    run = RunConfig("small", model, DataConfig(), TrainingConfig())
    folder = write_run_folder(tmp_path / "run", run, LanguageModel(model, seed=0), tokenizer=None)
    checkpoint = load_checkpoint(latest(folder))
    mixer = {"name": "power", "options": changes.get("options", {})}
    stored = checkpoint.config["model"] | {"mixers": [mixer]} | {k: v for k, v in changes.items() if k != "options"}
    larger = replace(checkpoint, config=checkpoint.config | {"model": stored})
    save_checkpoint(larger, folder, 1)
    for path in (folder, latest(folder)):
        with pytest.raises(CheckpointError, match=message) as error:
            load_model(path)
        assert "\n" not in str(error.value)


def test_a_weight_whose_name_is_no_text_is_refused(tmp_path, make_config, make_batches):
    config = make_config(steps=1, warmup_steps=0)
    train(config, make_batches(config), tmp_path / "run", quiet=True)
    content = torch.load(latest(tmp_path / "run"), weights_only=True)
    content["model"][3] = torch.zeros(2)
    torch.save(content, latest(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"does not fit the model: the model has no weight 3$"):
        load_model(tmp_path / "run")
