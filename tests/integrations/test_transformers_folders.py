"""Run folders as folders of transformers and back: weights bit for bit, tokenizers with the same tokens."""

import errno
import json
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from sympow.cli import main
from sympow.cli.served_model import load_served
from sympow.data import ByteTokenizer, DataConfig
from sympow.data.tokens import BPETokenizer
from sympow.integrations.transformers import SympowForCausalLM, from_transformers, to_transformers
from sympow.integrations.transformers.folders import from_native, load_exported
from sympow.integrations.transformers.scoring import load_causal_lm
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.training import Checkpoint, RunConfig, TrainingConfig, load, load_model, save_checkpoint
from sympow.training.run_folder import open_run_folder

TEXT = "def main(argument):\n    return 'äöü €' + chr(0)\x00\x7f \t  end's   12345"


@pytest.fixture(params=["bytes", "bpe", "none"])
def run(request, tmp_path):
    """A run folder with a tokenizer of each kind."""
    tokenizers = {"bytes": ByteTokenizer(), "bpe": BPETokenizer.train([TEXT * 9, "return the argument"], 280)}
    tokenizer = tokenizers.get(request.param)
    vocab = 300 if tokenizer is None else tokenizer.vocab_size
    model = ModelConfig(
        vocab, 32, 3, 4, (MixerConfig("power"), MixerConfig("softmax")), body="llama", tie_embeddings=tokenizer is None
    )
    data = {"kind": "zarr", "path": "somewhere", "vocab_size": vocab} if tokenizer is None else {}
    data = DataConfig(tokenizer=request.param, **data)
    config = RunConfig("small", model, data, TrainingConfig(steps=40, warmup_steps=4))
    with open_run_folder(tmp_path / "run", config) as folder:
        pass
    weights = LanguageModel(model, seed=3).state_dict()
    empty = {"optimizer": {}, "data": {}, "rng": {}}
    save_checkpoint(Checkpoint(config.to_dict(), weights, step=40, tokens=7, seconds=1.0, **empty), folder, 1)
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder


def test_there_and_back(run, tmp_path):
    out = to_transformers(run, tmp_path / "hf", max_shard_size="20KB")
    back = from_transformers(out, tmp_path / "back")
    first, second = load(run), load(back)
    assert first.config == second.config
    assert (back / "config.json").read_bytes() == (run / "config.json").read_bytes()
    weights = second.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in first.model.state_dict().items())
    assert load_model(back).step == 40
    if first.tokenizer is not None:
        assert (back / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    tokens = torch.arange(9)[None]
    logits = AutoModelForCausalLM.from_pretrained(out)(tokens).logits
    torch.testing.assert_close(logits, first.model(tokens), rtol=0, atol=1e-5)


def test_tokenizer_loads(run, tmp_path):
    out = to_transformers(run, tmp_path / "hf")
    tokenizer = load(run).tokenizer
    if tokenizer is None:
        assert not (out / "tokenizer.json").exists()
        return
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded(TEXT)["input_ids"] == tokenizer.encode(TEXT).tolist()
    assert loaded.decode(tokenizer.encode(TEXT).tolist()) == TEXT
    assert len(loaded) == tokenizer.vocab_size
    assert loaded.decode(range(256)) == tokenizer.decode(range(256))


def test_weights_trained_in_transformers_come_back(run, tmp_path):
    out = to_transformers(run, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        model.model.final_norm.weight.fill_(3)
    model.save_pretrained(out)
    back = load_model(from_transformers(out, tmp_path / "back")).model
    assert (back.final_norm.weight == 3).all()


def test_command(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(tmp_path / "hf"), "--max-shard-size", "5"]) == 2
    line = "sympow: error: --max-shard-size takes a number with KB, MB, GB or TB, such as 5GB; got '5'\n"
    assert capsys.readouterr().err == line and not (tmp_path / "hf").exists()
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    out, err = capsys.readouterr()
    assert str(tmp_path / "hf") in out and err == ""  # no progress bars behind a pipe
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "sympow"
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["evaluate", str(tmp_path / "hf")]) == 2
    assert "hf is no run: its config.json is of a model that `sympow export` made" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["bytes"], indirect=True)
def test_cut_weights_are_refused(run, tmp_path):
    file = to_transformers(run, tmp_path / "hf") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for read in (lambda: load_served(str(tmp_path / "hf"), "cpu"), lambda: from_transformers(tmp_path / "hf", "out")):
        with pytest.raises(ValueError, match=r"hf/model\.safetensors cannot be read: Error while"):
            read()


@pytest.mark.parametrize("run", ["bytes"], indirect=True)
@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
)
def test_a_full_disk_is_one_line_with_the_folder(run, error, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(SympowForCausalLM, "save_pretrained", full)
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and str(tmp_path / "hf") in line and "No space left on device" in line
    assert not (tmp_path / "hf").exists()


def test_folders_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run at"):
        to_transformers(tmp_path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"is no folder of to_transformers: it has no config\.json"):
        from_transformers(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "sympow_run.json").write_text("{}")
    with pytest.raises(ValueError, match="must hold a model of type 'sympow'; got 'llama'"):
        from_transformers(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="must hold a model of type 'sympow'; got 'llama'"):
        load_served(str(tmp_path), "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 10**9}, "do not fit its config.json: the config has 1,000,000,000 layers, the weights are of 2"),
        ({"vocab_size": 2**40}, r"'embedding.weight' has shape \[16, 8\], the model needs \[1099511627776, 8\]"),
        ({"mlp_ratio": 2**40}, r"'blocks.0.mlp_in.weight' has shape"),
        ({"mixers": [{"name": "power", "options": {"head_dim": 2**40}}]}, "has head_dim = 1,099,511,627,776"),
    ],
)
def test_a_config_that_is_larger_than_its_weights_is_refused(tmp_path, changes, message):
    model = ModelConfig(vocab_size=16, d_model=8, n_layers=2, n_heads=2)
    from_native(LanguageModel(model, seed=0)).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["model"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(content))
    for load_model_of in (AutoModelForCausalLM.from_pretrained, AutoModel.from_pretrained, load_exported):
        with pytest.raises(ValueError, match=message) as error:
            load_model_of(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("model.final_norm.weight"), "lacks weights of its config: model.final_norm.weight is missing"),
        (lambda x: x.update(other=torch.ones(3)), "has a weight that its config does not know: other"),
    ],
)
@pytest.mark.parametrize("load", [load_exported, load_causal_lm])
def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path, change, message, load):
    """transformers would draw new ones, or leave them out."""
    from_native(LanguageModel(ModelConfig(16, 8, 1, 2), seed=3)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"^{tmp_path} {message}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.embedding.weight", lambda x: x * float("nan"), "embedding.weight holds values that are not finite"),
        ("model.final_norm.weight", lambda x: x + 1j, "final_norm.weight is of C64, not F64"),
        ("model.final_norm.weight", lambda x: x.int(), "final_norm.weight is of I32, not F64"),
        ("lm_head.weight", lambda x: x, "a lm_head.weight that is not its embedding"),
    ],
)
def test_weights_that_would_be_changed_are_refused(name, change, message, tmp_path):
    from_native(LanguageModel(ModelConfig(16, 8, 1, 2), seed=3)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[name] = change(weights.get(name, torch.ones(16, 8)))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message) as error:
        load_exported(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read: it has an adapter beside its weights"):
        load_exported(tmp_path)
    assert "\n" not in str(error.value) and str(error.value).count(str(tmp_path)) == 1
