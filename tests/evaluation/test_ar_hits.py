"""AR hits: exact against brute force, slices that add up, shares of a gap with their intervals."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ar_hits import brute_force
from benchmarks.ar_hits.exact import Known, compare
from sympow.data import TokenCorpus
from sympow.evaluation import count_bigrams, gap_shares, hit_losses, plot_ar_hits
from sympow.evaluation.ar_hits import PARTS, bigram_distances, bootstrap_shares, published_share

VOCAB = 30


def corpus(documents: int, length: int, seed: int = 0) -> TokenCorpus:
    """Documents of tokens of which small ones are frequent, so that bigrams of all counts repeat."""
    rng = np.random.default_rng(seed)
    return TokenCorpus.from_documents(
        [np.minimum(rng.geometric(0.2, length) - 1, VOCAB - 1) for _ in range(documents)], VOCAB
    )


class Better(Known):
    """Loses `gain` nats less than `Known` where the target is `token`."""

    def __init__(self, gain, token):
        super().__init__()
        self.gain, self.token = gain, token

    def token_losses(self, tokens, targets):
        return super().token_losses(tokens, targets) - self.gain * (targets == self.token)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_distances_are_those_of_a_dictionary(row):
    assert bigram_distances(np.array([row]))[0].tolist() == brute_force.distances(row)


def test_a_bigram_may_overlap_its_earlier_self():
    assert bigram_distances(np.array([[5, 5, 5, 5, 6, 5, 6]])).tolist() == [[0, 1, 1, 0, 0, 2]]


@pytest.mark.parametrize("frequent", [0, 3, 40, 10_000])
def test_equals_brute_force(frequent):
    row = compare(corpus(8, 700), corpus(6, 500, seed=1), VOCAB, 2500, 99, frequent)
    assert row["tokens"] >= 2500 and row["cells"] > 50
    assert (row["wrong_counts"], row["largest_difference_tokens"]) == (0, 0)
    assert row["largest_difference_nats"] < 1e-9 and row["slices_less_whole_nats"] < 1e-12


def test_brute_force_by_hand():
    """In 1 2 1 2 3 the bigram 1 2 comes again, two tokens later; training holds it twice."""
    counts = brute_force.count([np.array([1, 2, 9, 1, 2])])
    found = brute_force.tally([[1, 2, 1, 2, 3]], [[1.0, 2.0, 4.0, 8.0]], counts, 2)
    assert found["hits"] == found["distance 2"] == found["count 2"] == (1, 4.0)
    assert found["new"] == (3, 11.0)
    assert brute_force.tally([[1, 2, 1, 2, 3]], [[1.0, 2.0, 4.0, 8.0]], counts, 1)["frequent"] == (1, 4.0)


def test_rates_are_of_the_tokens_that_have_so_many_before_them():
    """Rows of one token alone: every bigram but the first ended one token before."""
    texts = TokenCorpus.from_documents([np.full(9, n) for n in range(3)], VOCAB)
    counts = count_bigrams(texts, VOCAB)
    found = hit_losses(Known(), texts, counts, 8, 3)
    assert found.rows == 3
    assert [cell.tokens for cell in found.by_distance()] == [21, 0, 0]
    assert found.distance_rates() == [1.0, 0.0, 0.0]
    assert math.isnan(found.distance_law()[1])


def test_the_power_law_of_distances_is_found():
    context, texts = 256, []
    rng = np.random.default_rng(0)
    for _ in range(400):  # a bigram of its own twice, at a distance drawn as 1 / d**2, in a row without repeats
        distance = int(min(2 / (1 - rng.random()), 120))
        row = rng.permutation(60_000)[: context + 1]
        row[[10, 10 + distance]], row[[11, 11 + distance]] = 60_001, 60_002
        texts.append(row)
    documents = TokenCorpus.from_documents(texts, 60_003)
    found = hit_losses(Known(), documents, count_bigrams(documents, 60_003), context, 400)
    assert 300 < found.slice("hits").tokens <= 400
    assert found.distance_law()[1] == pytest.approx(2, abs=0.4)


def test_the_gap_lies_where_the_models_differ():
    held_out, counts = corpus(6, 500, seed=1), count_bigrams(corpus(8, 700), VOCAB)
    base = hit_losses(Better(2.0, 12), held_out, counts, 99, 100, frequent=40)
    ours = hit_losses(Known(), held_out, counts, 99, 100, frequent=40)
    shares = gap_shares(ours, base)
    differing = base.slice("all").tokens
    whole = 2.0 * sum(int((held_out[i][1:] == 12).sum()) for i in range(len(held_out)))
    assert shares["all"].nats * differing == pytest.approx(whole, rel=0.1)  # windows leave the documents' ends out
    assert shares["frequent"].nats == 0
    assert sum(shares[part].share for part in PARTS) == pytest.approx(1)
    for share in shares.values():
        assert share.nats_low <= share.nats <= share.nats_high and share.share_low <= share.share <= share.share_high
    assert gap_shares(ours, base) == shares
    other = hit_losses(Known(), held_out, counts, 99, 10, frequent=40)
    with pytest.raises(ValueError, match="the gap of two models is that on the same rows"):
        gap_shares(ours, other)


def test_intervals_cover_the_truth():
    """What documents were drawn around lies in about 95% of the intervals, of 60; wider ones would hold it always."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        noise = rng.normal(1.0, 0.5, (1, 40, 1))
        tokens = np.full((1, 40, 2), 10.0)
        share = bootstrap_shares(tokens, np.concatenate([noise + 1, noise], axis=-1), draws=300)[1]
        covered += share.nats_low <= 0.1 <= share.nats_high
    assert 50 <= covered < 60


def test_shares_by_the_rule_of_the_source():
    assert published_share(0.08, 0.1) == pytest.approx(0.8)
    assert published_share(0.2, 0.1) == 1
    assert published_share(0.01, -0.1) == 1  # ahead on all tokens, behind on the hits
    assert math.isnan(published_share(-0.01, -0.1))


def test_what_cannot_be_measured_is_refused():
    texts = corpus(2, 50)
    counts = count_bigrams(texts, VOCAB)
    with pytest.raises(ValueError, match="frequent must be at least 0, got -1"):
        hit_losses(Known(), texts, counts, 9, frequent=-1)
    with pytest.raises(ValueError, match=re.escape("a slice is one of all, hits, other, frequent, new; got 'repeats'")):
        hit_losses(Known(), texts, counts, 9).slice("repeats")
    with pytest.raises(ValueError, match="at least one run"):
        plot_ar_hits({}, "nowhere.png")


def test_the_model_is_left_as_it_was():
    texts = corpus(2, 50)
    model = Known().train()
    hit_losses(model, texts, count_bigrams(texts, VOCAB), 9)
    assert model.training and torch.is_grad_enabled()
