"""Losses by position: the right rows, the right positions, bins and their errors, on a model whose losses are known."""

import csv
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sympow.evaluation import ContextLosses, Curve, choose_rows, context_loss, context_losses, write_csv
from sympow.models import LanguageModel, MixerConfig, ModelConfig


class Documents:
    def __init__(self, lengths, vocab_size=1000, dtype=np.uint16):
        rng = np.random.default_rng(0)
        self.documents = [rng.integers(0, vocab_size, length).astype(dtype) for length in lengths]
        self.lengths = np.array(lengths, dtype=np.int64)

    def __getitem__(self, index):
        return self.documents[index]


class Known(torch.nn.Module):
    """Its loss is a function of the position and the target; it notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.calls = []

    def token_losses(self, tokens, targets):
        self.calls.append((tokens, targets, self.training, torch.is_grad_enabled()))
        return 10 / torch.arange(1.0, tokens.shape[1] + 1) + 0.001 * targets


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    context=st.integers(1, 12),
    rows=st.integers(1, 40),
    seed=st.integers(0, 3),
)
def test_rows_are_distinct_whole_windows(lengths, context, rows, seed):
    width = context + 1
    windows = {(i, start) for i, length in enumerate(lengths) for start in range(0, length - width + 1, width)}
    if not windows:
        with pytest.raises(ValueError):
            choose_rows(Documents(lengths), context, rows, seed)
        return
    chosen = choose_rows(Documents(lengths), context, rows, seed)
    listed = [tuple(row) for row in chosen.tolist()]
    assert len(listed) == len(set(listed)) == min(rows, len(windows))
    assert set(listed) <= windows
    assert listed == sorted(listed)
    assert np.array_equal(chosen, choose_rows(Documents(lengths), context, rows, seed))


def test_rows_depend_on_the_seed():
    corpus = Documents([1000])
    assert not np.array_equal(choose_rows(corpus, 9, 10, seed=0), choose_rows(corpus, 9, 10, seed=1))


def test_a_corpus_without_long_documents_names_the_longest():
    message = "a context of 2,048 needs a document of 2,049 tokens; the longest is document 1 with 2,048"
    with pytest.raises(ValueError, match=re.escape(message)):
        context_losses(Known(), Documents([5, 2048, 7]), 2048)
    with pytest.raises(ValueError, match="no documents"):
        choose_rows(Documents([]), 4, 1)
    with pytest.raises(ValueError, match="at least 1, got context=0 and rows=4"):
        choose_rows(Documents([5]), 0, 4)


@pytest.mark.parametrize("batch_tokens", [1, 20, 1 << 20])
def test_losses_are_those_of_the_rows(monkeypatch, batch_tokens):
    monkeypatch.setattr(context_loss, "BATCH_TOKENS", batch_tokens)
    corpus, context = Documents([31, 5, 23]), 7
    model = Known().train()
    result = context_losses(model, corpus, context, rows=100)
    windows = [corpus[0][s : s + 8] for s in (0, 8, 16)] + [corpus[2][s : s + 8] for s in (0, 8)]
    expected = np.stack([10 / np.arange(1, 8) + 0.001 * window[1:] for window in windows])
    assert (result.rows, result.context, result.tokens) == (5, 7, 35)
    np.testing.assert_allclose(result.position_losses, expected.mean(0), rtol=1e-6)
    np.testing.assert_allclose(result.loss, expected.mean(), rtol=1e-6)
    for n, (start, end) in enumerate([(0, 1), (1, 2), (2, 4), (4, 7)]):
        np.testing.assert_allclose(result.row_losses[:, n], expected[:, start:end].mean(1), rtol=1e-6)
        each = result.bins[n]
        assert (each.start, each.end, each.tokens) == (start, end, 5 * (end - start))
        by_row = expected[:, start:end].mean(1)
        assert each.loss == pytest.approx(by_row.mean(), rel=1e-6)
        assert each.stderr == pytest.approx(by_row.std(ddof=1) / 5**0.5, rel=1e-5)
    assert model.training
    assert all((training, grad) == (False, False) for _, _, training, grad in model.calls)
    assert max(len(tokens) for tokens, *_ in model.calls) == min(5, max(1, batch_tokens // context))
    for tokens, targets, *_ in model.calls:
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_mode_comes_back_after_an_error():
    class Failing(Known):
        def token_losses(self, tokens, targets):
            raise RuntimeError("no")

    model = Failing().train()
    with pytest.raises(RuntimeError, match="no"):
        context_losses(model, Documents([50]), 4)
    assert model.training


@given(context=st.integers(1, 5000))
def test_bins_double_and_cover_every_position_once(context):
    edges = context_loss.bin_edges(context)
    assert edges[0] == 0 and edges[-1] == context
    assert all(edge & (edge - 1) == 0 for edge in edges[:-1])
    assert edges[:-1] == [0, *(2**k for k in range(13) if 2**k < context)]


def losses_of(row_losses):
    """Rows of `context` = 4 from the means of its bins [0, 1), [1, 2), [2, 4)."""
    row_losses = np.asarray(row_losses, dtype=np.float64)
    return ContextLosses(np.repeat(row_losses, [1, 1, 2], axis=1).mean(0), row_losses)


def test_best_context_is_the_lowest_bin():
    best = losses_of([[5.0, 2.0, 3.0], [4.0, 1.0, 3.0]]).best
    assert (best.start, best.end, best.loss) == (1, 2, 1.5)


def test_best_context_is_no_artefact_of_how_texts_begin():
    """The first tokens of a file may be easy to guess; bins of a few positions do not compete."""
    positions = np.repeat([0.1, 3.0, 2.0], [64, 64, 128])
    bins = np.array([[0.1] * 7 + [3.0, 2.0]])  # 0, 1, 2-3, ... 32-63, then 64-127 and 128-255
    best = ContextLosses(positions, bins).best
    assert (best.start, best.end, best.loss) == (128, 256, 2.0)


def test_one_row_has_no_standard_error():
    assert np.isnan(losses_of([[5.0, 2.0, 3.0]]).bins[0].stderr)


def test_csv_is_tidy(tmp_path):
    curves = [Curve("a", losses_of([[3.0, 2.0, 1.0], [3.0, 2.0, 2.0]]), 2), Curve("b, c", losses_of([[3.0, 2.0, 1.0]]))]
    write_csv(tmp_path / "losses.csv", curves)
    with open(tmp_path / "losses.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["run", "bin_start", "bin_end", "loss", "stderr", "tokens", "train_context"]
    assert len(lines) == 6
    assert list(lines[2].values()) == ["a", "2", "4", "1.500000", "0.500000", "4", "2"]
    assert list(lines[3].values()) == ["b, c", "0", "1", "3.000000", "nan", "1", ""]


@pytest.mark.parametrize("mixer", [MixerConfig("power"), MixerConfig("softmax")])
def test_a_language_model_beyond_any_trained_context(mixer):
    """The model's own logits, position by position; its loss before training is that of a uniform guess."""
    model = LanguageModel(ModelConfig(50, 16, 1, 2, (mixer,)), seed=0)
    corpus = Documents([40, 200], vocab_size=50)
    result = context_losses(model, corpus, 150, rows=3, progress="a model")
    text = torch.from_numpy(corpus[1][:151].astype(np.int64))[None]
    with torch.no_grad():
        logits = model(text[:, :-1])[0].double()
    expected = torch.nn.functional.cross_entropy(logits, text[0, 1:], reduction="none").numpy()
    np.testing.assert_allclose(result.position_losses, expected, rtol=1e-4)
    assert result.loss == pytest.approx(np.log(50), abs=0.2)


def test_progress_counts_rows_under_a_label(every_count_is_told, monkeypatch, capsys):
    monkeypatch.setattr(context_loss, "BATCH_TOKENS", 8)
    context_losses(Known(), Documents([50]), 4, rows=4, progress="a model")
    context_losses(Known(), Documents([50]), 4, rows=4)
    counts = [line.rsplit(", ", 1)[0] for line in capsys.readouterr().err.splitlines()]
    assert counts == ["a model: 2 of 4 rows", "a model: 4 of 4 rows"]
