"""Measures of the context: on models that know what stands in their window, and on a folder of a run."""

import numpy as np
import pytest
import torch

from benchmarks import context_use
from benchmarks.common.measure import read
from benchmarks.context_use import compared, with_copies
from sympow.data import TokenCorpus
from sympow.evaluation import count_bigrams
from tests.benchmarks.corpora import random_corpus

LENGTH = 4096
LENGTHS = (256, 1024, LENGTH)


class Window(torch.nn.Module):
    """Predicts a token that stood in its window with certainty if the token before stood before it there, too."""

    def __init__(self, window: int):
        super().__init__()
        self.window, self.unused = window, torch.nn.Parameter(torch.zeros(1))

    def token_losses(self, tokens, targets):
        losses = torch.ones(tokens.shape)
        for row, (text, after) in enumerate(zip(tokens.tolist(), targets.tolist(), strict=True)):
            seen: dict[tuple[int, int], int] = {}
            for place, pair in enumerate(zip(text, after, strict=True)):
                if pair in seen and place - seen[pair] < self.window:
                    losses[row, place] = 0
                seen[pair] = place
        return losses


@pytest.fixture(scope="module")
def documents():
    """Documents of which each token is another one, so that no bigram is repeated."""
    rng = np.random.default_rng(0)
    texts = [rng.permutation(3 * LENGTH)[:LENGTH] for _ in range(3)]
    return TokenCorpus.from_documents(texts, vocab_size=3 * LENGTH)


@pytest.mark.parametrize("window", [300, 1000])
def test_a_window_recalls_what_stands_in_it(documents, window):
    counts = count_bigrams(documents, documents.vocab_size)
    rows = context_use.context_use(Window(window), documents, counts, "float32", LENGTHS)
    found = {(row["measure"], row["length"]): row["value"] for row in rows}
    assert [found["recalled", length] for length in (0, *LENGTHS)] == [0, 1, float(window > 768), 0]
    assert [found["copy", length] for length in (0, *LENGTHS)] == [1, 0, float(window < 768), 1]
    assert {found["cut", length] for length in LENGTHS} == {1} and found["hits", 256] is None
    assert all(len(row["documents"]) == 3 for row in rows)


def test_a_cut_context_is_at_least_half_of_its_length():
    """Texts say everything again after 600 tokens. A cut of 1,024 shows some of it, a longer one all of it."""
    rng = np.random.default_rng(0)
    corpus = TokenCorpus.from_documents([np.tile(rng.permutation(5000)[:600], 7)[:LENGTH]], vocab_size=5000)
    counts = count_bigrams(corpus, corpus.vocab_size)
    rows = context_use.context_use(Window(LENGTH), corpus, counts, "float32", (256, 1024, 2048, LENGTH))
    found = {(row["measure"], row["length"]): row["value"] for row in rows}
    assert found["cut", 256] == 1 and found["cut", 2048] == found["cut", LENGTH] == 0
    assert found["cut", 1024] == pytest.approx((600 - 511) / 512, abs=3e-3)
    assert found["position", 256] == 1 and found["position", 1024] == pytest.approx((601 - 256) / 768, abs=3e-3)
    assert found["hits", 256] is None and found["hits", 1024] == 0 and found["hits", LENGTH] is None
    with pytest.raises(ValueError, match="documents must have 1,024 tokens; got 4,096 to 4,096"):
        context_use.context_use(Window(9), corpus, counts, "float32", (256, 1024))


def test_passages_stand_where_they_are_said_to(documents):
    text, bare = (with_copies(documents, 0, LENGTHS, put_in).tolist() for put_in in (True, False))
    other = documents[1].tolist()
    place = LENGTH - 12 * 32
    assert text[place:] == bare[place:] and bare[:place] == documents[0].tolist()[:place]
    for length in LENGTHS:
        for _ in range(4):
            passage = text[place : place + 32]
            assert passage == text[place - length * 3 // 4 :][:32]
            assert passage == other[(start := other.index(passage[0])) : start + 32]
            place += 32


def test_models_are_compared_by_document_and_seed():
    found = compared([[1.0, 2.0, None], [2.0, 5.0, None]], [[0.0, 1.0, 1.0], [1.0, 2.0, 1.0]])
    assert found.documents[:1] + found.documents[2:] == (1.5, 2) and found.seeds.mean == 1.5 and found.seeds.count == 2
    assert found.documents.half == pytest.approx(12.706 * 0.5, rel=1e-3) == found.seeds.half
    assert compared([], []) is None


def test_a_kept_run_is_measured_from_its_folder(tmp_path, call, capsys):
    from benchmarks.context_scaling.grid import DOCUMENT, SCALES, Run
    from benchmarks.context_scaling.work import Trainer

    corpus = random_corpus(tmp_path / "corpus", 4, 3, DOCUMENT // SCALES["toy"].shrink)
    run = Run("power", 4096)
    record = Trainer("toy", corpus, "cpu", measures=True, keep=tmp_path / "kept").prepare(0)(run)
    assert SCALES["toy"].steps == record["row"]["steps"] and len(record["use"]) == 5 * 3 + 2 * 3
    words = ["--runs", str(tmp_path / "kept" / run.name), "--corpus", str(corpus), "--device", "cpu",
             "--csv", str(tmp_path / "use.csv")]  # fmt: skip
    assert call(context_use, *words) == 0 and f"{run.name}: cut 1,024: " in capsys.readouterr().out
    rows = {(row["measure"], row["length"]): row for row in read(tmp_path / "use.csv")}
    for row in record["use"]:
        if (row["measure"], row["length"]) in rows and row["length"] in (0, 256, 1024):
            assert rows[row["measure"], row["length"]]["documents"] == row["documents"]
    assert call(context_use, "--runs", tmp_path / "none", *words[2:]) == 2 and "error: " in capsys.readouterr().err
