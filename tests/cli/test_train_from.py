"""`sympow train --from RUN`: other data and another schedule, from the weights of a run."""

import shutil

import pytest

from sympow.cli import main
from sympow.data import Batches, BPETokenizer, DataConfig, open_corpus
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from sympow.training import RunConfig, TrainingConfig, latest, load, load_checkpoint, read_metrics
from sympow.training.checkpoint import list_checkpoints
from sympow.training.run_folder import read_config, write_run_folder
from tests.tiny_runs import finished_runs

DOCUMENTS = [f"def f{i}(): return {i}\n" * 20 for i in range(12)]
OTHER = ["data.path=other", "training.schedule=constant", "training.steps=6", "training.learning_rate=1e-4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a finished run in power/, and other texts in other/."""
    root = tmp_path_factory.mktemp("from")
    (root / "other").mkdir()
    for i in range(6):
        (root / "other" / f"{i}.txt").write_text(f"class C{i}: pass\n" * 30)
    with finished_runs(root, DOCUMENTS, names=("power",)):
        yield root


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def weights(checkpoint):
    return {name: weight.numpy().tobytes() for name, weight in load_checkpoint(checkpoint).model.items()}


def first_loss(model: LanguageModel, config: RunConfig) -> float:
    settings, corpus = config.training, open_corpus(config.data).train
    batch = Batches(corpus, settings.context, settings.rows_per_pass, settings.seed)[0]
    total = model.loss_sum(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens)
    return total.item() / int((batch.targets >= 0).sum())


def test_a_run_begins_with_the_weights_of_another(capsys):
    assert main(["train", "--from", "power", *OTHER, "--out", "tuned", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("finished at step 6 of 6, ")
    config, rows = read_config("tuned"), read_metrics("tuned")
    assert (config.name, config.start, config.data.path) == ("tiny-power-tuned", "power", "other")
    assert [row["lr"] for row in rows] == [1e-4] * 6
    assert rows[0]["loss"] == pytest.approx(first_loss(load("power").model, config), rel=1e-6)
    new = LanguageModel(config.model, seed=config.training.seed)
    assert rows[0]["loss"] != pytest.approx(first_loss(new, config), rel=1e-5)


def test_a_checkpoint_and_a_recipe(capsys):
    """The config is that of the recipe. The order of words and options does not matter."""
    first = str(list_checkpoints("power")[0].relative_to("."))
    data = ["data.path=other", "training.steps=2"]
    assert main(["train", "--out", "older", "--from", first, "tiny.py:power", "--quiet", *data]) == 0
    config = read_config("older")
    assert (config.name, config.start) == ("tiny-power", first)
    assert read_metrics("older")[0]["loss"] == pytest.approx(first_loss(load(first).model, config), rel=1e-6)


def test_a_stopped_run_continues_without_the_run_it_began_with(tmp_path):
    """Bit for bit, and with the tokenizer that it began with."""
    shutil.copytree("power", tmp_path / "gone")
    words = ["train", "tiny.py:power", "--from", f"{tmp_path}/gone", *OTHER, "training.checkpoint_every=3", "--quiet"]
    assert main([*words, "--out", f"{tmp_path}/whole"]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    whole = latest(tmp_path / "whole")
    remove = latest(tmp_path / "cut")
    remove.unlink() if remove.is_file() else shutil.rmtree(remove)
    shutil.rmtree(tmp_path / "gone")
    assert main([*words, "--out", f"{tmp_path}/cut"]) == 0
    assert weights(latest(tmp_path / "cut")) == weights(whole)


def test_the_tokenizer_is_that_of_the_run_to_begin_with(tmp_path):
    """Also if the config names a BPE, which would be trained on the other data."""
    tokenizer = BPETokenizer.train(["def class return pass"], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    config = RunConfig("bpe", ModelConfig(300, 16, 1, 2, (MixerConfig("power"),)), DataConfig(),
                       TrainingConfig(context=32, batch_size=2, steps=2, warmup_steps=0))  # fmt: skip
    text = (tmp_path / "tokenizer.json").read_text()
    write_run_folder(tmp_path / "bpe", config, LanguageModel(config.model, seed=0), tokenizer=text)
    command = ["train", "--from", f"{tmp_path}/bpe", "data.kind=text", "data.path=other", "--out", f"{tmp_path}/tuned"]
    assert main([*command, "--quiet"]) == 0
    assert load(tmp_path / "tuned").tokenizer.fingerprint == tokenizer.fingerprint


def test_errors_are_one_line(fails, tmp_path):
    assert fails("train", "--from", "nothing", *OTHER) == "no run and no checkpoint at nothing"
    assert fails("train", "--from", "power", *OTHER, "--out", "./power") == (
        "the run cannot be written into power, from which it begins: give another folder (--out)"
    )
    line = fails("train", "--from", "power", "start=older", "--out", "tuned")
    assert line == "--from sets start already: leave start=older out"
    line = fails("train", "--from", "power", *OTHER, "data.tokenizer=bpe", "--out", "words")
    assert line == "power reads text by its own tokenizer, bytes: leave data.tokenizer=bpe out"
    line = fails(
        "train", "--from", "power", "data.tokenizer=bytes", "data.vocab_size=256", "model.d_model=32", "--out", "wide"
    )
    assert "does not fit the model: " in line and "has shape" in line
    assert fails("train", "--from", "power", *OTHER, "model.n_layers=2", "--out", "deep").endswith(
        "does not fit the model: it has no weight 'blocks.1.mixer_norm.weight'"
    )
    assert fails("train", "--from", "power", *OTHER, "data.vocab_size=300", "--out", "words") == (
        "data.vocab_size = 300, but the tokenizer of power has 256 tokens"
    )
    BPETokenizer.train(["a b"], 256).save(tmp_path / "tokenizer.json")
    assert fails("train", "--from", "power", *OTHER, f"data.tokenizer={tmp_path}", "--out", "words") == (
        f"the data are in tokens of {tmp_path}, not in those of power"
    )


def test_a_run_without_a_tokenizer_trains_none(fails, tmp_path):
    data = DataConfig(kind="tokens", path="a.bin", tokenizer="none", vocab_size=256)
    model = ModelConfig(256, 16, 1, 2, (MixerConfig("power"),))
    config = RunConfig("plain", model, data, TrainingConfig(steps=1, warmup_steps=0))
    write_run_folder(tmp_path / "plain", config, LanguageModel(config.model, seed=0), tokenizer=None)
    data = ["data.kind=text", "data.tokenizer=bpe"]
    line = fails("train", "--from", f"{tmp_path}/plain", *OTHER, *data, "--out", f"{tmp_path}/out")
    assert line.startswith(f"the text of the tokens of {tmp_path}/plain is not known")
