"""The recall probe: passages as they are described, and scores of models whose answers are known."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sympow.recall.probe import LENGTH, fitting, passages, probe

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 101


class Recalls(torch.nn.Module):
    """Gives logit 5 to what followed the earlier occurrence of a token, and 0 to all else."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, VOCAB)
        for row, text in enumerate(tokens.tolist()):
            for i, token in enumerate(text):
                if token in text[:i]:
                    logits[row, i, text[text.index(token) + 1]] = 5.0
        return logits


@pytest.mark.parametrize("pairs", [1, 4, 16])
def test_passages(pairs):
    tokens, asked, filler = passages(pairs, VOCAB, 7, seed=3)
    assert tokens.shape == (7, LENGTH * pairs) and asked.shape == filler.shape == (7, LENGTH * pairs - 1)
    assert tokens.min() >= 0 and tokens.max() < VOCAB
    assert (asked.sum(1) == pairs).all() and not (asked & filler).any()
    assert (filler.sum(1) == (LENGTH - 4) * pairs).all()
    for text, queries, fill in zip(tokens, asked, filler, strict=True):
        values = dict(zip(text[: 2 * pairs : 2].tolist(), text[1 : 2 * pairs : 2].tolist(), strict=True))
        assert len(values) == pairs == len(set(values.values()))
        assert {text[i]: text[i + 1] for i in np.flatnonzero(queries)} == values
        used = {*values, *values.values()}
        assert not used & {int(text[i + 1]) for i in np.flatnonzero(fill)}


def test_passages_of_a_given_length_with_one_filler_token():
    """Zoology's appendix G: all passages have one length, and one token fills what neither keys nor values take."""
    tokens, asked, filler = passages(16, VOCAB, 9, length=160, filler="zero")
    assert tokens.shape == (9, 160) and (asked.sum(1) == 16).all() and (filler.sum(1) == 160 - 4 * 16).all()
    (token,) = np.unique(tokens[:, 1:][filler])
    assert (tokens == token).sum() == filler.sum()
    found = probe(Recalls(), VOCAB, 8, queries=64, length=160, filler="zero")
    assert found.length == 160 and found.asked.accuracy == 1
    assert fitting(16, VOCAB, length=64) and not fitting(16, VOCAB, length=60)
    with pytest.raises(ValueError, match="length"):
        passages(16, VOCAB, 1, length=60)


def test_passages_depend_on_the_seed_alone():
    assert (passages(4, VOCAB, 3, seed=1).tokens == passages(4, VOCAB, 3, seed=1).tokens).all()
    assert (passages(4, VOCAB, 3, seed=1).tokens != passages(4, VOCAB, 3, seed=2).tokens).any()


def test_keys_and_values_are_tokens_from_all_over_the_vocabulary():
    """As tasks have it, keys would be the lower half of the vocabulary and values the upper."""
    tokens = passages(16, VOCAB, 200).tokens
    keys, values = np.unique(tokens[:, :32:2]), np.unique(tokens[:, 1:32:2])
    assert len(keys) + len(values) == VOCAB - 1 and not set(keys) & set(values)
    assert min(keys.mean(), values.mean()) > VOCAB / 3


def test_a_model_that_recalls_answers_everything():
    model = Recalls().train()
    found = probe(model, VOCAB, 8, queries=64)
    assert (found.pairs, found.length, found.asked.tokens) == (8, 8 * LENGTH, 64)
    assert found.asked.accuracy == 1
    assert found.asked.loss == pytest.approx(math.log(math.exp(5) + VOCAB - 1) - 5, abs=1e-5)
    assert found.filler.accuracy < 0.2 and found.filler.loss >= math.log(VOCAB) - 1e-5
    assert model.training and torch.is_grad_enabled()


def test_slices_of_passages_add_up(monkeypatch):
    whole = probe(Recalls(), VOCAB, 4, queries=40)
    monkeypatch.setattr("sympow.recall.probe.LOGIT_ELEMENTS", 1)
    assert probe(Recalls(), VOCAB, 4, queries=40) == whole


def test_too_many_pairs_for_the_vocabulary():
    assert fitting(16, VOCAB) and not fitting(256, VOCAB)
    with pytest.raises(ValueError, match="vocab_size is too small"):
        probe(Recalls(), VOCAB, 256)


def test_the_guide_quotes_the_rows_of_the_demo():
    with (ROOT / "benchmarks" / "results" / "recall_probe_demo.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    text = " ".join((ROOT / "docs" / "guides" / "ar-hits.md").read_text(encoding="utf-8").split())

    def span(model: str, column: str, form: str) -> str:
        found = [float(row[column]) for row in rows if row["model"] == model]
        return f"{min(found):{form}} to {max(found):{form}}"

    right = [span(f"demo-{name}", "asked_accuracy", ".1%").replace("% to", " to") for name in ("power", "softmax")]
    words = "power attention answers {} at every P from 16 to 256, and softmax attention {}."
    assert words.format(*right) in text
    values, filler = (span("demo-power", f"{part}_loss", ".2f") for part in ("asked", "filler"))
    assert f"({values} nats with power attention) are nearly those on filler ({filler})" in text


def test_the_guide_quotes_the_rows_of_the_passages_of_the_source():
    with (ROOT / "benchmarks" / "results" / "recall_probe_source.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    text = " ".join((ROOT / "docs" / "guides" / "ar-hits.md").read_text(encoding="utf-8").split())
    assert {(row["length"], row["filler"]) for row in rows} == {("1024", "zero")}

    def span(prefix: str, column: str) -> tuple[float, float]:
        found = [float(row[column]) for row in rows if row["model"].startswith(prefix)]
        return min(found), max(found)

    for prefix, words, losses in (
        ("SmolLM2", "SmolLM2-135M answers {:.1%} to {:.1%} of 1,024 queries", "of {:.2f} to {:.2f} nats on values"),
        (
            "demo",
            "The demo's models answer {:.1%} to {:.1%} of 2,048 queries",
            "with losses of {:.2f} to {:.2f} nats (",
        ),
    ):
        expected = (words.format(*span(prefix, "asked_accuracy")), losses.format(*span(prefix, "asked_loss")))
        assert all(each in text for each in expected), expected
