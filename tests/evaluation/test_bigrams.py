"""Counts of bigrams: those of a dictionary, however the corpus is cut into blocks."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sympow.data import TokenCorpus
from sympow.evaluation import bigrams, count_bigrams
from sympow.evaluation.bigrams import BigramCounts


def by_dictionary(documents) -> Counter:
    return Counter(pair for text in documents for pair in pairwise(text))


@given(
    documents=st.lists(st.lists(st.integers(0, 6), max_size=30), min_size=1, max_size=8),
    block=st.sampled_from([1, 2, 7, 1 << 20]),
    vocab_size=st.sampled_from([7, 1 << 16, (1 << 16) + 1, 100_000]),
)
def test_counts_are_those_of_a_dictionary(documents, block, vocab_size):
    if not any(documents):
        return
    corpus = TokenCorpus.from_documents([np.array(text, np.int64) for text in documents], vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigrams, "BLOCK", block)
        counts = count_bigrams(corpus, vocab_size)
    expected = by_dictionary(documents)
    first, second = np.meshgrid(np.arange(7), np.arange(7), indexing="ij")
    wanted = [[expected[i, j] for j in range(7)] for i in range(7)]
    assert counts.lookup(first, second).tolist() == wanted
    assert len(counts.keys) == len(expected)
    assert counts.tokens == sum(map(len, documents))


def test_the_largest_tokens_have_keys_of_their_own():
    vocab_size = 1 << 16
    text = np.array([vocab_size - 1, vocab_size - 1, 0, vocab_size - 1, vocab_size - 1], np.uint16)
    counts = count_bigrams(TokenCorpus.from_documents([text], vocab_size), vocab_size)
    assert counts.lookup(text[:-1], text[1:]).tolist() == [2, 1, 1, 2]
    assert counts.lookup(np.array([0]), np.array([0])).tolist() == [0]


def test_some_tokens_are_those_of_evenly_spaced_documents():
    corpus = TokenCorpus.from_documents([np.full(10, i) for i in range(9)], 9)
    counts = count_bigrams(corpus, 9, tokens=30)
    assert counts.tokens == 30
    assert counts.lookup(np.arange(9), np.arange(9)).tolist() == [9, 0, 0, 0, 9, 0, 0, 0, 9]
    assert count_bigrams(corpus, 9, tokens=1000).tokens == 90


def test_what_cannot_be_counted_is_refused():
    corpus = TokenCorpus.from_documents([np.array([1, 8])], 9)
    with pytest.raises(ValueError, match="document 0 holds tokens 1 to 8, of 5"):
        count_bigrams(corpus, 5)
    with pytest.raises(ValueError, match="tokens to count bigrams in must be at least 1, got 0"):
        count_bigrams(corpus, 9, tokens=0)
    with pytest.raises(ValueError, match="vocab_size must be from 1"):
        count_bigrams(corpus, 1 << 31)


def test_an_empty_table_knows_no_bigram():
    counts = BigramCounts(np.empty(0, np.uint32), np.empty(0, np.int64), 5, 0)
    assert counts.lookup(np.array([1, 2]), np.array([3, 4])).tolist() == [0, 0]


def test_tokens_of_another_vocabulary_are_refused():
    counts = BigramCounts(np.array([52], np.uint32), np.array([3]), 50, 9)  # of the bigram (1, 2)
    assert counts.lookup(np.array([1]), np.array([2])).tolist() == [3]
    with pytest.raises(ValueError, match="of a vocabulary of 50 tokens; got tokens from 52 to 52"):
        counts.lookup(np.array([0]), np.array([52]))
