"""The choice of the layers that keep softmax attention."""

import re

import pytest
import torch

from sympow.conversion import parse_pattern, swap_mixers
from sympow.conversion.choice import ROW_TOKENS, ROWS, choose_layers, layer_divergences, parse_kept, rows_of
from sympow.data import ByteTokenizer
from sympow.models import LanguageModel, MixerConfig, ModelConfig
from tests.draws import disturb


def teacher() -> LanguageModel:
    config = ModelConfig(19, 16, 4, 2, (MixerConfig("softmax", {"bias": False}),), body="llama")
    made = disturb(LanguageModel(config, seed=1), 0.3, seed=2)
    with torch.no_grad():
        made.blocks[2].mixer.out.weight.zero_()  # the mixer changes nothing
        made.blocks[1].mixer.out.weight.mul_(4)
    return made.eval()


def test_a_layer_counts_by_what_its_replacement_alone_changes():
    model, tokens = teacher(), torch.randint(19, (3, 40), generator=torch.Generator().manual_seed(3))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = dict(layer_divergences(model, ("power", "window", "power"), tokens, window=3))
    assert [*found] == [0, 1, 2, 3]
    for layer in range(4):
        kinds = ["softmax"] * 4
        kinds[layer] = ("power", "window", "power")[layer % 3]
        with torch.no_grad():
            p, q = (each(tokens).log_softmax(-1) for each in (model, swap_mixers(model, kinds, window=3)))
        assert found[layer] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3, abs=1e-6)
    assert found[2] == pytest.approx(0, abs=1e-6) and max(found.values()) > 0.01
    assert choose_layers(found, 3) == [0, 1, 3]
    assert choose_layers({0: 0.5, 1: 0.1, 2: 0.7, 3: 0.6}, 2) == [2, 3]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with pytest.raises(ValueError, match="expected at most 4 layers to keep, as the pattern replaces so many; got 5"):
        choose_layers(found, 5)
    with pytest.raises(ValueError, match="the replacement of layer 2 gives predictions that are not finite"):
        choose_layers(found | {2: float("nan")}, 1)


def test_only_layers_that_the_pattern_replaces_are_chosen():
    model, tokens = teacher(), torch.randint(19, (1, 40), generator=torch.Generator().manual_seed(3))
    found = dict(layer_divergences(model, ("softmax", "softmax", "window", "power"), tokens, window=50))
    assert [*found] == [2, 3] and found[2] == pytest.approx(0, abs=1e-6)  # the window holds all tokens
    assert choose_layers(found, 2) == [2, 3]
    assert list(layer_divergences(model, ("softmax",), tokens)) == []


def test_what_is_kept():
    assert parse_kept("2") == ("softmax", "softmax") == parse_kept("softmax*2")
    assert parse_kept("gated*3") == ("gated",) * 3
    for text in ("0", "power*2", "gated,softmax", "x", "", "1.5", "-1", "10001", "9" * 30, "gated*0"):
        with pytest.raises(ValueError, match=f"the layers to keep are of one kind.*; got '{re.escape(text)}'"):
            parse_kept(text)
    with pytest.raises(ValueError, match="a part of a pattern has at most 10,000 layers; got 'power\\*10000000000'"):
        parse_pattern("softmax,power*10000000000")  # a list of that length would not fit in memory


def test_rows_are_the_beginnings_of_documents(tmp_path):
    for number, length in enumerate((900, 20, 512, 700, 800, 900)):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * length)
    rows = rows_of(tmp_path, ByteTokenizer())
    assert rows.shape == (ROWS, ROW_TOKENS) and rows.dtype == torch.int64
    assert [chr(row[0]) for row in rows] == ["0", "2", "3", "4"]
    with pytest.raises(ValueError, match="expected a text of at least 512 tokens to choose layers by"):
        rows_of(tmp_path / "1.txt", ByteTokenizer())
