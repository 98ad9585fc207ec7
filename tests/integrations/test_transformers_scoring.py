"""Models of transformers in the evaluations of sympow: the numbers of a native model, and of any other."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sympow.cli import main
from sympow.data import BPETokenizer
from sympow.integrations.transformers.scoring import load_causal_lm
from sympow.training import load_model

TEXT = "the quick brown fox jumps over the lazy dog, " * 40


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Text files, and a folder of transformers with a GPT-2 and its tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for i in range(4):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} {TEXT}")
    tokenizer = BPETokenizer.train([TEXT], 280)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save(tmp_path / "gpt2")
    return tmp_path


def test_losses_are_those_of_transformers(folder):
    scored = load_causal_lm(folder / "gpt2")
    tokens = torch.arange(60).view(2, 30)
    expected = scored.model(input_ids=tokens, labels=tokens).loss
    losses = scored.token_losses(tokens[:, :-1], tokens[:, 1:])
    assert losses.shape == (2, 29) and not scored.training
    assert losses.mean().item() == pytest.approx(expected.item(), abs=1e-5)
    assert (scored.vocab_size, scored.longest) == (300, 64)
    with pytest.raises(ValueError, match="reads rows of 64 tokens at most; got 65"):
        scored(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_in_bfloat16_leave_the_rotation_in_float32(tmp_path, dtype):
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, bos_token_id=0, eos_token_id=0)  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, dtype=dtype).model
    assert model.dtype == torch.bfloat16 and model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert load_causal_lm(tmp_path, dtype=torch.float32).model.dtype == torch.float32


def test_commands_read_folders_of_transformers(folder, capsys):
    data = ["--data", "kind=text", "--data", f"path={folder / 'texts'}"]
    assert main(["ar-hits", str(folder / "gpt2"), *data, "--rows", "4", "--quiet"]) == 0
    assert "a row of 64 tokens" in capsys.readouterr().out
    assert main(["recall-probe", str(folder / "gpt2"), "--pairs", "4", "--queries", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["gpt2", "4", "32"]


def test_cut_weights_are_refused_in_one_line(folder, capsys):
    (folder / "gpt2" / "model.safetensors").write_bytes(b"")
    assert main(["passkey", str(folder / "gpt2"), "--context", "64", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith(f"sympow: error: {folder / 'gpt2'} cannot be read: Error while")
    (folder / "gpt2" / "model.safetensors").rename(folder / "gpt2" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="gpt2 cannot be read: "):
        load_causal_lm(folder / "gpt2")


def test_the_data_of_other_models_must_be_named(folder, capsys):
    assert main(["ar-hits", str(folder / "gpt2"), "--quiet"]) == 2
    assert "what the first model was trained on is not known" in capsys.readouterr().err


def test_an_exported_run_scores_as_the_run(folder, capsys):
    recipe = folder / "tiny.py"
    recipe.write_text(
        "from sympow.data import DataConfig\n"
        "from sympow.models import ModelConfig\n"
        "from sympow.training import RunConfig, TrainingConfig\n"
        "def tiny():\n"
        f"    data = DataConfig(kind='text', path={str(folder / 'texts')!r}, tokenizer={str(folder / 'gpt2')!r})\n"
        "    training = TrainingConfig(context=32, batch_size=2, steps=2, warmup_steps=1)\n"
        "    return RunConfig('tiny', ModelConfig(280, 16, 1, 2), data, training)\n"
    )
    assert main(["train", f"{recipe}:tiny", "--out", str(folder / "run"), "--quiet"]) == 0
    assert main(["export", str(folder / "run"), "--out", str(folder / "exported")]) == 0
    tokens = torch.arange(60).view(2, 30)
    native = load_model(folder / "run").model.token_losses(tokens[:, :-1], tokens[:, 1:])
    assert torch.allclose(load_causal_lm(folder / "exported").token_losses(tokens[:, :-1], tokens[:, 1:]), native)
    capsys.readouterr()
    words = ["ar-hits", str(folder / "run"), str(folder / "exported"), "--rows", "4", "--frequent", "1000", "--quiet"]
    assert main(words) == 0
    assert "exported less run, nats a token" in capsys.readouterr().out
