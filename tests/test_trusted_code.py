"""A mixer that a file names by import path is imported only for callers that allow it."""

import json
import shutil
import sys

import pytest
import torch

from sympow.cli import main
from sympow.layers import trust_code
from sympow.models import MixerConfig, ModelConfig
from sympow.sweeps import Records
from sympow.training import load, load_model
from sympow.training.run_folder import read_config

MIXER = """
from pathlib import Path
from sympow.layers import PowerAttention

Path({mark!r}).touch()

class Foreign(PowerAttention):
    pass
"""
RECIPE = """
from sympow.data import DataConfig
from sympow.models import MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig

def own():
    mixers = (MixerConfig("foreign_mixer:Foreign"), MixerConfig("short_convolution", {{
        "mixer": "foreign_mixer:Foreign", "options": {{"p": 2}}}}))
    return RunConfig(
        "own",
        ModelConfig(vocab_size=256, d_model=16, n_layers=2, n_heads=2, mixers=mixers),
        DataConfig(kind="text", path={corpus!r}, tokenizer="bytes"),
        TrainingConfig(context=32, batch_size=2, steps=4, warmup_steps=1, checkpoint_every=2, evaluate_every=4,
                       evaluation_batches=1),
    )
"""
REFUSED = "names the mixer 'foreign_mixer:Foreign' by its import path, and importing runs code"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of an own mixer, whose module this process has forgotten. The module writes a file when it is imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "foreign_mixer.py").write_text(MIXER.format(mark=str(tmp_path / "imported")))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        (tmp_path / "corpus" / f"{number}.txt").write_text("To be or not to be. " * 20 + str(number))
    (tmp_path / "mine.py").write_text(RECIPE.format(corpus=str(tmp_path / "corpus")))
    assert main(["train", f"{tmp_path}/mine.py:own", "--out", f"{tmp_path}/run", "--quiet"]) == 0
    forget(tmp_path)
    yield tmp_path
    sys.modules.pop("foreign_mixer", None)


def forget(folder):
    sys.modules.pop("foreign_mixer")
    (folder / "imported").unlink()


def test_a_run_is_loaded_only_where_its_code_is_trusted(folder):
    checkpoint = folder / "run" / "checkpoints" / "step-00000004.pt"
    (folder / "bare").mkdir()
    shutil.copy(checkpoint, folder / "bare" / "model.pt")
    for path in (folder / "run", checkpoint, folder / "bare" / "model.pt"):
        with pytest.raises(ValueError, match=REFUSED) as error:
            load_model(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=REFUSED):
        read_config(folder / "run")
    assert not (folder / "imported").exists()
    with trust_code():
        model = load(folder / "run").model
    assert type(model.blocks[0].mixer).__name__ == "Foreign" and (folder / "imported").exists()
    assert load(folder / "run").model is not None  # the module is imported now


@pytest.mark.parametrize("nested", [False, True])
def test_configs_from_files_do_not_import(folder, nested):
    own = {"name": "foreign_mixer:Foreign", "options": {}}
    if nested:
        own = {"name": "short_convolution", "options": {"mixer": own["name"], "options": own["options"]}}
    with pytest.raises(ValueError, match=REFUSED):
        ModelConfig.from_dict({"vocab_size": 8, "d_model": 16, "n_layers": 1, "n_heads": 2, "mixers": [own]})
    with trust_code(False), pytest.raises(ValueError, match=REFUSED):
        MixerConfig.from_dict(own)
    assert not (folder / "imported").exists()
    with trust_code():
        assert MixerConfig.from_dict(own).to_dict() == own


@pytest.mark.parametrize("command", ["evaluate", "ar-hits", "recall-probe", "passkey", "generate", "read", "serve"])
def test_commands_refuse_a_run_of_foreign_code(folder, command, capsys):
    more = {"generate": ["--prompt", "To"], "read": [f"{folder}/mine.py", "--out", f"{folder}/x.ctx"]}
    assert main([command, f"{folder}/run", *more.get(command, [])]) == 2
    assert REFUSED in capsys.readouterr().err and not (folder / "imported").exists()


def test_the_option_trusts_and_ones_own_recipe_resumes(folder, capsys):
    words = ["generate", f"{folder}/run", "--prompt", "To", "--max-new-tokens", "2", "--device", "cpu"]
    assert main([*words, "--trust-code"]) == 0
    forget(folder)
    assert main(words) == 2 and not (folder / "imported").exists()
    (folder / "run" / "checkpoints" / "step-00000004.pt").unlink()
    assert main(["train", f"{folder}/mine.py:own", "--out", f"{folder}/run", "--quiet"]) == 0
    assert "finished at step 4 of 4" in capsys.readouterr().out


def test_records_of_a_sweep_import_nothing(folder):
    records = Records(folder / "sweep")
    records.open()
    records.save("one", [{"run": "one", "mixers": "foreign_mixer:Foreign", "seconds": 1.0}], 1.0)
    assert records.read("one").result[0]["mixers"] == "foreign_mixer:Foreign"
    assert not (folder / "imported").exists()


def test_models_of_transformers_are_loaded_only_where_their_code_is_trusted(folder, capsys):
    transformers = pytest.importorskip("transformers")
    import sympow.integrations.transformers  # noqa: F401  # which registers the models

    out, words = folder / "hf", ["export", f"{folder}/run", "--out", f"{folder}/hf"]
    assert main(words) == 2
    assert REFUSED in capsys.readouterr().err and not (folder / "imported").exists() and not out.exists()
    assert main([*words, "--trust-code"]) == 0
    forget(folder)
    for options in ({}, {"trust_remote_code": False}):
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
            with pytest.raises(ValueError, match=REFUSED):
                auto.from_pretrained(out, **options)
    assert transformers.AutoConfig.from_pretrained(out).vocab_size == 256
    for command in (["passkey", f"{out}"], ["serve", f"{out}"]):
        assert main(command) == 2
        assert REFUSED in capsys.readouterr().err
    assert not (folder / "imported").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert (folder / "imported").exists()
    native = load(folder / "run").model
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(model(tokens, use_cache=False).logits, native(tokens), rtol=0, atol=1e-5)
    assert json.loads((out / "config.json").read_text())["model"]["mixers"][0]["name"] == "foreign_mixer:Foreign"
